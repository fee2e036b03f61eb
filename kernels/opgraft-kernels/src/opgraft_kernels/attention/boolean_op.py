"""The op that attention with a boolean mask is made of here.

The ops of ATen that ``aten::scaled_dot_product_attention`` calls know additive masks only. This one
takes the boolean mask, and is overridden as any op is, with launch plans. Its native kernel is
below, in ATen's ops: it serves while nothing is compiled, and is what the kernels are compared
with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opgraft_kernels.attention import aten

__all__ = ["NAME", "NAMESPACE", "attention", "attention_by"]

NAMESPACE, NAME = "opgraft_kernels", "_attention_with_boolean_mask"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
# Of a query ``[batch, heads, length, dim]``, and of keys and values, whose heads divide those. The
# mask is ``[batch, heads, length, key length]``, or expands to it; `lowest` is what is added to the
# scores where it is False. A query whose scores are -inf throughout gets 0. There is no derivative.
_library.define(
    f"{NAME}(Tensor query, Tensor key, Tensor value, Tensor mask, float scale, float lowest) "
    "-> Tensor"
)


@torch.no_grad()
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, lowest: float
) -> Tensor:
    """The output, laid out as the query, by ATen's ops."""
    # Where it is broadcast, what is made of it is, too.
    seen = _expanded(mask, query, key)
    for dim, stride in enumerate(seen.stride()):
        seen = seen.narrow(dim, 0, 1) if stride == 0 else seen
    bias = torch.where(seen, 0.0, lowest).to(query.dtype)
    # Where `lowest` is a number, it is added to all scores of a query alike.
    is_empty = ~seen.any(-1, keepdim=True) & (lowest == -math.inf)
    # A kernel would make NaN of a row of -inf.
    bias = bias.masked_fill(is_empty, 0.0).expand(*query.shape[:3], key.shape[2])
    if query.device.type == "cpu":
        groups = query.shape[1] // key.shape[1]
        keys, values = (t.repeat_interleave(groups, 1) for t in (key, value))
        found, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, attn_mask=bias, scale=scale
        )
    else:
        found, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, False, scale=scale
        )
    return aten.like(query, value.shape[-1]).copy_(found.masked_fill(is_empty, 0.0))


def attention_by(
    module: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    lowest: float,
) -> Tensor:
    """As `attention`, by the kernels of a module of this package, imported by the first call."""
    out = aten.like(query, value.shape[-1])
    inputs = map(aten.aligned, (query, key, value))
    seen = _expanded(mask, query, key)
    aten.kernels(module).forward(*inputs, out, None, scale, False, bias=seen, lowest=lowest)
    return out


def _expanded(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return mask.expand(*query.shape[:3], key.shape[2])


def _metadata(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return aten.like(query, value.shape[-1])


_library.impl(NAME, attention, "CompositeExplicitAutograd")
_library.impl(NAME, _metadata, "Meta")
