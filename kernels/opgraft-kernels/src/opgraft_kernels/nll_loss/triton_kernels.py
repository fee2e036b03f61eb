"""The negative log-likelihood of log-probabilities and class indices in Triton, and its gradient.

With class weights w, and the class t of a row, a row's loss is ``-w[t] * x[t]``. The mean divides
their sum by that of the weights of the rows' classes. Native adds the rows up, and writes the
gradient's elements that are not zero, in one block of 32 threads: that takes longer than to write
all the zeros where there are many rows. Here all programs do.

All arithmetic is in float32, and sums are in a fixed order. A class that there is not is never read
or written with: on the GPU it fails the assertion that native fails.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opgraft_kernels.cross_entropy.ops import MEAN, NONE, check_targets
from opgraft_kernels.cross_entropy.triton_kernels import asserting, plan_sums, targets_of
from opgraft_kernels.integers import ceil_div, power_of_2_within
from opgraft_kernels.launches import Launch, as_rows, contiguous, launched
from opgraft_kernels.rows import begin_program

__all__ = ["backward", "forward", "plan_backward", "plan_forward"]

# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------


@triton.jit
def _weight_of(w_ptr, target, counts):
    """The weights of rows by their classes; 0 of those that do not count."""
    weight = tl.where(counts, 1.0, 0.0)
    if w_ptr is not None:
        weight = tl.load(w_ptr + target, mask=counts, other=0.0).to(tl.float32)
    return weight


@triton.jit
def _negative(number):
    """The number with the other sign: of 0 as well, of which Triton's `-` makes 0 - 0."""
    return -1.0 * number


@triton.jit(do_not_specialize=["rows", "steps", "classes", "x_stride", "ignore_index"])
def _forward_kernel(
    x_ptr,
    target_ptr,
    w_ptr,
    loss_ptr,
    mass_ptr,
    rows,
    steps,
    classes,
    x_stride,
    ignore_index,
    SUM: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Each row's loss, and no mass; with SUM the sums of `steps` blocks of rows a program, with
    DIVIDE that of the losses by that of the masses."""
    begin_program(EARLY)
    program = tl.program_id(0)
    losses = tl.zeros([BLOCK], tl.float32)
    masses = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        row = (program * steps + step).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        target, counts = targets_of(target_ptr, row, row < rows, classes, ignore_index)
        weight = _weight_of(w_ptr, target, counts)
        x = tl.load(x_ptr + row * x_stride + target, mask=counts, other=0.0).to(tl.float32)
        loss = tl.where(counts, _negative(weight) * x, 0.0)
        if SUM:
            losses += loss
            masses += weight
        else:
            tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty), mask=row < rows)
    if SUM:
        loss_sum = tl.sum(losses, axis=0)
        mass_sum = tl.sum(masses, axis=0)
        if DIVIDE:
            loss_sum = loss_sum / mass_sum
        tl.store(loss_ptr + program, loss_sum.to(loss_ptr.dtype.element_ty))
        tl.store(mass_ptr + program, mass_sum.to(mass_ptr.dtype.element_ty))
    elif program == 0:
        tl.store(mass_ptr, tl.zeros([], mass_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["rows", "classes", "g_stride", "ignore_index"])
def _backward_kernel(
    g_ptr,
    target_ptr,
    w_ptr,
    mass_ptr,
    dx_ptr,
    rows,
    classes,
    g_stride,
    ignore_index,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A block of the gradient, whatever rows it is of: zeros, and then what is not zero."""
    begin_program(EARLY)
    numel = rows.to(tl.int64) * classes
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], dx_ptr.dtype.element_ty)
    if first + BLOCK <= numel:  # without masks, so that whole vectors are written
        tl.store(dx_ptr + place, zeros)
    else:
        tl.store(dx_ptr + place, zeros, mask=place < numel)
    # Zeros of other threads must not come later.
    tl.debug_barrier()
    first_row = first // classes
    rows_here = tl.cdiv(first + BLOCK, classes) - first_row
    for start in range(0, rows_here, ROWS):
        row = first_row + start + tl.arange(0, ROWS)
        target, counts = targets_of(target_ptr, row, row < rows, classes, ignore_index)
        g = tl.load(g_ptr + row * g_stride, mask=counts, other=0.0).to(tl.float32)
        if mass_ptr is not None:
            g = g / tl.load(mass_ptr).to(tl.float32)
        dx = _negative(g) * _weight_of(w_ptr, target, counts)
        at = row * classes + target
        is_here = counts & (at >= first) & (at < first + BLOCK)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=is_here)


# --------------------------------------------------------------------------------------------------
# Launches
# --------------------------------------------------------------------------------------------------

# Rows that a program of the forward has at a time, and how many such steps the only program takes
# before there are more: each step waits for a class and then for its element.
_BLOCK, _STEPS = 1024, 2
# A program of the backward writes so many bytes, 128 a thread.
_BACKWARD_BYTES = 16 * 1024
# It sees so many rows at a time, by how many its block has: each step waits for a class.
_FEWEST_ROWS, _MOST_ROWS = 128, 1024


def plan_forward(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[tuple[Tensor, Tensor], list[Launch]]:
    """``aten::nll_loss_forward``, of a matrix: the loss and the mass, and what fills them.

    Raises:
        IndexError: on the CPU, a target is no class. On a GPU that is an assertion on the device.
    """
    rows, classes = self.shape
    check_targets(target, classes, ignore_index)
    x, x_stride = as_rows(self, rows, classes)
    loss, mass = self.new_empty(target.shape if reduction == NONE else ()), self.new_empty(())
    blocks = ceil_div(rows, _BLOCK)
    has_sum, is_mean = reduction != NONE, reduction == MEAN
    is_last = not has_sum or blocks <= _STEPS
    programs = 1 if has_sum and is_last else blocks
    losses, masses = loss, mass
    if not is_last:
        losses, masses = x.new_empty((2, programs), dtype=torch.float32).unbind()
    launch = Launch(
        _forward_kernel,
        programs,
        (
            *(x, contiguous(target), weight, losses, masses),
            *(rows, ceil_div(blocks, programs), classes, x_stride, ignore_index),
        ),
        {"SUM": has_sum, "DIVIDE": is_mean and is_last, "BLOCK": _BLOCK},
        options=asserting(x.device),
    )
    sums = [] if is_last else plan_sums(losses, masses, loss, mass, divide=is_mean)
    return (loss, mass), [launch, *sums]


def plan_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> tuple[Tensor, list[Launch]]:
    """``aten::nll_loss_backward``, of a matrix: the gradient, contiguous, and what fills it.

    Raises:
        IndexError: on the CPU, a target is no class. On a GPU that is an assertion on the device.
    """
    rows, classes = self.shape
    check_targets(target, classes, ignore_index)
    dx = torch.empty(self.shape, dtype=self.dtype, device=self.device)
    block = _BACKWARD_BYTES // dx.element_size()
    mass = total_weight if reduction == MEAN else None
    g_stride = grad_output.stride(0) if reduction == NONE else 0
    rows_at_a_time = min(max(block // classes, _FEWEST_ROWS), _MOST_ROWS)
    launch = Launch(
        _backward_kernel,
        ceil_div(rows * classes, block),
        (
            *(grad_output, contiguous(target), weight, mass, dx),
            *(rows, classes, g_stride, ignore_index),
        ),
        {"BLOCK": block, "ROWS": power_of_2_within(rows_at_a_time)},
        options=asserting(dx.device),
    )
    return dx, [launch]


forward, backward = launched(plan_forward), launched(plan_backward)
