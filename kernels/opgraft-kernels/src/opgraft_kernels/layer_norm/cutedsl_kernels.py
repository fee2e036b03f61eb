"""LayerNorm by `opgraft_kernels.clusters`: its tiles, and the ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from opgraft_kernels.clusters.compiling import Functions
from opgraft_kernels.clusters.exchange import OTHER_FORWARD_TILES, Tile
from opgraft_kernels.clusters.forward import ForwardKind, compile_forward, norm_forward

__all__ = [
    "FORWARD_TILES",
    "compile_kind",
    "kinds",
    "layer_norm_forward",
]

# By the width of the rows, as for RMSNorm.
FORWARD_TILES = {tile.hidden: tile for tile in (Tile(512, 4, 4, 4), Tile(512, 4, 8, 4))}

_PARAMETERS = ((True, True), (True, False), (False, True), (False, False))


def kinds() -> Iterator[ForwardKind]:
    """Functions that there are, most of them, to be compiled for any Hopper GPU."""
    for tile in FORWARD_TILES.values():
        for has_weight, has_bias in _PARAMETERS:
            yield ForwardKind(torch.bfloat16, tile, has_weight, has_bias, True, None)
        yield ForwardKind(torch.float16, tile, True, True, True, None)
    for tile in OTHER_FORWARD_TILES:
        yield ForwardKind(torch.bfloat16, tile, True, True, True, None)


_functions = Functions(compile_forward)
compile_kind = compile_forward


def layer_norm_forward(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LayerNorm over the last dimension.

    The signature, the formula and the results are those of ``aten::native_layer_norm``.

    Args:
        input: ``[*outer, hidden]``, float16 or bfloat16, contiguous, not empty, 16 bytes aligned;
            hidden is 65536 or 131072.
        normalized_shape: ``[hidden]``.
        weight: ``[hidden]``, the dtype of ``input``, contiguous, 16 bytes aligned; or None.
        bias: likewise.
        eps: added to the variance.

    Returns:
        The output, contiguous, in the shape and dtype of ``input``; and the mean and ``rstd``,
        float32, ``[*outer, 1]``, for the backward.
    """
    tile = FORWARD_TILES[normalized_shape[0]]
    output, mean, rstd = norm_forward(tile, _functions, input, weight, bias, eps, has_mean=True)
    assert mean is not None
    return output, mean, rstd
