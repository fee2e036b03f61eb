"""Times of the host that are far above what is usual for calls of their kind."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable

import pytest
import torch

from opgraft.crossover import rule
from opgraft.crossover.rule import Indices
from opgraft.crossover.tables import Cell
from opgraft.tuning import host_times, timing
from opgraft.when.grid import ExactAxis, SteppedAxis

AXES = (SteppedAxis(1, 1, 2**15), ExactAxis((False, True)))
#: An override that the device takes longer for than natively.
SLOWER = Cell(20.0, 25.0, 24.0, 10.0, 100.0, None, None)


def _cells(native_hosts: list[float], kind: int = 0) -> dict[Indices, Cell]:
    return {
        (place, kind): SLOWER._replace(native_host=host) for place, host in enumerate(native_hosts)
    }


def test_a_call_is_not_taken_because_the_machine_was_busy_when_native_was_measured() -> None:
    cells = _cells([24.0, 23.0, 24.5, 24.0, 48.0])
    taken = [rule.pays(cell, rule.PLAN, rule.MARGIN) for cell in cells.values()]
    assert taken == [False] * 4 + [True]
    usual = host_times.usual(cells, AXES)
    assert usual[4, 0].native_host == host_times.SPREAD * 24.0
    assert usual[4, 0]._replace(native_host=48.0) == cells[4, 0]
    assert {at: usual[at] for at in list(usual)[:4]} == {at: cells[at] for at in list(cells)[:4]}


@pytest.mark.parametrize("column", ["native_host", "plan_host", "python_host"])
def test_each_way_has_its_own_usual_time(column: str) -> None:
    cells = {at: cell._replace(**{column: 7.0}) for at, cell in _cells([24.0] * 8).items()}
    cells[3, 0] = cells[3, 0]._replace(**{column: 70.0})
    usual = host_times.usual(cells, AXES)
    assert getattr(usual[3, 0], column) == host_times.SPREAD * 7.0
    assert all(usual[at] == cells[at] for at in cells if at != (3, 0))


def test_calls_of_another_kind_may_take_longer() -> None:
    cells = _cells([24.0] * 6) | _cells([60.0] * 6, kind=1)
    assert host_times.usual(cells, AXES) == cells


@pytest.mark.parametrize("column", ["native_host", "plan_host", "python_host"])
def test_from_some_size_on_the_host_may_take_longer(column: str) -> None:
    """Native's backward of an embedding sorts more than 3072 tokens: 140 us of the host's, not 15.
    What else the machine did shows in a few cells there."""
    axes = (SteppedAxis(1, 1, 2**15), SteppedAxis(1, 1, 2**15))
    cells = {
        (tokens, width): SLOWER._replace(**{column: 15.0 if tokens < 12 else 140.0})
        for tokens, width in itertools.product(range(16), repeat=2)
    }
    assert host_times.usual(cells, axes) == cells
    for tokens, usual in ((3, 15.0), (13, 140.0)):
        at = (tokens, 5)
        busy = cells | {at: SLOWER._replace(**{column: 400.0})}
        # The bucket of the other size has tokens of both kinds.
        limit = host_times.SPREAD * usual
        assert host_times.usual(busy, axes) == cells | {at: SLOWER._replace(**{column: limit})}


def test_a_few_cells_say_nothing_of_what_is_usual() -> None:
    cells = _cells([24.0, 24.0, 100.0])
    assert host_times.usual(cells, AXES) == cells


def test_times_that_were_not_measured_stay_so() -> None:
    cells = {at: cell._replace(plan_host=None) for at, cell in _cells([24.0] * 8).items()}
    assert host_times.usual(cells, AXES) == cells


def test_what_was_written_is_not_changed_when_it_is_read_again() -> None:
    rng = random.Random(20261126)
    axes = (SteppedAxis(1, 1, 2**7), *AXES)
    for longer in (1, 3):  # from some size on so many times as long
        cells = {
            (size, other, kind): SLOWER._replace(
                native_host=24.0 * 2 ** rng.uniform(0, 1.5) * (longer if size > 4 else 1)
            )
            for size, other, kind in itertools.product(range(8), range(6), range(2))
        }
        once = host_times.usual(cells, axes)
        assert once != cells and host_times.usual(once, axes) == once


def test_no_way_always_follows_the_same_other_one() -> None:
    """Else what the host takes longer after another way would be one way's alone."""
    order: list[str] = []

    def call(name: str) -> Callable[[], object]:
        return lambda: order.append(name)

    ways = {
        name: timing.Way(contextlib.nullcontext, [call(name)], 0)
        for name in ("native", "native again", "plan")
    }
    turns = timing.Turns(ways, torch.device("cpu"))
    before: dict[str, set[str]] = {name: set() for name in ways}
    for _ in range(12):
        order.clear()
        turns.round()
        turn = list(dict.fromkeys(order))
        assert set(turn) == set(ways)
        for one, other in itertools.pairwise(turn):
            before[other].add(one)
    assert all(before[name] == set(ways) - {name} for name in ways)
