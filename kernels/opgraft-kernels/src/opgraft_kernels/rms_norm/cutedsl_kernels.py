"""RMSNorm by `opgraft_kernels.clusters`: its tiles, and the ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from opgraft_kernels.clusters.compiling import Functions
from opgraft_kernels.clusters.exchange import DTYPES, OTHER_FORWARD_TILES, Tile
from opgraft_kernels.clusters.forward import ForwardKind, compile_forward, norm_forward

__all__ = [
    "FORWARD_TILES",
    "compile_kind",
    "kinds",
    "rms_norm_forward",
]

# The fastest of those tried on an H200, by the width of the rows.
FORWARD_TILES = {tile.hidden: tile for tile in (Tile(512, 4, 4, 4), Tile(512, 4, 8, 4))}


def kinds() -> Iterator[ForwardKind]:
    """Functions that there are, most of them, to be compiled for any Hopper GPU."""
    for tile in FORWARD_TILES.values():
        for dtype in DTYPES:
            yield ForwardKind(dtype, tile, True, False, False, None)
        yield ForwardKind(torch.bfloat16, tile, False, False, False, None)
    for tile in OTHER_FORWARD_TILES:
        yield ForwardKind(torch.bfloat16, tile, True, False, False, None)


_functions = Functions(compile_forward)
compile_kind = compile_forward


def rms_norm_forward(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the trailing dimensions, ``input * rsqrt(mean(input ** 2) + eps) * weight``.

    The signature, the formula and the results are those of ``aten::_fused_rms_norm``.

    Args:
        input: ``[*outer, hidden]``, float16 or bfloat16, contiguous, not empty, 16 bytes aligned;
            hidden is 65536 or 131072.
        normalized_shape: ``[hidden]``.
        weight: ``[hidden]``, the dtype of ``input``, contiguous, 16 bytes aligned; or None.
        eps: added to the mean. None is the epsilon of float32, whatever the input's dtype.

    Returns:
        The output, contiguous, in the shape and dtype of ``input``; and ``rstd``, float32,
        ``[*outer, 1]``, for the backward.
    """
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    tile = FORWARD_TILES[normalized_shape[0]]
    output, _, rstd = norm_forward(tile, _functions, input, weight, None, eps, has_mean=False)
    return output, rstd
