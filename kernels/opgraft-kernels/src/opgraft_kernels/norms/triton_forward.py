"""The forwards of both norms in Triton; `triton_kernels` says what serves the memory's speed."""

from __future__ import annotations

import triton
import triton.language as tl

from opgraft_kernels.norms.triton_tiles import (
    add_pairs,
    group_slots,
    load_parameters,
    load_tile,
    scale_and_shift,
    store_tile,
    sum_pairs_of_rows,
    sum_rows,
)
from opgraft_kernels.rows import (
    begin_program,
    collect,
    collect_sum,
    mask_if,
    multiple_of,
    prefetch,
    publish,
)

__all__ = [
    "forward_chunks_kernel",
    "forward_rows_kernel",
    "forward_split_kernel",
    "is_far_from_zero",
    "statistics",
]

# Of a square of a mean: below it, what the mean is off may be much of the variance.
_LITTLE_VARIANCE = tl.constexpr(2.0**-20)
# Of float32, below which there are fewer digits, or none.
_LEAST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit(do_not_specialize=["rows", "hidden", "x_stride", "ahead"])
def forward_rows_kernel(
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
    EARLY: tl.constexpr,
):
    """A program normalises a tile of ROWS whole rows, which stays in registers: its pieces are
    BLOCKS of BLOCK columns, and one of TAIL more where that is not 0.

    MASK_ROWS, MASK_COLS: the tile may hold more rows, or columns, than there are. Where it does
    not, masks would cost some percent of the bandwidth. PARAMETERS_FIRST: weight and bias are
    loaded while x is on its way, and take registers from there on; after the reduction they would
    be waited for once more, and of several blocks once for each. TOGETHER: see `sum_rows`.
    PREFETCH: a program asks for the tile of the program that is `ahead` of it, whose rows are next
    to one another.
    """
    begin_program(EARLY)
    hidden = multiple_of(hidden, UNIT)
    x_stride = multiple_of(x_stride, UNIT)
    LAST: tl.constexpr = BLOCKS - (TAIL == 0)
    IN_TURN: tl.constexpr = BLOCKS > 1 and not PARAMETERS_FIRST
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    xs = ()
    for i in tl.static_range(LAST + 1):
        # What is left over is in the last piece.
        col = _columns(i, BLOCK, BLOCKS, TAIL)
        x = load_tile(x_ptr, row, rows, x_stride, col, hidden, MASK_ROWS, MASK_COLS and i == LAST)
        xs += (x.to(tl.float32),)
    if PREFETCH:
        first = (tl.program_id(0).to(tl.int64) + ahead) * ROWS
        prefetch(x_ptr + first * x_stride, tl.minimum(rows - first, ROWS) * hidden)
    if PARAMETERS_FIRST:
        parameters = _load_all_parameters(w_ptr, b_ptr, hidden, BLOCK, BLOCKS, TAIL, MASK_COLS)
    if mean_ptr is not None:
        mean, rest, variance, xs, left = statistics(
            xs, hidden, BLOCK, BLOCKS, TAIL, MASK_COLS, TOGETHER, True
        )
        tl.store(mean_ptr + row, mean + rest, mask=row < rows)
    else:
        variance = sum_rows(_squares(xs), TOGETHER) / hidden
    rstd = tl.rsqrt(variance + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    if not PARAMETERS_FIRST and not IN_TURN:
        parameters = _load_all_parameters(w_ptr, b_ptr, hidden, BLOCK, BLOCKS, TAIL, MASK_COLS)
    for i in tl.static_range(LAST + 1):
        col = _columns(i, BLOCK, BLOCKS, TAIL)
        if IN_TURN:
            w, b = load_parameters(w_ptr, b_ptr, col, col < hidden, MASK_COLS and i == LAST)
        else:
            w, b = parameters[i]
        y = xs[i] * rstd[:, None]
        if mean_ptr is not None:
            # 0 times an infinite rstd would be NaN.
            y = y - tl.where(left == 0.0, 0.0, left * rstd)[:, None]
        y = scale_and_shift(y, w_ptr, w, b_ptr, b)
        store_tile(y_ptr, y, row, rows, col, hidden, MASK_ROWS, MASK_COLS and i == LAST)


@triton.jit
def statistics(
    xs,
    hidden,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    TAIL: tl.constexpr,
    MASK_COLS: tl.constexpr,
    TOGETHER: tl.constexpr,
    CENTER: tl.constexpr,
):
    """The mean of rows, in pieces, what it lacks, and their variance; and the rows, with what is to
    be taken off them.

    One reduction finds both the sums and those of squares. Only for rows whose mean is far from
    zero there is a second one, of differences from the mean. CENTER: those rows come back less
    their mean. Of others it is left to take off, by the operation that scales: where it is no
    further from zero than a standard deviation, no digits are lost by that.
    """
    LAST: tl.constexpr = BLOCKS - (TAIL == 0)
    sums, squares = sum_pairs_of_rows(xs, _squares(xs), TOGETHER)
    mean, variance = _mean_and_variance(sums, squares, hidden)
    rest = tl.zeros_like(mean)
    left = mean
    is_far = is_far_from_zero(mean, variance)
    if tl.max(is_far.to(tl.int32), axis=0) > 0:
        differences = ()
        for i in tl.static_range(LAST + 1):
            col = _columns(i, BLOCK, BLOCKS, TAIL)
            differences += (_center(xs[i], mean, col < hidden, MASK_COLS and i == LAST),)
        squares, sums = sum_pairs_of_rows(_squares(differences), differences, TOGETHER)
        far_variance, far_rest = _variance_and_rest(squares, sums, hidden, mean)
        # A row's bits are the same whatever rows are beside it.
        variance = tl.where(is_far, far_variance, variance)
        rest = tl.where(is_far, far_rest, 0.0)
        if CENTER:
            centered = ()
            for i in tl.static_range(LAST + 1):
                difference = xs[i] - mean[:, None] - rest[:, None]
                centered += (tl.where(is_far[:, None], difference, xs[i]),)
            xs = centered
            left = tl.where(is_far, 0.0, left)
    return mean, rest, variance, xs, left


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
def is_far_from_zero(mean, variance):
    """Whether a mean is further from zero than a standard deviation: its square, taken off the mean
    of squares, took digits of the variance with it. So it is where one overflowed, or is NaN; and
    where squares are too small for float32, since without an eps rows are divided by 0 then."""
    is_near = (variance > mean * mean) & (variance > _LEAST_NORMAL) & (variance < float("inf"))
    return is_near == 0


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
        some = load_parameters(w_ptr, b_ptr, col, col < hidden, MASK_COLS and i == LAST)
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
def _center(x, mean, in_row, MASK_COLS: tl.constexpr):
    """x - mean, and 0 beyond the row's end."""
    x = x - mean[:, None]
    if MASK_COLS:
        x = tl.where(in_row[None, :], x, 0.0)
    return x


@triton.jit(do_not_specialize=["hidden", "x_stride"])
def forward_chunks_kernel(
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
    EARLY: tl.constexpr,
):
    """A program reads a row that is too long for registers again to write it, from cache.

    The second pass goes the other way: what was read last is the likeliest to be in cache still.
    """
    begin_program(EARLY)
    hidden = multiple_of(hidden, UNIT)
    x_stride = multiple_of(x_stride, UNIT)
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    y_row = y_ptr + row * hidden
    if mean_ptr is not None:
        sums, squares = _sums_of_chunks(x_row, 0.0, hidden, BLOCK, CHUNKS)
        mean, variance = _mean_and_variance(sums, squares, hidden)
        rest = 0.0
        if is_far_from_zero(mean, variance):
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
        return tl.reduce((sums, squares), axis=0, combine_fn=add_pairs)


@triton.jit(do_not_specialize=["rows", "hidden", "x_stride", "splits", "steps"])
def forward_split_kernel(
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
    EARLY: tl.constexpr,
):
    """A group of `splits` programs reduces a row a step, and writes the one before.

    LayerNorm's variance is that of the parts' own means, and of the parts around them (Chan, Golub
    and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
    """
    begin_program(EARLY)
    hidden = multiple_of(hidden, UNIT)
    x_stride = multiple_of(x_stride, UNIT)
    groups = tl.num_programs(0) // splits
    group = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    means_ptr, squares_ptr = group_slots(slots_ptr, group, mean_ptr, SLOTS)
    col = split * BLOCK + tl.arange(0, BLOCK)
    in_row = col < hidden
    if mean_ptr is not None:
        part_size = tl.minimum(BLOCK, hidden - split * BLOCK)
        slot = tl.arange(0, SLOTS)
        sizes = tl.maximum(0, tl.minimum(BLOCK, hidden - slot * BLOCK)).to(tl.float32)
    w, b = load_parameters(w_ptr, b_ptr, col, in_row, MASKED=True)
    previous_x = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        row = (group + step * groups).to(tl.int64)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask_if(in_row, row < rows), other=0.0)
        if mean_ptr is not None:
            part_mean = tl.sum(x.to(tl.float32), axis=0) / part_size
            difference = tl.where(in_row, x.to(tl.float32) - part_mean, 0.0)
            squares, rest = tl.reduce(
                (difference * difference, difference), axis=0, combine_fn=add_pairs
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
                combine_fn=add_pairs,
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
        y = scale_and_shift(y * rstd, w_ptr, w, b_ptr, b)
        valid = (row >= 0) & (row < rows)
        tl.store(
            y_ptr + row * hidden + col, y.to(y_ptr.dtype.element_ty), mask=mask_if(in_row, valid)
        )
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=valid & (split == 0))
        tl.store(rstd_ptr + row, rstd, mask=valid & (split == 0))
        previous_x = x
