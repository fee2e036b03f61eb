"""Softmax and log-softmax in Triton, each forward and backward.

A tensor is seen as ``[outer, size, inner]``, with the softmax over `size`. A *line* is what is
normalised together: `size` elements that are `inner` apart. All arithmetic is in float32::

    softmax        y = exp(x - max(x)) / sum(exp(x - max(x)))      dx = (g - sum(g * y)) * y
    log_softmax    y = x - max(x) - log(sum(exp(x - max(x))))      dx = g - exp(y) * sum(g)

Both directions are bound by memory. A program holds a tile of lines, which stays in registers
between the reduction and its use. Where inner is 1 threads read along a line, otherwise across
lines, so that neighbours in memory are read together. A longer row is split over programs, which
hold a part of it each and exchange what they found in it; or a program reads it in blocks, twice:
the maximum and the sum are found in one pass, the second reads what may still be in the L2 cache.
That is for other lines, for devices whose programs cannot wait, and for forwards of 16 bits, of all
but the longest rows, of which the cache has too little left.

`size` is a run-time integer under a power-of-two block, as in the norms: another size compiles
another kernel only if it needs another block, mask, or unit (how wide loads may be).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from opgraft_kernels.integers import ceil_div, power_of_2, unit_of
from opgraft_kernels.launches import (
    OTHER_BYTES,
    Device,
    Launch,
    as_rows,
    device_of,
    ends_columns,
    split_rows,
    tiles_ahead,
)
from opgraft_kernels.launches import Tile as RowTile
from opgraft_kernels.rows import (
    LOWEST,
    RING,
    begin_program,
    collect_sum,
    collect_two,
    column,
    ends_of,
    exp,
    grow_exponentials,
    load_if,
    load_logits,
    mask_if,
    mask_of,
    max_of,
    multiple_of,
    prefetch,
    publish,
    scalar,
    store_if,
    sum_exponentials,
    sum_of,
    sum_of_exponentials,
    tile_start,
)

__all__ = [
    "BACKWARD_TILE",
    "FORWARD_TILE",
    "log_softmax_backward",
    "log_softmax_forward",
    "plan_backward",
    "plan_forward",
    "softmax_backward",
    "softmax_forward",
    "strided_backward",
    "strided_forward",
    "strided_tile_of",
    "tile_of",
]

# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------

# LOG: log-softmax. STRIDED: inner is not 1. A program has LINES lines, in blocks of BLOCK elements:
# one of them if WHOLE. MASK_LINES, MASK_COLS: there may be fewer than that; where there may not,
# masks would cost bandwidth. PREFETCH: a program asks for the lines of one that is `ahead` of it,
# which are next to one another; and of a line that is read in blocks two are on their way to the L2
# cache while a third is computed with. Strides are multiples of UNIT; so is what is contiguous, a
# row's size or inner; but not of shifted lines, which have ENDS: see `rows.py`.


@triton.jit
def _lines(program, lines, inner, LINES: tl.constexpr, STRIDED: tl.constexpr):
    """A program's lines: by the index of their [size, inner] and the place in it, and which are
    there. The first is 64-bit, since offsets are."""
    index = tl.arange(0, LINES)
    if STRIDED:
        # Nothing here is larger than `inner`, which may be nearly 2**31.
        blocks = inner // LINES + (inner % LINES != 0).to(tl.int32)
        outer = (program // blocks).to(tl.int64)
        first = (program % blocks) * LINES
        return outer, first + index, index < inner - first
    else:
        row = program.to(tl.int64) * LINES + index
        return row, 0, row < lines


@triton.jit
def _columns(first, inner, BLOCK: tl.constexpr, STRIDED: tl.constexpr):
    """The next BLOCK elements of a line, and how far they are from its first one."""
    col = first + tl.arange(0, BLOCK)
    if STRIDED:
        return col, col.to(tl.int64) * inner
    else:
        return col, col


@triton.jit
def _normalized(shifted, total, LOG: tl.constexpr, EXACT: tl.constexpr):
    """What a forward writes; `shifted` is x minus the line's maximum."""
    if LOG:
        return shifted - column(tl.log(total))
    else:
        return exp(shifted, EXACT) * column(1.0 / total)


@triton.jit
def _units(size, inner, UNIT: tl.constexpr, STRIDED: tl.constexpr):
    """`size` and `inner`, of which Triton knows now that what is contiguous has whole units."""
    if STRIDED:
        return size, multiple_of(inner, UNIT)
    else:
        return multiple_of(size, UNIT), inner


@triton.jit(do_not_specialize=["lines", "size", "inner", "x_stride", "ahead"])
def _forward_kernel(
    x_ptr,
    y_ptr,
    lines,
    size,
    inner,
    x_stride,
    ahead,
    LOG: tl.constexpr,
    STRIDED: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    MASK_LINES: tl.constexpr,
    MASK_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    ENDS: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_program(EARLY)
    MASKED: tl.constexpr = MASK_LINES or MASK_COLS
    APART: tl.constexpr = 1 if ENDS else UNIT
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    # A thread has whole units of a line, which have a maximum together; of strided ones it has not.
    TOGETHER: tl.constexpr = 1 if STRIDED else UNIT
    size, inner = _units(size, inner, APART, STRIDED)
    outer, place, there = _lines(tl.program_id(0), lines, inner, LINES, STRIDED)
    x_stride = multiple_of(x_stride, APART)
    y_stride = size.to(tl.int64) * inner
    x_start = outer * x_stride + place
    x_line = x_ptr + tile_start(x_start, UNIT, ENDS)[:, None]
    y_start = outer * y_stride + place
    y_line = y_ptr + tile_start(y_start, UNIT, ENDS)[:, None]
    length, x_ends = size, None
    if ENDS:
        _, length, end, is_end = ends_of(y_start, size, UNIT, ENDS)
        x_ends = load_logits(x_ptr + x_start[:, None] + end, is_end, there, True, MASK_LINES)
    if WHOLE:
        col, offset = _columns(0, inner, BLOCK, STRIDED)
        mask = mask_of(there, col, length, MASK_COLS)
        x = load_logits(x_line + offset[None, :], mask, there, MASKED, MASK_LINES)
        if PREFETCH:
            first = (tl.program_id(0).to(tl.int64) + ahead) * LINES
            prefetch(x_ptr + first * x_stride, tl.minimum(lines - first, LINES) * size)
        line_best = max_of(x, x_ends)
        shifted = x - line_best[:, None]
        line_total = sum_of_exponentials(exp(shifted, EXACT), x_ends, line_best, EXACT)
        y = _normalized(shifted, line_total, LOG, EXACT)
        store_if(y_line + offset[None, :], y.to(y_ptr.dtype.element_ty), mask, MASKED)
    else:
        # What is read again is to stay in the L2 cache, of which nothing is to be taken by what is
        # done with; and what was read last is the likeliest to be there still, so it is read first.
        FIRST: tl.constexpr = "" if STRIDED else "evict_last"
        LAST: tl.constexpr = "" if STRIDED else "evict_first"
        best = tl.full([LINES, BLOCK // TOGETHER], LOWEST, tl.float32)
        total = tl.zeros([LINES, BLOCK // TOGETHER], tl.float32)
        if PREFETCH:
            prefetch(x_ptr + scalar(x_start) + BLOCK, tl.minimum(size - BLOCK, BLOCK))
        for first in range(0, length, BLOCK):
            if PREFETCH:
                later = first + 2 * BLOCK
                prefetch(x_ptr + scalar(x_start) + later, tl.minimum(size - later, BLOCK))
            col, offset = _columns(first, inner, BLOCK, STRIDED)
            mask = mask_of(there, col, length, MASK_COLS)
            x = load_logits(x_line + offset[None, :], mask, there, MASKED, MASK_LINES, FIRST)
            best, total = grow_exponentials(best, total, x, EXACT)
        line_best, line_total = sum_exponentials(best, total, x_ends, EXACT)
        blocks = tl.cdiv(length, BLOCK)
        for index in range(0, blocks):
            if STRIDED:
                first = index * BLOCK
            else:
                first = (blocks - 1 - index) * BLOCK
            col, offset = _columns(first, inner, BLOCK, STRIDED)
            mask = mask_of(there, col, length, MASK_COLS)
            x = load_logits(x_line + offset[None, :], mask, there, MASKED, MASK_LINES, LAST)
            y = _normalized(x - line_best[:, None], line_total, LOG, EXACT)
            store_if(y_line + offset[None, :], y.to(y_ptr.dtype.element_ty), mask, MASKED, LAST)
    if ENDS:
        y = _normalized(x_ends - scalar(line_best), scalar(line_total), LOG, EXACT)
        tl.store(y_ptr + y_start[:, None] + end, y.to(y_ptr.dtype.element_ty), mask=is_end)


@triton.jit
def _summand(g, y, LOG: tl.constexpr):
    """What a backward sums over a line."""
    if LOG:
        return g
    else:
        return g * y


@triton.jit
def _gradient(g, y, total, LOG: tl.constexpr, EXACT: tl.constexpr):
    if LOG:
        return g - exp(y, EXACT) * column(total)
    else:
        return (g - column(total)) * y


@triton.jit(do_not_specialize=["lines", "size", "inner", "g_stride", "y_stride"])
def _backward_kernel(
    g_ptr,
    y_ptr,
    dx_ptr,
    lines,
    size,
    inner,
    g_stride,
    y_stride,
    LOG: tl.constexpr,
    STRIDED: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    MASK_LINES: tl.constexpr,
    MASK_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    ENDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_program(EARLY)
    MASKED: tl.constexpr = MASK_LINES or MASK_COLS
    APART: tl.constexpr = 1 if ENDS else UNIT
    EXACT: tl.constexpr = dx_ptr.dtype.element_ty == tl.float32
    size, inner = _units(size, inner, APART, STRIDED)
    outer, place, there = _lines(tl.program_id(0), lines, inner, LINES, STRIDED)
    g_stride = multiple_of(g_stride, APART)
    y_stride = multiple_of(y_stride, APART)
    dx_stride = size.to(tl.int64) * inner
    g_start = outer * g_stride + place
    g_line = g_ptr + tile_start(g_start, UNIT, ENDS)[:, None]
    y_start = outer * y_stride + place
    y_line = y_ptr + tile_start(y_start, UNIT, ENDS)[:, None]
    dx_start = outer * dx_stride + place
    dx_line = dx_ptr + tile_start(dx_start, UNIT, ENDS)[:, None]
    length, ends = size, None
    if ENDS:
        _, length, end, is_end = ends_of(dx_start, size, UNIT, ENDS)
        g_ends = load_if(g_ptr + g_start[:, None] + end, is_end, True).to(tl.float32)
        y_ends = load_if(y_ptr + y_start[:, None] + end, is_end, True).to(tl.float32)
        ends = _summand(g_ends, y_ends, LOG)
    if WHOLE:
        col, offset = _columns(0, inner, BLOCK, STRIDED)
        mask = mask_of(there, col, length, MASK_COLS)
        g = load_if(g_line + offset[None, :], mask, MASKED).to(tl.float32)
        y = load_if(y_line + offset[None, :], mask, MASKED).to(tl.float32)
        line_total = sum_of(_summand(g, y, LOG), ends)
        dx = _gradient(g, y, line_total, LOG, EXACT)
        store_if(dx_line + offset[None, :], dx.to(dx_ptr.dtype.element_ty), mask, MASKED)
    else:
        total = tl.zeros([LINES, BLOCK], tl.float32)
        for first in range(0, size, BLOCK):
            col, offset = _columns(first, inner, BLOCK, STRIDED)
            mask = mask_of(there, col, length, MASK_COLS)
            g = load_if(g_line + offset[None, :], mask, MASKED).to(tl.float32)
            # Of log-softmax nothing uses y here, and the compiler drops the load.
            y = load_if(y_line + offset[None, :], mask, MASKED).to(tl.float32)
            total += _summand(g, y, LOG)
        line_total = sum_of(total, ends)
        for first in range(0, size, BLOCK):
            col, offset = _columns(first, inner, BLOCK, STRIDED)
            mask = mask_of(there, col, length, MASK_COLS)
            g = load_if(g_line + offset[None, :], mask, MASKED).to(tl.float32)
            y = load_if(y_line + offset[None, :], mask, MASKED).to(tl.float32)
            dx = _gradient(g, y, line_total, LOG, EXACT)
            store_if(dx_line + offset[None, :], dx.to(dx_ptr.dtype.element_ty), mask, MASKED)
    if ENDS:
        dx = _gradient(g_ends, y_ends, scalar(line_total), LOG, EXACT)
        tl.store(dx_ptr + dx_start[:, None] + end, dx.to(dx_ptr.dtype.element_ty), mask=is_end)


# --------------------------------------------------------------------------------------------------
# Rows that are split over programs
# --------------------------------------------------------------------------------------------------

# `rows.py` says how they exchange values. A program keeps its part of a row until the values of the
# others are there: of 16 bits in pairs, as *words*, since alone each would take a register of 32.
# PAIRED: there are such. Rows, and what is between two, are multiples of UNIT; but not of shifted
# rows, of which the first program of a group has the ends, too.
#
# Triton loads ahead only in loops where nothing is carried over more than one iteration. So ends,
# which it does not load ahead, are loaded for the next row here; and those of the row before are
# loaded again, which the cache still has.


@triton.jit
def _word_ptr(ptr, PAIRED: tl.constexpr):
    if PAIRED:
        return ptr.to(tl.pointer_type(tl.int32))
    else:
        return ptr


@triton.jit
def _words_of_minus_infinity(DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        return -0x7F0080  # 0xff80 twice
    elif tl.float16 == DTYPE:
        return -0x3FF0400  # 0xfc00 twice
    else:
        return float("-inf")


@triton.jit
def _firsts(words, DTYPE: tl.constexpr):
    """In float32, the first elements of words, or what is no pair."""
    if tl.bfloat16 == DTYPE:
        return (words << 16).to(tl.float32, bitcast=True)
    elif tl.float16 == DTYPE:
        return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return words.to(tl.float32)


@triton.jit
def _seconds(words, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        return (words & -0x10000).to(tl.float32, bitcast=True)
    else:
        return (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _units_of_row(row, stride, size, UNIT: tl.constexpr, ENDS: tl.constexpr):
    """Where a row's whole units begin, and how many elements they have."""
    start = row * stride
    if ENDS:
        _, inside, _, _ = ends_of(start, size, UNIT, ENDS)
        return tile_start(start, UNIT, ENDS), inside
    else:
        return start, size


@triton.jit
def _if_row(mask, row, rows):
    """`mask` where there is such a row."""
    return mask_if(mask_if(mask, row >= 0), row < rows)


@triton.jit
def _ends_of_row(row, rows, stride, size, split, UNIT: tl.constexpr, ENDS: tl.constexpr):
    """Where a row's ends are, and which there are, for this program."""
    start = row * stride
    _, _, end, is_end = ends_of(start, size, UNIT, ENDS)
    return start + end, mask_if(_if_row(is_end, row, rows), split == 0)


@triton.jit
def _load_ends(
    ptr, row, rows, stride, size, split,
    OTHER: tl.constexpr, UNIT: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    end, is_end = _ends_of_row(row, rows, stride, size, split, UNIT, ENDS)
    return tl.load(ptr + end, mask=is_end, other=OTHER).to(tl.float32)


@triton.jit
def _store_ends(ptr, values, row, rows, size, split, UNIT: tl.constexpr, ENDS: tl.constexpr):
    end, is_end = _ends_of_row(row, rows, size, size, split, UNIT, ENDS)
    tl.store(ptr + end, values.to(ptr.dtype.element_ty), mask=is_end)


@triton.jit(do_not_specialize=["rows", "size", "x_stride", "splits", "steps"])
def _forward_split_kernel(
    x_ptr,
    y_ptr,
    slots_ptr,
    rows,
    size,
    x_stride,
    splits,
    steps,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
    UNIT: tl.constexpr,
    ENDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A group of `splits` programs reduces a row a step, and writes the one before."""
    begin_program(EARLY)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PAIRED: tl.constexpr = tl.float32 != DTYPE
    EXACT: tl.constexpr = tl.float32 == DTYPE
    WORD: tl.constexpr = 2 if PAIRED else 1
    APART: tl.constexpr = 1 if ENDS else UNIT
    x_stride = multiple_of(x_stride, APART)
    size = multiple_of(size, APART)
    groups = tl.num_programs(0) // splits
    group = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    bests_ptr = slots_ptr + group * (2 * RING * SLOTS)
    totals_ptr = bests_ptr + RING * SLOTS
    word = split * (BLOCK // WORD) + tl.arange(0, BLOCK // WORD)
    col = split * BLOCK + tl.arange(0, BLOCK)
    previous = tl.zeros([BLOCK // WORD], tl.int32 if PAIRED else tl.float32)
    if ENDS:
        first_row = group.to(tl.int64)
        next_ends = _load_ends(
            x_ptr, first_row, rows, x_stride, size, split, float("-inf"), UNIT, ENDS
        )
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        row = (group + step * groups).to(tl.int64)
        start, length = _units_of_row(row, x_stride, size, UNIT, ENDS)
        x = tl.load(
            _word_ptr(x_ptr + start, PAIRED) + word,
            mask=_if_row(word < length // WORD, row, rows),
            other=_words_of_minus_infinity(DTYPE),
        )
        if ENDS:
            ends = next_ends
            previous_ends = _load_ends(
                x_ptr, row - groups, rows, x_stride, size, split, float("-inf"), UNIT, ENDS
            )
            next_ends = _load_ends(
                x_ptr, row + groups, rows, x_stride, size, split, float("-inf"), UNIT, ENDS
            )
        firsts = _firsts(x, DTYPE)
        if PAIRED:
            seconds = _seconds(x, DTYPE)
            best = tl.max(tl.maximum(firsts, seconds), axis=0)
        else:
            best = tl.max(firsts, axis=0)
        if ENDS:
            best = tl.maximum(best, scalar(tl.max(ends, axis=1)))
        best = tl.maximum(best, LOWEST)
        exponentials = exp(firsts - best, EXACT)
        if PAIRED:
            exponentials += exp(seconds - best, EXACT)
        total = tl.sum(exponentials, axis=0)
        if ENDS:
            total += scalar(tl.sum(exp(ends - best, EXACT), axis=1))
        publish(bests_ptr, step, split, best, SLOTS)
        publish(totals_ptr, step, split, total, SLOTS)

        bests, totals = collect_two(bests_ptr, totals_ptr, step - 1, splits, SLOTS, LOWEST)
        row_best = tl.max(bests, axis=0)
        row_total = tl.sum(totals * exp(bests - row_best, EXACT), axis=0)
        y = _normalized(_firsts(previous, DTYPE) - row_best, row_total, LOG, EXACT)
        if PAIRED:
            shifted = _seconds(previous, DTYPE) - row_best
            y = tl.interleave(y, _normalized(shifted, row_total, LOG, EXACT))
        row -= groups
        start, length = _units_of_row(row, size, size, UNIT, ENDS)
        tl.store(y_ptr + start + col, y.to(DTYPE), mask=_if_row(col < length, row, rows))
        if ENDS:
            y_ends = _normalized(previous_ends - row_best, row_total, LOG, EXACT)
            _store_ends(y_ptr, y_ends, row, rows, size, split, UNIT, ENDS)
        previous = x


@triton.jit(do_not_specialize=["rows", "size", "g_stride", "y_stride", "splits", "steps"])
def _backward_split_kernel(
    g_ptr,
    y_ptr,
    dx_ptr,
    slots_ptr,
    rows,
    size,
    g_stride,
    y_stride,
    splits,
    steps,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
    UNIT: tl.constexpr,
    ENDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Likewise."""
    begin_program(EARLY)
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    PAIRED: tl.constexpr = tl.float32 != DTYPE
    EXACT: tl.constexpr = tl.float32 == DTYPE
    WORD: tl.constexpr = 2 if PAIRED else 1
    APART: tl.constexpr = 1 if ENDS else UNIT
    g_stride = multiple_of(g_stride, APART)
    y_stride = multiple_of(y_stride, APART)
    size = multiple_of(size, APART)
    groups = tl.num_programs(0) // splits
    group = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    slots_ptr += group * (RING * SLOTS)
    word = split * (BLOCK // WORD) + tl.arange(0, BLOCK // WORD)
    col = split * BLOCK + tl.arange(0, BLOCK)
    previous_g = tl.zeros([BLOCK // WORD], tl.int32 if PAIRED else tl.float32)
    previous_y = previous_g
    if ENDS:
        first_row = group.to(tl.int64)
        next_g = _load_ends(g_ptr, first_row, rows, g_stride, size, split, 0.0, UNIT, ENDS)
        next_y = _load_ends(y_ptr, first_row, rows, y_stride, size, split, 0.0, UNIT, ENDS)
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        row = (group + step * groups).to(tl.int64)
        g_start, length = _units_of_row(row, g_stride, size, UNIT, ENDS)
        y_start, length = _units_of_row(row, y_stride, size, UNIT, ENDS)
        mask = _if_row(word < length // WORD, row, rows)
        g = tl.load(_word_ptr(g_ptr + g_start, PAIRED) + word, mask=mask, other=0)
        y = tl.load(_word_ptr(y_ptr + y_start, PAIRED) + word, mask=mask, other=0)
        if ENDS:
            ends = _summand(next_g, next_y, LOG)
            before, after = row - groups, row + groups
            g_ends = _load_ends(g_ptr, before, rows, g_stride, size, split, 0.0, UNIT, ENDS)
            y_ends = _load_ends(y_ptr, before, rows, y_stride, size, split, 0.0, UNIT, ENDS)
            next_g = _load_ends(g_ptr, after, rows, g_stride, size, split, 0.0, UNIT, ENDS)
            next_y = _load_ends(y_ptr, after, rows, y_stride, size, split, 0.0, UNIT, ENDS)
        summands = _summand(_firsts(g, DTYPE), _firsts(y, DTYPE), LOG)
        if PAIRED:
            summands += _summand(_seconds(g, DTYPE), _seconds(y, DTYPE), LOG)
        part = tl.sum(summands, axis=0)
        if ENDS:
            part += scalar(tl.sum(ends, axis=1))
        publish(slots_ptr, step, split, part, SLOTS)

        total = collect_sum(slots_ptr, step - 1, splits, SLOTS)
        dx = _gradient(_firsts(previous_g, DTYPE), _firsts(previous_y, DTYPE), total, LOG, EXACT)
        if PAIRED:
            second_g, second_y = _seconds(previous_g, DTYPE), _seconds(previous_y, DTYPE)
            dx = tl.interleave(dx, _gradient(second_g, second_y, total, LOG, EXACT))
        row -= groups
        start, length = _units_of_row(row, size, size, UNIT, ENDS)
        tl.store(dx_ptr + start + col, dx.to(DTYPE), mask=_if_row(col < length, row, rows))
        if ENDS:
            dx_ends = _gradient(g_ends, y_ends, total, LOG, EXACT)
            _store_ends(dx_ptr, dx_ends, row, rows, size, split, UNIT, ENDS)
        previous_g = g
        previous_y = y


# --------------------------------------------------------------------------------------------------
# Launches
# --------------------------------------------------------------------------------------------------

# Bytes of one tensor. Short lines share a program, up to so many; a thread has 32 of them, and 64
# of longer tiles.
_SHORT_TILE = 8 * 1024
# The largest tile that stays in registers: of one tensor, and where a backward holds two.
FORWARD_TILE, BACKWARD_TILE = 64 * 1024, 32 * 1024
# The same where a warp alone has the lines, which it cannot read 32 units at once of. Loads of
# as many bytes as there can be are another matter: of those a line is spread over fewer warps.
_NARROW_TILE, _WIDEST_LOAD = 2 * 1024, 16
# And of log-softmax: a line is loaded when the one before it is done, so other warps have to wait
# meanwhile, of which there are more if each has fewer lines. But with a single one of 16 bits that
# is shorter than the tile a warp has too little to do for what it takes to begin.
_NARROW_LOG_TILE, _FEWEST_NARROW_LOG_LINES = 1024, 2
# A block of a line that is longer: 16 warps at 32 bytes a thread. Forwards read rows of 16 bits
# again from the L2 cache. Of rows of more than so many bytes it has too little for all that are
# read at once: there a program has 32 warps, so that a multiprocessor runs half as many.
_BLOCK, _WIDE_BLOCK, _WIDE_ROW = 16 * 1024, 32 * 1024, 48 * 1024
# Strided lines that are no longer than this each have a thread, which has nothing to exchange with
# others, if there are enough of them for so many warps.
_LONGEST_OF_A_THREAD, _WARPS_OF_SHORT = 32, 4
_MOST_STRIDED_WARPS = 16
_MIN_BLOCK = 16
# Of fewer rows a multiprocessor than this, what counts is how soon one is done; of more, that some
# are loaded while others are computed with.
_MANY_ROWS = 2
# Then forwards hold no more than this of a row, either.
_TILE_OF_MANY = 32 * 1024
# Rows of more bytes than this are split, whatever they are; of many, all that are not held whole,
# but for forwards of 16 bits: a program that waits does not compute, of which there is more there.
_SPLIT_ROW = 128 * 1024
# A program's part of a row that is split.
_FORWARD_PART = RowTile(1, 8 * 1024, 2, per_sm=6, stages=3)
_BACKWARD_PART = RowTile(1, 4 * 1024, 2, per_sm=6, stages=3)


class Tile(NamedTuple):
    """What a program holds: `lines` x `block` elements, all of these lines if `whole`."""

    lines: int
    block: int
    whole: bool
    num_warps: int

    def constexprs(self, size: int, unit: int, ends: int) -> dict[str, Any]:
        """What kernels are told of it, for lines of `size` that are read in units and have such
        ends."""
        return {
            "LINES": self.lines,
            "BLOCK": self.block,
            "MASK_LINES": self.lines > 1,
            "MASK_COLS": ends > 0 or size % self.block != 0,
            "UNIT": unit,
            "ENDS": ends,
        }


class Strided(NamedTuple):
    """How strided lines are read, in bytes of one tensor.

    A warp computes what it can by itself: several that share lines exchange maxima and sums through
    shared memory, which takes longer than to read them. So a tile is as narrow as memory can read
    well, `segment` of one element of each line, if there are as many; as long as the lines; and it
    has few warps, of `a_warp` each. Of shorter lines it has more, for `short`. Up to `largest` it
    stays in registers; of longer lines it is a block, of `longer`.
    """

    segment: int
    short: int
    a_warp: int
    largest: int
    longer: int


def strided_forward(itemsize: int, unit: int) -> Strided:
    if unit * itemsize < 8:  # an address for nearly each element: more would be spilled
        return Strided(16 * itemsize, 8192, 2048, 16384 * itemsize, 32 * 1024)
    return Strided(32 * itemsize, 2048 * itemsize, 4096, FORWARD_TILE, 32 * 1024)


def strided_backward(itemsize: int, unit: int) -> Strided:
    if unit * itemsize < 8:
        short = 2048 if itemsize == 2 else 8192
        return Strided(16 * itemsize, short, 1024, 8192 * itemsize, 4096 * itemsize)
    return Strided(64, 4096, 4096 // itemsize, BACKWARD_TILE, 32 * 1024)


def strided_tile_of(size: int, inner: int, itemsize: int, unit: int, reading: Strided) -> Tile:
    """The tile for lines of `size` that are `inner` apart and read in units."""
    block = max(power_of_2(size), _MIN_BLOCK)
    if _has_threads_of_lines(size, inner, itemsize, unit):
        return Tile(32 * _WARPS_OF_SHORT * unit, block, True, _WARPS_OF_SHORT)
    line = block * itemsize
    lines = min(power_of_2(inner), max(reading.segment // itemsize, reading.short // line))
    whole = lines * line <= reading.largest
    if not whole:
        block = reading.longer // itemsize // lines
    warps = lines * block * itemsize // reading.a_warp
    return Tile(lines, block, whole, min(max(warps, 1), _MOST_STRIDED_WARPS))


class Lines(NamedTuple):
    """A tensor as ``[outer, size, inner]``, with the softmax over `size`."""

    outer: int
    size: int
    inner: int

    @classmethod
    def of(cls, t: Tensor, dim: int) -> Lines:
        dim %= t.dim()
        return cls(math.prod(t.shape[:dim]), t.shape[dim], math.prod(t.shape[dim + 1 :]))

    def matrix(self, t: Tensor) -> tuple[Tensor, int]:
        """`t` with each ``[size, inner]`` contiguous, a copy if need be, and how far they are
        apart."""
        return as_rows(t, self.outer, self.size * self.inner)


@functools.lru_cache(maxsize=1024)
def tile_of(
    size: int, itemsize: int, largest: int, unit: int, log: bool = False, longer: int = _BLOCK
) -> Tile:
    """The tile for rows of `size`, of `largest` bytes at most, that are read in units; and of
    `longer` bytes where a row is no tile. log: of log-softmax."""
    block = max(power_of_2(size), _MIN_BLOCK)
    line = block * itemsize
    is_narrow = unit * itemsize < _WIDEST_LOAD
    if is_narrow and 32 * unit < block and line <= _NARROW_TILE:
        # Triton would spread each line over many warps, and add up each one in shared memory.
        return Tile(_narrow_lines(line, itemsize, log), block, True, 1)
    lines = _SHORT_TILE // line if line <= _SHORT_TILE // 4 else 1
    whole = lines * line <= largest
    if not whole:
        block = longer // itemsize // lines
    bytes_of_tile = lines * block * itemsize
    a_warp = 1024 if bytes_of_tile <= _SHORT_TILE or not whole else 2048
    return Tile(lines, block, whole, min(max(bytes_of_tile // a_warp, 1), 32))


def _narrow_lines(line: int, itemsize: int, log: bool) -> int:
    """How many lines of so many bytes a warp has that alone has them."""
    most = _NARROW_TILE // line
    if not log:
        return most
    fewest = min(_FEWEST_NARROW_LOG_LINES, most) if itemsize == 2 else 1
    return max(fewest, _NARROW_LOG_TILE // line)


def _has_threads_of_lines(size: int, inner: int, itemsize: int, unit: int) -> bool:
    """Whether threads have lines for themselves, as many as a unit, of 4 bytes, has elements."""
    threads = 32 * _WARPS_OF_SHORT
    return size <= _LONGEST_OF_A_THREAD and unit * itemsize == 4 and inner >= threads * unit


class _Call(NamedTuple):
    """What a kernel reads and writes: tensors, and how far lines of those that it reads are
    apart."""

    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]
    lines: Lines
    log: bool

    @property
    def itemsizes(self) -> tuple[int, int]:
        """The narrowest and the widest."""
        sizes = [t.element_size() for t in self.tensors]
        return min(sizes), max(sizes)

    def launch(self, kernel: Any, programs: int, tile: Tile, unit: int, ends: int = 0) -> Launch:
        lines = self.lines
        constexprs = {
            "LOG": self.log,
            "STRIDED": lines.inner != 1,
            "WHOLE": tile.whole,
            **tile.constexprs(lines.size, unit, ends),
        }
        arguments = (*self.tensors, *lines, *self.strides)
        return Launch(kernel, programs, arguments, constexprs, tile.num_warps)


def _launch_strided(kernel: Any, call: _Call, reading: Callable[[int, int], Strided]) -> Launch:
    (narrowest, widest), (outer, size, inner) = call.itemsizes, call.lines
    unit, word = unit_of(narrowest, inner, *call.strides), 4 // widest
    if unit >= word and _has_threads_of_lines(size, inner, widest, word):
        unit = word
    tile = strided_tile_of(size, inner, widest, unit, reading(widest, unit))
    return call.launch(kernel, outer * ceil_div(inner, tile.lines), tile, unit)


def _launch_rows(kernel: Any, call: _Call, largest: int, longer: int = _BLOCK) -> Launch:
    (narrowest, widest), size = call.itemsizes, call.lines.size
    unit = unit_of(narrowest)
    tile = tile_of(size, widest, largest, unit, call.log, longer)
    ends = ends_columns(tile.lines, size, call.strides, call.tensors)
    if not ends:
        unit = unit_of(narrowest, size, *call.strides)
        tile = tile_of(size, widest, largest, unit, call.log, longer)
    return call.launch(kernel, ceil_div(call.lines.outer, tile.lines), tile, unit, ends)


def _are_many(lines: Lines, device: Device) -> bool:
    return lines.outer >= _MANY_ROWS * device.multiprocessors


def _launch_split(
    kernel: Any, call: _Call, part: RowTile, values: int, longest: int, device: Device
) -> Launch | None:
    """The launch of programs that have a part of a row each and exchange so many values; None of
    rows that are not split, as they have no more than `longest` bytes, or for another reason."""
    tensors, strides, (outer, size, inner), log = call
    itemsize = tensors[0].element_size()
    if not device.can_wait or inner != 1 or size * itemsize <= longest:
        return None
    unit = unit_of(itemsize)
    ends = ends_columns(1, size, strides, tensors)
    is_aligned = ends > 0 or unit_of(itemsize, size, *strides) == unit
    # Pairs are read as one, and of a plan addresses are the same modulo 16.
    is_alike = all(t.data_ptr() % 16 == 0 and t.element_size() == itemsize for t in tensors)
    ahead = len(strides) * part.block * part.stages
    fits = part.per_sm * (ahead + OTHER_BYTES) <= device.shared_memory
    if not (is_aligned and is_alike and fits):
        return None
    tile = part._replace(block=part.block // itemsize)
    split = split_rows(tile, outer, size, device.multiprocessors)
    if split is None:
        return None
    slots = split.zeroed_slots(tensors[0].device, values)
    steps = ceil_div(outer, split.groups)
    return Launch(
        kernel,
        split.programs,
        (*tensors, slots, outer, size, *strides, split.splits, steps),
        {"LOG": log, **split.constexprs, "UNIT": unit, "ENDS": ends},
        split.tile.num_warps,
        split.options,
    )


def plan_forward(x: Tensor, y: Tensor, dim: int, log: bool, device: Device | None = None) -> Launch:
    """The launch that fills `y`, contiguous, of which the dtype may be wider than that of `x`."""
    device = device or device_of(x.device)
    lines = Lines.of(x, dim)
    x, x_stride = lines.matrix(x)
    call, are_many = _Call((x, y), (x_stride,), lines, log), _are_many(lines, device)
    longest = _TILE_OF_MANY if are_many and x.element_size() == 4 else _SPLIT_ROW
    split = _launch_split(_forward_split_kernel, call, _FORWARD_PART, 2, longest, device)
    if split is not None:
        return split
    if lines.inner != 1:
        return _with_prefetch(_launch_strided(_forward_kernel, call, strided_forward), 0)
    largest = _TILE_OF_MANY if are_many else FORWARD_TILE
    is_wide = are_many and x.element_size() == 2 and 2 * lines.size > _WIDE_ROW
    longer = _WIDE_BLOCK if is_wide else _BLOCK
    launch = _launch_rows(_forward_kernel, call, largest, longer)
    # Of a row that is read in blocks that is the row itself, however large the tensor.
    together = launch.constexprs["LINES"]
    are_next = together == 1 or x.is_contiguous()
    tile_bytes = together * lines.size * x.element_size()
    return _with_prefetch(launch, tiles_ahead(tile_bytes, launch.grid, device) if are_next else 0)


def _with_prefetch(launch: Launch, ahead: int) -> Launch:
    """A forward's launch, with how far ahead its programs ask for rows; 0: they do not."""
    constexprs = {**launch.constexprs, "PREFETCH": ahead > 0}
    return launch._replace(arguments=(*launch.arguments, ahead), constexprs=constexprs)


def plan_backward(
    g: Tensor, y: Tensor, dx: Tensor, dim: int, log: bool, device: Device | None = None
) -> Launch:
    """The launch that fills `dx`, contiguous, of which the dtype may be narrower than the rest."""
    device = device or device_of(y.device)
    lines = Lines.of(y, dim)
    (g, g_stride), (y, y_stride) = lines.matrix(g), lines.matrix(y)
    call = _Call((g, y, dx), (g_stride, y_stride), lines, log)
    longest = BACKWARD_TILE if _are_many(lines, device) else _SPLIT_ROW
    split = _launch_split(_backward_split_kernel, call, _BACKWARD_PART, 1, longest, device)
    if split is not None:
        return split
    if lines.inner != 1:
        return _launch_strided(_backward_kernel, call, strided_backward)
    return _launch_rows(_backward_kernel, call, BACKWARD_TILE)


# --------------------------------------------------------------------------------------------------
# Ops
# --------------------------------------------------------------------------------------------------


def _forward(log: bool, self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """``aten::_softmax`` and ``aten::_log_softmax``, of a tensor that is not empty."""
    dtype = torch.float32 if half_to_float else self.dtype
    output = torch.empty(self.shape, dtype=dtype, device=self.device)
    plan_forward(self, output, dim, log)()
    return output


def _backward(
    log: bool, grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """``aten::_softmax_backward_data`` and ``aten::_log_softmax_backward_data``, likewise."""
    if grad_output.shape != output.shape:
        # Of as many elements: native raises its error, or has its own answer.
        return _native_backward(log)(grad_output, output, dim, input_dtype)
    grad_input = torch.empty(output.shape, dtype=input_dtype, device=output.device)
    plan_backward(grad_output, output, grad_input, dim, log)()
    return grad_input


def _native_backward(log: bool) -> Callable[..., Tensor]:
    """The op itself, which is native's while an override of it runs."""
    aten = torch.ops.aten
    return aten._log_softmax_backward_data if log else aten._softmax_backward_data


softmax_forward, log_softmax_forward = (functools.partial(_forward, log) for log in (False, True))
softmax_backward, log_softmax_backward = (
    functools.partial(_backward, log) for log in (False, True)
)
