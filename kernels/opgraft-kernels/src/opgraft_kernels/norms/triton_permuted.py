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
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from opgraft_kernels.devices import multiprocessors
from opgraft_kernels.integers import ceil_div, power_of_2, unit_of
from opgraft_kernels.launches import Launch, contiguous, plan_sum
from opgraft_kernels.norms import ops, triton_kernels
from opgraft_kernels.norms.triton_forward import statistics
from opgraft_kernels.norms.triton_tiles import (
    load_parameters,
    load_statistics,
    scale_and_shift,
    standardize,
)
from opgraft_kernels.rows import begin_program, multiple_of

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
def _offsets(
    row,
    col,
    inner,
    outer_stride,
    inner_stride,
    col_stride,
    UNIT: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Where the elements of a tile are. `inner` rows, each `inner_stride` from the next, are an
    `outer_stride` from the next as many. UNIT elements are loaded at once: if ACROSS of as many
    rows, otherwise of a row."""
    outer_stride = multiple_of(outer_stride, UNIT)
    if ACROSS:
        inner = multiple_of(inner, UNIT)
        col_stride = multiple_of(col_stride, UNIT)
    else:
        inner_stride = multiple_of(inner_stride, UNIT)
    rows = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    return rows[:, None] + col.to(tl.int64)[None, :] * col_stride


@triton.jit(do_not_specialize=["rows", "hidden", "inner", "x_outer"])
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_HIDDEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program normalises ROWS rows of up to BLOCK columns."""
    begin_program(EARLY)
    hidden = multiple_of(hidden, UNIT_HIDDEN)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    in_row = col < hidden
    mask = (row < rows)[:, None] & in_row[None, :]
    offsets = _offsets(row, col, inner, x_outer, x_inner, x_col, UNIT, True)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if mean_ptr is not None:
        mean, rest, variance, _, _ = statistics((x,), hidden, BLOCK, 1, 0, MASK_COLS, False, False)
        x = x - mean[:, None] - rest[:, None]
        tl.store(mean_ptr + row, mean + rest, mask=row < rows)
    else:
        variance = tl.sum(x * x, axis=1) / hidden
    rstd = tl.rsqrt(variance + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    w, b = load_parameters(w_ptr, b_ptr, col, in_row, MASK_COLS)
    y = scale_and_shift(x * rstd[:, None], w_ptr, w, b_ptr, b).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (row.to(tl.int64) * hidden)[:, None] + col[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["rows", "hidden", "inner", "g_outer", "x_outer", "steps"])
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
    steps,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT_G: tl.constexpr,
    ACROSS_G: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_HIDDEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program walks over tiles of ROWS rows, a grid apart, and adds up its part of dw and db."""
    begin_program(EARLY)
    hidden = multiple_of(hidden, UNIT_HIDDEN)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK)
    in_row = col < hidden
    w, _ = load_parameters(w_ptr, None, col, in_row, True)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        row = (program + step * programs) * ROWS + tl.arange(0, ROWS)
        in_rows = row < rows
        mask = in_rows[:, None] & in_row[None, :]
        x_offsets = _offsets(row, col, inner, x_outer, x_inner, x_col, UNIT, True)
        g_offsets = _offsets(row, col, inner, g_outer, g_inner, g_col, UNIT_G, ACROSS_G)
        x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0)
        g = tl.load(g_ptr + g_offsets, mask=mask, other=0.0).to(tl.float32)
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, in_rows)
        xhat = standardize(x, mean_ptr, mean, rstd)
        if NEED_DB:
            db += tl.sum(g, axis=0)
        if NEED_DW:
            dw += tl.sum(g * xhat, axis=0)
        if dx_ptr is not None:
            if w_ptr is not None:
                g = g * w.to(tl.float32)[None, :]
            mean_gx = tl.sum(g * xhat, axis=1) / hidden
            if mean_ptr is not None:
                g = g - (tl.sum(g, axis=1) / hidden)[:, None]
            dx = (g - xhat * mean_gx[:, None]) * rstd[:, None]
            ptrs = dx_ptr + (row.to(tl.int64) * hidden)[:, None] + col[None, :]
            tl.store(ptrs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        tl.store(partial_ptr + program * hidden + col, dw, mask=in_row)
    if NEED_DB:
        matrix = programs if NEED_DW else 0
        tl.store(partial_ptr + (program + matrix) * hidden + col, db, mask=in_row)


# --------------------------------------------------------------------------------------------------
# Launches
# --------------------------------------------------------------------------------------------------

# Elements of a tile, and of a thread: the fastest of those tried on an H200. Rows of a tile are
# neighbours in memory: several are loaded at once, up to a cache line's worth.
_ELEMENTS = 4096
_A_THREAD = 32
_MIN_ROWS, _MAX_ROWS = 16, 64
_PER_SM = 2  # programs of a backward


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


def _tile(hidden: int) -> tuple[dict[str, int], int]:
    """Rows and block, and how many warps."""
    block = power_of_2(hidden)
    rows = min(max(_ELEMENTS // block, _MIN_ROWS), _MAX_ROWS)
    warps = min(max(rows * block // (_A_THREAD * 32), 1), 16)
    return {"ROWS": rows, "BLOCK": block}, warps


def plan_forward(call: ops.Forward, split: int) -> Launch:
    """The launch of a forward, of rows split at that dimension."""
    x, rows, hidden = rows_of(call.input, split), call.rows, call.hidden
    assert x is not None
    itemsize = call.input.element_size()
    tile, warps = _tile(hidden)
    weight, bias = contiguous(call.weight), contiguous(call.bias)
    return Launch(
        _forward_kernel,
        ceil_div(rows, tile["ROWS"]),
        (
            *(call.input, weight, bias, call.output, call.mean, call.rstd),
            *(rows, hidden, *x, call.eps),
        ),
        {
            **tile,
            "MASK_COLS": hidden != tile["BLOCK"],
            "UNIT": x.unit(itemsize),
            "UNIT_HIDDEN": unit_of(itemsize, hidden),
        },
        warps,
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
    tile, warps = _tile(hidden)
    tiles = ceil_div(rows, tile["ROWS"])
    programs = min(tiles, multiprocessors(call.input.device) * _PER_SM)
    sums = [each for each in (call.dw, call.db) if each is not None]
    partial = None
    if sums:
        shape = (len(sums), programs, hidden) if len(sums) == 2 else (programs, hidden)
        partial = torch.empty(shape, dtype=torch.float32, device=call.input.device)
    statistics = map(contiguous, (call.weight, call.mean, call.rstd))
    launch = Launch(
        _backward_kernel,
        programs,
        (
            *(grad_out, call.input, *statistics, call.dx, partial),
            *(rows, hidden, x.inner, *g.strides, *x.strides, ceil_div(tiles, programs)),
        ),
        {
            "NEED_DW": call.dw is not None,
            "NEED_DB": call.db is not None,
            **tile,
            "UNIT_G": g.unit(itemsize),
            "ACROSS_G": g.inner_stride == 1,
            "UNIT": x.unit(itemsize),
            "UNIT_HIDDEN": unit_of(itemsize, hidden),
        },
        warps,
    )
    return [launch, *([] if partial is None else [plan_sum(partial, *sums)])]


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
