"""Launches of kernels that walk over rows: programs, tiles, and what of a device they depend on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from opgraft import triton_utils
from opgraft_kernels.devices import can_begin_early, can_prefetch, multiprocessors
from opgraft_kernels.integers import ceil_div, power_of_2, power_of_2_within, unit_of
from opgraft_kernels.rows import RING, STRIP, sum_partials_kernel

__all__ = [
    "ONE_PROGRAM_ELEMENTS",
    "OTHER_BYTES",
    "Device",
    "Launch",
    "Split",
    "Tile",
    "as_rows",
    "contiguous",
    "device_of",
    "ends_columns",
    "even_programs",
    "launched",
    "launches_are_early",
    "plan_sum",
    "split_rows",
    "sum_constexprs",
    "sums_in_one_launch",
    "tiles_ahead",
]

_Arguments = ParamSpec("_Arguments")
_Outputs = TypeVar("_Outputs")


class Launch(NamedTuple):
    """One kernel launch, complete."""

    kernel: Any
    grid: int
    arguments: tuple[Any, ...]
    constexprs: dict[str, Any]
    num_warps: int = 4
    options: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)

    @property
    def keywords(self) -> dict[str, Any]:
        """What the kernel is compiled with, beside its arguments."""
        # Triton fuses multiplications with additions unless told not to; 3.9 warns each process
        # that does not say which, since from 3.10 on the default is the other.
        fusion = {"enable_fp_fusion": True}
        keywords = {**self.constexprs, "num_warps": self.num_warps, **fusion, **self.options}
        is_early = self.is_early
        return keywords | {"EARLY": is_early} | ({"launch_pdl": True} if is_early else {})

    @property
    def is_early(self) -> bool:
        """Whether programs may be there before the stream's kernel before this one has ended.

        What a launch costs before its first program runs passes while that kernel ends. A
        cooperative launch gains nothing. Programs wait for that kernel alone, and so does each
        kernel here: one of others that began early and never waited could end before those before
        it.
        """
        is_cooperative = self.options.get("launch_cooperative_grid", False)
        return not is_cooperative and launches_are_early(_device_of_any(self.arguments))

    def __call__(self) -> None:
        self.kernel[(self.grid,)](*self.arguments, **self.keywords)


def launched(
    plan: Callable[_Arguments, tuple[_Outputs, Sequence[Launch]]],
) -> Callable[_Arguments, _Outputs]:
    """An op: what a plan of it returns, once its launches are made.

    Args:
        plan: takes the op's arguments, and allocates what the op returns. It returns that, and the
            launches that fill it, in the stream's order.
    """

    @functools.wraps(plan)
    def op(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Outputs:
        outputs, launches = plan(*args, **kwargs)
        for launch in launches:
            launch()
        return outputs

    return op


def launches_are_early(device: torch.device) -> bool:
    """Whether launches are that can be.

    Not in a compiled graph that has the kernels itself: for the reason that `tiles_ahead` says.
    """
    return can_begin_early(device) and not triton_utils.is_traced()


def _device_of_any(arguments: tuple[Any, ...]) -> torch.device:
    """The device of the first tensor among a kernel's arguments, which may be in tuples."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            return each.device
        if isinstance(each, tuple) and any(isinstance(one, torch.Tensor) for one in each):
            return _device_of_any(each)
    raise ValueError("a kernel has no tensor among its arguments")


class Tile(NamedTuple):
    """What a program of `num_warps` warps holds of a matrix: in each of `rows` rows `blocks` times
    `block` elements, and `tail` more where that is not 0.

    `per_sm` is how many such programs a multiprocessor is to run at once, where programs walk over
    the rows, and `stages` how many tiles deep they load ahead, into shared memory.
    """

    rows: int
    block: int
    num_warps: int
    per_sm: int = 1
    stages: int = 1
    tail: int = 0
    blocks: int = 1

    @property
    def columns(self) -> int:
        return self.blocks * self.block + self.tail

    @property
    def registers(self) -> int:
        """The most a thread may have for `per_sm` programs to fit: a multiprocessor has 65536."""
        return min(255, 65536 // (self.per_sm * self.num_warps * 32) // 8 * 8)


# Shared memory that a program takes beside its loads: 1 KB is the system's, the rest for sums.
OTHER_BYTES = 2560

# How a backward is launched, whichever calls it takes. One whose programs leave sums to add up
# takes two launches, and each costs the host as long as the GPU takes for half of a small one. One
# launch is enough where one program computes all of it, of up to so many elements: of more the GPU
# would take longer than with two.
ONE_PROGRAM_ELEMENTS = 2**14
# And where the programs wait for one another and add up the sums themselves, of up to so many
# elements in rows of up to so many: the host saves more than the GPU loses by waiting. Each program
# adds up as many values as a row is long, so of longer rows the GPU takes longer.
# (`benchmarks/launch.py --crossover`, results/launch_crossover*.json: as it is; when there were two
# launches; with wider bounds for either way.)
ONE_LAUNCH_ELEMENTS, ONE_LAUNCH_HIDDEN = 2**22, 4096
# Of fewer where the second launch is early, which costs the GPU less than waiting.
ONE_LAUNCH_ELEMENTS_BEFORE_EARLY = 2**20
# Where each program reads all that it adds up at once, the GPU is faster, too, if no launch is
# early: in rows of up to so many elements; in narrow rows, up to so many elements in all.
AT_ONCE_HIDDEN = 2**14
AT_ONCE_NARROW_HIDDEN, AT_ONCE_NARROW_ELEMENTS = 1024, 2**24


def ends_columns(
    lines: int, size: int, strides: tuple[int, ...], tensors: tuple[torch.Tensor, ...]
) -> int:
    """ENDS: of lines of `size`, which are so far apart, so many a program. (Of outputs the stride
    is `size`.)

    Lines that share a program are short: a warp has them, and narrow loads are as fast.
    """
    narrowest = min(t.element_size() for t in tensors)
    unit = unit_of(narrowest)
    is_shifted = (
        lines == 1
        and unit_of(narrowest, size, *strides) < unit
        # They begin at the same place in a unit of all tensors.
        and all((stride - size) % unit == 0 for stride in strides)
        # A plan holds for addresses that are the same modulo 16.
        and all(t.data_ptr() % 16 == 0 for t in tensors)
    )
    return 2 * unit if is_shifted else 0


def even_programs(most: int, steps: int) -> int:
    """How many of up to `most` programs are to share so many steps: a power of two of them, if none
    then has more. So they leave fewer partial sums, and those that add them up mask nothing.

    >>> even_programs(132, 4096), even_programs(132, 8192)
    (128, 132)
    """
    even = power_of_2_within(most)
    return even if ceil_div(steps, even) == ceil_div(steps, most) else most


def sums_in_one_launch(
    rows: int, hidden: int, sums: int, programs: int, tile: Tile, is_early: bool
) -> bool:
    """Whether programs that walk over the rows are to add up their sums, so many rows of them, in
    the same launch. `is_early`: one for the sums would be (`Launch.is_early`)."""
    elements = rows * hidden
    is_short = programs > 1 and hidden <= ONE_LAUNCH_HIDDEN
    if is_early:
        return is_short and elements <= ONE_LAUNCH_ELEMENTS_BEFORE_EARLY
    if _share_at_once(hidden, sums, programs, tile) is not None:
        is_narrow = hidden <= AT_ONCE_NARROW_HIDDEN
        return elements <= AT_ONCE_NARROW_ELEMENTS if is_narrow else hidden <= AT_ONCE_HIDDEN
    return is_short and elements <= ONE_LAUNCH_ELEMENTS


def _share_at_once(hidden: int, sums: int, programs: int, tile: Tile) -> int | None:
    """How many columns a program adds up if each reads all of its share at once; None where it has
    no registers for that, or few programs would have all there is."""
    strips = sums * ceil_div(hidden, STRIP.value)
    if programs < 128 or 4 * strips < programs:
        return None
    share = STRIP.value * power_of_2(ceil_div(strips, programs))
    a_thread = power_of_2(programs) * share // (tile.num_warps * 32)
    return share if 2 * a_thread <= power_of_2(tile.registers) else None


def sum_constexprs(
    hidden: int, sums: int, programs: int, tile: Tile, one_launch: bool
) -> dict[str, Any]:
    """What `sum_after_barrier` adds up at a time: about an equal part of the columns a program.

    Few kinds for all numbers of programs, and with them of rows: there are few to compile.
    """
    if not one_launch:
        return {"SUM_ROWS": 1, "SUM_BLOCK": 1, "SUM_ONCE": False, "SUM_MASKED": False}
    share = _share_at_once(hidden, sums, programs, tile)
    if share is not None:
        rows = power_of_2(programs)
        masked = rows > programs
        return {"SUM_ROWS": rows, "SUM_BLOCK": share, "SUM_ONCE": True, "SUM_MASKED": masked}
    if programs >= 32:
        rows, parts = 64, 128 if programs >= 128 else 64
    elif hidden < 1024:
        rows, parts = 16, 16
    else:
        # Few programs have few partial sums: blocks as wide as fits then. With a sixteenth of a
        # row each, programs had several. One block for narrower rows is worse.
        # (results/launch_crossover_narrow_sums_nvidia_h200.json; launch_crossover_nvidia_h200.json)
        rows, parts = max(4, min(power_of_2(programs), 16)), 1
    return {
        "SUM_ROWS": rows,
        "SUM_BLOCK": max(16, min(power_of_2(ceil_div(hidden, parts)), 4096 // rows)),
        "SUM_ONCE": False,
        "SUM_MASKED": False,
    }


def plan_sum(
    partial: torch.Tensor, total: torch.Tensor, other_total: torch.Tensor | None = None
) -> Launch:
    """Sums `partial`, ``[partials, hidden]``, to `total`; or ``[2, partials, hidden]`` to both."""
    partials, hidden = partial.shape[-2:]
    # Many partial sums want many programs, each with few columns; few are read in one go.
    tile = Tile(64, 16, 4) if partials > 64 else Tile(32, 64, 4)
    return Launch(
        sum_partials_kernel,
        ceil_div(hidden, tile.block) * (1 if other_total is None else 2),
        (partial, total, other_total, partials, hidden, ceil_div(partials, tile.rows)),
        {"ROWS": tile.rows, "BLOCK": tile.block},
        tile.num_warps,
    )


class Device(NamedTuple):
    """What of a device launches depend on."""

    multiprocessors: int
    shared_memory: int  # of a multiprocessor, in bytes
    can_wait: bool  # whether programs may wait for one another: the interpreter runs them in turn
    can_prefetch: bool = False  # whether `prefetch` is an instruction: from Hopper on
    l2_cache: int = 60 * 2**20  # in bytes


@functools.cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":  # the interpreter: any amounts of memory
        return Device(multiprocessors(device), 2**20, can_wait=False, l2_cache=2**20)
    properties = torch.cuda.get_device_properties(device)
    return Device(
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
        can_wait=True,
        can_prefetch=can_prefetch(device),
        l2_cache=properties.L2_cache_size,
    )


# A program that holds its tile between a reduction and its use loads nothing meanwhile. So each
# asks, when it begins, for a tile that is read later, by a program that begins when those that run
# now are done. Of a multiprocessor's programs these are about as many bytes as they hold: with half
# as many memory has nothing to do at times, with twice as many the cache drops some before use. A
# smaller cache, as the H100's beside the H200's, drops some of as many.
_BYTES_AHEAD, _BYTES_AHEAD_IN_SMALL_CACHE = 47 * 1024, 24 * 1024
_SMALL_CACHE = 55 * 2**20


def tiles_ahead(tile_bytes: int, tiles: int, device: Device) -> int:
    """How many tiles after its own a program is to `prefetch`; 0 where the device cannot.

    Nor can a compiled graph that has the launch itself: torch takes a kernel with an instruction
    that it does not know for one that writes to all of its arguments.

    It is beyond the last of the `tiles` where the cache may hold all of them already, as when the
    kernel before wrote them: to ask for those takes time.
    """
    if not device.can_prefetch or triton_utils.is_traced():
        return 0
    if tile_bytes * tiles <= device.l2_cache // 2:
        return tiles
    is_small = device.l2_cache < _SMALL_CACHE
    bytes_ahead = _BYTES_AHEAD_IN_SMALL_CACHE if is_small else _BYTES_AHEAD
    return device.multiprocessors * max(1, round(bytes_ahead / tile_bytes))


class Split(NamedTuple):
    """How rows are split over groups of programs."""

    tile: Tile
    splits: int  # programs in a group
    groups: int

    @property
    def programs(self) -> int:
        return self.groups * self.splits

    @property
    def slots(self) -> int:
        return power_of_2(self.splits)

    @property
    def constexprs(self) -> dict[str, Any]:
        return {"BLOCK": self.tile.block, "SLOTS": self.slots, "STAGES": self.tile.stages}

    @property
    def options(self) -> dict[str, Any]:
        # Cooperative: all programs run at once, or the launch fails.
        return {"maxnreg": self.tile.registers, "launch_cooperative_grid": True}

    def zeroed_slots(self, device: torch.device, values: int) -> torch.Tensor:
        """Slots for groups that exchange that many values a row."""
        shape = (self.groups, values, RING.value, self.slots)
        return torch.zeros(shape, dtype=torch.int64, device=device)


def split_rows(tile: Tile, rows: int, hidden: int, multiprocessors: int) -> Split | None:
    """The split of `rows` rows; None where a device runs too few programs at once for one row."""
    splits = ceil_div(hidden, tile.block)
    groups = min(rows, multiprocessors * tile.per_sm // splits)
    return Split(tile, splits, groups) if groups else None


# --------------------------------------------------------------------------------------------------
# Tensors as rows
# --------------------------------------------------------------------------------------------------


def contiguous(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()


def as_rows(t: torch.Tensor, rows: int, hidden: int) -> tuple[torch.Tensor, int]:
    """`t`, or a copy where its rows are not contiguous and evenly spaced; and the rows' stride."""
    if t.is_contiguous():
        return t, hidden
    if rows == 1:
        return t.contiguous(), hidden
    try:
        matrix = t.view(rows, hidden)
    except RuntimeError:  # its dimensions cannot be merged into two
        return t.contiguous(), hidden
    # A single column's stride says nothing.
    if hidden != 1 and matrix.stride(1) != 1:
        return t.contiguous(), hidden
    return t, matrix.stride(0)
