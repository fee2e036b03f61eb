"""Tiles of attention in Triton: how they are loaded and stored, and which a bias leaves out."""

from __future__ import annotations

import triton
import triton.language as tl

from opgraft_kernels.rows import multiple_of

__all__ = [
    "BY_KEY",
    "BY_SCORE",
    "INF",
    "LN_2",
    "LOG2_E",
    "LOWEST",
    "NO_BIAS",
    "fast_exp",
    "head_at",
    "head_rows",
    "keys_seen",
    "list_tiles_kernel",
    "load_bias",
    "load_rows",
    "store_rows",
    "tiles_listed",
]

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
# Where a row's maximum begins: finite, since a row whose scores are all -inf attends to nothing, as
# natively, and -inf - -inf would be NaN.
LOWEST = tl.constexpr(-3.0e38)

# How a bias is read: there is none; one row for all queries, as padding is; an element a score.
NO_BIAS, BY_KEY, BY_SCORE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def head_at(ptr, batch, head, stride_batch, stride_head, UNIT: tl.constexpr = 1):
    """Where one head of one batch begins: a multiple of UNIT elements after the first one."""
    offset = batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    return ptr + multiple_of(offset, UNIT)


@triton.jit
def head_rows(
    ptr,
    length,
    stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """A head, ``[length, DIM]``, as `load_rows` takes it: a descriptor, or where it begins."""
    if DESCRIBED:
        return tl.make_tensor_descriptor(
            ptr, shape=[length, DIM], strides=[stride, 1], block_shape=[BLOCK, BLOCK_DIM]
        )
    else:
        return ptr


@triton.jit
def _tile(
    rows, start, length, stride, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Pointers to rows `start` to ``start + BLOCK``, and which of their elements there are."""
    row = tl.arange(0, BLOCK)
    dim = tl.arange(0, BLOCK_DIM)
    ptrs = rows + tl.full([], start, tl.int64) * stride + row[:, None] * stride + dim[None, :]
    mask = (start + row < length)[:, None]
    if DIM != BLOCK_DIM:
        mask = mask & (dim < DIM)[None, :]
    return ptrs, mask


@triton.jit
def load_rows(
    rows,
    start,
    length,
    stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Rows `start` to ``start + BLOCK``, zeros where there are none."""
    if DESCRIBED:
        return rows.load([start, 0])
    else:
        ptrs, mask = _tile(rows, start, length, stride, DIM, BLOCK, BLOCK_DIM)
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def store_rows(
    rows,
    value,
    start,
    length,
    stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    # Not by descriptor: one would have to be made for a single store.
    ptrs, mask = _tile(rows, start, length, stride, DIM, BLOCK, BLOCK_DIM)
    tl.store(ptrs, value, mask=mask)


@triton.jit
def load_bias(
    ptr,
    query,
    key,
    length_q,
    length_k,
    stride_m,
    stride_n,
    BIAS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The bias of a tile of scores. One of `query` and `key` is a column, the other one a row.

    Queries that are not there get the last one's. MASKED: keys that are not there get 0.
    """
    ptrs = ptr + key.to(tl.int64) * stride_n
    keep = key < length_k
    if BIAS == BY_SCORE:
        ptrs = ptrs + tl.minimum(query, length_q - 1).to(tl.int64) * stride_m
        keep = keep & (query >= 0)
    bias = tl.load(ptrs, mask=keep, other=0.0) if MASKED else tl.load(ptrs)
    return bias.to(tl.float32)


@triton.jit
def fast_exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def keys_seen(
    first, length_k, shift, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Up to which key whole tiles are seen by all queries from `first` on, and up to which any."""
    end = length_k
    unmasked = length_k
    if CAUSAL:
        end = tl.minimum(length_k, first + BLOCK_Q + shift)
        unmasked = tl.minimum(length_k, first + shift + 1)
    return unmasked // BLOCK_K * BLOCK_K, end


@triton.jit
def tiles_listed(entries_ptr, tiles):
    """Of what `list_tiles_kernel` wrote: how many tiles are 0, and where the others begin."""
    return tl.load(entries_ptr), tiles - tl.load(entries_ptr + 1)


@triton.jit
def list_tiles_kernel(
    bias_ptr,
    tiles_ptr,
    stride_b,
    stride_r,
    stride_c,
    length_r,
    length_c,
    row_tiles,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A program lists, of a row of tiles, those in which not all is -inf.

    How many are 0 throughout, and how many others; then their numbers: the former from the front,
    the others from the back. What is not NaN, nor -inf, nor 0 is something else.
    """
    tiles = tl.cdiv(length_c, COLS)
    entries_ptr = tiles_ptr + tl.program_id(0).to(tl.int64) * (tiles + 2)
    batch = (tl.program_id(0) // row_tiles).to(tl.int64)
    row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    row_ptrs = bias_ptr + batch * stride_b + (row.to(tl.int64) * stride_r)[:, None]
    zeros, others = 0, 0
    for tile in range(tiles):
        col = tile * COLS + tl.arange(0, COLS)
        there = (row < length_r)[:, None] & (col < length_c)[None, :]
        ptrs = row_ptrs + (col.to(tl.int64) * stride_c)[None, :]
        bias = tl.load(ptrs, mask=there, other=-INF)
        is_kept = tl.sum(tl.sum((bias != -INF).to(tl.int32), axis=1), axis=0) > 0
        is_zero = tl.sum(tl.sum((bias != 0.0).to(tl.int32), axis=1), axis=0) == 0
        is_other = is_kept & (is_zero == 0)
        tl.store(entries_ptr + 2 + zeros, tile, mask=is_zero)
        tl.store(entries_ptr + 1 + tiles - others, tile, mask=is_other)
        zeros += is_zero.to(tl.int32)
        others += is_other.to(tl.int32)
    tl.store(entries_ptr, zeros)
    tl.store(entries_ptr + 1, others)
