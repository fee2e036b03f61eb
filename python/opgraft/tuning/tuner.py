"""Measures an override against native, cell by cell, and writes what it measured into a table."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opgraft.base.rounds import median_and_interval
from opgraft.crossover import models, rule, tables
from opgraft.crossover.declaration import Crossover
from opgraft.crossover.rule import Indices
from opgraft.crossover.tables import Cell
from opgraft.errors import RegistrationError
from opgraft.ops.schema import Call
from opgraft.registration import register_op_override
from opgraft.registry import Override, Selector, registry
from opgraft.router import threads
from opgraft.tuning import search, writing
from opgraft.tuning.timing import Turns, Way
from opgraft.verification.samples import run
from opgraft.verification.single_override import only
from opgraft.verification.sources import call_of_sample
from opgraft.when.grid import Axis, ExactAxis, SteppedAxis

#: Buckets of an octave.
STEPS = 1
#: Rounds of a cell: so many at the least, and until the answer is clear, or so many at the most.
MIN_ROUNDS, MAX_ROUNDS = 5, 25
#: The calls of a turn touch so many bytes together, if that takes no more than so many calls: more
#: than a device's cache holds, which a model's next call does not find full of its arguments.
COLD_BYTES, MAX_CALLS = 2**27, 16
#: Seconds after which the table is written again.
WRITE_SECONDS = 30.0

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How to tune.

    Attributes:
        folder: where the tables are.
        seconds: no cell is begun after so many.
        again: measure anew what is there.
        calls: the features of the calls to measure the cells of; None: all cells that decide.
    """

    folder: Path
    seconds: float = float("inf")
    again: bool = False
    calls: Sequence[tuple[Any, ...]] | None = None


@dataclass
class Result:
    """What became of one override.

    Attributes:
        name: of the override.
        measured: how many cells were measured now.
        known: how many were there before.
        left: how many are still open: the time was up.
        changed: the cells that are decided otherwise than before, as text.
        skipped: why some cells, or all, were not measured; by reason, how many.
        path: the table; None if nothing was measured.
        seconds: how long it took.
        axes: of its grid, by feature.
        cells: what was measured, now and before.
    """

    name: str
    measured: int = 0
    known: int = 0
    left: int = 0
    changed: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    path: Path | None = None
    seconds: float = 0.0
    axes: Mapping[str, Axis] = field(default_factory=dict)
    cells: Mapping[Indices, Cell] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """What JSON can write."""
        return {
            "name": self.name,
            "measured": self.measured,
            "known": self.known,
            "left": self.left,
            "changed": self.changed,
            "skipped": self.skipped,
            "path": None if self.path is None else str(self.path),
            "seconds": round(self.seconds, 3),
        }


class _Skip(Exception):
    """A cell that cannot be measured, with the reason."""


def axes_of(crossover: Crossover) -> dict[str, Axis]:
    """The axes of a crossover's grid, from its ranges.

    Raises:
        RegistrationError: it has no `calls=` or no `ranges=`.
    """
    if crossover.calls is None or set(crossover.ranges) != set(crossover.features):
        raise RegistrationError(
            f"{crossover!r} cannot be tuned: give calls= (how to make samples) and ranges= (the "
            "smallest and largest number of each feature, or its values)"
        )
    axes: dict[str, Axis] = {}
    for name in crossover.features:
        values = crossover.ranges[name]
        is_exact = name in crossover.exact or not all(type(value) is int for value in values)
        axes[name] = ExactAxis(values) if is_exact else SteppedAxis(STEPS, min(values), max(values))
    return axes


def tune_override(
    override: Override, device: torch.device, options: Options, progress: Progress
) -> Result:
    """Measure the cells of one override that decide, until the time is up.

    What a table in the folder has already is not measured again, if it is of the same version of
    the kernel.

    Args:
        override: with a `crossover=`.
        device: what to measure on.
        options: where, and for how long.
        progress: called with a text for each cell.

    Raises:
        RegistrationError: the override has no crossover, or one that cannot be tuned.
    """
    if override.crossover is None:
        raise RegistrationError(f"override {override.name!r} has no crossover=: nothing to tune")
    with _twins(override) as twins:
        return _Tuning(override, twins, device, options, progress).run()


class _Twins(NamedTuple):
    """What is measured in place of overrides: the same without their crossovers."""

    #: The override's own: "python", and "plan" if it has launch plans.
    own: Mapping[str, Override]
    #: Of the overrides behind it in the chain, which get its calls without it, by name.
    others: Mapping[str, Override]


@contextmanager
def _twins(override: Override) -> Iterator[_Twins]:
    behind = [
        each
        for each in registry.overrides(Selector(op=override.op, dispatch_key=override.dispatch_key))
        if each.order > override.order and each.why_off() is None and each.autograd is None
    ]
    with ExitStack() as registered:

        def twin(of: Override, way: str) -> Override:
            made = _register_twin(of, way)
            registered.callback(made.remove)
            return made

        own = {"python": twin(override, "python")}
        if override.launch_plan:
            own["plan"] = twin(override, "plan")
        others = [twin(each, _best_way(each)) for each in behind]
        yield _Twins(own, {each.name: each for each in others})


def _best_way(override: Override) -> str:
    return "plan" if override.launch_plan else "python"


def _register_twin(override: Override, way: str) -> Override:
    return register_op_override(
        override.op.partition("::")[0],
        override.operator.registration_name,
        override.dispatch_key,
        override.impl,
        name=f"{override.name} (tuned, {way})",
        cond=override.cond,
        unconditional_override=override.cond is None,
        dsl=override.dsl,
        launch_plan=way == "plan",
        on_error="raise",
    )


class _Tuning:
    """The measurement of one override on one device."""

    def __init__(
        self,
        override: Override,
        twins: _Twins,
        device: torch.device,
        options: Options,
        progress: Progress,
    ) -> None:
        assert override.crossover is not None
        self._override = override
        self._crossover = override.crossover
        self._twins = twins
        self._device = device
        self._options = options
        self._progress = progress
        self._model = models.of_device(device)
        self._named_axes = axes_of(self._crossover)
        self._axes = tuple(self._named_axes.values())
        self._result = Result(override.name, axes=self._named_axes)
        self._started = time.monotonic()
        self._written = time.monotonic()
        self._cells = self._known_cells()
        self._result.known = len(self._cells)
        #: Cells whose calls the condition declines, or that cannot be made: nothing to decide.
        self._without_calls: set[Indices] = set()

    # ------------------------------------------------------------------ the cells

    def run(self) -> Result:
        before = dict(self._cells)
        outside = sum(self._cell_of(values) is None for values in self._options.calls or ())
        if outside:
            self._result.skipped["outside of ranges="] = outside
        try:
            self._measure_open_cells()
        finally:
            self._write()
        self._result.changed = [
            f"{self._describe(at)}: {_decision(before[at])} -> {_decision(cell)}"
            for at, cell in self._cells.items()
            if at in before and _bits(before[at]) != _bits(cell)
        ]
        self._result.seconds = time.monotonic() - self._started
        self._result.cells = self._cells
        self._result.left = sum(map(len, self._open_cells(1)))
        return self._result

    def _measure_open_cells(self) -> None:
        if self._options.again:
            for at in list(self._cells):
                if self._is_late():
                    return
                self._measure(at)
        for stride in search.strides():
            while groups := self._open_cells(stride):
                for at in groups[0]:
                    if self._is_late():
                        return
                    self._measure(at)

    def _open_cells(self, stride: int) -> list[list[Indices]]:
        if self._options.calls is None:
            return search.open_cells(self._decided(), self._axes, stride)
        decided = self._decided()
        called = dict.fromkeys(map(self._cell_of, self._options.calls))
        found = [at for at in called if at is not None and at not in decided]
        return [found] if found else []

    def _is_late(self) -> bool:
        return time.monotonic() - self._started > self._options.seconds

    def _decided(self) -> dict[Indices, int]:
        decided = {at: _bits(cell) for at, cell in self._cells.items()}
        return decided | dict.fromkeys(self._without_calls, 0)

    def _measure(self, at: Indices) -> None:
        self._progress(self._describe(at))
        try:
            cell = self._cell(at)
        except _Skip as reason:
            self._skip(at, str(reason))
        except torch.OutOfMemoryError:
            self._skip(at, "the device has too little memory")
        else:
            self._cells[at] = cell
            self._result.measured += 1
        if time.monotonic() - self._written > WRITE_SECONDS:
            self._write()

    def _skip(self, at: Indices, reason: str) -> None:
        self._without_calls.add(at)
        self._result.skipped[reason] = self._result.skipped.get(reason, 0) + 1

    def _describe(self, at: Indices) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._features(at).items())

    def _features(self, at: Indices) -> dict[str, Any]:
        places = zip(self._named_axes.items(), at, strict=True)
        return {name: axis.lower(place) for (name, axis), place in places}

    def check(self, count: int, rng: random.Random) -> tuple[int, list[str]]:
        """Measure some cells again, without writing what was measured."""
        chosen = rng.sample(sorted(self._cells), min(count, len(self._cells)))
        otherwise = []
        for at in chosen:
            self._progress(self._describe(at))
            cell = self._cell(at)
            if _bits(cell) != _bits(self._cells[at]):
                what = f"{_decision(self._cells[at])} -> {_decision(cell)}"
                otherwise.append(f"{self._describe(at)}: {what}")
        return len(chosen), otherwise

    # ------------------------------------------------------------------ one cell

    def _cell(self, at: Indices) -> Cell:
        calls = self._calls(at)
        functions = [partial(run, call) for call in calls]
        ways = {name: Way(self._natively, functions) for name in ("native", "native again")}
        twins = {**self._twins.own, **self._twins.others}
        ways |= {name: Way(partial(self._alone, twin), functions) for name, twin in twins.items()}
        hits = {name: twin.hits for name, twin in twins.items()}
        turns = Turns(ways, self._device)
        declining = {name for name, twin in twins.items() if twin.hits == hits[name]}
        if declining & self._twins.own.keys():
            raise _Skip("the condition declines the calls")
        for name in declining:
            turns.drop(name)
        best = _best_way(self._override)
        others = [name for name in self._twins.others if name not in declining]
        for count in range(1, MAX_ROUNDS + 1):
            turns.round()
            without = min(["native", *others], key=lambda name: max(turns.median(name)))
            if count >= MIN_ROUNDS and _is_clear(turns, without, best):
                break
        native, native_host = turns.median(without)
        device, _ = turns.median(best)
        plan_host = turns.median("plan")[1] if best == "plan" else None
        return Cell(native, device, native_host, plan_host, turns.median("python")[1], None, None)

    def _calls(self, at: Indices) -> list[Call]:
        """Calls of one cell, with enough arguments that they are not in the device's cache."""
        calls: list[Call] = []
        taken = 0
        while len(calls) < MAX_CALLS and (not calls or taken < COLD_BYTES):
            made = self._call(at)
            calls.append(made)
            taken += sum(tensor.nbytes for tensor in made.tensors())
        return calls

    def _call(self, at: Indices) -> Call:
        features = self._features(at)
        assert self._crossover.calls is not None
        for sample in self._crossover.calls(self._device, **features):
            call = call_of_sample(self._override, sample, f"calls= at {self._describe(at)}")
            values = [each.evaluate(call.named) for each in self._crossover.features.values()]
            if self._cell_of(values) != at:
                raise RegistrationError(
                    f"calls= of {self._override.name!r} made a call with "
                    f"{dict(zip(features, values, strict=True))} when asked for {features}"
                )
            return call
        raise _Skip("calls= makes none")

    def _natively(self) -> AbstractContextManager[object]:
        return threads.scope(threads.EVERYTHING)

    @contextmanager
    def _alone(self, twin: Override) -> Iterator[None]:
        with torch.no_grad(), only(twin):
            yield

    # ------------------------------------------------------------------ the table

    def _known_cells(self) -> dict[Indices, Cell]:
        path = self._options.folder / models.file_name(self._model.name)
        if not path.exists():
            return {}
        table = tables.parse(path, path.read_text())
        try:
            found = tables.entry_of(table, self._override.name, self._crossover)
        except tables.BadTable:  # of another version of the kernel, or of other features
            return {}
        if found is None:
            return {}
        known = {}
        for there, cell in found.cells.items():
            corner = [axis.lower(place) for axis, place in zip(found.axes, there, strict=True)]
            at = self._cell_of(corner)
            # With other buckets an octave, a corner there is none here.
            if at is not None and list(self._features(at).values()) == corner:
                known[at] = cell
        return known

    def _cell_of(self, values: Sequence[Any]) -> Indices | None:
        """The cell that a call's features fall into; None if it is outside of the ranges."""
        places = [axis.index_of(each) for axis, each in zip(self._axes, values, strict=True)]
        at = tuple(place for place in places if place is not None)
        return at if len(at) == len(places) else None

    def _write(self) -> None:
        self._written = time.monotonic()
        if not self._cells:
            return
        entry = writing.entry(self._crossover.version, _measured(), self._named_axes, self._cells)
        self._result.path = writing.write(
            self._options.folder, self._model, {self._override.name: entry}
        )


def _measured() -> dict[str, str]:
    """With what is measured."""
    found = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
    for name in ("triton", "nvidia-cutlass-dsl"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _is_clear(turns: Turns, without: str, way: str) -> bool:
    """Whether more rounds would not change the decision, and native is as fast as native."""
    control, _, _ = median_and_interval(turns.ratios("native", "native again"))
    _, low, high = median_and_interval(turns.ratios(without, way))
    border = 1 + rule.MARGIN
    return abs(control - 1) < rule.MARGIN / 2 and (high < border or low > border)


def _bits(cell: Cell) -> int:
    return rule.bits(cell, rule.MARGIN)


def _decision(cell: Cell) -> str:
    taken = [name for column, name in enumerate(rule.COLUMNS) if _bits(cell) >> column & 1]
    return " and ".join(taken) or "native"


def check(
    override: Override, device: torch.device, options: Options, count: int, seed: int
) -> tuple[int, list[str]]:
    """Measure a random sample of a table's cells again.

    Returns:
        How many cells were measured, and those that would be decided otherwise, as text.
    """
    with _twins(override) as twins:
        tuning = _Tuning(override, twins, device, options, lambda line: None)
        return tuning.check(count, random.Random(seed))
