"""Products of float32 in Triton, of parts in bfloat16.

A number of float32 is the sum of three of bfloat16, and a product of two is, but for what float32
rounds away, the sum of six products of parts::

    a = a0 + a1 + a2        a b = a0 b0 + (a0 b1 + a1 b0) + (a0 b2 + a1 b1 + a2 b0)

That is as exact as float32, and of nearly its range: numbers from 3.396e38 on are rounded to
infinity, and below 1e-33 there is no room for the least part (Henry, Tang and Heinecke, "Leveraging
the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", 2019). `tl.dot`
does so by itself (`bf16x6`): it splits what a program has loaded, stores the parts, and waits for
them, each time. What many programs load is split once here, by a kernel before, and loaded ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opgraft_kernels.rows import begin_program

from .triton_tiles import load_rows, rows_of, store_rows

__all__ = [
    "PART_ROWS",
    "PART_UNIT",
    "factor_rows",
    "load_factor",
    "parts_of",
    "product",
    "product_transposed",
    "split_kernel",
]

# A part has so many rows, or a multiple: any tile's. Rows that the whole has not are 0.
PART_ROWS = tl.constexpr(128)
# So many elements of a part are 16 bytes, of which all rows are a multiple.
PART_UNIT = tl.constexpr(8)


@triton.jit
def factor_rows(length, SPLIT: tl.constexpr):
    """How many rows `load_factor` finds in a head of a `length`."""
    if SPLIT:
        return 3 * (tl.cdiv(length, PART_ROWS) * PART_ROWS)
    else:
        return length


@triton.jit
def parts_of(x, SPLIT: tl.constexpr):
    """What `product` takes as a factor: `x`, or if SPLIT three of bfloat16 whose sum it is."""
    if SPLIT:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return high, middle, low
    else:
        return x


@triton.jit
def load_factor(
    rows,
    start,
    length,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DESCRIBED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Rows `start` to ``start + BLOCK``, as `parts_of` has them. If SPLIT, of what `split_kernel`
    wrote."""
    if SPLIT:
        end = factor_rows(length, True)
        part = end // 3
        return (
            load_rows(rows, start, end, DIM, BLOCK, BLOCK_DIM, DESCRIBED),
            load_rows(rows, start + part, end, DIM, BLOCK, BLOCK_DIM, DESCRIBED),
            load_rows(rows, start + 2 * part, end, DIM, BLOCK, BLOCK_DIM, DESCRIBED),
        )
    else:
        return load_rows(rows, start, length, DIM, BLOCK, BLOCK_DIM, DESCRIBED)


@triton.jit
def _dot(a, b, start, PRECISION: tl.constexpr):
    """Of two parts. The interpreter, which is told another precision, has no bfloat16."""
    if PRECISION == "bf16x6":
        return tl.dot(a, b, start)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), start)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr, SPLIT: tl.constexpr):
    """``a @ b``, added to `total` unless it is None. `a`, if SPLIT, is split here; `b` is, already.

    The parts of infinity are infinity and NaN. Where the small products are NaN they count as 0:
    the large one says what native's product does.
    """
    if SPLIT:
        return _product_of_parts(parts_of(a, True), b, total, PRECISION)
    else:
        return tl.dot(a.to(b.dtype), b, total, input_precision=PRECISION)


@triton.jit
def product_transposed(a, b, PRECISION: tl.constexpr, SPLIT: tl.constexpr):
    """``a @ b.T``, of two factors."""
    if SPLIT:
        return _product_of_parts(a, (b[0].T, b[1].T, b[2].T), None, PRECISION)
    else:
        return tl.dot(a, b.T, input_precision=PRECISION)


@triton.jit
def _product_of_parts(a, b, total, PRECISION: tl.constexpr):
    small = _dot(a[1], b[1], None, PRECISION)
    small = _dot(a[0], b[2], small, PRECISION)
    small = _dot(a[2], b[0], small, PRECISION)
    small = _dot(a[0], b[1], small, PRECISION)
    small = _dot(a[1], b[0], small, PRECISION)
    added = _dot(a[0], b[0], tl.where(small == small, small, 0.0), PRECISION)
    # Not added up by the product, which cuts off what it adds to a sum: the more, the longer.
    return added if total is None else total + added


@triton.jit
def split_kernel(
    x,
    parts,
    heads,
    length,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    FAR: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The three parts of every head, one below the other: ``[batch, heads, 3 * rows, DIM]``.

    A program has BLOCK rows. Those that are not there are 0, up to a multiple of PART_ROWS.
    """
    begin_program(EARLY)
    part = tl.cdiv(length, PART_ROWS) * PART_ROWS
    blocks = part // BLOCK
    first = tl.program_id(0) % blocks * BLOCK
    flat_head = tl.program_id(0) // blocks
    batch = flat_head // heads
    head = flat_head % heads
    x_rows = rows_of(x, batch, head, UNIT, FAR)
    rows = rows_of(parts, batch, head, UNIT, FAR)
    whole = load_rows(x_rows, first, length, DIM, BLOCK, BLOCK_DIM, False)
    high, middle, low = parts_of(whole, True)
    end = 3 * part
    store_rows(rows, high, first, end, DIM, BLOCK, BLOCK_DIM)
    store_rows(rows, middle, first + part, end, DIM, BLOCK, BLOCK_DIM)
    store_rows(rows, low, first + 2 * part, end, DIM, BLOCK, BLOCK_DIM)
