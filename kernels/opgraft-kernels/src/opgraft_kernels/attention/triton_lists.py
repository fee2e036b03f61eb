"""Lists of the tiles of a bias for FlashAttention-4's kernels, which Triton kernels write before.

A list is of a row of tiles: of queries in a forward, of keys in a backward. ``lists[b, h, r, 0]``
are the tiles that are computed with the bias, and ``lists[b, h, r, 1]`` those where it is 0: their
number, and then in order the tiles. Those that are left out are in neither: where all is -inf, or
low, which torch makes of a boolean mask, and exp of it would be 0 in float32. Rows' norms tell, as
for Triton's own kernels (`triton_tiles`), but all of them here before: what a program of
FlashAttention-4 loads is known before it computes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from opgraft_kernels.integers import ceil_div, power_of_2
from opgraft_kernels.launches import Launch

from .triton_kernels import bias_kind, constexprs_of, heads_of, mark_tiles
from .triton_tiles import (
    BY_KEY,
    INF,
    LOW,
    LOW_TILE,
    NOTHING_BELOW,
    NOTHING_TILE,
    ZERO_TILE,
    least_of,
    load_rows,
    norms_of,
    rows_of,
)

__all__ = ["Lists", "plan_lists"]


@triton.jit
def _is_low_anywhere(
    states, stride_q, stride_k, query_marks, key_marks, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Whether any mark of a batch is low."""
    found = tl.zeros([], tl.int32)
    for row in range(0, query_marks, ROWS):
        rows = row + tl.arange(0, ROWS)
        for col in range(0, key_marks, COLS):
            cols = col + tl.arange(0, COLS)
            places = (rows.to(tl.int64) * stride_q)[:, None] + (cols * stride_k)[None, :]
            there = (rows < query_marks)[:, None] & (cols < key_marks)[None, :]
            state = tl.load(states + places, mask=there, other=NOTHING_TILE)
            found = tl.maximum(found, tl.max(tl.max((state == LOW_TILE).to(tl.int32), 1), 0))
    return found > 0


@triton.jit
def _largest_norm(rows, first, length, DIM, MARKED: tl.constexpr, BLOCK_DIM: tl.constexpr):
    x = load_rows(rows, first, length, DIM, MARKED, BLOCK_DIM, False)
    return tl.max(norms_of(x), axis=0)


@triton.jit
def _norms_kernel(
    x,
    state_ptr,
    norms_ptr,
    logsumexp,
    usable_ptr,
    least_ptr,
    stride_b,
    stride_q,
    stride_k,
    query_marks,
    key_marks,
    heads,
    length,
    marks,
    DIM: tl.constexpr,
    MARKED: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    FAR: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The largest norm of each MARKED rows of a head; nothing where no mark of the batch is low.

    Of queries in a backward, which gives `logsumexp`, the least logsumexp of each MARKED, too,
    and one that its kernel can use: of what attends to nothing, and of what is no query, infinity.
    """
    mark = tl.program_id(0) % marks
    flat_head = tl.program_id(0) // marks
    batch, head = flat_head // heads, flat_head % heads
    if logsumexp is not None:
        query = mark * MARKED + tl.arange(0, MARKED)
        begin, stride = rows_of(logsumexp, batch, head, 1, False)
        lse = tl.load(begin + query.to(tl.int64) * stride, mask=query < length, other=INF)
        lse = tl.where(lse == -INF, INF, lse)  # native's of a query that attends to nothing
        tl.store(usable_ptr + tl.program_id(0).to(tl.int64) * MARKED + tl.arange(0, MARKED), lse)
        tl.store(least_ptr + tl.program_id(0), least_of(lse, 0))
    states = state_ptr + batch.to(tl.int64) * stride_b
    if _is_low_anywhere(states, stride_q, stride_k, query_marks, key_marks, ROWS, COLS):
        rows = rows_of(x, batch, head, UNIT, FAR)
        largest = _largest_norm(rows, mark * MARKED, length, DIM, MARKED, BLOCK_DIM)
        tl.store(norms_ptr + tl.program_id(0), largest)


@triton.jit
def _list_kernel(
    x,
    norms_ptr,
    least_ptr,
    state_ptr,
    best_ptr,
    lists_ptr,
    stride_b,
    stride_q,
    stride_k,
    query_marks,
    key_marks,
    other_marks,
    heads,
    group_x,
    group_other,
    length,
    rows,
    tiles,
    scale,
    DIM: tl.constexpr,
    MARKED: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    FAR: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program writes both lists of one row of tiles of a head: of queries, or of keys in a
    backward, which gives `least_ptr`.

    A tile is what ``[QUERIES, KEYS]`` marks say together.

    Args:
        x: what rows of tiles are of, queries or keys; `norms_ptr` has the norms of the other.
        least_ptr: the least logsumexp of each mark of queries.
    """
    BY_KEYS: tl.constexpr = least_ptr is not None
    OWN: tl.constexpr = KEYS if BY_KEYS else QUERIES
    OTHER: tl.constexpr = QUERIES if BY_KEYS else KEYS
    row = tl.program_id(0) % rows
    flat_head = tl.program_id(0) // rows
    batch, head = flat_head // heads, flat_head % heads
    tile = tl.arange(0, BLOCK)
    this = tl.full([BLOCK], 0, tl.int32) + row
    query_tile = tile if BY_KEYS else this
    key_tile = this if BY_KEYS else tile
    states = state_ptr + batch.to(tl.int64) * stride_b
    state = tl.zeros([BLOCK], tl.int32)
    for query_mark in tl.static_range(QUERIES):
        of_queries = query_tile * QUERIES + query_mark
        for key_mark in tl.static_range(KEYS):
            of_keys = key_tile * KEYS + key_mark
            is_there = (of_queries < query_marks) & (of_keys < key_marks) & (tile < tiles)
            places = of_queries.to(tl.int64) * stride_q + of_keys * stride_k
            # Where a tile ends behind the last key there are scores to be left out.
            absent = tl.where(of_queries < query_marks, NOTHING_TILE, 0)
            state = state | tl.load(states + places, mask=is_there, other=absent)
    is_low = (state == LOW_TILE) & (tile < tiles)
    counts = is_low
    if tl.max(is_low.to(tl.int32), axis=0) > 0:
        x_rows = rows_of(x, batch, head // group_x, UNIT, FAR)
        own = tl.zeros([], tl.float32)
        for mark in tl.static_range(OWN):
            first = (row * OWN + mark) * MARKED
            of_mark = _largest_norm(x_rows, first, length, DIM, MARKED, BLOCK_DIM)
            own = tl.maximum(own, of_mark)
        of_other = (batch * (heads // group_other) + head // group_other) * other_marks
        of_tile = tl.zeros([BLOCK], tl.float32)
        for mark in tl.static_range(OTHER):
            place = tile * OTHER + mark
            there = place < other_marks
            norm = tl.load(norms_ptr + of_other + place, mask=there, other=0.0)
            of_tile = tl.maximum(of_tile, norm)
        if BY_KEYS:
            least = tl.full([BLOCK], INF, tl.float32)
            for mark in tl.static_range(OTHER):
                place = tile * OTHER + mark
                there = place < other_marks
                lse = tl.load(least_ptr + of_other + place, mask=there, other=INF)
                least = tl.minimum(least, lse)
            # What scores are at most without a bias.
            largest = own * of_tile * scale
        else:
            # Of every query the bias is as much somewhere, and the score there no less.
            bests = best_ptr + batch.to(tl.int64) * stride_b
            least = tl.full([], INF, tl.float32)
            for mark in tl.static_range(QUERIES):
                query = row * QUERIES + mark
                best = tl.full([CHUNK], -INF, tl.float32)
                for begin in range(0, key_marks, CHUNK):
                    key = begin + tl.arange(0, CHUNK)
                    is_mark = (key < key_marks) & (query < query_marks)
                    best_ptrs = bests + query.to(tl.int64) * stride_q + key * stride_k
                    best = tl.maximum(best, tl.load(best_ptrs, mask=is_mark, other=-INF))
                best_of_mark = tl.max(best, axis=0)
                least = tl.minimum(least, tl.where(query < query_marks, best_of_mark, INF))
            largest = own * (of_tile + tl.max(of_tile, axis=0)) * scale
        counts = is_low & ~(largest + LOW - least < NOTHING_BELOW)
    is_zero = (state == ZERO_TILE) & (tile < tiles)
    is_biased = (state != NOTHING_TILE) & (state != ZERO_TILE) & (tile < tiles)
    is_biased = is_biased & (counts | ~is_low)
    biased_ptr = lists_ptr + tl.program_id(0).to(tl.int64) * (2 * (tiles + 1))
    zero_ptr = biased_ptr + tiles + 1
    tl.store(biased_ptr, tl.sum(is_biased.to(tl.int32), axis=0))
    tl.store(biased_ptr + tl.cumsum(is_biased.to(tl.int32), axis=0), tile, mask=is_biased)
    tl.store(zero_ptr, tl.sum(is_zero.to(tl.int32), axis=0))
    tl.store(zero_ptr + tl.cumsum(is_zero.to(tl.int32), axis=0), tile, mask=is_zero)


# Queries and keys of a mark: what divides the tiles of all kernels.
_MARKED = 64
# Marks of a row that a program looks at together.
_CHUNK = 32


class Lists(NamedTuple):
    """What a kernel is given of a bias's tiles, and what writes it."""

    #: ``[batch, heads, rows of tiles, 2, 1 + tiles]``, int32.
    tiles: torch.Tensor
    #: For a backward, natural, ``[batch, heads, length_q rounded up to whole tiles]``, float32.
    logsumexp: torch.Tensor | None
    launches: list[Launch]


def plan_lists(
    bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    queries: int,
    keys: int,
    logsumexp: torch.Tensor | None = None,
) -> Lists:
    """The lists of a bias that heads share, and the launches that fill them.

    Args:
        bias: ``[batch, heads, length_q, length_k]``.
        q: ``[batch, heads, length_q, dim]``.
        k: ``[batch, heads_k, length_k, dim]``.
        scale: of the scores.
        queries: of a tile; a multiple of 64, as `keys` is.
        keys: of a tile.
        logsumexp: of a backward, ``[batch, heads, length_q]``: there is a list for each tile of
            keys, and otherwise for each of queries.
    """
    batch, heads, length_q, length_k = bias.shape
    by_keys = logsumexp is not None
    marks, best, mark = mark_tiles(bias, _MARKED, _MARKED)
    query_marks, key_marks = marks.shape[1:]
    strides = list(marks.stride())
    if marks.shape[0] == 1:  # one batch says it of all
        strides[0] = 0
    if bias_kind(bias) == BY_KEY.value:  # and one row of marks
        query_marks, strides[1] = ceil_div(length_q, _MARKED), 0
    of_marks = (*strides, query_marks, key_marks)
    own, other = (k, q) if by_keys else (q, k)
    rows, tiles = ceil_div(length_q, queries), ceil_div(length_k, keys)
    if by_keys:
        rows, tiles = tiles, rows
    # Of whole tiles, as a backward's kernel reads its logsumexp.
    other_marks = tiles * (queries if by_keys else keys) // _MARKED
    norms = bias.new_empty((batch, other.shape[1], other_marks), dtype=torch.float32)
    usable = least = None
    if logsumexp is not None:
        usable = q.new_empty((batch, heads, other_marks * _MARKED), dtype=torch.float32)
        least = torch.empty_like(norms)
    measure = Launch(
        _norms_kernel,
        norms.numel(),
        (
            *(heads_of(other), marks, norms, heads_of(logsumexp), usable, least),
            *(*strides, marks.shape[1], key_marks, other.shape[1], other.shape[2], other_marks),
        ),
        {**constexprs_of(other), "MARKED": _MARKED, "ROWS": _CHUNK, "COLS": _CHUNK},
        4,
    )
    lists = bias.new_empty((batch, heads, rows, 2, 1 + tiles), dtype=torch.int32)
    collect = Launch(
        _list_kernel,
        batch * heads * rows,
        (
            *(heads_of(own), norms, least, marks, best, lists, *of_marks),
            *(other_marks, heads, heads // own.shape[1], heads // other.shape[1]),
            *(own.shape[2], rows, tiles, scale),
        ),
        {
            **constexprs_of(own),
            "MARKED": _MARKED,
            "QUERIES": queries // _MARKED,
            "KEYS": keys // _MARKED,
            "BLOCK": max(power_of_2(tiles), 16),
            "CHUNK": _CHUNK,
        },
        4,
    )
    return Lists(lists, usable, [mark, measure, collect])
