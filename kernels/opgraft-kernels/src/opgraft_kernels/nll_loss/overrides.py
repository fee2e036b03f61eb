"""The overrides of the two ops that ``F.nll_loss`` calls; `register` puts them there.

Nothing here imports Triton: the first call that a condition wants does.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Literal, TypeAlias

import torch

from opgraft import Crossover, Override, lazy, when
from opgraft_kernels.conditions import triton_computes
from opgraft_kernels.cross_entropy import ops
from opgraft_kernels.cross_entropy.overrides import (
    class_indices,
    class_weights,
    dense_rows,
    is_matrix,
)
from opgraft_kernels.cross_entropy.samples import KINDS, Case, gradient_of, sample_of
from opgraft_kernels.crossovers import aligned_widths, crossover_of
from opgraft_kernels.registration import register_op
from opgraft_kernels.samples import MEASURED, Calls, dtypes_and_float64_on

__all__ = ["DIRECTIONS", "VERSIONS", "Direction", "condition", "register"]

Direction: TypeAlias = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


def condition(direction: Direction, dispatch_key: str) -> Any:
    """Which calls of the negative log-likelihood go to Triton: class indices of a matrix."""
    classes = when.size("self", -1)
    wanted = (
        triton_computes("self", dispatch_key)
        # Native's mean of one row does not divide by its weight, which may be 0.
        & is_matrix()
        & class_indices(classes)
        & (when.is_none("weight") | class_weights(classes))
    )
    if direction == "forward":
        return wanted & dense_rows(classes)
    is_summed = when.value("reduction") != ops.NONE
    return (
        wanted
        & when.same_dtype("self", "grad_output")
        & when.same_device("self", "grad_output")
        & when.same_dtype("self", "total_weight")
        & when.same_device("self", "total_weight")
        & (when.numel("total_weight") == 1)
        # Fewer elements would be read out of bounds.
        & ((when.numel("grad_output") == when.numel("target")) | is_summed)
        & ((when.numel("grad_output") == 1) | ~is_summed)
        # A number is no gradient of one row: native's error.
        & ((when.ndim("grad_output") == 1) | (is_summed & (when.ndim("grad_output") == 0)))
    )


_CASES: tuple[Case, ...] = (
    # Blocks that hold rows, and rows that hold blocks; more rows than a program adds up.
    ((15, 100), ""),
    ((5, 1), ""),
    ((2, 40000), ""),
    ((3000, 7), ""),
    ((40, 200), "ignored"),
    ((4, 100), "all ignored"),
    ((64, 200), "masked"),
    ((64, 200), "NaN"),
    ((32, 200), "sliced"),
    # Native's.
    ((100,), ""),
    ((8, 20), "transposed"),
    ((0, 16), ""),
)
#: No more elements are measured: there are several calls at once.
_LARGEST = 2**30


def samples(direction: str, device: torch.device) -> Calls:
    """Calls of the ops of the negative log-likelihood.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        device: where the tensors are to live.
    """
    for case, dtype, kind in itertools.product(_CASES, dtypes_and_float64_on(device), KINDS):
        yield _call(direction, sample_of(case, dtype, kind, device))


def _call(direction: str, sample: dict[str, Any]) -> dict[str, Any]:
    """A call of the forward like one of cross-entropy, or of the backward of what it returns."""
    del sample["label_smoothing"]
    if direction == "forward":
        return sample
    loss, total_weight = torch.ops.aten.nll_loss_forward(*sample.values())
    return {"grad_output": gradient_of(loss), **sample, "total_weight": total_weight}


def calls(
    direction: str, device: torch.device, *, rows: int, classes: int, itemsize: int, is_summed: int
) -> Calls:
    """A call to measure, as arguments by name; none if there is no such call, or it is too large.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        device: where the tensors are to live.
        rows: of the log-probabilities.
        classes: at least; less than twice as many.
        itemsize: bytes of an element.
        is_summed: whether the rows' losses are added up.
    """
    width = next(aligned_widths(classes, itemsize, 0), classes)
    if rows * width <= _LARGEST:
        case, kind = ((rows, width), ""), (is_summed, 0.0, False)
        yield _call(direction, sample_of(case, MEASURED[itemsize], kind, device))


#: Of the kernels: raised when they become faster or slower. A test says when they change.
VERSIONS: dict[Direction, int] = {"forward": 3, "backward": 4}


def _crossover(direction: Direction) -> Crossover | None:
    """On what it depends whether the kernels are faster than ATen's."""
    return crossover_of(
        functools.partial(calls, direction),
        VERSIONS[direction],
        sizes={
            # The forward reads an element a row, the backward writes all.
            "rows": (when.numel("target"), 2**4, 2**22),
            "classes": (when.size("self", -1), 2**1, 2**17),
        },
        exact={
            "itemsize": (when.itemsize("self"), 2, 4),
            # Native has as many threads as rows where it adds nothing up.
            "is_summed": ((when.value("reduction") + 1) // 2, 0, 1),
        },
    )


def register(dispatch_key: str, *, by_table: bool = True) -> list[Override]:
    """Register the two ops at `dispatch_key`: ``"CUDA"``, or ``"CPU"`` (the interpreter).

    Args:
        dispatch_key: where.
        by_table: as `register_op` has it.
    """
    return [
        register_op(
            f"nll_loss_{direction}",
            dispatch_key,
            lazy(f"opgraft_kernels.nll_loss.triton_kernels:{direction}"),
            name=f"nll_loss.{direction}",
            cond=condition(direction, dispatch_key),
            crossover=functools.partial(_crossover, direction),
            by_table=by_table,
            samples=functools.partial(samples, direction),
        )
        for direction in DIRECTIONS
    ]
