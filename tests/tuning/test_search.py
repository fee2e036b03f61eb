"""The search for borders, on truths of any shape over any axes."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Callable, Mapping

import pytest

from opgraft.crossover import rule
from opgraft.crossover.rule import Indices
from opgraft.tuning import search
from opgraft.when.grid import Axis, ExactAxis, SteppedAxis

Truth = Mapping[Indices, int]


def some_axes(rng: random.Random) -> tuple[Axis, ...]:
    return tuple(some_axis(rng) for _ in range(rng.randint(1, 3)))


def some_axis(rng: random.Random) -> Axis:
    if rng.random() < 0.3:
        return ExactAxis(range(rng.randint(1, 3)))
    lowest = rng.randint(0, 5)
    return SteppedAxis(rng.choice([1, 2]), 2**lowest, 2 ** (lowest + rng.randint(0, 10)))


def some_truth(rng: random.Random, axes: tuple[Axis, ...]) -> Truth:
    """A border in any direction, by a plan and farther on from Python too; or no order at all."""
    slopes, border = [rng.uniform(-1, 1) for _ in axes], rng.uniform(-4, 8)
    farther, by_chance = border + rng.choice([0, 1, 4]), rng.random() < 0.3

    def decision(at: Indices) -> int:
        if by_chance:
            return rng.randrange(4)
        height = sum(map(operator.mul, slopes, at))
        return (height > border) << rule.PLAN | (height > farther) << rule.PYTHON

    return {at: decision(at) for at in itertools.product(*(range(axis.count) for axis in axes))}


def searched(
    axes: tuple[Axis, ...],
    known: Truth,
    measure: Callable[[Indices], int | None],
    left: Callable[[Truth, set[Indices]], object] = lambda decided, without_calls: None,
) -> tuple[dict[Indices, int], set[Indices]]:
    """What is decided in the end, and which cells had no calls."""
    decided, without_calls = dict(known), set[Indices]()
    for stride in search.strides():
        while True:
            groups = search.open_cells(decided, axes, stride)
            wanted = [[at for at in group if at not in without_calls] for group in groups]
            group = next(filter(None, wanted), None)
            if group is None:
                break
            left(decided, without_calls)
            for at in group:
                found = measure(at)
                if found is None:
                    without_calls.add(at)
                else:
                    decided[at] = found
    return decided, without_calls


@pytest.mark.parametrize("seed", range(150))
def test_it_ends_with_all_cells_decided_by_measured_ones_that_agree(seed: int) -> None:
    rng = random.Random(seed)
    axes = some_axes(rng)
    truth = some_truth(rng, axes)
    shares = rng.choice([0.0, 0.1, 0.5]), rng.choice([0.0, 0.1])
    callless = {at for at in truth if rng.random() < shares[0]}
    known = {at: truth[at] for at in truth.keys() - callless if rng.random() < shares[1]}
    asked: set[Indices] = set()

    def measure(at: Indices) -> int | None:
        assert at not in asked and at not in known, "each cell is measured once"
        asked.add(at)
        return None if at in callless else truth[at]

    def some_are_left(decided: Truth, without_calls: set[Indices]) -> None:
        assert search.left_cells(decided, axes) - without_calls

    decided, without_calls = searched(axes, known, measure, some_are_left)
    assert not search.left_cells(decided, axes) - without_calls
    least, most = (rule.filled(decided, axes, join) for join in (operator.and_, operator.or_))
    for at in truth.keys() - without_calls:
        assert not (least[at] ^ most[at]) & ~(1 << rule.PYTHON), "neighbours agree by a plan"
        assert at not in decided or decided[at] == truth[at] == least[at]


@pytest.mark.parametrize("seed", range(30))
def test_a_border_in_one_direction_is_found_exactly(seed: int) -> None:
    rng = random.Random(seed)
    axes = tuple(SteppedAxis(1, 1, 2 ** rng.randint(0, 12)) for _ in range(rng.randint(1, 2)))
    slopes, border = [rng.uniform(0, 1) for _ in axes], rng.uniform(0, 12)
    measured: list[Indices] = []

    def truth(at: Indices) -> int:
        return int(sum(map(operator.mul, slopes, at)) > border)

    def measure(at: Indices) -> int:
        measured.append(at)
        return truth(at)

    decided, _ = searched(axes, {}, measure)
    found = rule.filled(decided, axes, operator.and_)
    assert found == {at: truth(at) for at in found}
    assert len(found) == math.prod(axis.count for axis in axes) >= len(measured)
