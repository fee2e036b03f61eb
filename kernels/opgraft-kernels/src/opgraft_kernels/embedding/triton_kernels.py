"""The gradient of an embedding's weight in Triton: each row is the sum of its tokens' gradients.

Nearly all of the time goes to writing the gradient, most of which is zeros, and to reading the
tokens' gradients. Both happen once, in the last of up to five kernels. The others find out which
tokens a row has, in the order of the tokens:

    sort       chunks of tokens by their rows: a token's place is the number of those before it in
               its chunk, of which each is compared with each
    merge      the chunks: a token's place is the sum of its places in all of them, found by
               bisection. So is a comparison of all tokens with all, at a small part of its cost.
    starts     where the tokens of each row begin, by bisection
    spans      the sums of those spans of the sorted tokens that have one row, in float32
    gradient   of each row: what its tokens outside of whole spans are, and its spans

No step counts by atomics or looks at how many tokens a row has to say what there is to launch: the
order of each sum is fixed, the bits are the same every time, and nothing waits for the host. A row
of many tokens (padding, for one) is summed by many programs: about the square root of all tokens
is the most that one adds up by itself. A radix sort would take more launches and be no faster at
the numbers of tokens that a batch has. A token whose index is `padding_idx`, or is no row at all,
is sorted behind all rows, where nothing reads it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from opgraft_kernels.integers import ceil_div, power_of_2, unit_of
from opgraft_kernels.launches import Launch, as_rows, launched
from opgraft_kernels.rows import begin_program, load_if, multiple_of

__all__ = ["embedding_dense_backward", "plan"]

# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------

# Sizes are run-time integers: a kernel is compiled once for a tile and a dtype. `places` is the
# number of tokens, rounded up to whole chunks.

_HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def _rows_of(index_ptr, token, tokens, num_weights, padding_idx):
    """The rows of tokens; `num_weights` of those that count for none, and beyond the last token."""
    index = tl.load(index_ptr + token, mask=token < tokens, other=-1)
    counts = (index >= 0) & (index < num_weights) & (index != padding_idx)
    return tl.where(counts, index, num_weights).to(tl.int32)


@triton.jit
def _count_below(ptr, bound, length, log2):
    """How many of `length` ascending numbers are below `bound`; `length` is up to 2 ** log2."""
    count = tl.zeros_like(bound)
    for step in range(log2 + 1):
        more = count + (1 << (log2 - step))
        number = tl.load(ptr + more - 1, mask=more <= length, other=_HIGHEST)
        count = tl.where(number < bound, more, count)
    return count


@triton.jit(do_not_specialize=["tokens", "num_weights", "padding_idx", "chunk"])
def _sort_kernel(
    index_ptr,
    row_ptr,
    token_ptr,
    tokens,
    num_weights,
    padding_idx,
    chunk,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The rows of each chunk of tokens, ascending, and which tokens they are of."""
    begin_program(EARLY)
    first = tl.program_id(0) * BLOCK
    first_of_chunk = first // chunk * chunk
    lane = tl.arange(0, BLOCK)
    row = _rows_of(index_ptr, first + lane, tokens, num_weights, padding_idx)
    # Of the same row those before come before: here, and in earlier blocks of the chunk.
    is_before = (row[None, :] == row[:, None]) & (lane[None, :] < lane[:, None])
    before = is_before.to(tl.int32)
    for other in range(first_of_chunk, first_of_chunk + chunk, BLOCK):
        other_row = _rows_of(index_ptr, other + lane, tokens, num_weights, padding_idx)
        bound = row + tl.where(other < first, 1, 0)
        before += (other_row[None, :] < bound[:, None]).to(tl.int32)
    place = first_of_chunk + tl.sum(before, axis=1)
    tl.store(row_ptr + place, row)
    tl.store(token_ptr + place, first + lane)


@triton.jit(do_not_specialize=["chunks", "chunk", "log2"])
def _merge_kernel(
    row_ptr,
    token_ptr,
    merged_row_ptr,
    merged_token_ptr,
    chunks,
    chunk,
    log2,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """What `_sort_kernel` wrote as if all tokens were one chunk."""
    begin_program(EARLY)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.program_id(0) * BLOCK // chunk
    row = tl.load(row_ptr + place)
    before = tl.zeros([BLOCK, CHUNKS], tl.int32)
    for first in range(0, chunks, CHUNKS):
        other = (first + tl.arange(0, CHUNKS))[None, :]
        # Of the same row the tokens of earlier chunks come before.
        bound = row[:, None] + (other < own).to(tl.int32)
        length = tl.where(other < chunks, chunk, 0)
        found = _count_below(row_ptr + other * chunk, bound, length, log2)
        before += tl.where(other == own, (place - own * chunk)[:, None], found)
    merged = tl.sum(before, axis=1)
    tl.store(merged_row_ptr + merged, row)
    tl.store(merged_token_ptr + merged, tl.load(token_ptr + place))


@triton.jit(do_not_specialize=["num_weights", "places", "log2"])
def _starts_kernel(
    row_ptr,
    start_ptr,
    num_weights,
    places,
    log2,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Where the tokens of each row begin, and where those of the last one end."""
    begin_program(EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = _count_below(row_ptr, row, places, log2)
    tl.store(start_ptr + row, start, mask=row <= num_weights)


@triton.jit(do_not_specialize=["num_weights", "width", "g_stride", "span"])
def _spans_kernel(
    g_ptr,
    row_ptr,
    token_ptr,
    sum_ptr,
    num_weights,
    width,
    g_stride,
    span,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The sum of each `span` sorted tokens that have the same row; of others nothing is written."""
    begin_program(EARLY)
    width, g_stride = multiple_of(width, UNIT), multiple_of(g_stride, UNIT)
    blocks = tl.cdiv(width, BLOCK)
    index = tl.program_id(0) // blocks
    first = index * span
    row = tl.load(row_ptr + first)
    if (row == tl.load(row_ptr + first + span - 1)) & (row < num_weights):
        col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        mask = (col < width)[None, :]
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        for step in range(0, span, TOKENS):
            token = tl.load(token_ptr + first + step + tl.arange(0, TOKENS)).to(tl.int64)
            ptrs = (g_ptr + token * g_stride)[:, None] + col[None, :]
            total += load_if(ptrs, mask, MASK_COLS).to(tl.float32)
        ptrs = sum_ptr + index.to(tl.int64) * width + col
        tl.store(ptrs, tl.sum(total, axis=0), mask=col < width)


@triton.jit(do_not_specialize=["num_weights", "width", "g_stride", "span"])
def _gradient_kernel(
    g_ptr,
    token_ptr,
    start_ptr,
    sum_ptr,
    dw_ptr,
    num_weights,
    width,
    g_stride,
    span,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MASK_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of the gradient: its rows walk over their tokens together, AT_ONCE in flight."""
    begin_program(EARLY)
    width, g_stride = multiple_of(width, UNIT), multiple_of(g_stride, UNIT)
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    in_rows = row < num_weights
    start = tl.load(start_ptr + row, mask=in_rows, other=0)
    end = tl.load(start_ptr + row + 1, mask=in_rows, other=0)
    first_span = tl.cdiv(start, span)
    spans = tl.maximum(end // span - first_span, 0)
    # The tokens before the first whole span and those behind the last one.
    tokens = end - start - spans * span
    head = first_span * span - start
    mask = in_rows[:, None]
    if MASK_COLS:
        mask = mask & (col < width)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(0, tl.max(tokens, axis=0), AT_ONCE):
        for each in tl.static_range(AT_ONCE):
            index = step + each
            wanted = index < tokens
            place = start + index + tl.where(index < head, 0, spans * span)
            token = tl.load(token_ptr + place, mask=wanted, other=0).to(tl.int64)
            ptrs = (g_ptr + token * g_stride)[:, None] + col[None, :]
            total += tl.load(ptrs, mask=mask & wanted[:, None], other=0.0).to(tl.float32)
    for step in range(0, tl.max(spans, axis=0), AT_ONCE):
        for each in tl.static_range(AT_ONCE):
            index = step + each
            ptrs = (sum_ptr + (first_span + index).to(tl.int64) * width)[:, None] + col[None, :]
            total += tl.load(ptrs, mask=mask & (index < spans)[:, None], other=0.0)
    if SCALE:
        total /= tl.maximum(end - start, 1).to(tl.float32)[:, None]
    ptrs = (dw_ptr + row.to(tl.int64) * width)[:, None] + col[None, :]
    tl.store(ptrs, total.to(dw_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------------------
# Launches
# --------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """How tokens are divided, all by powers of two; see `sizes_of`."""

    chunk: int  # tokens that are sorted together
    chunks: int
    span: int  # sorted tokens that are summed together if they have one row

    @property
    def places(self) -> int:
        return self.chunk * self.chunks


def sizes_of(tokens: int) -> Sizes:
    """Sorting compares each token with `chunk` others, merging bisects in `tokens / chunk` chunks,
    at some 60 times the cost of a comparison. A program adds up to two spans of single tokens, and
    then up to ``tokens / span`` sums: spans are short since most rows have few tokens, and a token
    takes longer, whose place is read first. Scratch memory has as many rows as there are spans."""
    root = power_of_2(math.isqrt(tokens))
    chunk = max(8 * root, _SORTED * 2)
    return Sizes(chunk, ceil_div(tokens, chunk), max(root // 4, _SPAN_TOKENS))


# Tokens of a program that sorts, which it compares with as many at a time: 32 comparisons a thread.
# Tokens of one that merges, and the chunks that it bisects in at a time: bisecting waits for memory
# at each step, so there is much of it at once.
_SORTED = 64
_MERGED, _CHUNKS = 64, 16
_STARTS = 256
# A sum over a span holds so many tokens, in blocks of so many bytes: 128 bytes a thread in flight.
_SPAN_TOKENS, _SPAN_BYTES = 32, 512
# The gradient's tile: 32 bytes a thread of 4 warps, so that zeros are written 16 bytes at a time
# and enough programs are there at once to hide the three loads (where tokens begin, which they are,
# their gradients) that wait for each other. More tokens at once, or a larger tile, would take the
# registers of other programs; of four, ptxas has two or three in flight. Narrow rows share a tile,
# and wait for that with the most tokens: a few of them.
_TILE_BYTES, _MAX_ROWS, _AT_ONCE = 4096, 16, 4


def plan(
    grad_output: Tensor,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> tuple[Tensor, list[Launch]]:
    """``aten::embedding_dense_backward``, of at least one token: the gradient, contiguous, and what
    fills it."""
    tokens, width = indices.numel(), grad_output.shape[-1]
    new = torch.empty
    dw = new((num_weights, width), dtype=grad_output.dtype, device=grad_output.device)
    sizes = sizes_of(tokens)
    g, g_stride = as_rows(grad_output, tokens, width)
    rows, order = new((2, sizes.places), dtype=torch.int32, device=g.device).unbind()
    chunk_log2, log2 = (power_of_2(each).bit_length() - 1 for each in (sizes.chunk, sizes.places))
    launches = [
        Launch(
            _sort_kernel,
            sizes.places // _SORTED,
            (indices.contiguous(), rows, order, tokens, num_weights, padding_idx, sizes.chunk),
            {"BLOCK": _SORTED},
        )
    ]
    if sizes.chunks > 1:
        chunked = (rows, order)
        rows, order = torch.empty_like(rows), torch.empty_like(order)
        launches.append(
            Launch(
                _merge_kernel,
                sizes.places // _MERGED,
                (*chunked, rows, order, sizes.chunks, sizes.chunk, chunk_log2),
                {"BLOCK": _MERGED, "CHUNKS": _CHUNKS},
            )
        )
    starts = new(num_weights + 1, dtype=torch.int32, device=g.device)
    sums = new((sizes.places // sizes.span, width), dtype=torch.float32, device=g.device)
    itemsize, padded = g.element_size(), max(power_of_2(width), 16)
    unit = unit_of(itemsize, width, g_stride)
    span_block = min(padded, _SPAN_BYTES // itemsize)
    block = min(padded, _TILE_BYTES // itemsize)
    tile_rows = min(_TILE_BYTES // itemsize // block, _MAX_ROWS)
    sizes_of_rows = (num_weights, width, g_stride, sizes.span)
    return dw, [
        *launches,
        Launch(
            _starts_kernel,
            ceil_div(num_weights + 1, _STARTS),
            (rows, starts, num_weights, sizes.places, log2),
            {"BLOCK": _STARTS},
        ),
        Launch(
            _spans_kernel,
            sizes.places // sizes.span * ceil_div(width, span_block),
            (g, rows, order, sums, *sizes_of_rows),
            {
                "TOKENS": _SPAN_TOKENS,
                "BLOCK": span_block,
                "MASK_COLS": width % span_block != 0,
                "UNIT": unit,
            },
        ),
        Launch(
            _gradient_kernel,
            ceil_div(num_weights, tile_rows) * ceil_div(width, block),
            (g, order, starts, sums, dw, *sizes_of_rows),
            {
                "SCALE": scale_grad_by_freq,
                "ROWS": tile_rows,
                "BLOCK": block,
                "AT_ONCE": _AT_ONCE,
                "MASK_COLS": width % block != 0,
                "UNIT": unit,
            },
            max(tile_rows * block * itemsize // 1024, 1),
        ),
    ]


embedding_dense_backward = launched(plan)
