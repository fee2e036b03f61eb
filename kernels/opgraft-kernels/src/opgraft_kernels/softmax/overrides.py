"""Overrides of the ops that ``F.softmax`` and ``F.log_softmax`` call; `register` puts them there.

Nothing here imports Triton: the first call that a condition wants does.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from opgraft import Crossover, Override, lazy, when
from opgraft_kernels.conditions import triton_computes
from opgraft_kernels.crossovers import crossover_of, features_of_rows
from opgraft_kernels.registration import register_op

__all__ = ["OPS", "Op", "condition", "register"]

Direction: TypeAlias = Literal["forward", "backward"]


class Op(NamedTuple):
    """An op in ``aten``."""

    name: str
    function: str
    direction: Direction
    #: Of the kernel: raised when it becomes faster or slower. A test says when it changes.
    version: int

    @property
    def normalized(self) -> str:
        """The argument whose shape and dtype say what there is to do."""
        return "self" if self.direction == "forward" else "output"


OPS = (
    Op("_softmax", "softmax", "forward", version=11),
    Op("_log_softmax", "log_softmax", "forward", version=12),
    Op("_softmax_backward_data", "softmax", "backward", version=10),
    Op("_log_softmax_backward_data", "log_softmax", "backward", version=11),
)


# --------------------------------------------------------------------------------------------------
# Conditions
# --------------------------------------------------------------------------------------------------


def condition(op: Op, dispatch_key: str) -> Any:
    """Which calls of an op go to Triton at `dispatch_key`."""
    t = op.normalized
    # Undefined, and native's, for a tensor without dimensions and for a `dim` that it has not.
    size = when.size(t, when.value("dim"))
    wanted = (
        triton_computes(t, dispatch_key)
        # An empty grid is a launch error.
        & (when.numel(t) > 0)
        # Elements of a row are indexed with 32 bits, padded to a power of two.
        & (size <= 2**30)
        # Strides say what there is to do, see `_crossover`. Others are copied first, by native too.
        & (
            when.is_contiguous(t)
            | ((when.dim("dim", t) == -1) & ((when.stride(t, -1) == 1) | (size == 1)))
        )
    )
    if op.direction == "forward":
        keeps_dtype: Any = when.value("half_to_float") == False  # noqa: E712
        if dispatch_key == "CUDA":  # native refuses it on the CPU, and of bfloat16
            keeps_dtype = keeps_dtype | when.dtype("self", torch.float16)
        return wanted & keeps_dtype
    return (
        wanted
        & when.same_dtype("grad_output", "output")
        & when.same_device("grad_output", "output")
        # Fewer elements would be read out of bounds.
        & (when.numel("grad_output") == when.numel("output"))
        & (when.size("grad_output", when.value("dim")) == size)
        & _input_dtype(dispatch_key)
    )


def _input_dtype(dispatch_key: str) -> Any:
    """The gradient has the output's dtype, or is float16 where the forward was `half_to_float`."""
    half = (torch.float16, torch.float32) if dispatch_key == "CUDA" else (torch.float16,)
    outputs = {torch.float32: (torch.float32,), torch.bfloat16: (torch.bfloat16,)}
    allowed = (
        (when.value("input_dtype") == dtype) & when.dtype("output", *each)
        for dtype, each in {**outputs, torch.float16: half}.items()
    )
    return functools.reduce(operator.or_, allowed)


# --------------------------------------------------------------------------------------------------
# Registration
# --------------------------------------------------------------------------------------------------


def _crossover(op: Op) -> Crossover:
    """On what it depends whether a kernel is faster than ATen's."""
    t = op.normalized
    size, inner = when.size(t, when.value("dim")), when.stride(t, when.value("dim"))
    # What is contiguous and begins anywhere: a row, or the elements of other lines beside one.
    segment = inner + 1 // inner * (size - 1)
    return crossover_of(
        functools.partial(lazy("opgraft_kernels.softmax.samples:calls"), op),
        op.version,
        sizes={
            "elements": (when.numel(t), 2**14, 2**27),
            "size": (size, 2**4, 2**17),
            "inner": (inner, 1, 2**8),
        },
        exact=features_of_rows(t, segment),
    )


def register(dispatch_key: str) -> list[Override]:
    """Register the four ops at `dispatch_key`: ``"CUDA"``, or ``"CPU"`` (the interpreter)."""
    return [
        register_op(
            op.name,
            dispatch_key,
            lazy(f"opgraft_kernels.softmax.triton_kernels:{op.function}_{op.direction}"),
            name=f"{op.function}.{op.direction}",
            cond=condition(op, dispatch_key),
            crossover=functools.partial(_crossover, op),
            samples=functools.partial(lazy("opgraft_kernels.softmax.samples:samples"), op),
        )
        for op in OPS
    ]
