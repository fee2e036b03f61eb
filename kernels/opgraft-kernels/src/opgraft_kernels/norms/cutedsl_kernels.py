"""RMSNorm and LayerNorm in CuteDSL: tiles, and calls of compiled functions.

The kernels are in `opgraft_kernels.norms.clusters`, which says what they are for, and are compiled
by `cutedsl_functions`. Nothing here imports CuteDSL: a compiled function is loaded from the disk
where it was compiled before.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias

import torch

from opgraft import cutedsl_utils, lazy
from opgraft_kernels.norms import ops
from opgraft_kernels.norms.clusters.residency import clusters_for
from opgraft_kernels.norms.clusters.tile import Tile

__all__ = [
    "TILES",
    "BackwardKind",
    "ForwardKind",
    "Kind",
    "backward",
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


class BackwardKind(NamedTuple):
    """What one compiled backward is for."""

    dtype: torch.dtype
    tile: Tile
    has_weight: bool
    has_mean: bool
    needs_dw: bool
    needs_db: bool


Kind: TypeAlias = ForwardKind | BackwardKind


_functions = cutedsl_utils.Functions(lazy("opgraft_kernels.norms.cutedsl_functions:compile_kind"))


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
    )
    _functions(kind, call.input.device)(
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
    )
    clusters = clusters_for(tile, rows, device)
    partial_dw, partial_db = (
        None
        if total is None
        else torch.empty((clusters, hidden), dtype=torch.float32, device=device)
        for total in (call.dw, call.db)
    )
    _functions(kind, device)(
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
