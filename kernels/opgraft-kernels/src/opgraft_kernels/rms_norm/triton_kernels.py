"""RMSNorm in Triton: the kernels behind ``aten::_fused_rms_norm`` and its backward.

With ``rows x hidden`` the input seen as a matrix, and all arithmetic in float32::

    rstd = rsqrt(mean(x * x) + eps)                       one value a row
    y    = x * rstd * w
    dx   = rstd * (w * g - xhat * mean(w * g * xhat))     xhat = x * rstd
    dw   = sum over rows of g * xhat

(Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; the backward is its derivative.)

Both directions are bound by memory: the forward has to read x and write y, the backward to read x
and g and to write dx, once each. Everything here serves that:

* a row is read from device memory once. It stays in registers between its reduction and its use;
  one that is too long for them is read again out of L1, or split over programs that exchange their
  sums;
* ``dw`` is summed in float32, in registers, by as many programs as the device runs at once, which
  walk over the rows. Each writes one row of partial sums, and the same programs or those of a
  second kernel add those up, in a fixed order: no atomics on floats, the same bits on every run;
* ``hidden`` is a run-time integer under a power-of-two block, so a new hidden size compiles a
  kernel only when it needs another block or loses its divisibility by 16 (which decides whether
  loads are 16 bytes wide). A new number of rows compiles no forward, and a backward only where it
  changes by whom, and in which of three ways, the partial sums are added up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from opgraft_kernels.rows import (
    ALONE,
    L1_ROW_BYTES,
    MIN_BLOCK,
    WHOLE_ROW_BYTES,
    Launch,
    Tile,
    as_rows,
    ceil_div,
    fold,
    gather,
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

__all__ = [
    "Launch",
    "configurations",
    "rms_norm_backward",
    "rms_norm_forward",
]


# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def _forward_rows_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    rstd_ptr,
    rows,
    hidden,
    x_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLS: tl.constexpr,
):
    """A program normalises a tile of ROWS whole rows, which stays in registers.

    MASK_ROWS, MASK_COLS: the tile may hold more rows, or columns, than there are. Where it does
    not, masks would cost some percent of the bandwidth.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    x_ptrs = x_ptr + (row * x_stride)[:, None] + col[None, :]
    y_ptrs = y_ptr + (row * hidden)[:, None] + col[None, :]
    in_row = col < hidden
    mask = (row < rows)[:, None]
    if MASK_COLS:
        mask = mask & in_row[None, :]
    x = load_if(x_ptrs, mask, MASK_ROWS or MASK_COLS).to(tl.float32)
    if HAS_WEIGHT:
        # While x is on its way: after the reduction it would be waited for once more.
        w = load_if(w_ptr + col, in_row, MASK_COLS)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / hidden + eps)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        y = y * w.to(tl.float32)[None, :]
    store_if(y_ptrs, y.to(y_ptr.dtype.element_ty), mask, MASK_ROWS or MASK_COLS)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _forward_chunks_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    rstd_ptr,
    hidden,
    x_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """A program reads a row that is too long for registers twice, the second time from cache."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    y_row = y_ptr + row * hidden
    block = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for chunk in range(CHUNKS):
        col = chunk * BLOCK + block
        x = tl.load(x_row + col, mask=col < hidden, other=0.0, eviction_policy="evict_last")
        x = x.to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / hidden + eps)
    tl.store(rstd_ptr + row, rstd)
    for chunk in range(CHUNKS):
        # Backwards: what was read last is the likeliest to be in cache still.
        col = (CHUNKS - 1 - chunk) * BLOCK + block
        mask = col < hidden
        x = tl.load(x_row + col, mask=mask, other=0.0, eviction_policy="evict_first")
        y = x.to(tl.float32) * rstd
        if HAS_WEIGHT:
            w = tl.load(w_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
            y = y * w.to(tl.float32)
        tl.store(y_row + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "steps"])
def _backward_rows_kernel(
    g_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    dw_ptr,
    rows,
    hidden,
    g_stride,
    x_stride,
    steps,
    HAS_WEIGHT: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_BLOCK: tl.constexpr,
):
    """A program walks over tiles of ROWS whole rows, a grid apart, its share of dw in registers.

    With `dw_ptr` the programs add up their shares as well.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK)
    in_row = col < hidden
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        row = (program + step * programs).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        in_rows = row < rows
        mask = in_rows[:, None] & in_row[None, :]
        x = tl.load(x_ptr + (row * x_stride)[:, None] + col[None, :], mask=mask, other=0.0)
        g = tl.load(g_ptr + (row * g_stride)[:, None] + col[None, :], mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=in_rows, other=0.0)
        g = g.to(tl.float32)
        xhat = x.to(tl.float32) * rstd[:, None]
        if NEED_DW:
            dw += g * xhat
        if NEED_DX:
            if HAS_WEIGHT:
                # In the loop: it comes out of L1, and registers are what this kernel is short of.
                w = tl.load(w_ptr + col, mask=in_row, other=0.0)
                g = g * w.to(tl.float32)[None, :]
            mean = tl.sum(g * xhat, axis=1) / hidden
            dx = (g - xhat * mean[:, None]) * rstd[:, None]
            dx_ptrs = dx_ptr + (row * hidden)[:, None] + col[None, :]
            tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        partial = tl.sum(dw, axis=0).to(partial_ptr.dtype.element_ty)
        tl.store(partial_ptr + program.to(tl.int64) * hidden + col, partial, mask=in_row)
        if dw_ptr is not None:
            sum_together(partial_ptr, dw_ptr, None, hidden, SUM_ROWS, SUM_BLOCK)


@triton.jit
def _row_mean_kernel(
    g_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    mean_ptr,
    hidden,
    g_stride,
    x_stride,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """mean(w * g * xhat) of one row of any length, for `_backward_columns_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    products = tl.zeros([BLOCK], tl.float32)
    for chunk in range(CHUNKS):
        col = chunk * BLOCK + block
        mask = col < hidden
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + col, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            w = tl.load(w_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
            g = g * w.to(tl.float32)
        products += g * x
    rstd = tl.load(rstd_ptr + row)
    tl.store(mean_ptr + row, tl.sum(products, axis=0) * rstd / hidden)


@triton.jit(do_not_specialize=["rows", "row_splits", "steps"])
def _backward_columns_kernel(
    g_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    mean_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    hidden,
    g_stride,
    x_stride,
    row_splits,
    steps,
    HAS_WEIGHT: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program owns BLOCK columns of every `row_splits`-th row, the means being known."""
    split = tl.program_id(0) % row_splits
    col = (tl.program_id(0) // row_splits) * BLOCK + tl.arange(0, BLOCK)
    in_row = col < hidden
    if HAS_WEIGHT:
        w = tl.load(w_ptr + col, mask=in_row, other=0.0)
    dw = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        row = (split + step * row_splits).to(tl.int64)
        mask = in_row & (row < rows)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + col, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        xhat = x * rstd
        if NEED_DW:
            dw += g * xhat
        if NEED_DX:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
            if HAS_WEIGHT:
                g = g * w.to(tl.float32)
            dx = (g - xhat * mean) * rstd
            tl.store(dx_ptr + row * hidden + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        tl.store(partial_ptr + split.to(tl.int64) * hidden + col, dw, mask=in_row)


@triton.jit(do_not_specialize=["rows", "splits", "steps"])
def _forward_split_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    rstd_ptr,
    words_ptr,
    rows,
    hidden,
    x_stride,
    eps,
    splits,
    steps,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    RING: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A group of `splits` programs reduces a row a step, and writes the one before."""
    groups = tl.num_programs(0) // splits
    group = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    words_ptr += group * (RING * SLOTS)
    col = split * BLOCK + tl.arange(0, BLOCK)
    in_row = col < hidden
    if HAS_WEIGHT:
        w = tl.load(w_ptr + col, mask=in_row, other=0.0)
    last_x = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        row = (group + step * groups).to(tl.int64)
        x = tl.load(x_ptr + row * x_stride + col, mask=in_row & (row < rows), other=0.0)
        squares = x.to(tl.float32) * x.to(tl.float32)
        publish(words_ptr, step, split, tl.sum(squares, axis=0) / hidden, SLOTS, RING)

        rstd = tl.rsqrt(gather(words_ptr, step - 1, splits, SLOTS, RING) + eps)
        row -= groups
        y = last_x.to(tl.float32) * rstd
        if HAS_WEIGHT:
            y = y * w.to(tl.float32)
        valid = (row >= 0) & (row < rows)
        tl.store(y_ptr + row * hidden + col, y.to(y_ptr.dtype.element_ty), mask=in_row & valid)
        tl.store(rstd_ptr + row, rstd, mask=valid & (split == 0))
        last_x = x


@triton.jit(do_not_specialize=["rows", "splits", "steps"])
def _backward_split_kernel(
    g_ptr,
    x_ptr,
    w_ptr,
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
    HAS_WEIGHT: tl.constexpr,
    NEED_DW: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    RING: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A group of `splits` programs reduces a row a step, and writes dx of the one before."""
    groups = tl.num_programs(0) // splits
    group = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    words_ptr += group * (RING * SLOTS)
    col = split * BLOCK + tl.arange(0, BLOCK)
    in_row = col < hidden
    if HAS_WEIGHT:
        w = tl.load(w_ptr + col, mask=in_row, other=0.0)
    dw = tl.zeros([BLOCK], tl.float32)
    last_x = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
    last_g = tl.zeros([BLOCK], g_ptr.dtype.element_ty)
    last_rstd = 0.0
    for step in tl.range(0, steps + 1, num_stages=STAGES):
        row = (group + step * groups).to(tl.int64)
        mask = in_row & (row < rows)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
        g = tl.load(g_ptr + row * g_stride + col, mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        xhat = x.to(tl.float32) * rstd
        wg = g.to(tl.float32)
        if NEED_DW:
            dw += wg * xhat
        if HAS_WEIGHT:
            wg = wg * w.to(tl.float32)
        publish(words_ptr, step, split, tl.sum(wg * xhat, axis=0) / hidden, SLOTS, RING)

        mean = gather(words_ptr, step - 1, splits, SLOTS, RING)
        row -= groups
        xhat = last_x.to(tl.float32) * last_rstd
        wg = last_g.to(tl.float32)
        if HAS_WEIGHT:
            wg = wg * w.to(tl.float32)
        dx = (wg - xhat * mean) * last_rstd
        mask = in_row & (row >= 0) & (row < rows)
        tl.store(dx_ptr + row * hidden + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        last_x = x
        last_g = g
        last_rstd = rstd
    if NEED_DW:
        tl.store(partial_ptr + group.to(tl.int64) * hidden + col, dw, mask=in_row)


# --------------------------------------------------------------------------------------------------
# Launches: which kernel, over which grid, with which block
# --------------------------------------------------------------------------------------------------


# The tiles below are the fastest, or within 2% of it, of those tried on an H200 in bfloat16 at
# hidden sizes 128 to 131072, in bytes, so that float32 moves as many of them: 32 bytes of each
# tensor a thread, 64 for the forward's longer rows.


@functools.lru_cache(maxsize=1024)
def _forward_tile(hidden: int, itemsize: int) -> Tile:
    block = max(power_of_2(hidden), MIN_BLOCK)
    row = block * itemsize
    rows = 1 if row > 2048 else 8192 // row
    size = rows * row
    return Tile(rows, block, size // (1024 if size < 16384 else 2048))


def _forward_chunk(itemsize: int) -> Tile:
    return Tile(1, 16384 // itemsize, 32)


def _forward_split(itemsize: int) -> Tile:
    return Tile(1, 8192 // itemsize, 4, per_sm=4, stages=3)


@functools.lru_cache(maxsize=1024)
def _backward_tile(hidden: int, itemsize: int) -> Tile:
    block = max(power_of_2(hidden), MIN_BLOCK)
    if block * itemsize > 16384:
        # Nothing is left for loading ahead.
        return Tile(1, block, block * itemsize // 1024)
    rows = max(1, 16384 // itemsize // block)
    return Tile(rows, block, 8, stages=3)


def _backward_split(itemsize: int) -> Tile:
    return Tile(1, 8192 // itemsize, 8, per_sm=2, stages=3)


def _plan_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    y: torch.Tensor,
    rstd: torch.Tensor,
    rows: int,
    hidden: int,
    x_stride: int,
    eps: float,
    multiprocessors: int,
    can_wait: bool,
) -> Launch:
    """The launch of a forward. `can_wait`: programs may wait for one another (not interpreted)."""
    itemsize = x.element_size()
    flags: dict[str, Any] = {"HAS_WEIGHT": weight is not None}
    if hidden * itemsize <= WHOLE_ROW_BYTES:
        tile = _forward_tile(hidden, itemsize)
        return Launch(
            _forward_rows_kernel,
            ceil_div(rows, tile.rows),
            (x, weight, y, rstd, rows, hidden, x_stride, eps),
            {
                **flags,
                "ROWS": tile.rows,
                "BLOCK": tile.block,
                "MASK_ROWS": tile.rows > 1,
                "MASK_COLS": hidden < tile.block,
            },
            tile.num_warps,
        )
    split = None
    if can_wait and hidden * itemsize > L1_ROW_BYTES:
        split = split_rows(_forward_split(itemsize), rows, hidden, multiprocessors)
    if split is not None:
        steps = ceil_div(rows, split.groups)
        words = split.words(x.device)
        return Launch(
            _forward_split_kernel,
            split.groups * split.splits,
            (x, weight, y, rstd, words, rows, hidden, x_stride, eps, split.splits, steps),
            {**flags, **split_constexprs(split)},
            split.tile.num_warps,
            split_options(split),
        )
    tile = _forward_chunk(itemsize)
    return Launch(
        _forward_chunks_kernel,
        rows,
        (x, weight, y, rstd, hidden, x_stride, eps),
        {**flags, "BLOCK": tile.block, "CHUNKS": _chunks(hidden, tile)},
        tile.num_warps,
    )


def _chunks(hidden: int, tile: Tile) -> int:
    # A power of two, so that there are few to compile; a chunk beyond the row is masked off.
    return power_of_2(ceil_div(hidden, tile.block))


def _plan_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    dx: torch.Tensor | None,
    dw: torch.Tensor | None,
    rows: int,
    hidden: int,
    g_stride: int,
    x_stride: int,
    multiprocessors: int,
    can_wait: bool,
) -> list[Launch]:
    """The launches of a backward, in the stream's order. Its temporaries are allocated here."""
    itemsize = x.element_size()
    flags: dict[str, Any] = {"HAS_WEIGHT": weight is not None, "NEED_DW": dw is not None}
    shape = (rows, hidden, g_stride, x_stride)

    def partial_sums(partials: int) -> torch.Tensor | None:
        if dw is None:
            return None
        return torch.empty((partials, hidden), dtype=torch.float32, device=x.device)

    if hidden * itemsize <= WHOLE_ROW_BYTES:
        tile = _backward_tile(hidden, itemsize)
        tiles = ceil_div(rows, tile.rows)
        programs = min(multiprocessors * tile.per_sm, tiles)
        if rows * hidden <= ALONE:
            programs = 1
        # A single program's sums are dw itself, which saves small calls a launch.
        partial = dw if programs == 1 else partial_sums(programs)
        together = can_wait and dw is not None and meet(rows, hidden, programs)
        launches = [
            Launch(
                _backward_rows_kernel,
                programs,
                (
                    *(g, x, weight, rstd, dx, partial, dw if together else None),
                    *(*shape, ceil_div(tiles, programs)),
                ),
                {
                    **flags,
                    "NEED_DX": dx is not None,
                    "ROWS": tile.rows,
                    "BLOCK": tile.block,
                    "STAGES": tile.stages,
                    **together_constexprs(hidden, programs, together),
                },
                tile.num_warps,
                {"maxnreg": tile.registers, "launch_cooperative_grid": together},
            )
        ]
        if together:
            return launches
    else:
        tile = _backward_split(itemsize)
        split = None
        if can_wait and dx is not None:
            split = split_rows(tile, rows, hidden, multiprocessors)
        if split is not None:
            partial = partial_sums(split.groups)
            words = split.words(x.device)
            steps = ceil_div(rows, split.groups)
            launches = [
                Launch(
                    _backward_split_kernel,
                    split.groups * split.splits,
                    (g, x, weight, rstd, dx, partial, words, *shape, split.splits, steps),
                    {**flags, **split_constexprs(split)},
                    tile.num_warps,
                    split_options(split),
                )
            ]
        else:
            launches = []
            mean = None
            if dx is not None:
                mean = torch.empty(rows, dtype=torch.float32, device=x.device)
                launches.append(
                    Launch(
                        _row_mean_kernel,
                        rows,
                        (g, x, weight, rstd, mean, hidden, g_stride, x_stride),
                        {
                            "HAS_WEIGHT": weight is not None,
                            "BLOCK": tile.block,
                            "CHUNKS": _chunks(hidden, tile),
                        },
                        tile.num_warps,
                    )
                )
            splits = ceil_div(hidden, tile.block)
            walkers = max(1, min(rows, multiprocessors * 4 // splits))
            partial = partial_sums(walkers)
            steps = ceil_div(rows, walkers)
            launches.append(
                Launch(
                    _backward_columns_kernel,
                    walkers * splits,
                    (g, x, weight, rstd, mean, dx, partial, *shape, walkers, steps),
                    {**flags, "NEED_DX": dx is not None, "BLOCK": tile.block},
                    tile.num_warps,
                )
            )
    if dw is not None and partial is not dw:
        assert partial is not None
        launches.append(plan_sum(partial, dw))
    return launches


def configurations(multiprocessors: int = 132) -> Iterator[Launch]:
    """The launches that there are, on meta tensors, to be compiled for any architecture.

    Every power-of-two block in 16 and 32 bits, with weight and without, every pair of gradients,
    aligned rows and unaligned ones; one of each where combining them all brings nothing new.
    """
    hidden_sizes = [1 << log2 for log2 in range(4, 18)]
    for dtype in (torch.bfloat16, torch.float32):
        for hidden in hidden_sizes:
            yield from _configuration(dtype, hidden, multiprocessors)
    for hidden in (4096, 16384, 65536):
        yield from _configuration(torch.float16, hidden, multiprocessors)
        yield from _configuration(torch.bfloat16, hidden - 1, multiprocessors)
        yield from _configuration(torch.bfloat16, hidden, multiprocessors, has_weight=False)
        yield from _configuration(torch.bfloat16, hidden, multiprocessors, need_dx=False)
        yield from _configuration(torch.bfloat16, hidden, multiprocessors, need_dw=False)
    for hidden in (128, 4096):
        yield from _configuration(torch.bfloat16, hidden, multiprocessors, rows=1)
    # Few programs that add up their sums together, and more than is added up so.
    yield from _configuration(torch.bfloat16, 4096, multiprocessors, rows=8)
    yield from _configuration(torch.bfloat16, 1024, multiprocessors, rows=8192)
    # More than the programs that run at once can hold of one row.
    yield from _configuration(torch.bfloat16, 1 << 22, multiprocessors)


def _configuration(
    dtype: torch.dtype,
    hidden: int,
    multiprocessors: int,
    has_weight: bool = True,
    need_dx: bool = True,
    need_dw: bool = True,
    rows: int = 1024,
) -> Iterator[Launch]:
    x = torch.empty(rows, hidden, dtype=dtype, device="meta")
    weight = torch.empty(hidden, dtype=dtype, device="meta") if has_weight else None
    rstd = torch.empty(rows, 1, dtype=torch.float32, device="meta")
    if need_dx and need_dw:
        yield _plan_forward(
            x, weight, x, rstd, rows, hidden, hidden, 1e-6, multiprocessors, can_wait=True
        )
    yield from _plan_backward(
        x,
        x,
        weight,
        rstd,
        x if need_dx else None,
        weight if need_dw else None,
        rows,
        hidden,
        hidden,
        hidden,
        multiprocessors,
        can_wait=True,
    )


# --------------------------------------------------------------------------------------------------
# The ops
# --------------------------------------------------------------------------------------------------


def rms_norm_forward(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the trailing dimensions, ``input * rsqrt(mean(input ** 2) + eps) * weight``.

    The signature, the formula and the results are those of ``aten::_fused_rms_norm``.

    Args:
        input: ``[*outer, *normalized_shape]``, float32, float16 or bfloat16, any strides.
        normalized_shape: the sizes of the trailing dimensions to normalise over; not empty.
        weight: ``normalized_shape``, the dtype of ``input``, or None.
        eps: added to the mean. None is the epsilon of float32, whatever the input's dtype: the
            epsilon of the type that both of ATen's implementations, CPU and CUDA, accumulate in.

    Returns:
        The output, contiguous, in the shape and dtype of ``input``; and ``rstd``, float32,
        ``[*outer, 1, ..., 1]`` with as many dimensions as ``input``, for the backward.
    """
    rows, hidden = fold(input, normalized_shape)
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    outer = input.shape[: input.dim() - len(normalized_shape)]
    output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    rstd = torch.empty(
        (*outer, *(1 for _ in normalized_shape)), dtype=torch.float32, device=input.device
    )
    if rows:
        x, x_stride = as_rows(input, rows, hidden)
        if weight is not None:
            weight = weight.contiguous()
        _plan_forward(
            x,
            weight,
            output,
            rstd,
            rows,
            hidden,
            x_stride,
            float(eps),
            multiprocessors(x.device),
            can_wait=x.is_cuda,
        )()
    return output, rstd


def rms_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of `rms_norm_forward` with respect to ``input`` and ``weight``.

    The signature, the formula and the results are those of ``aten::_fused_rms_norm_backward``.
    ``grad_weight`` is summed in float32 in a fixed order, so it has the same bits on every run on
    one kind of device.

    Args:
        grad_out: the shape and dtype of ``input``, any strides, expanded tensors included.
        input: ``[*outer, *normalized_shape]``, float32, float16 or bfloat16, any strides.
        normalized_shape: as in the forward.
        rstd: what the forward returned, float32, one value a row.
        weight: as in the forward.
        output_mask: which of the two gradients is wanted.

    Returns:
        ``grad_input``, contiguous, like ``input``, and ``grad_weight``, like ``weight``; None for
        one that is masked off, and for ``grad_weight`` where there is no weight.
    """
    rows, hidden = fold(input, normalized_shape)
    need_dx, need_dw = output_mask[0], output_mask[1] and weight is not None
    grad_input = grad_weight = None
    if need_dx:
        grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    if need_dw:
        assert weight is not None
        allocate = torch.empty if rows else torch.zeros
        grad_weight = allocate(weight.shape, dtype=weight.dtype, device=weight.device)
    if rows and (need_dx or need_dw):
        g, g_stride = as_rows(grad_out, rows, hidden)
        x, x_stride = as_rows(input, rows, hidden)
        if weight is not None:
            weight = weight.contiguous()
        for launch in _plan_backward(
            g,
            x,
            weight,
            rstd.contiguous(),
            grad_input,
            grad_weight,
            rows,
            hidden,
            g_stride,
            x_stride,
            multiprocessors(x.device),
            can_wait=x.is_cuda,
        ):
            launch()
    return grad_input, grad_weight
