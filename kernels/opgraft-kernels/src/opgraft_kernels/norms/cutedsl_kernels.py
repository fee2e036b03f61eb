"""RMSNorm and LayerNorm in CuteDSL: tiles, compiled functions, and calls of them.

The kernels are in `opgraft_kernels.norms.clusters`, which says what they are for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from cutlass import Float32, Int32

from opgraft_kernels.cutedsl import CUTLASS_DTYPES, Functions, compile_function, fake_tensor
from opgraft_kernels.norms import ops
from opgraft_kernels.norms.clusters.backward import Backward
from opgraft_kernels.norms.clusters.exchange import VECTOR, Tile
from opgraft_kernels.norms.clusters.forward import Forward
from opgraft_kernels.norms.clusters.residency import clusters_for

__all__ = [
    "TILES",
    "BackwardKind",
    "ForwardKind",
    "backward",
    "compile_kind",
    "forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "rms_norm_backward",
    "rms_norm_forward",
]


class Tiles(NamedTuple):
    """A norm's tiles by the width of the rows that they are for."""

    forward: dict[int, Tile]
    backward: dict[int, Tile]


def _by_width(*tiles: Tile) -> dict[int, Tile]:
    return {tile.hidden: tile for tile in tiles}


# The fastest on an H200 (`--tiles` of `benchmarks/rms_norm.py` and `benchmarks/layer_norm.py`).
# Clusters of 16 blocks were a little faster in RMSNorm's backward at 65536, but not every part of a
# Hopper GPU runs them. In both norms' backward at 131072 most of a multiprocessor's registers hold
# the sums over rows: it runs one block.
TILES = {
    "rms_norm": Tiles(
        _by_width(Tile(256, 4, 8, 5), Tile(128, 16, 8, 3)),
        _by_width(
            Tile(256, 2, 8, 3, stages=3), Tile(512, 2, 8, 2, stages=2), Tile(512, 4, 8, 1, stages=2)
        ),
    ),
    "layer_norm": Tiles(
        _by_width(Tile(128, 8, 2, 5), Tile(128, 8, 4, 5), Tile(128, 8, 8, 5), Tile(128, 16, 8, 3)),
        _by_width(
            *(Tile(512, 2, 2, 1, stages=3), Tile(256, 2, 8, 3, stages=3)),
            *(Tile(256, 4, 8, 2, stages=2), Tile(512, 4, 8, 1, stages=2)),
        ),
    ),
}


def _tiles(mean: torch.Tensor | None) -> Tiles:
    return TILES["rms_norm" if mean is None else "layer_norm"]


# --------------------------------------------------------------------------------------------------
# Compiled functions
# --------------------------------------------------------------------------------------------------


class ForwardKind(NamedTuple):
    """What one compiled forward is for."""

    dtype: torch.dtype
    tile: Tile
    has_weight: bool
    has_bias: bool
    has_mean: bool
    device: int | None  # compiled for the architecture of the device that its first call is on


class BackwardKind(NamedTuple):
    """What one compiled backward is for."""

    dtype: torch.dtype
    tile: Tile
    has_weight: bool
    has_mean: bool
    needs_dw: bool
    needs_db: bool
    device: int | None


Kind: TypeAlias = ForwardKind | BackwardKind


def compile_kind(kind: Kind) -> Callable[..., None]:
    """Compile the function for `kind`; needs no GPU where ``CUTE_DSL_ARCH`` names one."""
    dtype = CUTLASS_DTYPES[kind.dtype]
    matrix, row = (functools.partial(fake_tensor, dtype, ndim, VECTOR) for ndim in (2, 1))
    value = functools.partial(fake_tensor, Float32, 1, 1)
    partial = functools.partial(fake_tensor, Float32, 2, VECTOR)
    weight = row() if kind.has_weight else None
    mean = value() if kind.has_mean else None
    if isinstance(kind, ForwardKind):
        bias = row() if kind.has_bias else None
        return compile_function(
            Forward(kind.tile), matrix(), weight, bias, matrix(), mean, value(), Float32(1.0)
        )
    return compile_function(
        Backward(kind.tile),
        *(matrix(), matrix(), weight, mean, value(), matrix()),
        *(partial() if needed else None for needed in (kind.needs_dw, kind.needs_db)),
        *(row() if needed else None for needed in (kind.needs_dw, kind.needs_db)),
        Int32(1),
    )


_functions = Functions(compile_kind)


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


def forward(call: ops.Forward) -> None:
    """Forwards of float16 and bfloat16, contiguous, 16 bytes aligned; `hidden` has `TILES`."""
    rows, hidden, mean = call.rows, call.hidden, call.mean
    kind = ForwardKind(
        call.input.dtype,
        _tiles(mean).forward[hidden],
        has_weight=call.weight is not None,
        has_bias=call.bias is not None,
        has_mean=mean is not None,
        device=call.input.device.index,
    )
    _functions[kind](
        call.input.view(rows, hidden),
        call.weight,
        call.bias,
        call.output.view(rows, hidden),
        None if mean is None else mean.view(rows),
        call.rstd.view(rows),
        call.eps,
    )


def backward(call: ops.Backward) -> None:
    """Backwards of what the forward takes; `dx` is always wanted."""
    assert call.dx is not None
    rows, hidden, mean, device = call.rows, call.hidden, call.mean, call.input.device
    tile = _tiles(mean).backward[hidden]
    kind = BackwardKind(
        call.input.dtype,
        tile,
        has_weight=call.weight is not None,
        has_mean=mean is not None,
        needs_dw=call.dw is not None,
        needs_db=call.db is not None,
        device=device.index,
    )
    clusters = clusters_for(tile, rows, device.index)
    partial_dw, partial_db = (
        None
        if total is None
        else torch.empty((clusters, hidden), dtype=torch.float32, device=device)
        for total in (call.dw, call.db)
    )
    _functions[kind](
        call.grad_out.view(rows, hidden),
        call.input.view(rows, hidden),
        call.weight,
        None if mean is None else mean.view(rows),
        call.rstd.view(rows),
        call.dx.view(rows, hidden),
        partial_dw,
        partial_db,
        call.dw,
        call.db,
        clusters,
    )


# ATen's ops, around these two.
rms_norm_forward = functools.partial(ops.rms_norm_forward, forward)
rms_norm_backward = functools.partial(ops.rms_norm_backward, backward)
layer_norm_forward = functools.partial(ops.layer_norm_forward, forward)
layer_norm_backward = functools.partial(ops.layer_norm_backward, backward)
