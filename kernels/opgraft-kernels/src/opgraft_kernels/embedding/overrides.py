"""The override of the op that the backward of ``F.embedding`` calls; `register` puts it there.

Nothing here imports Triton: the first call that the condition wants does.
"""

from __future__ import annotations

from typing import Any

import torch

from opgraft import Crossover, Override, lazy, when
from opgraft_kernels.conditions import triton_computes
from opgraft_kernels.crossovers import aligned_widths, crossover_of, features_of_rows
from opgraft_kernels.registration import register_op
from opgraft_kernels.samples import MEASURED, Calls, dtypes_and_float64_on, tensor_of

__all__ = ["VERSION", "condition", "register"]


def condition(dispatch_key: str) -> Any:
    """Which calls go to Triton at `dispatch_key`."""
    tokens, num_weights = when.numel("indices"), when.value("num_weights")
    return (
        triton_computes("grad_output", dispatch_key)
        & when.dtype("indices", torch.int64, torch.int32)
        & when.same_device("grad_output", "indices")
        # An empty grid is a launch error.
        & (when.numel("grad_output") > 0)
        & (num_weights > 0)
        # Fewer gradients would be read out of bounds.
        & (when.numel("grad_output") == tokens * when.size("grad_output", -1))
        # Tokens and rows are counted with 32 bits; tokens are rounded up to whole chunks.
        & (tokens <= 2**30)
        & (num_weights <= 2**30)
    )


#: The shape of the indices, the number of rows, the width, and what is particular.
_CASES: tuple[tuple[tuple[int, ...], int, int, str], ...] = (
    # Rows that share a program, that fit one, and that are split over programs; odd sizes of each.
    ((60,), 90, 16, ""),
    ((4, 10), 20, 100, ""),
    ((30,), 9, 2500, ""),
    ((3, 3, 3), 5, 1, ""),
    ((), 10, 8, ""),
    # Chunks that are merged, and spans of one row.
    ((140,), 20, 33, ""),
    ((140,), 1, 8, ""),
    ((140,), 20, 8, "one row"),
    ((100,), 20, 8, "padded"),
    ((64,), 20, 8, "int32"),
    ((100,), 20, 8, "padded, scaled"),
    ((32,), 10, 24, "expanded"),
    ((32,), 10, 24, "transposed"),
    ((32,), 10, 24, "NaN"),
    # Native's.
    ((0,), 10, 8, ""),
)
#: At no width native's kernel for CUDA accesses memory out of bounds, and the device is lost.
_CPU_CASES = (((4,), 10, 0, ""),)
#: What would take the interpreter minutes.
_LARGE_CASES = (
    ((16384,), 50257, 64, ""),
    ((16384,), 50257, 64, "one row"),
    ((4096,), 1000, 1001, "padded, scaled"),
)
#: No more elements of either tensor are measured: there are several calls at once.
_LARGEST = 2**30


def samples(device: torch.device) -> Calls:
    """Calls of the op, as arguments by name.

    Args:
        device: where the tensors are to live.
    """
    cases = _CASES + (_CPU_CASES if device.type == "cpu" else _LARGE_CASES)
    for shape, num_weights, width, particular in cases:
        for dtype in dtypes_and_float64_on(device):
            indices = torch.randint(num_weights, shape, device=device)
            if particular == "one row":
                indices.fill_(num_weights // 2)
            yield {
                "grad_output": tensor_of((*shape, width), particular, dtype, device),
                "indices": indices.int() if particular == "int32" else indices,
                "num_weights": num_weights,
                "padding_idx": 3 if "padded" in particular else -1,
                "scale_grad_by_freq": "scaled" in particular,
            }


def calls(
    device: torch.device,
    *,
    tokens: int,
    width: int,
    num_weights: int,
    itemsize: int,
    misalignment: int,
) -> Calls:
    """A call to measure, as arguments by name; none if there is no such call, or it is too large.

    Rows are as frequent as words are: the n-th a half as often as that at n / 2.

    Args:
        device: where the tensors are to live.
        tokens: the number of indices.
        width: of a row, at least; less than twice as many.
        num_weights: the number of rows.
        itemsize: bytes of an element.
        misalignment: of a row; see `crossovers`.
    """
    found = next(aligned_widths(width, itemsize, misalignment), None)
    if found is None or max(tokens, num_weights) * found > _LARGEST:
        return
    dtype = MEASURED[itemsize]
    drawn = num_weights ** torch.rand(tokens, dtype=torch.float64, device=device)
    yield {
        "grad_output": torch.randn(tokens, found, dtype=dtype, device=device),
        "indices": drawn.long() - 1,
        "num_weights": num_weights,
        "padding_idx": -1,
        "scale_grad_by_freq": False,
    }


#: Of the kernels: raised when they become faster or slower. A test says when they change.
VERSION = 2


def _crossover() -> Crossover | None:
    """On what it depends whether the kernels are faster than ATen's."""
    width = when.size("grad_output", -1)
    return crossover_of(
        calls,
        VERSION,
        sizes={
            "tokens": (when.numel("indices"), 2**8, 2**18),
            "width": (width, 2**6, 2**13),
            "num_weights": (when.value("num_weights"), 2**9, 2**18),
        },
        # Hardly an embedding has a width of another alignment: native computes those.
        exact=features_of_rows("grad_output", width, misalignments=(0,)),
        # More are sorted in more than linear time.
        bounded=["tokens"],
    )


def register(dispatch_key: str) -> list[Override]:
    """Register the op at `dispatch_key`: ``"CUDA"``, or ``"CPU"`` (the interpreter)."""
    override = register_op(
        "embedding_dense_backward",
        dispatch_key,
        lazy("opgraft_kernels.embedding.triton_kernels:embedding_dense_backward"),
        name="embedding.backward",
        cond=condition(dispatch_key),
        crossover=_crossover,
        samples=samples,
    )
    return [override]
