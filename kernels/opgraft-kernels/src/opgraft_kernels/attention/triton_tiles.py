"""Tiles of attention in Triton: how they are loaded and stored, and which a bias leaves out."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from opgraft_kernels.rows import begin_program, multiple_of

__all__ = [
    "BY_KEY",
    "BY_SCORE",
    "HEADER",
    "INF",
    "LN_2",
    "LOG2_E",
    "LOW",
    "LOWEST",
    "LOW_TILE",
    "NOTHING_BELOW",
    "NOTHING_TILE",
    "NO_BIAS",
    "ZERO_TILE",
    "Heads",
    "Listed",
    "Scores",
    "bias_at",
    "fast_exp",
    "head_at",
    "head_rows",
    "keys_seen",
    "largest_norm",
    "least_logsumexp",
    "least_of",
    "list_tiles_kernel",
    "load_bias",
    "load_rows",
    "low_tiles_end",
    "mark_tiles_kernel",
    "norms_kernel",
    "norms_of",
    "probabilities",
    "row_of_tiles",
    "rows_of",
    "store_attended",
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


class Heads(NamedTuple):
    """``[batch, heads, rows, dim]``, or without the last dimension, as kernels get it.

    In the last dimension there are no gaps.
    """

    ptr: Any
    stride_batch: int
    stride_head: int
    stride_row: int


class Scores(NamedTuple):
    """``[batch, heads, queries, keys]``, as kernels get it."""

    ptr: Any
    stride_batch: int
    stride_head: int
    stride_query: int
    stride_key: int


class Listed(NamedTuple):
    """What `list_tiles_kernel` writes, ``[batch, rows of tiles, ...]``, as kernels get it."""

    ptr: Any
    stride_batch: int
    stride_row: int


@triton.jit
def head_at(x, batch, head, UNIT: tl.constexpr = 1):
    """Where one head of one batch begins: a multiple of UNIT elements after the first one."""
    offset = batch.to(tl.int64) * x.stride_batch + head.to(tl.int64) * x.stride_head
    return x.ptr + multiple_of(offset, UNIT)


@triton.jit
def rows_of(x, batch, head, UNIT: tl.constexpr, FAR: tl.constexpr):
    """A head of `Heads`, as `load_rows` takes it: where it begins, and how far rows are apart.

    UNIT: of what both are multiples. FAR: times a tile's rows the latter may be more than 32 bits
    hold.
    """
    stride = multiple_of(x.stride_row, UNIT)
    if FAR:
        stride = tl.full([], stride, tl.int64)
    return head_at(x, batch, head, UNIT), stride


@triton.jit
def head_rows(
    x,
    batch,
    head,
    length,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    FAR: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """As `rows_of`, of a ``[length, DIM]``; if DESCRIBED with a descriptor."""
    begin, stride = rows_of(x, batch, head, UNIT, FAR)
    if DESCRIBED:
        begin = tl.make_tensor_descriptor(
            begin, shape=[length, DIM], strides=[stride, 1], block_shape=[BLOCK, BLOCK_DIM]
        )
    return begin, stride


@triton.jit
def _tile(rows, start, length, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Pointers to rows `start` to ``start + BLOCK``, and which of their elements there are."""
    begin, stride = rows
    row = tl.arange(0, BLOCK)
    dim = tl.arange(0, BLOCK_DIM)
    ptrs = begin + tl.full([], start, tl.int64) * stride + row[:, None] * stride + dim[None, :]
    mask = (start + row < length)[:, None]
    if DIM != BLOCK_DIM:
        mask = mask & (dim < DIM)[None, :]
    return ptrs, mask


@triton.jit
def load_rows(
    rows,
    start,
    length,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Rows `start` to ``start + BLOCK``, zeros where there are none."""
    if DESCRIBED:
        return rows[0].load([start, 0])
    else:
        ptrs, mask = _tile(rows, start, length, DIM, BLOCK, BLOCK_DIM)
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def store_rows(
    rows,
    value,
    start,
    length,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    # Not by descriptor: one would have to be made for a single store.
    ptrs, mask = _tile(rows, start, length, DIM, BLOCK, BLOCK_DIM)
    tl.store(ptrs, value, mask=mask)


@triton.jit
def store_attended(
    out_rows,
    lse_rows,
    out,
    top,
    total,
    first,
    length,
    BIAS: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
):
    """Stores a tile of outputs, and their logsumexp unless `lse_rows` is None.

    Args:
        out: the sum of values.
        top: the scores' maximum, without a bias in powers of two.
        total: the sum of ``exp(scores - top)``.
    """
    empty = total == 0.0
    out = out * (1.0 / tl.where(empty, 1.0, total))[:, None]
    value = out.to(out_rows[0].dtype.element_ty)
    store_rows(out_rows, value, first, length, DIM_V, BLOCK_Q, BLOCK_DIM_V)
    if lse_rows is not None:
        query = first + tl.arange(0, BLOCK_Q)
        # Infinity where there is nothing: exp(S - L) is then 0 in anybody's backward.
        logsumexp = top + tl.log(total)
        if BIAS == NO_BIAS:
            logsumexp = (top + tl.log2(total)) * LN_2
        logsumexp = tl.where(empty, INF, logsumexp)
        tl.store(lse_rows[0] + query * lse_rows[1], logsumexp, mask=query < length)


@triton.jit
def bias_at(bias, batch, head, UNIT: tl.constexpr):
    """A head of `Scores`, as `load_bias` takes it."""
    stride_query = multiple_of(bias.stride_query, UNIT)
    return head_at(bias, batch, head, UNIT), stride_query, bias.stride_key


@triton.jit
def load_bias(bias, query, key, length_q, length_k, BIAS: tl.constexpr, MASKED: tl.constexpr):
    """The bias of a tile of scores. One of `query` and `key` is a column, the other one a row.

    Queries that are not there get the last one's. MASKED: keys that are not there get 0.
    """
    begin, stride_query, stride_key = bias
    ptrs = begin + key.to(tl.int64) * stride_key
    keep = key < length_k
    if BIAS == BY_SCORE:
        ptrs = ptrs + tl.minimum(query, length_q - 1).to(tl.int64) * stride_query
        keep = keep & (query >= 0)
    loaded = tl.load(ptrs, mask=keep, other=0.0) if MASKED else tl.load(ptrs)
    return loaded.to(tl.float32)


@triton.jit
def fast_exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def probabilities(scores, bias, lse, scale, BIAS: tl.constexpr):
    """P from products of queries and keys."""
    if BIAS == NO_BIAS:
        return tl.exp2(scores * scale - lse * LOG2_E)
    # Native's forward may say -inf of a row that attends to nothing.
    lse = tl.where(lse == -INF, INF, lse)
    return fast_exp(scores * scale + bias - lse)


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


# ------------------------------------------------------------------ tiles that a bias leaves out

# What `list_tiles_kernel` writes of a row of tiles, before the numbers of the listed ones.
HEADER = tl.constexpr(5)


@triton.jit
def row_of_tiles(tiles, batch, row):
    """Where what `Listed` has of a row of tiles begins."""
    return tiles.ptr + batch.to(tl.int64) * tiles.stride_batch + row.to(tl.int64) * tiles.stride_row


@triton.jit
def tiles_listed(entries_ptr, largest):
    """Of what `list_tiles_kernel` wrote, the run of tiles that are 0, from one to before another,
    and how many others of the list count.

    Args:
        entries_ptr: where the row of tiles begins.
        largest: what scores without bias are at most, of each row of the tile; None: low tiles are
            not counted.
    """
    begin, end, others = tl.load(entries_ptr), tl.load(entries_ptr + 1), tl.load(entries_ptr + 2)
    if largest is not None:
        listed = tl.load(entries_ptr + 3)
        # Of every row the bias is as much somewhere.
        best = tl.load(entries_ptr + 4).to(tl.float32, bitcast=True)
        nothing = tl.min((2 * largest + LOW - best < NOTHING_BELOW).to(tl.int32), axis=0)
        others = tl.where(nothing == 1, others, listed)
    return begin, end, others


# What `mark_tiles_kernel` says of a tile: all of it is -inf, or low, or 0, or there is something
# else. The bits say that something is above -inf, is not low, is not 0: several tiles together are
# what the bits of all of them say.
NOTHING_TILE, LOW_TILE = tl.constexpr(0b100), tl.constexpr(0b101)
ZERO_TILE, OTHER_TILE = tl.constexpr(0b011), tl.constexpr(0b111)
# Numbers that stand for -inf in masks: the lowest of a dtype, -1e9, -1e4, which bfloat16 rounds.
LOW = tl.constexpr(-9000.0)


@triton.jit
def mark_tiles_kernel(
    bias_ptr,
    state_ptr,
    best_ptr,
    stride_b,
    stride_r,
    stride_c,
    length_r,
    length_c,
    row_tiles,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program reads one tile. NaN is something else.

    Besides its state it writes what of every row the largest element is at least.
    """
    begin_program(EARLY)
    tiles = tl.cdiv(length_c, COLS)
    row_of_tiles = tl.program_id(0) // tiles
    batch = (row_of_tiles // row_tiles).to(tl.int64)
    row = row_of_tiles % row_tiles * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % tiles * COLS + tl.arange(0, COLS)
    there = (row < length_r)[:, None] & (col < length_c)[None, :]
    ptrs = (row.to(tl.int64) * stride_r)[:, None] + (col.to(tl.int64) * stride_c)[None, :]
    bias = tl.load(bias_ptr + batch * stride_b + ptrs, mask=there, other=-INF).to(tl.float32)
    top = tl.max(bias, axis=1)
    largest = tl.max(top, axis=0)
    least = tl.min(tl.min(bias, axis=1), axis=0)
    # Neither of the two says that there is a NaN.
    is_number = tl.max(tl.max((bias != bias).to(tl.int32), axis=1), axis=0) == 0
    low = tl.where(largest == -INF, NOTHING_TILE, LOW_TILE)
    state = tl.where((least == 0.0) & (largest == 0.0), ZERO_TILE, OTHER_TILE)
    state = tl.where(is_number, tl.where(largest <= LOW, low, state), OTHER_TILE)
    tl.store(state_ptr + tl.program_id(0), state)
    best = tl.where(row < length_r, top, INF)
    tl.store(best_ptr + tl.program_id(0), tl.min(best, axis=0))


@triton.jit
def list_tiles_kernel(
    state_ptr,
    best_ptr,
    tiles_ptr,
    stride_b,
    stride_r,
    stride_c,
    row_marks,
    col_marks,
    row_tiles,
    tiles,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program lists, of a row of tiles, those in which not all is -inf. A tile is what
    ``[ROWS, COLS]`` marks of `mark_tiles_kernel` say together.

    The first run of tiles that are 0: where it begins and ends. Then how many others there are, how
    many with the low ones, what of every row the bias is at least somewhere, as bits, and the
    numbers of others and of low ones.

    A run, since a loop over numbers that it has to load first is slower. What models mask with
    leaves one run: padding at either end, causal, windows, documents.
    """
    begin_program(EARLY)
    program = tl.program_id(0).to(tl.int64)
    entries_ptr = tiles_ptr + program * (tiles + HEADER)
    tile = tl.arange(0, BLOCK)
    state = tl.zeros([BLOCK], tl.int32)
    best = tl.full([], INF, tl.float32)
    for mark_row in tl.static_range(ROWS):
        row = program % row_tiles * ROWS + mark_row
        marks = program // row_tiles * stride_b + row * stride_r
        best_of_row = tl.full([], -INF, tl.float32)
        for mark_col in tl.static_range(COLS):
            col = tile * COLS + mark_col
            there = (row < row_marks) & (col < col_marks)
            ptrs = marks + col * stride_c
            state = state | tl.load(state_ptr + ptrs, mask=there, other=NOTHING_TILE)
            bests = tl.load(best_ptr + ptrs, mask=there, other=-INF)
            best_of_row = tl.maximum(best_of_row, tl.max(bests, axis=0))
        best = tl.minimum(best, tl.where(row < row_marks, best_of_row, INF))
    begin = tl.min(tl.where(state == ZERO_TILE, tile, tiles), axis=0)
    end = tl.min(tl.where((tile >= begin) & (state != ZERO_TILE), tile, tiles), axis=0)
    is_low = state == LOW_TILE
    is_other = (state != NOTHING_TILE) & ~is_low & ((tile < begin) | (tile >= end))
    others = tl.sum(is_other.to(tl.int32), axis=0)
    place = tl.cumsum(is_other.to(tl.int32), axis=0) - 1
    tl.store(entries_ptr + HEADER + place, tile, mask=is_other)
    place = others + tl.cumsum(is_low.to(tl.int32), axis=0) - 1
    tl.store(entries_ptr + HEADER + place, tile, mask=is_low)
    tl.store(entries_ptr, begin)
    tl.store(entries_ptr + 1, end)
    tl.store(entries_ptr + 2, others)
    tl.store(entries_ptr + 3, others + tl.sum(is_low.to(tl.int32), axis=0))
    tl.store(entries_ptr + 4, best.to(tl.int32, bitcast=True))


# ------------------------------------------------------------------ low tiles
#
# A score without bias is at most ``scale * |q| * |k|`` (Cauchy and Schwarz). Where the bias is low
# that mostly says that exp(S - L) is 0 in float32: then a tile need not be computed. Where a query
# has nothing but low scores L is low, too, and the tile is computed.

# exp of less is 0 in float32, with something for what sums and norms are rounded by.
NOTHING_BELOW = tl.constexpr(-150.0)


# More than the squares of a row sum up to that are 0 in float32.
LOST_SQUARES = tl.constexpr(1e-30)


@triton.jit
def norms_of(rows):
    """At least the Euclidean norm of each row; infinity of what is not a number."""
    wide = rows.to(tl.float32)
    norms = tl.sqrt(tl.sum(wide * wide, axis=1) + LOST_SQUARES)
    return tl.where(norms == norms, norms, INF)


@triton.jit
def largest_norm(norms_ptr, flat_head, SPLITS: tl.constexpr):
    """What `norms_kernel` wrote of a head."""
    return tl.max(tl.load(norms_ptr + flat_head * SPLITS + tl.arange(0, SPLITS)), axis=0)


@triton.jit
def least_logsumexp(ptrs, there, axis: tl.constexpr):
    """Of queries. Infinity of those that attend to nothing, of which native says -inf."""
    lse = tl.load(ptrs, mask=there, other=INF)
    return least_of(tl.where(lse == -INF, INF, lse), axis)


@triton.jit
def least_of(logsumexp, axis: tl.constexpr):
    """Of queries' logsumexp the least; -INF where one is no number, so that it counts."""
    return tl.min(tl.where(logsumexp == logsumexp, logsumexp, -INF), axis=axis)


@triton.jit
def low_tiles_end(
    entries_ptr,
    lse_rows,
    largest,
    length_q,
    BLOCK_Q: tl.constexpr,
    CHUNK: tl.constexpr = 32,
):
    """Before which place in the list of a tile of keys there is a last tile that counts.

    Args:
        entries_ptr: after the header.
        largest: what scores without bias are at most.
    """
    begin, end = tl.load(entries_ptr - HEADER + 2), tl.load(entries_ptr - HEADER + 3)
    last = begin
    for start in tl.range(begin, end, CHUNK, num_stages=1):
        place = start + tl.arange(0, CHUNK)
        tile = tl.load(entries_ptr + place, mask=place < end, other=0)
        query = (tile * BLOCK_Q)[:, None] + tl.arange(0, BLOCK_Q)[None, :]
        there = (place < end)[:, None] & (query < length_q)
        least = least_logsumexp(lse_rows[0] + query * lse_rows[1], there, 1)
        counts = (place < end) & ~(largest + LOW - least < NOTHING_BELOW)
        last = tl.maximum(last, tl.max(tl.where(counts, place + 1, begin), axis=0))
    return last


@triton.jit
def norms_kernel(
    x,
    norms_ptr,
    tiles,
    row_tiles,
    heads,
    length,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
    FAR: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The largest norm of a head's rows, ``[batch, heads, SPLITS]``: a program has one of SPLITS.

    Infinity where one is not a number, and where no row of tiles has a low one: nobody asks then.
    """
    begin_program(EARLY)
    flat_head = tl.program_id(0) // SPLITS
    batch = flat_head // heads
    tile = tl.arange(0, BLOCK_TILES)
    entries_ptr = row_of_tiles(tiles, batch, tile)
    others = tl.load(entries_ptr + 2, mask=tile < row_tiles, other=0)
    listed = tl.load(entries_ptr + 3, mask=tile < row_tiles, other=0)
    rows = rows_of(x, batch, flat_head % heads, UNIT, FAR)
    largest = tl.zeros([BLOCK], tl.float32)
    if tl.sum(listed - others, axis=0) > 0:
        first = tl.program_id(0) % SPLITS * BLOCK
        for start in tl.range(first, length, SPLITS * BLOCK, num_stages=2):
            loaded = load_rows(rows, start, length, DIM, BLOCK, BLOCK_DIM, False)
            largest = tl.maximum(largest, norms_of(loaded))
    else:
        largest += INF
    tl.store(norms_ptr + tl.program_id(0), tl.max(largest, axis=0))
