"""What each of ATen's attention ops takes and returns, around a kernel that does the work.

The ops differ in the layout of their outputs, in the shape of their logsumexp, and in what they
return besides (seeds of a dropout that is not there). All of them mean the same logsumexp, that of
the scaled scores, natural, in float32: so a forward by one kernel and a backward by another agree.

What they differ in is the table `CUDNN` to `CPU`; an op's arguments are named by its schema. Every
function takes the name of the module that has the kernels first, `cutedsl_kernels` or
`triton_kernels`, which is imported at the first call.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opgraft_kernels.integers import round_up

__all__ = [
    "aligned",
    "cpu_backward",
    "cpu_forward",
    "cudnn_backward",
    "cudnn_forward",
    "efficient_backward",
    "efficient_forward",
    "flash_backward",
    "flash_forward",
    "kernels",
    "like",
    "raw_flash_backward",
    "raw_flash_forward",
    "scale_of",
]


@cache
def kernels(module: str) -> Any:
    """A module of this package that has kernels, imported by its first call."""
    return importlib.import_module(f".{module}", __package__)


def scale_of(query: Tensor, scale: float | None) -> float:
    """The scores' scale, by default that of the head dimension."""
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def like(query: Tensor, head_dim_v: int) -> Tensor:
    """``[..., head_dim_v]`` with its dimensions in the order that `query` has them in memory."""
    if query.shape[-1] == head_dim_v:
        return torch.empty_like(query)
    shape = (*query.shape[:-1], head_dim_v)
    order = sorted(range(len(shape)), key=query.stride, reverse=True)
    return torch.empty_permuted(shape, order, dtype=query.dtype, device=query.device)


def _length_before_heads(t: Tensor, head_dim: int) -> Tensor:
    """``[batch, heads, length, head_dim]``, in memory ``[batch, length, heads, head_dim]``."""
    batch, heads, length, _ = t.shape
    shape = (batch, length, heads, head_dim)
    return torch.empty(shape, dtype=t.dtype, device=t.device).transpose(1, 2)


def aligned(t: Tensor) -> Tensor:
    """`t`, or a copy where its last dimension is strided or expanded, or where the others, or its
    first element, are not a multiple of 16 bytes apart: what kernels read by vector and by copy
    engine. `.sum()` makes such gradients."""
    unit = 16 // t.element_size()
    *others, last = t.stride()
    if last == 1 and t.data_ptr() % 16 == 0:
        for stride in others:
            if stride % unit or stride <= 0:
                break
        else:
            return t
    # Not `contiguous()`: to that, any stride of a dimension of size 1 is one.
    return t.clone(memory_format=torch.contiguous_format)


@cache
def _names(op: str) -> tuple[str, ...]:
    """The names of an op's arguments in the torch that is running."""
    schema = getattr(torch.ops.aten, op).default._schema
    return tuple(argument.name for argument in schema.arguments)


# --------------------------------------------------------------------------------------------------
# What the ops differ in
# --------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How an op and its backward lay out what they take and return."""

    op: str
    backward_op: str
    #: Memory for the output, of the query and the values' head dimension.
    out: Callable[[Tensor, int], Tensor]
    #: Memory for the gradient of a tensor.
    gradient: Callable[[Tensor], Tensor]
    #: Memory for the logsumexp as it is returned, of the query and whether it is wanted.
    logsumexp: Callable[[Tensor, bool], Tensor | None]
    #: The logsumexp as the kernels have it, ``[batch, heads, length]``.
    rows: Callable[[Tensor, Tensor], Tensor]
    #: What the forward returns, of the output, the logsumexp, the query and the key.
    results: Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[Any, ...]]
    #: Whether the backward returns the bias's gradient after the others.
    has_bias_gradient: bool = False


def _cudnn_logsumexp(query: Tensor, wanted: bool) -> Tensor | None:
    if not wanted:
        return None
    return torch.empty((*query.shape[:-1], 1), dtype=torch.float32, device=query.device)


def _flash_logsumexp(query: Tensor, wanted: bool) -> Tensor:
    return torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)


# Rows of the logsumexp are padded to a multiple of this, and native's backward reads the padding:
# infinity there takes part in nothing.
_EFFICIENT_ROWS = 32


def _efficient_logsumexp(query: Tensor, wanted: bool) -> Tensor:
    batch, heads, length, _ = query.shape
    padded = round_up(length, _EFFICIENT_ROWS) if wanted else 0
    shape = (batch, heads, padded)
    if padded in (0, length):
        return torch.empty(shape, dtype=torch.float32, device=query.device)
    return torch.full(shape, math.inf, dtype=torch.float32, device=query.device)


def _cpu_logsumexp(query: Tensor, wanted: bool) -> Tensor:
    batch, heads, length, _ = query.shape
    shape = (batch, length, heads)
    return torch.empty(shape, dtype=torch.float32, device=query.device).transpose(1, 2)


def _cudnn_results(
    out: Tensor, logsumexp: Tensor | None, query: Tensor, key: Tensor
) -> tuple[Any, ...]:
    seed, offset = (torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))
    return out, logsumexp, None, None, query.shape[2], key.shape[2], seed, offset, None


def _flash_results(
    out: Tensor, logsumexp: Tensor | None, query: Tensor, key: Tensor
) -> tuple[Any, ...]:
    return out, logsumexp, None, None, query.shape[2], key.shape[2], *_flash_extras(query)


def _flash_extras(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused, debug_attn_mask: read by nobody where there is no dropout."""
    return (
        torch.empty(2, dtype=torch.uint64, device=query.device),
        torch.empty((), dtype=torch.uint64, device=query.device),
        torch.empty(0, dtype=query.dtype, device=query.device),
    )


def _efficient_results(
    out: Tensor, logsumexp: Tensor | None, query: Tensor, key: Tensor
) -> tuple[Any, ...]:
    # Numbers on the CPU are a part of a launch plan's key: the backward's has to come again.
    seed, offset = (torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(2))
    return out, logsumexp, seed, offset


def _cpu_results(
    out: Tensor, logsumexp: Tensor | None, query: Tensor, key: Tensor
) -> tuple[Any, ...]:
    assert logsumexp is not None
    # Of a query that attends to nothing native says 0. In either backward its probabilities are
    # 0 all the same: all of its scores are -inf there, too.
    return out, logsumexp.masked_fill_(logsumexp == math.inf, 0.0)


def _length_before_heads_like(t: Tensor) -> Tensor:
    return _length_before_heads(t, t.shape[-1])


def _unchanged(logsumexp: Tensor, query: Tensor) -> Tensor:
    return logsumexp


#: Torch's own choice on Hopper.
CUDNN = Layout(
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    out=like,
    gradient=torch.empty_like,
    logsumexp=_cudnn_logsumexp,
    rows=lambda logsumexp, query: logsumexp.view(query.shape[:-1]),
    results=_cudnn_results,
)
FLASH = Layout(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    out=like,
    gradient=torch.empty_like,
    logsumexp=_flash_logsumexp,
    rows=_unchanged,
    results=_flash_results,
)
EFFICIENT = Layout(
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    out=_length_before_heads,
    gradient=_length_before_heads_like,
    logsumexp=_efficient_logsumexp,
    rows=lambda logsumexp, query: logsumexp[:, :, : query.shape[2]],
    results=_efficient_results,
    has_bias_gradient=True,
)
#: Where Triton's interpreter runs.
CPU = Layout(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    out=like,
    gradient=_length_before_heads_like,
    logsumexp=_cpu_logsumexp,
    rows=_unchanged,
    results=_cpu_results,
)


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


def _bias(given: dict[str, Any]) -> Tensor | None:
    """The additive mask, ``[batch, heads, length, key length]``; None if there is none."""
    bias = given.get("attn_bias", given.get("attn_mask"))
    if bias is None:
        return None
    query, key = given["query"], given["key"]
    return bias.expand(*query.shape[:3], key.shape[2])


# Rows of the bias's gradient begin at multiples of this, as natively.
_BIAS_KEYS = 16


def _bias_gradient(bias: Tensor | None, given: dict[str, Any]) -> Tensor | None:
    """Memory for it; None where it is not wanted."""
    if bias is None or not given["grad_input_mask"][3]:
        return None
    new = torch.zeros if given.get("is_causal", False) else torch.empty
    *others, keys = bias.shape
    padded = round_up(keys, _BIAS_KEYS)
    return new((*others, padded), dtype=bias.dtype, device=bias.device)[..., :keys]


def _only_given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if t is not None}


def _forward(
    layout: Layout, module: str, *args: Any, scale: float | None = None, **more: Any
) -> tuple[Any, ...]:
    given = dict(zip(_names(layout.op), args, strict=False)) | more
    query, key, value = given["query"], given["key"], given["value"]
    wanted = given.get("compute_log_sumexp", True)
    out, logsumexp = layout.out(query, value.shape[-1]), layout.logsumexp(query, wanted)
    kernels(module).forward(
        *map(aligned, (query, key, value)),
        out,
        layout.rows(logsumexp, query) if wanted and logsumexp is not None else None,
        scale_of(query, scale),
        given.get("is_causal", False),
        **_only_given(bias=_bias(given)),
    )
    return layout.results(out, logsumexp, query, key)


def _backward(
    layout: Layout, module: str, *args: Any, scale: float | None = None, **more: Any
) -> tuple[Any, ...]:
    given = dict(zip(_names(layout.backward_op), args, strict=False)) | more
    query, key, value = given["query"], given["key"], given["value"]
    gradients = tuple(layout.gradient(t) for t in (query, key, value))
    bias = _bias(given)
    dbias = _bias_gradient(bias, given) if layout.has_bias_gradient else None
    kernels(module).backward(
        *map(aligned, (args[0], query, key, value, given["out"])),  # the first is grad_out
        layout.rows(given["logsumexp"], query),
        *gradients,
        scale_of(query, scale),
        given.get("is_causal", False),
        **_only_given(bias=bias, dbias=dbias),
    )
    return (*gradients, dbias) if layout.has_bias_gradient else gradients


cudnn_forward, cudnn_backward = partial(_forward, CUDNN), partial(_backward, CUDNN)
flash_forward, flash_backward = partial(_forward, FLASH), partial(_backward, FLASH)
efficient_forward, efficient_backward = partial(_forward, EFFICIENT), partial(_backward, EFFICIENT)
cpu_forward, cpu_backward = partial(_forward, CPU), partial(_backward, CPU)


# --------------------------------------------------------------------------------------------------
# aten::_flash_attention_forward: [batch, length, heads, dim], or packed sequences
# --------------------------------------------------------------------------------------------------


def raw_flash_forward(
    module: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    **unused: Any,
) -> tuple[Any, ...]:
    out = torch.empty_like(query)
    by, scale = kernels(module), scale_of(query, scale)
    if cum_seq_q is None:
        batch, length, heads, _ = query.shape
        shape = (batch, heads, length)
        logsumexp = torch.empty(shape, dtype=torch.float32, device=query.device)
        inputs = (aligned(t).transpose(1, 2) for t in (query, key, value))
        by.forward(*inputs, out.transpose(1, 2), logsumexp, scale, is_causal)
    else:
        total, heads, _ = query.shape
        logsumexp = torch.empty((heads, total), dtype=torch.float32, device=query.device)
        packed = map(aligned, (query, key, value))
        by.forward_varlen(*packed, out, logsumexp, cum_seq_q, cum_seq_k, scale, is_causal)
    return out, logsumexp, *_flash_extras(query)


def raw_flash_backward(
    module: str,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor | None,
    unused: Tensor | None,
    *,
    scale: float | None = None,
    **also_unused: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    by, scale = kernels(module), scale_of(query, scale)
    tensors = map(aligned, (grad_out, query, key, value, out))
    if cum_seq_q is None:
        inputs = (t.transpose(1, 2) for t in tensors)
        outputs = (t.transpose(1, 2) for t in gradients)
        by.backward(*inputs, logsumexp, *outputs, scale, is_causal)
    else:
        by.backward_varlen(
            *tensors,
            logsumexp,
            *gradients,
            cum_seq_q,
            cum_seq_k,
            scale,
            is_causal,
        )
    return gradients
