"""The backwards of both norms in Triton; `triton_kernels` says what serves the memory's speed.

A gradient that is not wanted is None, and compiles to nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opgraft import triton_utils
from opgraft_kernels.norms.triton_tiles import (
    add_pairs,
    group_slots,
    load_parameters,
    load_statistics,
    load_tile,
    pointers,
    scale_and_shift,
    standardize,
    store_tile,
    sum_pairs_of_rows,
    sum_rows,
)
from opgraft_kernels.rows import (
    begin_program,
    collect_sum,
    mask_if,
    mask_of,
    multiple_of,
    publish,
    sum_after_barrier,
)

__all__ = [
    "backward_columns_kernel",
    "backward_pieces_kernel",
    "backward_rows_kernel",
    "backward_split_kernel",
    "row_means_kernel",
]

# In the interpreter there is no inline assembly.
_IS_INTERPRETED = tl.constexpr(triton_utils.interpreted())


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


@triton.jit(do_not_specialize=["rows", "hidden", "g_stride", "x_stride", "steps"])
def backward_rows_kernel(
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
    EARLY: tl.constexpr,
):
    """A program walks over tiles of ROWS whole rows, a grid apart, with its part of dw and db in
    registers. A row is BLOCK columns, and TAIL more where that is not 0.

    With `sum_ptr` (and `other_sum_ptr`, where both are wanted) the programs add up their parts as
    well.
    """
    begin_program(EARLY)
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
        mask = mask_of(in_rows, col, hidden, True)
        x = tl.load(pointers(x_ptr, row, x_stride, col), mask=mask, other=0.0)
        g = tl.load(pointers(g_ptr, row, g_stride, col), mask=mask, other=0.0).to(tl.float32)
        if TAIL:
            tail_mask = mask_of(in_rows, tail, hidden, True)
            x_tail = tl.load(pointers(x_ptr, row, x_stride, tail), mask=tail_mask, other=0.0)
            g_tail = tl.load(pointers(g_ptr, row, g_stride, tail), mask=tail_mask, other=0.0)
            g_tail = g_tail.to(tl.float32)
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, in_rows)
        xhat = standardize(x, mean_ptr, mean, rstd)
        if NEED_DB:
            db += g
        if NEED_DW:
            dw += g * xhat
        if TAIL:
            xhat_tail = standardize(x_tail, mean_ptr, mean, rstd)
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
                mean_gx, mean_g = sum_pairs_of_rows(products, gs, TOGETHER)
            else:
                mean_gx = sum_rows(products, TOGETHER)
                if mean_ptr is not None:
                    mean_g = sum_rows(gs, TOGETHER)
            mean_gx = mean_gx / hidden
            if mean_ptr is not None:
                mean_g = mean_g / hidden
            dx = _dx_of_tile(g, mean_ptr, mean_g, xhat, mean_gx, rstd).to(dx_ptr.dtype.element_ty)
            tl.store(pointers(dx_ptr, row, hidden, col), dx, mask=mask)
            if TAIL:
                dx = _dx_of_tile(g_tail, mean_ptr, mean_g, xhat_tail, mean_gx, rstd)
                dx = dx.to(dx_ptr.dtype.element_ty)
                tl.store(pointers(dx_ptr, row, hidden, tail), dx, mask=tail_mask)
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
def backward_pieces_kernel(
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
    EARLY: tl.constexpr,
):
    """As `backward_rows_kernel`, of rows of BLOCKS equal pieces, of which only the last is masked.

    The weight stays in registers. SPARING: it is loaded ahead for each row, and nothing of a row
    stays there in float32 until its sums are known.
    """
    begin_program(EARLY)
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
            x = load_tile(
                x_ptr, row, rows, x_stride, col, hidden, MASK_ROWS, MASK_COLS and i == LAST
            )
            g = load_tile(
                g_ptr, row, rows, g_stride, col, hidden, MASK_ROWS, MASK_COLS and i == LAST
            )
            xs += (x,)
            gs += (g,)
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, row < rows)
        if dx_ptr is not None:
            sums = tl.zeros([ROWS, BLOCK], tl.float32)
            products = tl.zeros([ROWS, BLOCK], tl.float32)
            for i in tl.static_range(BLOCKS):
                if SPARING:
                    w = _load_block(w_ptr, i, hidden, BLOCK, MASK_COLS and i == LAST)
                else:
                    w = ws[i]
                wg = scale_and_shift(gs[i].to(tl.float32), w_ptr, w, None, 0.0)
                sums += wg
                products += wg * standardize(xs[i], mean_ptr, mean, rstd)
            if mean_ptr is not None:
                mean_g, mean_gx = tl.reduce((sums, products), axis=1, combine_fn=add_pairs)
                mean_g = mean_g / hidden * rstd
            else:
                mean_gx = tl.sum(products, axis=1)
            mean_gx = mean_gx / hidden * rstd
        new_dws, new_dbs = (), ()
        for i in tl.static_range(BLOCKS):
            dw, db = dws[i], dbs[i]
            xhat = standardize(_as_loaded(xs[i], SPARING), mean_ptr, mean, rstd)
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
                dx = scale_and_shift(g, w_ptr, w, None, 0.0) * rstd[:, None] - rest
                col = i * BLOCK + tl.arange(0, BLOCK)
                store_tile(dx_ptr, dx, row, rows, col, hidden, MASK_ROWS, MASK_COLS and i == LAST)
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
    w, _ = load_parameters(w_ptr, None, col, col < hidden, MASKED)
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
def row_means_kernel(
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
    EARLY: tl.constexpr,
):
    """mean(w * g), with a mean, and mean(w * g * xhat) of one row of any length, for
    `backward_columns_kernel`."""
    begin_program(EARLY)
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
def backward_columns_kernel(
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
    EARLY: tl.constexpr,
):
    """A program owns BLOCK columns of every `row_splits`-th row, the means being known."""
    begin_program(EARLY)
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
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, in_rows)
        xhat = standardize(x, mean_ptr, mean, rstd)
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
def backward_split_kernel(
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
    EARLY: tl.constexpr,
):
    """A group of `splits` programs reduces a row a step, and writes dx of the one before."""
    begin_program(EARLY)
    hidden = multiple_of(hidden, UNIT)
    g_stride = multiple_of(g_stride, UNIT)
    x_stride = multiple_of(x_stride, UNIT)
    groups = tl.num_programs(0) // splits
    group = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    sums_ptr, products_ptr = group_slots(slots_ptr, group, mean_ptr, SLOTS)
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
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, in_rows)
        xhat = standardize(x, mean_ptr, mean, rstd)
        wg = g.to(tl.float32)
        if NEED_DB:
            db += wg
        if NEED_DW:
            dw += wg * xhat
        if w_ptr is not None:
            wg = wg * w.to(tl.float32)
        if mean_ptr is not None:
            wg_sum, product_sum = tl.reduce((wg, wg * xhat), axis=0, combine_fn=add_pairs)
            publish(sums_ptr, step, split, wg_sum / hidden, SLOTS)
        else:
            product_sum = tl.sum(wg * xhat, axis=0)
        publish(products_ptr, step, split, product_sum / hidden, SLOTS)

        if mean_ptr is not None:
            mean_g = collect_sum(sums_ptr, step - 1, splits, SLOTS)
        mean_gx = collect_sum(products_ptr, step - 1, splits, SLOTS)
        row -= groups
        xhat = standardize(previous_x, mean_ptr, previous_mean, previous_rstd)
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
