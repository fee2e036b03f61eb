"""RMSNorm and LayerNorm in CuteDSL: tiles, compiled functions, and calls of them.

The kernels are in `opgraft_kernels.norms.clusters`, which says what they are for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import torch
from cutlass import Float32, Int32

from opgraft_kernels.norms import ops
from opgraft_kernels.norms.clusters.backward import Backward
from opgraft_kernels.norms.clusters.compiling import Functions, compile_function, fake
from opgraft_kernels.norms.clusters.exchange import DTYPES, Tile
from opgraft_kernels.norms.clusters.forward import Forward
from opgraft_kernels.norms.clusters.residency import clusters_for

__all__ = [
    "TILES",
    "backward",
    "compile_kind",
    "forward",
    "kinds",
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
    dtype = DTYPES[kind.dtype]
    matrix, row = functools.partial(fake, dtype, 2), functools.partial(fake, dtype, 1)
    value, partial = functools.partial(fake, Float32, 1, 1), functools.partial(fake, Float32, 2)
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


def kinds(norm: str) -> Iterator[Kind]:
    """Functions that there are, most of them, to be compiled for any Hopper GPU.

    Args:
        norm: ``"rms_norm"`` or ``"layer_norm"``.
    """
    has_mean = norm == "layer_norm"
    bias = (True, False) if has_mean else (False,)
    bfloat16, tiles = torch.bfloat16, TILES[norm]
    for tile in tiles.forward.values():
        for has_weight in (True, False):
            for has_bias in bias:
                yield ForwardKind(bfloat16, tile, has_weight, has_bias, has_mean, None)
        yield ForwardKind(torch.float16, tile, True, has_mean, has_mean, None)
    for tile in tiles.backward.values():
        for needs_db in bias:
            for needs_dw in (True, False):
                yield BackwardKind(bfloat16, tile, True, has_mean, needs_dw, needs_db, None)
            yield BackwardKind(bfloat16, tile, False, has_mean, False, needs_db, None)
        yield BackwardKind(torch.float16, tile, True, has_mean, True, has_mean, None)


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


def forward(
    input: torch.Tensor,
    hidden: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
) -> None:
    """`ops.Forward` of float16 and bfloat16, contiguous, 16 bytes aligned; `hidden` has `TILES`."""
    tile, rows = _tiles(mean).forward[hidden], input.numel() // hidden
    kind = ForwardKind(
        input.dtype,
        tile,
        has_weight=weight is not None,
        has_bias=bias is not None,
        has_mean=mean is not None,
        device=input.device.index,
    )
    _functions[kind](
        input.view(rows, hidden),
        weight,
        bias,
        output.view(rows, hidden),
        None if mean is None else mean.view(rows),
        rstd.view(rows),
        eps,
    )


def backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    hidden: int,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dx: torch.Tensor | None,
    dw: torch.Tensor | None,
    db: torch.Tensor | None,
) -> None:
    """`ops.Backward` of what the forward takes; `dx` is always wanted."""
    assert dx is not None
    tile, rows = _tiles(mean).backward[hidden], input.numel() // hidden
    device = input.device
    clusters = clusters_for(tile, rows, device.index)
    partial_dw, partial_db = (
        None
        if total is None
        else torch.empty((clusters, hidden), dtype=torch.float32, device=device)
        for total in (dw, db)
    )
    kind = BackwardKind(
        input.dtype,
        tile,
        has_weight=weight is not None,
        has_mean=mean is not None,
        needs_dw=dw is not None,
        needs_db=db is not None,
        device=device.index,
    )
    _functions[kind](
        grad_out.view(rows, hidden),
        input.view(rows, hidden),
        weight,
        None if mean is None else mean.view(rows),
        rstd.view(rows),
        dx.view(rows, hidden),
        partial_dw,
        partial_db,
        dw,
        db,
        clusters,
    )


# ATen's ops, around these two.
rms_norm_forward = functools.partial(ops.rms_norm_forward, forward)
rms_norm_backward = functools.partial(ops.rms_norm_backward, backward)
layer_norm_forward = functools.partial(ops.layer_norm_forward, forward)
layer_norm_backward = functools.partial(ops.layer_norm_backward, backward)
