"""What `benchmarks/crossovers.py` gathers over runs and processes: each call once."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import when
from opgraft.crossover.models import Model

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MODEL = Model("Some GPU")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The script, with a folder of its own for results."""
    for name in ("OPGRAFT_PACKS", "OPGRAFT_WHEN_NOT_READY"):  # which it sets
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("OPGRAFT_WHEN_NOT_READY", "wait")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("crossovers")
    monkeypatch.setattr(script._common, "RESULTS", tmp_path / "results")
    yield script
    for name in ("crossovers", "_common"):
        sys.modules.pop(name)


def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return torch.zeros_like(self)


def register(calls: Callable[..., Iterator[Any]], version: int = 1) -> opgraft.Override:
    return opgraft.register_op_override(
        *("aten", "_softmax", "CPU", impl),
        name="drawn",
        unconditional_override=True,
        crossover=opgraft.Crossover(
            rows=when.size("self", 0), calls=calls, ranges={"rows": (1, 2**12)}, version=version
        ),
    )


def calls(device: torch.device, rows: int) -> Iterator[Any]:
    """None of every third size; every fifth cannot be made."""
    if rows % 5 == 0:
        raise ValueError
    if rows % 3:
        yield torch.rand(rows, 1, device=device), -1, False


class Runs:
    """Runs of the benchmark whose clock goes on by a second for each call that is measured."""

    def __init__(self, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script = script
        self.now = 0.0
        #: What the first tensor of each call that was measured begins with.
        self.begins: list[float] = []
        monkeypatch.setattr(script, "cold_calls", lambda make: [make()])
        monkeypatch.setattr(script, "_row", self._row)
        monkeypatch.setattr(script.time, "monotonic", lambda: self.now)

    def _row(self, measure: Any, calls: Any, features: dict[str, Any], taken: bool) -> Any:
        self.now += 1
        self.begins.append(float(calls[0].args[0][0, 0]))
        return self.script.Row(features, taken, 1.0, 1.0, 1.0)

    def __call__(self, override: opgraft.Override, count: int, seconds: float, before: Any) -> Any:
        cpu = torch.device("cpu")
        return self.script.bench(override, cpu, count, seconds - 0.5, before)


@pytest.fixture
def runs(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(benchmark, monkeypatch)


@pytest.mark.parametrize("seed", range(5))
def test_calls_are_drawn_alike_and_counted_once_however_runs_end(seed: int, runs: Runs) -> None:
    override, rng = register(calls), random.Random(seed)
    script = runs.script
    tried = script.Tried([])
    for _ in range(8):
        tried = runs(override, len(tried.rows) + 5, rng.randint(1, 7), tried)
    drawn = [
        script._draw(override.crossover, random.Random(f"{script.SEED} drawn {number}"))["rows"]
        for number in range(tried.drawn)
    ]
    assert [row.features["rows"] for row in tried.rows] == [n for n in drawn if n % 5 and n % 3]
    assert tried.failed == sum(n % 5 == 0 for n in drawn)
    assert len(tried.rows) > 8


def test_a_call_has_the_same_numbers_whatever_was_measured_before(runs: Runs) -> None:
    override, nothing = register(calls), runs.script.Tried([])
    runs(override, 12, 60.0, nothing)
    at_once, runs.begins = runs.begins, []
    runs(override, 12, 60.0, runs(override, 12, 2.0, nothing))
    assert len(at_once) > 2 and runs.begins[: len(at_once)] == at_once


def test_another_version_is_measured_from_the_first_call_on(benchmark: Any, runs: Runs) -> None:
    override = register(calls)
    tried = runs(override, 4, 60.0, benchmark.Tried([]))
    records = [benchmark._record(override, tried)]
    assert tried.rows and benchmark._before(override, MODEL, records) == tried
    override.remove()
    assert benchmark._before(register(calls, version=2), MODEL, records) == benchmark.Tried([])


def test_rows_of_other_features_are_not_those_of_this_declaration(
    benchmark: Any, runs: Runs
) -> None:
    override = register(calls)
    record = benchmark._record(override, runs(override, 4, 60.0, benchmark.Tried([])))
    for row in record["rows"]:
        row["features"] = {"lines": 1}
    assert benchmark._before(override, MODEL, [record]) == benchmark.Tried([])


def test_a_report_keeps_what_another_process_saves_meanwhile(
    benchmark: Any, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    override = register(calls)
    tried = runs(override, 2, 60.0, benchmark.Tried([]))
    benchmark._save(MODEL, [benchmark._record(override, tried)])
    more = runs(override, 10, 60.0, tried)

    def save_more(only: object) -> list[opgraft.Override]:
        benchmark._save(MODEL, [benchmark._record(override, more)])
        return [override]

    monkeypatch.setattr(benchmark, "_overrides", save_more)
    path = benchmark._common.path_of("crossovers", MODEL.name)
    benchmark.report(path)
    (record,) = benchmark._common.load(path)
    assert len(record["rows"]) == record["calls"] == len(more.rows) > len(tried.rows)


def test_a_record_that_is_kept_says_what_it_was_measured_with(benchmark: Any) -> None:
    add = functools.partial(benchmark._common.add, "some", "GPU")
    add([{"n": 1}], "n", versions={"triton": "3.5"})
    add([{"n": 2}], "n", versions={"triton": "3.6"})
    path = add([{"n": 3}], "n", versions={"triton": "3.6"})
    found = {record["n"]: record.get("versions") for record in benchmark._common.load(path)}
    assert found[2] is found[3] is None  # as the file says
    assert found[1]["triton"] == "3.5"


def test_results_are_never_half_written(benchmark: Any) -> None:
    path = benchmark._common.save("some", "GPU", [{"n": 1}])
    with path.open() as reading:
        benchmark._common.save("some", "GPU", [{"n": 2}] * 1000)
        assert json.loads(reading.read())["records"] == [{"n": 1}]
    with contextlib.suppress(TypeError):
        benchmark._common.save("some", "GPU", [{"n": object()}])
    assert len(benchmark._common.load(path)) == 1000


def test_processes_add_their_records_to_the_same_results(benchmark: Any) -> None:
    def add(number: int) -> None:
        benchmark._common.add("some", "GPU", [{"name": number, "value": number}], "name")

    add(0)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, range(1, 17)))
    benchmark._common.add("some", "GPU", [{"name": 3, "value": -3}], "name")

    records = benchmark._common.load(benchmark._common.path_of("some", "GPU"))
    values = {record["name"]: record["value"] for record in records}
    assert values == {number: number for number in range(17)} | {3: -3}
    assert len(records) == 17
