"""RMSNorm by `opgraft_kernels.clusters`: its tiles, and the ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from opgraft_kernels.clusters.backward import BackwardKind, norm_backward
from opgraft_kernels.clusters.compiling import Functions
from opgraft_kernels.clusters.exchange import DTYPES, Tile, by_width
from opgraft_kernels.clusters.forward import ForwardKind, norm_forward
from opgraft_kernels.clusters.kinds import Kind, compile_kind

__all__ = [
    "BACKWARD_TILES",
    "FORWARD_TILES",
    "compile_kind",
    "kinds",
    "rms_norm_backward",
    "rms_norm_forward",
]

# The fastest on an H200, by the width of the rows (`benchmarks/rms_norm.py --tiles`).
FORWARD_TILES = by_width(Tile(256, 4, 8, 5), Tile(128, 16, 8, 3))
# Clusters of 16 blocks were a little faster at 65536, but not every part of a Hopper GPU runs them.
BACKWARD_TILES = by_width(
    Tile(256, 2, 8, 3, stages=3),
    Tile(512, 2, 8, 2, stages=2),
    # Most of a multiprocessor's registers hold dw: it runs one block.
    Tile(512, 4, 8, 1, stages=2),
)


def kinds() -> Iterator[Kind]:
    """Functions that there are, most of them, to be compiled for any Hopper GPU."""
    for tile in FORWARD_TILES.values():
        for dtype in DTYPES:
            yield ForwardKind(dtype, tile, True, False, False, None)
        yield ForwardKind(torch.bfloat16, tile, False, False, False, None)
    for tile in BACKWARD_TILES.values():
        for dtype in DTYPES:
            yield BackwardKind(dtype, tile, True, False, True, False, None)
        yield BackwardKind(torch.bfloat16, tile, True, False, False, False, None)
        yield BackwardKind(torch.bfloat16, tile, False, False, False, False, None)


_functions = Functions(compile_kind)


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
            hidden is one of `FORWARD_TILES`.
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


def rms_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of `rms_norm_forward` with respect to ``input`` and ``weight``.

    The signature, the formula and the results are those of ``aten::_fused_rms_norm_backward``.
    ``grad_weight`` is summed in float32 in a fixed order: the same bits on every run on one kind
    of device.

    Args:
        grad_out: the shape and dtype of ``input``, contiguous, 16 bytes aligned.
        input: as in the forward, but that hidden is one of `BACKWARD_TILES`.
        normalized_shape: as in the forward.
        rstd: what the forward returned, float32, one value a row, contiguous.
        weight: as in the forward.
        output_mask: which of the two gradients is wanted; that of ``input`` always is.

    Returns:
        ``grad_input``, like ``input``, and ``grad_weight``, like ``weight``; None for
        ``grad_weight`` where it is masked off or there is no weight.
    """
    needs_dw = bool(output_mask[1]) and weight is not None
    dx, dw, _ = norm_backward(
        BACKWARD_TILES[normalized_shape[0]], _functions,
        grad_out, input, weight, None, rstd, needs_dw, False,
    )  # fmt: skip
    return dx, dw
