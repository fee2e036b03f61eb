"""Lists of the tiles of a bias for FlashAttention-4's kernels, which Triton kernels write before.

A list is of a row of tiles: of queries in a forward, of keys in a backward. ``lists[b, h, r, 0]``
are the tiles that are computed with the bias, and ``lists[b, h, r, 1]`` those where it is 0: their
number, and then in order the tiles. Those that are left out are in neither: where all is -inf, or
low, which torch makes of a boolean mask, and exp of it would be 0 in float32. Rows' norms tell, as
for Triton's own kernels (`triton_tiles`), but all of them here before: what a program of
FlashAttention-4 loads is known before it computes.

Of a boolean mask itself no norms are asked for: what is False is left out, whatever the scores are,
but of queries that have nothing else. It is written out as bits, of which a thread of
FlashAttention-4's loads all that it needs of a query at once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from opgraft_kernels.integers import ceil_div, power_of_2
from opgraft_kernels.launches import Launch
from opgraft_kernels.rows import begin_program

from .triton_kernels import bias_kind, constexprs_of, heads_of, mark_tiles
from .triton_tiles import (
    BY_KEY,
    INF,
    LOW,
    LOW_TILE,
    NOTHING_BELOW,
    NOTHING_TILE,
    OTHER_TILE,
    ZERO_TILE,
    least_of,
    load_rows,
    norms_of,
    rows_of,
)

__all__ = ["Lists", "plan_boolean_lists", "plan_lists"]


# What multiplies four bytes, each 0 or 1, so that bits 24 to 27 of the product are those four.
_GATHER = tl.constexpr((1 << 24) | (1 << 17) | (1 << 10) | (1 << 3))
_LOWEST_BITS = tl.constexpr(0x01010101)


@triton.jit
def _bits(mask_ptr, places, there, unit, WIDE: tl.constexpr):
    """A boolean mask's elements, WIDE at a time, as the bits that they are in their words."""
    if WIDE == 4:
        four = tl.load(mask_ptr.to(tl.pointer_type(tl.int32)) + places, mask=there, other=0)
        # A byte of a boolean may be another number than 1.
        four = four | (four >> 4)
        four = four | (four >> 2)
        four = (four | (four >> 1)) & _LOWEST_BITS
        bits = ((four * _GATHER) >> 24) & 0xF
    else:
        bits = (tl.load(mask_ptr + places, mask=there, other=0) != 0).to(tl.int32)
    return bits << (unit * WIDE % 32)


@triton.jit
def _list_by_key_kernel(
    mask_ptr,
    words_ptr,
    lists_ptr,
    stride_b,
    length,
    words,
    tiles,
    other_tiles,
    lowest,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program reads a batch's boolean mask that all queries share, and writes its bits and lists:
    that of every row of tiles of queries, or with OTHERS those of all tiles of keys.

    OTHERS: 0, or a power of two that is no less than `other_tiles`, the tiles of queries.
    """
    begin_program(EARLY)
    batch = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, BLOCK * COLS // WIDE)
    bits = _bits(mask_ptr, batch * stride_b + unit, unit * WIDE < length, unit, WIDE)
    word = tl.sum(tl.reshape(bits, [BLOCK, COLS // 32, 32 // WIDE]), axis=2)
    tile = tl.arange(0, BLOCK)
    place = tile[:, None] * (COLS // 32) + tl.arange(0, COLS // 32)[None, :]
    tl.store(words_ptr + batch * words + place, word, mask=place < words)
    is_zero = (tl.min((word == -1).to(tl.int32), axis=1) == 1) & (tile < tiles)
    some = tl.max((word != 0).to(tl.int32), axis=1)
    # Where no query has anything, what is added to all scores alike does not count, if a number.
    has_nothing = (tl.max(some, axis=0) == 0) & (lowest != -INF)
    is_biased = ((some == 1) | has_nothing) & (tile < tiles) & ~is_zero
    if OTHERS == 0:
        begin = lists_ptr + batch * (2 * (tiles + 1))
        _write_list(begin, is_biased, tile)
        _write_list(begin + tiles + 1, is_zero, tile)
    else:
        other = tl.arange(0, OTHERS)[None, :]
        begin = lists_ptr + ((batch * tiles + tile) * (2 * (other_tiles + 1)))[:, None]
        for kind in tl.static_range(2):
            is_listed = is_zero if kind == 1 else is_biased
            first = begin + kind * (other_tiles + 1)
            number = tl.where(is_listed, other_tiles, 0)[:, None]
            tl.store(first, number, mask=(tile < tiles)[:, None])
            there = is_listed[:, None] & (other < other_tiles)
            tl.store(first + 1 + other, tl.broadcast_to(other, [BLOCK, OTHERS]), mask=there)


@triton.jit
def _write_list(begin, is_listed, tile):
    """How many tiles are listed, and then they, in order."""
    listed = is_listed.to(tl.int32)
    tl.store(begin, tl.sum(listed, axis=0))
    tl.store(begin + tl.cumsum(listed, axis=0), tile, mask=is_listed)


@triton.jit
def _mark_boolean_kernel(
    mask_ptr,
    words_ptr,
    state_ptr,
    best_ptr,
    stride_b,
    stride_r,
    length_r,
    length_c,
    row_tiles,
    words,
    lowest,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program reads one tile of a boolean mask, and writes what `mark_tiles_kernel` says of a
    bias that is 0 where it is True and `lowest` elsewhere; and its bits, 32 keys a word.

    WIDE: so many elements are read at a time, 4 or 1; the strides are in these. The bits of keys
    that are not there are those of none. A row that is not there is True.
    """
    begin_program(EARLY)
    UNITS: tl.constexpr = COLS // WIDE
    tiles = tl.cdiv(length_c, COLS)
    row_of_tiles = tl.program_id(0) // tiles
    batch = (row_of_tiles // row_tiles).to(tl.int64)
    row = row_of_tiles % row_tiles * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(0) % tiles
    unit = tile * UNITS + tl.arange(0, UNITS)
    there = (row < length_r)[:, None] & (unit * WIDE < length_c)[None, :]
    ptrs = batch * stride_b + (row.to(tl.int64) * stride_r)[:, None] + unit[None, :]
    bits = _bits(mask_ptr, ptrs, there, unit[None, :], WIDE)
    word = tl.sum(tl.reshape(bits, [ROWS, COLS // 32, 32 // WIDE]), axis=2)
    place = tile * (COLS // 32) + tl.arange(0, COLS // 32)
    begin = words_ptr + batch * length_r * words
    tl.store(
        begin + (row.to(tl.int64) * words)[:, None] + place[None, :],
        word,
        mask=(row < length_r)[:, None] & (place < words)[None, :],
    )
    # Of each row, whether anything is True, and whether all is.
    some = tl.max((word != 0).to(tl.int32), axis=1)
    whole = tl.min((word == -1).to(tl.int32), axis=1)
    is_row = row < length_r
    is_zero = tl.min(tl.where(is_row, whole, 1), axis=0) == 1
    is_low = tl.max(tl.where(is_row, some, 0), axis=0) == 0
    low = tl.where(lowest == -INF, NOTHING_TILE, LOW_TILE)
    state = tl.where(is_zero, ZERO_TILE, tl.where(is_low, low, OTHER_TILE))
    tl.store(state_ptr + tl.program_id(0), state)
    best = tl.where(is_row, tl.where(some == 1, 0.0, lowest), INF)
    tl.store(best_ptr + tl.program_id(0), tl.min(best, axis=0))


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
    EARLY: tl.constexpr,
):
    """The largest norm of each MARKED rows of a head; nothing where no mark of the batch is low, or
    of a boolean mask, of which `x`, `state_ptr`, `norms_ptr` and `least_ptr` are None.

    Of queries in a backward, which gives `logsumexp`, the least logsumexp of each MARKED, too,
    and one that its kernel can use: of what attends to nothing, and of what is no query, infinity.
    """
    begin_program(EARLY)
    mark = tl.program_id(0) % marks
    flat_head = tl.program_id(0) // marks
    batch, head = flat_head // heads, flat_head % heads
    if logsumexp is not None:
        query = mark * MARKED + tl.arange(0, MARKED)
        begin, stride = rows_of(logsumexp, batch, head, 1, False)
        lse = tl.load(begin + query.to(tl.int64) * stride, mask=query < length, other=INF)
        lse = tl.where(lse == -INF, INF, lse)  # native's of a query that attends to nothing
        tl.store(usable_ptr + tl.program_id(0).to(tl.int64) * MARKED + tl.arange(0, MARKED), lse)
        if least_ptr is not None:
            tl.store(least_ptr + tl.program_id(0), least_of(lse, 0))
    if norms_ptr is not None:
        states = state_ptr + batch.to(tl.int64) * stride_b
        if _is_low_anywhere(states, stride_q, stride_k, query_marks, key_marks, ROWS, COLS):
            rows = rows_of(x, batch, head, UNIT, FAR)
            largest = _largest_norm(rows, mark * MARKED, length, DIM, MARKED, BLOCK_DIM)
            tl.store(norms_ptr + tl.program_id(0), largest)


@triton.jit
def _least_best(
    bests,
    tile,
    stride_q,
    stride_k,
    query_marks,
    key_marks,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """What the mask adds to each query of a tile at least, at its best key."""
    least = tl.full([BLOCK], INF, tl.float32)
    for mark in tl.static_range(QUERIES):
        query = tile * QUERIES + mark
        best = tl.full([BLOCK], -INF, tl.float32)
        for begin in range(0, key_marks, CHUNK):
            key = begin + tl.arange(0, CHUNK)
            is_mark = (query < query_marks)[:, None] & (key < key_marks)[None, :]
            places = (query.to(tl.int64) * stride_q)[:, None] + (key * stride_k)[None, :]
            found = tl.load(bests + places, mask=is_mark, other=-INF)
            best = tl.maximum(best, tl.max(found, axis=1))
        least = tl.minimum(least, tl.where(query < query_marks, best, INF))
    return least


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
    BY_KEYS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program writes both lists of one row of tiles of a head: of queries, or if BY_KEYS of keys.

    A tile is what ``[QUERIES, KEYS]`` marks say together.

    Args:
        x: what rows of tiles are of, queries or keys; `norms_ptr` has the norms of the other. Both
            are None of a boolean mask.
        least_ptr: if BY_KEYS, and of no boolean mask, the least logsumexp of each mark of queries.
    """
    begin_program(EARLY)
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
        of_other = (batch * (heads // group_other) + head // group_other) * other_marks
        if norms_ptr is not None:
            x_rows = rows_of(x, batch, head // group_x, UNIT, FAR)
            own = tl.zeros([], tl.float32)
            for mark in tl.static_range(OWN):
                first = (row * OWN + mark) * MARKED
                of_mark = _largest_norm(x_rows, first, length, DIM, MARKED, BLOCK_DIM)
                own = tl.maximum(own, of_mark)
            of_tile = tl.zeros([BLOCK], tl.float32)
            for mark in tl.static_range(OTHER):
                place = tile * OTHER + mark
                there = place < other_marks
                norm = tl.load(norms_ptr + of_other + place, mask=there, other=0.0)
                of_tile = tl.maximum(of_tile, norm)
        bests = best_ptr + batch.to(tl.int64) * stride_b
        if BY_KEYS and norms_ptr is not None:
            least = tl.full([BLOCK], INF, tl.float32)
            for mark in tl.static_range(OTHER):
                place = tile * OTHER + mark
                there = place < other_marks
                lse = tl.load(least_ptr + of_other + place, mask=there, other=INF)
                least = tl.minimum(least, lse)
            # What scores are at most without a bias.
            largest = own * of_tile * scale
        elif BY_KEYS:
            least = _least_best(
                bests, tile, stride_q, stride_k, query_marks, key_marks, QUERIES, BLOCK, CHUNK
            )
        else:
            # Of every query the bias is as much somewhere, and the score there no less.
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
            if norms_ptr is not None:
                largest = own * (of_tile + tl.max(of_tile, axis=0)) * scale
        if norms_ptr is None:
            # Some query may have nothing but what is False.
            counts = is_low & ((least > LOW) == 0)
        else:
            counts = is_low & ~(largest + LOW - least < NOTHING_BELOW)
    is_zero = (state == ZERO_TILE) & (tile < tiles)
    is_biased = (state != NOTHING_TILE) & (state != ZERO_TILE) & (tile < tiles)
    is_biased = is_biased & (counts | ~is_low)
    biased_ptr = lists_ptr + tl.program_id(0).to(tl.int64) * (2 * (tiles + 1))
    _write_list(biased_ptr, is_biased, tile)
    _write_list(biased_ptr + tiles + 1, is_zero, tile)


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
    #: A boolean mask's bits, int32, ``[batch, heads, length_q, words]``, of whole tiles of keys.
    bits: torch.Tensor | None = None


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
    of_marks = _of_marks(marks, bias)
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
            *(*of_marks[:3], *marks.shape[1:], other.shape[1], other.shape[2], other_marks),
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
            **_of_rows(queries, keys, tiles, by_keys),
        },
        4,
    )
    return Lists(lists, usable, [mark, measure, collect])


def _of_marks(marks: torch.Tensor, bias: torch.Tensor) -> tuple[int, ...]:
    """How far a bias's marks are apart, of batches, queries and keys, and how many there are of the
    latter two."""
    of_batch, of_queries, of_keys = marks.stride()
    _, query_marks, key_marks = marks.shape
    if marks.shape[0] == 1:  # one batch says it of all
        of_batch = 0
    if bias_kind(bias) == BY_KEY.value:  # and one row of marks
        query_marks, of_queries = ceil_div(bias.shape[2], _MARKED), 0
    return of_batch, of_queries, of_keys, query_marks, key_marks


def _of_rows(queries: int, keys: int, tiles: int, by_keys: bool) -> dict[str, int]:
    """What listing is compiled with, of rows of so many tiles."""
    return {
        "MARKED": _MARKED,
        "QUERIES": queries // _MARKED,
        "KEYS": keys // _MARKED,
        "BLOCK": max(power_of_2(tiles), 16),
        "CHUNK": _CHUNK,
        "BY_KEYS": by_keys,
    }


def plan_boolean_lists(
    mask: torch.Tensor,
    queries: int,
    keys: int,
    lowest: float,
    logsumexp: torch.Tensor | None = None,
) -> Lists:
    """The lists of a boolean mask that heads share, and the launches that fill them.

    Args:
        mask: ``[batch, heads, length_q, length_k]``.
        queries: of a tile; a multiple of 64, as `keys` is.
        keys: of a tile.
        lowest: what is added to scores where it is False.
        logsumexp: as `plan_lists` has it.
    """
    batch, heads, length_q, length_k = mask.shape
    by_keys = logsumexp is not None
    rows, tiles = ceil_div(length_q, queries), ceil_div(length_k, keys)
    usable: torch.Tensor | None = None
    launches: list[Launch] = []
    if logsumexp is not None:
        usable, launches = _of_whole_tiles(logsumexp, rows * queries)
    bits = _empty_bits(mask)
    if mask.stride(2) == 0 and max(rows, tiles) <= _MOST_BY_KEY:
        lists, launch = _list_by_key(mask, bits, rows, tiles, keys, lowest, by_keys)
        launches.append(launch)
    else:
        marks, best, mark = _mark_boolean(mask, bits, lowest)
        if by_keys:
            rows, tiles = tiles, rows
        lists = torch.empty((batch, 1, rows, 2, 1 + tiles), dtype=torch.int32, device=mask.device)
        collect = Launch(
            _list_kernel,
            batch * rows,
            (
                *(None, None, None, marks, best, lists, *_of_marks(marks, mask)),
                # Heads share the lists, too, so that there is one; and of norms there is nothing.
                *(0, 1, 1, 1, 0, rows, tiles, 0.0),
            ),
            {**_OF_NO_ROWS, **_of_rows(queries, keys, tiles, by_keys)},
            4,
        )
        launches += [mark, collect]
    bits = bits.expand(batch, heads, length_q, bits.shape[3])
    return Lists(lists.expand(batch, heads, -1, -1, -1), usable, launches, bits)


# What kernels are compiled with that are given no queries or keys.
_OF_NO_ROWS = {"DIM": 0, "BLOCK_DIM": 0, "UNIT": 1, "FAR": False}


def _of_whole_tiles(logsumexp: torch.Tensor, length: int) -> tuple[torch.Tensor, list[Launch]]:
    """A logsumexp of a forward with a boolean mask, of whole tiles, and the launches that write it.

    It is infinity already of what attends to nothing, so that it may serve as it is.
    """
    batch, heads, length_q = logsumexp.shape
    is_aligned = logsumexp.is_contiguous() and logsumexp.data_ptr() % 16 == 0
    if length_q == length and is_aligned:
        return logsumexp, []
    usable = logsumexp.new_empty((batch, heads, length))
    marks = length // _MARKED
    launch = Launch(
        _norms_kernel,
        batch * heads * marks,
        (
            *(None, None, None, heads_of(logsumexp), usable, None),
            *(0, 0, 0, 0, 0, heads, length_q, marks),
        ),
        {**_OF_NO_ROWS, "MARKED": _MARKED, "ROWS": _CHUNK, "COLS": _CHUNK},
        4,
    )
    return usable, [launch]


# The most tiles of a row for which one program looks at a mask that all queries share.
_MOST_BY_KEY = 128
# Elements of a boolean mask that are read at a time, and the words that a thread of
# FlashAttention-4's does.
_WIDE, _WORDS = 4, 4


def _empty_bits(mask: torch.Tensor) -> torch.Tensor:
    """Room for a boolean mask's bits, once where batches, heads or queries share it."""
    batch, _, length_q, length_k = mask.shape
    batches = 1 if mask.stride(0) == 0 else batch
    queries = 1 if mask.stride(2) == 0 else length_q
    words = _WORDS * ceil_div(length_k, 32 * _WORDS)
    return torch.empty((batches, 1, queries, words), dtype=torch.int32, device=mask.device)


def _elements_at_a_time(mask: torch.Tensor) -> int:
    begins = (mask.stride(0), mask.stride(2), mask.data_ptr(), mask.shape[3])
    return _WIDE if all(each % _WIDE == 0 for each in begins) else 1


def _list_by_key(
    mask: torch.Tensor,
    bits: torch.Tensor,
    rows: int,
    tiles: int,
    keys: int,
    lowest: float,
    by_keys: bool,
) -> tuple[torch.Tensor, Launch]:
    """The lists of a mask that all queries share: one kernel writes them, and the bits.

    All rows of tiles of queries share a list, too. Those of keys have all tiles of queries, or
    none.
    """
    batches, _, _, words = bits.shape
    shape = (batches, 1, tiles, 2, 1 + rows) if by_keys else (batches, 1, 1, 2, 1 + tiles)
    lists = torch.empty(shape, dtype=torch.int32, device=mask.device)
    wide = _elements_at_a_time(mask)
    launch = Launch(
        _list_by_key_kernel,
        batches,
        (
            *(mask.view(torch.uint8), bits, lists, mask.stride(0) // wide, mask.shape[3]),
            *(words, tiles, rows, lowest),
        ),
        {
            "COLS": keys,
            "WIDE": wide,
            "BLOCK": max(power_of_2(tiles), 2),
            "OTHERS": max(power_of_2(rows), 2) if by_keys else 0,
        },
        4,
    )
    if by_keys:
        return lists, launch
    return lists.expand(-1, -1, rows, -1, -1), launch


def _mark_boolean(
    mask: torch.Tensor, bits: torch.Tensor, lowest: float
) -> tuple[torch.Tensor, torch.Tensor, Launch]:
    """Of a boolean mask what `mark_tiles` says of a bias; and what writes that and its bits."""
    length_k = mask.shape[3]
    batches, _, queries, words = bits.shape
    rows = 1 if mask.stride(2) == 0 else _MARKED
    make = functools.partial(torch.empty, device=mask.device)
    shape = (batches, ceil_div(queries, rows), ceil_div(length_k, _MARKED))
    marks, best = make(shape, dtype=torch.int32), make(shape, dtype=torch.float32)
    wide = _elements_at_a_time(mask)
    apart = (mask.stride(0) // wide, mask.stride(2) // wide)
    launch = Launch(
        _mark_boolean_kernel,
        marks.numel(),
        (
            *(mask.view(torch.uint8), bits, marks, best, *apart),
            *(queries, length_k, shape[1], words, lowest),
        ),
        {"ROWS": rows, "COLS": _MARKED, "WIDE": wide},
        1,
    )
    return marks, best, launch
