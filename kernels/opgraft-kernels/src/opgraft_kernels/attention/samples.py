"""Calls of the attention ops for `opgraft verify`, on both sides of what the conditions ask.

Made by hand, as native's kernels trust the sizes and strides that these ops get, and crash on
others; and because those of PyTorch's own tests are too small to be taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch

__all__ = ["samples"]


class _Case(NamedTuple):
    dtype: torch.dtype = torch.bfloat16
    heads: int = 16
    key_heads: int = 16
    queries: int = 2048
    keys: int = 2048
    dim: int = 128
    dim_v: int = 128
    is_causal: bool = False
    batch: int = 1
    dropout_p: float = 0.0
    scale: float | None = None
    has_bias: bool = False
    # In memory [batch, length, heads, dim], as a projection's output is seen.
    is_projected: bool = False


_FLOAT16 = torch.float16

# What is worth the most first: a verification may stop anywhere.
_CASES = (
    _Case(),
    _Case(_FLOAT16, is_causal=True),
    _Case(is_projected=True),
    _Case(heads=8, key_heads=1, queries=4096, keys=4096, is_causal=True),  # grouped queries
    _Case(queries=511, keys=8192),  # the last that is too few, and the first that is not
    _Case(queries=512, keys=8192),
    _Case(_FLOAT16, queries=2047, keys=2113),
    _Case(queries=1024, keys=4096, is_causal=True),  # aligned otherwise by different ops
    _Case(_FLOAT16, batch=4, heads=32, key_heads=32, dim=64, dim_v=64),
    _Case(scale=0.25),
    _Case(scale=-0.25),
    _Case(dropout_p=0.1),
    _Case(has_bias=True),
    _Case(torch.float32, heads=2, key_heads=2, queries=64, keys=64),
    _Case(heads=2, key_heads=2, queries=256, keys=256),
    _Case(dim=96, dim_v=96),
    _Case(dim=256, dim_v=256),
    _Case(dim=192, dim_v=128, is_causal=True),
    _Case(dim=72, dim_v=72),
)


def samples(
    arguments: Collection[str], device: torch.device, *, heads_first: bool
) -> Iterator[dict[str, Any]]:
    """Calls of a forward op, as arguments by name.

    Args:
        arguments: the op's, by name.
        device: where the tensors are to live.
        heads_first: whether the op's tensors are ``[batch, heads, length, dim]``, or else
            ``[batch, length, heads, dim]``.
    """
    for case in _CASES:
        if case.has_bias and "attn_bias" not in arguments:
            continue
        named = {**_tensors(case, device, heads_first), **_options(case, device)}
        yield {name: value for name, value in named.items() if name in arguments}
    if "cum_seq_q" in arguments:
        for lengths in ((2048, 513, 1, 1534), (3, 5)):
            named = _packed_sequences(lengths, device)
            yield {name: value for name, value in named.items() if name in arguments}


def _tensors(case: _Case, device: torch.device, heads_first: bool) -> dict[str, torch.Tensor]:
    shapes = {
        "query": (case.heads, case.queries, case.dim),
        "key": (case.key_heads, case.keys, case.dim),
        "value": (case.key_heads, case.keys, case.dim_v),
    }
    made = {}
    for name, (heads, length, dim) in shapes.items():
        as_projected = case.is_projected or not heads_first
        shape = (length, heads, dim) if as_projected else (heads, length, dim)
        tensor = torch.randn(case.batch, *shape, device=device, dtype=case.dtype)
        made[name] = tensor.transpose(1, 2) if as_projected == heads_first else tensor
    return made


def _options(case: _Case, device: torch.device) -> dict[str, Any]:
    bias = None
    if case.has_bias:
        shape = (case.batch, case.heads, case.queries, case.keys)
        bias = torch.randn(shape, device=device, dtype=case.dtype)
    return {
        "attn_bias": bias,
        "compute_log_sumexp": True,
        "cum_seq_q": None,
        "cum_seq_k": None,
        "max_q": case.queries,
        "max_k": case.keys,
        "dropout_p": case.dropout_p,
        "is_causal": case.is_causal,
        "return_debug_mask": False,
        "scale": case.scale,
    }


def _packed_sequences(lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Packed sequences: laid end to end, with no padding."""
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    case = _Case(queries=max(lengths), keys=max(lengths), is_causal=True)
    shape = (sum(lengths), case.heads, case.dim)
    names = ("query", "key", "value")
    return {
        **_options(case, device),
        **{name: torch.randn(shape, device=device, dtype=case.dtype) for name in names},
        "cum_seq_q": ends,
        "cum_seq_k": ends,
    }
