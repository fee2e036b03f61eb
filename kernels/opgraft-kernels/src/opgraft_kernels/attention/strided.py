"""``aten::scaled_dot_product_attention`` with a mask whose last stride is not 1. No DSL is imported
here.

Natively no fused backend takes such a mask on CUDA: all scores are computed, and kept, in float32.
Models have them: T5's position bias is permuted, and what transformers makes of ``q_idx >= 0`` for
a compiled graph is expanded along the keys. Here the mask is copied, and native chooses again: of
the fused ops that it then calls other overrides may take the call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import opgraft
from opgraft import triton_utils
from opgraft_kernels.integers import round_up

__all__ = ["attention"]

_choose = torch.ops.aten._fused_sdp_choice.default
_by_math = torch.ops.aten._scaled_dot_product_attention_math.default
# The other backends know no mask, or compute as they do without one.
_FUSED = (SDPBackend.CUDNN_ATTENTION.value, SDPBackend.EFFICIENT_ATTENTION.value)
# Rows of a mask begin at multiples of this: else native copies an additive mask once more.
_ALIGNED = 16
# Times log2(e) a larger number is infinite in float32. `_SMALLER` keeps it above all scores.
_LARGEST, _SMALLER = 1e37, 2.0**-5


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
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    native = opgraft.native("aten::scaled_dot_product_attention")
    if not _pays(query, key, value, attn_mask, options):
        return native(query, key, value, attn_mask, dropout_p, is_causal, **options)
    mask = _dense(attn_mask)
    is_empty = _fill_empty_rows(mask)
    out = native(query, key, value, mask, dropout_p, is_causal, **options)
    # No compiled graph's backward is differentiated.
    if out.requires_grad and not triton_utils.is_traced():
        out = _TwiceDifferentiable.apply(options, out, query, key, value, mask)
    # A product, as NaN of a query or a value stays what it is. In the layout in which native's
    # matrix product returns it.
    return (out * ~is_empty).contiguous()


def _pays(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: dict[str, Any]) -> bool:
    """Whether a fused backend takes the call once the mask's rows are dense.

    None does where the user asked for another one, or where no gradient of a mask is to be had by
    one. Under deterministic algorithms the fused backward's sums are not those that were asked for.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    # A row stands for the mask that is not copied yet.
    row = mask.new_empty((*[1] * (mask.dim() - 1), mask.shape[-1]))
    row.requires_grad_(_is_learnt(mask))
    return _choice(query, key, value, row, options) in _FUSED


def _choice(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: Any) -> int:
    """The backend that native takes.

    As native asks, the device's function is: for tensors that are traced the op itself says that no
    fused backend takes them, as it is given tensors of no device.
    """
    device_key = torch._C.DispatchKey.__members__[
        torch._C._dispatch_key_for_device(query.device.type)
    ]
    keyset = torch._C.DispatchKeySet(device_key)
    return int(_choose.redispatch(keyset, query, key, value, mask, 0.0, False, **options))


def _dense(mask: Tensor) -> Tensor:
    """A copy whose rows are dense, and begin at multiples of 16 elements.

    What is broadcast stays so, but where a mask is learnt: its gradient is of each of its elements.
    """
    others = [slice(None) if stride or _is_learnt(mask) else slice(1) for stride in mask.stride()]
    source, keys = mask[tuple(others)], mask.shape[-1]
    rows = mask.new_empty((*source.shape[:-1], round_up(keys, _ALIGNED)))[..., :keys]
    # Detached, the copy's derivative is a copy's, and not that of a part of a larger tensor.
    return rows.detach().copy_(source)


def _is_learnt(mask: Tensor) -> bool:
    return mask.requires_grad and torch.is_grad_enabled()


def _fill_empty_rows(mask: Tensor) -> Tensor:
    """Let queries that attend to nothing attend to all, and say which these are.

    Natively they get 0. Fused backends differ: 0, NaN, or the values' mean. Rows of numbers that
    are infinite in their arithmetic become smaller, by which their softmax stays what it is, and
    rows of which it is NaN are NaN throughout.
    """
    # As a decorator it would be an object that the keys of the compiler's caches cannot hold.
    with torch.no_grad():
        if mask.dtype is torch.bool:
            is_empty = ~mask.any(-1, keepdim=True)
        else:
            highest = mask.amax(-1, keepdim=True)
            is_empty = highest == -math.inf
            factor = torch.where(highest.abs() > _LARGEST, _SMALLER, 1.0) + 0 * highest
            mask.mul_(factor.to(mask.dtype))
        mask.masked_fill_(is_empty, 1)
    return is_empty


class _TwiceDifferentiable(torch.autograd.Function):
    """A fused backend's output, whose gradient may be differentiated, as natively it may be.

    Fused backwards have no derivative. So where a graph of the backward is made
    (``create_graph=True``), the gradients are those of native's matrix products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        options: dict[str, Any],
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
    ) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(query, key, value, mask)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return (None, grad, *_no_gradients(ctx))
        # Inputs may be made of one another. Their views are not, so each gradient is of one alone.
        inputs = *tensors, mask = [each.view_as(each) for each in ctx.saved_tensors]
        if mask.dtype is torch.bool:
            mask = torch.where(mask, 0.0, -math.inf).to(grad.dtype)
        out, _ = _by_math(*tensors, mask, **ctx.options)
        wanted = [each for each in inputs if each.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
        return (None, None, *(next(found) if each.requires_grad else None for each in inputs))


def _no_gradients(ctx: Any) -> tuple[Tensor | None, ...]:
    """What adds nothing to the gradients of the inputs.

    Compiled autograd adds up whatever functions return, and None is an error there.
    """
    if not torch.compiler.is_compiling():
        return (None,) * 4
    return tuple(torch.zeros_like(t) if t.requires_grad else None for t in ctx.saved_tensors)
