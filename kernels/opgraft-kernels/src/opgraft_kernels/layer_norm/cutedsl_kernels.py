"""LayerNorm by `opgraft_kernels.clusters`: its tiles, and the ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from opgraft_kernels.clusters.backward import BackwardKind, norm_backward
from opgraft_kernels.clusters.compiling import Functions
from opgraft_kernels.clusters.exchange import Tile, by_width
from opgraft_kernels.clusters.forward import ForwardKind, norm_forward
from opgraft_kernels.clusters.kinds import Kind, compile_kind

__all__ = [
    "BACKWARD_TILES",
    "FORWARD_TILES",
    "compile_kind",
    "kinds",
    "layer_norm_backward",
    "layer_norm_forward",
]

# By the width of the rows, as for RMSNorm.
FORWARD_TILES = by_width(
    Tile(128, 8, 2, 5), Tile(128, 8, 4, 5), Tile(128, 8, 8, 5), Tile(128, 16, 8, 3)
)
BACKWARD_TILES = by_width(
    Tile(512, 2, 2, 1, stages=3),
    Tile(256, 2, 8, 3, stages=3),
    Tile(256, 4, 8, 2, stages=2),
    Tile(512, 4, 8, 1, stages=2),
)

_PARAMETERS = ((True, True), (True, False), (False, True), (False, False))


def kinds() -> Iterator[Kind]:
    """Functions that there are, most of them, to be compiled for any Hopper GPU."""
    for tile in FORWARD_TILES.values():
        for has_weight, has_bias in _PARAMETERS:
            yield ForwardKind(torch.bfloat16, tile, has_weight, has_bias, True, None)
        yield ForwardKind(torch.float16, tile, True, True, True, None)
    for tile in BACKWARD_TILES.values():
        for needs_dw, needs_db in _PARAMETERS:
            yield BackwardKind(torch.bfloat16, tile, True, True, needs_dw, needs_db, None)
        yield BackwardKind(torch.bfloat16, tile, False, True, False, True, None)
        yield BackwardKind(torch.bfloat16, tile, False, True, False, False, None)
        yield BackwardKind(torch.float16, tile, True, True, True, True, None)


_functions = Functions(compile_kind)


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
            hidden is one of `FORWARD_TILES`.
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


def layer_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of `layer_norm_forward` with respect to ``input``, ``weight`` and ``bias``.

    The signature, the formula and the results are those of ``aten::native_layer_norm_backward``.
    The gradients of weight and bias are summed in float32 in a fixed order: the same bits on every
    run on one kind of device.

    Args:
        grad_out: the shape and dtype of ``input``, contiguous, 16 bytes aligned.
        input: as in the forward, but that hidden is one of `BACKWARD_TILES`.
        normalized_shape: as in the forward.
        mean: what the forward returned, float32, one value a row, contiguous.
        rstd: likewise.
        weight: as in the forward.
        bias: as in the forward; its values don't matter.
        output_mask: which of the three gradients is wanted; that of ``input`` always is.

    Returns:
        The gradients, contiguous, like what they are gradients of; None for one that is masked off
        or whose tensor is None.
    """
    needs_dw = bool(output_mask[1]) and weight is not None
    needs_db = bool(output_mask[2]) and bias is not None
    return norm_backward(
        BACKWARD_TILES[normalized_shape[0]], _functions,
        grad_out, input, weight, mean, rstd, needs_dw, needs_db,
    )  # fmt: skip
