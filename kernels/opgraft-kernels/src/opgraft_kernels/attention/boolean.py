"""``aten::scaled_dot_product_attention`` with a boolean mask, in the ops of `boolean_ops.py`, and
its derivative. No DSL is imported here.

The ops that it calls natively know additive masks alone. So natively a boolean mask is written out
in 16 bits, and what is False is a number there, of which a kernel must find out whether it stands
for nothing. Here the mask is read as it is.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import opgraft
from opgraft_kernels.attention import aten, boolean_ops
from opgraft_kernels.kept import keep, take

__all__ = ["attention", "backward", "setup_context"]

_ops = getattr(torch.ops, boolean_ops.NAMESPACE)
_forward = getattr(_ops, boolean_ops.FORWARD).default
_backward = getattr(_ops, boolean_ops.BACKWARD).default
_choose = torch.ops.aten._fused_sdp_choice.default


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """``aten::scaled_dot_product_attention`` of ``[batch, heads, length, dim]``, under a mask."""
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if not _is_like_native(_choose(*given, scale=scale, enable_gqa=enable_gqa), query.device.type):
        # Another backend was asked for, or this one is missing.
        return _native(*given, scale=scale, enable_gqa=enable_gqa)
    lowest = _lowest(query.dtype, query.device.type)
    out, logsumexp = _forward(query, key, value, attn_mask, aten.scale_of(query, scale), lowest)
    keep(out, (out, logsumexp), inputs=(query, key, value))
    return out


def _is_like_native(choice: int, device: str) -> bool:
    """Whether a query that attends to nothing gets here what it gets natively."""
    return device == "cpu" or choice == SDPBackend.CUDNN_ATTENTION.value


@functools.cache
def _lowest(dtype: torch.dtype, device: str) -> float:
    """What native adds to scores where a mask is False."""
    # For cuDNN, until torch 2.12: pytorch 177868.
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if device == "cpu" or version >= (2, 12):
        return -math.inf
    return torch.tensor(-65504.0).to(dtype).item()


def _native(*given: Any, **options: Any) -> Tensor:
    return opgraft.native("aten::scaled_dot_product_attention")(*given, **options)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, mask, _, _, ctx.scale, ctx.enable_gqa = inputs
    kept = take(output) or (None, None)
    ctx.save_for_backward(query, key, value, mask, *kept)


def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    query, key, value, mask, out, logsumexp = ctx.saved_tensors
    if out is None:
        gradients = _native_gradients(grad, (query, key, value), mask, ctx.scale, ctx.enable_gqa)
    else:
        # Autograd's gradients may be lazy: no router has looked at them.
        if grad._is_zerotensor():
            grad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
        lowest = _lowest(query.dtype, query.device.type)
        tensors = (grad.resolve_neg(), query, key, value, out, logsumexp, mask)
        with torch.no_grad():  # `create_graph` or not: the op of the backward has no derivative
            gradients = _backward(*tensors, aten.scale_of(query, ctx.scale), lowest)
    return (*gradients, None, None, None, None, None)


def _native_gradients(
    grad: Tensor, inputs: tuple[Tensor, ...], mask: Tensor, scale: float | None, enable_gqa: bool
) -> tuple[Tensor, ...]:
    """Where the native kernel computed the output: by another backend, or as an override failed."""
    with torch.enable_grad():
        given = [each.detach().requires_grad_() for each in inputs]
        out = _native(*given, mask, 0.0, False, scale=scale, enable_gqa=enable_gqa)
        return torch.autograd.grad(out, given, grad)
