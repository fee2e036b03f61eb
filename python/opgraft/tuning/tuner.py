"""Measures an override against native, cell by cell, and writes what it measured into a table."""

from __future__ import annotations

import datetime
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch

from opgraft import dsl
from opgraft.crossover import models, rule, tables
from opgraft.crossover.declaration import Crossover
from opgraft.crossover.rule import Indices
from opgraft.crossover.tables import Cell
from opgraft.errors import RegistrationError
from opgraft.ops.schema import Call
from opgraft.ready import ahead, pool
from opgraft.registry import Override
from opgraft.router.device import is_out_of_memory
from opgraft.tuning import host_times, search, writing
from opgraft.tuning.measuring import Measuring, Skip, cold_calls, measuring
from opgraft.verification.runner import Progress
from opgraft.verification.sources import call_of_sample
from opgraft.when.grid import MAX_CELLS, Axis, ExactAxis, Feature, SteppedAxis, places_in
from opgraft.when.nodes import Undefined

#: Buckets of an octave.
STEPS = 1
#: Seconds after which the table is written again.
WRITE_SECONDS = 30.0
#: Of the calls that an author yields for a cell so many count. No further one is measured where
#: those before are so many times as fast as natively: it would be faster, too.
_MOST_CALLS, _CLEAR_GAIN = 4, 1.3
#: Workers that compile at a time, on a machine with more than twice as many cores.
WORKERS = 24


#: What is measured together, by the column that each pass measures.
_TIMES = {rule.PLAN: Cell._fields[:-2], rule.GRAPH: Cell._fields[-2:]}
#: Where the buckets of a cell begin.
Corner: TypeAlias = tuple[Feature, ...]


@dataclass(frozen=True)
class Options:
    """How to tune.

    Attributes:
        folder: where the tables are.
        seconds: no cell is begun that would end after so many, if it took as long as the longest
            so far. Of the first one nothing is known: it is begun while there is time.
        again: measure anew what is there.
        stale: with `again`, what :func:`known` gave before other processes may have measured some
            of it anew, too; only what is still so is measured. None: all.
        calls: the features of the calls to measure the cells of; None: all cells that decide.
        graphs: measure compiled graphs too.
        part: ``(k, n)``: only the k-th of n parts of the grid, counted from 1. Cells with the same
            values of exact features are in the same part, as they decide about one another. None:
            the whole.
    """

    folder: Path
    seconds: float = float("inf")
    again: bool = False
    stale: Mapping[Corner, Cell] | None = None
    calls: Sequence[tuple[Any, ...]] | None = None
    graphs: bool = False
    part: tuple[int, int] | None = None


_NO_CALL, _OUTSIDE = "calls= makes none", "outside of ranges="
#: Why a cell is not measured though nothing failed.
NOT_MEANT = frozenset([_NO_CALL, _OUTSIDE])


@dataclass
class Result:
    """What became of one override.

    Attributes:
        name: of the override.
        measured: how many cells were measured now.
        known: how many were there before.
        left: how many are still open, of the part: the time was up.
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


class Checked(NamedTuple):
    """What became of the cells that were measured again.

    Attributes:
        measured: how many there were.
        otherwise: those that would be decided otherwise, as text.
        skipped: why others could not be measured; by reason, how many.
    """

    measured: int
    otherwise: list[str]
    skipped: dict[str, int]


def axes_of(crossover: Crossover) -> dict[str, Axis]:
    """The axes of a crossover's grid, from its ranges.

    Raises:
        RegistrationError: it has no `calls=` or no `ranges=`, or its ranges span too many cells.
    """
    if crossover.calls is None or not crossover.ranges:
        raise RegistrationError(
            f"{crossover!r} cannot be tuned: give calls= (how to make samples) and ranges= (the "
            "smallest and largest number of each feature, or its values)"
        )
    axes: dict[str, Axis] = {}
    for name in crossover.features:
        values = crossover.ranges[name]
        is_exact = name in crossover.exact or not all(type(value) is int for value in values)
        axes[name] = ExactAxis(values) if is_exact else SteppedAxis(STEPS, min(values), max(values))
    count = math.prod(axis.count for axis in axes.values())
    if count > MAX_CELLS:
        each = ", ".join(f"{name} {axis.count}" for name, axis in axes.items())
        raise RegistrationError(
            f"{crossover!r} cannot be tuned: its ranges= span {count} cells ({each}), and a table "
            f"has {MAX_CELLS} at the most: narrow them, and name what goes on beyond them in "
            "open_ended=; or leave out a feature"
        )
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
    if device.type == "cuda":
        pool.allow_workers(WORKERS)
    with measuring(override, device) as measure:
        return _Tuning(override, measure, device, options, progress).run()


def known(override: Override, device: torch.device, folder: Path) -> dict[Corner, Cell]:
    """What a table in a folder has of an override already.

    Raises:
        BadTable: what is there is no table.
    """
    found = _entry_in(writing.existing(folder, models.of_device(device)), override)
    if found is None:
        return {}
    return {
        tuple(axis.lower(place) for axis, place in zip(found.axes, at, strict=True)): cell
        for at, cell in found.cells.items()
    }


class _Pass(NamedTuple):
    """One way through a grid.

    Attributes:
        column: of the rule, whose times it measures.
        decided: what was measured of it, as bits, of the cells that are known.
        measure: measures a cell.
        undecidable: cells that there is nothing to decide of: the condition declines their calls,
            or there are none. So what lies between them and others says nothing either.
        failed: cells whose measurement failed. They are not asked for again, and are left to be
            measured: by another run, with more memory or another kernel.
    """

    column: int
    decided: Callable[[Mapping[Indices, Cell]], dict[Indices, int]]
    measure: Callable[[Indices], Cell]
    undecidable: set[Indices]
    failed: set[Indices]


class _Tuning:
    """The measurement of one override on one device."""

    def __init__(
        self,
        override: Override,
        measure: Measuring,
        device: torch.device,
        options: Options,
        progress: Progress,
    ) -> None:
        assert override.crossover is not None
        self._override = override
        self._crossover = override.crossover
        self._measuring = measure
        self._device = device
        self._options = options
        self._progress = progress
        self._model = models.of_device(device)
        self._named_axes = axes_of(self._crossover)
        self._axes = tuple(self._named_axes.values())
        self._result = Result(override.name, axes=self._named_axes)
        self._started = time.monotonic()
        self._written = time.monotonic()
        #: The seconds that the longest cell took so far, whatever became of it.
        self._longest = 0.0
        #: What the table has outside of the ranges, by where the cells begin. It stays.
        self._outside: dict[Corner, Cell] = {}
        self._cells = self._known_cells(
            _entry_in(writing.existing(options.folder, self._model), override)
        )
        #: Those that were measured now. Of the others the table may know more in the meantime.
        self._measured: set[Indices] = set()
        self._check_span()
        self._result.known = len(self._cells)
        self._of_calls, self._of_graphs = self._pass_of_ways(), self._pass_of_graphs()
        self._passes = [self._of_calls, self._of_graphs][: 1 + options.graphs]

    # ------------------------------------------------------------------ the cells

    def run(self) -> Result:
        before = dict(self._cells)
        outside = sum(self._cell_of(values) is None for values in self._options.calls or ())
        if outside:
            self._result.skipped[_OUTSIDE] = outside
        try:
            self._measure_open_cells()
        finally:
            self._write()
        cells = self._usual()
        self._result.changed = [
            f"{self._describe(at)}: {_decision(before[at])} -> {_decision(cell)}"
            for at, cell in cells.items()
            if at in before and _decides_otherwise(before[at], cell)
        ]
        self._result.seconds = time.monotonic() - self._started
        self._result.cells = cells
        self._result.left = sum(len(self._left_cells(each)) for each in self._passes)
        return self._result

    def _measure_open_cells(self) -> None:
        for each in self._passes:
            if self._options.again:
                self._measure_group(each, self._stale(each))
            self._measure_rounds(each)
        # Of a cell that graphs needed alone, calls may be decided otherwise than around it.
        while not self._is_late() and any(map(self._left_cells, self._passes)):
            for each in self._passes:
                self._measure_rounds(each)

    def _measure_rounds(self, each: _Pass) -> None:
        for stride in search.strides():
            while not self._is_late() and (groups := self._open_cells(each, stride)):
                self._measure_group(each, groups[0])

    def _measure_group(self, each: _Pass, cells: Sequence[Indices]) -> None:
        with closing(ahead.Ahead(self._is_late)) as compiling:
            self._compile_ahead(compiling, cells)
            for at in cells:
                compiling.wait(at, self._tell_of_compiling)
                if self._is_late():
                    return
                self._measure(each, at)

    def _compile_ahead(self, compiling: ahead.Ahead, cells: Sequence[Indices]) -> None:
        """Have workers compile for cells while others are measured, as each takes longer to compile
        for than to measure. A cell whose calls cannot be made is left to the measurement, which
        says why.
        """
        if self._device.type != "cuda" or self._override.dsl is None:
            return
        for at in cells:
            if self._is_late():
                return
            try:
                for call in self._calls(at):
                    for override in self._measuring.taking(call):
                        compiling.submit(at, override, call)
            except (Exception, SystemExit):
                continue

    def _tell_of_compiling(self, done: int, total: int) -> None:
        self._progress(f"compiling for {total} calls, {done} done")

    def _open_cells(self, each: _Pass, stride: int) -> list[list[Indices]]:
        """Those of a round, in the groups of :func:`search.open_cells`."""
        decided = self._decided(each)
        if self._options.calls is None:
            groups = search.open_cells(decided, self._axes, stride)
        else:
            groups = [self._called_cells(decided)]
        skipped = self._undecidable(each) | self._failed(each)
        wanted = [
            [at for at in group if at not in skipped and self._is_in_part(at)] for group in groups
        ]
        return [group for group in wanted if group]

    def _is_in_part(self, at: Indices) -> bool:
        if self._options.part is None:
            return True
        number, parts = self._options.part
        exact = [
            place for place, axis in zip(at, self._axes, strict=True) if isinstance(axis, ExactAxis)
        ]
        # What differs in one of them is in other parts, so that each has some of everything.
        return sum(exact) % parts == number - 1

    def _left_cells(self, each: _Pass) -> set[Indices]:
        """Those that rounds to come would measure."""
        decided = self._decided(each)
        if self._options.calls is None:
            left = search.left_cells(decided, self._axes)
        else:
            left = {*self._called_cells(decided)}
        left = left - self._undecidable(each) - self._failed(each)
        return set(filter(self._is_in_part, left))

    def _decided(self, each: _Pass) -> dict[Indices, int]:
        """What the cells, as they are written, say of a pass."""
        return each.decided(self._usual())

    def _usual(self, more: Mapping[Indices, Cell] = MappingProxyType({})) -> dict[Indices, Cell]:
        """The cells and `more` as they are written. On the CPU the host's time is the device's."""
        cells = self._cells | dict(more)
        return host_times.usual(cells, self._axes) if self._device.type != "cpu" else cells

    def _undecidable(self, each: _Pass) -> set[Indices]:
        """Without calls there is nothing to decide of graphs either."""
        return self._of_calls.undecidable | each.undecidable

    def _failed(self, each: _Pass) -> set[Indices]:
        return self._of_calls.failed | each.failed

    def _called_cells(self, decided: Mapping[Indices, int]) -> list[Indices]:
        called = dict.fromkeys(map(self._cell_of, self._options.calls or ()))
        return [at for at in called if at is not None and at not in decided]

    def _known_to(self, each: _Pass) -> list[Indices]:
        return [at for at, cell in self._cells.items() if rule.is_measured(cell, each.column)]

    def _stale(self, each: _Pass) -> list[Indices]:
        """Those to measure anew."""
        stale = self._options.stale
        known = list(filter(self._is_in_part, self._known_to(each)))
        if stale is None:
            return known

        def times_in(cell: Cell) -> Sequence[float | None]:
            # The host's are written otherwise when those of other cells say what is usual.
            names = (name for name in _TIMES[each.column] if name not in host_times.COLUMNS)
            return [getattr(cell, name) for name in names]

        corners = {at: tuple(self._features(at).values()) for at in known}
        return [
            at
            for at, corner in corners.items()
            if corner in stale and times_in(stale[corner]) == times_in(self._cells[at])
        ]

    def _pass_of_ways(self) -> _Pass:
        """Native, by a plan, and from Python; what is known of compiled graphs stays."""

        def decided(cells: Mapping[Indices, Cell]) -> dict[Indices, int]:
            return {
                at: _bits(cell) & ~(1 << rule.GRAPH)
                for at, cell in cells.items()
                if rule.is_measured(cell, rule.PLAN)
            }

        def measure(at: Indices) -> Cell:
            return self._with_ways(at, self._cells.get(at))

        return _Pass(rule.PLAN, decided, measure, set(), set())

    def _pass_of_graphs(self) -> _Pass:
        """Compiled graphs, where the override is faster at all."""

        def decided(cells: Mapping[Indices, Cell]) -> dict[Indices, int]:
            return {
                at: _bits(cell) >> rule.GRAPH & 1
                for at, cell in cells.items()
                if rule.is_measured(cell, rule.GRAPH) or not _bits(cell)
            }

        def measure(at: Indices) -> Cell:
            cell = self._cells.get(at)
            if cell is None or not rule.is_measured(cell, rule.PLAN):
                cell = self._with_ways(at, cell)
            if not _bits(self._usual({at: cell})[at]):  # as `decided` has it
                return cell
            inductor, opaque = self._measuring.graph(cold_calls(partial(self._call, at, 0)))
            return cell._replace(inductor=inductor, opaque=opaque)

        return _Pass(rule.GRAPH, decided, measure, set(), set())

    def _is_late(self) -> bool:
        """Whether another cell might not end in time."""
        return time.monotonic() - self._started + self._longest > self._options.seconds

    def _measure(self, each: _Pass, at: Indices) -> None:
        cell = self._cell_or_skip(each, at)
        if cell is not None:
            self._cells[at] = cell
            self._measured.add(at)
            self._result.measured += 1
        if time.monotonic() - self._written > WRITE_SECONDS:
            self._write()

    def _cell_or_skip(self, each: _Pass, at: Indices) -> Cell | None:
        """The cell as it is measured now; None, and the reason is counted, if it cannot be."""
        self._progress(self._describe(at))
        began = time.monotonic()
        try:
            return each.measure(at)
        except Skip as reason:
            each.undecidable.add(at)
            self._count_skipped(str(reason))
        except RegistrationError:
            raise
        except (Exception, SystemExit) as error:  # of native, the impl or calls=: others may work
            each.failed.add(at)
            self._count_skipped(_why_failed(error))
        finally:
            self._longest = max(self._longest, time.monotonic() - began)
        return None

    def _count_skipped(self, reason: str) -> None:
        self._result.skipped[reason] = self._result.skipped.get(reason, 0) + 1

    def _describe(self, at: Indices) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._features(at).items())

    def _features(self, at: Indices) -> dict[str, Any]:
        places = zip(self._named_axes.items(), at, strict=True)
        return {name: axis.lower(place) for (name, axis), place in places}

    def check(self, count: int, rng: random.Random) -> Checked:
        """Measure some cells again, without writing what was measured."""
        measured, otherwise = 0, []
        known = sorted(self._known_to(self._passes[0]))
        for at in rng.sample(known, min(count, len(known))):
            cell = self._cell_or_skip(self._passes[0], at)
            if cell is None:
                continue
            measured += 1
            cell = self._usual({at: cell})[at]
            if _decides_otherwise(self._cells[at], cell):
                what = f"{_decision(self._cells[at])} -> {_decision(cell)}"
                otherwise.append(f"{self._describe(at)}: {what}")
        return Checked(measured, otherwise, self._result.skipped)

    # ------------------------------------------------------------------ one cell

    def _with_ways(self, at: Indices, known: Cell | None) -> Cell:
        """The cell as it is measured now, with what is known of compiled graphs."""
        cell = self._cell(at)
        return cell._replace(inductor=known.inductor, opaque=known.opaque) if known else cell

    def _cell(self, at: Indices) -> Cell:
        """What was measured of the call of the cell that the override gains least by."""
        least: Cell | None = None
        for number, call in enumerate(self._calls(at)):
            # One call says so, and making enough for a measurement takes longer than that.
            if self._override not in self._measuring.taking(call):
                continue
            cell = self._measuring.cell(cold_calls(partial(self._call, at, number)))
            if least is None or _gain(cell) < _gain(least):
                least = cell
            if not _pays(least) or _gain(least) >= _CLEAR_GAIN:
                break
        if least is None:
            raise Skip("the condition declines the calls")
        return least

    def _call(self, at: Indices, number: int) -> Call:
        return next(itertools.islice(self._calls(at), number, None))

    def _calls(self, at: Indices) -> Iterator[Call]:
        features = self._features(at)
        assert self._crossover.calls is not None
        is_empty = True
        samples = self._crossover.calls(self._device, **features)
        for sample in itertools.islice(samples, _MOST_CALLS):
            call = call_of_sample(self._override, sample, "a call of calls=")
            values = [each.evaluate(call.named) for each in self._crossover.features.values()]
            if self._cell_of(values) != at:
                found = [each.reason if isinstance(each, Undefined) else each for each in values]
                raise RegistrationError(
                    f"calls= of {self._override.name!r} made a call with "
                    f"{dict(zip(features, found, strict=True))} when asked for {features}"
                )
            is_empty = False
            yield call
        if is_empty:
            raise Skip(_NO_CALL)

    # ------------------------------------------------------------------ the table

    def _known_cells(self, found: tables.Entry | None) -> dict[Indices, Cell]:
        if found is None:
            return {}
        known: dict[Indices, Cell] = {}
        for there, cell in found.cells.items():
            corner = tuple(axis.lower(place) for axis, place in zip(found.axes, there, strict=True))
            # With other buckets an octave, a corner there is none here.
            at = places_in(self._axes, corner)
            if at is not None:
                known[at] = cell
            elif self._cell_of(corner) is None and all(map(_is_corner, self._axes, corner)):
                self._outside[corner] = cell
        return known

    def _check_span(self) -> None:
        """Raise where the ranges and what the table has outside of them are no table together."""
        count = 1
        for which, axis in enumerate(self._axes):
            values = [corner[which] for corner in self._outside]
            if isinstance(axis, ExactAxis):
                count *= len({*axis.values, *values})
            else:
                inside = axis.lower(0), axis.lower(axis.count - 1)
                numbers = [*inside, *(value for value in values if isinstance(value, int))]
                count *= SteppedAxis(axis.steps, min(numbers), max(numbers)).count
        if count > MAX_CELLS:
            raise RegistrationError(
                f"{self._override.name!r} cannot be tuned: its ranges=, and what the table in "
                f"{self._options.folder} has outside of them, span {count} cells, and a table has "
                f"{MAX_CELLS} at the most: write into another folder with --output"
            )

    def _cell_of(self, values: Sequence[Any]) -> Indices | None:
        """The cell that a call's features fall into; None if it is outside of the ranges."""
        places = [axis.index_of(each) for axis, each in zip(self._axes, values, strict=True)]
        at = tuple(place for place in places if place is not None)
        return at if len(at) == len(places) else None

    def _write(self) -> None:
        self._written = time.monotonic()
        if self._cells:
            folder = self._options.folder
            self._result.path = writing.update(folder, self._model, self._entries)

    def _entries(self, table: tables.Table | None) -> dict[str, dict[str, Any]]:
        """The override's part, with what others have measured since the table was read."""
        before = _entry_in(table, self._override)
        known = self._known_cells(before)
        for at, theirs in known.items():
            ours = self._cells.get(at)
            if ours is None or at not in self._measured:
                self._cells[at] = theirs
            elif not rule.is_measured(ours, rule.GRAPH):
                self._cells[at] = ours._replace(inductor=theirs.inductor, opaque=theirs.opaque)
        measured = {} if before is None else dict(before.measured)
        if self._measured or not measured:
            measured |= _measured_with(self._override)
        was = before if before is not None and _have_steps(before.axes, self._axes) else None
        entry = writing.entry(
            self._crossover.version,
            measured,
            self._named_axes,
            self._usual(),
            self._outside,
            ranges=self._crossover.ranges,
            is_complete=self._is_complete(
                self._of_calls, was is not None and was.is_complete, known
            ),
            is_complete_in_graphs=self._is_complete(
                self._of_graphs, was is not None and was.is_complete_in_graphs, known
            ),
        )
        return {self._override.name: entry}

    def _is_complete(self, each: _Pass, was_complete: bool, known: Mapping[Indices, Cell]) -> bool:
        """Whether nothing is left to measure in the ranges.

        Where nothing was before, which cells there is nothing to decide of is known no more: those
        that are left by what the table has. What was measured now has to leave no others.
        """
        left = search.left_cells(self._decided(each), self._axes) - self._undecidable(each)
        return not left or (
            was_complete and left <= search.left_cells(each.decided(known), self._axes)
        )


def _entry_in(table: tables.Table | None, override: Override) -> tables.Entry | None:
    """The override's part of a table, if it is of this version of the kernel."""
    assert override.crossover is not None
    if table is None:
        return None
    try:
        return tables.entry_of(table, override.name, override.crossover)
    except tables.BadTable:  # of another version of the kernel, or of other features
        return None


def _have_steps(axes: Sequence[Axis], others: Sequence[Axis]) -> bool:
    """Whether the buckets of an octave are as many."""
    return all(
        isinstance(axis, ExactAxis) == isinstance(other, ExactAxis)
        and getattr(axis, "steps", None) == getattr(other, "steps", None)
        for axis, other in zip(axes, others, strict=True)
    )


def _is_corner(axis: Axis, value: Feature) -> bool:
    """Whether a bucket like an axis's begins at a value, be it outside of the axis."""
    if isinstance(axis, ExactAxis):
        return True
    return type(value) is int and SteppedAxis(axis.steps, value, value).lower(0) == value


def _measured_with(override: Override) -> dict[str, str]:
    """The date, and the versions of torch and of the override's DSL."""
    found = {"date": datetime.date.today().isoformat(), "torch": str(torch.__version__)}
    known = None if override.dsl is None else dsl.find(override.dsl)
    version = None if known is None else known.version()
    return found if version is None else found | {str(override.dsl): version}


def _gain(cell: Cell) -> float:
    """What the override gains, by a plan if it has one, as the rule compares it."""
    native, host = rule.times(cell, rule.PLAN)[0], rule.host_time(cell, rule.PLAN)
    return rule.gain(native, cell.override, host) if native and cell.override and host else 0.0


def _pays(cell: Cell) -> bool:
    return rule.pays(cell, rule.PLAN, rule.MARGIN)


def _why_failed(error: BaseException) -> str:
    """Why a cell could not be measured, for people to read."""
    if is_out_of_memory(error):
        return "the device has too little memory"
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line[:200]}"


def _bits(cell: Cell) -> int:
    return rule.bits(cell, rule.MARGIN)


def _decides_otherwise(before: Cell, after: Cell) -> bool:
    """Whether two measurements decide otherwise where both were measured."""
    return any(
        rule.pays(before, column, rule.MARGIN) != rule.pays(after, column, rule.MARGIN)
        for column in range(len(rule.COLUMNS))
        if rule.is_measured(before, column) and rule.is_measured(after, column)
    )


def _decision(cell: Cell) -> str:
    taken = [name for column, name in enumerate(rule.COLUMNS) if _bits(cell) >> column & 1]
    return " and ".join(taken) or "native"


def check(
    override: Override, device: torch.device, options: Options, count: int, seed: int
) -> Checked:
    """Measure a random sample of a table's cells again."""
    with measuring(override, device) as measure:
        tuning = _Tuning(override, measure, device, options, lambda line: None)
        return tuning.check(count, random.Random(seed))
