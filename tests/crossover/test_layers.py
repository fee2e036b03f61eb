"""What several tables decide together, against docs/tuning.md taken at its word, cell by cell."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

import pytest

from opgraft.crossover import rule
from opgraft.crossover.rule import GRAPH, PYTHON, Indices
from opgraft.crossover.tables import Cell, Entry
from opgraft.when.grid import Axis, ExactAxis, SteppedAxis, joined, places_in

Layers = Sequence[tuple[Entry, float]]
#: By cell, the decisions of the cells that it follows.
Followed = Mapping[Indices, frozenset[int]]


def places(axes: Sequence[Axis]) -> Iterator[Indices]:
    """All cells that a call can be in: between 1 and 2 there is no number."""
    for at in itertools.product(*(range(axis.count) for axis in axes)):
        if places_in(axes, corner(axes, at)) == at:
            yield at


def corner(axes: Sequence[Axis], at: Indices) -> list[int]:
    return [axis.lower(place) for axis, place in zip(axes, at, strict=True)]  # type: ignore[misc]


# ------------------------------------------------------------------ the rule, cell by cell


def expected(layers: Layers) -> dict[Indices, int]:
    axes = layers[0][0].axes
    for entry, _ in layers[1:]:
        axes = joined(axes, entry.axes) or axes
    calls, graphs = (decided(layers, axes, of_graphs) for of_graphs in (False, True))
    return {at: calls[at] | graphs[at] * (calls[at] > 0) for at in calls}


def decided(layers: Layers, axes: Sequence[Axis], of_graphs: bool) -> dict[Indices, int]:
    of_devices = [
        followed([entry for entry, _ in tables], axes, margin, of_graphs)
        for margin, tables in itertools.groupby(layers, lambda layer: layer[1])
    ]
    alone = [
        (entry.axes, followed([entry], entry.axes, margin, of_graphs)) for entry, margin in layers
    ]

    def sources(at: Indices) -> Iterator[frozenset[int]]:
        there = [found[at] for found in of_devices if at in found]
        yield from (each for each in there if agree(each))
        yield from there
        for own, found in alone:
            beyond = places_in(own, corner(axes, at), beyond_ends=True)
            if beyond is not None and beyond in found:
                yield found[beyond]

    return {at: joint(next(sources(at), frozenset({0}))) for at in places(axes)}


def agree(decisions: frozenset[int]) -> bool:
    return len({each & ~(1 << PYTHON) for each in decisions}) == 1


def joint(decisions: frozenset[int]) -> int:
    taken = 0b111
    for each in decisions:
        taken &= each
    return taken


def followed(
    entries: Sequence[Entry], axes: Sequence[Axis], margin: float, of_graphs: bool
) -> Followed:
    mask = 1 << GRAPH if of_graphs else ~(1 << GRAPH)
    found: dict[Indices, frozenset[int]] = {}
    for entry in reversed(entries):
        for at, cell in entry.cells.items():
            if rule.is_measured(cell, GRAPH if of_graphs else PYTHON):
                there = places_in(axes, corner(entry.axes, at))
                assert there is not None
                found[there] = frozenset({rule.bits(cell, margin) & mask})
    while between := dict(filled_between(found, axes)):
        found |= between
    return found


def filled_between(
    found: Followed, axes: Sequence[Axis]
) -> Iterator[tuple[Indices, frozenset[int]]]:
    """The cells that have neighbours on both sides, and what those follow."""
    for at in itertools.product(*(range(axis.count) for axis in axes)):
        around: set[int] = set()
        for which, axis in enumerate(axes if at not in found else ()):
            if isinstance(axis, ExactAxis):
                continue
            line = [(*at[:which], place, *at[which + 1 :]) for place in range(axis.count)]
            sides = reversed(line[: at[which]]), line[at[which] :]
            nearest = [
                next((found[each] for each in side if each in found), None) for side in sides
            ]
            if None not in nearest:
                around.update(*nearest)  # type: ignore[arg-type]
        if around:
            yield at, frozenset(around)


# ------------------------------------------------------------------ tables

_MARGINS = (rule.MARGIN, rule.OTHER_DEVICE_MARGIN)
_DEVICES = ([0], [1], [0, 0], [0, 1], [0, 0, 1])


def some_tables(rng: random.Random) -> Layers:
    kinds = [
        (rng.choice(["exact", "stepped", "stepped"]), rng.choice([1, 2]), rng.random() < 0.4)
        for _ in range(rng.randint(1, 3))
    ]
    return [
        (some_table(rng, [some_axis(rng, *kind) for kind in kinds]), _MARGINS[which])
        for which in rng.choice(_DEVICES)
    ]


def some_axis(rng: random.Random, kind: str, steps: int, open_ended: bool) -> Axis:
    if kind == "exact":
        return ExactAxis(rng.sample([1, 2, 3], rng.randint(1, 3)))
    lowest = rng.randint(0, 3)
    highest = lowest + rng.randint(0, 3)
    return SteppedAxis(steps, 2**lowest, 2**highest, open_ended=open_ended)


def some_table(rng: random.Random, axes: Sequence[Axis]) -> Entry:
    there_are = list(places(axes))
    share = rng.choice([0.1, 0.3, 0.6])
    measured = [at for at in there_are if rng.random() < share] or [rng.choice(there_are)]
    return Entry(1, {}, tuple(axes), {at: some_cell(rng) for at in measured}, False, False, "")


def some_cell(rng: random.Random) -> Cell:
    some = rng.choice
    graphs = some([(None, None), (None, None), (9.0, 8.0), (9.0, 8.5), (8.0, 9.0), (9.0, None)])
    if graphs != (None, None) and rng.random() < 0.3:
        return Cell(None, None, None, None, None, *graphs)
    native, override = some([10.0, 10.0, 10.0, None]), some([5.0, 9.4, 9.8, 20.0])
    return Cell(
        *(native, override, 4.0, some([4.0, 4.0, None, 30.0]), some([4.0, 9.5, 30.0, None])),
        *graphs,
    )


@pytest.mark.parametrize("seed", range(300))
def test_tables_decide_as_the_documentation_says(seed: int) -> None:
    layers = some_tables(random.Random(seed))
    grid = rule.grid_of(layers)
    found = {at: grid.bits(at) for at in places(grid.axes)}
    assert found == expected(layers)


def test_of_tables_that_disagree_the_first_decides_from_python_too() -> None:
    def table(*plan_hosts: float, **others: float) -> Entry:
        times = {"native_host": 4.0, "python_host": 4.0, "inductor": None, "opaque": None} | others
        ends = zip([0, 2], plan_hosts, strict=True)
        cells: dict[Indices, Cell] = {
            (at,): Cell(10.0, 5.0, plan_host=host, **times) for at, host in ends
        }
        return Entry(1, {}, (SteppedAxis(1, 1, 4),), cells, False, False, "")

    from_python_alone = table(30.0, 4.0)
    neither_way = table(4.0, 30.0, python_host=30.0)
    layers = [(from_python_alone, rule.MARGIN), (neither_way, rule.OTHER_DEVICE_MARGIN)]
    assert rule.grid_of(layers).bits((1,)) == expected(layers)[1,] == 1 << PYTHON
