"""Softmax and log-softmax in Triton, each forward and backward: one kernel a direction.

A tensor is seen as ``[outer, size, inner]``, with the softmax over `size`. A *line* is what is
normalised together: `size` elements that are `inner` apart. All arithmetic is in float32::

    softmax        y = exp(x - max(x)) / sum(exp(x - max(x)))      dx = (g - sum(g * y)) * y
    log_softmax    y = x - max(x) - log(sum(exp(x - max(x))))      dx = g - exp(y) * sum(g)

Both directions are bound by memory. A program holds a tile of lines, which stays in registers
between the reduction and its use. A longer line is read in blocks, twice: the maximum and the sum
are found in one pass, the second reads what may still be in the L2 cache. Where inner is 1 threads
read along a line, otherwise across lines, so that neighbours in memory are read together.

`size` is a run-time integer under a power-of-two block, as in the norms: another size compiles
another kernel only if it needs another block, mask, or unit (how wide loads may be).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from opgraft_kernels.rows import (
    LOWEST,
    Launch,
    as_rows,
    ceil_div,
    column,
    ends_columns,
    ends_of,
    exp,
    grow_exponentials,
    load_if,
    load_logits,
    mask_of,
    max_of,
    multiple_of,
    power_of_2,
    scalar,
    store_if,
    sum_exponentials,
    sum_of,
    sum_of_exponentials,
    tile_start,
    unit_of,
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
    "tile_of",
]

# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------

# LOG: log-softmax. STRIDED: inner is not 1. A program has LINES lines, in blocks of BLOCK elements:
# one of them if WHOLE. MASK_LINES, MASK_COLS: there may be fewer than that; where there may not,
# masks would cost bandwidth. Strides are multiples of UNIT; so is what is contiguous, a row's size
# or inner; but not of shifted lines, which have ENDS: see `rows.py`.


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


@triton.jit(do_not_specialize=["lines", "size", "inner", "x_stride"])
def _forward_kernel(
    x_ptr,
    y_ptr,
    lines,
    size,
    inner,
    x_stride,
    LOG: tl.constexpr,
    STRIDED: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    MASK_LINES: tl.constexpr,
    MASK_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    ENDS: tl.constexpr,
):
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
        for first in range(0, length, BLOCK):
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
):
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
# And of log-softmax, forward and backward: a line is loaded when the one before it is done, so
# other warps have to wait meanwhile, of which there are more if each has fewer lines.
_NARROW_LOG_TILE, _NARROW_LOG_BACKWARD_TILE = 512, 1024
# A block of a line that is longer: 16 warps at 32 bytes a thread.
_BLOCK = 16 * 1024
# Elements of a thread, where lines are strided and a load has less than 8 bytes.
_MOST_NARROW = 16
# What is read together across lines, at least, if there are as many.
_SEGMENT = 128
# Strided lines that are no longer than this each have a thread, which has nothing to exchange with
# others, if there are enough of them for so many warps.
_LONGEST_OF_A_THREAD, _WARPS_OF_SHORT = 32, 4
_MIN_BLOCK = 16


class Tile(NamedTuple):
    """What a program holds: `lines` x `block` elements, all of these lines if `whole`."""

    lines: int
    block: int
    whole: bool
    num_warps: int


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
    size: int, inner: int, itemsize: int, largest: int, unit: int, narrow: int = _NARROW_TILE
) -> Tile:
    """The tile for lines of `size`, of `largest` bytes at most, that are read in units; and of
    `narrow` bytes where a warp alone has lines."""
    block = max(power_of_2(size), _MIN_BLOCK)
    line = block * itemsize
    is_narrow = unit * itemsize < _WIDEST_LOAD
    if inner == 1 and is_narrow and 32 * unit < block and line <= _NARROW_TILE:
        # Triton would spread each line over many warps, and add up each one in shared memory.
        return Tile(max(1, narrow // line), block, True, 1)
    if _has_threads_of_lines(size, inner, itemsize, unit):
        return Tile(32 * _WARPS_OF_SHORT * unit, block, True, _WARPS_OF_SHORT)
    a_warp = 2048
    if inner == 1:
        lines = _SHORT_TILE // line if line <= _SHORT_TILE // 4 else 1
    else:
        lines = min(power_of_2(inner), max(_SEGMENT // itemsize, _SHORT_TILE // line))
        if unit * itemsize < 8:  # an address for nearly each element: more would be spilled
            a_warp = 32 * _MOST_NARROW * itemsize
            largest = min(largest, 16 * a_warp)
            if 16 * line <= largest:
                lines = min(lines, largest // line)
    whole = lines * line <= largest
    if not whole:
        block = _BLOCK // itemsize // lines
    bytes_of_tile = lines * block * itemsize
    if bytes_of_tile <= _SHORT_TILE or not whole:
        a_warp = min(a_warp, 1024)
    return Tile(lines, block, whole, min(max(bytes_of_tile // a_warp, 1), 32))


def _has_threads_of_lines(size: int, inner: int, itemsize: int, unit: int) -> bool:
    """Whether threads have lines for themselves, as many as a unit, of 4 bytes, has elements."""
    threads = 32 * _WARPS_OF_SHORT
    return size <= _LONGEST_OF_A_THREAD and unit * itemsize == 4 and inner >= threads * unit


def _launch(
    kernel: Any, tensors: tuple[Tensor, ...], strides: tuple[int, ...], lines: Lines, log: bool,
    largest: int, narrow: int,
) -> Launch:  # fmt: skip
    is_strided = lines.inner != 1
    contiguous = lines.inner if is_strided else lines.size
    narrowest, widest = (pick(t.element_size() for t in tensors) for pick in (min, max))
    unit = unit_of(narrowest)
    tile = tile_of(lines.size, lines.inner, widest, largest, unit)
    ends = 0 if is_strided else ends_columns(tile.lines, lines.size, strides, tensors)
    if not ends:
        unit = unit_of(narrowest, contiguous, *strides)
        word = 4 // widest
        if is_strided and unit >= word and _has_threads_of_lines(*lines[1:], widest, word):
            unit = word
        tile = tile_of(lines.size, lines.inner, widest, largest, unit, narrow)
    if is_strided:
        programs = lines.outer * ceil_div(lines.inner, tile.lines)
    else:
        programs = ceil_div(lines.outer, tile.lines)
    return Launch(
        kernel,
        programs,
        (*tensors, lines.outer, lines.size, lines.inner, *strides),
        {
            "LOG": log,
            "STRIDED": is_strided,
            "LINES": tile.lines,
            "BLOCK": tile.block,
            "WHOLE": tile.whole,
            "MASK_LINES": tile.lines > 1,
            "MASK_COLS": ends > 0 or lines.size % tile.block != 0,
            "UNIT": unit,
            "ENDS": ends,
        },
        tile.num_warps,
    )


def plan_forward(x: Tensor, y: Tensor, dim: int, log: bool) -> Launch:
    """The launch that fills `y`, contiguous, of which the dtype may be wider than that of `x`."""
    lines = Lines.of(x, dim)
    x, x_stride = lines.matrix(x)
    narrow = _NARROW_LOG_TILE if log else _NARROW_TILE
    return _launch(_forward_kernel, (x, y), (x_stride,), lines, log, FORWARD_TILE, narrow)


def plan_backward(g: Tensor, y: Tensor, dx: Tensor, dim: int, log: bool) -> Launch:
    """The launch that fills `dx`, contiguous, of which the dtype may be narrower than the rest."""
    lines = Lines.of(y, dim)
    (g, g_stride), (y, y_stride) = lines.matrix(g), lines.matrix(y)
    tensors, strides = (g, y, dx), (g_stride, y_stride)
    narrow = _NARROW_LOG_BACKWARD_TILE if log else _NARROW_TILE
    return _launch(_backward_kernel, tensors, strides, lines, log, BACKWARD_TILE, narrow)


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
    grad_input = torch.empty(output.shape, dtype=input_dtype, device=output.device)
    plan_backward(grad_output, output, grad_input, dim, log)()
    return grad_input


def softmax_forward(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _forward(False, self, dim, half_to_float)


def log_softmax_forward(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _forward(True, self, dim, half_to_float)


def softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    return _backward(False, grad_output, output, dim, input_dtype)


def log_softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    return _backward(True, grad_output, output, dim, input_dtype)
