"""RMSNorm and LayerNorm in Triton.

`ops` says what they compute. Both directions are bound by memory: the forward has to read x and
write y, the backward to read x and g and to write dx, once each. Everything here serves that:

* a row is read from device memory once. It stays in registers between its reduction and its use;
  one that is too long for them is read again out of L1, or split over programs that exchange their
  sums;
* while a program of the forward reduces and writes its row, the next ones are on their way to the
  L2 cache, if the device can be asked for that (`launches.tiles_ahead`);
* dw and db are summed in float32, in registers, by as many programs as the device runs at once,
  which walk over the rows. Each writes one row of partial sums, and the same programs or those of a
  second kernel add those up, in a fixed order: no atomics on floats, the same bits on every run;
* ``hidden`` is a run-time integer under a power-of-two block. Where it is no power of two, one
  block around 5120 columns would keep 3072 lanes and their registers idle: a row is a block and a
  second one, the tail, or as many equal pieces as it needs, whichever is faster. Of those only the
  last has masks. A new hidden size compiles a kernel only when it needs other blocks or another
  unit (how wide loads may be). A new number of rows compiles no forward, and a backward only where
  it changes by whom, and in which way, the partial sums are added up, or whether rows fill tiles of
  pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from opgraft_kernels.integers import ceil_div, power_of_2, power_of_2_within, unit_of
from opgraft_kernels.launches import (
    ONE_PROGRAM_ELEMENTS,
    OTHER_BYTES,
    Device,
    Launch,
    Split,
    Tile,
    as_rows,
    contiguous,
    device_of,
    even_programs,
    launches_are_early,
    plan_sum,
    split_rows,
    sum_constexprs,
    sums_in_one_launch,
    tiles_ahead,
)
from opgraft_kernels.norms import ops
from opgraft_kernels.norms.triton_backward import (
    backward_columns_kernel,
    backward_pieces_kernel,
    backward_rows_kernel,
    backward_split_kernel,
    row_means_kernel,
)
from opgraft_kernels.norms.triton_forward import (
    forward_chunks_kernel,
    forward_rows_kernel,
    forward_split_kernel,
)

__all__ = [
    "backward",
    "forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "needs",
    "plan_backward",
    "plan_forward",
    "plan_sums",
    "rms_norm_backward",
    "rms_norm_forward",
]

# --------------------------------------------------------------------------------------------------
# Launches: which kernel, over which grid, with which block
# --------------------------------------------------------------------------------------------------

# The tiles below are the fastest, or within 2% of it, of those tried on an H200 in bfloat16 at
# hidden sizes 40 to 131072, in bytes, so that float32 moves as many of them: 32 bytes of each
# tensor a thread, 64 for RMSNorm's longer rows, for LayerNorm's narrow ones, and for the block of
# rows that have a tail, which adds to it. Forwards see rows as equal pieces, up to 96 bytes a
# thread, if elements are loaded together and a program holds them: LayerNorm's the narrow ones,
# too, where nothing is masked, RMSNorm's neither those nor long ones.

# The least block. A narrower row wastes lanes, but such tensors have few bytes to waste.
_MIN_BLOCK = 16
# Rows whose lanes take up to this many bytes are narrow: a tile has 16 of them or more.
_NARROW_ROW_BYTES = 512
# Longer rows are pieces in a forward, whatever they leave of the last; of RMSNorm up to the other.
_PIECES_ROW_BYTES, _RMS_NORM_PIECES_ROW_BYTES = 1024, 12288
# Rows of up to this many bytes fit into one program: 32 warps at 32 bytes a thread.
_WHOLE_ROW_BYTES = 32 * 1024
# Rows of up to this many bytes are read again by a forward, out of L1: two of them fit into it.
_L1_ROW_BYTES = 64 * 1024


#: g, x, weight, mean and rstd, as a backward's kernels read them.
_Inputs: TypeAlias = tuple[Any, ...]
#: Rows, hidden, and how far rows of g and of x are apart.
_Matrix: TypeAlias = tuple[int, int, int, int]


class Tiling(NamedTuple):
    """What differs between the norms in how their rows are divided among programs."""

    #: Short rows of a forward share a program, up to so many bytes of them.
    forward_bytes: int
    #: One warp has a forward's row of pieces of up to this many bytes: no warp waits for another.
    one_warp_bytes: int
    #: Tiles of a forward of up to this many bytes have a warp for 1024 of them, others for 2048.
    small_forward_bytes: int
    #: Of rows that are split over programs, by the size of an element.
    forward_split: Callable[[int], Tile]
    backward_split: Callable[[int], Tile]
    #: Rows of up to this many bytes get weight and bias before the reduction. Beside longer ones
    #: they take the registers of other programs, which is slower.
    parameters_first_bytes: int
    #: The same for rows with a tail, of which this is the block's part.
    parameters_first_block_bytes: int
    #: Rows with a block of 16 KB and a tail are read twice, if it is up to so large a part of it.
    twice_tail: float
    #: So many bytes of the block a warp, in a forward of narrow rows with a tail.
    narrow_warp_bytes: int
    #: Rows of up to this many bytes are not split in the backward: the sums of longer ones take all
    #: of a program's registers, and loading ahead stops. Those seen as pieces are not either.
    whole_backward_bytes: int
    #: Rows with a tail share a program of the backward, up to so many bytes of them.
    backward_bytes: int
    #: A backward of up to this many elements is computed by one program.
    one_program_elements: int


_RMS_NORM = Tiling(
    forward_bytes=8192,
    one_warp_bytes=1536,
    small_forward_bytes=8192,
    forward_split=lambda itemsize: Tile(1, 8192 // itemsize, 4, per_sm=4, stages=3),
    backward_split=lambda itemsize: Tile(1, 8192 // itemsize, 8, per_sm=2, stages=3),
    parameters_first_bytes=_WHOLE_ROW_BYTES,
    parameters_first_block_bytes=8 * 1024,
    twice_tail=1,
    narrow_warp_bytes=512,
    whole_backward_bytes=_WHOLE_ROW_BYTES,
    backward_bytes=16 * 1024,
    one_program_elements=ONE_PROGRAM_ELEMENTS,
)
_LAYER_NORM = Tiling(
    forward_bytes=4096,  # smaller programs than RMSNorm's: there are two sums to wait for
    one_warp_bytes=3072,
    small_forward_bytes=0,
    forward_split=lambda itemsize: Tile(1, 8192 // itemsize, 4, per_sm=3, stages=3),
    backward_split=lambda itemsize: Tile(1, 4096 // itemsize, 4, per_sm=3, stages=3),
    parameters_first_bytes=8 * 1024,
    parameters_first_block_bytes=2 * 1024,
    twice_tail=0.5,
    narrow_warp_bytes=2048,
    whole_backward_bytes=16 * 1024,
    backward_bytes=8 * 1024,  # it sums two gradients
    one_program_elements=0,  # the sums of two gradients are always added up afterwards
)


def tiling(has_mean: bool) -> Tiling:
    return _LAYER_NORM if has_mean else _RMS_NORM


def _blocks(hidden: int) -> tuple[int, int]:
    """A block of columns and a tail, which hold a row: powers of two, and 0 for no tail."""
    whole = max(power_of_2(hidden), _MIN_BLOCK)
    if whole in (hidden, _MIN_BLOCK):
        return whole, 0
    block = whole // 2
    return block, max(power_of_2(hidden - block), _MIN_BLOCK)


def _has_short_tail(hidden: int, itemsize: int) -> bool:
    """Whether a row's tail leaves lanes out, and elements are loaded together, so that fewer
    registers are needed."""
    block, tail = _blocks(hidden)
    return 0 < tail < block and unit_of(itemsize, hidden) > 1


def _is_read_twice(hidden: int, itemsize: int, sizes: Tiling) -> bool:
    """Whether a forward reads a row with a tail twice, though it would fit into registers: few such
    programs fit into a multiprocessor, so that little is on its way."""
    block, tail = _blocks(hidden)
    return block * itemsize >= 16384 and 0 < tail <= sizes.twice_tail * block


def _is_tail_for_all_threads(tile: Tile, itemsize: int) -> bool:
    """Whether each thread has a vector of each row's tail, or more."""
    return tile.tail * itemsize >= tile.num_warps * 32 * 16


@functools.lru_cache(maxsize=1024)
def _forward_tile(hidden: int, itemsize: int, unit: int, has_mean: bool) -> Tile | None:
    """None: rows are too long for registers, or faster if they are read again."""
    sizes = tiling(has_mean)
    if unit > 1 and (pieces := _forward_pieces(hidden, itemsize, unit, has_mean)) is not None:
        return pieces
    if hidden * itemsize > _WHOLE_ROW_BYTES or _is_read_twice(hidden, itemsize, sizes):
        return None
    block, tail = _blocks(hidden)
    row = (2 * block if tail else block) * itemsize
    rows = 1 if row > 2048 else sizes.forward_bytes // row
    size = rows * block * itemsize
    if tail:
        a_warp = sizes.narrow_warp_bytes if row <= _NARROW_ROW_BYTES else 2048
        if rows == 1:
            tail = max(tail, block // 4)  # for all threads
    else:
        a_warp = 1024 if size <= sizes.small_forward_bytes else 2048
    return Tile(rows, block, max(1, size // a_warp), tail=tail)


def _forward_pieces(hidden: int, itemsize: int, unit: int, has_mean: bool) -> Tile | None:
    """That of rows of equal pieces, of 8 bytes for each thread where rows are short, then of 16, of
    LayerNorm's earlier, and 32. None: of rows of up to 1 KB that are a power of two or need many
    pieces, of RMSNorm's that are as short, or long, and of those that no program holds."""
    row = hidden * itemsize
    if row <= _PIECES_ROW_BYTES:
        return _narrow_forward_pieces(hidden, itemsize) if has_mean else None
    if row > 16384 * itemsize or (row >= _RMS_NORM_PIECES_ROW_BYTES and not has_mean):
        return None
    if row <= tiling(has_mean).one_warp_bytes:
        tile = Tile(1, 256 // itemsize, 1)
    elif row <= 5120:
        tile = Tile(1, 512 // itemsize, 2)
    elif row < 12288:
        tile = Tile(1, (2048 if has_mean else 1024) // itemsize, 4)
    elif row < 16384:
        tile = Tile(1, 2048 // itemsize, 8 if itemsize == 2 else 4)
    elif row == 16384 or unit * itemsize < 16 or (itemsize == 4 and row <= 32768):
        tile = Tile(1, 4096 // itemsize, 8)
    elif row <= 12288 * itemsize:
        # A thread of 16 bits has twice as many elements: without a bound three programs of eight
        # warps would not fit.
        tile = Tile(1, 8192 // itemsize, 8, per_sm=3 if itemsize == 2 else 1)
    elif row <= 28672 and itemsize == 2:
        tile = Tile(1, 4096 // itemsize, 8, per_sm=2)
    else:
        tile = Tile(1, 16384 // itemsize, 16, per_sm=2 if itemsize == 2 else 1)
    return tile._replace(blocks=ceil_div(hidden, tile.block))


def _narrow_forward_pieces(hidden: int, itemsize: int) -> Tile | None:
    """Rows that are few times a power of two: nothing is masked."""
    piece = hidden & -hidden
    pieces = hidden // piece
    if not 1 < pieces <= 7 or piece * itemsize < 32:
        return None
    rows = power_of_2_within(8192 // (hidden * itemsize))
    return Tile(rows, piece, 4, blocks=pieces)


def _has_parameters_first(tile: Tile, itemsize: int, sizes: Tiling) -> bool:
    """Whether a forward loads weight and bias before the reduction."""
    if tile.blocks > 1:
        # Beside two vectors of 16 bits of each piece a thread has no registers for them.
        return itemsize == 4 or tile.rows * tile.block * itemsize <= tile.num_warps * 32 * 16
    most = sizes.parameters_first_block_bytes if tile.tail else sizes.parameters_first_bytes
    return tile.block * itemsize <= most


@functools.lru_cache(maxsize=1024)
def _backward_tile(
    hidden: int, itemsize: int, unit: int, has_mean: bool, shared_memory: int
) -> Tile | None:
    """None: rows are too long for a program."""
    block, tail = _blocks(hidden)
    row = (2 * block if tail else block) * itemsize
    is_short = _has_short_tail(hidden, itemsize)
    # Shorter loads take more addresses and masks: single elements always more than there are
    # registers, others where a row is long.
    if unit * itemsize == 16 or (unit > 1 and hidden * itemsize <= 24 * 1024):
        pieces = _backward_pieces(hidden, itemsize, has_mean)
        if pieces is not None and _bytes_ahead(pieces, itemsize) <= shared_memory:
            return pieces
    if hidden * itemsize > tiling(has_mean).whole_backward_bytes:
        return None
    if has_mean and tail and unit_of(itemsize, hidden) > 1:
        tile = _layer_norm_backward_tile(block, tail, itemsize)
        if tile is not None and _bytes_ahead(tile, itemsize) <= shared_memory:
            return tile
    if row > 16384:
        ahead = Tile(1, block, 16, stages=3, tail=tail)
        if is_short and _bytes_ahead(ahead, itemsize) <= shared_memory:
            return ahead
        # No registers are left for loading ahead.
        return Tile(1, 2 * block if tail == block else block, row // 1024, tail=tail % block)
    rows = max(1, 16384 // row)
    if not is_short:
        return Tile(rows, block, 8, stages=3, tail=tail)
    if row <= _NARROW_ROW_BYTES:
        return Tile(rows, block, 8, stages=4, tail=tail)
    # The two parts of a row take turns, so there is time for a second program.
    rows = max(1, tiling(has_mean).backward_bytes // row)
    return Tile(rows, block, 4, per_sm=2, stages=3, tail=tail)


def _backward_pieces(hidden: int, itemsize: int, has_mean: bool) -> Tile | None:
    """That of rows of equal pieces, with 16 bytes for each thread. None: of those for which a block
    and a tail, or one block, are as fast."""
    block, tail = _blocks(hidden)
    size, is_whole, is_short = block * itemsize, tail == block, 0 < tail <= block // 4
    if itemsize == 2 and size == 2048 and 0 < tail <= block // 8:
        tile = Tile(1, 1024 // itemsize, 2, per_sm=6, stages=3)
    elif itemsize == 2 and size == 4096 and 0 < tail <= block // 2:
        tile = Tile(1, 2048 // itemsize, 4, per_sm=2, stages=4)
        if hidden == block + block // 2 and not has_mean:
            # Nothing is masked: one program that loads far ahead leaves half as many sums.
            tile = tile._replace(per_sm=1, stages=6)
    elif size == 16384 and (is_whole or (has_mean and tail)):
        tile = Tile(1, 4096 // itemsize, 8, stages=3)
    elif (size == 4096 and is_whole) or (size == 8192 and is_short and has_mean):
        tile = Tile(1, 2048 // itemsize, 4, per_sm=2, stages=3)
    elif size == 2048 and is_short and has_mean:
        tile = Tile(2, 1024 // itemsize, 4, per_sm=3, stages=3)
    else:
        return None
    return tile._replace(blocks=ceil_div(hidden, tile.block))


def _layer_norm_backward_tile(block: int, tail: int, itemsize: int) -> Tile | None:
    """That of LayerNorm's rows with a tail, by their bytes; None: as RMSNorm's."""
    size, is_whole = block * itemsize, tail == block
    if size == 2048:
        return Tile(2, 2 * block, 4, per_sm=2, stages=4)
    if size == 4096 and not is_whole:
        return Tile(1, block, 4, per_sm=2, stages=4, tail=max(tail, block // 2))
    if size == 8192 and is_whole:
        return Tile(1, 2 * block, 8, stages=4)
    if size == 8192:
        return Tile(2, block, 8, stages=3, tail=tail)
    return None


def _sums_together(tile: Tile, itemsize: int, has_mean: bool) -> bool:
    """Whether a backward adds up a row's block and tail together, which takes registers."""
    return (
        has_mean and _is_tail_for_all_threads(tile, itemsize) and _a_thread(tile) * itemsize <= 80
    )


def _is_ahead_faster(tile: Tile, load: int) -> bool:
    """Whether a backward loads rows ahead that it loads so many bytes at once.

    Each copy to shared memory is an instruction, as long as that of a whole vector; of less than 4
    bytes there is none. But the values of a large tile have no room in registers.
    """
    return load > 4 or _a_thread(tile) > 32


def _a_thread(tile: Tile) -> int:
    """Elements of each tensor that a thread has."""
    return tile.rows * tile.columns // (tile.num_warps * 32)


def _is_sparing(tile: Tile) -> bool:
    """Whether a backward of pieces has no registers left to keep the weight in."""
    return tile.blocks > 1 and _a_thread(tile) > 40


def _bytes_ahead(tile: Tile, itemsize: int) -> int:
    """The shared memory that a program of a backward takes for loading ahead, at most.

    Two tensors' rows are in it. Triton loads the weight's columns ahead as well, as often as the
    kernel loads them, and everything in one stage less than it is told, which is more where a tile
    has one row.
    """
    a_line = tile.columns * itemsize
    weights = 2 if _is_sparing(tile) else 1
    with_weight = (2 * tile.rows + weights) * (tile.stages - 1) * a_line + OTHER_BYTES
    return max(2 * tile.rows * tile.stages * a_line, with_weight)


def _values(mean: torch.Tensor | None) -> int:
    """How many values of a row programs exchange."""
    return 1 if mean is None else 2


def plan_forward(call: ops.Forward, device: Device) -> Launch:
    """The launch of a forward."""
    sizes = tiling(call.mean is not None)
    rows, hidden, itemsize = call.rows, call.hidden, call.input.element_size()
    x, x_stride = as_rows(call.input, rows, hidden)
    weight, bias = contiguous(call.weight), contiguous(call.bias)
    tensors = (x, weight, bias, call.output, call.mean, call.rstd)
    unit = {"UNIT": unit_of(itemsize, hidden, x_stride)}
    tile = _forward_tile(hidden, itemsize, unit["UNIT"], call.mean is not None)
    if tile is not None:
        tiles, tile_bytes = ceil_div(rows, tile.rows), tile.rows * hidden * itemsize
        is_one_block = tile.rows == 1 or x_stride == hidden
        ahead = tiles_ahead(tile_bytes, tiles, device) if is_one_block else 0
        return Launch(
            forward_rows_kernel,
            tiles,
            (*tensors, rows, hidden, x_stride, call.eps, ahead),
            {
                "ROWS": tile.rows,
                "BLOCK": tile.block,
                "BLOCKS": tile.blocks,
                "TAIL": tile.tail,
                "MASK_ROWS": tile.rows > 1,
                "MASK_COLS": hidden < tile.columns,
                "PARAMETERS_FIRST": _has_parameters_first(tile, itemsize, sizes),
                "TOGETHER": tile.blocks > 1 or _is_tail_for_all_threads(tile, itemsize),
                "PREFETCH": ahead > 0,
                **unit,
            },
            tile.num_warps,
            {"maxnreg": tile.registers} if tile.per_sm > 1 else {},
        )
    split = None
    if device.can_wait and hidden * itemsize > _L1_ROW_BYTES:
        split = split_rows(sizes.forward_split(itemsize), rows, hidden, device.multiprocessors)
    if split is not None:
        slots = split.zeroed_slots(x.device, _values(call.mean))
        steps = ceil_div(rows, split.groups)
        return Launch(
            forward_split_kernel,
            split.programs,
            (*tensors, slots, rows, hidden, x_stride, call.eps, split.splits, steps),
            {**split.constexprs, **unit},
            split.tile.num_warps,
            split.options,
        )
    tile = Tile(1, 16384 // itemsize, 32)
    if hidden * itemsize <= _WHOLE_ROW_BYTES:
        tile = Tile(1, 8192 // itemsize, 16)
    return Launch(
        forward_chunks_kernel,
        rows,
        (*tensors, hidden, x_stride, call.eps),
        {"BLOCK": tile.block, "CHUNKS": _chunks(hidden, tile), **unit},
        tile.num_warps,
    )


def _chunks(hidden: int, tile: Tile) -> int:
    # From a few on a power of two, so that there are few to compile; what is beyond the row is
    # masked off.
    chunks = ceil_div(hidden, tile.block)
    return chunks if chunks <= 4 else power_of_2(chunks)


def plan_backward(call: ops.Backward, device: Device) -> list[Launch]:
    """The launches of a backward, in the stream's order. Its temporaries are allocated here."""
    sizes = tiling(call.mean is not None)
    rows, hidden, itemsize = call.rows, call.hidden, call.input.element_size()
    g, g_stride = as_rows(call.grad_out, rows, hidden)
    x, x_stride = as_rows(call.input, rows, hidden)
    inputs = (g, x, *map(contiguous, (call.weight, call.mean, call.rstd)))
    matrix = (rows, hidden, g_stride, x_stride)
    unit = _unit(call, matrix)["UNIT"]
    tile = _backward_tile(hidden, itemsize, unit, call.mean is not None, device.shared_memory)
    if tile is not None:
        return _plan_backward_rows(call, inputs, matrix, tile, device)
    part = sizes.backward_split(itemsize)
    if device.can_wait and call.dx is not None:
        split = split_rows(part, rows, hidden, device.multiprocessors)
        if split is not None:
            return _plan_backward_split(call, inputs, matrix, split)
    return _plan_backward_columns(call, inputs, matrix, part, device)


def _plan_backward_rows(
    call: ops.Backward, inputs: _Inputs, matrix: _Matrix, tile: Tile, device: Device
) -> list[Launch]:
    """The narrowest rows of LayerNorm are computed without fused multiply-add.

    In a row of one element dx is 0, as w * g is its own mean, and native's is; a fused w * g - mean
    is instead what rounding took off w * g, times rstd of up to 1 / sqrt(eps).
    """
    rows, hidden, *_ = matrix
    has_mean, sums = call.mean is not None, call.sums
    itemsize = call.input.element_size()
    tiles = ceil_div(rows, tile.rows)
    # All of them at once, for they may wait for one another.
    fitting = max(1, device.shared_memory // _bytes_ahead(tile, itemsize))
    per_sm = min(tile.per_sm, fitting)
    programs = even_programs(min(device.multiprocessors * per_sm, tiles), tiles)
    if rows * hidden <= tiling(has_mean).one_program_elements:
        # Its partial sums are the sums, which saves small calls a launch.
        programs, partial, sums = 1, call.dw, []
    else:
        partial = call.partial_sums(programs)
    one_launch = (
        device.can_wait
        and bool(sums)
        and sums_in_one_launch(
            rows, hidden, len(sums), programs, tile, launches_are_early(call.input.device)
        )
    )
    unit = _unit(call, matrix)
    stages = tile.stages if _is_ahead_faster(tile, unit["UNIT"] * itemsize) else 1
    to_sum = (*sums, None)[:2] if one_launch else (None, None)
    constexprs = {
        **needs(call),
        "ROWS": tile.rows,
        "BLOCK": tile.block,
        "STAGES": stages,
        **sum_constexprs(hidden, len(sums), programs, tile, one_launch),
        **unit,
    }
    if tile.blocks > 1:
        kernel, steps = backward_pieces_kernel, tiles
        constexprs |= {
            "BLOCKS": tile.blocks,
            "MASK_ROWS": rows % tile.rows > 0,
            "MASK_COLS": hidden < tile.columns,
            "SPARING": _is_sparing(tile),
        }
    else:
        kernel, steps = backward_rows_kernel, ceil_div(tiles, programs)
        constexprs |= {"TAIL": tile.tail, "TOGETHER": _sums_together(tile, itemsize, has_mean)}
    launch = Launch(
        kernel,
        programs,
        (*inputs, call.dx, partial, *to_sum, *matrix, steps),
        constexprs,
        tile.num_warps,
        {
            "maxnreg": tile.registers,
            "enable_fp_fusion": not has_mean or tile.block > _MIN_BLOCK,
            "launch_cooperative_grid": one_launch,
        },
    )
    return [launch] if one_launch else [launch, *plan_sums(partial, sums)]


def _plan_backward_split(
    call: ops.Backward, inputs: _Inputs, matrix: _Matrix, split: Split
) -> list[Launch]:
    partial = call.partial_sums(split.groups)
    slots = split.zeroed_slots(call.input.device, _values(call.mean))
    steps = ceil_div(call.rows, split.groups)
    launch = Launch(
        backward_split_kernel,
        split.programs,
        (*inputs, call.dx, partial, slots, *matrix, split.splits, steps),
        {**needs(call), **split.constexprs, **_unit(call, matrix)},
        split.tile.num_warps,
        split.options,
    )
    return [launch, *plan_sums(partial, call.sums)]


def _plan_backward_columns(
    call: ops.Backward, inputs: _Inputs, matrix: _Matrix, tile: Tile, device: Device
) -> list[Launch]:
    rows, hidden, *strides = matrix
    launches, means = [], None
    unit = _unit(call, matrix)
    if call.dx is not None:
        shape = (rows, _values(call.mean))
        means = torch.empty(shape, dtype=torch.float32, device=call.input.device)
        launches.append(
            Launch(
                row_means_kernel,
                rows,
                (*inputs, means, hidden, *strides),
                {"BLOCK": tile.block, "CHUNKS": _chunks(hidden, tile), **unit},
                tile.num_warps,
            )
        )
    blocks = ceil_div(hidden, tile.block)
    row_splits = max(1, min(rows, device.multiprocessors * 4 // blocks))
    partial = call.partial_sums(row_splits)
    launches.append(
        Launch(
            backward_columns_kernel,
            row_splits * blocks,
            (*inputs, means, call.dx, partial, *matrix, row_splits, ceil_div(rows, row_splits)),
            {**needs(call), "BLOCK": tile.block, **unit},
            tile.num_warps,
        )
    )
    return [*launches, *plan_sums(partial, call.sums)]


def _unit(call: ops.Backward, matrix: _Matrix) -> dict[str, int]:
    _, *lengths = matrix
    return {"UNIT": unit_of(call.input.element_size(), *lengths)}


def needs(call: ops.Backward) -> dict[str, bool]:
    """What kernels are told of the gradients that are sums over rows."""
    return {"NEED_DW": call.dw is not None, "NEED_DB": call.db is not None}


def plan_sums(partial: torch.Tensor | None, sums: list[torch.Tensor]) -> list[Launch]:
    """The launch that adds up partial sums, if there are any."""
    return [plan_sum(partial, *sums)] if partial is not None and sums else []


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


def forward(call: ops.Forward) -> None:
    """Forwards of float32, float16 and bfloat16, in any strides."""
    plan_forward(call, device_of(call.input.device))()


def backward(call: ops.Backward) -> None:
    """Backwards of float32, float16 and bfloat16, in any strides, expanded ones included."""
    for launch in plan_backward(call, device_of(call.input.device)):
        launch()


# ATen's ops, around these two.
rms_norm_forward = functools.partial(ops.rms_norm_forward, forward)
rms_norm_backward = functools.partial(ops.rms_norm_backward, backward)
layer_norm_forward = functools.partial(ops.layer_norm_forward, forward)
layer_norm_backward = functools.partial(ops.layer_norm_backward, backward)
