"""The two ops that attention with a boolean mask is made of here: its forward, and its backward.

``aten::scaled_dot_product_attention`` returns the output alone, and the ops of ATen that it calls
know additive masks only. These take the boolean mask, and what the backward needs, and each is
overridden as any op is, with launch plans of its own. Their native kernels are below, in ATen's
ops: they serve while nothing is compiled, and are what the kernels are compared with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import opgraft
from opgraft_kernels.attention import aten

__all__ = [
    "BACKWARD",
    "FORWARD",
    "NAMESPACE",
    "attention",
    "attention_backward",
    "attention_backward_by",
    "attention_by",
    "stored",
]

NAMESPACE = "opgraft_kernels"
FORWARD, BACKWARD = "_attention_with_boolean_mask", "_attention_with_boolean_mask_backward"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
# Of a query ``[batch, heads, length, dim]``, and of keys and values, whose heads divide those. The
# mask is ``[batch, heads, length, key length]``, or expands to it; `lowest` is what is added to the
# scores where it is False. A query whose scores are -inf throughout gets 0. The logsumexp is that
# of the scores, natural, ``[batch, heads, length]``, inf of such a query; it is empty where it is
# not wanted.
_library.define(
    f"{FORWARD}(Tensor query, Tensor key, Tensor value, Tensor mask, float scale, float lowest, "
    "bool compute_logsumexp) -> (Tensor out, Tensor logsumexp)"
)
_library.define(
    f"{BACKWARD}(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, Tensor mask, float scale, float lowest) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
)
opgraft.register_backward(f"{NAMESPACE}::{FORWARD}", f"{NAMESPACE}::{BACKWARD}")


# --------------------------------------------------------------------------------------------------
# By ATen's ops
# --------------------------------------------------------------------------------------------------

# exp(S - L) is 0 for such an L. Not infinity: in which order cuDNN scales and subtracts is not to
# be read, and finite numbers make NaN in none. Times log2(e) it is finite in float32, too.
_ABOVE_ALL_SCORES = 1e38


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    lowest: float,
    compute_logsumexp: bool,
) -> tuple[Tensor, Tensor]:
    """The output, laid out as the query, and the scores' logsumexp."""
    bias, is_empty = _bias(mask, query, key, lowest)
    if query.device.type == "cpu":
        keys, values = (_repeated(t, query) for t in (key, value))
        found, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, attn_mask=bias, scale=scale
        )
    else:
        found, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, compute_logsumexp, scale=scale
        )
    out, logsumexp = _outputs(query, value, compute_logsumexp)
    out.copy_(found.masked_fill(is_empty, 0.0))
    if compute_logsumexp:
        logsumexp.copy_(lse.view(logsumexp.shape).masked_fill(is_empty[..., 0], math.inf))
    return out, logsumexp


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor,
    scale: float,
    lowest: float,
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, each laid out as it is.

    Raises:
        ValueError: the logsumexp was not wanted in the forward.
    """
    _check_logsumexp(query, logsumexp)
    bias, is_empty = _bias(mask, query, key, lowest)
    # What attends to nothing has no gradient, whatever a kernel makes of its scores. Its
    # probabilities have to be 0, too: exp of a large score is infinite, and times 0 that is NaN.
    grad_out = grad_out.masked_fill(is_empty, 0.0)
    logsumexp = logsumexp.masked_fill(is_empty[..., 0], _ABOVE_ALL_SCORES)
    if query.device.type == "cpu":
        keys, values = (_repeated(t, query) for t in (key, value))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(grad_out, query, keys, values, out, logsumexp, 0.0, False),
            attn_mask=bias,
            scale=scale,
        )
    else:
        seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
        lengths = (query.shape[2], key.shape[2])
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(grad_out, query, key, value, out, logsumexp[..., None], seed, offset, bias),
            *(None, None, *lengths, 0.0, False),
            scale=scale,
        )
    gradients = _gradients(query, key, value)
    for gradient, each in zip(gradients, found, strict=True):
        gradient.copy_(_summed(each, gradient))
    return gradients


def _bias(mask: Tensor, query: Tensor, key: Tensor, lowest: float) -> tuple[Tensor, Tensor]:
    """The additive mask as ATen makes it of a boolean one, and which queries attend to nothing."""
    # Where it is broadcast, what is made of it is, too.
    seen = stored(_expanded(mask, query, key))
    bias = torch.where(seen, 0.0, lowest).to(query.dtype)
    # Where `lowest` is a number, it is added to all scores of a query alike.
    is_empty = ~seen.any(-1, keepdim=True) & (lowest == -math.inf)
    # A kernel would make NaN of a row of -inf.
    bias = bias.masked_fill(is_empty, 0.0).expand(*query.shape[:3], key.shape[2])
    return bias, is_empty


def stored(t: Tensor) -> Tensor:
    """Of an expanded tensor what there is of it in memory, of size 1 where it is broadcast."""
    strides = t.stride()
    if 0 not in strides:
        return t
    shape = [size if stride else 1 for size, stride in zip(t.shape, strides, strict=True)]
    return t.as_strided(shape, strides)


def _expanded(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return mask.expand(*query.shape[:3], key.shape[2])


def _repeated(keys: Tensor, query: Tensor) -> Tensor:
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of what was repeated for groups of query heads."""
    batch, heads, length, dim = like.shape
    return gradient.view(batch, heads, -1, length, dim).sum(2)


# --------------------------------------------------------------------------------------------------
# By the kernels of a module of this package, imported by the first call
# --------------------------------------------------------------------------------------------------


def attention_by(
    module: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    lowest: float,
    compute_logsumexp: bool,
) -> tuple[Tensor, Tensor]:
    """As `attention`."""
    out, logsumexp = _outputs(query, value, compute_logsumexp)
    inputs = map(aten.aligned, (query, key, value))
    seen = _expanded(mask, query, key)
    written = logsumexp if compute_logsumexp else None
    aten.kernels(module).forward(*inputs, out, written, scale, False, bias=seen, lowest=lowest)
    return out, logsumexp


def attention_backward_by(
    module: str,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor,
    scale: float,
    lowest: float,
) -> tuple[Tensor, ...]:
    """As `attention_backward`."""
    _check_logsumexp(query, logsumexp)
    gradients = _gradients(query, key, value)
    inputs = map(aten.aligned, (grad_out, query, key, value, out))
    seen = _expanded(mask, query, key)
    aten.kernels(module).backward(
        *inputs, logsumexp, *gradients, scale, False, bias=seen, lowest=lowest
    )
    return gradients


# --------------------------------------------------------------------------------------------------
# What they return, without its values
# --------------------------------------------------------------------------------------------------


def _outputs(query: Tensor, value: Tensor, compute_logsumexp: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    shape = query.shape[:-1] if compute_logsumexp else (0,)
    return aten.like(query, value.shape[-1]), query.new_empty(shape, dtype=dtype)


def _check_logsumexp(query: Tensor, logsumexp: Tensor) -> None:
    if logsumexp.shape != query.shape[:-1]:
        raise ValueError(
            f"the gradients of {NAMESPACE}::{FORWARD} need its logsumexp: call it with "
            "compute_logsumexp=True"
        )


def _gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t) for t in tensors)


def _metadata(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    lowest: float,
    compute_logsumexp: bool,
) -> tuple[Tensor, Tensor]:
    return _outputs(query, value, compute_logsumexp)


def _backward_metadata(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, ...]:
    return _gradients(query, key, value)


_library.impl(FORWARD, attention, "CompositeExplicitAutograd")
_library.impl(BACKWARD, attention_backward, "CompositeExplicitAutograd")
_library.impl(FORWARD, _metadata, "Meta")
_library.impl(BACKWARD, _backward_metadata, "Meta")
