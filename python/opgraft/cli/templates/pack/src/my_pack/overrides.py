"""Which ops, for which calls.

An override has two conditions, which see dtypes, shapes, strides and numbers of a call, never
values, and are decided before anything runs. `cond=` says for which calls it is right: its author
knows that. `crossover=` says for which it is faster: `opgraft tune` measures that. The arguments
are named as the op's schema names them: `print(torch.ops.aten._softmax.default._schema)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import opgraft
import torch
from opgraft import triton_utils, when

# One row is one block of the kernel.
MAX_COLUMNS = 16384


def softmax(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """`aten::_softmax` over the last dimension: what `torch.softmax` and `F.softmax` call."""
    from my_pack.triton_kernels import softmax_last_dimension

    return softmax_last_dimension(self)


def right(dispatch_key: str) -> when.Condition:
    """The calls that the kernel computes right. What it takes for granted stands here."""
    floats = [torch.float32, torch.float16]
    if dispatch_key != "CPU":  # the interpreter computes bfloat16 wrongly, without a word
        floats.append(torch.bfloat16)
    return (
        when.dtype("self", *floats)
        & (when.ndim("self") >= 1)
        & ((when.value("dim") == -1) | (when.value("dim") == when.ndim("self") - 1))
        & (when.value("half_to_float") == False)  # noqa: E712 - a condition, not a comparison
        & when.is_contiguous("self")
        & (when.numel("self") > 0)  # an empty grid is a launch error
        & (when.size("self", -1) <= MAX_COLUMNS)
    )


def calls(
    device: torch.device, *, rows: int, columns: int, dtype: torch.dtype
) -> Iterator[tuple[Any, ...]]:
    """Calls with these features, for `opgraft tune`."""
    yield torch.randn(rows, columns, dtype=dtype, device=device), -1, False


# On what it depends whether the kernel is faster than PyTorch's own. The tables, one for each model
# of GPU, say where it is. Without one for the GPU at hand, or for one like it, the override takes
# no call.
CROSSOVER = opgraft.Crossover(
    rows=when.numel("self") // when.size("self", -1),
    columns=when.size("self", -1),
    dtype=when.dtype_of("self"),
    calls=calls,
    ranges={
        "rows": (1, 2**20),
        "columns": (64, MAX_COLUMNS),
        "dtype": (torch.float32, torch.float16, torch.bfloat16),
    },
    tables=Path(__file__).parent / "tables",
    # Raise it when the kernel becomes faster or slower: tables of another version do not count.
    version=1,
)


def register_softmax(
    dispatch_key: str, crossover: opgraft.Crossover | None = CROSSOVER
) -> opgraft.Override:
    """Register :func:`softmax` at a dispatch key, `"CUDA"` or `"CPU"`.

    Without a crossover it takes every call that it is right for.
    """
    return triton_utils.register_op_override(
        "aten",
        "_softmax",
        dispatch_key,
        softmax,
        cond=right(dispatch_key),
        crossover=crossover,
        name="my_pack.softmax",
    )
