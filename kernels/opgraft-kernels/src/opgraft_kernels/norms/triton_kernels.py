"""RMSNorm and LayerNorm in Triton.

With ``rows x hidden`` the input seen as a matrix, and all arithmetic in float32::

    rstd = rsqrt(mean((x - m) ** 2) + eps)                    one value a row, like m
    y    = (x - m) * rstd * w + b                             LayerNorm: m = mean(x)
    dx   = rstd * (w * g - mean(w * g) - xhat * mean(w * g * xhat))    xhat = (x - m) * rstd
    dw   = sum over rows of g * xhat                          db = sum over rows of g

RMSNorm is the same without m, b, db and ``mean(w * g)``. (Ba, Kiros and Hinton, "Layer
Normalization", 2016; Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; the backward
is the derivative.) The variance is the mean of squared differences from the mean, not the
difference of means: that would lose all digits where the mean is large.

Both directions are bound by memory: the forward has to read x and write y, the backward to read x
and g and to write dx, once each. Everything here serves that:

* a row is read from device memory once. It stays in registers between its reduction and its use;
  one that is too long for them is read again out of L1, or split over programs that exchange their
  sums;
* dw and db are summed in float32, in registers, by as many programs as the device runs at once,
  which walk over the rows. Each writes one row of partial sums, and the same programs or those of a
  second kernel add those up, in a fixed order: no atomics on floats, the same bits on every run;
* ``hidden`` is a run-time integer under a power-of-two block, so a new hidden size compiles a
  kernel only when it needs another block or loses its divisibility by 16 (which decides whether
  loads are 16 bytes wide). A new number of rows compiles no forward, and a backward only where it
  changes by whom, and in which of three ways, the partial sums are added up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from opgraft_kernels.norms import ops
from opgraft_kernels.rows import (
    L1_ROW_BYTES,
    MIN_BLOCK,
    ONE_PROGRAM_ELEMENTS,
    RING,
    WHOLE_ROW_BYTES,
    Launch,
    Split,
    Tile,
    as_rows,
    ceil_div,
    collect,
    collect_sum,
    contiguous,
    load_if,
    mask_if,
    multiprocessors,
    plan_sum,
    power_of_2,
    publish,
    split_constexprs,
    split_options,
    split_rows,
    store_if,
    sum_after_barrier,
    sum_constexprs,
    sums_in_one_launch,
)

__all__ = [
    "backward",
    "configurations",
    "forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "rms_norm_backward",
    "rms_norm_forward",
]

# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------

# What a call does not have is None, and compiles to nothing: the mean of RMSNorm, a weight or bias,
# the gradient of the input where that is not wanted.


@triton.jit
def _load_parameters(w_ptr, b_ptr, col, in_row, MASKED: tl.constexpr):
    """Columns of weight and bias."""
    w, b = 0.0, 0.0
    if w_ptr is not None:
        w = load_if(w_ptr + col, in_row, MASKED)
    if b_ptr is not None:
        b = load_if(b_ptr + col, in_row, MASKED)
    return w, b


@triton.jit(do_not_specialize=["rows"])
def _forward_rows_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    hidden,
    x_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLS: tl.constexpr,
    PARAMETERS_FIRST: tl.constexpr,
):
    """A program normalises a tile of ROWS whole rows, which stays in registers.

    MASK_ROWS, MASK_COLS: the tile may hold more rows, or columns, than there are. Where it does
    not, masks would cost some percent of the bandwidth. PARAMETERS_FIRST: weight and bias are
    loaded while x is on its way, and take registers from there on; after the reduction they would
    be waited for once more.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    in_row = col < hidden
    mask = (row < rows)[:, None]
    if MASK_COLS:
        mask = mask & in_row[None, :]
    x_ptrs = x_ptr + (row * x_stride)[:, None] + col[None, :]
    y_ptrs = y_ptr + (row * hidden)[:, None] + col[None, :]
    x = load_if(x_ptrs, mask, MASK_ROWS or MASK_COLS).to(tl.float32)
    if PARAMETERS_FIRST:
        w, b = _load_parameters(w_ptr, b_ptr, col, in_row, MASK_COLS)
    if mean_ptr is not None:
        mean = tl.sum(x, axis=1) / hidden
        x = x - mean[:, None]
        if MASK_COLS:
            x = tl.where(in_row[None, :], x, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / hidden + eps)
    y = x * rstd[:, None]
    if not PARAMETERS_FIRST:
        w, b = _load_parameters(w_ptr, b_ptr, col, in_row, MASK_COLS)
    if w_ptr is not None:
        y = y * w.to(tl.float32)[None, :]
    if b_ptr is not None:
        y = y + b.to(tl.float32)[None, :]
    store_if(y_ptrs, y.to(y_ptr.dtype.element_ty), mask, MASK_ROWS or MASK_COLS)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _forward_chunks_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    hidden,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """A program reads a row that is too long for registers again for each step, from cache.

    Each pass goes the other way than the one before: what was read last is the likeliest to be in
    cache still.
    """
    HAS_MEAN: tl.constexpr = mean_ptr is not None
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    y_row = y_ptr + row * hidden
    block = tl.arange(0, BLOCK)
    if HAS_MEAN:
        sums = tl.zeros([BLOCK], tl.float32)
        for chunk in range(CHUNKS):
            col = chunk * BLOCK + block
            x = tl.load(x_row + col, mask=col < hidden, other=0.0, eviction_policy="evict_last")
            sums += x.to(tl.float32)
        mean = tl.sum(sums, axis=0) / hidden
    squares = tl.zeros([BLOCK], tl.float32)
    for chunk in range(CHUNKS):
        col = (CHUNKS - 1 - chunk if HAS_MEAN else chunk) * BLOCK + block
        mask = col < hidden
        x = tl.load(x_row + col, mask=mask, other=0.0, eviction_policy="evict_last")
        x = x.to(tl.float32)
        if HAS_MEAN:
            x = tl.where(mask, x - mean, 0.0)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / hidden + eps)
    if HAS_MEAN:
        tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for chunk in range(CHUNKS):
        col = (chunk if HAS_MEAN else CHUNKS - 1 - chunk) * BLOCK + block
        mask = col < hidden
        x = tl.load(x_row + col, mask=mask, other=0.0, eviction_policy="evict_first")
        x = x.to(tl.float32)
        if HAS_MEAN:
            x = x - mean
        y = x * rstd
        if w_ptr is not None:
            w = tl.load(w_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
            y = y * w.to(tl.float32)
        if b_ptr is not None:
            b = tl.load(b_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
            y = y + b.to(tl.float32)
        tl.store(y_row + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "splits", "steps"])
def _forward_split_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    slots_ptr,
    rows,
    hidden,
    x_stride,
    eps,
    splits,
    steps,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A group of `splits` programs reduces a row a step, and writes the one before.

    LayerNorm's variance is that of the parts' own means, and of the parts around them (Chan, Golub
    and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
    """
    groups = tl.num_programs(0) // splits
    group = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    means_ptr, squares_ptr = _group_slots(slots_ptr, group, mean_ptr, SLOTS)
    col = split * BLOCK + tl.arange(0, BLOCK)
    in_row = col < hidden
    if mean_ptr is not None:
        own_size = tl.minimum(BLOCK, hidden - split * BLOCK)
        slot = tl.arange(0, SLOTS)
        sizes = tl.maximum(0, tl.minimum(BLOCK, hidden - slot * BLOCK)).to(tl.float32)
    w, b = _load_parameters(w_ptr, b_ptr, col, in_row, MASKED=True)
    last_x = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        row = (group + step * groups).to(tl.int64)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask_if(in_row, row < rows), other=0.0)
        if mean_ptr is not None:
            own_mean = tl.sum(x.to(tl.float32), axis=0) / own_size
            difference = tl.where(in_row, x.to(tl.float32) - own_mean, 0.0)
            publish(means_ptr, step, split, own_mean, SLOTS)
            publish(squares_ptr, step, split, tl.sum(difference * difference, axis=0), SLOTS)
        else:
            squares = x.to(tl.float32) * x.to(tl.float32)
            publish(squares_ptr, step, split, tl.sum(squares, axis=0) / hidden, SLOTS)

        if mean_ptr is not None:
            means = collect(means_ptr, step - 1, splits, SLOTS)
            squares = collect(squares_ptr, step - 1, splits, SLOTS)
            mean = tl.sum(sizes * means, axis=0) / hidden
            off = means - mean
            rstd = tl.rsqrt(tl.sum(squares + sizes * off * off, axis=0) / hidden + eps)
        else:
            rstd = tl.rsqrt(collect_sum(squares_ptr, step - 1, splits, SLOTS) + eps)
        row -= groups
        y = last_x.to(tl.float32)
        if mean_ptr is not None:
            y = y - mean
        y = y * rstd
        if w_ptr is not None:
            y = y * w.to(tl.float32)
        if b_ptr is not None:
            y = y + b.to(tl.float32)
        valid = (row >= 0) & (row < rows)
        tl.store(
            y_ptr + row * hidden + col, y.to(y_ptr.dtype.element_ty), mask=mask_if(in_row, valid)
        )
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=valid & (split == 0))
        tl.store(rstd_ptr + row, rstd, mask=valid & (split == 0))
        last_x = x


@triton.jit
def _group_slots(slots_ptr, group, mean_ptr, SLOTS: tl.constexpr):
    """A group's slots for each of the two values of a row; for the second alone without a mean."""
    if mean_ptr is not None:
        first = slots_ptr + group * (2 * RING * SLOTS)
        second = first + RING * SLOTS
    else:
        first = slots_ptr + group * (RING * SLOTS)
        second = first
    return first, second


@triton.jit(do_not_specialize=["rows", "steps"])
def _backward_rows_kernel(
    g_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    sum_ptr,
    other_sum_ptr,
    rows,
    hidden,
    g_stride,
    x_stride,
    steps,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_BLOCK: tl.constexpr,
):
    """A program walks over tiles of ROWS whole rows, a grid apart, with its part of dw and db in
    registers.

    With `sum_ptr` (and `other_sum_ptr`, where both are wanted) the programs add up their parts as
    well.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK)
    in_row = col < hidden
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        row = (program + step * programs).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        in_rows = row < rows
        mask = in_rows[:, None] & in_row[None, :]
        x = tl.load(x_ptr + (row * x_stride)[:, None] + col[None, :], mask=mask, other=0.0)
        g = tl.load(g_ptr + (row * g_stride)[:, None] + col[None, :], mask=mask, other=0.0)
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row, mask=in_rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=in_rows, other=0.0)
        xhat = x.to(tl.float32)
        if mean_ptr is not None:
            # Beyond the row this is not 0, but g is, and with it everything that is summed.
            xhat = xhat - mean[:, None]
        xhat = xhat * rstd[:, None]
        g = g.to(tl.float32)
        if NEED_DB:
            db += g
        if NEED_DW:
            dw += g * xhat
        if dx_ptr is not None:
            if w_ptr is not None:
                # In the loop: it comes out of L1, and registers are what this kernel is short of.
                w = tl.load(w_ptr + col, mask=in_row, other=0.0)
                g = g * w.to(tl.float32)[None, :]
            if mean_ptr is not None:
                mean_g = tl.sum(g, axis=1) / hidden
            mean_gx = tl.sum(g * xhat, axis=1) / hidden
            if mean_ptr is not None:
                g = g - mean_g[:, None]
            dx = (g - xhat * mean_gx[:, None]) * rstd[:, None]
            dx_ptrs = dx_ptr + (row * hidden)[:, None] + col[None, :]
            tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        partial_ptrs = partial_ptr + program.to(tl.int64) * hidden + col
        # Where there is one program, these are dw.
        tl.store(partial_ptrs, tl.sum(dw, axis=0).to(partial_ptr.dtype.element_ty), mask=in_row)
    if NEED_DB:
        partial_row = program + (programs if NEED_DW else 0)
        partial_ptrs = partial_ptr + partial_row.to(tl.int64) * hidden + col
        tl.store(partial_ptrs, tl.sum(db, axis=0), mask=in_row)
    if sum_ptr is not None:
        sum_after_barrier(partial_ptr, sum_ptr, other_sum_ptr, hidden, SUM_ROWS, SUM_BLOCK)


@triton.jit
def _row_means_kernel(
    g_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    means_ptr,
    hidden,
    g_stride,
    x_stride,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """mean(w * g), with a mean, and mean(w * g * xhat) of one row of any length, for
    `_backward_columns_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
        sums = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for chunk in range(CHUNKS):
        col = chunk * BLOCK + block
        mask = col < hidden
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + col, mask=mask, other=0.0).to(tl.float32)
        if w_ptr is not None:
            w = tl.load(w_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
            g = g * w.to(tl.float32)
        if mean_ptr is not None:
            sums += g
            x = x - mean
        products += g * x
    rstd = tl.load(rstd_ptr + row)
    VALUES: tl.constexpr = 1 if mean_ptr is None else 2
    if mean_ptr is not None:
        tl.store(means_ptr + row * VALUES, tl.sum(sums, axis=0) / hidden)
    tl.store(means_ptr + row * VALUES + (VALUES - 1), tl.sum(products, axis=0) * rstd / hidden)


@triton.jit(do_not_specialize=["rows", "row_splits", "steps"])
def _backward_columns_kernel(
    g_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    means_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    hidden,
    g_stride,
    x_stride,
    row_splits,
    steps,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program owns BLOCK columns of every `row_splits`-th row, the means being known."""
    VALUES: tl.constexpr = 1 if mean_ptr is None else 2
    split = tl.program_id(0) % row_splits
    col = (tl.program_id(0) // row_splits) * BLOCK + tl.arange(0, BLOCK)
    in_row = col < hidden
    if w_ptr is not None:
        w = tl.load(w_ptr + col, mask=in_row, other=0.0)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        row = (split + step * row_splits).to(tl.int64)
        in_rows = row < rows
        mask = mask_if(in_row, in_rows)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + col, mask=mask, other=0.0).to(tl.float32)
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row, mask=in_rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=in_rows, other=0.0)
        if mean_ptr is not None:
            x = x - mean
        xhat = x * rstd
        if NEED_DB:
            db += g
        if NEED_DW:
            dw += g * xhat
        if dx_ptr is not None:
            if mean_ptr is not None:
                mean_g = tl.load(means_ptr + row * VALUES, mask=in_rows, other=0.0)
            mean_gx = tl.load(means_ptr + row * VALUES + (VALUES - 1), mask=in_rows, other=0.0)
            if w_ptr is not None:
                g = g * w.to(tl.float32)
            if mean_ptr is not None:
                g = g - mean_g
            dx = (g - xhat * mean_gx) * rstd
            tl.store(dx_ptr + row * hidden + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        tl.store(partial_ptr + split.to(tl.int64) * hidden + col, dw, mask=in_row)
    if NEED_DB:
        partial_row = split + (row_splits if NEED_DW else 0)
        tl.store(partial_ptr + partial_row.to(tl.int64) * hidden + col, db, mask=in_row)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["rows", "splits", "steps"])
def _backward_split_kernel(
    g_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    slots_ptr,
    rows,
    hidden,
    g_stride,
    x_stride,
    splits,
    steps,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A group of `splits` programs reduces a row a step, and writes dx of the one before."""
    groups = tl.num_programs(0) // splits
    group = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    sums_ptr, products_ptr = _group_slots(slots_ptr, group, mean_ptr, SLOTS)
    col = split * BLOCK + tl.arange(0, BLOCK)
    in_row = col < hidden
    if w_ptr is not None:
        w = tl.load(w_ptr + col, mask=in_row, other=0.0)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    last_x = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
    last_g = tl.zeros([BLOCK], g_ptr.dtype.element_ty)
    if mean_ptr is not None:
        last_mean = 0.0
    last_rstd = 0.0
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        row = (group + step * groups).to(tl.int64)
        in_rows = row < rows
        mask = mask_if(in_row, in_rows)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
        g = tl.load(g_ptr + row * g_stride + col, mask=mask, other=0.0)
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row, mask=in_rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=in_rows, other=0.0)
        xhat = x.to(tl.float32)
        if mean_ptr is not None:
            xhat = xhat - mean
        xhat = xhat * rstd
        wg = g.to(tl.float32)
        if NEED_DB:
            db += wg
        if NEED_DW:
            dw += wg * xhat
        if w_ptr is not None:
            wg = wg * w.to(tl.float32)
        if mean_ptr is not None:
            wg_sum, product_sum = tl.reduce((wg, wg * xhat), axis=0, combine_fn=_add_pairs)
            publish(sums_ptr, step, split, wg_sum / hidden, SLOTS)
        else:
            product_sum = tl.sum(wg * xhat, axis=0)
        publish(products_ptr, step, split, product_sum / hidden, SLOTS)

        if mean_ptr is not None:
            mean_g = collect_sum(sums_ptr, step - 1, splits, SLOTS)
        mean_gx = collect_sum(products_ptr, step - 1, splits, SLOTS)
        row -= groups
        xhat = last_x.to(tl.float32)
        if mean_ptr is not None:
            xhat = xhat - last_mean
        xhat = xhat * last_rstd
        wg = last_g.to(tl.float32)
        if w_ptr is not None:
            wg = wg * w.to(tl.float32)
        if mean_ptr is not None:
            wg = wg - mean_g
        dx = (wg - xhat * mean_gx) * last_rstd
        mask = mask_if(mask_if(in_row, row >= 0), row < rows)
        tl.store(dx_ptr + row * hidden + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        last_x = x
        last_g = g
        if mean_ptr is not None:
            last_mean = mean
        last_rstd = rstd
    if NEED_DW:
        tl.store(partial_ptr + group.to(tl.int64) * hidden + col, dw, mask=in_row)
    if NEED_DB:
        partial_row = group + (groups if NEED_DW else 0)
        tl.store(partial_ptr + partial_row.to(tl.int64) * hidden + col, db, mask=in_row)


# --------------------------------------------------------------------------------------------------
# Launches: which kernel, over which grid, with which block
# --------------------------------------------------------------------------------------------------

# The tiles below are the fastest, or within 2% of it, of those tried on an H200 in bfloat16 at
# hidden sizes 128 to 131072, in bytes, so that float32 moves as many of them: 32 bytes of each
# tensor a thread, 64 for RMSNorm's longer rows and for LayerNorm.


@functools.lru_cache(maxsize=1024)
def _rms_norm_forward_tile(hidden: int, itemsize: int) -> Tile:
    block = max(power_of_2(hidden), MIN_BLOCK)
    row = block * itemsize
    rows = 1 if row > 2048 else 8192 // row
    size = rows * row
    return Tile(rows, block, size // (1024 if size < 16384 else 2048))


@functools.lru_cache(maxsize=1024)
def _layer_norm_forward_tile(hidden: int, itemsize: int) -> Tile:
    block = max(power_of_2(hidden), MIN_BLOCK)
    # Smaller programs than RMSNorm's: there are two reductions to wait for.
    rows = max(1, 4096 // itemsize // block)
    return Tile(rows, block, rows * block * itemsize // 2048)


@functools.lru_cache(maxsize=1024)
def _backward_tile(hidden: int, itemsize: int) -> Tile:
    block = max(power_of_2(hidden), MIN_BLOCK)
    if block * itemsize > 16384:
        # Nothing is left for loading ahead.
        return Tile(1, block, block * itemsize // 1024)
    rows = max(1, 16384 // itemsize // block)
    return Tile(rows, block, 8, stages=3)


def _forward_chunk(itemsize: int) -> Tile:
    return Tile(1, 16384 // itemsize, 32)


class _Tiling(NamedTuple):
    """What differs between the norms in how their rows are divided among programs."""

    #: Of whole rows, by `hidden` and the size of an element.
    forward: Callable[[int, int], Tile]
    #: Of rows that are split over programs, by the size of an element.
    forward_split: Callable[[int], Tile]
    backward_split: Callable[[int], Tile]
    #: Rows of up to this many bytes get weight and bias before the reduction. Beside longer ones
    #: they take the registers of other programs, which is slower.
    parameters_first_bytes: int
    #: Rows of up to this many bytes are not split in the backward: the sums of longer ones take all
    #: of a program's registers, and loading ahead stops.
    whole_backward_bytes: int
    #: A backward of up to this many elements is computed by one program.
    one_program_elements: int


_RMS_NORM = _Tiling(
    forward=_rms_norm_forward_tile,
    forward_split=lambda itemsize: Tile(1, 8192 // itemsize, 4, per_sm=4, stages=3),
    backward_split=lambda itemsize: Tile(1, 8192 // itemsize, 8, per_sm=2, stages=3),
    parameters_first_bytes=WHOLE_ROW_BYTES,
    whole_backward_bytes=WHOLE_ROW_BYTES,
    one_program_elements=ONE_PROGRAM_ELEMENTS,
)
_LAYER_NORM = _Tiling(
    forward=_layer_norm_forward_tile,
    forward_split=lambda itemsize: Tile(1, 8192 // itemsize, 4, per_sm=3, stages=3),
    backward_split=lambda itemsize: Tile(1, 4096 // itemsize, 4, per_sm=3, stages=3),
    parameters_first_bytes=8 * 1024,
    whole_backward_bytes=16 * 1024,
    one_program_elements=0,  # the sums of two gradients are always added up afterwards
)


def _values(mean: torch.Tensor | None) -> int:
    """How many values of a row programs exchange."""
    return 1 if mean is None else 2


def plan_forward(
    input: torch.Tensor,
    hidden: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
    multiprocessors: int,
    can_wait: bool,
) -> Launch:
    """The launch of a forward. `can_wait`: programs may wait for one another (not interpreted)."""
    tiling = _RMS_NORM if mean is None else _LAYER_NORM
    rows, itemsize = input.numel() // hidden, input.element_size()
    x, x_stride = as_rows(input, rows, hidden)
    tensors = (x, contiguous(weight), contiguous(bias), output, mean, rstd)
    if hidden * itemsize <= WHOLE_ROW_BYTES:
        tile = tiling.forward(hidden, itemsize)
        return Launch(
            _forward_rows_kernel,
            ceil_div(rows, tile.rows),
            (*tensors, rows, hidden, x_stride, eps),
            {
                "ROWS": tile.rows,
                "BLOCK": tile.block,
                "MASK_ROWS": tile.rows > 1,
                "MASK_COLS": hidden < tile.block,
                "PARAMETERS_FIRST": tile.block * itemsize <= tiling.parameters_first_bytes,
            },
            tile.num_warps,
        )
    split = None
    if can_wait and hidden * itemsize > L1_ROW_BYTES:
        split = split_rows(tiling.forward_split(itemsize), rows, hidden, multiprocessors)
    if split is not None:
        slots = split.zeroed_slots(x.device, values=_values(mean))
        steps = ceil_div(rows, split.groups)
        return Launch(
            _forward_split_kernel,
            split.groups * split.splits,
            (*tensors, slots, rows, hidden, x_stride, eps, split.splits, steps),
            split_constexprs(split),
            split.tile.num_warps,
            split_options(split),
        )
    tile = _forward_chunk(itemsize)
    return Launch(
        _forward_chunks_kernel,
        rows,
        (*tensors, hidden, x_stride, eps),
        {"BLOCK": tile.block, "CHUNKS": _chunks(hidden, tile)},
        tile.num_warps,
    )


def _chunks(hidden: int, tile: Tile) -> int:
    # A power of two, so that there are few to compile; a chunk beyond the row is masked off.
    return power_of_2(ceil_div(hidden, tile.block))


class _Backward(NamedTuple):
    """What the launches of a backward are planned from."""

    tiling: _Tiling
    inputs: tuple[Any, ...]  # g, x, weight, mean, rstd
    dx: torch.Tensor | None
    dw: torch.Tensor | None
    db: torch.Tensor | None
    sums: list[torch.Tensor]  # those of dw and db that there are
    rows: int
    hidden: int
    strides: tuple[int, int]  # of the rows of g and x
    values: int
    device: torch.device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows, self.hidden, *self.strides

    @property
    def needs(self) -> dict[str, bool]:
        return {"NEED_DW": self.dw is not None, "NEED_DB": self.db is not None}

    def partial_sums(self, partials: int) -> torch.Tensor | None:
        """Memory for so many rows of partial sums of each."""
        if not self.sums:
            return None
        matrices = (2,) if len(self.sums) == 2 else ()
        shape = (*matrices, partials, self.hidden)
        return torch.empty(shape, dtype=torch.float32, device=self.device)


def plan_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    hidden: int,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dx: torch.Tensor | None,
    dw: torch.Tensor | None,
    db: torch.Tensor | None,
    multiprocessors: int,
    can_wait: bool,
) -> list[Launch]:
    """The launches of a backward, in the stream's order. Its temporaries are allocated here."""
    tiling = _RMS_NORM if mean is None else _LAYER_NORM
    rows, itemsize = input.numel() // hidden, input.element_size()
    g, g_stride = as_rows(grad_out, rows, hidden)
    x, x_stride = as_rows(input, rows, hidden)
    inputs = (g, x, contiguous(weight), contiguous(mean), contiguous(rstd))
    strides = (g_stride, x_stride)
    sums = [each for each in (dw, db) if each is not None]
    call = _Backward(
        tiling, inputs, dx, dw, db, sums, rows, hidden, strides, _values(mean), input.device
    )
    if hidden * itemsize <= tiling.whole_backward_bytes:
        tile = _backward_tile(hidden, itemsize)
        return _plan_backward_rows(call, tile, multiprocessors, can_wait)
    tile = tiling.backward_split(itemsize)
    if can_wait and dx is not None:
        split = split_rows(tile, rows, hidden, multiprocessors)
        if split is not None:
            return _plan_backward_split(call, split)
    return _plan_backward_columns(call, tile, multiprocessors)


def _plan_backward_rows(
    call: _Backward, tile: Tile, multiprocessors: int, can_wait: bool
) -> list[Launch]:
    """The narrowest rows of LayerNorm are computed without fused multiply-add.

    In a row of one element dx is 0, as w * g is its own mean, and native's is; a fused w * g - mean
    is instead what rounding took off w * g, times rstd of up to 1 / sqrt(eps).
    """
    rows, hidden, sums = call.rows, call.hidden, call.sums
    tiles = ceil_div(rows, tile.rows)
    programs = min(multiprocessors * tile.per_sm, tiles)
    if rows * hidden <= call.tiling.one_program_elements:
        # Its partial sums are the sums, which saves small calls a launch.
        programs, partial, sums = 1, call.dw, []
    else:
        partial = call.partial_sums(programs)
    one_launch = can_wait and bool(sums) and sums_in_one_launch(rows, hidden, programs)
    to_sum = (*sums, None)[:2] if one_launch else (None, None)
    launch = Launch(
        _backward_rows_kernel,
        programs,
        (*call.inputs, call.dx, partial, *to_sum, *call.shape, ceil_div(tiles, programs)),
        {
            **call.needs,
            "ROWS": tile.rows,
            "BLOCK": tile.block,
            "STAGES": tile.stages,
            **sum_constexprs(hidden, programs, one_launch),
        },
        tile.num_warps,
        {
            "maxnreg": tile.registers,
            "enable_fp_fusion": call.values == 1 or tile.block > MIN_BLOCK,
            "launch_cooperative_grid": one_launch,
        },
    )
    return [launch] if one_launch else [launch, *_plan_sums(partial, sums)]


def _plan_backward_split(call: _Backward, split: Split) -> list[Launch]:
    partial = call.partial_sums(split.groups)
    slots = split.zeroed_slots(call.device, call.values)
    steps = ceil_div(call.rows, split.groups)
    launch = Launch(
        _backward_split_kernel,
        split.groups * split.splits,
        (*call.inputs, call.dx, partial, slots, *call.shape, split.splits, steps),
        {**call.needs, **split_constexprs(split)},
        split.tile.num_warps,
        split_options(split),
    )
    return [launch, *_plan_sums(partial, call.sums)]


def _plan_backward_columns(call: _Backward, tile: Tile, multiprocessors: int) -> list[Launch]:
    launches, means = [], None
    if call.dx is not None:
        shape = (call.rows, call.values)
        means = torch.empty(shape, dtype=torch.float32, device=call.device)
        launches.append(
            Launch(
                _row_means_kernel,
                call.rows,
                (*call.inputs, means, call.hidden, *call.strides),
                {"BLOCK": tile.block, "CHUNKS": _chunks(call.hidden, tile)},
                tile.num_warps,
            )
        )
    blocks = ceil_div(call.hidden, tile.block)
    row_splits = max(1, min(call.rows, multiprocessors * 4 // blocks))
    partial = call.partial_sums(row_splits)
    steps = ceil_div(call.rows, row_splits)
    launches.append(
        Launch(
            _backward_columns_kernel,
            row_splits * blocks,
            (*call.inputs, means, call.dx, partial, *call.shape, row_splits, steps),
            {**call.needs, "BLOCK": tile.block},
            tile.num_warps,
        )
    )
    return [*launches, *_plan_sums(partial, call.sums)]


def _plan_sums(partial: torch.Tensor | None, sums: list[torch.Tensor]) -> list[Launch]:
    return [plan_sum(partial, *sums)] if partial is not None and sums else []


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


def forward(
    input: torch.Tensor,
    hidden: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
) -> None:
    """`ops.Forward` of float32, float16 and bfloat16, in any strides."""
    device = (multiprocessors(input.device), input.is_cuda)
    plan_forward(input, hidden, weight, bias, output, mean, rstd, float(eps), *device)()


def backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    hidden: int,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dx: torch.Tensor | None,
    dw: torch.Tensor | None,
    db: torch.Tensor | None,
) -> None:
    """`ops.Backward` of float32, float16 and bfloat16, in any strides, expanded ones included."""
    device = (multiprocessors(input.device), input.is_cuda)
    for launch in plan_backward(grad_out, input, hidden, weight, mean, rstd, dx, dw, db, *device):
        launch()


# ATen's ops, around these two.
rms_norm_forward = functools.partial(ops.rms_norm_forward, forward)
rms_norm_backward = functools.partial(ops.rms_norm_backward, backward)
layer_norm_forward = functools.partial(ops.layer_norm_forward, forward)
layer_norm_backward = functools.partial(ops.layer_norm_backward, backward)


# --------------------------------------------------------------------------------------------------
# Configurations
# --------------------------------------------------------------------------------------------------


def configurations(norm: str, multiprocessors: int = 132) -> Iterator[Launch]:
    """The launches that there are, on meta tensors, to be compiled for any architecture.

    Power-of-two blocks in 16 and 32 bits, and at a few sizes each: unaligned rows, no weight, no
    bias, some of the gradients, more or fewer rows.

    Args:
        norm: ``"rms_norm"`` or ``"layer_norm"``.
        multiprocessors: an H200's by default.
    """
    has_mean = norm == "layer_norm"
    launches = functools.partial(example_launches, norm, multiprocessors)
    bfloat16, float32 = torch.bfloat16, torch.float32
    for log2 in (4, 7, *range(10, 16), 17) if has_mean else range(4, 18):
        yield from launches(bfloat16, 1 << log2)
    for log2 in (10, 13, 14) if has_mean else range(4, 18):
        yield from launches(float32, 1 << log2)
    for hidden in (4096, 8192, 32768) if has_mean else (4096, 16384, 65536):
        yield from launches(torch.float16, hidden)
        yield from launches(bfloat16, hidden - 1)
        yield from launches(bfloat16, hidden, has_bias=False)
        yield from launches(bfloat16, hidden, has_weight=False, has_bias=False)
        yield from launches(bfloat16, hidden, needs=(True, False, False))
        yield from launches(bfloat16, hidden, needs=(False, True, True))
    for hidden in (128, 4096):
        yield from launches(bfloat16, hidden, rows=1)
    # Few programs that add up their sums in the same launch, and more elements than are.
    yield from launches(bfloat16, 4096, rows=8)
    yield from launches(bfloat16, 1024, rows=8192)
    # More than the programs that run at once can hold of one row.
    yield from launches(bfloat16, 1 << 22)


def example_launches(
    norm: str,
    multiprocessors: int,
    dtype: torch.dtype,
    hidden: int,
    rows: int = 1024,
    has_weight: bool = True,
    has_bias: bool = True,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> list[Launch]:
    """The launches of a forward and then of a backward, on meta tensors."""
    has_mean = norm == "layer_norm"
    x = torch.empty(rows, hidden, dtype=dtype, device="meta")
    rstd = torch.empty(rows, 1, dtype=torch.float32, device="meta")
    mean = rstd if has_mean else None
    weight, bias = (
        torch.empty(hidden, dtype=dtype, device="meta") if there else None
        for there in (has_weight, has_bias and has_mean)
    )
    dx, dw, db = (t if need else None for t, need in zip((x, weight, bias), needs, strict=True))
    device = (multiprocessors, True)
    return [
        plan_forward(x, hidden, weight, bias, x, mean, rstd, 1e-6, *device),
        *plan_backward(x, x, hidden, weight, mean, rstd, dx, dw, db, *device),
    ]
