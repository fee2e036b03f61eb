"""What the host takes for calls of one kind, whatever else the machine did meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opgraft.crossover.rule import Indices
from opgraft.crossover.tables import Cell
from opgraft.when.grid import Axis, ExactAxis

#: How much more than usual a time may be.
SPREAD = 1.25
#: So many cells have to say what is usual.
_FEWEST = 4
#: The columns of a table that are the host's.
COLUMNS = ("native_host", "plan_host", "python_host")


def usual(cells: Mapping[Indices, Cell], axes: Sequence[Axis]) -> dict[Indices, Cell]:
    """Cells in which no time of the host's is far above what is usual for calls like them.

    The host's work depends on the kind of a call, its exact features, and hardly on its sizes; but
    from some size on it may be another algorithm's, of more launches, as in native's backward of an
    embedding, which sorts many tokens. What is measured of it varies where workers compile on the
    same machine or another GPU is tuned, and of native and the override not at the same time. Left
    as it is, a cell would be decided by that. The lower quartile is what the machine takes when it
    has time: of the kind, or of those of the kind in the same bucket of a size where even that is
    far above the kind's.

    Args:
        cells: what was measured.
        axes: of their indices.
    """
    groups = {at: _groups_of(at, axes) for at in cells}
    found = dict(cells)
    for column in COLUMNS:
        times: dict[tuple[int, ...], list[float]] = {}
        for at, cell in cells.items():
            if (time := getattr(cell, column)) is not None:
                for group in groups[at]:
                    times.setdefault(group, []).append(time)
        most = {group: _most(each) for group, each in times.items()}
        for at, cell in cells.items():
            of_kind, *of_sizes = (most.get(group) for group in groups[at])
            time = getattr(cell, column)
            if time is None or of_kind is None:
                continue
            others = [each for each in of_sizes if each is not None and each > SPREAD * of_kind]
            limit = max([of_kind, *others])
            if time > limit:
                found[at] = found[at]._replace(**{column: limit})
    return found


def _groups_of(at: Indices, axes: Sequence[Axis]) -> list[tuple[int, ...]]:
    """Those of a cell: its kind's, and for each size those of its kind in the same bucket."""
    exact = tuple(p for p, axis in zip(at, axes, strict=True) if isinstance(axis, ExactAxis))
    sizes = (n for n, axis in enumerate(axes) if not isinstance(axis, ExactAxis))
    return [exact, *((*exact, n, at[n]) for n in sizes)]


def _most(times: Sequence[float]) -> float | None:
    """The longest time that is usual; None where too few say so.

    >>> _most([10.0, 11.0, 12.0, 30.0]), _most([10.0])
    (12.5, None)
    """
    known = sorted(times)
    return SPREAD * known[(len(known) - 1) // 4] if len(known) >= _FEWEST else None
