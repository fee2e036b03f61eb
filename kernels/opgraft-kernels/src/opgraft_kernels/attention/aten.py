"""What each of ATen's attention ops takes and returns, around a kernel that does the work.

The ops differ in the layout of their outputs, in the shape of their logsumexp, and in what they
return besides (seeds of a dropout that is not there). All of them mean the same logsumexp, that of
the scaled scores, natural, in float32: so a forward by one kernel and a backward by another agree.

Every function takes the name of the module that has the kernels first: `cutedsl_kernels` or
`triton_kernels`, which is imported at the first call.
"""

from __future__ import annotations

import importlib
import math
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "cpu_backward",
    "cpu_forward",
    "cudnn_backward",
    "cudnn_forward",
    "efficient_backward",
    "efficient_forward",
    "flash_backward",
    "flash_forward",
    "raw_flash_backward",
    "raw_flash_forward",
]

Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]


@cache
def _kernels(module: str) -> Any:
    return importlib.import_module(f".{module}", __package__)


def _scale(query: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _like(query: Tensor, head_dim_v: int) -> Tensor:
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


def _logsumexp(query: Tensor) -> Tensor:
    return torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)


def _readable(t: Tensor) -> Tensor:
    """`t`, or a copy where its last dimension is strided or expanded, or where the others, or its
    first element, are not a multiple of 16 bytes apart: what kernels read by vector and by copy
    engine. `.sum()` makes such gradients."""
    aligned = 16 // t.element_size()
    *others, last = t.stride()
    if last == 1 and t.data_ptr() % 16 == 0:
        for stride in others:
            if stride % aligned or stride <= 0:
                return t.contiguous()
        return t
    return t.clone(memory_format=torch.contiguous_format)


# --------------------------------------------------------------------------------------------------
# aten::_scaled_dot_product_cudnn_attention: torch's own choice on Hopper
# --------------------------------------------------------------------------------------------------


def cudnn_forward(
    module: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out = _like(query, value.shape[-1])
    logsumexp = _logsumexp(query) if compute_log_sumexp else None
    _kernels(module).forward(
        *map(_readable, (query, key, value)), out, logsumexp, _scale(query, scale), is_causal
    )
    seed = torch.empty((), dtype=torch.int64, device=query.device)
    offset = torch.empty((), dtype=torch.int64, device=query.device)
    return (
        out,
        None if logsumexp is None else logsumexp.unsqueeze(-1),
        None,
        None,
        query.shape[2],
        key.shape[2],
        seed,
        offset,
        None,
    )


def cudnn_backward(
    module: str,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Gradients:
    gradients = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    _kernels(module).backward(
        *map(_readable, (grad_out, query, key, value, out)),
        logsumexp.view(query.shape[:-1]),
        *gradients,
        _scale(query, scale),
        is_causal,
    )
    return gradients


# --------------------------------------------------------------------------------------------------
# aten::_scaled_dot_product_flash_attention
# --------------------------------------------------------------------------------------------------


def flash_forward(
    module: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out = torch.empty_like(query)
    logsumexp = _logsumexp(query)
    _kernels(module).forward(
        *map(_readable, (query, key, value)), out, logsumexp, _scale(query, scale), is_causal
    )
    return (
        out,
        logsumexp,
        None,
        None,
        query.shape[2],
        key.shape[2],
        *_flash_extras(query),
    )


def _flash_extras(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused, debug_attn_mask: read by nobody where there is no dropout."""
    return (
        torch.empty(2, dtype=torch.uint64, device=query.device),
        torch.empty((), dtype=torch.uint64, device=query.device),
        torch.empty(0, dtype=query.dtype, device=query.device),
    )


def flash_backward(
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
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    *,
    scale: float | None = None,
) -> Gradients:
    gradients = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    _kernels(module).backward(
        *map(_readable, (grad_out, query, key, value, out)),
        logsumexp,
        *gradients,
        _scale(query, scale),
        is_causal,
    )
    return gradients


# --------------------------------------------------------------------------------------------------
# aten::_scaled_dot_product_efficient_attention
# --------------------------------------------------------------------------------------------------

# Rows of the logsumexp are padded to a multiple of this, and native's backward reads the padding:
# infinity there takes part in nothing.
_EFFICIENT_ROWS = 32


def efficient_forward(
    module: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    batch, heads, length, _ = query.shape
    out = _length_before_heads(query, value.shape[-1])
    padded = -(-length // _EFFICIENT_ROWS) * _EFFICIENT_ROWS if compute_log_sumexp else 0
    shape = (batch, heads, padded)
    if padded in (0, length):
        logsumexp = torch.empty(shape, dtype=torch.float32, device=query.device)
    else:
        logsumexp = torch.full(shape, math.inf, dtype=torch.float32, device=query.device)
    _kernels(module).forward(
        *map(_readable, (query, key, value)),
        out,
        logsumexp[:, :, :length] if compute_log_sumexp else None,
        _scale(query, scale),
        is_causal,
    )
    # Numbers on the CPU are a part of a launch plan's key: the backward's has to come again.
    seed, offset = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    return out, logsumexp, seed, offset


def efficient_backward(
    module: str,
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    gradients = (
        _length_before_heads(query, query.shape[-1]),
        _length_before_heads(key, key.shape[-1]),
        _length_before_heads(value, value.shape[-1]),
    )
    _kernels(module).backward(
        *map(_readable, (grad_out_, query, key, value, out)),
        logsumexp[:, :, : query.shape[2]],
        *gradients,
        _scale(query, scale),
        is_causal,
    )
    return (*gradients, None)


# --------------------------------------------------------------------------------------------------
# aten::_flash_attention_forward: [batch, length, heads, dim], or sequences laid end to end
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
    kernels, scale = _kernels(module), _scale(query, scale)
    if cum_seq_q is None:
        batch, length, heads, _ = query.shape
        shape = (batch, heads, length)
        logsumexp = torch.empty(shape, dtype=torch.float32, device=query.device)
        inputs = (_readable(t).transpose(1, 2) for t in (query, key, value))
        kernels.forward(*inputs, out.transpose(1, 2), logsumexp, scale, is_causal)
    else:
        total, heads, _ = query.shape
        logsumexp = torch.empty((heads, total), dtype=torch.float32, device=query.device)
        packed = map(_readable, (query, key, value))
        kernels.forward_varlen(*packed, out, logsumexp, cum_seq_q, cum_seq_k, scale, is_causal)
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
) -> Gradients:
    gradients = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    kernels, scale = _kernels(module), _scale(query, scale)
    tensors = map(_readable, (grad_out, query, key, value, out))
    if cum_seq_q is None:
        inputs = (t.transpose(1, 2) for t in tensors)
        outputs = (t.transpose(1, 2) for t in gradients)
        kernels.backward(*inputs, logsumexp, *outputs, scale, is_causal)
    else:
        kernels.backward_varlen(
            *tensors,
            logsumexp,
            *gradients,
            cum_seq_q,
            cum_seq_k,
            scale,
            is_causal,
        )
    return gradients


# --------------------------------------------------------------------------------------------------
# aten::_scaled_dot_product_flash_attention_for_cpu: where Triton's interpreter runs
# --------------------------------------------------------------------------------------------------


def cpu_forward(
    module: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    out = torch.empty_like(query)
    logsumexp = torch.empty(
        (batch, length, heads), dtype=torch.float32, device=query.device
    ).transpose(1, 2)
    _kernels(module).forward(
        *map(_readable, (query, key, value)), out, logsumexp, _scale(query, scale), is_causal
    )
    return out, logsumexp


def cpu_backward(
    module: str,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Gradients:
    gradients = (
        _length_before_heads(query, query.shape[-1]),
        _length_before_heads(key, key.shape[-1]),
        _length_before_heads(value, value.shape[-1]),
    )
    _kernels(module).backward(
        *map(_readable, (grad_out, query, key, value, out)),
        logsumexp,
        *gradients,
        _scale(query, scale),
        is_causal,
    )
    return gradients
