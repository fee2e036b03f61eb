"""Puts what other benchmarks recorded into the tables that opgraft-kernels ships.

    python benchmarks/recorded_tables.py                    # needs no device
    python benchmarks/recorded_tables.py --output DIR       # tables elsewhere

`opgraft tune` measures tables. This command fills in what was recorded before there were tables,
on the same device, and what a table has already stays.

Of the norms in compiled graphs (`compiled_norms.py`), behind a residual connection:

- a forward has the GPU's times in inference, by Inductor and as an opaque op;
- a backward has those of a step of training with the backward by Inductor and opaque, less the time
  of Inductor's forward, which both of them contain.

A cell is of the override that takes its calls by the table: that over clusters, or Triton's. The
widths are powers of two, where the cells begin.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _common

os.environ.pop("TRITON_INTERPRET", None)  # CUDA's overrides are registered, no interpreter's

import opgraft_kernels
from opgraft import Crossover
from opgraft.crossover import rule, tables
from opgraft.crossover.models import Model
from opgraft.crossover.tables import Cell, Entry, Table
from opgraft.tuning import writing
from opgraft.when.grid import Axis, Feature
from opgraft_kernels.crossovers import TABLES

DEVICE = "NVIDIA H200"
MODEL = Model(DEVICE, (9, 0))
NORMS = ("rms_norm", "layer_norm")
UNKNOWN = Cell(*[None] * len(Cell._fields))


class Found(NamedTuple):
    """Recorded times of one call.

    Attributes:
        overrides: names, the first of which that takes the call has it.
        at: the call's features, by name.
        times: those fields of a cell that were recorded.
    """

    overrides: tuple[str, ...]
    at: Mapping[str, Feature]
    times: Mapping[str, float]


def norms_in_graphs(norm: str) -> Iterator[Found]:
    """What `compiled_norms.py` recorded of a norm."""
    steps: dict[tuple[int, int], dict[str, Any]] = {}
    for record in _common.load(_common.path_of(f"compiled_{norm}", DEVICE)):
        if record["pattern"] == "behind a residual":
            size = (record["rows"], record["hidden"])
            steps.setdefault(size, {})[record["mode"]] = record
    for (rows, hidden), modes in steps.items():
        forward, both = modes["inference"], modes["training"]
        before = _gpu(forward, "inductor")
        at = {"elements": rows * hidden, "hidden": hidden, "itemsize": 2, "misalignment": 0}
        for direction, inductor, opaque in (
            ("forward", before, _gpu(forward, "opaque")),
            ("backward", _gpu(both, "inductor") - before, _gpu(both, "backward") - before),
        ):
            name = f"opgraft_kernels.{norm}.{direction}"
            yield Found((f"{name}_by_cluster", name), at, {"inductor": inductor, "opaque": opaque})


def _gpu(record: Mapping[str, Any], contender: str) -> float:
    return float(record[f"{contender}_us"]["gpu"])


class Part:
    """An override's part of a table, and what is added to it."""

    def __init__(self, crossover: Crossover, entry: Entry) -> None:
        self._features = list(crossover.features)
        self._ranges = crossover.ranges
        self._entry = entry
        self._grid = rule.grid_of([(entry, rule.MARGIN)])
        self._cells = {
            tuple(axis.lower(place) for axis, place in zip(entry.axes, at, strict=True)): cell
            for at, cell in entry.cells.items()
        }
        self._added = False

    def takes(self, found: Found) -> bool:
        """Whether the table takes such a call by a plan."""
        return self._grid.takes(self.at(found), rule.PLAN)

    def add(self, at: tuple[Feature, ...], times: Mapping[str, float]) -> None:
        """Add what was recorded of a cell, but for what the table has."""
        cell = self._cells.get(at, UNKNOWN)
        known = {name: time for name, time in cell._asdict().items() if time is not None}
        self._cells[at] = cell._replace(**{**times, **known})
        self._added |= self._cells[at] != cell

    def at(self, found: Found) -> tuple[Feature, ...]:
        """Where the cell begins that a call falls into."""
        values = (found.at[name] for name in self._features)
        return tuple(map(_corner, self._entry.axes, values))

    def as_json(self, what: str, benchmarks: Sequence[str]) -> dict[str, Any]:
        """As a table has it.

        Args:
            what: is added, of what was measured.
            benchmarks: that recorded it.
        """
        axes = dict(zip(self._features, self._entry.axes, strict=True))
        measured = dict(self._entry.measured)
        if self._added:
            paths = [_common.path_of(each, DEVICE) for each in benchmarks]
            dates = sorted({json.loads(path.read_text())["date"] for path in paths})
            measured[what] = ", ".join([*dates, *(path.name for path in paths)])
        return writing.entry(
            *(self._entry.version, measured, axes, {}, self._cells),
            ranges=self._ranges,
            is_complete=self._entry.is_complete,
            is_complete_in_graphs=self._entry.is_complete_in_graphs,
        )


def _corner(axis: Axis, value: Feature) -> Feature:
    place = axis.index_of(value)
    return value if place is None else axis.lower(place)


def parts(table: Table) -> dict[str, Part]:
    """The parts of a table by the override's name."""
    found = {}
    for name, crossover in crossovers().items():
        entry = tables.entry_of(table, name, crossover)
        if entry is not None:
            found[name] = Part(crossover, entry)
    return found


def crossovers() -> dict[str, Crossover]:
    """Those of the pack by the override's name."""
    overrides = opgraft_kernels.register()
    found = {each.name: each.crossover for each in overrides if each.crossover is not None}
    for each in overrides:
        each.remove()
    return found


def with_norms_in_graphs(norm: str, table: Table | None) -> dict[str, dict[str, Any]]:
    """The parts of a table that recorded times of a norm are added to."""
    assert table is not None
    known = parts(table)
    changed: dict[str, Part] = {}
    for found in norms_in_graphs(norm):
        name = next((each for each in found.overrides if known[each].takes(found)), None)
        if name is not None:  # where none takes it there is nothing to decide
            known[name].add(known[name].at(found), found.times)
            changed[name] = known[name]
    return {name: part.as_json("graphs", [f"compiled_{norm}"]) for name, part in changed.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=TABLES, help="the folder with the tables")
    options = parser.parse_args()
    for norm in NORMS:
        entries = functools.partial(with_norms_in_graphs, norm)
        print("written to", writing.update(options.output, MODEL, entries))


if __name__ == "__main__":
    main()
