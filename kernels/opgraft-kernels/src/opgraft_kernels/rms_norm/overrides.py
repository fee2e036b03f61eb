"""Overrides of ``aten::_fused_rms_norm`` and ``aten::_fused_rms_norm_backward``, which
``F.rms_norm`` calls.

Nothing here imports Triton: the impls do, when the first call that a condition wants reaches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opgraft import Override, triton_utils, when
from opgraft_kernels import in_graphs
from opgraft_kernels.clusters.conditions import for_clusters
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
    eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from .triton_kernels import rms_norm_forward

    return rms_norm_forward(input, normalized_shape, weight, eps)


def _forward_by_cluster(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from .cutedsl_kernels import rms_norm_forward

    return rms_norm_forward(input, normalized_shape, weight, eps)


def _backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    from .triton_kernels import rms_norm_backward

    return rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask)


def _backward_by_cluster(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    from .cutedsl_kernels import rms_norm_backward

    return rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask)


def _valid() -> Any:
    """The shapes, dtypes and devices that the kernels trust; native answers elsewhere."""
    hidden = when.size("input", -1)
    return (
        # One normalised dimension, as in every model that we know of. The kernels could fold
        # several, but a condition for each number of them would cost every call, and no failure
        # would be legible.
        (when.length("normalized_shape") == 1)
        # Any other shapes would be read out of bounds; native raises its error for them.
        & (when.item("normalized_shape", 0) == hidden)
        & (
            when.is_none("weight")
            | ((when.ndim("weight") == 1) & (when.size("weight", 0) == hidden))
        )
        # Native has its own answer to mixed dtypes; the kernels would round where it does not.
        & (when.is_none("weight") | when.same_dtype("input", "weight"))
        # A pointer to another device's memory faults, and takes the context with it.
        & (when.is_none("weight") | when.same_device("input", "weight"))
        # Columns are indexed with 32 bits, padded to a power of two.
        & (hidden <= 2**30)
        # An empty grid is a launch error, and the mean over no elements is native's to define.
        & (when.numel("input") > 0)
    )


def _valid_backward() -> Any:
    return (
        _valid()
        # One float32 a row: fewer would be read out of bounds, another dtype as garbage.
        & when.dtype("rstd", torch.float32)
        & (when.numel("rstd") * when.size("input", -1) == when.numel("input"))
        # As for the weight.
        & (when.numel("grad_out") == when.numel("input"))
        & when.same_dtype("input", "grad_out")
        & when.same_device("input", "grad_out", "rstd")
    )


# On the GPU these kernels are faster than ATen's from the smallest size that was measured (forward,
# 2**18 elements; backward, from 2**20), and a launch plan costs the host less than native does.
# But a Triton launch from Python costs it more: where native takes less time on the GPU than a hit
# takes on the host, a loop of such calls gets slower. So what is below runs by a launch plan or not
# at all: by one, a call in a loop took 5.3 to 6.0 us forward where native's took 6.7 to 8.0 (rows
# of up to 4096), and 6.1 to 7.8 us backward where native's took 11.3 to 12.0 (28 at 8192 x 128),
# of 2**12 elements on (`benchmarks/launch.py --crossover`). On an H200 (`benchmarks/rms_norm.py
# --crossover`, bfloat16, compiled router) a hit in Python took 40 us end to end forward and 74 us
# backward with the host at its fastest, 115 and 165 us at its slowest. Native's took 45 us (hidden
# 4096) to 61 us (16384) forward and 114 to 181 us backward at 2**25 elements, half that at 2**24
# ...
_CROSSOVER = 2**25
# ... except for rows so narrow or so wide that ATen's kernels are slow: at 2**24 elements 85 us
# forward and 127 us backward at hidden 128, 116 us and 168 us at 65536, more at 131072.
_NARROW, _WIDE, _EXTREME_CROSSOVER = 128, 65536, 2**24

# Over clusters, likewise (`benchmarks/rms_norm.py --clusters`), on the GPU: the forward took 3.4 us
# where Triton's took 6 and native's 48 for one row of 65536, 131 against 142 and 222 at 2**27
# elements, and from Python 21 to 38 us end to end. The backward is Triton's equal or a little
# better from 2**24 elements (37 us against 39 to 42) to 2**27 (213 against 218 for rows of 32768,
# 207 against 226 for those of 131072).
_CLUSTER_FORWARD = {65536: 2**16, 131072: 2**17}
_CLUSTER_BACKWARD = {32768: 2**24, 65536: 2**24, 131072: 2**24}

_FORWARD_IN_GRAPHS = in_graphs.forward()
_BACKWARD_IN_GRAPHS = in_graphs.backward(many_from=8192)

# Rows from which the interpreter takes a call. It means nothing for speed, the interpreter being
# slower than native at every size: it lets both routes be seen on a machine without a GPU.
_CPU_ROWS = 64


def _device_condition(dispatch_key: str) -> Any:
    if dispatch_key == "CPU":
        # The interpreter computes on the bits of bfloat16 and returns garbage without a word.
        return when.dtype("input", torch.float32, torch.float16) & (
            when.numel("input") // when.size("input", -1) >= _CPU_ROWS
        )
    return (
        # float64 is ATen's: the kernels compute in float32.
        when.dtype("input", torch.float32, torch.float16, torch.bfloat16)
        # bfloat16 and asynchronous copies to shared memory begin with Ampere.
        & (when.device_capability("input") >= (8, 0))
    )


def _unplanned_condition() -> Any:
    """Which calls are worth a launch from Python: below, the host would be the bottleneck."""
    hidden = when.size("input", -1)
    return (when.numel("input") >= _CROSSOVER) | (
        (when.numel("input") >= _EXTREME_CROSSOVER) & ((hidden <= _NARROW) | (hidden >= _WIDE))
    )


def forward_condition(dispatch_key: str) -> Any:
    """Which calls of ``aten::_fused_rms_norm`` the forward takes at `dispatch_key`."""
    return _device_condition(dispatch_key) & _valid()


def backward_condition(dispatch_key: str) -> Any:
    """Which calls of ``aten::_fused_rms_norm_backward`` the backward takes at `dispatch_key`."""
    return _device_condition(dispatch_key) & _valid_backward()


def cluster_condition() -> Any:
    """Which calls of ``aten::_fused_rms_norm`` the forward over clusters takes."""
    return for_clusters(_CLUSTER_FORWARD, ["input"], ["weight"]) & _valid()


def backward_cluster_condition() -> Any:
    """Which calls of ``aten::_fused_rms_norm_backward`` the backward over clusters takes."""
    return (
        for_clusters(_CLUSTER_BACKWARD, ["input", "grad_out"], ["weight"], ["rstd"])
        # It is what the kernel reads a row for.
        & (when.item("output_mask", 0) == 1)
        & _valid_backward()
    )


def register(dispatch_key: str) -> list[Override]:
    """Register forward and backward at `dispatch_key`: ``"CUDA"``, or ``"CPU"`` (the interpreter).

    On CPU ``F.rms_norm`` never calls the backward op: RMSNorm is composed of other ops there, and
    so is its derivative. The op itself, which has no native kernel there, then works when called.

    Returns:
        The overrides: forward and backward in Triton, and on CUDA the same in CuteDSL.
    """
    # The interpreter launches nothing that could be recorded.
    unplanned = _unplanned_condition() if dispatch_key == "CUDA" else None

    def options(policy: Any) -> dict[str, Any]:
        if unplanned is None:
            return {}
        return {"launch_plan": True, "unplanned": unplanned, "compile": policy}

    overrides = [
        triton_utils.register_op_override(
            "aten",
            "_fused_rms_norm",
            dispatch_key,
            _forward,
            cond=forward_condition(dispatch_key),
            name="opgraft_kernels.rms_norm.forward",
            **options(_FORWARD_IN_GRAPHS),
        ),
        triton_utils.register_op_override(
            "aten",
            "_fused_rms_norm_backward",
            dispatch_key,
            _backward,
            cond=backward_condition(dispatch_key),
            name="opgraft_kernels.rms_norm.backward",
            **options(_BACKWARD_IN_GRAPHS),
        ),
    ]
    if dispatch_key == "CUDA":
        overrides += register_over_clusters(
            "rms_norm",
            OverClusters(
                "_fused_rms_norm",
                _forward_by_cluster,
                cluster_condition(),
                compile=_FORWARD_IN_GRAPHS,
            ),
            OverClusters(
                "_fused_rms_norm_backward",
                _backward_by_cluster,
                backward_cluster_condition(),
                compile=_BACKWARD_IN_GRAPHS,
            ),
        )
    return overrides
