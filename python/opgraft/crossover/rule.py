"""The rule that makes decisions of measured times, and fills in between measured cells."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from opgraft.crossover.tables import Cell, Entry
from opgraft.when.grid import Axis, ExactAxis, Grid

#: How much faster than native a way must be to be taken, as a share of its own time. Two
#: measurements of the same call on the same device differ by less.
MARGIN = 0.05
#: The same where the table is of another device of the same architecture.
OTHER_DEVICE_MARGIN = 0.2
#: The same where it is of another architecture.
OTHER_ARCHITECTURE_MARGIN = 0.5

#: The columns of a grid: by a launch plan, from Python, as an opaque op in a compiled graph.
PLAN, PYTHON, GRAPH = range(3)
COLUMNS = ("plan", "python", "graph")

Indices: TypeAlias = tuple[int, ...]


def times(cell: Cell, column: int) -> tuple[float | None, float | None]:
    """What a call takes natively and by a column's way: on the device or the host, the longer.

    Without a launch plan's time the way by a plan is the one from Python: there can be no plan.
    """
    if column == GRAPH:
        return cell.inductor, cell.opaque
    # Without the host's time, native counts as faster than it may be.
    native = _longer(cell.native, cell.native_host or 0)
    host = cell.plan_host if column == PLAN and cell.plan_host else cell.python_host
    return native, _longer(cell.override, host)


def _longer(device: float | None, host: float | None) -> float | None:
    return None if device is None or host is None else max(device, host)


def pays(cell: Cell, column: int, margin: float) -> bool:
    """Whether a column's way is faster than native by more than the margin.

    >>> cell = Cell(43.0, 39.0, 8.0, 6.0, 40.0, None, None)
    >>> [pays(cell, column, 0.05) for column in (PLAN, PYTHON, GRAPH)]
    [True, True, False]
    >>> pays(cell, PYTHON, 0.2)
    False
    """
    native, way = times(cell, column)
    if native is None or way is None or native < way * (1 + margin):
        return False
    # A graph's opaque op asks the router again when it runs, which must not send it to native.
    return column != GRAPH or any(pays(cell, each, margin) for each in (PLAN, PYTHON))


def grid_of(entry: Entry, margin: float) -> Grid:
    """The decision for each cell of a table.

    A cell that was not measured follows its neighbours: along each axis with steps, the nearest
    decided cells on both sides. It is taken if all of them are, and declined if one is. Where no
    axis has neighbours on both sides, it waits until other cells were filled in, and is declined in
    the end. Each column has cells of its own: fewer are measured in compiled graphs.
    """
    cells = bytearray(math.prod(axis.count for axis in entry.axes))
    for column in range(len(COLUMNS)):
        measured = {
            indices: int(pays(cell, column, margin))
            for indices, cell in entry.cells.items()
            if is_measured(cell, column)
        }
        for indices, decision in filled(measured, entry.axes, operator.and_).items():
            cells[_flat(indices, entry.axes)] |= decision << column
    return Grid(entry.axes, bytes(cells))


def is_measured(cell: Cell, column: int) -> bool:
    """Whether a cell says something of a column. One without the times of graphs says nothing."""
    return column != GRAPH or (cell.inductor, cell.opaque) != (None, None)


def bits(cell: Cell, margin: float) -> int:
    """The decisions for a measured cell: a bit for each column."""
    return sum(pays(cell, column, margin) << column for column in range(len(COLUMNS)))


def filled(
    decided: Mapping[Indices, int], axes: Sequence[Axis], join: Callable[[int, int], int]
) -> dict[Indices, int]:
    """Decisions, and for the cells between them what their neighbours' decisions join to."""
    found = dict(decided)
    while new := dict(_between(found, axes, join)):
        found |= new
    return found


def _between(
    decided: Mapping[Indices, int], axes: Sequence[Axis], join: Callable[[int, int], int]
) -> Iterator[tuple[Indices, int]]:
    """Undecided cells between two decided ones, and what their neighbours' decisions join to."""
    found: dict[Indices, int] = {}
    for which, axis in enumerate(axes):
        if isinstance(axis, ExactAxis):
            continue
        for (before, behind), places in _lines(decided, which).items():
            for low, high in itertools.pairwise(places):
                cells = [(*before, place, *behind) for place in range(low, high + 1)]
                ends = join(decided[cells[0]], decided[cells[-1]])
                for cell in cells[1:-1]:
                    found[cell] = join(found.get(cell, ends), ends)
    yield from found.items()


def _lines(decided: Mapping[Indices, int], which: int) -> dict[tuple[Indices, Indices], list[int]]:
    """The places of decided cells along one axis, in order, by their places along the others."""
    lines: dict[tuple[Indices, Indices], list[int]] = {}
    for indices in decided:
        lines.setdefault((indices[:which], indices[which + 1 :]), []).append(indices[which])
    for places in lines.values():
        places.sort()
    return lines


def _flat(indices: Indices, axes: tuple[Axis, ...]) -> int:
    cell = 0
    for axis, index in zip(axes, indices, strict=True):
        cell = cell * axis.count + index
    return cell
