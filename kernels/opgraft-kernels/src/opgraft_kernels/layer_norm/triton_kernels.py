"""LayerNorm in Triton: the kernels behind ``aten::native_layer_norm`` and its backward.

With ``rows x hidden`` the input seen as a matrix, and all arithmetic in float32::

    rstd = rsqrt(mean((x - mean(x)) ** 2) + eps)          one value a row, like mean(x)
    y    = (x - mean) * rstd * w + b
    dx   = rstd * (w * g - mean(w * g) - xhat * mean(w * g * xhat))   xhat = (x - mean) * rstd
    dw   = sum over rows of g * xhat                      db = sum over rows of g

(Ba, Kiros and Hinton, "Layer Normalization", 2016; the backward is its derivative.) The variance
is the mean of squared differences from the mean, not the difference of means: that would lose all
digits where the mean is large.

As in RMSNorm, whose kernels say more: a row is read once and stays in registers; dw and db are
summed in float32 by as many programs as the device runs at once, then over those in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from opgraft_kernels.rows import (
    L1_ROW_BYTES,
    MIN_BLOCK,
    WHOLE_ROW_BYTES,
    Launch,
    Tile,
    as_rows,
    ceil_div,
    fold,
    gather,
    gather_shares,
    load_if,
    meet,
    multiprocessors,
    plan_sum,
    power_of_2,
    publish,
    split_constexprs,
    split_options,
    split_rows,
    store_if,
    sum_together,
    together_constexprs,
)

__all__ = ["configurations", "layer_norm_backward", "layer_norm_forward"]


# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------


@triton.jit
def _load_parameters(w_ptr, b_ptr, col, in_row, MASKED: tl.constexpr):
    """Columns of weight and bias; nothing that is read of one that there is not."""
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
    EARLY: tl.constexpr,
):
    """A program normalises a tile of ROWS whole rows, which stays in registers.

    MASK_ROWS, MASK_COLS: the tile may hold more rows, or columns, than there are. EARLY: weight
    and bias are loaded while x is on its way, and take registers from there on.
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
    if EARLY:
        w, b = _load_parameters(w_ptr, b_ptr, col, in_row, MASK_COLS)
    mean = tl.sum(x, axis=1) / hidden
    y = x - mean[:, None]
    if MASK_COLS:
        y = tl.where(in_row[None, :], y, 0.0)
    rstd = tl.rsqrt(tl.sum(y * y, axis=1) / hidden + eps)
    y = y * rstd[:, None]
    if not EARLY:
        w, b = _load_parameters(w_ptr, b_ptr, col, in_row, MASK_COLS)
    if w_ptr is not None:
        y = y * w.to(tl.float32)[None, :]
    if b_ptr is not None:
        y = y + b.to(tl.float32)[None, :]
    store_if(y_ptrs, y.to(y_ptr.dtype.element_ty), mask, MASK_ROWS or MASK_COLS)
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
    """A program reads a row that is too long for registers three times, twice of them from cache.

    Each pass goes the other way than the one before: what was read last is the likeliest to be in
    cache still.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    y_row = y_ptr + row * hidden
    block = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for chunk in range(CHUNKS):
        col = chunk * BLOCK + block
        x = tl.load(x_row + col, mask=col < hidden, other=0.0, eviction_policy="evict_last")
        sums += x.to(tl.float32)
    mean = tl.sum(sums, axis=0) / hidden
    squares = tl.zeros([BLOCK], tl.float32)
    for chunk in range(CHUNKS):
        col = (CHUNKS - 1 - chunk) * BLOCK + block
        mask = col < hidden
        x = tl.load(x_row + col, mask=mask, other=0.0, eviction_policy="evict_last")
        difference = tl.where(mask, x.to(tl.float32) - mean, 0.0)
        squares += difference * difference
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / hidden + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for chunk in range(CHUNKS):
        col = chunk * BLOCK + block
        mask = col < hidden
        x = tl.load(x_row + col, mask=mask, other=0.0, eviction_policy="evict_first")
        y = (x.to(tl.float32) - mean) * rstd
        if w_ptr is not None:
            w = tl.load(w_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
            y = y * w.to(tl.float32)
        if b_ptr is not None:
            b = tl.load(b_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
            y = y + b.to(tl.float32)
        tl.store(y_row + col, y.to(y_ptr.dtype.element_ty), mask=mask)


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
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_BLOCK: tl.constexpr,
):
    """A program walks over tiles of ROWS whole rows, a grid apart, its share of dw and db in
    registers.

    With `sum_ptr` (and `other_sum_ptr`, where both are wanted) the programs add up their shares as
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
        mean = tl.load(mean_ptr + row, mask=in_rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=in_rows, other=0.0)
        # Beyond the row it is not 0, but g is, and with it everything that is summed.
        xhat = (x.to(tl.float32) - mean[:, None]) * rstd[:, None]
        g = g.to(tl.float32)
        if NEED_DB:
            db += g
        if NEED_DW:
            dw += g * xhat
        if NEED_DX:
            if w_ptr is not None:
                # In the loop: it comes out of L1, and registers are what this kernel is short of.
                w = tl.load(w_ptr + col, mask=in_row, other=0.0)
                g = g * w.to(tl.float32)[None, :]
            mean_g = tl.sum(g, axis=1) / hidden
            mean_gx = tl.sum(g * xhat, axis=1) / hidden
            dx = (g - mean_g[:, None] - xhat * mean_gx[:, None]) * rstd[:, None]
            dx_ptrs = dx_ptr + (row * hidden)[:, None] + col[None, :]
            tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        tl.store(partial_ptr + program.to(tl.int64) * hidden + col, tl.sum(dw, axis=0), mask=in_row)
    if NEED_DB:
        partial_row = program + (programs if NEED_DW else 0)
        tl.store(
            partial_ptr + partial_row.to(tl.int64) * hidden + col, tl.sum(db, axis=0), mask=in_row
        )
    if sum_ptr is not None:
        sum_together(partial_ptr, sum_ptr, other_sum_ptr, hidden, SUM_ROWS, SUM_BLOCK)


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
    """mean(w * g) and mean(w * g * xhat) of one row of any length."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
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
        sums += g
        products += g * (x - mean)
    rstd = tl.load(rstd_ptr + row)
    tl.store(means_ptr + row * 2, tl.sum(sums, axis=0) / hidden)
    tl.store(means_ptr + row * 2 + 1, tl.sum(products, axis=0) * rstd / hidden)


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
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program owns BLOCK columns of every `row_splits`-th row, the means being known."""
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
        mask = in_row & in_rows
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + col, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=in_rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=in_rows, other=0.0)
        xhat = (x - mean) * rstd
        if NEED_DB:
            db += g
        if NEED_DW:
            dw += g * xhat
        if NEED_DX:
            mean_g = tl.load(means_ptr + row * 2, mask=in_rows, other=0.0)
            mean_gx = tl.load(means_ptr + row * 2 + 1, mask=in_rows, other=0.0)
            if w_ptr is not None:
                g = g * w.to(tl.float32)
            dx = (g - mean_g - xhat * mean_gx) * rstd
            tl.store(dx_ptr + row * hidden + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        tl.store(partial_ptr + split.to(tl.int64) * hidden + col, dw, mask=in_row)
    if NEED_DB:
        partial_row = split + (row_splits if NEED_DW else 0)
        tl.store(partial_ptr + partial_row.to(tl.int64) * hidden + col, db, mask=in_row)


# Rows that are too long for one program, split over a group of programs that wait for one another:
# rows.py says how. Two numbers of each row are exchanged.


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["rows", "splits", "steps"])
def _forward_split_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    words_ptr,
    rows,
    hidden,
    x_stride,
    eps,
    splits,
    steps,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    RING: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A group of `splits` programs takes the mean and squares of a row a step, and writes the one
    before.

    The variance is that of the parts' own means, and of the parts around them (Chan, Golub and
    LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
    """
    groups = tl.num_programs(0) // splits
    group = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    means_ptr = words_ptr + group * (2 * RING * SLOTS)
    squares_ptr = means_ptr + RING * SLOTS
    col = split * BLOCK + tl.arange(0, BLOCK)
    in_row = col < hidden
    own = tl.minimum(BLOCK, hidden - split * BLOCK)
    slot = tl.arange(0, SLOTS)
    sizes = tl.maximum(0, tl.minimum(BLOCK, hidden - slot * BLOCK)).to(tl.float32)
    if w_ptr is not None:
        w = tl.load(w_ptr + col, mask=in_row, other=0.0)
    if b_ptr is not None:
        b = tl.load(b_ptr + col, mask=in_row, other=0.0)
    last_x = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        row = (group + step * groups).to(tl.int64)
        x = tl.load(x_ptr + row * x_stride + col, mask=in_row & (row < rows), other=0.0)
        own_mean = tl.sum(x.to(tl.float32), axis=0) / own
        difference = tl.where(in_row, x.to(tl.float32) - own_mean, 0.0)
        publish(means_ptr, step, split, own_mean, SLOTS, RING)
        publish(squares_ptr, step, split, tl.sum(difference * difference, axis=0), SLOTS, RING)

        means = gather_shares(means_ptr, step - 1, splits, SLOTS, RING)
        squares = gather_shares(squares_ptr, step - 1, splits, SLOTS, RING)
        mean = tl.sum(sizes * means, axis=0) / hidden
        off = means - mean
        rstd = tl.rsqrt(tl.sum(squares + sizes * off * off, axis=0) / hidden + eps)
        row -= groups
        y = (last_x.to(tl.float32) - mean) * rstd
        if w_ptr is not None:
            y = y * w.to(tl.float32)
        if b_ptr is not None:
            y = y + b.to(tl.float32)
        valid = (row >= 0) & (row < rows)
        tl.store(y_ptr + row * hidden + col, y.to(y_ptr.dtype.element_ty), mask=in_row & valid)
        tl.store(mean_ptr + row, mean, mask=valid & (split == 0))
        tl.store(rstd_ptr + row, rstd, mask=valid & (split == 0))
        last_x = x


@triton.jit(do_not_specialize=["rows", "splits", "steps"])
def _backward_split_kernel(
    g_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    words_ptr,
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
    RING: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A group of `splits` programs reduces a row a step, and writes dx of the one before."""
    groups = tl.num_programs(0) // splits
    group = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    sums_ptr = words_ptr + group * (2 * RING * SLOTS)
    products_ptr = sums_ptr + RING * SLOTS
    col = split * BLOCK + tl.arange(0, BLOCK)
    in_row = col < hidden
    if w_ptr is not None:
        w = tl.load(w_ptr + col, mask=in_row, other=0.0)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    last_x = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
    last_g = tl.zeros([BLOCK], g_ptr.dtype.element_ty)
    last_mean = 0.0
    last_rstd = 0.0
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        row = (group + step * groups).to(tl.int64)
        in_rows = row < rows
        mask = in_row & in_rows
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
        g = tl.load(g_ptr + row * g_stride + col, mask=mask, other=0.0)
        mean = tl.load(mean_ptr + row, mask=in_rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=in_rows, other=0.0)
        # Beyond the row it is not 0, but g is, and with it everything that is summed.
        xhat = (x.to(tl.float32) - mean) * rstd
        wg = g.to(tl.float32)
        if NEED_DB:
            db += wg
        if NEED_DW:
            dw += wg * xhat
        if w_ptr is not None:
            wg = wg * w.to(tl.float32)
        wg_sum, product_sum = tl.reduce((wg, wg * xhat), axis=0, combine_fn=_add_both)
        publish(sums_ptr, step, split, wg_sum / hidden, SLOTS, RING)
        publish(products_ptr, step, split, product_sum / hidden, SLOTS, RING)

        mean_g = gather(sums_ptr, step - 1, splits, SLOTS, RING)
        mean_gx = gather(products_ptr, step - 1, splits, SLOTS, RING)
        row -= groups
        xhat = (last_x.to(tl.float32) - last_mean) * last_rstd
        wg = last_g.to(tl.float32)
        if w_ptr is not None:
            wg = wg * w.to(tl.float32)
        dx = (wg - mean_g - xhat * mean_gx) * last_rstd
        mask = in_row & (row >= 0) & (row < rows)
        tl.store(dx_ptr + row * hidden + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        last_x = x
        last_g = g
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


@functools.lru_cache(maxsize=1024)
def _forward_tile(hidden: int, itemsize: int) -> Tile:
    block = max(power_of_2(hidden), MIN_BLOCK)
    # Smaller programs than RMSNorm's: there are two reductions to wait for. 64 bytes a thread.
    rows = max(1, 4096 // itemsize // block)
    return Tile(rows, block, rows * block * itemsize // 2048)


def _chunk(itemsize: int) -> Tile:
    return Tile(1, 16384 // itemsize, 32)


@functools.lru_cache(maxsize=1024)
def _backward_tile(hidden: int, itemsize: int) -> Tile:
    block = max(power_of_2(hidden), MIN_BLOCK)
    rows = max(1, BACKWARD_ROW_BYTES // itemsize // block)
    return Tile(rows, block, 8, stages=3)


def _forward_split(itemsize: int) -> Tile:
    return Tile(1, 8192 // itemsize, 4, per_sm=3, stages=3)


def _backward_split(itemsize: int) -> Tile:
    return Tile(1, 4096 // itemsize, 4, per_sm=3, stages=3)


# Longer rows are split over groups of programs: dw and db of more take all of a program's
# registers, and loading ahead stops.
BACKWARD_ROW_BYTES = 16 * 1024


def _plan_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    rows: int,
    hidden: int,
    x_stride: int,
    eps: float,
    processors: int,
    can_wait: bool,
) -> Launch:
    """The launch of a forward. `can_wait`: programs may wait for one another (not interpreted)."""
    itemsize = x.element_size()
    tensors = (x, weight, bias, y, mean, rstd)
    if hidden * itemsize <= WHOLE_ROW_BYTES:
        tile = _forward_tile(hidden, itemsize)
        return Launch(
            _forward_rows_kernel,
            ceil_div(rows, tile.rows),
            (*tensors, rows, hidden, x_stride, eps),
            {
                "ROWS": tile.rows,
                "BLOCK": tile.block,
                "MASK_ROWS": tile.rows > 1,
                "MASK_COLS": hidden < tile.block,
                # Beside longer rows they take the registers of other programs, which is slower.
                "EARLY": tile.block * itemsize <= 8192,
            },
            tile.num_warps,
        )
    split = None
    if can_wait and hidden * itemsize > L1_ROW_BYTES:
        split = split_rows(_forward_split(itemsize), rows, hidden, processors)
    if split is not None:
        words = split.words(x.device, numbers=2)
        steps = ceil_div(rows, split.groups)
        return Launch(
            _forward_split_kernel,
            split.groups * split.splits,
            (*tensors, words, rows, hidden, x_stride, eps, split.splits, steps),
            split_constexprs(split),
            split.tile.num_warps,
            split_options(split),
        )
    tile = _chunk(itemsize)
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


def _plan_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dx: torch.Tensor | None,
    dw: torch.Tensor | None,
    db: torch.Tensor | None,
    rows: int,
    hidden: int,
    g_stride: int,
    x_stride: int,
    processors: int,
    can_wait: bool,
) -> list[Launch]:
    """The launches of a backward, in the stream's order. Its temporaries are allocated here.

    The narrowest rows are computed without fused multiply-add. In a row of one element dx is 0, as
    w * g is its own mean, and native's is; a fused w * g - mean is instead what rounding took off
    w * g, times rstd of up to 1 / sqrt(eps).
    """
    itemsize = x.element_size()
    inputs = (g, x, weight, mean, rstd)
    shape = (rows, hidden, g_stride, x_stride)
    flags = {"NEED_DX": dx is not None, "NEED_DW": dw is not None, "NEED_DB": db is not None}
    totals = [total for total in (dw, db) if total is not None]

    def partial_sums(partials: int) -> torch.Tensor | None:
        if not totals:
            return None
        shape = (len(totals), partials, hidden)
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    launches: list[Launch] = []
    split = None
    if can_wait and dx is not None:
        split = split_rows(_backward_split(itemsize), rows, hidden, processors)
    if hidden * itemsize <= BACKWARD_ROW_BYTES:
        tile = _backward_tile(hidden, itemsize)
        tiles = ceil_div(rows, tile.rows)
        programs = min(processors * tile.per_sm, tiles)
        partial = partial_sums(programs)
        together = can_wait and bool(totals) and meet(rows, hidden, programs)
        to_sum = (*totals, None, None) if together else (None, None)
        launches.append(
            Launch(
                _backward_rows_kernel,
                programs,
                (*inputs, dx, partial, *to_sum[:2], *shape, ceil_div(tiles, programs)),
                {
                    **flags,
                    "ROWS": tile.rows,
                    "BLOCK": tile.block,
                    "STAGES": tile.stages,
                    **together_constexprs(hidden, programs, together),
                },
                tile.num_warps,
                {
                    "maxnreg": tile.registers,
                    "enable_fp_fusion": tile.block > MIN_BLOCK,
                    "launch_cooperative_grid": together,
                },
            )
        )
        if together:
            return launches
    elif split is not None:
        partial = partial_sums(split.groups)
        words = split.words(x.device, numbers=2)
        steps = ceil_div(rows, split.groups)
        launches.append(
            Launch(
                _backward_split_kernel,
                split.groups * split.splits,
                (*inputs, dx, partial, words, *shape, split.splits, steps),
                {
                    "NEED_DW": dw is not None,
                    "NEED_DB": db is not None,
                    **split_constexprs(split),
                },
                split.tile.num_warps,
                split_options(split),
            )
        )
    else:
        tile = _backward_split(itemsize)
        means = None
        if dx is not None:
            means = torch.empty((rows, 2), dtype=torch.float32, device=x.device)
            launches.append(
                Launch(
                    _row_means_kernel,
                    rows,
                    (*inputs, means, hidden, g_stride, x_stride),
                    {"BLOCK": tile.block, "CHUNKS": _chunks(hidden, tile)},
                    tile.num_warps,
                )
            )
        splits = ceil_div(hidden, tile.block)
        walkers = max(1, min(rows, processors * 4 // splits))
        partial = partial_sums(walkers)
        launches.append(
            Launch(
                _backward_columns_kernel,
                walkers * splits,
                (*inputs, means, dx, partial, *shape, walkers, ceil_div(rows, walkers)),
                {**flags, "BLOCK": tile.block},
                tile.num_warps,
            )
        )
    if partial is not None:
        launches.append(plan_sum(partial if len(totals) == 2 else partial[0], *totals))
    return launches


def configurations(processors: int = 132) -> Iterator[Launch]:
    """The launches that there are, on meta tensors, to be compiled for any architecture.

    Most power-of-two blocks in 16 bits, the longer ones in 32, and at one size each: no weight, no
    bias, one gradient alone, unaligned rows.
    """
    for log2 in (4, 7, *range(10, 16)):
        yield from _configuration(torch.bfloat16, 1 << log2, processors)
    for hidden in (1024, 8192, 16384):
        yield from _configuration(torch.float32, hidden, processors)
    for hidden in (4096, 8192, 32768):
        yield from _configuration(torch.float16, hidden, processors)
        yield from _configuration(torch.bfloat16, hidden - 1, processors)
        yield from _configuration(torch.bfloat16, hidden, processors, needs=(True, False, False))
        yield from _configuration(torch.bfloat16, hidden, processors, needs=(False, True, True))
        yield from _configuration(torch.bfloat16, hidden, processors, has_bias=False)
        yield from _configuration(
            torch.bfloat16, hidden, processors, needs=(True, False, False), has_weight=False
        )
    # As where more programs would have to wait for one another than run at once.
    for hidden in (32768, 131072):
        yield from _configuration(torch.bfloat16, hidden, processors, can_wait=False)
    yield from _configuration(torch.bfloat16, 131072, processors)
    # Few programs that add up their sums together, and more than is added up so.
    yield from _configuration(torch.bfloat16, 4096, processors, rows=8)
    yield from _configuration(torch.bfloat16, 1024, processors, rows=8192)


def _configuration(
    dtype: torch.dtype,
    hidden: int,
    processors: int,
    needs: tuple[bool, bool, bool] = (True, True, True),
    has_weight: bool = True,
    has_bias: bool = True,
    can_wait: bool = True,
    rows: int = 1024,
) -> Iterator[Launch]:
    x = torch.empty(rows, hidden, dtype=dtype, device="meta")
    weight = torch.empty(hidden, dtype=dtype, device="meta") if has_weight else None
    bias = torch.empty(hidden, dtype=dtype, device="meta") if has_bias and has_weight else None
    stat = torch.empty(rows, 1, dtype=torch.float32, device="meta")
    if all(needs) or not has_weight:
        yield _plan_forward(
            x,
            weight,
            bias,
            x,
            stat,
            stat,
            rows,
            hidden,
            hidden,
            1e-6,
            processors,
            can_wait=can_wait,
        )
    dx, dw, db = (
        each if need else None for each, need in zip((x, weight, bias), needs, strict=True)
    )
    yield from _plan_backward(
        x,
        x,
        weight,
        stat,
        stat,
        dx,
        dw,
        db,
        rows,
        hidden,
        hidden,
        hidden,
        processors,
        can_wait=can_wait,
    )


# --------------------------------------------------------------------------------------------------
# The ops
# --------------------------------------------------------------------------------------------------


def layer_norm_forward(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LayerNorm over the trailing dimensions.

    The signature, the formula and the results are those of ``aten::native_layer_norm``.

    Args:
        input: ``[*outer, *normalized_shape]``, float32, float16 or bfloat16, any strides.
        normalized_shape: the sizes of the trailing dimensions to normalise over; not empty.
        weight: ``normalized_shape``, the dtype of ``input``, or None.
        bias: likewise.
        eps: added to the variance.

    Returns:
        The output, contiguous, in the shape and dtype of ``input``; and the mean and ``rstd``,
        float32, ``[*outer, 1, ..., 1]`` with as many dimensions as ``input``, for the backward.
    """
    rows, hidden = fold(input, normalized_shape)
    outer = input.shape[: input.dim() - len(normalized_shape)]
    stat_shape = (*outer, *(1 for _ in normalized_shape))
    output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    mean = torch.empty(stat_shape, dtype=torch.float32, device=input.device)
    rstd = torch.empty(stat_shape, dtype=torch.float32, device=input.device)
    if rows:
        x, x_stride = as_rows(input, rows, hidden)
        weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
        _plan_forward(
            x,
            weight,
            bias,
            output,
            mean,
            rstd,
            rows,
            hidden,
            x_stride,
            float(eps),
            multiprocessors(x.device),
            can_wait=x.is_cuda,
        )()
    return output, mean, rstd


def layer_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of `layer_norm_forward` with respect to ``input``, ``weight`` and ``bias``.

    The signature, the formula and the results are those of ``aten::native_layer_norm_backward``.
    The gradients of weight and bias are summed in float32 in a fixed order: the same bits on every
    run on one kind of device.

    Args:
        grad_out: the shape and dtype of ``input``, any strides, expanded tensors included.
        input: ``[*outer, *normalized_shape]``, float32, float16 or bfloat16, any strides.
        normalized_shape: as in the forward.
        mean: what the forward returned, float32, one value a row.
        rstd: likewise.
        weight: as in the forward.
        bias: as in the forward; its values don't matter.
        output_mask: which of the three gradients is wanted.

    Returns:
        The gradients, contiguous, like what they are gradients of; None for one that is masked off
        or whose tensor is None.
    """
    rows, hidden = fold(input, normalized_shape)
    wanted = (
        output_mask[0],
        output_mask[1] and weight is not None,
        output_mask[2] and bias is not None,
    )
    grad_input = grad_weight = grad_bias = None
    if wanted[0]:
        grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    allocate = torch.empty if rows else torch.zeros
    if wanted[1]:
        assert weight is not None
        grad_weight = allocate(weight.shape, dtype=weight.dtype, device=weight.device)
    if wanted[2]:
        assert bias is not None
        grad_bias = allocate(bias.shape, dtype=bias.dtype, device=bias.device)
    if rows and any(wanted):
        g, g_stride = as_rows(grad_out, rows, hidden)
        x, x_stride = as_rows(input, rows, hidden)
        for launch in _plan_backward(
            g,
            x,
            None if weight is None else weight.contiguous(),
            mean.contiguous(),
            rstd.contiguous(),
            grad_input,
            grad_weight,
            grad_bias,
            rows,
            hidden,
            g_stride,
            x_stride,
            multiprocessors(x.device),
            can_wait=x.is_cuda,
        ):
            launch()
    return grad_input, grad_weight, grad_bias
