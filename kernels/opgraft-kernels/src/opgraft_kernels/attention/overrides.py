"""Overrides of the attention ops: which calls go to FlashAttention-4, which to Triton.

``F.scaled_dot_product_attention`` reaches ``aten::_scaled_dot_product_cudnn_attention`` on Hopper
(torch's own choice there), ``_scaled_dot_product_flash_attention`` or
``_scaled_dot_product_efficient_attention`` where cuDNN is not usable or `sdpa_kernel` says so.
Variable-length attention and nested tensors call ``_flash_attention_forward``. All of these get
additive masks: where the mask is a boolean one, ``aten::scaled_dot_product_attention`` is
overridden, which calls them natively. So it is where they are not called, as the mask's last stride
is not 1.

Nothing here imports a DSL: the impls do, when the first call that a condition wants reaches them.
"""

from __future__ import annotations

import importlib.util
import logging
import operator
import os
from collections.abc import Callable, Iterable
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import torch

from opgraft import (
    Crossover,
    Override,
    cutedsl_utils,
    lazy,
    register_op_override,
    triton_utils,
    when,
)
from opgraft_kernels.crossovers import TABLES, crossover_of

from . import aten, boolean, boolean_ops, strided

__all__ = [
    "available_kinds",
    "boolean_condition",
    "register",
    "register_boolean",
    "register_strided",
    "strided_condition",
]

log = logging.getLogger(__name__)


class _Op(NamedTuple):
    """An attention op, and what is particular about its arguments."""

    name: str
    impl: Callable[..., Any]
    is_backward: bool = False
    # The heads' dimension: [batch, heads, length, dim], or [batch, length, heads, dim].
    heads: int = 1
    # Whether causal is aligned at the top left where lengths differ. The kernels align it at the
    # bottom right.
    is_top_left: bool = True
    grad_out: str = "grad_out"
    # The mask, where heads share it and kernels read it as it is.
    mask: str = "attn_bias"

    @property
    def tensors(self) -> tuple[str, ...]:
        """The inputs of 16 bits."""
        forward = ("query", "key", "value")
        return (self.grad_out, *forward, "out") if self.is_backward else forward

    @property
    def length(self) -> int:
        return 3 - self.heads

    @property
    def arguments(self) -> frozenset[str]:
        """The names of the op's arguments in the torch that is running."""
        return _argument_names(self.name)


@cache
def _argument_names(op: str) -> frozenset[str]:
    schema = getattr(torch.ops.aten, op).default._schema
    return frozenset(argument.name for argument in schema.arguments)


_CUDNN = _Op("_scaled_dot_product_cudnn_attention", aten.cudnn_forward)
_CUDNN_BACKWARD = _Op("_scaled_dot_product_cudnn_attention_backward", aten.cudnn_backward, True)
_FLASH = _Op("_scaled_dot_product_flash_attention", aten.flash_forward, is_top_left=False)
_FLASH_BACKWARD = _Op(
    "_scaled_dot_product_flash_attention_backward", aten.flash_backward, True, is_top_left=False
)
_EFFICIENT = _Op("_scaled_dot_product_efficient_attention", aten.efficient_forward)
_EFFICIENT_BACKWARD = _Op(
    "_scaled_dot_product_efficient_attention_backward",
    aten.efficient_backward,
    True,
    grad_out="grad_out_",
)
_RAW_FLASH = _Op("_flash_attention_forward", aten.raw_flash_forward, heads=2, is_top_left=False)
_RAW_FLASH_BACKWARD = _Op(
    "_flash_attention_backward", aten.raw_flash_backward, True, heads=2, is_top_left=False
)
_CPU = _Op("_scaled_dot_product_flash_attention_for_cpu", aten.cpu_forward)
_CPU_BACKWARD = _Op("_scaled_dot_product_flash_attention_for_cpu_backward", aten.cpu_backward, True)

# What `F.scaled_dot_product_attention` is, and the two ops that it is made of under a boolean mask.
_SDPA = _Op("scaled_dot_product_attention", boolean.attention, mask="attn_mask")
_BOOLEAN = _Op(boolean_ops.FORWARD, boolean_ops.attention_by, mask="mask")
_BOOLEAN_BACKWARD = _Op(boolean_ops.BACKWARD, boolean_ops.attention_backward_by, True, mask="mask")
_PARTS = (_BOOLEAN, _BOOLEAN_BACKWARD)

# cuDNN is what `F.scaled_dot_product_attention` calls on Hopper.
_CUDA_OPS = (
    _CUDNN,
    _CUDNN_BACKWARD,
    _FLASH,
    _FLASH_BACKWARD,
    _EFFICIENT,
    _EFFICIENT_BACKWARD,
    _RAW_FLASH,
    _RAW_FLASH_BACKWARD,
)
_CPU_OPS = (_CPU, _CPU_BACKWARD)


# --------------------------------------------------------------------------------------------------
# What the kernels can do
# --------------------------------------------------------------------------------------------------


def _all(conditions: Iterable[Any]) -> Any:
    return reduce(operator.and_, conditions)


def _any(conditions: Iterable[Any]) -> Any:
    return reduce(operator.or_, conditions)


# Registering each part of a condition takes some microseconds of `import torch`. So products of
# sizes are compared below, and no strides: the impl copies the few tensors that its kernel cannot
# read.


def _valid_sizes(op: _Op, ndim: int) -> Any:
    """The sizes that the kernels trust. Others would be read out of bounds; native raises."""
    heads = op.heads - 4 + ndim  # packed sequences have no batch dimension
    length = op.length if ndim == 4 else 0
    same = [
        *(when.ndim(name) == ndim for name in ("query", "key", "value")),
        when.size("key", -1) == when.size("query", -1),
        when.size("value", length) == when.size("key", length),
        _same_number_of_rows("value", "key"),
        # Query heads share key heads evenly.
        when.size("query", heads) % when.size("key", heads) == 0,
    ]
    if ndim == 4:
        same.append(when.size("key", 0) == when.size("query", 0))
        same.append(when.size("value", 0) == when.size("key", 0))
    if op.is_backward:
        same += [
            when.size("out", -1) == when.size("value", -1),
            when.size("out", length) == when.size("query", length),
            _same_number_of_rows("out", "query"),
            when.size(op.grad_out, -1) == when.size("value", -1),
            when.size(op.grad_out, length) == when.size("query", length),
            when.numel(op.grad_out) == when.numel("out"),
            _valid_logsumexp(op, (heads, length) if ndim == 3 else (0, heads, length)),
        ]
    # An empty grid is a launch error, and attention to no key is native's to define.
    return _all(same) & (when.numel("query") > 0) & (when.numel("value") > 0)


def _valid_logsumexp(op: _Op, dims: tuple[int, ...]) -> Any:
    """The sizes that native's forward gives it, which are those of the query's dimensions `dims`.
    The efficient op pads the last one, and cuDNN's has one of size 1 after it."""
    own = [when.size("logsumexp", dim) for dim in range(len(dims))]
    of_query = [when.size("query", dim) for dim in dims]
    rows = own.pop(), of_query.pop()
    fits = rows[0] >= rows[1] if op in _EFFICIENTS else rows[0] == rows[1]
    if op is _CUDNN_BACKWARD:
        fits &= (when.ndim("logsumexp") == 4) & (when.size("logsumexp", 3) == 1)
    else:
        fits &= when.ndim("logsumexp") == len(dims)
    return _all(map(operator.eq, own, of_query)) & fits


def _same_number_of_rows(one: str, other: str) -> Any:
    """Whether both have as many rows, a row being what the last dimension has."""
    return when.numel(one) * when.size(other, -1) == when.numel(other) * when.size(one, -1)


# A scale from here on times log2(e) may be infinite in float32.
_MOST_SCALE = 1e38
# A scale below it may be 0 in float32, by which -inf, the score of no key, is NaN.
_LEAST_FLOAT_SCALE = 1e-37


def _valid_options(op: _Op, *, with_bias: bool | None = False) -> Any:
    """The op's other arguments, those that the running torch has.

    Args:
        op: the op.
        with_bias: whether there is an additive mask; None: either.
    """
    names = op.arguments
    valid = [
        when.same_dtype(*op.tensors),
        when.same_device(*op.tensors),
        # Neither kernel has dropout, nor other masks than causal and additive ones.
        when.value("dropout_p") == 0.0,
        # A row's maximum is taken before scaling, which is by a float32.
        when.is_none("scale")
        | ((when.value("scale") > _LEAST_FLOAT_SCALE) & (when.value("scale") < _MOST_SCALE)),
    ]
    for mask in ("attn_bias", "attn_mask"):
        if mask in names:
            choices = [] if with_bias else [when.is_none(mask)]
            valid.append(_any(choices if with_bias is False else [*choices, _valid_bias(op, mask)]))
    for mask in ("seqused_k", "alibi_slopes", "block_table"):
        if mask in names:
            valid.append(when.is_none(mask))
    for side in ("window_size_left", "window_size_right"):
        if side in names:
            valid.append(when.is_none(side) | (when.value(side) == -1))
    if "num_splits" in names:
        valid.append(when.is_none("num_splits"))
    if "return_debug_mask" in names:
        valid.append(when.value("return_debug_mask") == 0)
    if op.is_backward:
        valid.append(when.dtype("logsumexp", torch.float32))
    return _all(valid)


def _valid_bias(op: _Op, mask: str) -> Any:
    """An additive mask that can be seen as ``[batch, heads, length, key length]``."""
    return (
        (when.same_dtype("query", mask) | when.dtype(mask, torch.float32))
        & when.same_device("query", mask)
        & _fits_scores(op, mask)
    )


def _fits_scores(op: _Op, mask: str) -> Any:
    """Whether a mask can be seen as ``[batch, heads, length, key length]``."""
    # The efficient op's backward returns a gradient of its size.
    is_exact = op in _EFFICIENTS

    def fits(dim: int, size: Any) -> Any:
        found = when.size(mask, dim)
        return found == size if is_exact else (found == 1) | (found == size)

    scores = fits(-1, when.size("key", op.length)) & fits(-2, when.size("query", op.length))
    heads = fits(0, when.size("query", 0)) & fits(1, when.size("query", op.heads))
    dims = [(when.ndim(mask) == 4) & heads, *([] if is_exact else [when.ndim(mask) == 2])]
    return scores & _any(dims)


def _valid_causal(op: _Op) -> Any:
    """Causal as the kernels mean it: aligned at the bottom right, and every query sees a key."""
    length_q, length_k = when.size("query", op.length), when.size("key", op.length)
    fits = length_q == length_k if op.is_top_left else length_q <= length_k
    return (when.value("is_causal") == 0) | fits


@cache  # the overrides of one op share it
def _dense(op: _Op, *, with_bias: bool | None = False) -> Any:
    return _valid_options(op, with_bias=with_bias) & _valid_sizes(op, 4) & _valid_causal(op)


def _varlen(op: _Op) -> Any:
    """Packed sequences: laid end to end, with no padding."""
    cum = [
        condition
        for name in ("cum_seq_q", "cum_seq_k")
        for condition in (
            when.dtype(name, torch.int32),
            when.ndim(name) == 1,
            when.is_contiguous(name),
        )
    ]
    return (
        _all(cum)
        & when.same_device("query", "cum_seq_q", "cum_seq_k")
        & (when.size("cum_seq_q", 0) == when.size("cum_seq_k", 0))
        & (when.size("cum_seq_q", 0) >= 2)
        & _valid_options(op)
        & _valid_sizes(op, 3)
    )


# Head dimension from which native's backward in float32 is right after our forward.
FEWEST_DIMS_32BIT = 64


def _agrees_with_native_backward() -> Any:
    """Whether native's backward in float32, if there is one, is right after our forward.

    At smaller heads it had up to 8 times the error that it has after native's: its scores are off
    by more than ours, which its own logsumexp makes up for.
    """
    is_wide = when.size("query", -1) >= FEWEST_DIMS_32BIT
    return is_wide | (when.value("compute_log_sumexp") == 0)


# --------------------------------------------------------------------------------------------------
# Where they are faster
# --------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """A kind of calls, with the kernels that they go to."""

    name: str
    kernels: str
    is_masked: bool
    # Head dimensions to measure. Others decline.
    dims: tuple[int, ...]
    ops: tuple[_Op, ...]
    priority: int = 0


# The largest head dimension of Triton's kernels, in 16 bits.
MAX_DIM = 256
# Of a kind's forwards and backwards: raised when they become faster or slower.
VERSIONS = {
    "cutedsl": (5, 3),
    "cutedsl_masked": (5, 3),
    "cutedsl_boolean": (2,),
    "triton": (3, 3),
    "masked": (3, 3),
    "strided": (1,),
}
_WITH_MASK = (_CUDNN, _CUDNN_BACKWARD, _EFFICIENT, _EFFICIENT_BACKWARD)
# What Stable Diffusion, vision transformers, Phi, Llama, DeepSeek and Gemma have. It goes before
# Triton.
_CUTEDSL = _Kind(
    *("cutedsl", "cutedsl_kernels", False, (40, 64, 72, 80, 88, 96, 128, 192, 256), _CUDA_OPS),
    priority=1,
)
_TRITON = _Kind("triton", "triton_kernels", False, (32, 40, 64, 80, 128), _CUDA_OPS)
_MASKED = _Kind("masked", "triton_kernels", True, (32, 64, 128), _WITH_MASK)
# Masks that heads share, and those of each head's own.
_CUTEDSL_MASKED = _Kind(
    "cutedsl_masked",
    "cutedsl_kernels",
    is_masked=True,
    dims=(64, 80, 96, 128, 256),
    ops=(_CUDNN, _CUDNN_BACKWARD),
    priority=1,
)
# Boolean masks, of the same kernels.
_CUTEDSL_BOOLEAN = _Kind(
    *("cutedsl_boolean", "cutedsl_kernels", True, _CUTEDSL_MASKED.dims, (_SDPA,)),
)
_EFFICIENTS = (_EFFICIENT, _EFFICIENT_BACKWARD)
# `_scaled_dot_product_flash_attention` calls this op: native is one kernel, and so are ours. What
# was measured of the one holds for the other.
_MEASURED_AS = {_RAW_FLASH: _FLASH, _RAW_FLASH_BACKWARD: _FLASH_BACKWARD}
# Keys are not split over programs: few queries, as in decoding, leave the GPU idle.
_FEWEST_QUERIES = 16
# A tile's height. Tables are measured with as many queries as keys. Of fewer a part of the tile is
# empty, of which tables know nothing.
TILE = 128
# So many queries of a tile of keys, or more, are measured apart: Triton's forward is another one.
MANY_QUERIES = 1024
_RANGES: dict[str, tuple[Any, ...]] = {"rows": (2**10, 2**18), "keys": (2**5, 2**12)}


def _crossover(op: _Op, kind: _Kind) -> Crossover:
    """On what it depends whether `kind`'s kernels are faster than native's."""
    dim = when.size("query", -1)
    queries, keys = _lengths(op)
    features: dict[str, Any] = {"rows": when.numel("query") // dim, "keys": keys, "dim": dim}
    more: dict[str, Any] = {}
    if kind.kernels == "triton_kernels":
        more["itemsize"] = when.itemsize("query")
    if kind.is_masked:
        # Whether queries, and heads, share the mask: 1 or 0. How much of it there is to read.
        more["for_all_queries"] = _is_broadcast(op.mask, -2)
        if kind is not _CUTEDSL_BOOLEAN:
            more["for_all_heads"] = _is_broadcast(op.mask, -3)
    else:
        more["is_causal"] = when.value("is_causal")
    if kind is _CUTEDSL:
        more["is_grouped"] = _is_grouped(op)
    if kind is _TRITON:
        # 1 where a forward holds all keys of a head and walks over its queries, else 0.
        more["holds_keys"] = 1 // (MANY_QUERIES // (queries + 1) + (keys - 1) // TILE + 1)
    # 1 where both lengths fill their tiles, else 0: what the rest costs differs between kernels.
    more["fills_tiles"] = 1 // (queries % TILE + keys % TILE + 1)
    terms: dict[str, Any] = {
        "exact": ["dim", *more],
        "open_ended": ["rows", "keys"],
        "version": VERSIONS[kind.name][op.is_backward],
        "tables": TABLES,
    }
    if op in _MEASURED_AS:
        terms["measured_as"] = _name(_MEASURED_AS[op], kind)
    else:
        terms["calls"] = partial(lazy("opgraft_kernels.attention.samples:calls"), op.name)
        terms["ranges"] = {**_RANGES, "dim": kind.dims, **dict.fromkeys(more, (0, 1))}
        if "itemsize" in more:
            # Calls in 32 bits are the efficient op's.
            terms["ranges"]["itemsize"] = (2, 4) if op in _EFFICIENTS else (2,)
    return Crossover(**terms, **features, **more)


def _is_grouped(op: _Op) -> Any:
    """1 where several query heads share a key head, else 0."""
    heads = op.heads - 4  # from behind: packed sequences have no batch dimension
    return 1 - when.size("key", heads) // when.size("query", heads)


def _is_broadcast(mask: str, dim: int) -> Any:
    """1 where a mask of 4 dimensions is expanded, or has one element, else 0."""
    return 1 // (when.stride(mask, dim) * (when.size(mask, dim) - 1) + 1)


def _is_right(op: _Op, kind: _Kind) -> Any:
    """The calls that `kind`'s kernels are right for, without what declines for its speed."""
    dense = _dense(op, with_bias=kind.is_masked)
    if kind.kernels == "cutedsl_kernels":
        dense = dense & _fits_grid(op)
    if op not in _MEASURED_AS:
        return dense
    dense = when.is_none("cum_seq_q") & when.is_none("cum_seq_k") & dense
    if kind is not _CUTEDSL:  # Triton's kernels know no packed sequences
        return dense
    # FlashAttention-4's were tested on them at dimensions that need no padding in registers.
    return dense | (_varlen(op) & (when.size("query", -1) % 32 == 0))


def _fits_grid(op: _Op) -> Any:
    """Batches and heads are dimensions of a launch's grid, of which CUDA has so many."""
    return (when.size("query", 0) < 2**16) & (when.size("query", op.heads) < 2**16)


def _condition(op: _Op, kind: _Kind) -> Any:
    """The calls that `kind`'s kernels are right for, and that tables may say something of."""
    dims = (when.size("query", -1), when.size("value", -1))
    if kind is _CUTEDSL_MASKED:
        is_tested = (when.value("is_causal") == 0) & _in_tested_range(op)
        computes = _hopper() & _cutedsl_masks(op) & is_tested
    elif kind.kernels == "cutedsl_kernels":
        computes = _hopper() & _cutedsl_dims()
    else:
        # Rows of heads are read 16 bytes at a time.
        half = when.dtype("query", torch.float16, torch.bfloat16) & _all(
            (dim % 8 == 0) & (dim <= MAX_DIM) for dim in dims
        )
        # Tables were not measured for values of another dimension.
        same = dims[0] == dims[1]
        dtypes = half | _single(op, dims) if op in _EFFICIENTS else half
        computes = _ampere() & same & dtypes
    return computes & _has_enough_queries(op) & _is_right(op, kind)


def _single(op: _Op, dims: tuple[Any, Any]) -> Any:
    """The calls in float32, which are the efficient op's alone.

    cuDNN's op does not refuse them, and returns NaN for some: nobody calls it so.
    """
    single = when.dtype("query", torch.float32) & _all(
        (dim % 4 == 0) & (dim <= MAX_DIM // 2) for dim in dims
    )
    return single & _agrees_with_native_backward() if op is _EFFICIENT else single


def _has_enough_queries(op: _Op) -> Any:
    """Whether there are so many queries that tables say something of the call."""
    queries, keys = _lengths(op)
    return (queries >= _FEWEST_QUERIES) & ((queries >= TILE) | (queries >= keys))


def _lengths(op: _Op) -> tuple[Any, Any]:
    """How many queries and keys a head has; of packed sequences the longest."""
    if op in _MEASURED_AS:
        return when.value("max_q"), when.value("max_k")
    return when.size("query", op.length), when.size("key", op.length)


def _cutedsl_dims() -> Any:
    """Head dimensions that FlashAttention-4's kernels are compiled and tested for."""
    dim, dim_v = when.size("query", -1), when.size("value", -1)
    # Rows of heads are read 16 bytes at a time.
    same = (dim == dim_v) & (dim % 8 == 0) & ((dim <= 128) | (dim == 256))
    return same | ((dim == 192) & (dim_v == 128))


# Lists of tiles are of each head, and grow with queries times keys. At so many keys, and heads of
# 64, they take half of the memory that the queries do.
_MOST_LISTED_KEYS = 2**17
# Of scales from here on the kernels were tested.
_LEAST_SCALE = 1e-6


# Elements of 16 bits in 16 bytes, of which the copy engine takes multiples.
_COPIED = 8


def _cutedsl_masks(op: _Op) -> Any:
    """Masks, and head dimensions, that FlashAttention-4's kernels are compiled and tested for.

    Their lists of tiles are of one mask, which is not causal besides. Those of each head's own have
    no lists, and are additive.
    """
    dim, dim_v = when.size("query", -1), when.size("value", -1)
    is_listed = (
        (_is_broadcast(op.mask, -3) == 1)
        & ((dim <= 128) | (dim == 256))
        & (when.size("key", -2) <= _MOST_LISTED_KEYS)
    )
    # Boolean masks have lists.
    may_be_dense = op in (_CUDNN, _CUDNN_BACKWARD)
    return (
        (dim == dim_v)
        & (dim % 8 == 0)
        & (when.ndim(op.mask) == 4)
        & (is_listed | _is_for_copy_engine(op) if may_be_dense else is_listed)
        & (when.stride(op.mask, -1) == 1)
        & (when.size(op.mask, -1) == when.size("key", -2))
    )


def _is_for_copy_engine(op: _Op) -> Any:
    """Masks of each head's own, and of each query's, that the copy engine reads."""
    dims = (-4, -3, -2)
    return (
        (_is_broadcast(op.mask, -3) == 0)
        & (_is_broadcast(op.mask, -2) == 0)
        & (when.size("query", -1) <= 128)
        & when.same_dtype("query", op.mask)
        & when.aligned(op.mask, 2 * _COPIED)
        & _all(when.stride(op.mask, dim) % _COPIED == 0 for dim in dims)
    )


def _in_tested_range(op: _Op) -> Any:
    """Whether the kernels were tested with such a scale."""
    tested = (when.value("scale") > _LEAST_SCALE) & (when.value("scale") < _MOST_SCALE)
    # The ops of this package have no default.
    return tested if op in _PARTS else when.is_none("scale") | tested


def _is_right_of_boolean(op: _Op) -> Any:
    """The calls with a boolean mask that the kernels are right for: of the op that a model calls,
    and of those that it is made of."""
    right = (
        # First: most calls have no such mask.
        when.dtype(op.mask, torch.bool)
        & _hopper()
        & _cutedsl_masks(op)
        & when.same_dtype(*op.tensors)
        & when.same_device(*op.tensors, op.mask)
        & _fits_scores(op, op.mask)
        & _in_tested_range(op)
        & _valid_sizes(op, 4)
        & _fits_grid(op)
    )
    if op.is_backward:
        right &= when.dtype("logsumexp", torch.float32) & (when.stride("logsumexp", -1) == 1)
    return right


def boolean_condition() -> Any:
    """The calls of the op that a model calls that kernels are right for, and that tables may say
    something of."""
    return _is_right_of_boolean(_SDPA) & _is_plain()


def strided_condition() -> Any:
    """The calls of that op under a mask whose last stride is not 1, by which no fused backend takes
    them, and that one would take otherwise."""
    mask, dim = _SDPA.mask, when.size("query", -1)
    return (
        # First: most calls have no such mask.
        (when.stride(mask, -1) != 1)
        # Of one key's stride nobody asks.
        & (when.size(mask, -1) > 1)
        & (when.size(mask, -1) == when.size("key", -2))
        & _ampere()
        # Native computes in float32. In 16 bits rounding its result is most of its error; in
        # float32 a fused backend's error might be more than twice native's.
        & when.dtype("query", torch.float16, torch.bfloat16)
        & when.same_dtype(*_SDPA.tensors)
        & (when.dtype(mask, torch.bool) | when.same_dtype("query", mask))
        & when.same_device(*_SDPA.tensors, mask)
        & _fits_scores(_SDPA, mask)
        & _in_tested_range(_SDPA)
        & (dim % 8 == 0)
        & (dim <= MAX_DIM)
        & _valid_sizes(_SDPA, 4)
        & _fits_grid(_SDPA)
        & _is_plain()
    )


def _is_plain() -> Any:
    """What of the other arguments of the op that a model calls its overrides are for."""
    # Native raises where heads differ and it was not told that they may.
    is_grouped = when.size("query", 1) != when.size("key", 1)
    return (
        # A backend's random numbers are its own.
        (when.value("dropout_p") == 0.0)
        & (when.value("is_causal") == 0)
        & ((when.value("enable_gqa") == 1) | ~is_grouped)
        & _has_enough_queries(_SDPA)
    )


# Rows from which the interpreter takes a call. It means nothing for speed, the interpreter being
# slower than native at every size: it lets both routes be seen on a machine without a GPU.
_CPU_ROWS = 16


def _ampere() -> Any:
    return when.device_capability("query") >= (8, 0)


def _hopper() -> Any:
    # The kernels are Hopper's.
    return (when.device_capability("query") == (9, 0)) & when.dtype(
        "query", torch.float16, torch.bfloat16
    )


def _condition_on_cpu(op: _Op) -> Any:
    """The calls that the interpreter takes."""
    return (
        # The interpreter computes on the bits of bfloat16 and returns garbage without a word. In
        # float32 a backward that recomputes the scores otherwise than the forward did, ours after
        # native's, was off by up to 8 times native's own error (at scores of 100).
        when.dtype("query", torch.float16)
        & (when.numel("query") // when.size("query", -1) >= _CPU_ROWS)
        & (when.size("query", -1) <= 128)
        # Native's own kernel assumes it, too.
        & (when.size("value", -1) == when.size("query", -1))
        & _dense(op, with_bias=None)
    )


def register(dispatch_key: str) -> list[Override]:
    """Register the overrides at `dispatch_key`: ``"CUDA"``, or ``"CPU"`` (the interpreter).

    On CUDA, FlashAttention-4 goes before Triton, where it is installed.

    Returns:
        The overrides.
    """
    if dispatch_key == "CPU":
        return [_register_on_cpu(op) for op in _CPU_OPS]
    kinds = available_kinds()
    found = [_register(op, kind) for kind in kinds for op in kind.ops]
    found.append(register_strided())
    return [*found, *register_boolean()] if _CUTEDSL_MASKED in kinds else found


def available_kinds() -> list[_Kind]:
    """The kinds of calls whose kernels are installed."""
    if _has_flash_attn_4():
        return [_CUTEDSL, _CUTEDSL_MASKED, _TRITON, _MASKED]
    log.info("no overrides by FlashAttention-4: pip install 'opgraft-kernels[flash-attn-4]'")
    return [_TRITON, _MASKED]


def _name(op: _Op, kind: _Kind) -> str:
    return f"opgraft_kernels.attention.{kind.name}.{op.name.lstrip('_')}"


def _register(op: _Op, kind: _Kind) -> Override:
    utils = cutedsl_utils if kind.kernels == "cutedsl_kernels" else triton_utils
    return utils.register_op_override(
        "aten",
        op.name,
        "CUDA",
        _impl(op, kind.kernels),
        cond=_condition(op, kind),
        name=_name(op, kind),
        priority=kind.priority,
        crossover=_crossover(op, kind),
        samples=None if op.is_backward else _samples(op),
        # Under deterministic algorithms, the one thing besides its arguments that an impl asks
        # about, nothing is replayed.
        launch_plan=True,
    )


def register_boolean(*, by_table: bool = True) -> list[Override]:
    """Register what takes boolean masks: the op that a model calls, and the two that it is made of.

    Args:
        by_table: whether measured tables say which calls are taken; else all that the kernels are
            right for.
    """
    whole = cutedsl_utils.register_op_override(
        "aten",
        _SDPA.name,
        "CUDA",
        _SDPA.impl,
        cond=boolean_condition(),
        name=_name(_SDPA, _CUTEDSL_BOOLEAN),
        autograd="impl",
        # A compiled graph has the ops that it calls natively, which other overrides take.
        compile="inductor",
        samples=lazy("opgraft_kernels.attention.samples:boolean_samples"),
        crossover=_crossover(_SDPA, _CUTEDSL_BOOLEAN) if by_table else None,
    )
    return [whole, *(_register_part(op) for op in _PARTS)]


def _register_part(op: _Op) -> Override:
    suffix = "_backward" if op.is_backward else ""
    return cutedsl_utils.register_op_override(
        boolean_ops.NAMESPACE,
        op.name,
        "CUDA",
        _impl(op, "cutedsl_kernels", boolean_ops.NAMESPACE),
        cond=_is_right_of_boolean(op),
        name=f"opgraft_kernels.attention.boolean_mask{suffix}",
        samples=lazy(f"opgraft_kernels.attention.samples:samples_of_boolean_op{suffix}"),
        launch_plan=True,
    )


def register_strided(*, by_table: bool = True) -> Override:
    """Register what takes masks whose last stride is not 1.

    No call is this one's and that of an override of boolean masks, which read dense rows.

    Args:
        by_table: whether measured tables say which calls are taken; else all that are right.
    """
    return register_op_override(
        "aten",
        _SDPA.name,
        "CUDA",
        strided.attention,
        cond=strided_condition(),
        name="opgraft_kernels.attention.strided_mask",
        autograd="impl",
        # A compiled graph has the mask's copy, fused with what made it, and the ops that native
        # calls then, which other overrides take.
        compile="traceable",
        samples=lazy("opgraft_kernels.attention.samples:strided_samples"),
        crossover=_strided_crossover() if by_table else None,
    )


def _strided_crossover() -> Crossover:
    """On what it depends whether a fused backend is faster than native, the copy included."""
    dim = when.size("query", -1)
    sizes = {
        "rows": (when.numel("query") // dim, *_RANGES["rows"]),
        "keys": (when.size("key", -2), *_RANGES["keys"]),
        "dim": (dim, 32, MAX_DIM),
    }
    # A boolean mask has elements of 1 byte.
    exact = {"mask_itemsize": (when.itemsize(_SDPA.mask), 1, 2)}
    calls = lazy("opgraft_kernels.attention.samples:strided_calls")
    return crossover_of(calls, VERSIONS["strided"][0], sizes, exact, bounded=["dim"])


def _register_on_cpu(op: _Op) -> Override:
    return triton_utils.register_op_override(
        "aten",
        op.name,
        "CPU",
        _impl(op, "triton_kernels"),
        cond=_condition_on_cpu(op),
        name=_name(op, _TRITON),
    )


def _samples(op: _Op) -> Callable[[torch.device], Iterable[dict[str, Any]]]:
    def samples(device: torch.device) -> Iterable[dict[str, Any]]:
        from .samples import samples

        return samples(op.arguments, device, heads_first=op.heads == 1)

    return samples


def _impl(op: _Op, kernels: str, namespace: str = "aten") -> Callable[..., Any]:
    impl = partial(op.impl, kernels)
    if not (op.is_backward and kernels == "cutedsl_kernels"):
        return impl
    native = getattr(getattr(torch.ops, namespace), op.name).default

    def deterministic_if_asked(*args: Any, **kwargs: Any) -> Any:
        # FlashAttention-4's backward adds parts of dq in whatever order they come, but of short
        # sequences; of those, too, native is what was asked for.
        if torch.are_deterministic_algorithms_enabled():
            return native(*args, **kwargs)  # inside an impl of the op: the native kernel
        return impl(*args, **kwargs)

    return deterministic_if_asked


def _has_flash_attn_4() -> bool:
    """Whether ``flash_attn.cute`` is there, found without importing ``flash_attn``.

    FlashAttention-2 has the same top-level name, and importing that loads its CUDA extension.
    """
    try:
        spec = importlib.util.find_spec("flash_attn")
    except (ImportError, ValueError):
        return False
    folders = spec.submodule_search_locations if spec is not None else None
    return any(os.path.exists(os.path.join(f, "cute", "interface.py")) for f in folders or ())
