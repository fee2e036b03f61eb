"""When a table says that it is complete, and with what it says that it was measured."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from opgraft.crossover import rule
from opgraft.crossover.tables import Cell, Entry, entry_of, read
from opgraft.ops.schema import Call
from opgraft.tuning import measuring, tuner
from tests.tuning.conftest import Clock
from tests.tuning.test_tuner import crossover, only, register, tune

#: The cells of `crossover()`.
EVERY = [*itertools.product(range(11), range(2))]


def says_complete(result: tuner.Result) -> bool:
    """Whether the table is complete, as the declaration of `crossover()` reads it."""
    assert result.path is not None
    found = entry_of(read(result.path), "tuned", crossover())
    return found is not None and found.is_complete


def test_a_script_s_calls_with_another_version_do_not_make_a_table_complete(
    tmp_path: Path, clock: Clock
) -> None:
    override = register()
    assert says_complete(tune(tmp_path, override))
    override.remove()
    result = tune(tmp_path, register(crossover(version=2)), calls=only(64))
    assert '"complete"' not in result.path.read_text()  # type: ignore[union-attr]


def test_a_table_is_complete_for_the_ranges_that_were_declared(
    tmp_path: Path, clock: Clock
) -> None:
    narrower = register(crossover(ranges={"rows": (1, 64), "dtype": (torch.float32,)}))
    assert not says_complete(tune(tmp_path, narrower))
    narrower.remove()
    override = register()
    assert not says_complete(tune(tmp_path, override, calls=only(1024)))
    assert says_complete(tune(tmp_path, override))
    override.remove()
    narrower = register(crossover(ranges={"rows": (8, 64), "dtype": (torch.float32,)}))
    result = tune(tmp_path, narrower)
    assert result.path is not None
    found = entry_of(read(result.path), "tuned", narrower.crossover)  # type: ignore[arg-type]
    assert found is not None and found.is_complete


@pytest.mark.parametrize(
    ("error", "is_complete"),
    [
        (measuring.Skip("the condition declines the calls"), True),
        (torch.OutOfMemoryError("too large"), False),
        (ValueError("of the impl"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_cell_that_failed_is_left_to_measure(
    error: Exception, is_complete: bool, tmp_path: Path, clock: Clock
) -> None:
    def cell(tuning: Any, at: tuple[int, ...]) -> Cell:
        if tuning._features(at)["rows"] == 1024:
            raise error
        return clock(tuning, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner._Tuning, "_cell", cell)
        result = tune(tmp_path, register())
    assert result.left == 0 and sum(result.skipped.values()) > 0
    assert says_complete(result) == is_complete


def test_a_run_without_time_leaves_a_table_complete(tmp_path: Path, clock: Clock) -> None:
    override = register()

    def cell(tuning: Any, at: tuple[int, ...]) -> Cell:
        if tuning._features(at)["rows"] == 1024:
            raise measuring.Skip("the condition declines the calls")
        return clock(tuning, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner._Tuning, "_cell", cell)
        assert says_complete(tune(tmp_path, override))
        assert says_complete(tune(tmp_path, override, seconds=0.0))


def test_a_script_s_call_that_leaves_cells_around_it_open_ends_completeness(
    tmp_path: Path, clock: Clock
) -> None:
    override = register()
    assert says_complete(tune(tmp_path, override))
    clock.from_rows = 1  # faster where cells on both sides are slower
    result = tune(tmp_path, override, calls=only(4))
    assert result.measured == 1 and not says_complete(result)


def test_what_measures_nothing_does_not_date_a_table_anew(tmp_path: Path, clock: Clock) -> None:
    override = register()
    path = tune(tmp_path, override).path
    assert path is not None
    before = json.loads(path.read_text())
    before["overrides"]["tuned"]["measured"] = {"date": "2020-01-01", "torch": "1.0"}
    path.write_text(json.dumps(before))
    assert tune(tmp_path, override).measured == 0
    assert json.loads(path.read_text()) == before


def test_the_file_that_graphs_were_recorded_in_stays_named(tmp_path: Path, clock: Clock) -> None:
    override = register()
    path = tune(tmp_path, override, calls=only(64)).path
    assert path is not None
    content = json.loads(path.read_text())
    content["overrides"]["tuned"]["measured"]["graphs"] = "recorded.json"
    path.write_text(json.dumps(content))
    assert tune(tmp_path, override, calls=only(16)).measured == 1
    assert json.loads(path.read_text())["overrides"]["tuned"]["measured"]["graphs"]


def says_of_graphs(result: tuner.Result) -> bool:
    assert result.path is not None
    found = entry_of(read(result.path), "tuned", crossover())
    return found is not None and found.is_complete_in_graphs


def test_a_table_is_complete_in_graphs_when_they_were_measured(
    tmp_path: Path,
    clock: Clock,
    graphs: list[int],
) -> None:
    override = register()
    assert not says_of_graphs(tune(tmp_path, override))
    assert says_of_graphs(tune(tmp_path, override, graphs=True))
    assert says_of_graphs(tune(tmp_path, override))


def test_a_table_is_complete_in_graphs_where_all_calls_are_native_s(
    tmp_path: Path,
    clock: Clock,
) -> None:
    clock.from_rows = 2**20
    assert says_of_graphs(tune(tmp_path, register()))


def test_what_graphs_need_of_calls_leaves_no_cell_of_calls_open(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cell(tuning: Any, at: tuple[int, ...]) -> Cell:
        measured.append(at)
        rows = tuning._features(at)["rows"]
        return Cell(10.0, 20.0 if rows == 4 else 5.0, 4.0, None, 4.0, None, None)

    def graph(self: measuring.Measuring, calls: list[Call]) -> tuple[float, float]:
        return (9.0, 5.0) if calls[0].args[0].shape[0] > 1 else (5.0, 9.0)

    measured: list[tuple[int, ...]] = []
    monkeypatch.setattr(tuner._Tuning, "_cell", cell)
    monkeypatch.setattr(measuring.Measuring, "graph", graph)
    result = tune(tmp_path, register(), graphs=True)
    assert result.left == 0 and says_complete(result) and says_of_graphs(result)
    assert len(measured) == len(set(measured))


class SomeTruth:
    """Stands in for measurements: some cells have no calls, and others fail now and then."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        share = rng.choice([0.0, 0.2])
        self.faster = {at: rng.random() < 0.7 for at in EVERY}
        self.without_calls = {at for at in EVERY if rng.random() < share}
        self.failures = rng.choice([0.0, 0.2])

    def __call__(self, tuning: Any, at: tuple[int, ...]) -> Cell:
        if at in self.without_calls:
            raise measuring.Skip("calls= makes none")
        if self.rng.random() < self.failures:
            raise torch.OutOfMemoryError("now")
        return Cell(10.0, 5.0 if self.faster[at] else 20.0, 4.0, None, 4.0, None, None)

    def change(self) -> None:
        at = self.rng.choice(EVERY)
        self.faster[at] = not self.faster[at]


@pytest.mark.parametrize("seed", range(40))
def test_beside_a_complete_table_another_would_decide_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    truth = SomeTruth(rng)
    monkeypatch.setattr(tuner._Tuning, "_cell", lambda self, at: truth(self, at))
    axes = tuple(tuner.axes_of(crossover()).values())
    taken = Cell(10.0, 5.0, 4.0, None, 4.0, None, None)
    other = Entry(1, {}, axes, dict.fromkeys(EVERY, taken), False, False, "")
    override, complete = register(), 0
    for _ in range(8):
        most = rng.choice([0, 3, 100])
        monkeypatch.setattr(
            tuner._Tuning, "_is_late", lambda self, n=most: self._result.measured >= n
        )
        of_script = rng.choice([None, None, only(2 ** rng.randrange(11))])
        result = tune(tmp_path, override, calls=of_script, again=rng.random() < 0.3)
        truth.change()
        found = None if result.path is None else entry_of(read(result.path), "tuned", crossover())
        if found is None or not found.is_complete:
            continue
        complete += 1
        alone, beside = (
            rule.grid_of(layers) for layers in ([(found, 0.03)], [(found, 0.03), (other, 0.1)])
        )
        for at in set(EVERY) - truth.without_calls:
            corner = [axis.lower(place) for axis, place in zip(axes, at, strict=True)]
            assert alone.takes(corner, rule.PLAN) == beside.takes(corner, rule.PLAN), corner
    assert complete or truth.failures
