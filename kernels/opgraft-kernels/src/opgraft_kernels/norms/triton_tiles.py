"""Tiles of rows in the norms' Triton kernels: how they are loaded, stored and added up.

What a call does not have is None, and compiles to nothing: the mean of RMSNorm, a weight or bias.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opgraft_kernels.rows import RING, load_if, mask_of, store_if

__all__ = [
    "add_pairs",
    "group_slots",
    "load_parameters",
    "load_statistics",
    "load_tile",
    "pointers",
    "scale_and_shift",
    "standardize",
    "store_tile",
    "sum_pairs_of_rows",
    "sum_rows",
]


@triton.jit
def load_parameters(w_ptr, b_ptr, col, in_row, MASKED: tl.constexpr):
    """Columns of weight and bias."""
    w, b = 0.0, 0.0
    if w_ptr is not None:
        w = load_if(w_ptr + col, in_row, MASKED)
    if b_ptr is not None:
        b = load_if(b_ptr + col, in_row, MASKED)
    return w, b


@triton.jit
def scale_and_shift(y, w_ptr, w, b_ptr, b):
    """y * w + b, of a row or of a tile of rows."""
    if w_ptr is not None:
        y = y * w.to(tl.float32)
    if b_ptr is not None:
        y = y + b.to(tl.float32)
    return y


@triton.jit
def load_statistics(mean_ptr, rstd_ptr, row, in_rows):
    """The mean, 0 where the norm has none, and rstd, of a row or of each row of a tile."""
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row, mask=in_rows, other=0.0)
    return mean, tl.load(rstd_ptr + row, mask=in_rows, other=0.0)


@triton.jit
def standardize(x, mean_ptr, mean, rstd):
    """xhat, of a row or of a tile of rows.

    Beyond a row's end it is not 0, but g is, and with it everything that is summed.
    """
    x = x.to(tl.float32)
    if mean_ptr is not None:
        x = x - (mean if len(x.shape) == 1 else mean[:, None])
    return x * (rstd if len(x.shape) == 1 else rstd[:, None])


@triton.jit
def sum_rows(pieces, TOGETHER: tl.constexpr):
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
def sum_pairs_of_rows(pieces, others, TOGETHER: tl.constexpr):
    """`sum_rows` of each, by reductions of both."""
    if TOGETHER:
        totals = tl.reduce((_add_pieces(pieces), _add_pieces(others)), axis=1, combine_fn=add_pairs)
    else:
        totals = tl.reduce((pieces[0], others[0]), axis=1, combine_fn=add_pairs)
        for i in tl.static_range(1, len(pieces)):
            more = tl.reduce((pieces[i], others[i]), axis=1, combine_fn=add_pairs)
            totals = (totals[0] + more[0], totals[1] + more[1])
    return totals


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


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
def pointers(ptr, row, stride, col):
    """Pointers to columns of rows."""
    return ptr + (row * stride)[:, None] + col[None, :]


@triton.jit
def load_tile(
    ptr, row, rows, stride, col, hidden, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr
):
    mask = mask_of(row < rows, col, hidden, MASK_COLS)
    return load_if(pointers(ptr, row, stride, col), mask, MASK_ROWS or MASK_COLS)


@triton.jit
def store_tile(
    ptr, values, row, rows, col, hidden, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr
):
    mask = mask_of(row < rows, col, hidden, MASK_COLS)
    values = values.to(ptr.dtype.element_ty)
    store_if(pointers(ptr, row, hidden, col), values, mask, MASK_ROWS or MASK_COLS)


@triton.jit
def group_slots(slots_ptr, group, mean_ptr, SLOTS: tl.constexpr):
    """A group's slots for each of the two values of a row; for the second alone without a mean."""
    if mean_ptr is not None:
        first = slots_ptr + group * (2 * RING * SLOTS)
        second = first + RING * SLOTS
    else:
        first = slots_ptr + group * (RING * SLOTS)
        second = first
    return first, second
