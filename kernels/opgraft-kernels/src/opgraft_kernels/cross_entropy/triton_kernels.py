"""Cross-entropy in Triton, of logits and class indices, forward and backward.

Native makes log-probabilities, as large as the logits, and picks one a row. Here the forward reads
the logits once, as online softmax does, and keeps two numbers a row: the maximum, and the logarithm
of the sum of what the others are to it. (Their sum alone, the log-sum-exp, would round away what
large logits differ by.) The backward reads the logits once and writes their gradient. With class
weights w, smoothing s, C classes, and the class t of a row::

    loss = (1 - s) * w[t] * (lse - x[t]) + s / C * sum(w * (lse - x))
    dx   = g * ((1 - s) * w[t] * (p - [class is t]) + s / C * (sum(w) * p - w))     p = exp(x - lse)

All arithmetic is in float32. The losses are added up in a fixed order; the mean divides their sum
by that of the weights of the rows' classes.

A class that there is not is never read with: on the GPU it fails the assertion that native fails.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opgraft_kernels.cross_entropy.ops import MEAN, NONE, check_targets
from opgraft_kernels.devices import multiprocessors
from opgraft_kernels.integers import ceil_div, unit_of
from opgraft_kernels.launches import Launch, as_rows, contiguous, ends_columns, launched
from opgraft_kernels.rows import (
    LOWEST,
    begin_program,
    column,
    ends_of,
    exp,
    grow_exponentials,
    load_if,
    load_logits,
    mask_of,
    max_of,
    multiple_of,
    scalar,
    store_if,
    sum_exponentials,
    sum_of_exponentials,
    tile_start,
)
from opgraft_kernels.softmax.triton_kernels import BACKWARD_TILE, FORWARD_TILE, Tile, tile_of

__all__ = [
    "asserting",
    "backward",
    "forward",
    "plan_backward",
    "plan_forward",
    "plan_sums",
    "targets_of",
]

# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------

# SMOOTH: there is label smoothing. A program has LINES rows, in blocks of BLOCK elements, one of
# them if WHOLE. MASK_LINES, MASK_COLS: there may be fewer than that. The length of a row, and what
# is between two of them, is a multiple of UNIT; but not of shifted rows, which have ENDS: see
# `rows.py`.


@triton.jit
def targets_of(target_ptr, row, in_rows, classes, ignore_index):
    """The classes of rows, -1 where a row is ignored, and which rows count."""
    target = tl.load(target_ptr + row, mask=in_rows, other=0)
    is_ignored = target == ignore_index
    is_class = (target >= 0) & (target < classes)
    tl.device_assert(is_ignored | is_class, "Target is out of bounds.", mask=in_rows)
    counts = in_rows & is_class & (is_ignored == 0)
    return tl.where(counts, target, -1).to(tl.int32), counts


@triton.jit
def _weights(w_ptr, col, classes):
    """The weights of classes, beside logits; 0 beyond the last one."""
    return _beside(tl.load(w_ptr + col, mask=col < classes, other=0.0).to(tl.float32))


@triton.jit
def _beside(values):
    """`values`, one a column, or already one for each logit, beside logits."""
    if len(values.shape) == 1:
        return values[None, :]
    else:
        return values


@triton.jit
def _weights_of(x, w_ptr, col, classes):
    """The weights of a tile's logits, 1 without `w_ptr`."""
    weights = tl.full(x.shape, 1.0, tl.float32)
    if w_ptr is not None:
        weights *= _weights(w_ptr, col, classes)
    return weights


@triton.jit
def _where(there, values, MASKED: tl.constexpr):
    """Values, and zeros where there are no logits."""
    if MASKED:
        values = tl.where(there, values, 0.0)
    return values


@triton.jit(do_not_specialize=["rows", "classes", "x_stride", "ignore_index"])
def _forward_kernel(
    x_ptr,
    target_ptr,
    w_ptr,
    loss_ptr,
    mass_ptr,
    statistics_ptr,
    rows,
    classes,
    x_stride,
    ignore_index,
    smoothing,
    SMOOTH: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    MASK_LINES: tl.constexpr,
    MASK_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    ENDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Each row's loss; where `mass_ptr` is there its weight in the mean; and `statistics`."""
    begin_program(EARLY)
    MASKED: tl.constexpr = MASK_LINES or MASK_COLS
    APART: tl.constexpr = 1 if ENDS else UNIT
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    # A thread has whole units of a row, which have a maximum together; what else it adds up has
    # one for each logit.
    TOGETHER: tl.constexpr = 1 if SMOOTH else UNIT
    classes = multiple_of(classes, APART)
    x_stride = multiple_of(x_stride, APART)
    row = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    in_rows = row < rows
    target, counts = targets_of(target_ptr, row, in_rows, classes, ignore_index)
    start = row * x_stride
    x_row = x_ptr + start
    x_tile = x_ptr + tile_start(start, UNIT, ENDS)
    length, x_ends = classes, None
    if ENDS:
        _, length, end, is_end = ends_of(start, classes, UNIT, ENDS)
        x_ends = load_logits(x_row[:, None] + end, is_end, in_rows, True, MASK_LINES)
    if WHOLE:
        place = tl.arange(0, BLOCK)
        mask = mask_of(in_rows, place, length, MASK_COLS)
        x = load_logits(x_tile[:, None] + place[None, :], mask, in_rows, MASKED, MASK_LINES)
        best = max_of(x, x_ends)
        shifted = x - best[:, None]
        total = sum_of_exponentials(exp(shifted, EXACT), x_ends, best, EXACT)
        if SMOOTH:
            # The weights of all classes, and the sum of how far they are below the maximum.
            there = (place < length)[None, :]
            weights = _weights_of(x, w_ptr, place, classes)
            weights = _where(there, weights, MASK_COLS)
            shifted = _where(there, shifted, MASK_COLS)
            all_weights = tl.sum(weights, axis=1)
            below = tl.sum(weights * shifted, axis=1)
    else:
        bests = tl.full([LINES, BLOCK // TOGETHER], LOWEST, tl.float32)
        totals = tl.zeros([LINES, BLOCK // TOGETHER], tl.float32)
        if SMOOTH:
            seen = tl.zeros([LINES, BLOCK], tl.float32)
            belows = tl.zeros([LINES, BLOCK], tl.float32)
            for first in range(0, classes, BLOCK):
                place = first + tl.arange(0, BLOCK)
                mask = mask_of(in_rows, place, length, MASK_COLS)
                x = load_logits(x_tile[:, None] + place[None, :], mask, in_rows, MASKED, MASK_LINES)
                weights = _weights_of(x, w_ptr, place, classes)
                next_bests = tl.where(x > bests, x, bests)
                # What was seen is further below a new maximum.
                belows = _lowered(belows, seen, next_bests - bests)
                shifted = x - next_bests
                there = (place < length)[None, :]
                weights = _where(there, weights, MASK_COLS)
                shifted = _where(there, shifted, MASK_COLS)
                belows += weights * shifted
                seen += weights
                bests, totals = grow_exponentials(bests, totals, x, EXACT)
        else:
            # Without masks but for the last block: there they would cost bandwidth.
            whole_blocks = length // BLOCK * BLOCK
            for first in range(0, whole_blocks, BLOCK):
                place = first + tl.arange(0, BLOCK)
                ptrs = x_tile[:, None] + place[None, :]
                x = load_logits(ptrs, in_rows[:, None], in_rows, MASK_LINES, MASK_LINES)
                bests, totals = grow_exponentials(bests, totals, x, EXACT)
            if MASK_COLS:  # noqa: SIM102 (decided when it is compiled)
                if whole_blocks < length:
                    place = whole_blocks + tl.arange(0, BLOCK)
                    ptrs = x_tile[:, None] + place[None, :]
                    mask = mask_of(in_rows, place, length, True)
                    x = load_logits(ptrs, mask, in_rows, True, MASK_LINES)
                    bests, totals = grow_exponentials(bests, totals, x, EXACT)
        best, total = sum_exponentials(bests, totals, x_ends, EXACT)
        if SMOOTH:
            all_weights = tl.sum(seen, axis=1)
            below = tl.sum(_lowered(belows, seen, best[:, None] - bests), axis=1)
    # The maximum alone makes it 1, unless the row has no probabilities: what it is then depends on
    # how the row was read.
    has_probabilities = total > 0.0
    best = tl.where(has_probabilities, best, float("nan"))
    log_total = tl.log(tl.where(has_probabilities, total, float("nan")))
    weight = tl.where(counts, 1.0, 0.0)
    if w_ptr is not None:
        weight = tl.load(w_ptr + target, mask=counts, other=0.0).to(tl.float32)
    chosen = tl.load(x_row + target, mask=counts, other=0.0).to(tl.float32)
    loss = weight * ((best - chosen) + log_total)
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing / classes * (all_weights * log_total - below)
    loss = tl.where(counts, loss, 0.0)
    tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty), mask=in_rows)
    if mass_ptr is not None:
        tl.store(mass_ptr + row, weight, mask=in_rows)
    tl.store(statistics_ptr + row, best, mask=in_rows)
    tl.store(statistics_ptr + rows + row, log_total, mask=in_rows)


@triton.jit
def _lowered(below, seen, by):
    """`below`, of elements of the weight `seen`, under a maximum that is higher by so much.

    Where nothing was seen the maximum is LOWEST, and the difference may be infinite.
    """
    return tl.where(seen == 0.0, below, below - seen * by)


@triton.jit(do_not_specialize=["rows", "steps"])
def _sum_kernel(
    loss_ptr,
    mass_ptr,
    loss_sum_ptr,
    mass_sum_ptr,
    rows,
    steps,
    DIVIDE: tl.constexpr,
    SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The sums of `steps` blocks a program; with DIVIDE of the losses by that of the masses.

    With SMOOTH a part of the losses is not of the rows' classes: without any mass, that of the
    classes is 0 / 0 natively, and with it the mean.
    """
    begin_program(EARLY)
    program = tl.program_id(0)
    losses = tl.zeros([BLOCK], tl.float32)
    masses = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        row = (program * steps + step).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        losses += tl.load(loss_ptr + row, mask=row < rows, other=0.0)
        if mass_ptr is not None:
            masses += tl.load(mass_ptr + row, mask=row < rows, other=0.0)
    loss = tl.sum(losses, axis=0)
    if mass_ptr is not None:
        mass = tl.sum(masses, axis=0)
        tl.store(mass_sum_ptr + program, mass.to(mass_sum_ptr.dtype.element_ty))
        if DIVIDE:
            loss = loss / mass
            if SMOOTH:
                loss = tl.where(mass == 0.0, float("nan"), loss)
    tl.store(loss_sum_ptr + program, loss.to(loss_sum_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["rows", "classes", "x_stride", "g_stride", "ignore_index"])
def _backward_kernel(
    g_ptr,
    x_ptr,
    target_ptr,
    w_ptr,
    all_weights_ptr,
    statistics_ptr,
    mass_sum_ptr,
    dx_ptr,
    rows,
    classes,
    x_stride,
    g_stride,
    ignore_index,
    smoothing,
    SMOOTH: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK_LINES: tl.constexpr,
    MASK_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    ENDS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The gradient of a block of the logits; with STAGES of a row, block after block, of which so
    many are being loaded."""
    begin_program(EARLY)
    MASKED: tl.constexpr = MASK_LINES or MASK_COLS
    APART: tl.constexpr = 1 if ENDS else UNIT
    EXACT: tl.constexpr = dx_ptr.dtype.element_ty == tl.float32
    classes = multiple_of(classes, APART)
    x_stride = multiple_of(x_stride, APART)
    blocks = 1 if STAGES else tl.cdiv(classes, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64) * LINES + tl.arange(0, LINES)
    in_rows = row < rows
    first = (tl.program_id(0) % blocks) * BLOCK
    length, before = classes, 0
    if ENDS:
        before, length, end, is_end = ends_of(row * classes, classes, UNIT, ENDS)
    x_start = row * x_stride
    x_tile = x_ptr + tile_start(x_start, UNIT, ENDS)
    if not STAGES:  # before what is waited for below
        place = first + tl.arange(0, BLOCK)
        mask = mask_of(in_rows, place, length, MASK_COLS)
        x = load_if(x_tile[:, None] + place[None, :], mask, MASKED).to(tl.float32)
    target = tl.load(target_ptr + row, mask=in_rows, other=0)
    counts = in_rows & (target != ignore_index)
    g = tl.load(g_ptr + row * g_stride, mask=in_rows, other=0.0).to(tl.float32)
    if mass_sum_ptr is not None:
        mass = tl.load(mass_sum_ptr)
        g = g / mass
        if SMOOTH:  # as `_sum_kernel`
            g = tl.where(mass == 0.0, float("nan"), g)
    g = tl.where(counts, g, 0.0)
    best = tl.load(statistics_ptr + row, mask=in_rows, other=0.0)
    log_total = tl.load(statistics_ptr + rows + row, mask=in_rows, other=0.0)
    dx_start = row * classes
    dx_tile = dx_ptr + tile_start(dx_start, UNIT, ENDS)
    if STAGES:
        for start in tl.range(0, length, BLOCK, num_stages=STAGES):
            place = start + tl.arange(0, BLOCK)
            mask = mask_of(in_rows, place, length, MASK_COLS)
            x = load_if(x_tile[:, None] + place[None, :], mask, MASKED).to(tl.float32)
            dx = _gradient(
                *(x, before + place, best, log_total, target, counts, g),
                *(w_ptr, all_weights_ptr, classes, smoothing, SMOOTH, EXACT),
            ).to(dx_ptr.dtype.element_ty)
            store_if(dx_tile[:, None] + place[None, :], dx, mask, MASKED)
    else:
        dx = _gradient(
            *(x, before + place, best, log_total, target, counts, g),
            *(w_ptr, all_weights_ptr, classes, smoothing, SMOOTH, EXACT),
        ).to(dx_ptr.dtype.element_ty)
        store_if(dx_tile[:, None] + place[None, :], dx, mask, MASKED)
    if ENDS:  # noqa: SIM102 (decided when it is compiled)
        if first == 0:
            x_ends = load_if((x_ptr + x_start)[:, None] + end, is_end, True).to(tl.float32)
            dx_ends = _gradient(
                *(x_ends, end, scalar(best), scalar(log_total), scalar(target)),
                *(scalar(counts), scalar(g)),
                *(w_ptr, all_weights_ptr, classes, smoothing, SMOOTH, EXACT),
            ).to(dx_ptr.dtype.element_ty)
            tl.store((dx_ptr + dx_start)[:, None] + end, dx_ends, mask=is_end)


@triton.jit
def _gradient(
    x,
    col,
    best,
    log_total,
    target,
    counts,
    g,
    w_ptr,
    all_weights_ptr,
    classes,
    smoothing,
    SMOOTH: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The gradient of the logits `x` of the classes `col`; the others are one a row."""
    p = exp((x - column(best)) - column(log_total), EXACT)
    is_target = _beside(col) == column(target)
    dx = p - tl.where(is_target, 1.0, 0.0)
    if w_ptr is not None:
        is_class = counts & (target >= 0) & (target < classes)
        weight = tl.load(w_ptr + target, mask=is_class, other=0.0).to(tl.float32)
        dx *= column(weight)
    if SMOOTH:
        dx *= 1.0 - smoothing
        if w_ptr is not None:
            all_weights = tl.load(all_weights_ptr)
            dx += smoothing / classes * (all_weights * p - _weights(w_ptr, col, classes))
        else:
            dx += smoothing * p - smoothing / classes
    dx *= column(g)
    return dx


# --------------------------------------------------------------------------------------------------
# Launches
# --------------------------------------------------------------------------------------------------

# What a program of the sums adds up at a time, and how many such steps it takes before there are
# more programs, of which the sums are added up by one.
_SUM_BLOCK, _SUM_STEPS = 1024, 16


# Rows of so many bytes are read in blocks by few warps, if there are enough rows for so many
# programs a multiprocessor: then some always load while others compute. Fewer rows are read faster
# if each has more warps.
_LONG_ROW, _MANY_PROGRAMS = 16 * 1024, 4
# The block of those, in bytes, and its warps.
_FORWARD_BLOCK = 8 * 1024, 4
# Where a backward has several blocks of a shifted row, each program first finds out where the row's
# units begin, and waits for what is one a row. Many small programs hide that. Of 16 bits, which are
# more elements to compute with, a program a row is faster still, which does so once, and has blocks
# on their way meanwhile; if there are enough rows.
_SHIFTED_BLOCK = 4 * 1024, 4
_WALKED_BLOCK, _WALKED_STAGES = (8 * 1024, 8), 3


def _are_many(rows: int, device: torch.device) -> bool:
    return rows >= _MANY_PROGRAMS * multiprocessors(device)


def _tile(classes: int, largest: int, itemsize: int) -> Tile:
    # As of aligned rows: with softmax's tiles for others the kernels here were not measured.
    return tile_of(classes, itemsize, largest, unit_of(itemsize))


def _block(bytes_and_warps: tuple[int, int], itemsize: int) -> Tile:
    size, num_warps = bytes_and_warps
    return Tile(1, size // itemsize, False, num_warps)


def _constexprs(tile: Tile, classes: int, stride: int, ends: int, itemsize: int) -> dict[str, Any]:
    unit = unit_of(itemsize) if ends else unit_of(itemsize, classes, stride)
    return tile.constexprs(classes, unit, ends)


def asserting(device: torch.device) -> dict[str, Any]:
    """What makes Triton compile assertions; without its own, that integers do not overflow."""
    return {} if device.type == "cpu" else {"debug": True, "sanitize_overflow": False}


def plan_sums(
    losses: Tensor,
    masses: Tensor | None,
    loss: Tensor,
    mass: Tensor | None,
    smoothing: float = 0.0,
    *,
    divide: bool = True,
) -> list[Launch]:
    """The launches that fill `loss`, with the mean where there are masses, else with the sum; and
    `mass`. Without `divide` it is the sum in any case."""
    launches = []
    while True:
        rows = losses.numel()
        blocks = ceil_div(rows, _SUM_BLOCK)
        programs = 1 if blocks <= _SUM_STEPS else ceil_div(blocks, _SUM_STEPS)
        is_last = programs == 1
        partial = loss if is_last else losses.new_empty(programs, dtype=torch.float32)
        partial_mass = mass if is_last or masses is None else masses.new_empty(programs)
        launches.append(
            Launch(
                _sum_kernel,
                programs,
                (losses, masses, partial, partial_mass, rows, ceil_div(blocks, programs)),
                {"DIVIDE": divide and is_last, "SMOOTH": smoothing > 0, "BLOCK": _SUM_BLOCK},
            )
        )
        if is_last:
            return launches
        losses, masses = partial, partial_mass


def plan_forward(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    *,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Launch]]:
    """The op of the forward, see `ops.py`: what it returns, and what fills that.

    Raises:
        IndexError: on the CPU, a target is no class. On a GPU that is an assertion on the device.
    """
    rows, classes = target.numel(), self.shape[-1]
    check_targets(target, classes, ignore_index)
    new, is_mean, has_sum = self.new_empty, reduction == MEAN, reduction != NONE
    statistics = new((2, rows), dtype=torch.float32)
    masses = new(target.shape, dtype=torch.float32) if is_mean else None
    losses = new(target.shape, dtype=torch.float32 if has_sum else dtype)
    mass = new(() if is_mean else (0,), dtype=torch.float32)
    x, x_stride = as_rows(self, rows, classes)
    itemsize = x.element_size()
    tile, ends = _tile(classes, FORWARD_TILE, itemsize), 0
    # With smoothing there is much to keep for each logit, and the ends' would be spilled.
    if label_smoothing == 0:
        ends = ends_columns(tile.lines, classes, (x_stride,), (x,))
        is_wide = ends > 0 or unit_of(itemsize, classes, x_stride) == unit_of(itemsize)
        if is_wide and classes * itemsize >= _LONG_ROW and _are_many(rows, x.device):
            tile = _block(_FORWARD_BLOCK, itemsize)
    launch = Launch(
        _forward_kernel,
        ceil_div(rows, tile.lines),
        (
            *(x, contiguous(target), weight, losses, masses, statistics),
            *(rows, classes, x_stride, ignore_index, label_smoothing),
        ),
        {
            "SMOOTH": label_smoothing > 0,
            "WHOLE": tile.whole,
            **_constexprs(tile, classes, x_stride, ends, itemsize),
        },
        tile.num_warps,
        asserting(x.device),
    )
    if not has_sum:
        return (losses, statistics, mass), [launch]
    loss = new((), dtype=dtype)
    sums = plan_sums(losses, masses, loss, mass if is_mean else None, label_smoothing)
    return (loss, statistics, mass), [launch, *sums]


def plan_backward(
    grad_loss: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    mass: Tensor,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> tuple[Tensor, list[Launch]]:
    """The op of the backward, see `ops.py`: the gradient, contiguous, and what fills it.

    Raises:
        IndexError: on the CPU, a target is no class.
    """
    rows, classes = target.numel(), self.shape[-1]
    check_targets(target, classes, ignore_index)
    dx = torch.empty(self.shape, dtype=self.dtype, device=self.device)
    sums, all_weights = [], None
    if weight is not None and label_smoothing > 0:
        all_weights = weight.new_empty((), dtype=torch.float32)
        sums = plan_sums(weight, None, all_weights, None)
    x, x_stride = as_rows(self, rows, classes)
    itemsize, stages = x.element_size(), 0
    tile = _tile(classes, BACKWARD_TILE, itemsize)
    ends = ends_columns(tile.lines, classes, (x_stride,), (x, dx))
    if ends and not tile.whole:
        tile = _block(_SHIFTED_BLOCK, itemsize)
        if itemsize == 2 and _are_many(rows, x.device):
            tile, stages = _block(_WALKED_BLOCK, itemsize), _WALKED_STAGES
    blocks = 1 if stages else ceil_div(classes, tile.block)
    of_mean = mass if reduction == MEAN else None
    g_stride = grad_loss.stride(0) if grad_loss.dim() else 0
    launch = Launch(
        _backward_kernel,
        ceil_div(rows, tile.lines) * blocks,
        (
            *(grad_loss, x, contiguous(target), weight, all_weights, statistics, of_mean, dx),
            *(rows, classes, x_stride, g_stride, ignore_index, label_smoothing),
        ),
        {
            "SMOOTH": label_smoothing > 0,
            **_constexprs(tile, classes, x_stride, ends, itemsize),
            "STAGES": stages,
        },
        tile.num_warps,
    )
    return dx, [*sums, launch]


forward, backward = launched(plan_forward), launched(plan_backward)
