"""A table's cells as coloured grids, for a terminal and as a picture: native's time over ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.style import Style
from rich.text import Text

from opgraft.crossover import rule
from opgraft.crossover.rule import Indices
from opgraft.crossover.tables import Cell
from opgraft.ops.describing import dtype_name
from opgraft.when.grid import Axis, ExactAxis

#: A cell that is taken is green; one whose ratio is below this is red.
_SLOWER = 1 - rule.MARGIN


class _Plane(NamedTuple):
    """The cells of which all but two features are the same.

    Attributes:
        names: of the two features, the one that goes down first; fewer if there are no more.
        axes: theirs.
        cells: by the two features' buckets.
        title: the other features' values.
    """

    names: Sequence[str]
    axes: Sequence[Axis]
    cells: Mapping[Indices, Cell]
    title: str


def grids(axes: Mapping[str, Axis], cells: Mapping[Indices, Cell]) -> Iterator[Text]:
    """A grid for each combination of the features that are neither rows nor columns.

    The first two features with steps are the rows and the columns. Cells that were not measured
    are dots.

    >>> from opgraft.when.grid import SteppedAxis
    >>> axes = {"rows": SteppedAxis(1, 1, 4), "hidden": SteppedAxis(1, 64, 128)}
    >>> fast, slow = (Cell(time, 2.0, time, 2.0, 2.0, None, None) for time in (3.0, 1.0))
    >>> for grid in grids(axes, {(0, 0): slow, (2, 1): fast}):
    ...     print(grid.plain)
    native / ours, rows down, hidden across
             64   128
       1   0.50     .
       2      .     .
       4      .  1.50
    """
    return map(_grid, _planes(axes, cells))


def _planes(axes: Mapping[str, Axis], cells: Mapping[Indices, Cell]) -> Iterator[_Plane]:
    names = [name for name, axis in axes.items() if not isinstance(axis, ExactAxis)][:2]
    places = [list(axes).index(name) for name in names]
    groups: dict[Indices, dict[Indices, Cell]] = {}
    for at, cell in sorted(cells.items()):
        if not rule.is_measured(cell, rule.PLAN):
            continue
        rest = tuple(each for which, each in enumerate(at) if which not in places)
        groups.setdefault(rest, {})[tuple(at[which] for which in places)] = cell
    others = [axis for name, axis in axes.items() if name not in names]
    for rest, group in groups.items():
        shown = [_shown(axis, place) for axis, place in zip(others, rest, strict=True)]
        yield _Plane(names, [axes[name] for name in names], group, ", ".join(shown))


def _grid(plane: _Plane) -> Text:
    names, axes, cells, title = plane
    down, across = (*axes, None, None)[:2]
    directions = [f"{name} {way}" for name, way in zip(names, ("down", "across"), strict=False)]
    text = Text(", ".join(["native / ours", *directions, *([title] if title else [])]))
    columns = range(across.count) if across is not None else range(1)
    labels = [_shown(across, place) if across is not None else "" for place in columns]
    width = max(6, *(len(label) + 1 for label in labels))
    text.append("\n" + " " * 5 + "".join(f"{label:>{width}}" for label in labels).rstrip())
    for row in range(down.count) if down is not None else range(1):
        label = _shown(down, row) if down is not None else ""
        text.append(f"\n{label:>4} ")
        for column in columns:
            at = (row, column)[: len(axes)]
            text.append_text(_colored(cells.get(at), width))
    text.rstrip()
    return text


def _colored(cell: Cell | None, width: int) -> Text:
    if cell is None:
        return Text(f"{'.':>{width}}", style="dim")
    ratio = _ratio(cell)
    if ratio is None:
        return Text(f"{'?':>{width}}", style="dim")
    is_taken = rule.pays(cell, rule.PLAN, rule.MARGIN)
    color = "green" if is_taken else "red" if ratio < _SLOWER else "yellow"
    return Text(f"{ratio:>{width}.2f}", style=Style(color=color))


def _ratio(cell: Cell) -> float | None:
    native, ours = rule.times(cell, rule.PLAN)
    return native / ours if native and ours else None


def save(path: Path, title: str, axes: Mapping[str, Axis], cells: Mapping[Indices, Cell]) -> None:
    """Draw the grids into a PNG file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    planes = list(_planes(axes, cells))
    figure = Figure(figsize=(6.0 * max(len(planes), 1), 5.0), layout="constrained")
    figure.suptitle(f"{title}: native / ours")
    for place, plane in enumerate(planes):
        down, across = (*plane.axes, None, None)[:2]
        rows = down.count if down is not None else 1
        columns = across.count if across is not None else 1
        ratios = [[float("nan")] * columns for _ in range(rows)]
        for at, cell in plane.cells.items():
            row, column = (*at, 0, 0)[:2]
            ratios[row][column] = _ratio(cell) or float("nan")
        drawn = figure.add_subplot(1, len(planes), place + 1)
        # 1 is yellow; twice as slow and twice as fast are the ends.
        image = drawn.imshow(ratios, cmap="RdYlGn", norm=TwoSlopeNorm(1.0, 0.5, 2.0), aspect="auto")
        drawn.set_title(plane.title)
        _label(drawn.set_yticks, drawn.set_ylabel, plane.names[:1], down)
        _label(drawn.set_xticks, drawn.set_xlabel, plane.names[1:], across)
        if place == len(planes) - 1:
            figure.colorbar(image, ax=drawn)
    figure.savefig(path)


def _label(
    set_ticks: Callable[..., object],
    set_name: Callable[[str], object],
    names: Sequence[str],
    axis: Axis | None,
) -> None:
    places = range(0 if axis is None else axis.count)
    set_ticks(places, [_shown(axis, place) for place in places if axis is not None])
    set_name(", ".join(names))


def _shown(axis: Axis, place: int) -> str:
    """A bucket's lower end, short: 16k for 16384.

    >>> from opgraft.when.grid import SteppedAxis
    >>> _shown(SteppedAxis(1, 1, 2**30), 14), _shown(SteppedAxis(1, 1, 2**30), 21)
    ('16k', '2M')
    """
    value = axis.lower(place)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    for size, letter in ((2**30, "G"), (2**20, "M"), (2**10, "k")):
        if value >= size and value % size == 0:
            return f"{value // size}{letter}"
    return str(int(value))
