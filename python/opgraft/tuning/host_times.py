"""What the host takes for calls of one kind, whatever else the machine did meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opgraft.crossover.rule import Indices
from opgraft.crossover.tables import Cell
from opgraft.when.grid import Axis, ExactAxis

#: How much more than usual a time may be.
SPREAD = 1.25
#: So many cells have to say what is usual.
_FEWEST = 4
_COLUMNS = ("native_host", "plan_host", "python_host")


def usual(cells: Mapping[Indices, Cell], axes: Sequence[Axis]) -> dict[Indices, Cell]:
    """Cells in which no time of the host's is far above what is usual for calls of their kind.

    The host's work depends on the kind of a call, its exact features, and hardly on its sizes. What
    is measured of it varies by as much as a factor of two where workers compile on the same machine
    or another GPU is tuned, and of native and the override not at the same time. Left as it is, a
    cell would be decided by that. The lower quartile is what the machine takes when it has time.

    Args:
        cells: what was measured.
        axes: of their indices.
    """
    kinds: dict[Indices, list[Indices]] = {}
    for at in cells:
        exact = (place for place, axis in zip(at, axes, strict=True) if isinstance(axis, ExactAxis))
        kinds.setdefault(tuple(exact), []).append(at)
    found = dict(cells)
    for places in kinds.values():
        for column in _COLUMNS:
            most = _most(getattr(found[at], column) for at in places)
            for at in places if most is not None else ():
                time = getattr(found[at], column)
                if time is not None and time > most:
                    found[at] = found[at]._replace(**{column: most})
    return found


def _most(times: Iterable[float | None]) -> float | None:
    """The longest time that is usual; None where too few say so.

    >>> _most([10.0, 11.0, 12.0, 30.0]), _most([10.0, None])
    (12.5, None)
    """
    known = sorted(time for time in times if time is not None)
    return SPREAD * known[(len(known) - 1) // 4] if len(known) >= _FEWEST else None
