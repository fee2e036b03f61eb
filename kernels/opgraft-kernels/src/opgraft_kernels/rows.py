"""What row-wise kernels share in Triton: tiles of rows, sums over rows, exchanges between programs.

A tensor that is normalised over its trailing dimensions is seen as a matrix, ``rows x hidden``.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from opgraft_kernels.interpreter import prepare

__all__ = [
    "LOWEST",
    "RING",
    "STRIP",
    "begin_program",
    "collect",
    "collect_sum",
    "collect_two",
    "column",
    "ends_of",
    "exp",
    "grow_exponentials",
    "load_if",
    "load_logits",
    "mask_if",
    "mask_of",
    "max_of",
    "multiple_of",
    "prefetch",
    "publish",
    "scalar",
    "store_if",
    "sum_after_barrier",
    "sum_exponentials",
    "sum_of",
    "sum_of_exponentials",
    "sum_partials_kernel",
    "tile_start",
]

# Here, since all of the pack's Triton kernels import this module.
prepare()


@triton.jit
def begin_program(EARLY: tl.constexpr):
    """Every kernel does this first, and reads and writes nothing before.

    EARLY: its programs may be there before the kernel before it in the stream has ended, and what
    that wrote is in memory (`Launch.is_early`). They wait for that here.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def load_if(
    ptrs, mask, MASKED: tl.constexpr, OTHER: tl.constexpr = 0.0, EVICTION: tl.constexpr = None
):
    """Loads, with OTHER where `mask` is false; if not MASKED it is true everywhere.

    EVICTION says whether caches are to keep it longer than other data, or not to keep it. None: it
    is data as any other. Triton 3.6 takes no string as a default, and Inductor, which copies a
    kernel's source, no name.
    """
    if MASKED:
        return tl.load(ptrs, mask=mask, other=OTHER, eviction_policy=EVICTION)
    else:
        return tl.load(ptrs, eviction_policy=EVICTION)


@triton.jit
def store_if(ptrs, value, mask, MASKED: tl.constexpr, EVICTION: tl.constexpr = None):
    if MASKED:
        tl.store(ptrs, value, mask=mask, eviction_policy=EVICTION)
    else:
        tl.store(ptrs, value, eviction_policy=EVICTION)


_LOG2_E = tl.constexpr(math.log2(math.e))
# What the float32 nearest to it leaves out.
_LOG2_E_REST = tl.constexpr(math.log2(math.e) - float(torch.tensor(math.log2(math.e)).float()))
_LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def exp(x, EXACT: tl.constexpr = True):
    """e ** x of float32; if EXACT as exactly as CUDA's `expf`.

    Rounding the exponent of 2 makes an error: at x = -30 some 1e-6 of the value, which native has
    not. What rounding took off is added in the first order. That takes more than twice as many
    instructions, which is what long rows of 16 bits wait for; rounding to 16 bits hides the error.
    Either way a value below 2**-126 is 0: `tl.exp`, which has them, takes twice the instructions.
    """
    if EXACT:
        # Far beyond what is 0 or inf, so that an infinite x has a rest; NaN stays.
        x = tl.clamp(x, -256.0, 256.0, propagate_nan=tl.PropagateNan.ALL)
        power = x * _LOG2_E
        rest = tl.fma(x, tl.full(x.shape, _LOG2_E, tl.float32), -power) + x * _LOG2_E_REST
        return tl.exp2(power) * (1.0 + rest * _LN_2)
    else:
        return tl.exp2(x * _LOG2_E)


@triton.jit
def mask_if(mask, condition):
    """A block of booleans where a scalar condition holds, and false everywhere where it does not.

    Not ``mask & condition``: Triton's interpreter spreads a comparison of scalars over a block in
    the type of what was compared, which makes integers of the mask, and from 3.9 on it refuses
    those. Compiled, both are the same.
    """
    return mask & tl.where(condition, True, False)


@triton.jit
def prefetch(ptr, count):
    """Begins to load `count` elements from `ptr` on into the L2 cache, and waits for nothing; of
    a negative count none.

    One thread asks for all of it, in one instruction, which takes no registers. The device must be
    able to (`Device.can_prefetch`). Whole 16 bytes are loaded, from a multiple of 16 on: some bytes
    at the end are left out, and what is before `ptr` is of its own 16 bytes, so of the same memory.
    """
    ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        """{
        .reg .pred is_first, is_any;
        .reg .b32 index;
        mov.u32 index, %tid.x;
        setp.gt.s32 is_any, $2, 0;
        setp.eq.and.u32 is_first, index, 0, is_any;
        @is_first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [ptr.to(tl.int64) & -16, (tl.maximum(count, 0) * ITEMSIZE).to(tl.int32) & -16],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def multiple_of(length, UNIT: tl.constexpr):
    """`length`, which is a multiple of UNIT; so Triton knows it, and loads UNIT elements at once.

    By itself it knows of an argument whether it is a multiple of 16, and nothing of one that is a
    multiple of 8: rows of 5496 bfloat16 would be loaded by 2 bytes in place of 16.
    """
    return length // UNIT * UNIT


@triton.jit
def mask_of(there, col, length, MASK_COLS: tl.constexpr):
    """Which of a tile's elements there are: of the lines that are `there` the first `length`."""
    mask = there[:, None]
    if MASK_COLS:
        mask = mask & (col < length)[None, :]
    return mask


# --------------------------------------------------------------------------------------------------
# Lines that begin anywhere
# --------------------------------------------------------------------------------------------------

# Threads load and store 16 bytes, a unit, at addresses that are multiples of 16. If a line's length
# is no multiple of that, most lines begin and end inside a unit. Such lines are *shifted*, where a
# program has a single one: its tile has the whole units alone, so its loads and stores are as wide
# as those of aligned lines, and what is before and behind them, less than a unit each, are the
# *ends*: a second, small tile, of ENDS columns, that is loaded and stored element by element.
# Nothing outside the line is read, and nothing is written that other programs write. Without such
# lines ENDS is 0.


@triton.jit
def tile_start(start, UNIT: tl.constexpr, ENDS: tl.constexpr):
    """Where tiles of lines begin: with the lines, if they are shifted with their whole units."""
    if ENDS:
        return multiple_of(start + (UNIT - 1), UNIT)
    else:
        return start


@triton.jit
def ends_of(start, size, UNIT: tl.constexpr, ENDS: tl.constexpr):
    """Of a shifted line: how many elements are before the whole units and how many in those, and
    the ends: their columns in the line, and which there are.

    `start` may be of any tensor of the launch: all begin at the same place in a unit.
    """
    before = tl.minimum(scalar(tile_start(start, UNIT, ENDS) - start).to(tl.int32), size)
    inside = multiple_of(size - before, UNIT)
    end = tl.arange(0, ENDS)[None, :]
    is_first = end < UNIT
    col = tl.where(is_first, end, end - UNIT + before + inside)
    mask = col < tl.where(is_first, before, size)
    return before, inside, col, mask


@triton.jit
def max_of(tile, ends):
    """Each line's maximum, also of its ends if there are any, else None."""
    best = tl.max(tile, axis=1)
    if ends is not None:
        best = tl.maximum(best, scalar(tl.max(ends, axis=1)))
    return best


@triton.jit
def sum_of(tile, ends):
    """Each line's sum, likewise."""
    total = tl.sum(tile, axis=1)
    if ends is not None:
        total += scalar(tl.sum(ends, axis=1))
    return total


@triton.jit
def scalar(value):
    """The value of a program's one line, for its ends.

    Every thread has a scalar. With a block for both, Triton would spread the ends over threads as
    the tile, and each would load, and compute with, as many elements as a unit has.
    """
    if len(value.shape) == 0:
        return value
    elif value.dtype == tl.int1:
        return tl.sum(value.to(tl.int32), axis=0) != 0
    else:
        return tl.sum(value, axis=0)


@triton.jit
def column(values):
    """`values`, one a line, beside the lines' elements; a scalar as it is."""
    if len(values.shape) == 0:
        return values
    else:
        return values[:, None]


# --------------------------------------------------------------------------------------------------
# Sums of exponentials
# --------------------------------------------------------------------------------------------------

# The maximum of a row, and the sum of the exponentials of what is less than that, in one pass: each
# thread keeps the maximum of what it read, and the sum of exponentials under it.

# What a maximum begins with. Not -inf: -inf - -inf is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def load_logits(
    ptrs,
    mask,
    in_rows,
    MASKED: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    EVICTION: tl.constexpr = None,
):
    """A tile in float32, with -inf beyond the rows' ends, and zeros in rows that there are not.

    Nothing uses those, but -inf throughout would make NaN, of which Triton's interpreter warns.
    """
    x = load_if(ptrs, mask, MASKED, float("-inf"), EVICTION).to(tl.float32)
    if MASK_ROWS:
        x = tl.where(in_rows[:, None], x, 0.0)
    return x


@triton.jit
def grow_exponentials(best, total, x, EXACT: tl.constexpr):
    """`best` and `total`, [rows, n], of which each element has seen one of `x`, [rows, n], more; or
    `m` neighbours, where `x` is [rows, n * m] and a thread has these."""
    if x.shape[1] == best.shape[1]:
        # One exponential, of the difference, whichever is larger. A NaN goes to the sum and stays
        # there.
        ratio = exp(-tl.abs(x - best), EXACT)
        total = tl.where(x > best, total * ratio + 1.0, total + ratio)
        best = tl.where(x > best, x, best)
    else:
        x = tl.reshape(x, [x.shape[0], best.shape[1], x.shape[1] // best.shape[1]])
        grown = tl.maximum(best, tl.max(x, axis=2))
        added = tl.sum(exp(x - grown[:, :, None], EXACT), axis=2)
        total = total * exp(best - grown, EXACT) + added
        best = grown
    return best, total


@triton.jit
def sum_exponentials(best, total, ends, EXACT: tl.constexpr):
    """The maximum of each row, and the sum of exponentials, of what its threads have, and of its
    ends if there are any."""
    row_best = max_of(best, ends)
    exponentials = total * exp(best - row_best[:, None], EXACT)
    return row_best, sum_of_exponentials(exponentials, ends, row_best, EXACT)


@triton.jit
def sum_of_exponentials(exponentials, ends, best, EXACT: tl.constexpr):
    """The sum of each row's exponentials, and of those of its ends under its maximum if there are
    any."""
    # A function of the ends' exponentials, which would be None of none, does not compile in Triton
    # 3.6.
    total = tl.sum(exponentials, axis=1)
    if ends is not None:
        total += scalar(tl.sum(exp(ends - scalar(best), EXACT), axis=1))
    return total


# --------------------------------------------------------------------------------------------------
# Sums over rows
# --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["partials", "steps"])
def sum_partials_kernel(
    partial_ptr,
    sum_ptr,
    other_sum_ptr,
    partials,
    hidden,
    steps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The sum of `partials` rows of partial sums, always in the same order; of two such matrices,
    one after the other in memory, where there is another sum to write."""
    begin_program(EARLY)
    _sum_columns(
        partial_ptr, sum_ptr, other_sum_ptr, partials, hidden, steps, tl.program_id(0), ROWS, BLOCK
    )


@triton.jit
def _sum_columns(
    partial_ptr,
    sum_ptr,
    other_sum_ptr,
    partials,
    hidden,
    steps,
    index,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The `index`-th BLOCK columns of what `sum_partials_kernel` computes."""
    blocks = tl.cdiv(hidden, BLOCK)
    matrix = index // blocks
    col = (index % blocks) * BLOCK + tl.arange(0, BLOCK)
    in_row = col < hidden
    first_row = matrix * partials
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(steps):
        row = step * ROWS + tl.arange(0, ROWS)
        mask = (row < partials)[:, None] & in_row[None, :]
        ptrs = partial_ptr + ((first_row + row).to(tl.int64) * hidden)[:, None] + col[None, :]
        # Past L1, which may not see what other programs of the same launch wrote.
        total += tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    result = tl.sum(total, axis=0).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + col, result, mask=mask_if(in_row, matrix == 0))
    if other_sum_ptr is not None:
        tl.store(other_sum_ptr + col, result, mask=mask_if(in_row, matrix == 1))


@triton.jit
def sum_after_barrier(
    partial_ptr,
    sum_ptr,
    other_sum_ptr,
    hidden,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONCE: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):
    """`sum_partials_kernel` within the launch whose programs wrote one row of partial sums each.

    All programs wait for one another first, so the launch must be cooperative. ONCE: each reads all
    that it adds up at once, of strips of columns that are a grid apart.
    """
    grid_barrier()
    programs = tl.num_programs(0)
    if ONCE:
        _sum_strips(partial_ptr, sum_ptr, other_sum_ptr, programs, hidden, ROWS, BLOCK, MASK_ROWS)
    else:
        blocks = tl.cdiv(hidden, BLOCK)
        if other_sum_ptr is not None:
            blocks *= 2
        steps = tl.cdiv(programs, ROWS)
        for index in range(tl.program_id(0), blocks, programs):
            _sum_columns(
                partial_ptr, sum_ptr, other_sum_ptr, programs, hidden, steps, index, ROWS, BLOCK
            )


# Columns that are neighbours in a program's share of the sums: 64 bytes of each partial sum.
STRIP = tl.constexpr(16)


@triton.jit
def _sum_strips(
    partial_ptr,
    sum_ptr,
    other_sum_ptr,
    programs,
    hidden,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):
    """A program's share of what `sum_partials_kernel` computes: BLOCK columns at most, of up to
    ROWS partial sums. There are fewer than 2**31 of them."""
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    strips = tl.cdiv(hidden, STRIP)
    strip = tl.program_id(0) + lane // STRIP * programs
    matrix = strip // strips
    col = strip % strips * STRIP + lane % STRIP
    ptrs = partial_ptr + (matrix * programs * hidden + col)[None, :] + row[:, None] * hidden
    matrices: tl.constexpr = 1 if other_sum_ptr is None else 2
    is_there = (matrix < matrices) & (col < hidden)
    mask = is_there[None, :]
    if MASK_ROWS:
        mask = mask & (row < programs)[:, None]
    # Past L1, as in `_sum_columns`.
    partials = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    result = tl.sum(partials, axis=0).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + col, result, mask=is_there & (matrix == 0))
    if other_sum_ptr is not None:
        tl.store(other_sum_ptr + col, result, mask=is_there & (matrix == 1))


@triton.jit
def grid_barrier():
    """Waits until all programs of a cooperative launch are here; then all see what each wrote.

    They count in the word that the driver has for each cooperative launch (its address is in two
    of the launch's registers), as the grid group of CUDA's cooperative groups does: it needs no
    memory that was zeroed. The first program adds such a number that all of them together add
    2**31: the highest bit flips when the last one comes, whatever the word held before.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred skips;
        .reg .b32 low, high, added, before, now, index;
        .reg .b64 word;
        bar.sync 0;
        mov.u32 index, %tid.x;
        setp.ne.u32 skips, index, 0;
        @skips bra done;
        mov.u32 low, %envreg2;
        mov.u32 high, %envreg1;
        mov.b64 word, {low, high};
        mov.u32 added, %nctaid.x;
        sub.u32 added, 0x80000001, added;
        setp.ne.u32 skips, $1, 0;
        @skips mov.u32 added, 1;
        atom.add.release.gpu.u32 before, [word + 4], added;
        wait:
        ld.acquire.gpu.u32 now, [word + 4];
        xor.b32 now, now, before;
        setp.ge.s32 skips, now, 0;
        @skips bra wait;
        done:
        bar.sync 0;
        mov.u32 $0, 0;
        }""",
        "=r,r",
        [tl.program_id(0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


# --------------------------------------------------------------------------------------------------
# Exchanges between programs
# --------------------------------------------------------------------------------------------------

# Rows that are too long for one program are split over a group of programs, which walk over rows
# in step, each owning BLOCK columns: weights and their gradients stay in its registers throughout,
# and few rows of partial sums come out. What the programs of a group have to tell one another, a
# value a row, goes through slots in global memory, [groups, RING, SLOTS] of int64, zeroed before
# the launch. A slot holds a program's value (lower 32 bits, as float32) and the step it belongs to,
# counted from 1 (upper 32 bits). It is written and read in one access, so nothing has to be ordered
# around it; and all programs add up the same values in the same order, so the result has the same
# bits every time.
#
# The values of a row are awaited one step after they were published, so that the wait is over
# before it starts. A program that publishes step s has collected step s - 2: so all have published
# s - 2, and before that (there is a barrier in the reduction that makes a value) collected s - 4.
# That is the slot which step s overwrites in a ring of 4.
#
# All programs of a group have to be running at once. The launch is a cooperative one, which runs
# them all at once or fails.

RING = tl.constexpr(4)


@triton.jit
def _wait_for_slots(ptrs, tag):
    """Spins until the upper 32 bits of every slot at `ptrs` are `tag`; the lower as float32."""
    # What is found must not have the address's registers, which the next turn reads (&).
    return tl.inline_asm_elementwise(
        """{
        .reg .pred ready;
        .reg .b32 found;
        spin:
        ld.relaxed.gpu.global.v2.b32 {$0, found}, [$1];
        setp.eq.u32 ready, found, $2;
        @!ready bra spin;
        }""",
        "=&r,l,r",
        [ptrs.to(tl.int64), tag],
        dtype=tl.float32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _wait_for_two_slots(ptrs, others, tag):
    """As `_wait_for_slots`, of the slots at `others`, too. One wait: a second one would only begin
    when the first is over, and takes as long as a load."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred ready;
        .reg .b32 found;
        .reg .b32 other;
        spin:
        ld.relaxed.gpu.global.v2.b32 {$0, found}, [$2];
        ld.relaxed.gpu.global.v2.b32 {$1, other}, [$3];
        setp.eq.u32 ready, found, $4;
        setp.eq.and.u32 ready, other, $4, ready;
        @!ready bra spin;
        }""",
        "=&r,=&r,l,l,r",
        [ptrs.to(tl.int64), others.to(tl.int64), tag],
        dtype=(tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def publish(slots_ptr, step, split, value, SLOTS: tl.constexpr):
    """Writes this program's value for `step` into its slot of the group's ring."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    content = bits | ((step + 1).to(tl.int64) << 32)
    ptr = slots_ptr + (step % RING) * SLOTS + split
    tl.atomic_xchg(ptr, content, sem="relaxed", scope="gpu")


@triton.jit
def _slots_of_step(slots_ptr, step, splits, SLOTS: tl.constexpr):
    """The group's slots for `step`."""
    slot = tl.arange(0, SLOTS)
    # Lanes beyond the group's size read its last slot and count for nothing.
    return slots_ptr + ((step + RING) % RING) * SLOTS + tl.minimum(slot, splits - 1)


@triton.jit
def collect(slots_ptr, step, splits, SLOTS: tl.constexpr):
    """The values of the group's programs for `step`, once all are there, then zeros up to SLOTS;
    all zeros for step -1 (zeroed slots)."""
    ptrs = _slots_of_step(slots_ptr, step, splits, SLOTS)
    values = _wait_for_slots(ptrs, step + 1 + tl.zeros([SLOTS], tl.int32))
    return tl.where(tl.arange(0, SLOTS) < splits, values, 0.0)


@triton.jit
def collect_two(slots_ptr, others_ptr, step, splits, SLOTS: tl.constexpr, OTHER: tl.constexpr):
    """As `collect`, from two rings; in place of the first's zeros up to SLOTS is OTHER."""
    ptrs = _slots_of_step(slots_ptr, step, splits, SLOTS)
    others = _slots_of_step(others_ptr, step, splits, SLOTS)
    tag = step + 1 + tl.zeros([SLOTS], tl.int32)
    values, other_values = _wait_for_two_slots(ptrs, others, tag)
    is_used = tl.arange(0, SLOTS) < splits
    return tl.where(is_used, values, OTHER), tl.where(is_used, other_values, 0.0)


@triton.jit
def collect_sum(slots_ptr, step, splits, SLOTS: tl.constexpr):
    """The sum of the group's values for `step`, once all are there."""
    return tl.sum(collect(slots_ptr, step, splits, SLOTS), axis=0)
