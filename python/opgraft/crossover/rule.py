"""The rule that makes decisions of measured times, and fills in between measured cells."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from opgraft.core import loader
from opgraft.crossover.tables import Cell, Entry
from opgraft.when.grid import Axis, ExactAxis, Grid, SteppedAxis, joined

#: How much faster than native a way must be to be taken, as a share of its own time. Two
#: measurements of the same call on the same device differ by about as much: a call that is taken
#: is then hardly slower than natively, and what is declined would be won by a few per cent.
MARGIN = 0.03
#: The same as to what the host takes, at the least: its times differ more from one process, and
#: one computer, to the next.
HOST_MARGIN = 0.12
#: As `MARGIN`, where the table is of another device of the same architecture, which runs the same
#: code: its multiprocessors are as many times as fast for native as for the override, its memory
#: too.
OTHER_DEVICE_MARGIN = 0.1
#: As `MARGIN`, where it is of another architecture.
OTHER_ARCHITECTURE_MARGIN = 0.5

#: The columns of a grid: by a launch plan, from Python, as an opaque op in a compiled graph.
PLAN, PYTHON, GRAPH = range(3)
COLUMNS = ("plan", "python", "graph")

Indices: TypeAlias = tuple[int, ...]

#: In place of a decision, which has a bit for each column.
_UNDECIDED = 0xFF


def times(cell: Cell, column: int) -> tuple[float | None, float | None]:
    """What a call takes natively and by a column's way: on the device or the host, the longer.

    Without a launch plan's time the way by a plan is the one from Python: there can be no plan.
    """
    if column == GRAPH:
        return cell.inductor, cell.opaque
    # Without the host's time, native counts as faster than it may be.
    native = _longer(cell.native, cell.native_host or 0)
    return native, _longer(cell.override, host_time(cell, column))


def host_time(cell: Cell, column: int) -> float | None:
    """What the host takes for a call by a column's way."""
    return cell.plan_host if column == PLAN and cell.plan_host else cell.python_host


def gain(native: float, override: float, host: float) -> float:
    """How many times as fast as native a call is, where it is taken from `1 + MARGIN` on.

    What the host takes counts as longer than it is: by what `HOST_MARGIN` is above `MARGIN`.

    Args:
        native: what takes longer natively, the device or the host.
        override: what the device takes for the override.
        host: what the host does.

    >>> round(gain(20.0, 10.0, 5.0), 2), round(gain(20.0, 10.0, 10.0), 2)
    (2.0, 1.84)
    """
    return native / max(override, host * (1 + HOST_MARGIN) / (1 + MARGIN))


def _longer(device: float | None, host: float | None) -> float | None:
    return None if device is None or host is None else max(device, host)


def pays(cell: Cell, column: int, margin: float) -> bool:
    """Whether a column's way is faster than native by more than the margin.

    >>> cell = Cell(43.0, 39.0, 8.0, 6.0, 35.0, None, None)
    >>> [pays(cell, column, 0.05) for column in (PLAN, PYTHON, GRAPH)]
    [True, True, False]
    >>> pays(cell, PYTHON, 0.2)
    False
    """
    if column != GRAPH:
        return bool(_bits_of_calls(cell, margin) >> column & 1)
    native, way = times(cell, column)
    if native is None or way is None or native < way * (1 + margin):
        return False
    # A graph's opaque op asks the router again when it runs, which must not send it to native.
    return not is_measured(cell, PLAN) or _bits_of_calls(cell, margin) != 0


def host_margin(margin: float) -> float:
    """By how much native must be slower than the host is, where `margin` is that of the device."""
    return max(margin, HOST_MARGIN)


def _bits_of_calls(cell: Cell, margin: float) -> int:
    """A bit for each of the ways of a call that are faster than native by more than the margin:
    what `times` says of both, for all cells of a table at once, for which calls wait."""
    native, override, native_host, plan_host, python_host, _, _ = cell
    if native is None or override is None:
        return 0
    if native_host is not None and native_host > native:
        native = native_host
    if native < override * (1 + margin):
        return 0
    border = 1 + host_margin(margin)
    plan_host = plan_host or python_host
    by_plan = plan_host is not None and native >= plan_host * border
    from_python = python_host is not None and native >= python_host * border
    return by_plan << PLAN | from_python << PYTHON


def grid_of(layers: Sequence[tuple[Entry, float]]) -> Grid:
    """The decision for each cell of one table, or of several.

    A cell that was not measured follows its neighbours: along each axis with steps, the nearest
    decided cells on both sides. It is taken if all of them are, and declined if one is. Where no
    axis has neighbours on both sides, it waits until other cells were filled in, and is declined in
    the end. Calls and graphs have cells of their own: not every cell is measured in both. A graph
    is opaque only where calls are taken.

    Of several tables the first one counts where it decides: where a cell was measured, or its
    neighbours agree. Tables with one margin are of one device, and are filled in together. Where no
    table decides so, the first one does whose neighbours disagree, and then the first one that has
    an open end there: a table behind it takes nothing from what it would decide alone.

    Args:
        layers: the tables, with the margin of each. Their axes can be joined.
    """
    axes = layers[0][0].axes
    for entry, _ in layers[1:]:
        axes = joined(axes, entry.axes) or axes
    decided = [_undecided(axes) for _ in range(2)]
    disagreeing: list[tuple[bytearray, bytearray]] = []
    devices = [(margin, list(each)) for margin, each in itertools.groupby(layers, lambda it: it[1])]
    measured = [
        _measured_cells([entry for entry, _ in tables], axes, margin) for margin, tables in devices
    ]
    # Where cells disagree by a plan, nothing is taken, whichever device's they are: so of the last
    # one's cells it does not matter whether they agree. Unless one pays from Python alone.
    is_python_alone = any(1 << PYTHON in calls for calls, _ in measured)
    for which, found in enumerate(measured, 1):
        for so_far, cells in zip(decided, found, strict=True):
            if which == len(measured) and not (is_python_alone and disagreeing):
                _fill(cells, axes, operator.and_)
            else:
                disagreeing.append((so_far, _fill_where_agreed(cells, axes)))
            _take_decisions(so_far, cells)
    for so_far, cells in disagreeing:
        _take_decisions(so_far, cells)
    for entry, margin in layers:
        _take_open_ends(decided, axes, entry, margin)
    calls, graphs = decided
    return Grid(axes, _joined(_decided(calls), _decided(graphs)))


def _take_open_ends(
    decided: Sequence[bytearray], axes: Sequence[Axis], entry: Entry, margin: float
) -> None:
    """Take what a table decides alone beyond its ends, which are not those of the joined axes."""
    is_shorter = any(
        isinstance(own, SteppedAxis) and own.open_ended and own.count < axis.count
        for own, axis in zip(entry.axes, axes, strict=True)
    )
    if not is_shorter:
        return
    for so_far, cells in zip(decided, _measured_cells([entry], entry.axes, margin), strict=True):
        _fill(cells, entry.axes, operator.and_)
        _take_decisions(so_far, _spread(cells, entry.axes, axes))


def _spread(cells: bytes | bytearray, own: Sequence[Axis], axes: Sequence[Axis]) -> bytes:
    """A table's cells on joined axes; undecided outside of its own."""
    if not axes:
        return bytes(cells)
    size = len(cells) // own[0].count
    parts = (cells[start : start + size] for start in range(0, len(cells), size))
    spread = [_spread(part, own[1:], axes[1:]) for part in parts]
    nothing = bytes(_undecided(axes[1:]))
    indices = map(own[0].index_of, map(axes[0].lower, range(axes[0].count)))
    return b"".join(nothing if index is None else spread[index] for index in indices)


def _measured_cells(
    entries: Sequence[Entry], axes: Sequence[Axis], margin: float
) -> tuple[bytearray, bytearray]:
    """What tables measured, of calls and of graphs; where several did, the first counts."""
    calls, graphs = (_undecided(axes) for _ in range(2))
    for entry in reversed(entries):
        starts = _places(entry.axes, axes)
        for indices, cell in entry.cells.items():
            flat = sum(places[index] for places, index in zip(starts, indices, strict=True))
            if is_measured(cell, PLAN):
                calls[flat] = _bits_of_calls(cell, margin)
            if is_measured(cell, GRAPH):
                graphs[flat] = pays(cell, GRAPH, margin) << GRAPH
    return calls, graphs


def _places(own: Sequence[Axis], axes: Sequence[Axis]) -> list[list[int]]:
    """By how many cells of joined axes each bucket of a table's own goes on, for each axis."""
    return [
        [stride * index for index in map(axis.index_of, map(of_table.lower, range(of_table.count)))]  # type: ignore[operator]
        for of_table, axis, stride in zip(own, axes, _strides(axes), strict=True)
    ]


def _take_decisions(cells: bytearray, others: bytes | bytearray) -> None:
    """Take what others decide for the cells that are undecided."""
    if cells.count(_UNDECIDED) == len(cells):
        cells[:] = others
    elif _UNDECIDED in cells:
        cells[:] = _merged(cells, others, where=cells.translate(_IS_UNDECIDED))


# Operations on all cells at once, as on one large number: a call waits for them, and Python is slow
# at one cell after the other.


def _merged(cells: bytes | bytearray, others: bytes | bytearray, where: bytes | bytearray) -> bytes:
    """The others' cells where a mask's bytes are all ones, and where they are 0 one's own."""
    own, other, mask = (int.from_bytes(each, "big") for each in (cells, others, where))
    return (own ^ (own ^ other) & mask).to_bytes(len(cells), "big")


def _equal(cells: bytes | bytearray, others: bytes | bytearray, bits: int) -> bytes:
    """A mask of where some bits of both are the same."""
    size = len(cells)
    one, other = (int.from_bytes(each, "big") for each in (cells, others))
    differing = (one ^ other) & int.from_bytes(bytes([bits]) * size, "big")
    return differing.to_bytes(size, "big").translate(_IS_ZERO)


def is_measured(cell: Cell, column: int) -> bool:
    """Whether a cell says something of a column: it has a time of the device's there."""
    found = (cell.inductor, cell.opaque) if column == GRAPH else (cell.native, cell.override)
    return found != (None, None)


def bits(cell: Cell, margin: float) -> int:
    """The decisions for a measured cell: a bit for each column."""
    return sum(pays(cell, column, margin) << column for column in range(len(COLUMNS)))


def filled(
    decided: Mapping[Indices, int], axes: Sequence[Axis], join: Callable[[int, int], int]
) -> dict[Indices, int]:
    """Decisions, and for the cells between them what their neighbours' decisions join to."""
    cells = _undecided(axes)
    strides = _strides(axes)
    for indices, decision in decided.items():
        cells[sum(map(operator.mul, indices, strides))] = decision
    _fill(cells, axes, join)
    everywhere = itertools.product(*(range(axis.count) for axis in axes))
    pairs = zip(everywhere, cells, strict=True)
    return {indices: decision for indices, decision in pairs if decision != _UNDECIDED}


# A byte for each cell, as in a grid: the first call of each op in a process waits for this.


def _undecided(axes: Sequence[Axis]) -> bytearray:
    return bytearray([_UNDECIDED]) * math.prod(axis.count for axis in axes)


def _decided(cells: bytearray) -> bytes:
    """The decisions, with declines where nothing decided."""
    return bytes(cells).replace(bytes([_UNDECIDED]), b"\0")


def _joined(calls: bytes, graphs: bytes) -> bytes:
    """Both decisions of each cell; what is declined in calls is so in graphs."""
    everything = bytes([0]) + bytes([0xFF]) * 0xFF
    taken = int.from_bytes(calls.translate(everything), "big")
    both = int.from_bytes(calls, "big") | int.from_bytes(graphs, "big") & taken
    return both.to_bytes(len(calls), "big")


def _fill(cells: bytearray, axes: Sequence[Axis], join: Callable[[int, int], int]) -> None:
    """Fill in undecided cells: in the core, for which calls wait, or where there is none here."""
    core = loader.in_use()
    if core is not None and join is operator.and_:
        described = [(axis.count, not isinstance(axis, ExactAxis)) for axis in axes]
        cells[:] = core.fill_grid(bytes(cells), described)
    else:
        _fill_here(cells, axes, join)


#: Decisions with each bit turned over, by which the least of them becomes the most.
_TURNED_OVER = bytes([*(7 - value for value in range(8)), *range(8, 256)])
#: Masks, by what a byte is.
_IS_UNDECIDED = bytes(_UNDECIDED) + bytes([0xFF])
_IS_ZERO = bytes([0xFF]) + bytes(0xFF)


def _fill_where_agreed(cells: bytearray, axes: Sequence[Axis]) -> bytearray:
    """Fill in the undecided cells whose neighbours are decided alike.

    From where on it pays from Python, too, is not looked at: no table is measured for that alone.

    Returns:
        The cells as they would be if all of them were filled in.
    """
    least, most = cells[:], cells.translate(_TURNED_OVER)
    _fill(least, axes, operator.and_)
    _fill(most, axes, operator.and_)
    agreed = _equal(least, most.translate(_TURNED_OVER), 0xFF & ~(1 << PYTHON))
    cells[:] = _merged(cells, least, where=agreed)
    return least


def _fill_here(cells: bytearray, axes: Sequence[Axis], join: Callable[[int, int], int]) -> None:
    lines = list(_lines(axes))
    while found := _between(cells, lines, join):
        for cell, decision in found.items():
            cells[cell] = decision


def _between(
    cells: bytearray, lines: Sequence[slice], join: Callable[[int, int], int]
) -> dict[int, int]:
    """Undecided cells between two decided ones, and what their neighbours' decisions join to."""
    found: dict[int, int] = {}
    for line in lines:
        values = cells[line]
        if not 0 < values.count(_UNDECIDED) < len(values) - 1:
            continue
        places = [place for place, value in enumerate(values) if value != _UNDECIDED]
        for low, high in itertools.pairwise(places):
            ends = join(values[low], values[high])
            for cell in range(line.start, line.stop, line.step)[low + 1 : high]:
                found[cell] = join(found.get(cell, ends), ends)
    return found


def _lines(axes: Sequence[Axis]) -> Iterator[slice]:
    """The cells along each axis with steps, by their places along the others."""
    size = math.prod(axis.count for axis in axes)
    step = size
    for axis in axes:
        length, step = step, step // axis.count
        if isinstance(axis, ExactAxis):
            continue
        for before in range(0, size, length):
            starts = range(before, before + step)
            yield from (slice(start, start + length, step) for start in starts)


def _strides(axes: Sequence[Axis]) -> list[int]:
    """By how many cells an index of each axis goes on; the last axis varies fastest."""
    return [math.prod(axis.count for axis in axes[after:]) for after in range(1, len(axes) + 1)]
