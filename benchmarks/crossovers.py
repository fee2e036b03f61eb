"""Tries what tables of crossovers decide, on random calls that tuning never measured.

    python benchmarks/crossovers.py                          # every override with a table, on a GPU
    python benchmarks/crossovers.py --only rms_norm --calls 100
    python benchmarks/crossovers.py --smoke                  # on the CPU: does this script work?
    python benchmarks/crossovers.py --least TABLE            # the least work that a table takes

For each override that declares a crossover it draws calls, log-uniformly over 2**10 to 2**30
elements and over the whole range of each other feature, sizes between powers of two among them. It
measures each against native (as `opgraft tune` does: interleaved, with a control, the device's time
or the host's, the longer one), and compares with what the table in force says. The goals: of the
calls that are taken by a plan the median ratio is 1.05 at least and none is below 0.98 beyond the
control; of those that are declined at most 3 % would have been faster by more than 5 %.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _common
import torch

import opgraft
from opgraft import when
from opgraft.base.rounds import median_and_interval
from opgraft.crossover import models, rule
from opgraft.crossover.tables import Cell
from opgraft.ops.schema import Call
from opgraft.ready import ahead
from opgraft.registry import Override
from opgraft.tuning.measuring import Measuring, Skip, cold_calls, measuring
from opgraft.tuning.tuner import axes_of
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
        features: of its crossover.
        taken: what the table says of it.
        ratio: native's time over ours.
        control: native's time over native's.
        native: microseconds.
    """

    features: dict[str, Any]
    taken: bool
    ratio: float
    control: float
    native: float

    @property
    def is_slower(self) -> bool:
        return self.taken and self.ratio < LEAST - abs(self.control - 1)

    @property
    def is_lost(self) -> bool:
        return not self.taken and self.ratio > MARGIN


class NoCall(Exception):
    """There is no call with such features, as a row has no fewer elements than its width."""


def _draws(crossover: opgraft.Crossover, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Features, log-uniformly from the ranges of the crossover."""
    while True:
        features = {}
        for name, axis in axes_of(crossover).items():
            if isinstance(axis, ExactAxis):
                features[name] = rng.choice(axis.values)
                continue
            values = crossover.ranges[name]
            low, high = ELEMENTS if name == "elements" else (min(values), max(values))
            features[name] = round(2 ** rng.uniform(math.log2(low), math.log2(high)))
        yield features


def _call(override: Override, features: Mapping[str, Any], device: torch.device) -> Call:
    assert override.crossover is not None and override.crossover.calls is not None
    for sample in override.crossover.calls(device, **features):
        return call_of_sample(override, sample, "calls=")
    raise NoCall


def _row(
    override: Override, measure: Measuring, calls: Sequence[Call], device: torch.device
) -> Row:
    crossover, decisions = override.crossover, override.decisions
    assert crossover is not None and decisions is not None
    found = {name: each.evaluate(calls[0].named) for name, each in crossover.features.items()}
    in_force = decisions.in_force(models.of_device(device))
    taken = in_force is not None and in_force.grid.takes(found.values(), rule.PLAN)
    turns, without, way = measure.turns(calls)
    control, _, _ = median_and_interval(turns.ratios("native", "native again"))
    native, own = max(turns.median(without)), max(turns.median(way))
    return Row({k: str(v) for k, v in found.items()}, taken, native / own, control, native)


def bench(
    override: Override, device: torch.device, count: int, seconds: float
) -> tuple[list[Row], int]:
    """Rows of up to so many calls, and how many could not be measured."""
    assert override.crossover is not None
    rng = random.Random(f"{SEED} {override.name}")
    drawn: list[dict[str, Any]] = []
    rows: list[Row] = []
    failed = 0
    end = time.monotonic() + seconds
    compiling = ahead.Ahead(lambda: time.monotonic() > end)
    with measuring(override, device) as measure:
        for features in itertools.islice(_draws(override.crossover, rng), 20 * count):
            if len(drawn) == count or time.monotonic() > end:
                break
            try:
                call = _call(override, features, device)
            except NoCall:
                continue
            except RuntimeError:  # the measurement says why
                pass
            else:
                for each in measure.taking(call):
                    compiling.submit(len(drawn), each, call)
            drawn.append(features)
        for index, features in enumerate(drawn):
            compiling.wait(index, lambda done, total: None)
            if time.monotonic() > end:
                break
            try:
                calls = cold_calls(functools.partial(_call, override, features, device))
                rows.append(_row(override, measure, calls, device))
            except (Skip, RuntimeError) as error:
                failed += 1
                print(f"  {features}: {str(error).splitlines()[0][:100]}", flush=True)
    return rows, failed


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
    rows, failed = bench(override, torch.device("cpu"), 2, 60.0)
    assert failed == 0 and [row.taken for row in rows] == [False, False], rows
    _print("smoke", rows)
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
    parser.add_argument("--seconds", type=float, default=600.0, help="for each override")
    parser.add_argument("--least", type=Path, metavar="TABLE", help="of a table; no GPU is needed")
    options = parser.parse_args()
    if options.least:
        least_work(options.least)
        return
    if options.smoke:
        smoke()
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke runs without one")
    import opgraft_kernels

    device = torch.device("cuda")
    name = torch.cuda.get_device_name()
    path = _common.path_of("crossovers", name)
    records = _common.load(path)
    opgraft_kernels.register()
    for override in opgraft.overrides():
        wanted = any(each in override.name for each in options.only)
        if not wanted or override.crossover is None or override.why_off() is not None:
            continue
        if override.table_name != override.name:  # measured as another one
            continue
        rows, failed = bench(override, device, options.calls, options.seconds)
        _print(override.name, rows)
        record = {"override": override.name, **summary(rows), "failed": failed}
        record["rows"] = [row._asdict() for row in rows]
        records = [each for each in records if each["override"] != override.name] + [record]
        _common.save("crossovers", name, records)


if __name__ == "__main__":
    main()
