"""Tiles of attention in Triton: how they are loaded and stored, and which a bias leaves out."""

from __future__ import annotations

import triton
import triton.language as tl

from opgraft_kernels.rows import multiple_of

__all__ = [
    "BY_KEY",
    "BY_SCORE",
    "HEADER",
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
    "mark_tiles_kernel",
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


# What `list_tiles_kernel` writes of a row of tiles, before the numbers of the listed ones.
HEADER = tl.constexpr(3)


@triton.jit
def tiles_listed(entries_ptr):
    """What `list_tiles_kernel` wrote: the run of tiles that are 0, from one to before another, and
    how many others there are."""
    return tl.load(entries_ptr), tl.load(entries_ptr + 1), tl.load(entries_ptr + 2)


# What `mark_tiles_kernel` says of a tile: all of it is -inf, or 0, or there is something else.
_NOTHING, _OTHER, _ZERO = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def mark_tiles_kernel(
    bias_ptr,
    state_ptr,
    stride_b,
    stride_r,
    stride_c,
    length_r,
    length_c,
    row_tiles,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A program reads one tile. What is not NaN, nor -inf, nor 0 is something else."""
    tiles = tl.cdiv(length_c, COLS)
    row_of_tiles = tl.program_id(0) // tiles
    batch = (row_of_tiles // row_tiles).to(tl.int64)
    row = row_of_tiles % row_tiles * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % tiles * COLS + tl.arange(0, COLS)
    there = (row < length_r)[:, None] & (col < length_c)[None, :]
    ptrs = (row.to(tl.int64) * stride_r)[:, None] + (col.to(tl.int64) * stride_c)[None, :]
    bias = tl.load(bias_ptr + batch * stride_b + ptrs, mask=there, other=-INF)
    kept = tl.sum(tl.sum((bias != -INF).to(tl.int32), axis=1), axis=0)
    nonzero = tl.sum(tl.sum((bias != 0.0).to(tl.int32), axis=1), axis=0)
    state = tl.where(kept == 0, _NOTHING, tl.where(nonzero == 0, _ZERO, _OTHER))
    tl.store(state_ptr + tl.program_id(0), state)


@triton.jit
def list_tiles_kernel(state_ptr, tiles_ptr, tiles, BLOCK: tl.constexpr):
    """A program lists, of a row of tiles, those in which not all is -inf.

    The first run of tiles that are 0: where it begins and ends. Then how many others there are, and
    their numbers.

    A run, since a loop over numbers that it has to load first is slower. What models mask with
    leaves one run: padding at either end, causal, windows, documents.
    """
    program = tl.program_id(0).to(tl.int64)
    entries_ptr = tiles_ptr + program * (tiles + HEADER)
    tile = tl.arange(0, BLOCK)
    state = tl.load(state_ptr + program * tiles + tile, mask=tile < tiles, other=_NOTHING)
    begin = tl.min(tl.where(state == _ZERO, tile, tiles), axis=0)
    end = tl.min(tl.where((tile >= begin) & (state != _ZERO), tile, tiles), axis=0)
    is_other = (state != _NOTHING) & ((tile < begin) | (tile >= end))
    place = tl.cumsum(is_other.to(tl.int32), axis=0) - 1
    tl.store(entries_ptr + HEADER + place, tile, mask=is_other)
    tl.store(entries_ptr, begin)
    tl.store(entries_ptr + 1, end)
    tl.store(entries_ptr + 2, tl.sum(is_other.to(tl.int32), axis=0))
