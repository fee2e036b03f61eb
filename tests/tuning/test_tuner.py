"""Tuning at the CPU key: an override that is fast from some size on, and slow below it."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import operator
import os
import random
import re
import statistics
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import opgraft
from opgraft import dsl as dsls
from opgraft import packs, when
from opgraft.base import env
from opgraft.cli import facts
from opgraft.core import loader
from opgraft.crossover import models, rule, sources
from opgraft.crossover.tables import FORMAT, BadTable, Cell, entry_of, read
from opgraft.errors import RegistrationError
from opgraft.ops.schema import Call, resolve
from opgraft.plan import plans
from opgraft.tuning import (
    host_times,
    measuring,
    search,
    stand_ins,
    timing,
    tuner,
    watching,
    writing,
)
from opgraft.when.grid import Axis, ExactAxis, SteppedAxis
from tests import forked_programs, probes
from tests.crossover import tables
from tests.crossover.test_sources import UNREADABLE
from tests.tuning.conftest import Clock

CPU = torch.device("cpu")


def calls(device: torch.device, rows: int, dtype: torch.dtype) -> Iterator[Any]:
    yield (torch.zeros(rows, 4, device=device, dtype=dtype), -1, False)


def crossover(**changed: Any) -> opgraft.Crossover:
    given: dict[str, Any] = {
        "calls": calls,
        "ranges": {"rows": (1, 1024), "dtype": (torch.float32, torch.float64)},
        "rows": when.size("self", 0),
        "dtype": when.dtype_of("self"),
    }
    return opgraft.Crossover(**given | changed)


#: One cell.
SMALL = {"rows": (16, 16), "dtype": (torch.float32,)}


def register(declared: opgraft.Crossover | None = None, **keywords: Any) -> opgraft.Override:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return torch.full_like(self, 1 / self.shape[-1])

    keywords.setdefault("cond", when.size("self", -1) == 4)
    return opgraft.register_op_override(
        *("aten", "_softmax", "CPU", impl),
        name="tuned",
        crossover=declared or crossover(),
        **keywords,
    )


def tune(folder: Path, override: opgraft.Override, **options: Any) -> tuner.Result:
    return tuner.tune_override(override, CPU, tuner.Options(folder, **options), lambda line: None)


def cells_in(path: Path | None) -> list[dict[str, Any]]:
    assert path is not None
    return tables.cells_of(json.loads(path.read_text())["overrides"]["tuned"])


def test_a_table_says_whether_it_is_complete(tmp_path: Path, clock: Clock) -> None:
    def says(result: tuner.Result) -> bool:
        assert result.path is not None
        return json.loads(result.path.read_text())["overrides"]["tuned"].get("complete", False)

    override, calls = register(), [(64, torch.float32)]
    assert not says(tune(tmp_path, override, calls=calls))  # of a script
    assert says(tune(tmp_path, override))
    assert says(tune(tmp_path, override, calls=calls))
    override.remove()
    wider = register(crossover(ranges={"rows": (1, 2**10), "dtype": [torch.float16]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner._Tuning, "_is_late", lambda self: self._result.measured >= 1)
        assert not says(tune(tmp_path, wider))
    assert says(tune(tmp_path, wider))


def test_cells_of_a_boolean_are_read_again(tmp_path: Path, clock: Clock) -> None:
    declared = opgraft.Crossover(
        calls=lambda device, rows, half: iter(()),
        ranges={"rows": (16, 16), "half": (False, True)},
        rows=when.size("self", 0),
        half=when.value("half_to_float"),
    )
    override = register(declared)
    result = tune(tmp_path, override)
    assert result.path is not None and result.measured == 2
    found = entry_of(read(result.path), "tuned", declared)
    assert found is not None and set(found.cells) == {(0, 0), (0, 1)}
    assert tune(tmp_path, override).known == 2


def test_the_border_is_found_and_most_cells_are_not_measured(tmp_path: Path, clock: Clock) -> None:
    result = tune(tmp_path, register())
    assert result.left == 0
    assert result.measured == len(clock.cells) < 18  # of 22 cells
    assert {32, 64} <= {cell["at"][0] for cell in cells_in(result.path)}


def test_the_table_decides_as_it_was_measured(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(tmp_path / "user", register())
    monkeypatch.setenv("OPGRAFT_TABLES", str(tmp_path))
    sources.forget()
    override = register()
    for rows in (1, 32, 63, 64, 100, 1024):
        before = override.hits
        torch.softmax(torch.zeros(rows, 4), -1)
        assert override.hits - before == (rows >= 64), rows


@pytest.mark.skipif(loader.load() is None, reason="launch plans need the compiled core")
def test_more_kinds_are_measured_than_an_override_may_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without recordings an override runs native, and its cells would count as declined."""
    monkeypatch.setattr(plans, "FREE_RECORDINGS", 8)
    monkeypatch.setattr(plans, "REPLAYS_PER_RECORDING", 10**9)
    monkeypatch.setattr(measuring, "_KINDS_OF_A_TWIN", 2)

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        out = torch.empty_like(self)
        probes.scale(self, out, 0.25)
        return out

    declared = crossover(ranges={"rows": (1, 1024), "dtype": (torch.float32,)})
    override = opgraft.register_op_override(
        *("aten", "_softmax", "CPU", impl),
        name="tuned",
        crossover=declared,
        cond=when.size("self", -1) == 4,
        launch_plan=True,
    )
    values = [(2**exponent, torch.float32) for exponent in range(11)]
    result = tune(tmp_path, override, calls=values)
    assert (result.measured, result.skipped) == (11, {})


def test_an_override_may_record_what_one_of_its_twins_measures() -> None:
    assert measuring._KINDS_OF_A_TWIN * plans.MAX_ATTEMPTS <= plans.FREE_RECORDINGS


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_measure_what_the_whole_does(parts: int, tmp_path: Path, clock: Clock) -> None:
    """Each is a run of its own. There are two dtypes, so the third part is empty."""
    override = register()
    whole = tune(tmp_path / "whole", override)
    dtypes, measured = [], 0
    for number in range(1, parts + 1):
        part = tune(tmp_path / "parts", override, part=(number, parts))
        cells = [cell["at"] for cell in cells_in(part.path)]
        dtypes.append(len({dtype for _, dtype in cells}))
        measured += part.measured
        assert part.left == 0
    assert dtypes == [1, 2, 2][:parts]
    assert measured == whole.measured
    assert cells == [cell["at"] for cell in cells_in(whole.path)]
    assert tune(tmp_path / "parts", override).measured == 0


def test_a_part_measures_anew_what_is_in_it_alone(tmp_path: Path, clock: Clock) -> None:
    override = register()
    known = tune(tmp_path, override).measured
    parts = [tune(tmp_path, override, part=(number, 2), again=True).measured for number in (1, 2)]
    assert sum(parts) == known and all(parts)


def test_what_was_measured_is_not_measured_again(tmp_path: Path, clock: Clock) -> None:
    first = tune(tmp_path, register())
    known = tune(tmp_path, register())
    assert (known.measured, known.known) == (0, first.measured)
    again = tune(tmp_path, register(), again=True)
    assert again.measured == first.measured and not again.changed


def test_what_another_process_measured_anew_is_not_measured_again(
    tmp_path: Path, clock: Clock, graphs: list[int]
) -> None:
    override = register()
    tune(tmp_path, override, graphs=True)
    stale = tuner.known(override, CPU, tmp_path)
    clock.from_rows = 63
    tune(tmp_path, override, calls=only(64))  # nothing is stale
    only_64 = {at: cell for at, cell in stale.items() if at[0] == 64}
    tune(tmp_path, override, again=True, stale=only_64)
    clock.cells.clear()
    graphs.clear()
    result = tune(tmp_path, override, again=True, graphs=True, stale=stale)
    axes = result.axes.values()
    again = {
        tuple(axis.lower(place) for axis, place in zip(axes, at, strict=True)) for at in clock.cells
    }
    assert again == stale.keys() - only_64.keys()
    assert 64 in graphs, "what was measured anew of it were calls"


def _let_the_host_be_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is on a GPU."""

    def usual(self: Any, more: Mapping[Any, Cell] | None = None) -> Mapping[Any, Cell]:
        return host_times.usual(self._cells | dict(more or {}), self._axes)

    monkeypatch.setattr(tuner._Tuning, "_usual", usual)


def test_what_is_usual_for_the_host_by_another_process_s_cells_is_measured_anew(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process measured while the machine had time makes the host's times of other
    cells unusual: they are written otherwise, and have not been measured."""
    busy = [2.0]
    _let_the_host_be_apart(monkeypatch)
    monkeypatch.setattr(
        tuner._Tuning, "_cell", lambda self, at: clock(self, at)._replace(python_host=busy[0])
    )
    override = register()
    tune(tmp_path, override)
    stale = tuner.known(override, CPU, tmp_path)
    busy[0], clock.from_rows = 0.5, 63
    theirs = {at: cell for at, cell in stale.items() if at[0] < 64}
    tune(tmp_path, override, again=True, stale=theirs)
    assert all(
        cell.python_host != stale[at].python_host
        for at, cell in tuner.known(override, CPU, tmp_path).items()
    )
    result = tune(tmp_path, override, again=True, stale=stale)
    assert result.measured == len(stale) - len(theirs) > 0


def test_graphs_of_a_cell_that_is_taken_by_what_is_usual_for_the_host_are_measured(
    tmp_path: Path, clock: Clock, graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was measured, the machine being busy, the cell would be declined."""
    _let_the_host_be_apart(monkeypatch)

    def cell(tuning: Any, at: tuple[int, ...]) -> Cell:
        found = clock(tuning, at)
        is_last = tuning._features(at)["rows"] == 1024
        return found._replace(python_host=5000.0) if is_last else found

    monkeypatch.setattr(tuner._Tuning, "_cell", cell)
    result = tune(tmp_path, register(), graphs=True, seconds=10)
    assert result.left == 0 and 1024 in graphs


def test_a_check_compares_with_what_is_usual_for_the_host(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _let_the_host_be_apart(monkeypatch)
    override = register()
    tune(tmp_path, override)
    monkeypatch.setattr(
        tuner._Tuning, "_cell", lambda self, at: clock(self, at)._replace(python_host=5000.0)
    )
    checked = tuner.check(override, CPU, tuner.Options(tmp_path), 3, seed=0)
    assert checked.measured == 3 and not checked.otherwise


def test_what_is_decided_otherwise_is_told(tmp_path: Path, clock: Clock) -> None:
    tune(tmp_path, register())
    clock.from_rows = 128
    result = tune(tmp_path, register(), again=True)
    assert result.changed == [
        f"rows 64, dtype {dtype}: plan and python -> native"
        for dtype in (torch.float32, torch.float64)
    ]


def test_another_version_of_the_kernel_is_measured_anew(tmp_path: Path, clock: Clock) -> None:
    first = tune(tmp_path, register())
    result = tune(tmp_path, register(crossover(version=2)))
    assert (result.measured, result.known) == (first.measured, 0)


def test_cells_between_the_buckets_are_not_taken_for_theirs(tmp_path: Path, clock: Clock) -> None:
    """A table with two buckets an octave has a cell at 96 rows; here there is one from 64 on."""
    axes: dict[str, Axis] = {"rows": SteppedAxis(2, 64, 96), "dtype": ExactAxis([torch.float32])}
    entry = writing.entry(1, {}, axes, {(0, 0): CELL, (1, 0): CELL})
    writing.write(tmp_path, models.of_device(CPU), {"tuned": entry})
    result = tune(tmp_path, register(crossover(ranges={**SMALL, "rows": (64, 64)})))
    assert (result.known, result.measured) == (1, 0)


def test_cells_outside_of_narrower_ranges_stay_in_the_table(tmp_path: Path, clock: Clock) -> None:
    wide = {"rows": (1, 1024), "dtype": (torch.float32, torch.float64)}
    before = cells_in(tune(tmp_path, register(crossover(ranges=wide))).path)
    narrow = {"rows": (16, 64), "dtype": (torch.float32,)}
    result = tune(tmp_path, register(crossover(ranges=narrow)))
    after = cells_in(result.path)
    assert [cell for cell in before if cell not in after] == []
    assert len(after) == len(before) + result.measured


def test_without_time_nothing_is_measured_and_all_is_left(tmp_path: Path, clock: Clock) -> None:
    result = tune(tmp_path, register(), seconds=0)
    assert result.measured == 0 and result.left > 0
    assert not list(tmp_path.iterdir())
    assert tune(tmp_path, register()).left == 0


@pytest.mark.parametrize(
    ("budget", "took", "measured"),
    [
        (10.0, [8.0], 1),  # the second would end after 16 seconds
        (16.0, [8.0], 2),
        (30.0, [1.0, 8.0], 6),  # in 27 seconds: the next one may take 8 again
        (5.0, [8.0], 1),  # of the first one nobody knows how long it takes
    ],
)
def test_no_cell_is_begun_that_would_not_end_in_time(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    budget: float,
    took: list[float],
    measured: int,
) -> None:
    now = 1000.0

    def cell(tuning: Any, at: tuple[int, ...]) -> Cell:
        nonlocal now
        now += took[len(clock.cells) % len(took)]
        return clock(tuning, at)

    monkeypatch.setattr(tuner, "time", types.SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(tuner._Tuning, "_cell", cell)
    result = tune(tmp_path, register(), seconds=budget)
    assert result.measured == measured and result.left > 0
    assert len(cells_in(result.path)) == measured


def test_a_cell_that_fails_says_how_long_one_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0

    def cell(tuning: Any, at: tuple[int, ...]) -> Cell:
        nonlocal now
        now += 8.0
        raise RuntimeError("no kernel")

    monkeypatch.setattr(tuner, "time", types.SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(tuner._Tuning, "_cell", cell)
    result = tune(tmp_path, register(), seconds=10.0)
    assert result.skipped == {"RuntimeError: no kernel": 1}


def test_an_interruption_leaves_what_was_measured(tmp_path: Path, clock: Clock) -> None:
    def interrupt(line: str) -> None:
        if len(clock.cells) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuner.tune_override(register(), CPU, tuner.Options(tmp_path), interrupt)
    (path,) = tmp_path.iterdir()
    assert len(cells_in(path)) == 3


def test_it_measures_really(tmp_path: Path) -> None:
    override = register(crossover(ranges=SMALL))
    result = tune(tmp_path, override)
    assert (result.measured, result.left, result.skipped) == (1, 0, {})
    (cell,) = cells_in(result.path)
    assert cell["at"] == [16, "float32"]
    assert 0 < cell["native_us"] < 1e6 and 0 < cell["override_us"] < 1e6
    assert cell["plan_host_us"] is None
    assert opgraft.overrides() == [override]  # its twins are gone


# ------------------------------------------------------------------ compiled graphs


def test_graphs_are_measured_where_the_override_is_faster(
    tmp_path: Path, clock: Clock, graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tune(tmp_path / "user", register(), graphs=True)
    assert result.left == 0 and not result.changed
    assert min(graphs) >= clock.from_rows and len(graphs) < 10
    monkeypatch.setenv("OPGRAFT_TABLES", str(tmp_path))
    sources.forget()
    override = register()
    assert override.decisions is not None
    for rows in (32, 64, 128, 255, 256, 511, 1024):
        named = {"self": torch.zeros(rows, 4), "dim": -1, "half_to_float": False}
        assert override.decisions.in_graphs.holds(named) == (rows >= 256), rows
        assert override.decisions.by_plan.holds(named) == (rows >= 64), rows


def test_what_is_known_of_graphs_stays_when_the_ways_are_measured_again(
    tmp_path: Path, clock: Clock, graphs: list[int]
) -> None:
    first = tune(tmp_path, register(), graphs=True)
    compiled = len(graphs)
    again = tune(tmp_path, register(), again=True)
    assert len(graphs) == compiled and not again.changed
    assert again.cells == first.cells
    tune(tmp_path, register(), again=True, graphs=True)
    assert len(graphs) == 2 * compiled


@pytest.mark.slow
def test_graphs_are_compiled_really(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both graphs are compiled and run; a call that the condition declines cannot be measured."""
    monkeypatch.setattr(measuring, "MAX_ROUNDS", 1)
    override = register(crossover(ranges=SMALL))
    with measuring.measuring(override, CPU) as measure:
        sample = torch.randn(16, 4)
        call = override.operator.bind((sample, -1, False), {})
        inductor, opaque = measure.graph([call])
        assert inductor > 0 and opaque > 0
        with pytest.raises(measuring.Skip, match="does not call"):
            measure.graph([override.operator.bind((torch.randn(16, 5), -1, False), {})])
    assert opgraft.overrides() == [override]


# ------------------------------------------------------------------ what it is compared with


class FixedTurns(timing.Turns):
    """Turns whose clock says what a test gives it, by the beginning of a way's name."""

    microseconds: ClassVar[dict[str, tuple[float, float]]] = {}

    def round(self) -> None:
        for name in self._ways:
            given = [each for key, each in self.microseconds.items() if name.startswith(key)]
            on_device, on_host = given[0]
            self.on_device[name].append(on_device)
            self.on_host[name].append(on_host)


@pytest.mark.parametrize(
    ("microseconds", "native"),
    [
        ({"behind": (5.0, 5.0)}, (5.0, 5.0)),
        ({"behind": (30.0, 5.0)}, (20.0, 20.0)),
        ({"behind": (5.0, 30.0)}, (20.0, 20.0)),
    ],
    ids=["faster", "slower on the device", "slower on the host"],
)
def test_it_is_compared_with_the_fastest_of_what_answers_without_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    microseconds: dict[str, tuple[float, float]],
    native: tuple[float, float],
) -> None:
    """An override behind it in the chain gets its calls without it, and is what it must beat."""
    given = {"native": (20.0, 20.0), "python": (10.0, 10.0), **microseconds}
    monkeypatch.setattr(FixedTurns, "microseconds", given)
    monkeypatch.setattr(measuring, "Turns", FixedTurns)
    override = register(crossover(ranges=SMALL), priority=1)
    behind = opgraft.register_op_override(
        "aten", "_softmax", "CPU", override.impl, name="behind", cond=override.cond
    )
    declining = when.size("self", -1) == 5
    for name, before in (("before", 2), ("declines", 0)):
        opgraft.register_op_override(
            *("aten", "_softmax", "CPU", override.impl),
            name=name,
            priority=before,
            cond=override.cond if before else declining,
        )
    (cell,) = tune(tmp_path, override).cells.values()
    assert (cell.native, cell.native_host) == native
    assert (cell.override, cell.python_host) == (10.0, 10.0)
    assert behind.hits == 0 and len(opgraft.overrides()) == 4


@pytest.mark.parametrize("name", ["native", "native again", "python", "plan"])
def test_what_answers_without_it_may_have_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    override = register(crossover(ranges=SMALL), priority=1)
    opgraft.register_op_override(
        "aten", "_softmax", "CPU", override.impl, name=name, cond=override.cond
    )
    timed: set[int] = set()

    class Counting(timing.Turns):
        def round(self) -> None:
            timed.add(len(self._ways))
            super().round()

    monkeypatch.setattr(measuring, "Turns", Counting)
    assert tune(tmp_path, override).measured == 1
    assert timed == {4}, "native twice, the override, and the one behind it"


def rounds_until_clear(rng: random.Random, ratio: float, *, of_host: bool) -> int:
    """How many rounds a cell takes, where the device's time or the host's is so much less than
    native's."""
    turns = timing.Turns({}, CPU)
    turns.on_device = {"native": [], "native again": [], "plan": []}
    turns.on_host = {name: [] for name in turns.on_device}
    while turns.rounds < measuring.MAX_ROUNDS:
        turns.rounds += 1
        for name in turns.on_device:
            longer = (10.0 if name == "plan" else 10.0 * ratio) * math.exp(rng.gauss(0, 0.01))
            host, device = (longer, 1.0) if of_host and name == "plan" else (1.0, longer)
            turns.on_device[name].append(device)
            turns.on_host[name].append(host)
        if measuring._is_clear(turns, "native", "plan"):
            break
    return turns.rounds


def test_a_cell_is_measured_longest_at_the_border_that_decides_it() -> None:
    """The device's time has another one than the host's."""
    rng = random.Random(0)
    device, host = (
        [
            statistics.fmean(rounds_until_clear(rng, 1 + border, of_host=it) for _ in range(100))
            for border in (rule.MARGIN, rule.HOST_MARGIN)
        ]
        for it in (False, True)
    )
    assert device[0] > 2 * device[1] and host[1] > 2 * host[0]


def finds_native_slower(rng: random.Random, ratio: float) -> bool:
    """What is found where others interrupt every third turn."""
    turns = timing.Turns({}, CPU)
    microseconds = {"native": 10 * ratio, "native again": 10 * ratio, "plan": 10.0}
    turns.on_device = {name: [] for name in microseconds}
    while turns.rounds < measuring.MAX_ROUNDS and not (
        turns.rounds and measuring._is_clear(turns, "native", "plan")
    ):
        turns.rounds += 1
        for name, each in microseconds.items():
            interruption = 40 * rng.random() if rng.random() < 0.3 else 0.0
            turns.on_device[name].append(each * math.exp(rng.gauss(0, 0.02)) + interruption)
        turns.on_host = turns.on_device
    native, plan = (turns.median(name)[0] for name in ("native", "plan"))
    return native > plan


@pytest.mark.parametrize("ratio", [0.25, 0.4, 0.6, 2.5, 4.0])
def test_interrupted_turns_decide_nothing(ratio: float) -> None:
    rng = random.Random(0)
    found = [finds_native_slower(rng, ratio) for _ in range(1000)]
    assert sum(each is not (ratio > 1) for each in found) < 10


def test_no_way_records_for_autograd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one way alone recorded would count as its time."""
    recording: dict[str, bool] = {}

    class Turns(timing.Turns):
        def round(self) -> None:
            for name, way in self._ways.items():
                with way.scope():
                    recording[name] = torch.is_grad_enabled()
            super().round()

    monkeypatch.setattr(measuring, "Turns", Turns)
    tune(tmp_path, register(crossover(ranges=SMALL)))
    assert recording == {"native": False, "native again": False, "python": False}


def test_a_table_names_the_versions_that_doctor_compares(tmp_path: Path, clock: Clock) -> None:
    declared = crossover(ranges=SMALL)
    for dsl in (None, *(each.name for each in dsls.KNOWN)):
        path = tune(tmp_path / str(dsl), register(declared, dsl=dsl)).path
        assert path is not None
        measured = json.loads(path.read_text())["overrides"]["tuned"]["measured"]
        of_dsl = {dsl: facts.versions()[dsl]} if dsl and facts.versions()[dsl] else {}
        today = datetime.date.today().isoformat()
        assert measured == {"date": today, "torch": torch.__version__} | of_dsl


def test_overrides_of_two_owners_with_one_name_are_measured_apart(tmp_path: Path) -> None:
    override = register(crossover(ranges=SMALL))
    with packs.owning("mine"):
        same_name = register(crossover(ranges=SMALL))
    assert tune(tmp_path / "user", override).measured == 1
    assert tune(tmp_path / "mine", same_name).measured == 1
    assert opgraft.overrides() == [override, same_name]


def test_overrides_of_two_ops_with_one_name_are_watched_apart() -> None:
    softmax = register(cond=None, unconditional_override=True)
    relu = opgraft.register_op_override(
        *("aten", "relu", "CPU", lambda self: torch.zeros_like(self)),
        name=softmax.name,
        unconditional_override=True,
        crossover=opgraft.Crossover(elements=when.numel("self")),
    )
    with watching.watching([softmax, relu]) as seen:
        torch.softmax(torch.zeros(3, 4), -1)
        torch.relu(torch.zeros(5))
    assert seen.of(softmax) == [(3, torch.float32)]
    assert seen.of(relu) == [(5,)]


def test_calls_of_what_is_measured_as_another_are_that_one_s() -> None:
    softmax = register(cond=None, unconditional_override=True)
    native = opgraft.native("aten::_log_softmax")
    opgraft.register_op_override(
        *("aten", "_log_softmax", "CPU", lambda self, dim, to_float: native(self, dim, to_float)),
        name="shared",
        unconditional_override=True,
        crossover=crossover(calls=None, ranges=None, measured_as=softmax.name),
    )
    with watching.watching(opgraft.overrides()) as seen:
        torch.softmax(torch.zeros(3, 4), -1)
        for _ in range(2):
            torch.log_softmax(torch.zeros(5, 4), -1)
    assert seen.of(softmax) == [(5, torch.float32), (3, torch.float32)]


def test_calls_with_other_features_than_those_measured_are_not_that_one_s() -> None:
    """Tables refuse such an override, too."""
    softmax = register(cond=None, unconditional_override=True)
    opgraft.register_op_override(
        *("aten", "relu", "CPU", lambda self: torch.zeros_like(self)),
        name="shared",
        unconditional_override=True,
        crossover=opgraft.Crossover(elements=when.numel("self"), measured_as=softmax.name),
    )
    with watching.watching(opgraft.overrides()) as seen:
        torch.relu(torch.zeros(5))
    assert seen.of(softmax) == []


def test_cells_that_the_condition_declines_are_counted(tmp_path: Path) -> None:
    override = register(crossover(ranges=SMALL), cond=when.size("self", -1) == 5)
    result = tune(tmp_path, override)
    assert result.measured == 0
    assert result.skipped == {"the condition declines the calls": 1}


def test_cells_that_raise_are_told_and_the_others_measured(tmp_path: Path) -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if self.size(0) < 32:
            raise RuntimeError("too few rows\nfor this kernel")
        return torch.full_like(self, 1 / self.shape[-1])

    override = opgraft.register_op_override(
        *("aten", "_softmax", "CPU", impl),
        name="tuned",
        cond=when.size("self", -1) == 4,
        crossover=crossover(ranges={"rows": (16, 32), "dtype": (torch.float32,)}),
    )
    result = tune(tmp_path, override)
    assert result.skipped == {"RuntimeError: too few rows": 1}
    assert [cell["at"] for cell in cells_in(result.path)] == [[32, "float32"]]


def test_samples_of_another_cell_are_refused(tmp_path: Path) -> None:
    def twice(device: torch.device, rows: int, dtype: torch.dtype) -> Iterator[Any]:
        return calls(device, 2 * rows, dtype)

    with pytest.raises(RegistrationError, match="calls= of 'tuned' made a call with"):
        tune(tmp_path, register(crossover(calls=twice)))


@pytest.mark.parametrize("missing", ["calls", "ranges"])
def test_a_crossover_without_samples_or_ranges_is_refused(missing: str, tmp_path: Path) -> None:
    with pytest.raises(RegistrationError, match="cannot be tuned: give calls="):
        tune(tmp_path, register(crossover(**{missing: None})))


def test_ranges_of_too_many_cells_are_refused(tmp_path: Path, clock: Clock) -> None:
    numel = {f"numel{number}": when.numel("self") for number in range(3)}
    declared = opgraft.Crossover(calls=calls, ranges=dict.fromkeys(numel, (1, 2**62)), **numel)
    with pytest.raises(RegistrationError, match=r"span 250047 cells \(numel0 63, .*narrow them"):
        tune(tmp_path, register(declared))
    assert not clock.cells


def test_ranges_far_from_what_the_table_has_are_refused(tmp_path: Path, clock: Clock) -> None:
    features = {"rows": when.size("self", 0), **{f"n{i}": when.size("self", 1) for i in range(2)}}

    def declared(low: int, high: int) -> opgraft.Crossover:
        return opgraft.Crossover(
            calls=calls, ranges=dict.fromkeys(features, (low, high)), **features
        )

    first = tune(tmp_path, register(declared(1, 2)))
    assert first.measured and first.path is not None
    before, measured = first.path.read_text(), len(clock.cells)
    with pytest.raises(RegistrationError, match=r"outside of them, span 250047 cells.*--output"):
        tune(tmp_path, register(declared(2**62, 2**62)))
    assert first.path.read_text() == before and len(clock.cells) == measured


def none_at_all() -> None:
    return None


def ends_the_process() -> None:
    raise SystemExit(0)


def endless() -> Iterator[Any]:
    while True:
        yield torch.zeros(16, 4), -1, False


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (none_at_all, "TypeError: 'NoneType' object is not iterable"),
        (ends_the_process, "SystemExit: 0"),
        (lambda: [None], "a call of calls= of override 'tuned' is a NoneType: give the op's"),
        (lambda: ["abc"], "a call of calls= of override 'tuned' is a str: give the op's"),
        (lambda: [(torch.zeros(16, 4),)], "misses dim, half_to_float"),
        (lambda: [{"input": 1}], "has no argument 'input'"),
        (lambda: [], "calls= makes none"),
        (lambda: [(torch.zeros(16, 4, device="meta"), -1, False)], "the override does not run"),
    ],
)
def test_what_calls_makes_wrong_is_one_reason_for_all_cells(
    made: Callable[[], Any], reason: str, tmp_path: Path
) -> None:
    def calls(device: torch.device, rows: int, dtype: torch.dtype) -> Any:
        samples = made()
        for sample in samples:
            if isinstance(sample, tuple) and len(sample) == 3:
                sample = (sample[0][:1].expand(rows, 4).to(dtype), *sample[1:])
            yield sample

    override = register(crossover(calls=calls))
    result = tune(tmp_path, override)
    ((said, count),) = result.skipped.items()
    assert reason in said and count == 22
    assert result.measured == 0 and result.path is None
    assert opgraft.overrides() == [override]


def tune_with_gains(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gains: Sequence[float]
) -> tuple[int, tuner.Result]:
    """Tunes a cell of several calls, which say how many times as fast the override is; and how many
    of them were measured."""
    measured = []

    def cell(self: measuring.Measuring, calls: Sequence[Any]) -> Cell:
        gain = calls[0].args[0][0, 0].item()
        measured.append(gain)
        return Cell(100.0 * gain, 100.0, 1.0, None, 1.0, None, None)

    def calls(device: torch.device, rows: int, dtype: torch.dtype) -> Iterator[Any]:
        for gain in gains:
            yield torch.full((rows, 5 if gain == DECLINED else 4), gain), -1, False

    monkeypatch.setattr(measuring.Measuring, "cell", cell)
    result = tune(folder, register(crossover(calls=calls, ranges=SMALL)))
    return len(measured), result


#: A gain that stands for calls which the condition declines.
DECLINED = 0.0


@pytest.mark.parametrize(
    ("gains", "count", "least"),
    [
        ((1.2, 1.1, 1.25), 3, 1.1),
        ((1.2, 0.9, 1.1), 2, 0.9),  # one that is slower decides
        ((0.9, 1.2), 1, 0.9),
        ((1.4, 0.9), 1, 1.4),  # one that is far faster, too
        ((1.2, 1.4, 0.9), 3, 0.9),
        ((DECLINED, 1.2, 1.1), 2, 1.1),
        ((1.2, 1.2, 1.2, 1.1, 0.9), 4, 1.1),  # no more than four
    ],
)
def test_the_call_that_gains_least_decides_a_cell(
    gains: tuple[float, ...],
    count: int,
    least: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured, result = tune_with_gains(tmp_path, monkeypatch, gains)
    (cell,) = result.cells.values()
    assert cell.native == pytest.approx(100.0 * least)
    assert measured == count


def decided_by(
    folder: Path, monkeypatch: pytest.MonkeyPatch, of_calls: Sequence[Cell]
) -> tuple[Cell, int]:
    """What a cell has whose calls take these times; and how many of them were measured."""
    measured = []

    def cell(self: measuring.Measuring, calls: Sequence[Any]) -> Cell:
        measured.append(of_calls[int(calls[0].args[0][0, 0].item())])
        return measured[-1]

    def calls(device: torch.device, rows: int, dtype: torch.dtype) -> Iterator[Any]:
        for number in range(len(of_calls)):
            yield torch.full((rows, 4), float(number)), -1, False

    monkeypatch.setattr(measuring.Measuring, "cell", cell)
    override = register(crossover(calls=calls, ranges=SMALL))
    (found,) = tune(folder, override).cells.values()
    override.remove()
    return found, len(measured)


def test_a_call_that_the_host_s_time_declines_decides_before_one_that_is_hardly_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_host = Cell(110.0, 50.0, 1.0, None, 100.0, None, None)
    taken = Cell(105.0, 100.0, 1.0, None, 1.0, None, None)
    for number, of_calls in enumerate([[by_host, taken], [taken, by_host]]):
        found, _ = decided_by(tmp_path / str(number), monkeypatch, of_calls)
        assert found == by_host


@pytest.mark.parametrize(
    "declined",
    [
        Cell(100.0, 98.0, 1.0, None, 1.0, None, None),
        Cell(100.0, 50.0, 1.0, None, 90.0, None, None),  # by the host's time
        Cell(100.0, 50.0, 1.0, 90.0, 10.0, None, None),  # by that of a plan
        Cell(100.0, None, 1.0, None, 1.0, None, None),
    ],
)
def test_once_a_call_is_declined_no_further_one_is_measured(
    declined: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decides, whatever the others gain."""
    hardly, far = (Cell(100.0 * n, 100.0, 1.0, None, 1.0, None, None) for n in (1.04, 2.0))
    for number, before in enumerate([[], [hardly]]):
        of_calls = [*before, declined, far, hardly]
        found = decided_by(tmp_path / str(number), monkeypatch, of_calls)
        assert found == (declined, len(before) + 1)


def test_a_cell_is_taken_where_each_of_its_calls_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    decisions = set()
    for number in range(60):
        of_calls = [
            Cell(100.0, rng.uniform(75, 100), 1.0, None, rng.uniform(75, 92), None, None)
            for _ in range(rng.randrange(1, 4))
        ]
        found, measured = decided_by(tmp_path / str(number), monkeypatch, of_calls)
        every = [rule.pays(cell, rule.PLAN, rule.MARGIN) for cell in of_calls[:measured]]
        assert rule.pays(found, rule.PLAN, rule.MARGIN) == all(every)
        decisions.add(all(every))
    assert decisions == {False, True}


def test_of_calls_that_are_all_declined_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, result = tune_with_gains(tmp_path, monkeypatch, (DECLINED, DECLINED))
    assert result.skipped == {"the condition declines the calls": 1}


def test_of_endless_calls_as_many_are_made_as_are_measured(tmp_path: Path) -> None:
    declared = crossover(calls=lambda device, rows, dtype: endless(), ranges=SMALL)
    assert tune(tmp_path, register(declared)).measured == 1


def test_a_call_without_tensors_is_told_with_what_it_lacks(tmp_path: Path) -> None:
    declared = crossover(calls=lambda device, rows, dtype: [(5, -1, False)], ranges=SMALL)
    with pytest.raises(
        RegistrationError, match=r"made a call with .*'self has 0 dimensions'.* when asked"
    ):
        tune(tmp_path, register(declared))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, GeneratorExit])
@pytest.mark.parametrize("where", ["calls", "impl", "progress"])
def test_whatever_is_raised_the_stand_ins_are_gone(
    where: str, error: type[BaseException], tmp_path: Path
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error("now")

    declared = crossover(calls=fail if where == "calls" else calls, ranges=SMALL)
    override = register(declared)
    if where == "impl":
        override.remove()
        override = opgraft.register_op_override(
            *("aten", "_softmax", "CPU", fail),
            name="tuned",
            crossover=declared,
            unconditional_override=True,
        )
    with contextlib.suppress(BaseException):
        progress = fail if where == "progress" else lambda line: None
        tuner.tune_override(override, CPU, tuner.Options(tmp_path), progress)
    assert opgraft.overrides() == [override]
    assert override.enabled


@pytest.mark.parametrize("scope", ["measuring", "watching"])
@pytest.mark.parametrize("error", [RegistrationError, KeyboardInterrupt])
def test_where_a_stand_in_cannot_be_registered_the_others_are_gone(
    scope: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    override = register(priority=1)
    behind = opgraft.register_op_override(
        "aten", "_softmax", "CPU", override.impl, name="behind", cond=override.cond
    )
    registered: list[opgraft.Override] = []

    def register_one(*args: Any, **declared: Any) -> opgraft.Override:
        if registered:
            raise error("now")
        registered.append(own(*args, **declared))
        return registered[0]

    own = stand_ins.register
    monkeypatch.setattr(stand_ins, "register", register_one)
    scopes = {
        "measuring": lambda: measuring.measuring(override, CPU),
        "watching": lambda: watching.watching([override, behind]),
    }
    with pytest.raises(error), scopes[scope]():
        pass
    assert registered and opgraft.overrides() == [override, behind]


def test_a_check_says_what_would_be_decided_otherwise(tmp_path: Path, clock: Clock) -> None:
    first = tune(tmp_path, register())
    options = tuner.Options(tmp_path)
    assert tuner.check(register(), CPU, options, 100, seed=0) == (first.measured, [], {})
    clock.from_rows = 128
    otherwise = tuner.check(register(), CPU, options, 100, seed=0).otherwise
    assert len(otherwise) == 2 and all("plan and python -> native" in each for each in otherwise)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("16 EiB"), RuntimeError("CUDA error: out of memory")]
)
def test_a_check_counts_what_cannot_be_measured_any_more(error: Exception, tmp_path: Path) -> None:
    declared = crossover(ranges={"rows": (16, 32), "dtype": (torch.float32,)})
    assert tune(tmp_path, register(declared)).measured == 2

    def short_of_memory(device: torch.device, rows: int, dtype: torch.dtype) -> Iterator[Any]:
        if rows == 32:
            raise error
        yield torch.zeros(rows, 4, device=device, dtype=dtype), -1, False

    override = register(
        crossover(calls=short_of_memory, ranges=dict(declared.ranges)),
        cond=when.size("self", -1) == 5,
    )
    checked = tuner.check(override, CPU, tuner.Options(tmp_path), 100, seed=0)
    assert checked == (
        0,
        [],
        {"the condition declines the calls": 1, "the device has too little memory": 1},
    )


# ------------------------------------------------------------------ tables


AXES: dict[str, Axis] = {"rows": SteppedAxis(2, 1, 64), "dtype": ExactAxis([torch.float32])}
CELL = Cell(43.123456, 39.0, 8.0, 6.0, 40.0, None, None)


def test_a_table_keeps_what_others_have_in_it(tmp_path: Path) -> None:
    model = models.Model("Some GPU", (9, 0))
    for name in ("b", "a"):
        entry = writing.entry(1, {"date": "2026-11-23"}, AXES, {(1, 0): CELL, (0, 0): CELL})
        path = writing.write(tmp_path, model, {name: entry})
    text = path.read_text()
    assert list(json.loads(text)["overrides"]) == ["a", "b"]
    assert sum(" float32 : 43.12 39.0 " in line for line in text.splitlines()) == 4
    assert [each.name for each in tmp_path.iterdir()] == ["some_gpu.json"]


@pytest.mark.parametrize(
    "other",
    [
        {"cells": [{"at": [1]}, "1 :"], "comment": "cells first"},
        {"version": 1, "nested": {"cells": "cells of other"}, "cells": []},
        {"cells": "cells of other"},
        {"version": 1},
        3,
        None,
    ],
)
def test_what_others_have_in_a_table_stays_whatever_it_is(tmp_path: Path, other: object) -> None:
    model = models.Model("Some GPU")
    content = {"format": FORMAT, "device": "Some GPU", "overrides": {"other": other}}
    (tmp_path / "some_gpu.json").write_text(json.dumps(content))
    mine = writing.entry(1, {}, AXES, {(0, 0): CELL})
    path = writing.write(tmp_path, model, {"mine": mine})
    assert json.loads(path.read_text())["overrides"] == {"mine": mine, "other": other}


@pytest.mark.parametrize("what", ["a folder", "a pipe", "a link to itself", "100 MB", "no UTF-8"])
def test_nothing_is_measured_where_the_table_cannot_be_read(
    what: str, tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / models.file_name(models.of_device(CPU).name)
    UNREADABLE[what](path)
    with pytest.raises(BadTable, match=f"{re.escape(str(path))} stays as it is: it .*; mend or"):
        tune(tmp_path, register())
    assert not clock.cells and list(tmp_path.iterdir()) == [path]


def test_what_is_no_table_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "some_gpu.json"
    path.write_text("mine")
    with pytest.raises(BadTable):
        writing.write(tmp_path, models.Model("Some GPU"), {})
    assert path.read_text() == "mine"


# ------------------------------------------------------------------ several processes

ROWS = [1, 16, 64, 256]


@pytest.fixture
def known_in_graphs(tmp_path: Path, clock: Clock) -> Path:
    """A folder with a table that says of 256 rows what graphs take, and nothing of calls."""
    unknown = Cell(None, None, None, None, None, 2.0, 1.0)
    axes = tuner.axes_of(crossover())
    part = writing.entry(1, {}, axes, {}, others={(256, torch.float32): unknown})
    writing.write(tmp_path, models.of_device(CPU), {"tuned": part})
    return tmp_path


def test_of_a_cell_with_times_of_graphs_alone_the_calls_are_measured(
    known_in_graphs: Path, graphs: list[int]
) -> None:
    result = tune(known_in_graphs, register(), calls=only(256))
    (cell,) = cells_in(result.path)
    assert (cell["native_us"], cell["inductor_us"], cell["opaque_us"]) == (256.0, 2.0, 1.0)
    assert not graphs and not result.changed


def test_of_a_cell_with_times_of_graphs_alone_graphs_are_measured_again(
    known_in_graphs: Path, clock: Clock, graphs: list[int]
) -> None:
    clock.from_rows = 512  # calls of 256 rows are native's
    result = tune(known_in_graphs, register(), graphs=True, again=True)
    assert 256 not in graphs and 512 in graphs and result.left == 0
    assert all(cell["native_us"] is not None for cell in cells_in(result.path))


def test_a_cell_with_times_of_graphs_alone_is_no_sample_of_a_check(
    known_in_graphs: Path, clock: Clock
) -> None:
    options = tuner.Options(known_in_graphs)
    assert tuner.check(register(), CPU, options, 10, seed=0).measured == 0
    assert not clock.cells


def only(*rows: int) -> list[tuple[Any, ...]]:
    """The features of calls of one dtype, to measure the cells of these alone."""
    return [(each, torch.float32) for each in rows]


@pytest.mark.parametrize("options", [{}, {"again": True}], ids=["new", "again"])
@pytest.mark.parametrize("mine", [[1], [1, 16], [16, 64, 256]], ids=str)
def test_what_another_process_measures_meanwhile_stays(
    mine: list[int], options: dict[str, bool], tmp_path: Path, clock: Clock
) -> None:
    tune(tmp_path, register(), calls=only(1024))
    override, inside = register(), []

    def measure_others(line: str) -> None:
        if not inside:
            inside.append(line)
            tune(tmp_path, register(), calls=only(*ROWS))
            clock.from_rows = 2  # what follows is measured otherwise

    options = {"calls": only(*mine), **options}
    result = tuner.tune_override(override, CPU, tuner.Options(tmp_path, **options), measure_others)
    assert [cell["at"][0] for cell in cells_in(result.path)] == [*ROWS, 1024]
    ours = {cell["at"][0]: cell["override_us"] < 2 for cell in cells_in(result.path)}
    again = {1024} if "again" in options else set()
    assert {rows for rows, own in ours.items() if own} == {*mine, *again}


def test_what_another_process_measures_of_graphs_meanwhile_stays(
    tmp_path: Path, clock: Clock, graphs: list[int]
) -> None:
    override, inside = register(), []

    def measure_graphs(line: str) -> None:
        if not inside:
            inside.append(line)
            tune(tmp_path, register(), calls=only(256), graphs=True)

    result = tuner.tune_override(
        override, CPU, tuner.Options(tmp_path, calls=only(256)), measure_graphs
    )
    (cell,) = cells_in(result.path)
    assert (cell["inductor_us"], cell["opaque_us"]) == (2.0, 1.0)


#: Three processes that begin to write together.
WRITERS = """
import os, sys
from pathlib import Path
from opgraft.crossover.models import Model
from opgraft.tuning import writing

folder, names, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
waits, goes = os.pipe()
children = []
for mine in names:
    if child := os.fork():
        children.append(child)
        continue
    os.close(goes)
    os.read(waits, 1)  # until its parent has closed the other end
    for number in range(count):
        entries = {f"{mine} {number}": {"cells": [{"at": [1]}] * 200}}
        writing.write(folder, Model("Some GPU"), entries)
    sys.exit()
os.close(goes)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def test_processes_that_write_one_table_lose_nothing(tmp_path: Path) -> None:
    done = forked_programs.run(
        *(WRITERS, tmp_path / "tables", "abc", 25),
        env=os.environ | {"OPGRAFT_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "tables").iterdir()
    written = json.loads(path.read_text())["overrides"]
    assert sorted(written) == sorted(f"{name} {number}" for name in "abc" for number in range(25))


def test_without_a_place_for_locks_a_table_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(env, "warn_once", warnings.append)
    monkeypatch.setenv("OPGRAFT_CACHE", "/dev/null/cache")
    monkeypatch.delenv("OPGRAFT_TABLES", raising=False)
    path = writing.write(tmp_path, models.Model("Some GPU"), {})
    (warning,) = warnings
    assert path.exists() and "is written without a lock" in warning


# ------------------------------------------------------------------ search and timing


@pytest.mark.parametrize("border", range(0, 20, 3))
def test_a_border_in_two_dimensions_is_found(border: int) -> None:
    axes = (SteppedAxis(1, 1, 2**8), SteppedAxis(1, 1, 2**8))
    measured: dict[tuple[int, ...], int] = {}
    for stride in search.strides():
        while groups := search.open_cells(measured, axes, stride):
            measured |= {at: int(sum(at) >= border) for at in groups[0]}
    found = rule.filled(measured, axes, operator.and_)
    assert found == {at: int(sum(at) >= border) for at in found}
    assert len(found) == 81


def test_each_way_has_its_turn_in_its_scope() -> None:
    inside: list[str] = []

    class Scope:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            inside.append(self.name)

        def __exit__(self, *_: object) -> None:
            inside.pop()

    def call() -> None:
        time.sleep(2e-3 if inside[-1] == "slow" else 1e-4)

    ways = {name: timing.Way(lambda name=name: Scope(name), [call]) for name in ("slow", "fast")}  # type: ignore[misc]
    turns = timing.Turns(ways, CPU)
    for _ in range(3):
        turns.round()
    assert len(turns.ratios("slow", "fast")) == 3
    assert turns.median("slow")[0] >= 2e3


def test_a_call_that_waits_for_the_device_is_measured_nevertheless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device's sleep is over whenever it returns: no longer one would be long enough."""
    slept: list[int] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None: ...
        def record(self) -> None: ...
        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Event) -> float:
            return 8.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append, raising=False)
    _, seconds, cycles = timing._cuda_burst([lambda: None], 4, 1_000_000)
    assert seconds == pytest.approx(0.002)
    assert cycles == slept[-1] and max(slept) < 2**29
    # The next turn does not begin all over.
    _, _, again = timing._cuda_burst([lambda: None], 4, cycles)
    assert again == cycles and slept[-1] == cycles


def test_graphs_of_more_calls_than_dynamo_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda graph, inputs: graph.forward
    )
    softmax = resolve("aten::_softmax")
    for columns in range(2, 4 + torch._dynamo.config.recompile_limit):
        call = Call(softmax, (torch.randn(3, columns), -1, False))
        for run in measuring._compiled([call]):
            result = run()
            assert isinstance(result, torch.Tensor) and result.shape == (3, columns)
