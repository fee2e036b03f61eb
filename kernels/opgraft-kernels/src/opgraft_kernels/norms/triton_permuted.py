"""RMSNorm and LayerNorm in Triton of permuted inputs: rows whose elements are far apart.

``x.permute(0, 2, 3, 1)`` of images before a norm over their channels is such an input. Native
copies it first, by rows; a copy reads it once more and writes it. Here a program loads a tile of
rows that are neighbours in memory, column after column, and Triton turns it in shared memory
before it is written. `ops` says what is computed.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from opgraft_kernels.devices import multiprocessors
from opgraft_kernels.integers import ceil_div, power_of_2, unit_of
from opgraft_kernels.launches import Launch, contiguous
from opgraft_kernels.norms import ops, triton_kernels
from opgraft_kernels.norms.triton_forward import is_far_from_zero
from opgraft_kernels.norms.triton_tiles import (
    add_pairs,
    load_parameters,
    load_statistics,
    scale_and_shift,
    standardize,
)
from opgraft_kernels.rows import begin_program, load_if, multiple_of, store_if

__all__ = [
    "MAX_HIDDEN",
    "MAX_HIDDEN_BACKWARD",
    "MIN_HIDDEN",
    "layer_norm_backward",
    "layer_norm_forward",
    "plan_backward",
    "plan_forward",
    "rms_norm_backward",
    "rms_norm_forward",
]

#: The widths of rows of which a program holds several whole ones. A backward holds rows of the
#: gradient beside those of the input: wider ones do not fit its registers.
MIN_HIDDEN, MAX_HIDDEN, MAX_HIDDEN_BACKWARD = 16, 2048, 1024

# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------


@triton.jit
def _offsets(row, col, inner, strides, UNIT: tl.constexpr, ACROSS: tl.constexpr):
    """Where the elements of a tile are, by `Rows.strides`.

    UNIT elements are loaded at once: if ACROSS of as many rows, otherwise of a row.
    """
    outer_stride, inner_stride, col_stride = strides
    outer_stride = multiple_of(outer_stride, UNIT)
    if ACROSS:
        inner = multiple_of(inner, UNIT)
        col_stride = multiple_of(col_stride, UNIT)
    else:
        inner_stride = multiple_of(inner_stride, UNIT)
    rows = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    return rows[:, None] + col.to(tl.int64)[None, :] * col_stride


@triton.jit
def _offsets_of_gradient(
    row, col, inner, strides, UNIT: tl.constexpr, ACROSS: tl.constexpr, EVEN: tl.constexpr
):
    """`_offsets`; if EVEN of contiguous rows, all as far apart, which takes no division."""
    if EVEN:
        rows = row.to(tl.int64) * multiple_of(strides[1], UNIT)
        return rows[:, None] + col[None, :]
    else:
        return _offsets(row, col, inner, strides, UNIT, ACROSS)


@triton.jit
def _mask(row, rows, in_row, MASK_ROWS: tl.constexpr):
    mask = in_row[None, :]
    if MASK_ROWS:
        mask = mask & (row < rows)[:, None]
    return mask


@triton.jit
def _held_as(x, other, rows):
    """The tile `x`, in the threads that hold another one.

    Triton computes in the threads that loaded. Those of `x` hold a column of several rows, so that
    each row is spread over many warps: its sums take three times the instructions, and barriers.
    """
    return tl.where(rows < 0, other.to(x.dtype), x)  # never the other one, which Triton cannot know


@triton.jit(do_not_specialize=["rows", "hidden", "inner", "x_outer", "tiles"])
def _forward_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    hidden,
    inner,
    x_outer,
    x_inner,
    x_col,
    eps,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_HIDDEN: tl.constexpr,
    BY_ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program normalises tiles of ROWS rows of up to BLOCK columns, a grid apart.

    AHEAD: it loads the next tile before it computes. STAGES: `Walk.stages`.
    """
    begin_program(EARLY)
    MASKED: tl.constexpr = MASK_ROWS or MASK_COLS
    hidden = multiple_of(hidden, UNIT_HIDDEN)
    # Else Triton takes masks to end anywhere, and loads element by element.
    rows = multiple_of(rows, UNIT)
    share = 1.0 / hidden.to(tl.float32)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK)
    in_row = col < hidden
    w, b = load_parameters(w_ptr, b_ptr, col, in_row, MASK_COLS)
    x_strides = (x_outer, x_inner, x_col)
    if AHEAD:
        row = program * ROWS + tl.arange(0, ROWS)
        offsets = _offsets(row, col, inner, x_strides, UNIT, True)
        next_x = load_if(x_ptr + offsets, _mask(row, rows, in_row, MASK_ROWS), MASKED)
    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        # Of the last tile once more, where there is no next one.
        loaded_tile = tl.minimum(tile + programs, tiles - 1) if AHEAD else tile
        loaded_row = loaded_tile * ROWS + tl.arange(0, ROWS)
        offsets = _offsets(loaded_row, col, inner, x_strides, UNIT, True)
        loaded = load_if(x_ptr + offsets, _mask(loaded_row, rows, in_row, MASK_ROWS), MASKED)
        if AHEAD:
            x = next_x
            next_x = loaded
        else:
            x = loaded
        y_ptrs = y_ptr + (row.to(tl.int64) * hidden)[:, None] + col[None, :]
        if BY_ROWS:
            nothing = tl.load(y_ptrs, mask=(row < 0)[:, None] & in_row[None, :], other=0.0)
            x = _held_as(x, nothing, rows)
        x = x.to(tl.float32)
        if mean_ptr is not None:
            mean = tl.sum(x, axis=1) * share
            x = x - mean[:, None]
            if MASK_COLS:
                x = tl.where(in_row[None, :], x, 0.0)
            squares, rest = tl.reduce((x * x, x), axis=1, combine_fn=add_pairs)
            # What rounding took off the mean is in the sum of differences from it. Where the mean
            # is near zero, that sum's own rounding is as large.
            rest = tl.where(is_far_from_zero(mean, squares * share), rest * share, 0.0)
            rstd = tl.rsqrt(squares * share - rest * rest + eps)
            store_if(mean_ptr + row, mean + rest, row < rows, MASK_ROWS)
            y = x * rstd[:, None] - (rest * rstd)[:, None]
        else:
            rstd = tl.rsqrt(tl.sum(x * x, axis=1) * share + eps)
            y = x * rstd[:, None]
        store_if(rstd_ptr + row, rstd, row < rows, MASK_ROWS)
        y = scale_and_shift(y, w_ptr, w, b_ptr, b).to(y_ptr.dtype.element_ty)
        store_if(y_ptrs, y, _mask(row, rows, in_row, MASK_ROWS), MASKED)


@triton.jit
def _load_both(
    tile,
    g_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    in_row,
    col,
    inner,
    g_strides,
    x_strides,
    ROWS: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    UNIT_G: tl.constexpr,
    ACROSS_G: tl.constexpr,
    EVEN_G: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A tile of the gradient and of the input, and its rows' statistics."""
    row = tile * ROWS + tl.arange(0, ROWS)
    mask = _mask(row, rows, in_row, MASK_ROWS)
    x_offsets = _offsets(row, col, inner, x_strides, UNIT, True)
    g_offsets = _offsets_of_gradient(row, col, inner, g_strides, UNIT_G, ACROSS_G, EVEN_G)
    # In this order: it is in the threads of the last load that Triton computes.
    x = load_if(x_ptr + x_offsets, mask, MASKED)
    g = load_if(g_ptr + g_offsets, mask, MASKED)
    mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, row < rows)
    return x, g, mean, rstd


@triton.jit(do_not_specialize=["rows", "hidden", "inner", "g_outer", "x_outer", "tiles"])
def _backward_kernel(
    g_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    hidden,
    inner,
    g_outer,
    g_inner,
    g_col,
    x_outer,
    x_inner,
    x_col,
    tiles,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLS: tl.constexpr,
    UNIT_G: tl.constexpr,
    ACROSS_G: tl.constexpr,
    EVEN_G: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_HIDDEN: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program walks over tiles of ROWS rows, a grid apart, and adds up its part of dw and db.

    Its threads hold AT_ONCE rows at a time. Each adds up its own elements of them, and only at the
    end what all have is added. AHEAD: the next tile is loaded before one is computed. STAGES:
    `Walk.stages`.
    """
    begin_program(EARLY)
    MASKED: tl.constexpr = MASK_ROWS or MASK_COLS
    hidden = multiple_of(hidden, UNIT_HIDDEN)
    # Else Triton takes masks to end anywhere, and loads element by element.
    rows = multiple_of(rows, UNIT)
    share = 1.0 / hidden.to(tl.float32)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK)
    in_row = col < hidden
    w, _ = load_parameters(w_ptr, None, col, in_row, MASK_COLS)
    dw = tl.zeros([AT_ONCE, BLOCK], tl.float32)
    db = tl.zeros([AT_ONCE, BLOCK], tl.float32)
    g_strides = (g_outer, g_inner, g_col)
    x_strides = (x_outer, x_inner, x_col)
    if AHEAD:
        # fmt: off
        following = _load_both(
            program, g_ptr, x_ptr, mean_ptr, rstd_ptr, rows, in_row, col, inner, g_strides,
            x_strides, ROWS, MASK_ROWS, MASKED, UNIT_G, ACROSS_G, EVEN_G, UNIT,
        )
        # fmt: on
    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        # Of the last tile once more, where there is no next one.
        next_tile = tl.minimum(tile + programs, tiles - 1) if AHEAD else tile
        # fmt: off
        loaded = _load_both(
            next_tile, g_ptr, x_ptr, mean_ptr, rstd_ptr, rows, in_row, col, inner, g_strides,
            x_strides, ROWS, MASK_ROWS, MASKED, UNIT_G, ACROSS_G, EVEN_G, UNIT,
        )
        # fmt: on
        if AHEAD:
            x, g, mean, rstd = following
            following = loaded
        else:
            x, g, mean, rstd = loaded
        g = g.to(tl.float32)
        xhat = standardize(x, mean_ptr, mean, rstd)
        if NEED_DB:
            db += tl.sum(tl.reshape(g, [ROWS // AT_ONCE, AT_ONCE, BLOCK]), axis=0)
        if NEED_DW:
            dw += tl.sum(tl.reshape(g * xhat, [ROWS // AT_ONCE, AT_ONCE, BLOCK]), axis=0)
        if dx_ptr is not None:
            if w_ptr is not None:
                g = g * w.to(tl.float32)[None, :]
            if mean_ptr is not None:
                sum_gx, sum_g = tl.reduce((g * xhat, g), axis=1, combine_fn=add_pairs)
                dx = g * rstd[:, None] - (sum_g * share * rstd)[:, None]
            else:
                sum_gx = tl.sum(g * xhat, axis=1)
                dx = g * rstd[:, None]
            dx = dx - xhat * (sum_gx * share * rstd)[:, None]
            ptrs = dx_ptr + (row.to(tl.int64) * hidden)[:, None] + col[None, :]
            dx = dx.to(dx_ptr.dtype.element_ty)
            store_if(ptrs, dx, _mask(row, rows, in_row, MASK_ROWS), MASKED)
    if NEED_DW:
        tl.store(partial_ptr + program * hidden + col, tl.sum(dw, axis=0), mask=in_row)
    if NEED_DB:
        matrix = programs if NEED_DW else 0
        tl.store(partial_ptr + (program + matrix) * hidden + col, tl.sum(db, axis=0), mask=in_row)


# --------------------------------------------------------------------------------------------------
# Launches
# --------------------------------------------------------------------------------------------------


class Walk(NamedTuple):
    """How programs go over tiles: as `benchmarks/permuted_tiles.py` found for LayerNorm on an H200.

    Attributes:
        rows: of a tile. They are neighbours in memory: so several elements are loaded at once.
        elements: of a tile that a thread has.
        per_sm: programs of a multiprocessor; 0: a program for each tile.
        by_rows: whether each of a forward's rows is in few threads: see `_held_as`.
        is_ahead: whether the next tile is loaded into registers before one is computed.
        stages: 1, or how many tiles' inputs Triton has in shared memory, all but one on their way.
    """

    rows: int
    elements: int
    per_sm: int
    by_rows: bool = False
    is_ahead: bool = False
    stages: int = 1


def forward_walk(block: int) -> Walk:
    """For rows of so many columns, padded to a power of two."""
    if block <= 32:
        # One warp for a tile: so narrow a row is in few threads in any case.
        return Walk(64, 2 * block, 0)
    if block <= 128:
        return Walk(32, 64, 6, stages=3)
    if block <= 256:
        return Walk(16, 32, 4, by_rows=True, is_ahead=True)
    # Of wider rows, more at a time would not fit a program's registers.
    return Walk(16 if block <= 512 else 8, 64, 2, is_ahead=True)


def backward_walk(block: int) -> Walk:
    """The same of a backward."""
    if block <= 16:
        return Walk(64, 16, 6, stages=3)
    if block <= 32:
        return Walk(64, 32, 6, is_ahead=True)
    if block <= 64:
        return Walk(64, 64, 4, is_ahead=True)
    if block <= 128:
        return Walk(64, 32, 2)
    if block <= 512:
        return Walk(16 if block <= 256 else 8, 32, 2, is_ahead=True)
    # Two tiles of the widest rows do not fit the registers.
    return Walk(8, 64, 2)


class Rows(NamedTuple):
    """Where rows are in memory, in elements: `inner` of them `inner_stride` apart, as many again
    `outer_stride` further, and their elements `col_stride` apart."""

    inner: int
    outer_stride: int
    inner_stride: int
    col_stride: int

    @property
    def strides(self) -> tuple[int, int, int]:
        return self[1:]

    def unit(self, itemsize: int) -> int:
        """How many elements may be loaded at once."""
        if self.inner_stride == 1:
            return unit_of(itemsize, self.inner, self.outer_stride, self.col_stride)
        if self.col_stride == 1:
            return unit_of(itemsize, self.inner_stride, self.outer_stride)
        return 1


def rows_of(t: Tensor, split: int) -> Rows | None:
    """The rows of `t`, of which those over the dimensions from `split` on are the inner ones; None
    where either part is no evenly spaced row of rows."""
    outer = _merged(t.shape[:split], t.stride()[:split])
    inner = _merged(t.shape[split:-1], t.stride()[split:-1])
    if outer is None or inner is None:
        return None
    return Rows(math.prod(t.shape[split:-1]), outer, inner, t.stride(-1))


def _merged(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The stride of the one dimension that several are, or None."""
    found = [each for each in zip(sizes, strides, strict=True) if each[0] != 1]
    for (_, stride), (size, next_stride) in itertools.pairwise(found):
        if stride != size * next_stride:
            return None
    return found[-1][1] if found else 0


def split_of(t: Tensor) -> int | None:
    """The first of the dimensions whose rows are neighbours in memory; None if there are none."""
    for split in range(t.dim() - 1):
        found = rows_of(t, split)
        if found is not None and found.inner_stride == 1:
            return split
    return None


class _Tiles(NamedTuple):
    """What either launch has of its tiles: warps, programs, how many tiles, and constexprs."""

    num_warps: int
    programs: int
    number: int
    constexprs: dict[str, Any]


def _tiles(rows: int, hidden: int, unit: int, walk: Walk, device: torch.device) -> _Tiles:
    block = power_of_2(hidden)
    if unit == 1:
        # Elements that are loaded one at a time have an address each: fewer fit the registers.
        walk = walk._replace(elements=min(walk.elements, 32), is_ahead=False, stages=1)
    count = ceil_div(rows, walk.rows)
    programs = min(count, multiprocessors(device) * walk.per_sm) if walk.per_sm else count
    constexprs = {
        "ROWS": walk.rows,
        "BLOCK": block,
        "MASK_ROWS": rows % walk.rows != 0,
        "MASK_COLS": hidden != block,
        "AHEAD": walk.is_ahead and programs < count,
        "STAGES": walk.stages if programs < count else 1,
    }
    num_warps = min(max(walk.rows * block // (walk.elements * 32), 1), 16)
    return _Tiles(num_warps, programs, count, constexprs)


def plan_forward(call: ops.Forward, split: int) -> Launch:
    """The launch of a forward, of rows split at that dimension."""
    x, rows, hidden = rows_of(call.input, split), call.rows, call.hidden
    assert x is not None
    itemsize = call.input.element_size()
    walk, unit = forward_walk(power_of_2(hidden)), x.unit(itemsize)
    tiles = _tiles(rows, hidden, unit, walk, call.input.device)
    weight, bias = contiguous(call.weight), contiguous(call.bias)
    return Launch(
        _forward_kernel,
        tiles.programs,
        (
            *(call.input, weight, bias, call.output, call.mean, call.rstd),
            *(rows, hidden, *x, call.eps, tiles.number),
        ),
        {
            **tiles.constexprs,
            "UNIT": unit,
            "UNIT_HIDDEN": unit_of(itemsize, hidden),
            "BY_ROWS": walk.by_rows,
        },
        tiles.num_warps,
    )


def plan_backward(call: ops.Backward, split: int) -> list[Launch]:
    """The launches of a backward. Its temporaries are allocated here."""
    x, rows, hidden = rows_of(call.input, split), call.rows, call.hidden
    assert x is not None
    grad_out = call.grad_out
    g = rows_of(grad_out, split)
    if g is None:
        grad_out = grad_out.contiguous()
        g = rows_of(grad_out, split)
        assert g is not None
    itemsize = call.input.element_size()
    walk, unit = backward_walk(power_of_2(hidden)), x.unit(itemsize)
    tiles = _tiles(rows, hidden, unit, walk, call.input.device)
    programs, unit_hidden = tiles.programs, unit_of(itemsize, hidden)
    partial = call.partial_sums(programs)
    statistics = map(contiguous, (call.weight, call.mean, call.rstd))
    launch = Launch(
        _backward_kernel,
        programs,
        (
            *(grad_out, call.input, *statistics, call.dx, partial),
            *(rows, hidden, x.inner, *g.strides, *x.strides, tiles.number),
        ),
        {
            **triton_kernels.needs(call),
            **tiles.constexprs,
            "AT_ONCE": _rows_at_once(tiles, unit_hidden),
            "UNIT_G": g.unit(itemsize),
            "ACROSS_G": g.inner_stride == 1,
            "EVEN_G": g.col_stride == 1 and g.outer_stride == g.inner * g.inner_stride,
            "UNIT": unit,
            "UNIT_HIDDEN": unit_hidden,
        },
        tiles.num_warps,
    )
    return [launch, *triton_kernels.plan_sums(partial, call.sums)]


def _rows_at_once(tiles: _Tiles, unit: int) -> int:
    """The rows that a program's threads store at a time, `unit` elements each."""
    block, rows = tiles.constexprs["BLOCK"], tiles.constexprs["ROWS"]
    return int(min(max(tiles.num_warps * 32 * unit // block, 1), rows))


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


def forward(call: ops.Forward) -> None:
    """Forwards of permuted inputs; others are copied, as they have no rows that are neighbours."""
    split = split_of(call.input)
    if split is None:
        triton_kernels.forward(call)
    else:
        plan_forward(call, split)()


def backward(call: ops.Backward) -> None:
    """Backwards of permuted inputs, with a gradient of any strides."""
    split = split_of(call.input)
    if split is None:
        triton_kernels.backward(call)
        return
    for launch in plan_backward(call, split):
        launch()


# ATen's ops, around these two.
rms_norm_forward = functools.partial(ops.rms_norm_forward, forward)
rms_norm_backward = functools.partial(ops.rms_norm_backward, backward)
layer_norm_forward = functools.partial(ops.layer_norm_forward, forward)
layer_norm_backward = functools.partial(ops.layer_norm_backward, backward)
