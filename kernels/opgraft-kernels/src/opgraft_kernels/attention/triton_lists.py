"""Lists of the tiles of a bias for FlashAttention-4's kernels, which Triton kernels write before.

A list is of a row of tiles, of queries. ``lists[b, h, r, 0]`` are the tiles that are computed with
the bias, and ``lists[b, h, r, 1]`` those where it is 0: their number, and then in order the tiles.
Those that are left out are in neither: where all is -inf, or low, which torch makes of a boolean
mask, and exp of it would be 0 in float32. Rows' norms tell, as for Triton's own kernels
(`triton_tiles`), but all of them here before: what a program of FlashAttention-4 loads is known
before it computes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from opgraft_kernels.rows import Launch, ceil_div, power_of_2, unit_of

from .triton_kernels import BY_KEY, apart, are_far_apart, bias_kind, block_dim, mark_tiles
from .triton_tiles import (
    INF,
    LOW,
    LOW_TILE,
    NOTHING_BELOW,
    NOTHING_TILE,
    ZERO_TILE,
    head_at,
    load_rows,
    norms_of,
    row_stride,
)

__all__ = ["plan_lists"]


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
def _largest_norm(rows, first, length, stride, DIM, MARKED: tl.constexpr, BLOCK_DIM: tl.constexpr):
    x = load_rows(rows, first, length, stride, DIM, MARKED, BLOCK_DIM, False)
    return tl.max(norms_of(x), axis=0)


@triton.jit
def _norms_kernel(
    k_ptr,
    state_ptr,
    norms_ptr,
    stride_kb,
    stride_kh,
    stride_km,
    stride_b,
    stride_q,
    stride_k,
    query_marks,
    key_marks,
    heads_k,
    length_k,
    DIM: tl.constexpr,
    MARKED: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    FAR: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The largest norm of each MARKED keys of a head; nothing where no mark of the batch is low."""
    mark = tl.program_id(0) % key_marks
    flat_head = tl.program_id(0) // key_marks
    batch = flat_head // heads_k
    states = state_ptr + batch.to(tl.int64) * stride_b
    if _is_low_anywhere(states, stride_q, stride_k, query_marks, key_marks, ROWS, COLS):
        rows = head_at(k_ptr, batch, flat_head % heads_k, stride_kb, stride_kh, UNIT)
        stride_km = row_stride(stride_km, UNIT, FAR)
        largest = _largest_norm(rows, mark * MARKED, length_k, stride_km, DIM, MARKED, BLOCK_DIM)
        tl.store(norms_ptr + tl.program_id(0), largest)


@triton.jit
def _list_kernel(
    q_ptr,
    norms_ptr,
    state_ptr,
    best_ptr,
    lists_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_b,
    stride_q,
    stride_k,
    query_marks,
    key_marks,
    heads,
    group,
    length_q,
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
    """A program writes both lists of one row of tiles of a head; `norms_ptr` has the norms of keys.

    A tile is what ``[QUERIES, KEYS]`` marks say together.
    """
    row = tl.program_id(0) % rows
    flat_head = tl.program_id(0) // rows
    batch, head = flat_head // heads, flat_head % heads
    tile = tl.arange(0, BLOCK)
    states = state_ptr + batch.to(tl.int64) * stride_b
    state = tl.zeros([BLOCK], tl.int32)
    for query_mark in tl.static_range(QUERIES):
        query = row * QUERIES + query_mark
        for key_mark in tl.static_range(KEYS):
            of_keys = tile * KEYS + key_mark
            is_there = (query < query_marks) & (of_keys < key_marks) & (tile < tiles)
            places = query.to(tl.int64) * stride_q + of_keys * stride_k
            # Where a tile ends behind the last key there are scores to be left out.
            absent = tl.where(query < query_marks, NOTHING_TILE, 0)
            state = state | tl.load(states + places, mask=is_there, other=absent)
    is_low = (state == LOW_TILE) & (tile < tiles)
    counts = is_low
    if tl.max(is_low.to(tl.int32), axis=0) > 0:
        q_rows = head_at(q_ptr, batch, head, stride_qb, stride_qh, UNIT)
        stride_qm = row_stride(stride_qm, UNIT, FAR)
        norms = norms_ptr + (batch * (heads // group) + head // group) * key_marks
        of_tile = tl.zeros([BLOCK], tl.float32)
        for mark in tl.static_range(KEYS):
            mark_of_tile = tile * KEYS + mark
            there = mark_of_tile < key_marks
            of_tile = tl.maximum(of_tile, tl.load(norms + mark_of_tile, mask=there, other=0.0))
        of_queries = tl.zeros([], tl.float32)
        # Of every query the bias is as much somewhere, and the score there no less.
        bests = best_ptr + batch.to(tl.int64) * stride_b
        least = tl.full([], INF, tl.float32)
        for mark in tl.static_range(QUERIES):
            here = row * QUERIES + mark
            first = here * MARKED
            of_mark = _largest_norm(q_rows, first, length_q, stride_qm, DIM, MARKED, BLOCK_DIM)
            of_queries = tl.maximum(of_queries, of_mark)
            best = tl.full([CHUNK], -INF, tl.float32)
            for begin in range(0, key_marks, CHUNK):
                key = begin + tl.arange(0, CHUNK)
                is_mark = (key < key_marks) & (here < query_marks)
                place = here.to(tl.int64) * stride_q + key * stride_k
                best = tl.maximum(best, tl.load(bests + place, mask=is_mark, other=-INF))
            best_of_mark = tl.max(best, axis=0)
            least = tl.minimum(least, tl.where(here < query_marks, best_of_mark, INF))
        largest = of_queries * (of_tile + tl.max(of_tile, axis=0)) * scale
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


# Queries and keys of a mark: what divides the tiles.
_MARKED = 64
# Marks of a row that a program looks at together.
_CHUNK = 32


def plan_lists(
    bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float, queries: int, keys: int
) -> tuple[torch.Tensor, list[Launch]]:
    """The lists of a bias that heads share, and the launches that fill them.

    Args:
        bias: ``[batch, heads, length_q, length_k]``.
        q: ``[batch, heads, length_q, dim]``.
        k: ``[batch, heads_k, length_k, dim]``.
        scale: of the scores.
        queries: of a tile; a multiple of 64, as `keys` is.
        keys: of a tile.

    Returns:
        ``[batch, heads, rows of tiles, 2, 1 + tiles]``, int32; and the launches.
    """
    batch, heads, length_q, length_k = bias.shape
    heads_k = k.shape[1]
    marks, best, mark = mark_tiles(bias, _MARKED, _MARKED)
    query_marks, key_marks = marks.shape[1:]
    strides = list(marks.stride())
    if marks.shape[0] == 1:  # one batch says it of all
        strides[0] = 0
    if bias_kind(bias) == BY_KEY.value:  # and one row of marks
        query_marks, strides[1] = ceil_div(length_q, _MARKED), 0
    norms = bias.new_empty((batch, heads_k, key_marks), dtype=torch.float32)
    measure = Launch(
        _norms_kernel,
        norms.numel(),
        (
            *(k, marks, norms, *apart(k), *strides, marks.shape[1], key_marks),
            *(heads_k, length_k),
        ),
        {**_constexprs(k), "ROWS": _CHUNK, "COLS": _CHUNK},
        4,
    )
    rows, tiles = ceil_div(length_q, queries), ceil_div(length_k, keys)
    lists = bias.new_empty((batch, heads, rows, 2, 1 + tiles), dtype=torch.int32)
    collect = Launch(
        _list_kernel,
        batch * heads * rows,
        (
            *(q, norms, marks, best, lists, *apart(q), *strides, query_marks, key_marks),
            *(heads, heads // heads_k, length_q, rows, tiles, scale),
        ),
        {
            **_constexprs(q),
            "QUERIES": queries // _MARKED,
            "KEYS": keys // _MARKED,
            "BLOCK": max(power_of_2(tiles), 16),
            "CHUNK": _CHUNK,
        },
        4,
    )
    return lists, [mark, measure, collect]


def _constexprs(x: torch.Tensor) -> dict[str, Any]:
    strides = apart(x)
    return {
        "DIM": x.shape[-1],
        "MARKED": _MARKED,
        "BLOCK_DIM": block_dim(x.shape[-1]),
        "UNIT": unit_of(x.element_size(), *strides),
        "FAR": are_far_apart(strides),
    }
