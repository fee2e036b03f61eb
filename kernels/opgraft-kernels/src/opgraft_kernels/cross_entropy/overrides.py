"""The overrides of the op that ``F.cross_entropy`` calls, and of the two ops that it is made of.

Nothing here imports Triton: the first call of those two that runs in Python does.
"""

from __future__ import annotations

from typing import Any

import torch

from opgraft import Crossover, Override, lazy, when
from opgraft_kernels.conditions import triton_computes
from opgraft_kernels.cross_entropy import ops
from opgraft_kernels.crossovers import crossover_of, features_of_rows
from opgraft_kernels.registration import register_op

__all__ = [
    "VERSION",
    "backward_condition",
    "class_indices",
    "class_weights",
    "condition",
    "dense_rows",
    "is_matrix",
    "register",
]


def condition(dispatch_key: str) -> Any:
    """Which calls go to Triton at `dispatch_key`: class indices of a matrix, or of one row."""
    classes = when.size("self", -1)
    is_row = (
        (when.ndim("self") == 1)
        & (when.ndim("target") == 0)
        # On a GPU native's mean of a single row is 0 where that is ignored, of a matrix 0 / 0.
        & (when.value("reduction") != ops.MEAN)
    )
    return (
        triton_computes("self", dispatch_key)
        # More dimensions have classes that are strided. Probabilities as targets are floats.
        & (is_row | is_matrix())
        & class_indices(classes)
        & dense_rows(classes)
        # Label smoothing has a derivative by the weights, too.
        & (when.is_none("weight") | (class_weights(classes) & ~when.requires_grad("weight")))
        # Native takes a negative smoothing for none, and others for errors.
        & (when.value("label_smoothing") >= 0)
        & (when.value("label_smoothing") <= 1)
    )


def is_matrix() -> Any:
    """Whether each row has a class."""
    return (
        (when.ndim("self") == 2)
        & (when.ndim("target") == 1)
        & (when.size("target", 0) == when.size("self", 0))
    )


def class_indices(classes: Any) -> Any:
    """Whether targets are class indices, and there is such a reduction."""
    return (
        when.dtype("target", torch.int64)
        & when.same_device("self", "target")
        # An empty grid is a launch error.
        & (when.numel("self") > 0)
        # Elements of a row are indexed with 32 bits, padded to a power of two.
        & (classes <= 2**30)
        # Others are native's errors.
        & (when.value("reduction") >= 0)
        & (when.value("reduction") <= 2)
    )


def dense_rows(classes: Any) -> Any:
    """Whether rows are read where they are: others would be copied."""
    return (when.stride("self", -1) == 1) | (classes == 1)


def class_weights(classes: Any) -> Any:
    """Whether there is a weight for each class."""
    return (
        when.same_dtype("self", "weight")
        & when.same_device("self", "weight")
        & (when.ndim("weight") == 1)
        & (when.numel("weight") == classes)
        & when.is_contiguous("weight")
    )


def backward_condition(dispatch_key: str) -> Any:
    """Which backwards go to Triton: those of the calls that do, with what a forward returned."""
    rows = when.numel("target")
    is_mean = when.value("reduction") == ops.MEAN
    return (
        condition(dispatch_key)
        & when.dtype("grad_loss", torch.float32, torch.float16, torch.bfloat16)
        & when.same_device("self", "grad_loss")
        & when.same_device("self", "statistics")
        & when.same_device("self", "mass")
        # Fewer elements would be read out of bounds.
        & ((when.numel("grad_loss") == rows) | (when.value("reduction") != ops.NONE))
        & ((when.ndim("grad_loss") == 0) | (when.value("reduction") == ops.NONE))
        & (when.ndim("grad_loss") <= 1)
        & when.dtype("statistics", torch.float32)
        & when.is_contiguous("statistics")
        & (when.numel("statistics") == 2 * rows)
        & when.dtype("mass", torch.float32)
        & ((when.numel("mass") == 1) | ~is_mean)
    )


#: Of the kernels: raised when they become faster or slower. A test says when they change.
VERSION = 8


def _crossover() -> Crossover | None:
    """On what it depends whether the kernels are faster than ATen's."""
    classes = when.size("self", -1)
    return crossover_of(
        lazy("opgraft_kernels.cross_entropy.samples:calls"),
        VERSION,
        sizes={"elements": (when.numel("self"), 2**14, 2**27), "classes": (classes, 2**4, 2**18)},
        exact=features_of_rows("self", classes),
    )


def register(dispatch_key: str, *, by_table: bool = True) -> list[Override]:
    """Register the three ops at `dispatch_key`: ``"CUDA"``, or ``"CPU"`` (the interpreter).

    Args:
        dispatch_key: where.
        by_table: as `register_op` has it, of the loss.
    """
    samples = "opgraft_kernels.cross_entropy.samples"
    of_loss = register_op(
        "cross_entropy_loss",
        dispatch_key,
        ops.cross_entropy_loss,
        name="cross_entropy",
        cond=condition(dispatch_key),
        crossover=_crossover,
        by_table=by_table,
        samples=lazy(f"{samples}:samples"),
        autograd="impl",
        # Inductor fuses the logits' last operation with both passes over them.
        compile="inductor",
        # The ops that it calls have plans of their own.
        launch_plan=False,
    )
    parts = (
        (ops.FORWARD, "forward", condition),
        (ops.BACKWARD, "backward", backward_condition),
    )
    of_parts = [
        register_op(
            op,
            dispatch_key,
            lazy(f"opgraft_kernels.cross_entropy.triton_kernels:{direction}"),
            name=f"cross_entropy.{direction}",
            cond=wanted(dispatch_key),
            namespace=ops.NAMESPACE,
            samples=lazy(f"{samples}:{direction}_samples"),
        )
        for op, direction, wanted in parts
    ]
    return [of_loss, *of_parts]
