"""Overrides of the ops that ``F.rms_norm`` and ``F.layer_norm`` call; `register` puts them there.

What the two norms differ in is data, `RMS_NORM` and `LAYER_NORM`; the conditions below are written
once for both. There are kernels in Triton and, for long rows that a cluster of Hopper's blocks
shares, in CuteDSL. Nothing here imports either DSL: the first call that a condition wants does.
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

__all__ = [
    "DIRECTIONS",
    "LAYER_NORM",
    "RMS_NORM",
    "Norm",
    "cluster_condition",
    "condition",
    "impl",
    "permuted_condition",
    "register",
]

Direction: TypeAlias = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
Kernels: TypeAlias = Literal["triton_kernels", "triton_permuted", "cutedsl_kernels"]
#: What is measured of features: the smallest and the largest number.
_Sizes: TypeAlias = dict[str, tuple[int, int]]


class Op(NamedTuple):
    """A norm's forward or backward op in ``aten``."""

    name: str
    #: The widths of rows that there are kernels over clusters for.
    clusters: tuple[int, ...]
    #: Of Triton's kernels: raised when they become faster or slower. A test says when they change.
    version: int = 2


class Norm(NamedTuple):
    """What is particular about a norm."""

    name: str
    #: The arguments that have one element a column, or are None.
    parameters: tuple[str, ...]
    #: What the forward returns for the backward, one float32 a row each.
    statistics: tuple[str, ...]
    #: What the interpreter, on the CPU, agrees with native in.
    cpu_dtypes: tuple[torch.dtype, ...]
    forward: Op
    backward: Op

    def op(self, direction: Direction) -> Op:
        return self.forward if direction == "forward" else self.backward


RMS_NORM = Norm(
    "rms_norm",
    parameters=("weight",),
    statistics=("rstd",),
    # The interpreter computes on the bits of bfloat16 and returns garbage without a word.
    cpu_dtypes=(torch.float32, torch.float16),
    forward=Op("_fused_rms_norm", (65536, 131072), version=6),
    backward=Op("_fused_rms_norm_backward", (32768, 65536, 131072), version=8),
)

LAYER_NORM = Norm(
    "layer_norm",
    parameters=("weight", "bias"),
    statistics=("mean", "rstd"),
    # On the CPU native keeps mean and rstd of 16-bit inputs in 16 bits, the kernels do not.
    cpu_dtypes=(torch.float32,),
    forward=Op("native_layer_norm", (16384, 32768, 65536, 131072), version=11),
    backward=Op("native_layer_norm_backward", (16384, 32768, 65536, 131072), version=8),
)


# --------------------------------------------------------------------------------------------------
# Conditions
# --------------------------------------------------------------------------------------------------


def condition(norm: Norm, direction: Direction, dispatch_key: str) -> Any:
    """Which calls of a norm's op go to Triton at `dispatch_key`."""
    return _device(norm, dispatch_key) & _valid(norm, direction)


def cluster_condition(norm: Norm, direction: Direction) -> Any:
    """Which calls of a norm's op go to CuteDSL, at the CUDA key."""
    widths = norm.op(direction).clusters
    wanted = (
        # First what is false of most rows.
        (when.size("input", -1) >= min(widths))
        & functools.reduce(operator.or_, (when.size("input", -1) == width for width in widths))
        & (when.device_capability("input") == (9, 0))
        & when.dtype("input", torch.float16, torch.bfloat16)
        & _loads_by_16_bytes("input")
    )
    if direction == "forward":
        for name in norm.parameters:
            wanted = wanted & (when.is_none(name) | _loads_by_16_bytes(name))
    else:
        wanted = (
            wanted
            & _loads_by_16_bytes("grad_out")
            # The bias is not read.
            & (when.is_none("weight") | _loads_by_16_bytes("weight"))
            # It is what the kernel reads a row for.
            & (when.item("output_mask", 0) == 1)
        )
        for name in norm.statistics:
            wanted = wanted & when.is_contiguous(name)
    return wanted & _valid(norm, direction)


def permuted_condition(norm: Norm, direction: Direction, dispatch_key: str) -> Any:
    """Which calls go to the kernels for rows whose elements are far apart in memory."""
    hidden = when.size("input", -1)
    return (
        # First what is false of most inputs.
        (when.stride("input", -1) > 1)
        # A program holds whole rows.
        & (hidden >= _PERMUTED_HIDDEN[direction][0])
        & (hidden <= _PERMUTED_HIDDEN[direction][1])
        # Rows are counted with 32 bits.
        & (when.numel("input") // hidden <= 2**30)
        & condition(norm, direction, dispatch_key)
    )


@functools.cache  # the overrides of one op share it
def _valid(norm: Norm, direction: Direction) -> Any:
    """The shapes, dtypes and devices that the kernels trust; native answers elsewhere."""
    hidden = when.size("input", -1)
    valid = (
        # One normalised dimension, as in every model that we know of. Triton's kernels could take
        # several as one, but a condition for each number of them would cost every call, and no
        # failure would be legible.
        (when.length("normalized_shape") == 1)
        # Any other shapes would be read out of bounds; native raises its error for them.
        & (when.item("normalized_shape", 0) == hidden)
        # Columns are indexed with 32 bits, padded to a power of two.
        & (hidden <= 2**30)
        # An empty grid is a launch error, and the mean over no elements is native's to define.
        & (when.numel("input") > 0)
    )
    for name in norm.parameters:
        valid = valid & (
            when.is_none(name)
            | (
                (when.ndim(name) == 1)
                & (when.size(name, 0) == hidden)
                # Native has its own answer to mixed dtypes; the kernels would round where it does
                # not.
                & when.same_dtype("input", name)
                # A pointer to another device's memory faults, and takes the context with it.
                & when.same_device("input", name)
            )
        )
    if direction == "forward":
        return valid
    for name in norm.statistics:
        # One float32 a row: fewer would be read out of bounds, another dtype as garbage.
        valid = (
            valid
            & when.dtype(name, torch.float32)
            & (when.numel(name) * hidden == when.numel("input"))
        )
    return (
        valid
        & (when.numel("grad_out") == when.numel("input"))
        & when.same_dtype("input", "grad_out")
        & when.same_device("input", "grad_out", *norm.statistics)
    )


#: The widths of rows that the kernels for permuted inputs take, as `triton_permuted` says.
_PERMUTED_HIDDEN: dict[Direction, tuple[int, int]] = {"forward": (16, 2048), "backward": (16, 1024)}

# Rows from which the interpreter takes a call. It means nothing for speed, the interpreter being
# slower than native at every size: it lets both routes be seen on a machine without a GPU.
_CPU_ROWS = 16


def _device(norm: Norm, dispatch_key: str) -> Any:
    if dispatch_key == "CPU":
        return when.dtype("input", *norm.cpu_dtypes) & (
            when.numel("input") // when.size("input", -1) >= _CPU_ROWS
        )
    return triton_computes("input", dispatch_key)


def _loads_by_16_bytes(name: str) -> Any:
    return when.is_contiguous(name) & when.aligned(name, 16)


# --------------------------------------------------------------------------------------------------
# Crossovers
# --------------------------------------------------------------------------------------------------

# On the GPU the kernels are faster than ATen's nearly everywhere, and a launch plan costs the host
# less than native does. A launch from Python costs it more: where native takes less time on the GPU
# than a hit takes on the host, a loop of such calls gets slower. How large that is depends on the
# number of elements, and on the width of the rows, as ATen's kernels are slow at narrow and at very
# wide ones. Where rows are no multiples of 16 bytes, both load less at a time, at other widths.
#
# In compiled graphs Inductor fuses a norm with the addition of the residual before it, as norms
# stand in models, and the backward with the addition of the two gradients; an opaque op cannot be
# fused. So a norm is opaque only where it is faster beside such an addition.
_SIZES: dict[Direction, dict[Kernels, _Sizes]] = {
    "forward": {
        "triton_kernels": {"elements": (2**12, 2**27), "hidden": (2**4, 2**17)},
        # A cell is measured between its power of two and the next: there widths end.
        "triton_permuted": {"elements": (2**12, 2**27), "hidden": (2**4, 2**10)},
        "cutedsl_kernels": {"elements": (2**14, 2**27)},
    },
    "backward": {
        "triton_kernels": {"elements": (2**12, 2**27), "hidden": (2**4, 2**17)},
        # What it gains goes on changing with the number of rows.
        "triton_permuted": {"elements": (2**12, 2**29), "hidden": (2**4, 2**9)},
        # It gains beyond 2**27 elements what it does not up to there.
        "cutedsl_kernels": {"elements": (2**14, 2**29)},
    },
}
#: Of the kernels for permuted inputs, as `Op.version`.
PERMUTED_VERSION = 8


def _crossover(norm: Norm, direction: Direction, kernels: Kernels) -> Crossover | None:
    """On what it depends whether a norm's kernels are faster than ATen's."""
    op, hidden = norm.op(direction), when.size("input", -1)
    is_permuted, is_by_cluster = kernels == "triton_permuted", kernels == "cutedsl_kernels"
    features = {"elements": when.numel("input"), "hidden": hidden}
    calls = lazy("opgraft_kernels.norms.samples:calls")
    # How rows whose elements are far apart are aligned matters to native, which copies them first.
    # The condition of the kernels over clusters asks for 16 bits and whole vectors.
    return crossover_of(
        functools.partial(calls, norm, direction, is_permuted=is_permuted),
        PERMUTED_VERSION if is_permuted else op.version,
        {name: (features[name], *ends) for name, ends in _SIZES[direction][kernels].items()},
        {"hidden": (hidden, *op.clusters)} if is_by_cluster else features_of_rows("input", hidden),
    )


# --------------------------------------------------------------------------------------------------
# Registration
# --------------------------------------------------------------------------------------------------


def impl(norm: Norm, direction: Direction, kernels: Kernels) -> Any:
    """A norm's op, whose DSL its first call imports."""
    return lazy(f"opgraft_kernels.norms.{kernels}:{norm.name}_{direction}")


def register(norm: Norm, dispatch_key: str) -> list[Override]:
    """Register a norm's ops at `dispatch_key`: ``"CUDA"``, or ``"CPU"`` (the interpreter).

    On CPU ``F.rms_norm`` never calls the backward op: RMSNorm is composed of other ops there, and
    so is its derivative. The op itself, which has no native kernel there, then works when called.

    Returns:
        The overrides: forward and backward in Triton, the same of permuted inputs, and on CUDA
        the same in CuteDSL.
    """
    kinds: tuple[Kernels, ...] = ("triton_kernels", "triton_permuted")
    if dispatch_key == "CUDA":
        kinds += ("cutedsl_kernels",)
    return [_register(norm, way, kernels, dispatch_key) for kernels in kinds for way in DIRECTIONS]


def _register(norm: Norm, direction: Direction, kernels: Kernels, dispatch_key: str) -> Override:
    samples, suffix = "opgraft_kernels.norms.samples", ""
    options: dict[str, Any] = {"cond": condition(norm, direction, dispatch_key)}
    if kernels == "triton_permuted":
        suffix = "_permuted"
        options = {
            "cond": permuted_condition(norm, direction, dispatch_key),
            "priority": 2,  # before those that copy such an input
            "samples": functools.partial(lazy(f"{samples}:permuted_samples"), norm, direction),
        }
    elif kernels == "cutedsl_kernels":
        suffix, made = "_by_cluster", functools.partial(lazy(f"{samples}:samples"), norm)
        options = {
            "cond": cluster_condition(norm, direction),
            "priority": 1,  # before Triton's
            "samples": made if direction == "forward" else None,
            "dsl": "cutedsl",
        }
    return register_op(
        norm.op(direction).name,
        dispatch_key,
        impl(norm, direction, kernels),
        name=f"{norm.name}.{direction}{suffix}",
        crossover=functools.partial(_crossover, norm, direction, kernels),
        **options,
    )
