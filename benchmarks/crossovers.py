"""Tries what tables of crossovers decide, on random calls that tuning never measured.

    python benchmarks/crossovers.py                          # every override with a table, on a GPU
    python benchmarks/crossovers.py --only rms_norm --calls 100
    python benchmarks/crossovers.py --seconds 300            # what is left, the next run measures
    python benchmarks/crossovers.py --report RESULTS         # by today's tables; no GPU is needed
    python benchmarks/crossovers.py --smoke                  # on the CPU: does this script work?
    python benchmarks/crossovers.py --least TABLE            # the least work that a table takes

For each override that declares a crossover it draws calls, log-uniformly over 2**10 to 2**30
elements and over the whole range of each other feature, sizes between powers of two among them. It
measures each against native (as `opgraft tune` does: interleaved, with a control, the device's time
or the host's, the longer one), and compares with what the table in force says. The goals: of the
calls that are taken by a plan the median ratio is 1.05 at least and none is below 0.98 beyond the
control; of those that are declined at most 3 % would have been faster by more than 5 %, also beyond
the control.

What was measured of a kernel's version stays in the results, and later runs add to it. Processes on
several GPUs can measure at a time: each takes other overrides.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import _common
import torch

import opgraft
from opgraft import when
from opgraft.base import files
from opgraft.base.rounds import median_and_interval
from opgraft.crossover import models, rule
from opgraft.crossover.models import Model
from opgraft.crossover.tables import Cell
from opgraft.ops.describing import dtype_name
from opgraft.ops.schema import Call
from opgraft.ready import ahead, claims, pool
from opgraft.registry import Override
from opgraft.tuning.measuring import Measuring, cold_calls, measuring
from opgraft.tuning.tuner import WORKERS, axes_of
from opgraft.verification.sources import call_of_sample
from opgraft.when.grid import ExactAxis

#: A seed that tuning never uses.
SEED = 20261123
ELEMENTS = (2**10, 2**30)
#: Below this ratio a call that is taken is too slow; above the other one that is declined is lost.
LEAST, MARGIN = 0.98, 1.05


class Row(NamedTuple):
    """A call.

    Attributes:
        features: of its crossover; dtypes by their names.
        taken: what the table says of it.
        ratio: native's time over ours.
        control: native's time over native's.
        native: microseconds.
        devices: what the device takes natively and by ours, microseconds; None of earlier runs.
    """

    features: dict[str, Any]
    taken: bool
    ratio: float
    control: float
    native: float
    devices: Sequence[float] | None = None

    @property
    def is_slower(self) -> bool:
        return self.taken and self.ratio < LEAST - abs(self.control - 1)

    @property
    def is_lost(self) -> bool:
        return not self.taken and self.ratio > MARGIN + abs(self.control - 1)


class Tried(NamedTuple):
    """What was measured of an override.

    Attributes:
        rows: the calls.
        drawn: how many were drawn for them, those among them that there is no call of.
        failed: how many could not be measured.
    """

    rows: list[Row]
    drawn: int = 0
    failed: int = 0


class NoCall(Exception):
    """There is no call with such features, as a row has no fewer elements than its width."""


def _draw(crossover: opgraft.Crossover, rng: random.Random) -> dict[str, Any]:
    """Features, log-uniformly from the ranges of the crossover."""
    features = {}
    for name, axis in axes_of(crossover).items():
        if isinstance(axis, ExactAxis):
            features[name] = rng.choice(axis.values)
            continue
        values = crossover.ranges[name]
        low, high = ELEMENTS if name == "elements" else (min(values), max(values))
        features[name] = round(2 ** rng.uniform(math.log2(low), math.log2(high)))
    return features


def _call(override: Override, features: Mapping[str, Any], device: torch.device) -> Call:
    assert override.crossover is not None and override.crossover.calls is not None
    for sample in override.crossover.calls(device, **features):
        return call_of_sample(override, sample, "calls=")
    raise NoCall


def _row(measure: Measuring, calls: Sequence[Call], features: dict[str, Any], taken: bool) -> Row:
    turns, without, way = measure.turns(calls)
    control, _, _ = median_and_interval(turns.ratios("native", "native again"))
    native, own = turns.median(without), turns.median(way)
    ratio = max(native) / max(own)
    devices = round(native[0], 2), round(own[0], 2)
    return Row(features, taken, round(ratio, 4), round(control, 4), round(max(native), 2), devices)


def _takes(override: Override, model: Model, features: Mapping[str, Any]) -> bool:
    """What the table in force says of a call."""
    assert override.crossover is not None and override.decisions is not None
    in_force = override.decisions.in_force(model)
    if in_force is None:
        return False
    values = [
        vars(torch)[value] if isinstance(value, str) else value
        for value in (features[name] for name in override.crossover.features)
    ]
    return in_force.grid.takes(values, rule.PLAN)


def _features(override: Override, call: Call) -> dict[str, Any]:
    assert override.crossover is not None
    found = {name: each.evaluate(call.named) for name, each in override.crossover.features.items()}
    return {
        name: dtype_name(value) if isinstance(value, torch.dtype) else value
        for name, value in found.items()
    }


def bench(
    override: Override, device: torch.device, count: int, seconds: float, before: Tried
) -> Tried:
    """Measure up to so many calls, those of earlier runs among them."""
    assert override.crossover is not None
    rows, drawn, failed = [*before.rows], before.drawn, before.failed
    end = time.monotonic() + seconds
    model = models.of_device(device)
    waiting: dict[int, dict[str, Any]] = {}
    compiling = ahead.Ahead(lambda: time.monotonic() > end)
    with closing(compiling), measuring(override, device) as measure:
        for number in range(drawn, drawn + 20 * count):
            if len(rows) + len(waiting) >= count or time.monotonic() > end:
                break
            rng = random.Random(f"{SEED} {override.name} {number}")
            features = _draw(override.crossover, rng)
            try:
                call = _call(override, features, device)
                taking = measure.taking(call)
            except NoCall:
                continue
            except Exception:  # the measurement says why
                taking = []
            for each in taking:
                compiling.submit(number, each, call)
            waiting[number] = features
        # All of them first: what workers compile would be in what the host takes.
        for number in waiting:
            compiling.wait(number, lambda done, total: None)
        for number, features in waiting.items():
            if time.monotonic() > end:
                break
            drawn = number + 1
            torch.manual_seed(SEED + number)
            try:
                calls = cold_calls(functools.partial(_call, override, features, device))
                found = _features(override, calls[0])
                rows.append(_row(measure, calls, found, _takes(override, model, found)))
            except Exception as error:  # of native, the impl or calls=: others may work
                failed += 1
                first_line = next(iter(str(error).splitlines()), type(error).__name__)
                print(f"  {features}: {first_line[:100]}", flush=True)
    return Tried(rows, drawn, failed)


# ------------------------------------------------------------------ results


def _before(override: Override, model: Model, records: Sequence[Mapping[str, Any]]) -> Tried:
    """What earlier runs measured of the kernel's version, by the tables that are there today.

    Of calls with other features than those that are declared nothing can be told.
    """
    assert override.crossover is not None
    for record in records:
        is_same = record["override"] == override.name
        if is_same and record.get("version") == override.crossover.version:
            rows = [Row(**each) for each in record["rows"]]
            if any(row.features.keys() != override.crossover.features.keys() for row in rows):
                break
            rows = [row._replace(taken=_takes(override, model, row.features)) for row in rows]
            return Tried(rows, record["drawn"], record["failed"])
    return Tried([])


def _record(override: Override, tried: Tried) -> dict[str, Any]:
    assert override.crossover is not None
    return {
        "override": override.name,
        "version": override.crossover.version,
        **summary(tried.rows),
        "drawn": tried.drawn,
        "failed": tried.failed,
        "rows": [row._asdict() for row in tried.rows],
    }


def _save(model: Model, records: Sequence[Mapping[str, Any]]) -> None:
    _common.add("crossovers", model.name, records, "override", capability=model.capability)


def report(path: Path) -> None:
    """Print, and save, what today's tables decide of the calls that were measured."""
    overrides = _overrides([""])
    with _common.alone(path):
        found = json.loads(path.read_text())
        capability = found.get("capability")
        model = Model(found["device"], capability and (capability[0], capability[1]))
        by_name = {record["override"]: record for record in found["records"]}
        for override in overrides:
            tried = _before(override, model, found["records"])
            if tried.rows:
                _print(override.name, tried.rows)
                by_name[override.name].update(_record(override, tried))
        files.replace(path, json.dumps(found, indent=1) + "\n", mode=0o644)


def _overrides(only: Sequence[str]) -> list[Override]:
    """Those that tables decide of by measurements of their own, whose name holds one of these."""
    import opgraft_kernels

    opgraft_kernels.register()
    return [
        override
        for override in opgraft.overrides()
        if override.crossover is not None
        and override.table_name == override.name
        and override.why_off() is None
        and any(each in override.name for each in only)
    ]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of an override's rows.

    >>> rows = [Row({}, True, 1.5, 1.0, 9.0), Row({}, True, 0.97, 1.02, 9.0)]
    >>> rows += [Row({}, False, 1.1, 1.0, 9.0), Row({}, False, 0.9, 1.0, 9.0)]
    >>> summary(rows)
    {'calls': 4, 'taken': 2, 'median of taken': 1.235, 'slower': 0, 'declined': 2, 'lost': 1}
    """
    taken = [row for row in rows if row.taken]
    median = statistics.median(row.ratio for row in taken) if taken else None
    return {
        "calls": len(rows),
        "taken": len(taken),
        "median of taken": None if median is None else round(median, 4),
        "slower": sum(row.is_slower for row in rows),
        "declined": len(rows) - len(taken),
        "lost": sum(row.is_lost for row in rows),
    }


def _print(name: str, rows: Sequence[Row]) -> None:
    print(name, summary(rows), flush=True)
    for row in rows:
        if row.is_slower or row.is_lost:
            print(f"  {'slower' if row.is_slower else 'lost'}: {row}", flush=True)


def smoke() -> None:
    """An override of the CPU, whose table is missing: all calls are declined."""

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return torch.zeros_like(self)

    def calls(device: torch.device, numbers: int) -> Iterator[Any]:
        yield torch.zeros(numbers, device=device), -1, False

    override = opgraft.register_op_override(
        *("aten", "_softmax", "CPU", impl),
        unconditional_override=True,
        crossover=opgraft.Crossover(
            numbers=when.numel("self"), calls=calls, ranges={"numbers": (1, 2**12)}
        ),
    )
    tried = bench(override, torch.device("cpu"), 1, 60.0, Tried([]))
    tried = bench(override, torch.device("cpu"), 2, 60.0, tried)
    assert tried.failed == 0 and [row.taken for row in tried.rows] == [False, False], tried
    _print("smoke", tried.rows)
    print("overrides were hit; nothing was measured")


def least_work(path: Path) -> None:
    """Prints the smallest measured cells that a table's overrides take: by a plan, from Python.

    Work is the elements, or else the product of the features that are sizes.
    """
    for override, part in json.loads(path.read_text())["overrides"].items():
        kinds = part["features"].items()
        sizes = [n for n, (name, _) in enumerate(kinds) if name == "elements"]
        sizes = sizes or [
            n for n, (name, kind) in enumerate(kinds) if name == "dim" or kind != "exact"
        ]
        least: dict[int, int] = {}
        for line in part["cells"]:
            at, figures = (each.split() for each in line.split(":"))
            cell = Cell(*(None if each == "-" else float(each) for each in figures))
            work = math.prod(int(at[n]) for n in sizes)
            for column in (rule.PLAN, rule.PYTHON):
                if rule.is_measured(cell, column) and rule.pays(cell, column, rule.MARGIN):
                    least[column] = min(work, least.get(column, work))
        shown = [f"{rule.COLUMNS[c]} 2^{math.log2(work):.0f}" for c, work in least.items()]
        print(f"{override}: {', '.join(shown) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="run on the CPU, measure nothing")
    parser.add_argument("--only", nargs="+", default=[""], help="overrides whose name holds one")
    parser.add_argument("--calls", type=int, default=400, help="for each override")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all of them")
    parser.add_argument("--report", type=Path, metavar="RESULTS", help="measure nothing")
    parser.add_argument("--least", type=Path, metavar="TABLE", help="of a table; no GPU is needed")
    options = parser.parse_args()
    if options.least:
        least_work(options.least)
        return
    if options.report:
        report(options.report)
        return
    if options.smoke:
        smoke()
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke runs without one")
    device = torch.device("cuda")
    model = models.of_device(device)
    path = _common.path_of("crossovers", model.name)
    pool.allow_workers(WORKERS)
    end = time.monotonic() + options.seconds
    for override in _overrides(options.only):
        claim = claims.Claim(f"crossovers-{model.name}-{override.name}".replace(" ", "_"))
        if time.monotonic() > end or not claim.take():
            continue
        try:
            before = _before(override, model, _common.load(path))
            if len(before.rows) < options.calls:
                left = end - time.monotonic()
                tried = bench(override, device, options.calls, left, before)
                _print(override.name, tried.rows)
                _save(model, [_record(override, tried)])
        finally:
            claim.release()


if __name__ == "__main__":
    main()
