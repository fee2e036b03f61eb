"""RMSNorm and LayerNorm in Triton.

`ops` says what they compute. Both directions are bound by memory: the forward has to read x and
write y, the backward to read x and g and to write dx, once each. Everything here serves that:

* a row is read from device memory once. It stays in registers between its reduction and its use;
  one that is too long for them is read again out of L1, or split over programs that exchange their
  sums;
* while a program of the forward reduces and writes its row, the next ones are on their way to the
  L2 cache, if the device can be asked for that (`rows.tiles_ahead`);
* dw and db are summed in float32, in registers, by as many programs as the device runs at once,
  which walk over the rows. Each writes one row of partial sums, and the same programs or those of a
  second kernel add those up, in a fixed order: no atomics on floats, the same bits on every run;
* ``hidden`` is a run-time integer under a power-of-two block. Where it is no power of two, one
  block around 5120 columns would keep 3072 lanes and their registers idle: a row is a block and a
  second one, the tail, or as many equal pieces as it needs, whichever is faster. Of those only the
  last has masks. A new hidden size compiles a kernel only when it needs other blocks or another
  unit (how wide loads may be). A new number of rows compiles no forward, and a backward only where
  it changes by whom, and in which way, the partial sums are added up, or whether rows fill tiles of
  pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl

from opgraft import triton_utils
from opgraft_kernels.norms import ops
from opgraft_kernels.rows import (
    ONE_PROGRAM_ELEMENTS,
    OTHER_BYTES,
    RING,
    Device,
    Launch,
    Split,
    Tile,
    as_rows,
    ceil_div,
    collect,
    collect_sum,
    contiguous,
    device_of,
    even_programs,
    load_if,
    mask_if,
    multiple_of,
    plan_sum,
    power_of_2,
    prefetch,
    publish,
    split_rows,
    store_if,
    sum_after_barrier,
    sum_constexprs,
    sums_in_one_launch,
    tiles_ahead,
    unit_of,
)

__all__ = [
    "backward",
    "forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "plan_backward",
    "plan_forward",
    "rms_norm_backward",
    "rms_norm_forward",
]

# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------

# In the interpreter there is no inline assembly.
_IS_INTERPRETED = tl.constexpr(triton_utils.interpreted())

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


@triton.jit
def _scale_and_shift(y, w_ptr, w, b_ptr, b):
    """y * w + b, of a row or of a tile of rows."""
    if w_ptr is not None:
        y = y * w.to(tl.float32)
    if b_ptr is not None:
        y = y + b.to(tl.float32)
    return y


@triton.jit
def _load_statistics(mean_ptr, rstd_ptr, row, in_rows):
    """The mean, 0 where the norm has none, and rstd, of a row or of each row of a tile."""
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row, mask=in_rows, other=0.0)
    return mean, tl.load(rstd_ptr + row, mask=in_rows, other=0.0)


@triton.jit
def _standardize(x, mean_ptr, mean, rstd):
    """xhat, of a row or of a tile of rows.

    Beyond a row's end it is not 0, but g is, and with it everything that is summed.
    """
    x = x.to(tl.float32)
    if mean_ptr is not None:
        x = x - (mean if len(x.shape) == 1 else mean[:, None])
    return x * (rstd if len(x.shape) == 1 else rstd[:, None])


@triton.jit
def _store_partial_sums(
    partial_ptr, index, partials, hidden, col, in_row, dw, db, NEED_DW, NEED_DB
):
    """Row `index` of `partials` rows of partial sums of dw, and then of db, where each is wanted.

    A program that walks over tiles of rows adds up their rows first.
    """
    if NEED_DW:
        ptrs = partial_ptr + index.to(tl.int64) * hidden + col
        if len(dw.shape) == 2:
            dw = tl.sum(dw, axis=0)
        # Where there is one program, these are dw.
        tl.store(ptrs, dw.to(partial_ptr.dtype.element_ty), mask=in_row)
    if NEED_DB:
        row = index + (partials if NEED_DW else 0)
        ptrs = partial_ptr + row.to(tl.int64) * hidden + col
        if len(db.shape) == 2:
            db = tl.sum(db, axis=0)
        tl.store(ptrs, db, mask=in_row)


# Of a square of a mean: below it, what the mean is off may be much of the variance.
_LITTLE_VARIANCE = tl.constexpr(2.0**-20)


@triton.jit(do_not_specialize=["rows", "hidden", "x_stride", "ahead"])
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
    ahead,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    TAIL: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLS: tl.constexpr,
    PARAMETERS_FIRST: tl.constexpr,
    TOGETHER: tl.constexpr,
    PREFETCH: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A program normalises a tile of ROWS whole rows, which stays in registers: its pieces are
    BLOCKS of BLOCK columns, and one of TAIL more where that is not 0.

    MASK_ROWS, MASK_COLS: the tile may hold more rows, or columns, than there are. Where it does
    not, masks would cost some percent of the bandwidth. PARAMETERS_FIRST: weight and bias are
    loaded while x is on its way, and take registers from there on; after the reduction they would
    be waited for once more, and of several blocks once for each. TOGETHER: see `_sum_rows`.
    PREFETCH: a program asks for the tile of the program that is `ahead` of it, whose rows are next
    to one another.
    """
    hidden = multiple_of(hidden, UNIT)
    x_stride = multiple_of(x_stride, UNIT)
    LAST: tl.constexpr = BLOCKS - (TAIL == 0)
    IN_TURN: tl.constexpr = BLOCKS > 1 and not PARAMETERS_FIRST
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    xs = ()
    for i in tl.static_range(LAST + 1):
        # What is left over is in the last piece.
        col = _columns(i, BLOCK, BLOCKS, TAIL)
        x = _load_tile(x_ptr, row, rows, x_stride, col, hidden, MASK_ROWS, MASK_COLS and i == LAST)
        xs += (x.to(tl.float32),)
    if PREFETCH:
        first = (tl.program_id(0).to(tl.int64) + ahead) * ROWS
        prefetch(x_ptr + first * x_stride, tl.minimum(rows - first, ROWS) * hidden)
    if PARAMETERS_FIRST:
        parameters = _load_all_parameters(w_ptr, b_ptr, hidden, BLOCK, BLOCKS, TAIL, MASK_COLS)
    if mean_ptr is not None:
        mean, variance, rest = _statistics(xs, hidden, BLOCK, BLOCKS, TAIL, MASK_COLS, TOGETHER)
        tl.store(mean_ptr + row, mean + rest, mask=row < rows)
    else:
        variance = _sum_rows(_squares(xs), TOGETHER) / hidden
    rstd = tl.rsqrt(variance + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    if not PARAMETERS_FIRST and not IN_TURN:
        parameters = _load_all_parameters(w_ptr, b_ptr, hidden, BLOCK, BLOCKS, TAIL, MASK_COLS)
    for i in tl.static_range(LAST + 1):
        col = _columns(i, BLOCK, BLOCKS, TAIL)
        if IN_TURN:
            w, b = _load_parameters(w_ptr, b_ptr, col, col < hidden, MASK_COLS and i == LAST)
        else:
            w, b = parameters[i]
        x = xs[i]
        if mean_ptr is not None:
            x = x - mean[:, None] - rest[:, None]
        y = _scale_and_shift(x * rstd[:, None], w_ptr, w, b_ptr, b)
        _store_tile(y_ptr, y, row, rows, col, hidden, MASK_ROWS, MASK_COLS and i == LAST)


@triton.jit
def _statistics(
    xs,
    hidden,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    TAIL: tl.constexpr,
    MASK_COLS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """The mean of rows, in pieces, their variance, and what the mean lacks.

    One reduction finds both the sums and those of squares. Only for rows whose mean is far from
    zero there is a second one, of differences from the mean.
    """
    LAST: tl.constexpr = BLOCKS - (TAIL == 0)
    sums, squares = _sum_pairs_of_rows(xs, _squares(xs), TOGETHER)
    mean, variance = _mean_and_variance(sums, squares, hidden)
    rest = tl.zeros_like(mean)
    if tl.max(_is_far(mean, variance).to(tl.int32), axis=0) > 0:
        differences = ()
        for i in tl.static_range(LAST + 1):
            col = _columns(i, BLOCK, BLOCKS, TAIL)
            differences += (_center(xs[i], mean, col < hidden, MASK_COLS and i == LAST),)
        squares, rest = _sum_pairs_of_rows(_squares(differences), differences, TOGETHER)
        variance, rest = _variance_and_rest(squares, rest, hidden, mean)
    return mean, variance, rest


@triton.jit
def _squares(pieces):
    squares = ()
    for i in tl.static_range(len(pieces)):
        squares += (pieces[i] * pieces[i],)
    return squares


@triton.jit
def _mean_and_variance(sums, squares, hidden):
    mean = sums / hidden
    return mean, squares / hidden - mean * mean


@triton.jit
def _is_far(mean, variance):
    """Whether a mean is further from zero than a standard deviation: its square, taken off the mean
    of squares, took digits of the variance with it. So it is where one overflowed, or is NaN."""
    return (variance >= mean * mean) == 0


@triton.jit
def _load_all_parameters(
    w_ptr,
    b_ptr,
    hidden,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    TAIL: tl.constexpr,
    MASK_COLS: tl.constexpr,
):
    """Weight and bias of each piece of a row."""
    LAST: tl.constexpr = BLOCKS - (TAIL == 0)
    parameters = ()
    for i in tl.static_range(LAST + 1):
        col = _columns(i, BLOCK, BLOCKS, TAIL)
        some = _load_parameters(w_ptr, b_ptr, col, col < hidden, MASK_COLS and i == LAST)
        parameters += (some,)
    return parameters


@triton.jit
def _columns(i: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TAIL: tl.constexpr):
    """The columns of a piece of a row: of a block, or of the tail."""
    if i < BLOCKS:
        return i * BLOCK + tl.arange(0, BLOCK)
    else:
        return i * BLOCK + tl.arange(0, TAIL)


@triton.jit
def _sum_rows(pieces, TOGETHER: tl.constexpr):
    """The sums of rows, of which `pieces` are the last one's width or multiples of it.

    TOGETHER: by one reduction, where several would make all warps of a program wait as often. A row
    of the last piece must have an element for each thread: else parts of others move between
    threads.
    """
    if TOGETHER:
        total = tl.sum(_add_pieces(pieces), axis=1)
    else:
        total = tl.sum(pieces[0], axis=1)
        for i in tl.static_range(1, len(pieces)):
            total += tl.sum(pieces[i], axis=1)
    return total


@triton.jit
def _sum_pairs_of_rows(pieces, others, TOGETHER: tl.constexpr):
    """`_sum_rows` of each, by reductions of both."""
    if TOGETHER:
        totals = tl.reduce(
            (_add_pieces(pieces), _add_pieces(others)), axis=1, combine_fn=_add_pairs
        )
    else:
        totals = tl.reduce((pieces[0], others[0]), axis=1, combine_fn=_add_pairs)
        for i in tl.static_range(1, len(pieces)):
            more = tl.reduce((pieces[i], others[i]), axis=1, combine_fn=_add_pairs)
            totals = (totals[0] + more[0], totals[1] + more[1])
    return totals


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _variance_and_rest(squares, differences, hidden, mean):
    """The variance, and what the mean lacks, of rows of whose differences from that mean these are
    the sums.

    A mean of numbers that are large beside what they differ in is some units in its last place
    off, by the sum's roundings and by the division, which the GPU approximates. Of a row of equal
    numbers that would be all its variance. What is left after it was subtracted, which is exact
    there, has all digits, and so has its mean. Of numbers that differ by more it is not exact: all
    that are as large are rounded the same way, and so would be the mean.
    """
    rest = differences / hidden
    variance = squares / hidden - rest * rest
    # By a rounding it may be less; a NaN stays.
    variance = tl.where(variance < 0.0, 0.0, variance)
    return variance, tl.where(variance <= mean * mean * _LITTLE_VARIANCE, rest, 0.0)


@triton.jit
def _add_pieces(pieces):
    """The last piece of rows, and equal parts of the others added to it, in the same threads."""
    LAST: tl.constexpr = len(pieces) - 1
    ROWS: tl.constexpr = pieces[LAST].shape[0]
    COLS: tl.constexpr = pieces[LAST].shape[1]
    PARTS: tl.constexpr = pieces[0].shape[1] // COLS
    total = tl.sum(tl.reshape(pieces[0], [ROWS, PARTS, COLS]), axis=1)
    for i in tl.static_range(1, LAST):
        total += tl.sum(tl.reshape(pieces[i], [ROWS, PARTS, COLS]), axis=1)
    return total + pieces[LAST]


@triton.jit
def _tile(ptr, row, stride, col):
    """Pointers to columns of rows."""
    return ptr + (row * stride)[:, None] + col[None, :]


@triton.jit
def _load_tile(
    ptr, row, rows, stride, col, hidden, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr
):
    mask = _tile_mask(row, rows, col, hidden, MASK_COLS)
    return load_if(_tile(ptr, row, stride, col), mask, MASK_ROWS or MASK_COLS)


@triton.jit
def _store_tile(
    ptr, values, row, rows, col, hidden, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr
):
    mask = _tile_mask(row, rows, col, hidden, MASK_COLS)
    values = values.to(ptr.dtype.element_ty)
    store_if(_tile(ptr, row, hidden, col), values, mask, MASK_ROWS or MASK_COLS)


@triton.jit
def _tile_mask(row, rows, col, hidden, MASK_COLS: tl.constexpr):
    """Which elements of a tile there are."""
    mask = (row < rows)[:, None]
    if MASK_COLS:
        mask = mask & (col < hidden)[None, :]
    return mask


@triton.jit
def _center(x, mean, in_row, MASK_COLS: tl.constexpr):
    """x - mean, and 0 beyond the row's end."""
    x = x - mean[:, None]
    if MASK_COLS:
        x = tl.where(in_row[None, :], x, 0.0)
    return x


@triton.jit(do_not_specialize=["hidden", "x_stride"])
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
    UNIT: tl.constexpr,
):
    """A program reads a row that is too long for registers again to write it, from cache.

    The second pass goes the other way: what was read last is the likeliest to be in cache still.
    """
    hidden = multiple_of(hidden, UNIT)
    x_stride = multiple_of(x_stride, UNIT)
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    y_row = y_ptr + row * hidden
    if mean_ptr is not None:
        sums, squares = _sums_of_chunks(x_row, 0.0, hidden, BLOCK, CHUNKS)
        mean, variance = _mean_and_variance(sums, squares, hidden)
        rest = 0.0
        if _is_far(mean, variance):
            differences, squares = _sums_of_chunks(x_row, mean, hidden, BLOCK, CHUNKS)
            variance, rest = _variance_and_rest(squares, differences, hidden, mean)
        tl.store(mean_ptr + row, mean + rest)
    else:
        _, squares = _sums_of_chunks(x_row, None, hidden, BLOCK, CHUNKS)
        variance = squares / hidden
    rstd = tl.rsqrt(variance + eps)
    tl.store(rstd_ptr + row, rstd)
    for chunk in range(CHUNKS):
        col = (CHUNKS - 1 - chunk) * BLOCK + tl.arange(0, BLOCK)
        mask = col < hidden
        x = tl.load(x_row + col, mask=mask, other=0.0, eviction_policy="evict_first")
        x = x.to(tl.float32)
        if mean_ptr is not None:
            x = x - mean - rest
        y = x * rstd
        if w_ptr is not None:
            w = tl.load(w_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
            y = y * w.to(tl.float32)
        if b_ptr is not None:
            b = tl.load(b_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
            y = y + b.to(tl.float32)
        tl.store(y_row + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sums_of_chunks(x_row, mean, hidden, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """The sum of a row's differences from `mean`, and that of their squares; without a mean the sum
    of its squares alone."""
    sums = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for chunk in range(CHUNKS):
        col = chunk * BLOCK + tl.arange(0, BLOCK)
        mask = col < hidden
        x = tl.load(x_row + col, mask=mask, other=0.0, eviction_policy="evict_last")
        x = x.to(tl.float32)
        if mean is not None:
            x = tl.where(mask, x - mean, 0.0)
            sums += x
        squares += x * x
    if mean is None:
        return 0.0, tl.sum(squares, axis=0)
    else:
        return tl.reduce((sums, squares), axis=0, combine_fn=_add_pairs)


@triton.jit(do_not_specialize=["rows", "hidden", "x_stride", "splits", "steps"])
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
    UNIT: tl.constexpr,
):
    """A group of `splits` programs reduces a row a step, and writes the one before.

    LayerNorm's variance is that of the parts' own means, and of the parts around them (Chan, Golub
    and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
    """
    hidden = multiple_of(hidden, UNIT)
    x_stride = multiple_of(x_stride, UNIT)
    groups = tl.num_programs(0) // splits
    group = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    means_ptr, squares_ptr = _group_slots(slots_ptr, group, mean_ptr, SLOTS)
    col = split * BLOCK + tl.arange(0, BLOCK)
    in_row = col < hidden
    if mean_ptr is not None:
        part_size = tl.minimum(BLOCK, hidden - split * BLOCK)
        slot = tl.arange(0, SLOTS)
        sizes = tl.maximum(0, tl.minimum(BLOCK, hidden - slot * BLOCK)).to(tl.float32)
    w, b = _load_parameters(w_ptr, b_ptr, col, in_row, MASKED=True)
    previous_x = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        row = (group + step * groups).to(tl.int64)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask_if(in_row, row < rows), other=0.0)
        if mean_ptr is not None:
            part_mean = tl.sum(x.to(tl.float32), axis=0) / part_size
            difference = tl.where(in_row, x.to(tl.float32) - part_mean, 0.0)
            squares, rest = tl.reduce(
                (difference * difference, difference), axis=0, combine_fn=_add_pairs
            )
            variance, rest = _variance_and_rest(squares, rest, part_size, part_mean)
            publish(means_ptr, step, split, part_mean + rest, SLOTS)
            publish(squares_ptr, step, split, variance * part_size, SLOTS)
        else:
            squares = x.to(tl.float32) * x.to(tl.float32)
            publish(squares_ptr, step, split, tl.sum(squares, axis=0) / hidden, SLOTS)

        if mean_ptr is not None:
            means = collect(means_ptr, step - 1, splits, SLOTS)
            squares = collect(squares_ptr, step - 1, splits, SLOTS)
            mean = tl.sum(sizes * means, axis=0) / hidden
            deviation = means - mean
            squares, rest = tl.reduce(
                (squares + sizes * deviation * deviation, sizes * deviation),
                axis=0,
                combine_fn=_add_pairs,
            )
            variance, rest = _variance_and_rest(squares, rest, hidden, mean)
            mean += rest
            rstd = tl.rsqrt(variance + eps)
        else:
            rstd = tl.rsqrt(collect_sum(squares_ptr, step - 1, splits, SLOTS) + eps)
        row -= groups
        y = previous_x.to(tl.float32)
        if mean_ptr is not None:
            y = y - mean
        y = _scale_and_shift(y * rstd, w_ptr, w, b_ptr, b)
        valid = (row >= 0) & (row < rows)
        tl.store(
            y_ptr + row * hidden + col, y.to(y_ptr.dtype.element_ty), mask=mask_if(in_row, valid)
        )
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=valid & (split == 0))
        tl.store(rstd_ptr + row, rstd, mask=valid & (split == 0))
        previous_x = x


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


@triton.jit(do_not_specialize=["rows", "hidden", "g_stride", "x_stride", "steps"])
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
    TAIL: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_BLOCK: tl.constexpr,
    SUM_ONCE: tl.constexpr,
    SUM_MASKED: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A program walks over tiles of ROWS whole rows, a grid apart, with its part of dw and db in
    registers. A row is BLOCK columns, and TAIL more where that is not 0.

    With `sum_ptr` (and `other_sum_ptr`, where both are wanted) the programs add up their parts as
    well.
    """
    hidden = multiple_of(hidden, UNIT)
    g_stride = multiple_of(g_stride, UNIT)
    x_stride = multiple_of(x_stride, UNIT)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    if TAIL:
        tail = BLOCK + tl.arange(0, TAIL)
        dw_tail = tl.zeros([ROWS, TAIL], tl.float32)
        db_tail = tl.zeros([ROWS, TAIL], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        row = (program + step * programs).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        in_rows = row < rows
        mask = _tile_mask(row, rows, col, hidden, True)
        x = tl.load(_tile(x_ptr, row, x_stride, col), mask=mask, other=0.0)
        g = tl.load(_tile(g_ptr, row, g_stride, col), mask=mask, other=0.0).to(tl.float32)
        if TAIL:
            tail_mask = _tile_mask(row, rows, tail, hidden, True)
            x_tail = tl.load(_tile(x_ptr, row, x_stride, tail), mask=tail_mask, other=0.0)
            g_tail = tl.load(_tile(g_ptr, row, g_stride, tail), mask=tail_mask, other=0.0)
            g_tail = g_tail.to(tl.float32)
        mean, rstd = _load_statistics(mean_ptr, rstd_ptr, row, in_rows)
        xhat = _standardize(x, mean_ptr, mean, rstd)
        if NEED_DB:
            db += g
        if NEED_DW:
            dw += g * xhat
        if TAIL:
            xhat_tail = _standardize(x_tail, mean_ptr, mean, rstd)
            if NEED_DB:
                db_tail += g_tail
            if NEED_DW:
                dw_tail += g_tail * xhat_tail
        if dx_ptr is not None:
            g = _weigh(g, w_ptr, col, hidden)
            gs, products = (g,), (g * xhat,)
            if TAIL:
                g_tail = _weigh(g_tail, w_ptr, tail, hidden)
                gs += (g_tail,)
                products += (g_tail * xhat_tail,)
            mean_g = 0.0
            if mean_ptr is not None and TOGETHER:
                mean_gx, mean_g = _sum_pairs_of_rows(products, gs, TOGETHER)
            else:
                mean_gx = _sum_rows(products, TOGETHER)
                if mean_ptr is not None:
                    mean_g = _sum_rows(gs, TOGETHER)
            mean_gx = mean_gx / hidden
            if mean_ptr is not None:
                mean_g = mean_g / hidden
            dx = _dx_of_tile(g, mean_ptr, mean_g, xhat, mean_gx, rstd).to(dx_ptr.dtype.element_ty)
            tl.store(_tile(dx_ptr, row, hidden, col), dx, mask=mask)
            if TAIL:
                dx = _dx_of_tile(g_tail, mean_ptr, mean_g, xhat_tail, mean_gx, rstd)
                dx = dx.to(dx_ptr.dtype.element_ty)
                tl.store(_tile(dx_ptr, row, hidden, tail), dx, mask=tail_mask)
    _store_partial_sums(
        partial_ptr, program, programs, hidden, col, col < hidden, dw, db, NEED_DW, NEED_DB
    )
    if TAIL:
        _store_partial_sums(
            partial_ptr,
            program,
            programs,
            hidden,
            tail,
            tail < hidden,
            dw_tail,
            db_tail,
            NEED_DW,
            NEED_DB,
        )
    if sum_ptr is not None:
        sum_after_barrier(
            partial_ptr, sum_ptr, other_sum_ptr, hidden, SUM_ROWS, SUM_BLOCK, SUM_ONCE, SUM_MASKED
        )


@triton.jit
def _weigh(g, w_ptr, col, hidden):
    """w * g of a tile. w is loaded for each: it comes out of L1, and registers are short."""
    if w_ptr is not None:
        w = tl.load(w_ptr + col, mask=col < hidden, other=0.0)
        g = g * w.to(tl.float32)[None, :]
    return g


@triton.jit
def _dx_of_tile(g, mean_ptr, mean_g, xhat, mean_gx, rstd):
    """dx of a tile, where `g` is w * g."""
    if mean_ptr is not None:
        g = g - mean_g[:, None]
    return (g - xhat * mean_gx[:, None]) * rstd[:, None]


@triton.jit(do_not_specialize=["rows", "hidden", "g_stride", "x_stride", "tiles"])
def _backward_pieces_kernel(
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
    tiles,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLS: tl.constexpr,
    SPARING: tl.constexpr,
    STAGES: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_BLOCK: tl.constexpr,
    SUM_ONCE: tl.constexpr,
    SUM_MASKED: tl.constexpr,
    UNIT: tl.constexpr,
):
    """As `_backward_rows_kernel`, of rows of BLOCKS equal pieces, of which only the last is masked.

    The weight stays in registers. SPARING: it is loaded ahead for each row, and nothing of a row
    stays there in float32 until its sums are known.
    """
    hidden = multiple_of(hidden, UNIT)
    g_stride = multiple_of(g_stride, UNIT)
    x_stride = multiple_of(x_stride, UNIT)
    LAST: tl.constexpr = BLOCKS - 1
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    ws, dws, dbs = (), (), ()
    for i in tl.static_range(BLOCKS):
        if not SPARING:
            ws += (_load_block(w_ptr, i, hidden, BLOCK, MASK_COLS and i == LAST),)
        dws += (tl.zeros([ROWS, BLOCK], tl.float32),)
        dbs += (tl.zeros([ROWS, BLOCK], tl.float32),)
    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        xs, gs = (), ()
        for i in tl.static_range(BLOCKS):
            col = i * BLOCK + tl.arange(0, BLOCK)
            x = _load_tile(
                x_ptr, row, rows, x_stride, col, hidden, MASK_ROWS, MASK_COLS and i == LAST
            )
            g = _load_tile(
                g_ptr, row, rows, g_stride, col, hidden, MASK_ROWS, MASK_COLS and i == LAST
            )
            xs += (x,)
            gs += (g,)
        mean, rstd = _load_statistics(mean_ptr, rstd_ptr, row, row < rows)
        if dx_ptr is not None:
            sums = tl.zeros([ROWS, BLOCK], tl.float32)
            products = tl.zeros([ROWS, BLOCK], tl.float32)
            for i in tl.static_range(BLOCKS):
                if SPARING:
                    w = _load_block(w_ptr, i, hidden, BLOCK, MASK_COLS and i == LAST)
                else:
                    w = ws[i]
                wg = _scale_and_shift(gs[i].to(tl.float32), w_ptr, w, None, 0.0)
                sums += wg
                products += wg * _standardize(xs[i], mean_ptr, mean, rstd)
            if mean_ptr is not None:
                mean_g, mean_gx = tl.reduce((sums, products), axis=1, combine_fn=_add_pairs)
                mean_g = mean_g / hidden * rstd
            else:
                mean_gx = tl.sum(products, axis=1)
            mean_gx = mean_gx / hidden * rstd
        new_dws, new_dbs = (), ()
        for i in tl.static_range(BLOCKS):
            dw, db = dws[i], dbs[i]
            xhat = _standardize(_as_loaded(xs[i], SPARING), mean_ptr, mean, rstd)
            g = _as_loaded(gs[i], SPARING).to(tl.float32)
            if NEED_DB:
                db += g
            if NEED_DW:
                dw += g * xhat
            new_dws += (dw,)
            new_dbs += (db,)
            if dx_ptr is not None:
                if SPARING:
                    w = _load_block(w_ptr, i, hidden, BLOCK, MASK_COLS and i == LAST)
                else:
                    w = ws[i]
                rest = xhat * mean_gx[:, None]
                if mean_ptr is not None:
                    rest = rest + mean_g[:, None]
                dx = _scale_and_shift(g, w_ptr, w, None, 0.0) * rstd[:, None] - rest
                col = i * BLOCK + tl.arange(0, BLOCK)
                _store_tile(dx_ptr, dx, row, rows, col, hidden, MASK_ROWS, MASK_COLS and i == LAST)
        dws, dbs = new_dws, new_dbs
    for i in tl.static_range(BLOCKS):
        col = i * BLOCK + tl.arange(0, BLOCK)
        _store_partial_sums(
            partial_ptr,
            program,
            programs,
            hidden,
            col,
            col < hidden,
            dws[i],
            dbs[i],
            NEED_DW,
            NEED_DB,
        )
    if sum_ptr is not None:
        sum_after_barrier(
            partial_ptr, sum_ptr, other_sum_ptr, hidden, SUM_ROWS, SUM_BLOCK, SUM_ONCE, SUM_MASKED
        )


@triton.jit
def _load_block(w_ptr, i: tl.constexpr, hidden, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Block `i` of the weight."""
    col = i * BLOCK + tl.arange(0, BLOCK)
    w, _ = _load_parameters(w_ptr, None, col, col < hidden, MASKED)
    return w


@triton.jit
def _as_loaded(values, ANEW: tl.constexpr):
    """The same 16-bit values. ANEW: the compiler does not know that they are, so it converts them
    to float32 once more, and need not keep the results of the first time."""
    if ANEW and values.dtype.primitive_bitwidth == 16 and not _IS_INTERPRETED:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2
        )
    else:
        return values


@triton.jit(do_not_specialize=["hidden", "g_stride", "x_stride"])
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
    UNIT: tl.constexpr,
):
    """mean(w * g), with a mean, and mean(w * g * xhat) of one row of any length, for
    `_backward_columns_kernel`."""
    hidden = multiple_of(hidden, UNIT)
    g_stride = multiple_of(g_stride, UNIT)
    x_stride = multiple_of(x_stride, UNIT)
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


@triton.jit(do_not_specialize=["rows", "hidden", "g_stride", "x_stride", "row_splits", "steps"])
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
    UNIT: tl.constexpr,
):
    """A program owns BLOCK columns of every `row_splits`-th row, the means being known."""
    hidden = multiple_of(hidden, UNIT)
    g_stride = multiple_of(g_stride, UNIT)
    x_stride = multiple_of(x_stride, UNIT)
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
        mean, rstd = _load_statistics(mean_ptr, rstd_ptr, row, in_rows)
        xhat = _standardize(x, mean_ptr, mean, rstd)
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
    _store_partial_sums(
        partial_ptr, split, row_splits, hidden, col, in_row, dw, db, NEED_DW, NEED_DB
    )


@triton.jit(do_not_specialize=["rows", "hidden", "g_stride", "x_stride", "splits", "steps"])
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
    UNIT: tl.constexpr,
):
    """A group of `splits` programs reduces a row a step, and writes dx of the one before."""
    hidden = multiple_of(hidden, UNIT)
    g_stride = multiple_of(g_stride, UNIT)
    x_stride = multiple_of(x_stride, UNIT)
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
    previous_x = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
    previous_g = tl.zeros([BLOCK], g_ptr.dtype.element_ty)
    previous_mean, previous_rstd = 0.0, 0.0
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        row = (group + step * groups).to(tl.int64)
        in_rows = row < rows
        mask = mask_if(in_row, in_rows)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
        g = tl.load(g_ptr + row * g_stride + col, mask=mask, other=0.0)
        mean, rstd = _load_statistics(mean_ptr, rstd_ptr, row, in_rows)
        xhat = _standardize(x, mean_ptr, mean, rstd)
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
        xhat = _standardize(previous_x, mean_ptr, previous_mean, previous_rstd)
        wg = previous_g.to(tl.float32)
        if w_ptr is not None:
            wg = wg * w.to(tl.float32)
        if mean_ptr is not None:
            wg = wg - mean_g
        dx = (wg - xhat * mean_gx) * previous_rstd
        mask = mask_if(mask_if(in_row, row >= 0), row < rows)
        tl.store(dx_ptr + row * hidden + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        previous_x = x
        previous_g = g
        previous_mean, previous_rstd = mean, rstd
    _store_partial_sums(partial_ptr, group, groups, hidden, col, in_row, dw, db, NEED_DW, NEED_DB)


# --------------------------------------------------------------------------------------------------
# Launches: which kernel, over which grid, with which block
# --------------------------------------------------------------------------------------------------

# The tiles below are the fastest, or within 2% of it, of those tried on an H200 in bfloat16 at
# hidden sizes 40 to 131072, in bytes, so that float32 moves as many of them: 32 bytes of each
# tensor a thread, 64 for RMSNorm's longer rows, for LayerNorm's narrow ones, and for the block of
# rows that have a tail, which adds to it. LayerNorm's forward sees rows as equal pieces, if
# elements are loaded together and a program holds them; narrow rows only where nothing is masked.

# The least block. A narrower row wastes lanes, but such tensors have few bytes to waste.
_MIN_BLOCK = 16
# Rows whose lanes take up to this many bytes are narrow: a tile has 16 of them or more.
_NARROW_ROW_BYTES = 512
# Longer rows of LayerNorm are pieces in a forward, whatever they leave of the last.
_PIECES_ROW_BYTES = 1024
# Rows of up to this many bytes fit into one program: 32 warps at 32 bytes a thread.
_WHOLE_ROW_BYTES = 32 * 1024
# Rows of up to this many bytes are read again by a forward, out of L1: two of them fit into it.
_L1_ROW_BYTES = 64 * 1024


#: g, x, weight, mean and rstd, as a backward's kernels read them.
_Inputs: TypeAlias = tuple[Any, ...]
#: Rows, hidden, and how far rows of g and of x are apart.
_Matrix: TypeAlias = tuple[int, int, int, int]


class Tiling(NamedTuple):
    """What differs between the norms in how their rows are divided among programs."""

    #: Short rows of a forward share a program, up to so many bytes of them.
    forward_bytes: int
    #: Tiles of a forward of up to this many bytes have a warp for 1024 of them, others for 2048.
    small_forward_bytes: int
    #: Of rows that are split over programs, by the size of an element.
    forward_split: Callable[[int], Tile]
    backward_split: Callable[[int], Tile]
    #: Rows of up to this many bytes get weight and bias before the reduction. Beside longer ones
    #: they take the registers of other programs, which is slower.
    parameters_first_bytes: int
    #: The same for rows with a tail, of which this is the block's part.
    parameters_first_block_bytes: int
    #: Rows with a block of 16 KB and a tail are read twice, if it is up to so large a part of it.
    twice_tail: float
    #: So many bytes of the block a warp, in a forward of narrow rows with a tail.
    narrow_warp_bytes: int
    #: Rows of up to this many bytes are not split in the backward: the sums of longer ones take all
    #: of a program's registers, and loading ahead stops. Those seen as pieces are not either.
    whole_backward_bytes: int
    #: Rows with a tail share a program of the backward, up to so many bytes of them.
    backward_bytes: int
    #: A backward of up to this many elements is computed by one program.
    one_program_elements: int


_RMS_NORM = Tiling(
    forward_bytes=8192,
    small_forward_bytes=8192,
    forward_split=lambda itemsize: Tile(1, 8192 // itemsize, 4, per_sm=4, stages=3),
    backward_split=lambda itemsize: Tile(1, 8192 // itemsize, 8, per_sm=2, stages=3),
    parameters_first_bytes=_WHOLE_ROW_BYTES,
    parameters_first_block_bytes=8 * 1024,
    twice_tail=1,
    narrow_warp_bytes=512,
    whole_backward_bytes=_WHOLE_ROW_BYTES,
    backward_bytes=16 * 1024,
    one_program_elements=ONE_PROGRAM_ELEMENTS,
)
_LAYER_NORM = Tiling(
    forward_bytes=4096,  # smaller programs than RMSNorm's: there are two reductions to wait for
    small_forward_bytes=0,
    forward_split=lambda itemsize: Tile(1, 8192 // itemsize, 4, per_sm=3, stages=3),
    backward_split=lambda itemsize: Tile(1, 4096 // itemsize, 4, per_sm=3, stages=3),
    parameters_first_bytes=8 * 1024,
    parameters_first_block_bytes=2 * 1024,
    twice_tail=0.5,
    narrow_warp_bytes=2048,
    whole_backward_bytes=16 * 1024,
    backward_bytes=8 * 1024,  # it sums two gradients
    one_program_elements=0,  # the sums of two gradients are always added up afterwards
)


def tiling(has_mean: bool) -> Tiling:
    return _LAYER_NORM if has_mean else _RMS_NORM


def _blocks(hidden: int) -> tuple[int, int]:
    """A block of columns and a tail, which hold a row: powers of two, and 0 for no tail."""
    whole = max(power_of_2(hidden), _MIN_BLOCK)
    if whole in (hidden, _MIN_BLOCK):
        return whole, 0
    block = whole // 2
    return block, max(power_of_2(hidden - block), _MIN_BLOCK)


def _has_short_tail(hidden: int, itemsize: int) -> bool:
    """Whether a row's tail leaves lanes out, and elements are loaded together, so that fewer
    registers are needed."""
    block, tail = _blocks(hidden)
    return 0 < tail < block and unit_of(itemsize, hidden) > 1


def _is_read_twice(hidden: int, itemsize: int, sizes: Tiling) -> bool:
    """Whether a forward reads a row with a tail twice, though it would fit into registers: few such
    programs fit into a multiprocessor, so that little is on its way."""
    block, tail = _blocks(hidden)
    return block * itemsize >= 16384 and 0 < tail <= sizes.twice_tail * block


def _is_tail_for_all_threads(tile: Tile, itemsize: int) -> bool:
    """Whether each thread has a vector of each row's tail, or more."""
    return tile.tail * itemsize >= tile.num_warps * 32 * 16


@functools.lru_cache(maxsize=1024)
def _forward_tile(hidden: int, itemsize: int, unit: int, has_mean: bool) -> Tile | None:
    """None: rows are too long for registers, or faster if they are read again."""
    sizes = tiling(has_mean)
    if has_mean and unit > 1 and (pieces := _forward_pieces(hidden, itemsize, unit)) is not None:
        return pieces
    if hidden * itemsize > _WHOLE_ROW_BYTES or _is_read_twice(hidden, itemsize, sizes):
        return None
    block, tail = _blocks(hidden)
    row = (2 * block if tail else block) * itemsize
    rows = 1 if row > 2048 else sizes.forward_bytes // row
    size = rows * block * itemsize
    if tail:
        a_warp = sizes.narrow_warp_bytes if row <= _NARROW_ROW_BYTES else 2048
        if rows == 1:
            tail = max(tail, block // 4)  # for all threads
    else:
        a_warp = 1024 if size <= sizes.small_forward_bytes else 2048
    return Tile(rows, block, max(1, size // a_warp), tail=tail)


def _forward_pieces(hidden: int, itemsize: int, unit: int) -> Tile | None:
    """That of LayerNorm's rows: equal pieces, most with 16 bytes for each thread. None: of narrow
    rows that are a power of two or need many pieces, and of those that no program holds."""
    row = hidden * itemsize
    if row <= _PIECES_ROW_BYTES:
        return _narrow_forward_pieces(hidden, itemsize)
    if row > 16384 * itemsize:
        return None
    if row < 3072:
        tile = Tile(2, 512 // itemsize, 2)
    elif row <= 5120:
        tile = Tile(1, 1024 // itemsize, 2)
    elif row < 16384:
        tile = Tile(1, 2048 // itemsize, 4)
    elif row == 16384 or unit * itemsize < 16 or (itemsize == 4 and row <= 32768):
        tile = Tile(1, 4096 // itemsize, 8)
    elif row <= 12288 * itemsize:
        # A thread of 16 bits has twice as many elements: without a bound three programs of eight
        # warps would not fit.
        tile = Tile(1, 8192 // itemsize, 8, per_sm=3 if itemsize == 2 else 1)
    else:
        tile = Tile(1, 16384 // itemsize, 16, per_sm=2 if itemsize == 2 else 1)
    return tile._replace(blocks=ceil_div(hidden, tile.block))


def _narrow_forward_pieces(hidden: int, itemsize: int) -> Tile | None:
    """Rows that are few times a power of two: nothing is masked."""
    piece = hidden & -hidden
    pieces = hidden // piece
    if not 1 < pieces <= 7 or piece * itemsize < 32:
        return None
    rows = power_of_2(8192 // (hidden * itemsize) + 1) // 2
    return Tile(rows, piece, 4, blocks=pieces)


def _has_parameters_first(tile: Tile, itemsize: int, sizes: Tiling) -> bool:
    """Whether a forward loads weight and bias before the reduction."""
    if tile.blocks > 1:
        # Beside two vectors of 16 bits of each piece a thread has no registers for them.
        return itemsize == 4 or tile.rows * tile.block * itemsize <= tile.num_warps * 32 * 16
    most = sizes.parameters_first_block_bytes if tile.tail else sizes.parameters_first_bytes
    return tile.block * itemsize <= most


@functools.lru_cache(maxsize=1024)
def _backward_tile(
    hidden: int, itemsize: int, unit: int, has_mean: bool, shared_memory: int
) -> Tile | None:
    """None: rows are too long for a program."""
    block, tail = _blocks(hidden)
    row = (2 * block if tail else block) * itemsize
    is_short = _has_short_tail(hidden, itemsize)
    # Shorter loads take more addresses and masks: single elements always more than there are
    # registers, others where a row is long.
    if unit * itemsize == 16 or (unit > 1 and hidden * itemsize <= 24 * 1024):
        pieces = _backward_pieces(hidden, itemsize, has_mean)
        if pieces is not None and _bytes_ahead(pieces, itemsize) <= shared_memory:
            return pieces
    if hidden * itemsize > tiling(has_mean).whole_backward_bytes:
        return None
    if has_mean and tail and unit_of(itemsize, hidden) > 1:
        tile = _layer_norm_backward_tile(block, tail, itemsize)
        if tile is not None and _bytes_ahead(tile, itemsize) <= shared_memory:
            return tile
    if row > 16384:
        ahead = Tile(1, block, 16, stages=3, tail=tail)
        if is_short and _bytes_ahead(ahead, itemsize) <= shared_memory:
            return ahead
        # No registers are left for loading ahead.
        return Tile(1, 2 * block if tail == block else block, row // 1024, tail=tail % block)
    rows = max(1, 16384 // row)
    if not is_short:
        return Tile(rows, block, 8, stages=3, tail=tail)
    if row <= _NARROW_ROW_BYTES:
        return Tile(rows, block, 8, stages=4, tail=tail)
    # The two parts of a row take turns, so there is time for a second program.
    rows = max(1, tiling(has_mean).backward_bytes // row)
    return Tile(rows, block, 4, per_sm=2, stages=3, tail=tail)


def _backward_pieces(hidden: int, itemsize: int, has_mean: bool) -> Tile | None:
    """That of rows of equal pieces, with 16 bytes for each thread. None: of those for which a block
    and a tail, or one block, are as fast."""
    block, tail = _blocks(hidden)
    size, is_whole, is_short = block * itemsize, tail == block, 0 < tail <= block // 4
    if itemsize == 2 and size == 2048 and 0 < tail <= block // 8:
        tile = Tile(1, 1024 // itemsize, 2, per_sm=6, stages=3)
    elif itemsize == 2 and size == 4096 and 0 < tail <= block // 2:
        tile = Tile(1, 2048 // itemsize, 4, per_sm=2, stages=4)
        if hidden == block + block // 2 and not has_mean:
            # Nothing is masked: one program that loads far ahead leaves half as many sums.
            tile = tile._replace(per_sm=1, stages=6)
    elif size == 16384 and (is_whole or (has_mean and tail)):
        tile = Tile(1, 4096 // itemsize, 8, stages=3)
    elif (size == 4096 and is_whole) or (size == 8192 and is_short and has_mean):
        tile = Tile(1, 2048 // itemsize, 4, per_sm=2, stages=3)
    elif size == 2048 and is_short and has_mean:
        tile = Tile(2, 1024 // itemsize, 4, per_sm=3, stages=3)
    else:
        return None
    return tile._replace(blocks=ceil_div(hidden, tile.block))


def _layer_norm_backward_tile(block: int, tail: int, itemsize: int) -> Tile | None:
    """That of LayerNorm's rows with a tail, by their bytes; None: as RMSNorm's."""
    size, is_whole = block * itemsize, tail == block
    if size == 2048:
        return Tile(2, 2 * block, 4, per_sm=2, stages=4)
    if size == 4096 and not is_whole:
        return Tile(1, block, 4, per_sm=2, stages=4, tail=max(tail, block // 2))
    if size == 8192 and is_whole:
        return Tile(1, 2 * block, 8, stages=4)
    if size == 8192:
        return Tile(2, block, 8, stages=3, tail=tail)
    return None


def _sums_together(tile: Tile, itemsize: int, has_mean: bool) -> bool:
    """Whether a backward adds up a row's block and tail together, which takes registers."""
    return (
        has_mean and _is_tail_for_all_threads(tile, itemsize) and _a_thread(tile) * itemsize <= 80
    )


def _is_ahead_faster(tile: Tile, load: int) -> bool:
    """Whether a backward loads rows ahead that it loads so many bytes at once.

    Each copy to shared memory is an instruction, as long as that of a whole vector; of less than 4
    bytes there is none. But the values of a large tile have no room in registers.
    """
    return load > 4 or _a_thread(tile) > 32


def _a_thread(tile: Tile) -> int:
    """Elements of each tensor that a thread has."""
    return tile.rows * tile.columns // (tile.num_warps * 32)


def _is_sparing(tile: Tile) -> bool:
    """Whether a backward of pieces has no registers left to keep the weight in."""
    return tile.blocks > 1 and _a_thread(tile) > 40


def _bytes_ahead(tile: Tile, itemsize: int) -> int:
    """The shared memory that a program of a backward takes for loading ahead, at most.

    Two tensors' rows are in it. Triton loads the weight's columns ahead as well, as often as the
    kernel loads them, and everything in one stage less than it is told, which is more where a tile
    has one row.
    """
    a_line = tile.columns * itemsize
    weights = 2 if _is_sparing(tile) else 1
    with_weight = (2 * tile.rows + weights) * (tile.stages - 1) * a_line + OTHER_BYTES
    return max(2 * tile.rows * tile.stages * a_line, with_weight)


def _values(mean: torch.Tensor | None) -> int:
    """How many values of a row programs exchange."""
    return 1 if mean is None else 2


def plan_forward(call: ops.Forward, device: Device) -> Launch:
    """The launch of a forward."""
    sizes = tiling(call.mean is not None)
    rows, hidden, itemsize = call.rows, call.hidden, call.input.element_size()
    x, x_stride = as_rows(call.input, rows, hidden)
    weight, bias = contiguous(call.weight), contiguous(call.bias)
    tensors = (x, weight, bias, call.output, call.mean, call.rstd)
    unit = {"UNIT": unit_of(itemsize, hidden, x_stride)}
    tile = _forward_tile(hidden, itemsize, unit["UNIT"], call.mean is not None)
    if tile is not None:
        tiles, tile_bytes = ceil_div(rows, tile.rows), tile.rows * hidden * itemsize
        is_one_block = tile.rows == 1 or x_stride == hidden
        ahead = tiles_ahead(tile_bytes, tiles, device) if is_one_block else 0
        return Launch(
            _forward_rows_kernel,
            tiles,
            (*tensors, rows, hidden, x_stride, call.eps, ahead),
            {
                "ROWS": tile.rows,
                "BLOCK": tile.block,
                "BLOCKS": tile.blocks,
                "TAIL": tile.tail,
                "MASK_ROWS": tile.rows > 1,
                "MASK_COLS": hidden < tile.columns,
                "PARAMETERS_FIRST": _has_parameters_first(tile, itemsize, sizes),
                "TOGETHER": tile.blocks > 1 or _is_tail_for_all_threads(tile, itemsize),
                "PREFETCH": ahead > 0,
                **unit,
            },
            tile.num_warps,
            {"maxnreg": tile.registers} if tile.per_sm > 1 else {},
        )
    split = None
    if device.can_wait and hidden * itemsize > _L1_ROW_BYTES:
        split = split_rows(sizes.forward_split(itemsize), rows, hidden, device.multiprocessors)
    if split is not None:
        slots = split.zeroed_slots(x.device, _values(call.mean))
        steps = ceil_div(rows, split.groups)
        return Launch(
            _forward_split_kernel,
            split.programs,
            (*tensors, slots, rows, hidden, x_stride, call.eps, split.splits, steps),
            {**split.constexprs, **unit},
            split.tile.num_warps,
            split.options,
        )
    tile = Tile(1, 16384 // itemsize, 32)
    if hidden * itemsize <= _WHOLE_ROW_BYTES:
        tile = Tile(1, 8192 // itemsize, 16)
    return Launch(
        _forward_chunks_kernel,
        rows,
        (*tensors, hidden, x_stride, call.eps),
        {"BLOCK": tile.block, "CHUNKS": _chunks(hidden, tile), **unit},
        tile.num_warps,
    )


def _chunks(hidden: int, tile: Tile) -> int:
    # From a few on a power of two, so that there are few to compile; what is beyond the row is
    # masked off.
    chunks = ceil_div(hidden, tile.block)
    return chunks if chunks <= 4 else power_of_2(chunks)


def plan_backward(call: ops.Backward, device: Device) -> list[Launch]:
    """The launches of a backward, in the stream's order. Its temporaries are allocated here."""
    sizes = tiling(call.mean is not None)
    rows, hidden, itemsize = call.rows, call.hidden, call.input.element_size()
    g, g_stride = as_rows(call.grad_out, rows, hidden)
    x, x_stride = as_rows(call.input, rows, hidden)
    inputs = (g, x, *map(contiguous, (call.weight, call.mean, call.rstd)))
    matrix = (rows, hidden, g_stride, x_stride)
    unit = _unit(call, matrix)["UNIT"]
    tile = _backward_tile(hidden, itemsize, unit, call.mean is not None, device.shared_memory)
    if tile is not None:
        return _plan_backward_rows(call, inputs, matrix, tile, device)
    part = sizes.backward_split(itemsize)
    if device.can_wait and call.dx is not None:
        split = split_rows(part, rows, hidden, device.multiprocessors)
        if split is not None:
            return _plan_backward_split(call, inputs, matrix, split)
    return _plan_backward_columns(call, inputs, matrix, part, device)


def _plan_backward_rows(
    call: ops.Backward, inputs: _Inputs, matrix: _Matrix, tile: Tile, device: Device
) -> list[Launch]:
    """The narrowest rows of LayerNorm are computed without fused multiply-add.

    In a row of one element dx is 0, as w * g is its own mean, and native's is; a fused w * g - mean
    is instead what rounding took off w * g, times rstd of up to 1 / sqrt(eps).
    """
    rows, hidden, *_ = matrix
    has_mean, sums = call.mean is not None, _sums(call)
    itemsize = call.input.element_size()
    tiles = ceil_div(rows, tile.rows)
    # All of them at once, for they may wait for one another.
    fitting = max(1, device.shared_memory // _bytes_ahead(tile, itemsize))
    per_sm = min(tile.per_sm, fitting)
    programs = even_programs(min(device.multiprocessors * per_sm, tiles), tiles)
    if rows * hidden <= tiling(has_mean).one_program_elements:
        # Its partial sums are the sums, which saves small calls a launch.
        programs, partial, sums = 1, call.dw, []
    else:
        partial = _partial_sums(call, sums, programs)
    one_launch = (
        device.can_wait
        and bool(sums)
        and sums_in_one_launch(rows, hidden, len(sums), programs, tile)
    )
    unit = _unit(call, matrix)
    stages = tile.stages if _is_ahead_faster(tile, unit["UNIT"] * itemsize) else 1
    to_sum = (*sums, None)[:2] if one_launch else (None, None)
    constexprs = {
        **_needs(call),
        "ROWS": tile.rows,
        "BLOCK": tile.block,
        "STAGES": stages,
        **sum_constexprs(hidden, len(sums), programs, tile, one_launch),
        **unit,
    }
    if tile.blocks > 1:
        kernel, steps = _backward_pieces_kernel, tiles
        constexprs |= {
            "BLOCKS": tile.blocks,
            "MASK_ROWS": rows % tile.rows > 0,
            "MASK_COLS": hidden < tile.columns,
            "SPARING": _is_sparing(tile),
        }
    else:
        kernel, steps = _backward_rows_kernel, ceil_div(tiles, programs)
        constexprs |= {"TAIL": tile.tail, "TOGETHER": _sums_together(tile, itemsize, has_mean)}
    launch = Launch(
        kernel,
        programs,
        (*inputs, call.dx, partial, *to_sum, *matrix, steps),
        constexprs,
        tile.num_warps,
        {
            "maxnreg": tile.registers,
            "enable_fp_fusion": not has_mean or tile.block > _MIN_BLOCK,
            "launch_cooperative_grid": one_launch,
        },
    )
    return [launch] if one_launch else [launch, *_plan_sums(partial, sums)]


def _plan_backward_split(
    call: ops.Backward, inputs: _Inputs, matrix: _Matrix, split: Split
) -> list[Launch]:
    sums = _sums(call)
    partial = _partial_sums(call, sums, split.groups)
    slots = split.zeroed_slots(call.input.device, _values(call.mean))
    steps = ceil_div(call.rows, split.groups)
    launch = Launch(
        _backward_split_kernel,
        split.programs,
        (*inputs, call.dx, partial, slots, *matrix, split.splits, steps),
        {**_needs(call), **split.constexprs, **_unit(call, matrix)},
        split.tile.num_warps,
        split.options,
    )
    return [launch, *_plan_sums(partial, sums)]


def _plan_backward_columns(
    call: ops.Backward, inputs: _Inputs, matrix: _Matrix, tile: Tile, device: Device
) -> list[Launch]:
    rows, hidden, *strides = matrix
    launches, means = [], None
    unit = _unit(call, matrix)
    if call.dx is not None:
        shape = (rows, _values(call.mean))
        means = torch.empty(shape, dtype=torch.float32, device=call.input.device)
        launches.append(
            Launch(
                _row_means_kernel,
                rows,
                (*inputs, means, hidden, *strides),
                {"BLOCK": tile.block, "CHUNKS": _chunks(hidden, tile), **unit},
                tile.num_warps,
            )
        )
    blocks = ceil_div(hidden, tile.block)
    row_splits = max(1, min(rows, device.multiprocessors * 4 // blocks))
    sums = _sums(call)
    partial = _partial_sums(call, sums, row_splits)
    launches.append(
        Launch(
            _backward_columns_kernel,
            row_splits * blocks,
            (*inputs, means, call.dx, partial, *matrix, row_splits, ceil_div(rows, row_splits)),
            {**_needs(call), "BLOCK": tile.block, **unit},
            tile.num_warps,
        )
    )
    return [*launches, *_plan_sums(partial, sums)]


def _unit(call: ops.Backward, matrix: _Matrix) -> dict[str, int]:
    _, *lengths = matrix
    return {"UNIT": unit_of(call.input.element_size(), *lengths)}


def _needs(call: ops.Backward) -> dict[str, bool]:
    return {"NEED_DW": call.dw is not None, "NEED_DB": call.db is not None}


def _sums(call: ops.Backward) -> list[torch.Tensor]:
    """Those gradients that are sums over rows."""
    return [each for each in (call.dw, call.db) if each is not None]


def _partial_sums(
    call: ops.Backward, sums: list[torch.Tensor], partials: int
) -> torch.Tensor | None:
    """Memory for so many rows of partial sums of each."""
    if not sums:
        return None
    matrices = (2,) if len(sums) == 2 else ()
    shape = (*matrices, partials, call.hidden)
    return torch.empty(shape, dtype=torch.float32, device=call.input.device)


def _plan_sums(partial: torch.Tensor | None, sums: list[torch.Tensor]) -> list[Launch]:
    return [plan_sum(partial, *sums)] if partial is not None and sums else []


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


def forward(call: ops.Forward) -> None:
    """Forwards of float32, float16 and bfloat16, in any strides."""
    plan_forward(call, device_of(call.input.device))()


def backward(call: ops.Backward) -> None:
    """Backwards of float32, float16 and bfloat16, in any strides, expanded ones included."""
    for launch in plan_backward(call, device_of(call.input.device)):
        launch()


# ATen's ops, around these two.
rms_norm_forward = functools.partial(ops.rms_norm_forward, forward)
rms_norm_backward = functools.partial(ops.rms_norm_backward, backward)
layer_norm_forward = functools.partial(ops.layer_norm_forward, forward)
layer_norm_backward = functools.partial(ops.layer_norm_backward, backward)
