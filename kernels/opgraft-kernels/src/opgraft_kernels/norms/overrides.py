"""Overrides of the ops that ``F.rms_norm`` and ``F.layer_norm`` call; `register` puts them there.

What the two norms differ in is data, `RMS_NORM` and `LAYER_NORM`; the conditions below are written
once for both. There are kernels in Triton and, for long rows that a cluster of Hopper's blocks
shares, in CuteDSL. Nothing here imports either DSL: the first call that a condition wants does.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from opgraft import Override, cutedsl_utils, lazy, triton_utils, when
from opgraft_kernels.norms import in_graphs

__all__ = [
    "DIRECTIONS",
    "LAYER_NORM",
    "RMS_NORM",
    "Norm",
    "cluster_condition",
    "condition",
    "impl",
    "register",
]

Direction: TypeAlias = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
Dsl: TypeAlias = Literal["triton", "cutedsl"]


class FromPython(NamedTuple):
    """From how many elements on a call is worth a launch from Python."""

    elements: int
    narrow: int  # in rows of up to _NARROW
    wide: int  # in rows of _WIDE and more


# Rows so narrow, or so wide, that ATen's kernels are slow.
_NARROW, _WIDE = 128, 65536


class Op(NamedTuple):
    """A norm's forward or backward op in ``aten``, and which of its calls the kernels get."""

    name: str
    #: In Triton, the calls without a launch plan. With one they get all that they are right for.
    from_python: FromPython
    #: In CuteDSL: by the widths of rows that there are kernels for, the elements from which on.
    clusters: Mapping[int, int]
    #: The same for calls without a launch plan, where these differ.
    clusters_from_python: Mapping[int, int] | None
    #: Which calls are opaque in compiled graphs.
    compile: Any
    #: Of Triton's kernels: raised when they become faster or slower. A test says when they change.
    version: int = 1


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


# On the GPU Triton's kernels are faster than ATen's from the smallest sizes that were measured, and
# a launch plan costs the host less than native does. But a Triton launch from Python costs it more:
# where native takes less time on the GPU than a hit takes on the host, a loop of such calls gets
# slower. So what is below `from_python` runs by a launch plan or not at all. Measured on an H200 in
# bfloat16 with the compiled router.

# Faster on the GPU from 2**18 elements forward and 2**20 backward. By a plan, a call in a loop took
# 5.3 to 6.0 us forward where native's took 6.7 to 8.0 (rows of up to 4096), and 6.1 to 7.8 us
# backward where native's took 11.3 to 12.0 (28 at 8192 x 128), of 2**12 elements on
# (`benchmarks/launch.py --crossover`). A hit in Python took 40 us end to end forward and 74 us
# backward with the host at its fastest, 115 and 165 us at its slowest. Native's took 45 us (hidden
# 4096) to 61 us (16384) forward and 114 to 181 us backward at 2**25 elements, half that at 2**24;
# but at 2**24 elements 85 us forward and 127 us backward at hidden 128, 116 us and 168 us at 65536,
# more at 131072 (`benchmarks/rms_norm.py --crossover`).
#
# Over clusters (`benchmarks/rms_norm.py --clusters`), on the GPU: the forward took 3.4 us where
# Triton's took 6 and native's 48 for one row of 65536, 131 against 142 and 222 at 2**27 elements,
# and from Python 21 to 38 us end to end. The backward is Triton's equal or a little better from
# 2**24 elements (37 us against 39 to 42) to 2**27 (213 against 218 for rows of 32768, 207 against
# 226 for those of 131072).
RMS_NORM = Norm(
    "rms_norm",
    parameters=("weight",),
    statistics=("rstd",),
    # The interpreter computes on the bits of bfloat16 and returns garbage without a word.
    cpu_dtypes=(torch.float32, torch.float16),
    forward=Op(
        "_fused_rms_norm",
        from_python=FromPython(2**25, narrow=2**24, wide=2**24),
        clusters={65536: 2**16, 131072: 2**17},
        clusters_from_python=None,
        compile=in_graphs.forward(),
    ),
    backward=Op(
        "_fused_rms_norm_backward",
        from_python=FromPython(2**25, narrow=2**24, wide=2**24),
        clusters={32768: 2**24, 65536: 2**24, 131072: 2**24},
        clusters_from_python=None,
        compile=in_graphs.backward(many_from=8192),
    ),
)

# Faster on the GPU from the smallest sizes on (backward at hidden 1024: from 2**20 elements). A hit
# in Python took 34 us end to end forward and 62 us backward. Native's took 57 to 80 us forward at
# 2**25 elements and hidden 1024 to 16384, 66 to 115 us backward at 2**24; but at hidden 128, 70 us
# forward at 2**23 elements and 300 us backward; at 65536, 72 us forward at 2**20
# (`benchmarks/layer_norm.py --crossover`).
#
# Over clusters (`benchmarks/layer_norm.py --clusters`), on the GPU: the forward took 4 to 5 us
# where Triton's took 6 to 7 and native's 37 to 140 for two rows of 32768 to 131072, and 141 against
# 179 and 248 at 2**27 elements in rows of 65536. From Python a call took 26 to 49 us end to end: of
# rows of 32768 that pays from 2**24 elements (native's took 40 at 2**23, 73 at 2**24), of those of
# 16384 from 2**25 (66). The backward is Triton's equal at 2**24 elements (16384: 51 us against 48;
# 65536: 49 against 54) and beats it from there on (218 against 292 and 225 against 321 at 2**27).
LAYER_NORM = Norm(
    "layer_norm",
    parameters=("weight", "bias"),
    statistics=("mean", "rstd"),
    # On the CPU native keeps mean and rstd of 16-bit inputs in 16 bits, the kernels do not.
    cpu_dtypes=(torch.float32,),
    forward=Op(
        "native_layer_norm",
        from_python=FromPython(2**25, narrow=2**23, wide=2**20),
        clusters={16384: 2**24, 32768: 2**16, 65536: 2**16, 131072: 2**17},
        clusters_from_python={16384: 2**25, 32768: 2**24, 65536: 2**16, 131072: 2**17},
        compile=in_graphs.forward(),
    ),
    backward=Op(
        "native_layer_norm_backward",
        from_python=FromPython(2**24, narrow=2**23, wide=2**24),
        clusters={16384: 2**25, 32768: 2**24, 65536: 2**24, 131072: 2**24},
        clusters_from_python=None,
        compile=in_graphs.backward(many_from=4096),
    ),
)


# --------------------------------------------------------------------------------------------------
# Conditions
# --------------------------------------------------------------------------------------------------


def condition(norm: Norm, direction: Direction, dispatch_key: str) -> Any:
    """Which calls of a norm's op go to Triton at `dispatch_key`."""
    return _device(norm, dispatch_key) & _valid(norm, direction)


def cluster_condition(norm: Norm, direction: Direction) -> Any:
    """Which calls of a norm's op go to CuteDSL, at the CUDA key."""
    crossovers = norm.op(direction).clusters
    wanted = (
        # First what is false of most rows.
        (when.size("input", -1) >= min(crossovers))
        & _is_wide_and_large_enough(crossovers)
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


# Rows from which the interpreter takes a call. It means nothing for speed, the interpreter being
# slower than native at every size: it lets both routes be seen on a machine without a GPU.
_CPU_ROWS = 64


def _device(norm: Norm, dispatch_key: str) -> Any:
    if dispatch_key == "CPU":
        return when.dtype("input", *norm.cpu_dtypes) & (
            when.numel("input") // when.size("input", -1) >= _CPU_ROWS
        )
    return (
        # float64 is ATen's: the kernels compute in float32.
        when.dtype("input", torch.float32, torch.float16, torch.bfloat16)
        # bfloat16 and asynchronous copies to shared memory begin with Ampere.
        & (when.device_capability("input") >= (8, 0))
    )


def _is_faster_from_python(crossover: FromPython) -> Any:
    hidden, elements = when.size("input", -1), when.numel("input")
    return (
        (elements >= crossover.elements)
        | ((elements >= crossover.narrow) & (hidden <= _NARROW))
        | ((elements >= crossover.wide) & (hidden >= _WIDE))
    )


def _is_wide_and_large_enough(crossovers: Mapping[int, int]) -> Any:
    """Whether ``input`` has rows of one of the widths, and as many elements as are given for it."""
    return functools.reduce(
        operator.or_,
        (
            (when.size("input", -1) == width) & (when.numel("input") >= elements)
            for width, elements in crossovers.items()
        ),
    )


def _loads_by_16_bytes(name: str) -> Any:
    return when.is_contiguous(name) & when.aligned(name, 16)


# --------------------------------------------------------------------------------------------------
# Registration
# --------------------------------------------------------------------------------------------------


def impl(norm: Norm, direction: Direction, dsl: Dsl) -> Any:
    """A norm's op in a DSL, which its first call imports."""
    return lazy(f"opgraft_kernels.norms.{dsl}_kernels:{norm.name}_{direction}")


def register(norm: Norm, dispatch_key: str) -> list[Override]:
    """Register a norm's ops at `dispatch_key`: ``"CUDA"``, or ``"CPU"`` (the interpreter).

    On CPU ``F.rms_norm`` never calls the backward op: RMSNorm is composed of other ops there, and
    so is its derivative. The op itself, which has no native kernel there, then works when called.

    Returns:
        The overrides: forward and backward in Triton, and on CUDA the same in CuteDSL.
    """
    overrides = [_register_triton(norm, way, dispatch_key) for way in DIRECTIONS]
    if dispatch_key == "CUDA":
        overrides += [_register_cutedsl(norm, way) for way in DIRECTIONS]
    return overrides


def _register_triton(norm: Norm, direction: Direction, dispatch_key: str) -> Override:
    op = norm.op(direction)
    options: dict[str, Any] = {}
    if dispatch_key == "CUDA":  # the interpreter launches nothing that could be recorded
        unplanned = _is_faster_from_python(op.from_python)
        options = {"launch_plan": True, "unplanned": unplanned, "compile": op.compile}
    return triton_utils.register_op_override(
        "aten",
        op.name,
        dispatch_key,
        impl(norm, direction, "triton"),
        cond=condition(norm, direction, dispatch_key),
        name=f"opgraft_kernels.{norm.name}.{direction}",
        **options,
    )


def _register_cutedsl(norm: Norm, direction: Direction) -> Override:
    op = norm.op(direction)
    samples = functools.partial(lazy("opgraft_kernels.norms.samples:samples"), norm.parameters)
    from_python = op.clusters_from_python
    return cutedsl_utils.register_op_override(
        "aten",
        op.name,
        "CUDA",
        impl(norm, direction, "cutedsl"),
        cond=cluster_condition(norm, direction),
        name=f"opgraft_kernels.{norm.name}.{direction}_by_cluster",
        priority=1,  # before Triton's
        launch_plan=True,
        unplanned=None if from_python is None else _is_wide_and_large_enough(from_python),
        compile=op.compile,
        samples=samples if direction == "forward" else None,
    )
