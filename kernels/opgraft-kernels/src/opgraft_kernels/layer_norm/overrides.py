"""Overrides of ``aten::native_layer_norm`` and ``aten::native_layer_norm_backward``, which
``F.layer_norm`` calls.

Nothing here imports Triton: the impls do, when the first call that a condition wants reaches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opgraft import Override, triton_utils, when
from opgraft_kernels import in_graphs
from opgraft_kernels.clusters.conditions import for_clusters, long_enough
from opgraft_kernels.clusters.overrides import OverClusters
from opgraft_kernels.clusters.overrides import register as register_over_clusters

__all__ = [
    "backward_cluster_condition",
    "backward_condition",
    "cluster_condition",
    "forward_condition",
    "register",
]


def _forward(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from .triton_kernels import layer_norm_forward

    return layer_norm_forward(input, normalized_shape, weight, bias, eps)


def _forward_by_cluster(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from .cutedsl_kernels import layer_norm_forward

    return layer_norm_forward(input, normalized_shape, weight, bias, eps)


def _backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    from .triton_kernels import layer_norm_backward

    return layer_norm_backward(
        grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
    )


def _backward_by_cluster(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    from .cutedsl_kernels import layer_norm_backward

    return layer_norm_backward(
        grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
    )


def _valid() -> Any:
    """The shapes, dtypes and devices that the kernels trust; native answers elsewhere."""
    hidden = when.size("input", -1)
    valid = (
        # One normalised dimension: the kernels could fold several, but a condition for each number
        # of them would cost every call.
        (when.length("normalized_shape") == 1)
        # Any other shapes would be read out of bounds; native raises its error for them.
        & (when.item("normalized_shape", 0) == hidden)
        # Columns are indexed with 32 bits, padded to a power of two.
        & (hidden <= 2**30)
        # An empty grid is a launch error, and the mean over no elements is native's to define.
        & (when.numel("input") > 0)
    )
    for name in ("weight", "bias"):
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
    return valid


def _valid_backward() -> Any:
    valid = _valid()
    for name in ("mean", "rstd"):
        # One float32 a row: fewer would be read out of bounds, another dtype as garbage.
        valid = (
            valid
            & when.dtype(name, torch.float32)
            & (when.numel(name) * when.size("input", -1) == when.numel("input"))
        )
    return (
        valid
        & (when.numel("grad_out") == when.numel("input"))
        & when.same_dtype("input", "grad_out")
        & when.same_device("input", "grad_out", "mean", "rstd")
    )


# On the GPU these kernels are faster than ATen's from the smallest sizes on (backward at hidden
# 1024: from 2**20 elements), and a launch plan costs the host less than native does. But a Triton
# launch from Python costs it more: where native takes less time on the GPU than a hit takes on the
# host, a loop of such calls gets slower. So what is below runs by a launch plan or not at all. On
# an H200 (`benchmarks/layer_norm.py --crossover`, bfloat16, compiled router) a hit took 34 us end
# to end forward and 62 us backward. Native's took 57 to 80 us forward at 2**25 elements and hidden
# 1024 to 16384, 66 to 115 us backward at 2**24 ...
_FORWARD_CROSSOVER, _BACKWARD_CROSSOVER = 2**25, 2**24
# ... except for rows so narrow or so wide that ATen's kernels are slow: at hidden 128, 70 us
# forward at 2**23 elements and 300 us backward; at 65536, 72 us forward at 2**20.
_NARROW, _NARROW_CROSSOVER = 128, 2**23
_WIDE, _WIDE_CROSSOVER = 65536, 2**20

# Over clusters, likewise (`benchmarks/layer_norm.py --clusters`), on the GPU: the forward took 4 to
# 5 us where Triton's took 6 to 7 and native's 37 to 140 for two rows of 32768 to 131072, and 141
# against 179 and 248 at 2**27 elements in rows of 65536. From Python a call took 26 to 49 us end to
# end: of rows of 32768 that pays from 2**24 elements (native's took 40 at 2**23, 73 at 2**24), of
# those of 16384 from 2**25 (66). The backward is Triton's equal at 2**24 elements (16384: 51 us
# against 48; 65536: 49 against 54) and beats it from there on (218 against 292 and 225 against 321
# at 2**27).
_CLUSTER_FORWARD = {16384: 2**24, 32768: 2**16, 65536: 2**16, 131072: 2**17}
_CLUSTER_FORWARD_UNPLANNED = {16384: 2**25, 32768: 2**24, 65536: 2**16, 131072: 2**17}
_CLUSTER_BACKWARD = {16384: 2**25, 32768: 2**24, 65536: 2**24, 131072: 2**24}

_FORWARD_IN_GRAPHS = in_graphs.forward()
_BACKWARD_IN_GRAPHS = in_graphs.backward(many_from=4096)

# Rows from which the interpreter takes a call. It means nothing for speed, the interpreter being
# slower than native at every size: it lets both routes be seen on a machine without a GPU.
_CPU_ROWS = 64


def _device_condition(dispatch_key: str) -> Any:
    if dispatch_key == "CPU":
        # Native keeps mean and rstd of 16-bit inputs in 16 bits on the CPU, the kernels do not; and
        # the interpreter computes on the bits of bfloat16 and returns garbage without a word.
        return when.dtype("input", torch.float32) & (
            when.numel("input") // when.size("input", -1) >= _CPU_ROWS
        )
    return (
        # float64 is ATen's: the kernels compute in float32.
        when.dtype("input", torch.float32, torch.float16, torch.bfloat16)
        # bfloat16 and asynchronous copies to shared memory begin with Ampere.
        & (when.device_capability("input") >= (8, 0))
    )


def _forward_pays() -> Any:
    """Which forwards are worth a launch from Python: below, the host would be the bottleneck."""
    hidden, elements = when.size("input", -1), when.numel("input")
    return (
        (elements >= _FORWARD_CROSSOVER)
        | ((elements >= _NARROW_CROSSOVER) & (hidden <= _NARROW))
        | ((elements >= _WIDE_CROSSOVER) & (hidden >= _WIDE))
    )


def _backward_pays() -> Any:
    """As `_forward_pays`, of backwards."""
    hidden, elements = when.size("input", -1), when.numel("input")
    return (elements >= _BACKWARD_CROSSOVER) | (
        (elements >= _NARROW_CROSSOVER) & (hidden <= _NARROW)
    )


def forward_condition(dispatch_key: str) -> Any:
    """Which calls of ``aten::native_layer_norm`` the forward takes at `dispatch_key`."""
    return _device_condition(dispatch_key) & _valid()


def backward_condition(dispatch_key: str) -> Any:
    """Which calls of ``aten::native_layer_norm_backward`` the backward takes at `dispatch_key`."""
    return _device_condition(dispatch_key) & _valid_backward()


def cluster_condition() -> Any:
    """Which calls of ``aten::native_layer_norm`` the forward over clusters takes."""
    return for_clusters(_CLUSTER_FORWARD, ["input"], ["weight", "bias"]) & _valid()


def backward_cluster_condition() -> Any:
    """Which calls of ``aten::native_layer_norm_backward`` the backward over clusters takes."""
    numbers = ["mean", "rstd"]
    return (
        # The bias isn't read.
        for_clusters(_CLUSTER_BACKWARD, ["input", "grad_out"], ["weight"], numbers)
        # It is what the kernel reads a row for.
        & (when.item("output_mask", 0) == 1)
        & _valid_backward()
    )


def register(dispatch_key: str) -> list[Override]:
    """Register forward and backward at `dispatch_key`: ``"CUDA"``, or ``"CPU"`` (the interpreter).

    Returns:
        The overrides: forward and backward in Triton, and on CUDA the same in CuteDSL.
    """

    def options(pays: Any, policy: Any) -> dict[str, Any]:
        # The interpreter launches nothing that could be recorded.
        on_gpu = {"launch_plan": True, "unplanned": pays, "compile": policy}
        return on_gpu if dispatch_key == "CUDA" else {}

    overrides = [
        triton_utils.register_op_override(
            "aten",
            "native_layer_norm",
            dispatch_key,
            _forward,
            cond=forward_condition(dispatch_key),
            name="opgraft_kernels.layer_norm.forward",
            **options(_forward_pays(), _FORWARD_IN_GRAPHS),
        ),
        triton_utils.register_op_override(
            "aten",
            "native_layer_norm_backward",
            dispatch_key,
            _backward,
            cond=backward_condition(dispatch_key),
            name="opgraft_kernels.layer_norm.backward",
            **options(_backward_pays(), _BACKWARD_IN_GRAPHS),
        ),
    ]
    if dispatch_key == "CUDA":
        overrides += register_over_clusters(
            "layer_norm",
            OverClusters(
                "native_layer_norm",
                _forward_by_cluster,
                cluster_condition(),
                long_enough(_CLUSTER_FORWARD_UNPLANNED),
                compile=_FORWARD_IN_GRAPHS,
            ),
            OverClusters(
                "native_layer_norm_backward",
                _backward_by_cluster,
                backward_cluster_condition(),
                compile=_BACKWARD_IN_GRAPHS,
            ),
        )
    return overrides
