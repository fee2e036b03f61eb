"""Measures what looking up a table adds to a miss, on the CPU.

    python benchmarks/lookup.py           # two minutes
    python benchmarks/lookup.py --smoke   # seconds: does this script work? Its numbers mean nothing

`aten::_softmax` gets a kernel that returns a tensor which is there, so that what a miss adds is
seen beside little else, and one override at a time:

- `four tests`: its condition has four tests, of which the last declines.
- `four tests, again`: another one like it, the control.
- `... and N features`: the same four tests hold, and then its table of N features declines.

Each is called with tensors of one shape and dtype, and with tensors of many in turn, so that the
processor cannot predict what a lookup finds.

The states take turns, round by round. A number is the median over rounds of the difference to
`four tests` of the same round, in nanoseconds of the calling thread's CPU time for each call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import _common
import router
import torch

import opgraft
from opgraft import when
from opgraft.crossover import models, tables

NAMES = ("rows", "hidden", "dtype", "ndim", "itemsize", "first")
COUNTS = (1, 2, 3, 4, 5, 6)
TENSORS, TURNS, ROUNDS = 251, 200, 60
DTYPES = (torch.float32, torch.float16)
#: Where the table was measured. Of more than 128 rows, which no call has, it takes some.
MEASURED: dict[str, tuple[Any, ...]] = {
    "rows": (1, 128, 1024),
    "hidden": (16, 8192),
    "dtype": ("float32", "float16"),
    "ndim": (2,),
    "itemsize": (2, 4),
    "first": (1, 128),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few calls")
    options = parser.parse_args()
    turns, rounds = (2, 2) if options.smoke else (TURNS, ROUNDS)
    torch.set_num_threads(1)
    router._callers_path = router.build_callers()
    callers = router._callers()
    cases = router.make_cases()
    callers.install_constants(*(cases[op].constant for op in router.OPS))
    tensors = {"one shape": [torch.rand(4, 64)] * TENSORS, "many shapes": many_shapes()}
    with tempfile.TemporaryDirectory() as folder:
        states = register(Path(folder))
        times = {of: measure(callers, states, xs, turns, rounds) for of, xs in tensors.items()}
    rows = [row for of, found in times.items() for row in summarise(of, found)]
    for row in rows:
        place = f"{row['tensors']}: {row['state']}"
        print(f"{place:40} {row['ns']:8.1f} ns a call {row['added_ns']:+8.1f} ns")
    if not options.smoke:
        print(_common.save("lookup", _common.cpu_name(), rows))


def many_shapes() -> list[torch.Tensor]:
    draw = random.Random(0)

    def size(most: int) -> int:
        return int(2 ** draw.uniform(0, most))

    return [torch.empty(size(7), 16 * size(8), dtype=draw.choice(DTYPES)) for _ in range(TENSORS)]


def register(folder: Path) -> list[str]:
    """Register an override for each state, and return the states."""
    tests = when.dtype("self", *DTYPES) & (when.ndim("self") == 2) & when.is_contiguous("self")
    features: dict[str, Any] = {
        "rows": when.numel("self") // when.size("self", -1),
        "hidden": when.size("self", -1),
        "dtype": when.dtype_of("self"),
        "ndim": when.ndim("self"),
        "itemsize": when.itemsize("self"),
        "first": when.size("self", 0),
    }
    exact = ("dtype", "ndim", "itemsize")
    content: dict[str, Any] = {}
    for count in COUNTS:
        names = NAMES[:count]
        content[f"{count} features"] = {
            "version": 1,
            "features": {each: "exact" if each in exact else {"steps": 2} for each in names},
            "measured": {"date": "2026-11-24", "torch": torch.__version__},
            "columns": tables.columns_of(names),
            "cells": [_cell(at) for at in itertools.product(*(MEASURED[each] for each in names))],
        }
    model = models.of_device(torch.device("cpu")).name
    table = {"format": tables.FORMAT, "device": model, "capability": None, "overrides": content}
    (folder / models.file_name(model)).write_text(json.dumps(table))
    # The router turns a call away by sizes alone where all overrides want others; not by these.
    declines, holds = (when.size("self", -1) % 16 == rest for rest in (1, 0))
    for name in ("four tests", "four tests, again"):
        _register(name, tests & declines)
    for name, count in zip(content, COUNTS, strict=True):
        some = {each: features[each] for each in NAMES[:count]}
        override = _register(
            name, tests & holds, crossover=opgraft.Crossover(**some, tables=folder)
        )
        assert (
            override.decisions is not None
            and override.decisions.grid(torch.device("cpu")) is not None
        )
    return ["four tests", "four tests, again", *content]


def _cell(at: tuple[Any, ...]) -> str:
    ours = 0.5 if at[0] > 128 else 2.0
    return tables.line_of(at, tables.Cell(1.0, ours, 1.0, ours, ours, None, None))


def _register(name: str, cond: Any, **options: Any) -> opgraft.Override:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        raise AssertionError("every override declines")

    return opgraft.register_op_override(
        "aten", "_softmax", "CPU", impl, cond=cond, name=name, on_error="raise", **options
    )


def measure(
    callers: Any, states: list[str], tensors: list[torch.Tensor], turns: int, rounds: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {each: [] for each in ("no override", *states)}
    for _ in range(rounds):
        order = list(times)
        random.shuffle(order)
        for state in order:
            opgraft.disable()
            if state != "no override":
                opgraft.enable(name=state)
            callers.cpu_ns_per_softmax(tensors, max(1, turns // 10))
            times[state].append(callers.cpu_ns_per_softmax(tensors, turns))
    asked = [each for each in opgraft.overrides() if each.misses]
    assert len(asked) == len(states), "an override was not asked"
    return times


def summarise(tensors: str, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    base = times["four tests"]
    return [
        {
            "tensors": tensors,
            "state": state,
            "ns": round(statistics.median(found), 1),
            "added_ns": round(
                statistics.median(a - b for a, b in zip(found, base, strict=True)), 1
            ),
        }
        for state, found in times.items()
    ]


if __name__ == "__main__":
    main()
