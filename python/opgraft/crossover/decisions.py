"""What the tables decide for one override, on each device."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from opgraft.base import garbage
from opgraft.crossover import kept, models, rule, sources
from opgraft.crossover.declaration import Crossover
from opgraft.crossover.models import Model
from opgraft.crossover.sources import Folders, Found, Source
from opgraft.crossover.tables import Cell
from opgraft.ops.describing import dtype_name
from opgraft.when.grid import Axis, Feature, Grid, SteppedAxis, places_in
from opgraft.when.nodes import Failure, Lookup


class InForce:
    """The tables that are in force on one model of device, and their grid.

    Attributes:
        model: the model.
        sources: the tables; those behind the first count where it decides nothing.
        grid: what they decide.
        is_told: whether each process is to say something of them: that the first is another
            device's, or that others are refused.
    """

    def __init__(
        self, model: Model, sources: tuple[Source, ...], refused: Sequence[str] = ()
    ) -> None:
        self.model = model
        self.sources = sources
        self.is_told = sources[0].of != "this device" or bool(refused)
        self.grid = rule.grid_of([(source.entry, source.margin) for source in sources])

    @property
    def source(self) -> Source:
        """The first table."""
        return self.sources[0]

    @property
    def digest(self) -> str:
        """A hash of everything that a decision depends on."""
        ends = [isinstance(axis, SteppedAxis) and axis.open_ended for axis in self.grid.axes]
        parts = [f"{source.entry.digest} {source.margin}" for source in self.sources]
        text = f"{' '.join(parts)} {rule.HOST_MARGIN} {ends}"
        return hashlib.sha256(text.encode()).hexdigest()

    def failure(self, names: list[str], values: tuple[Any, ...], column: int) -> Failure:
        """Why the column declines a call's features."""
        indices = self.grid.indices_of(values)
        if indices is None:
            place = ", ".join(map(_shown, names, values))
            return Failure("not measured here", f"{place}; {_described(self.sources)}")
        place = ", ".join(map(_shown, names, map(_place, self.grid.axes, indices, values)))
        corner = [axis.lower(index) for axis, index in zip(self.grid.axes, indices, strict=True)]
        # Beyond its own ends a table counts last.
        for beyond_ends, source in itertools.product((False, True), self.sources):
            at = places_in(source.entry.axes, corner, beyond_ends=beyond_ends)
            cell = None if at is None else source.entry.cells.get(at)
            if cell is None or not rule.is_measured(cell, column):
                continue
            if not rule.pays(cell, column, source.margin):
                part = _comparison(cell, column, source.margin)
                return Failure(part, f"{place}; {_described([source])}")
            if not beyond_ends:  # it would be taken, if cells of tables before did not decline it
                before = self.sources[: self.sources.index(source)]
                return Failure(_UNMEASURED, f"{place}; {_described(before or self.sources)}")
        return Failure(_UNMEASURED, f"{place}; {_described(self.sources)}")


def _described(sources: Iterable[Source]) -> str:
    return " and ".join(map(_described_source, sources))


def _described_source(source: Source) -> str:
    measured = source.entry.measured
    date = f", measured {measured['date']}" if "date" in measured else ""
    other = "" if source.of == "this device" else f" of {source.of}"
    return f"{source.table.path.name}{other}{date}"


_UNMEASURED = "not measured here, and not faster in all measured cells around it"
_WAYS = {rule.PLAN: "", rule.PYTHON: " from Python", rule.GRAPH: " in graphs"}


def _comparison(cell: Cell, column: int, margin: float) -> str:
    """Why a measured cell is declined."""
    native, way = rule.times(cell, column)
    if native is None or way is None:
        return f"not measured{_WAYS[column]} here"
    text = f"{way:.4g} us against native's {native:.4g}"
    if way > native:
        return f"slower{_WAYS[column]} here: {text}"
    if native < way * (1 + margin):
        return f"not {margin:.0%} faster{_WAYS[column]} here: {text}"
    if column == rule.GRAPH:
        return f"an opaque op's call would be declined: {_comparison(cell, rule.PLAN, margin)}"
    host = rule.host_time(cell, column)
    return (
        f"not {rule.host_margin(margin):.0%} faster{_WAYS[column]} here, as the host's times have "
        f"to be: {host:.4g} us on the host against native's {native:.4g}"
    )


def _place(axis: Axis, index: int, value: Any) -> Feature:
    """Where the bucket of a value begins; the value, if it lies beyond an open end."""
    is_open = isinstance(axis, SteppedAxis) and axis.open_ended
    is_beyond = is_open and not axis.lower(index) <= value < axis.lower(index + 1)
    return int(value) if is_beyond else axis.lower(index)


def _shown(name: str, value: object) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if type(value) is int and value >= 1024 and value & (value - 1) == 0:
        return f"{name} 2**{value.bit_length() - 1}"
    return f"{name} {value}"


class Decisions:
    """The decisions of all tables for one override. Tables are read when it is first asked.

    Args:
        name: the override's name in tables.
        owner: its pack, or `"user"`.
        crossover: what it declares.
    """

    def __init__(self, name: str, owner: str, crossover: Crossover) -> None:
        self.name = name
        self.owner = owner
        self.crossover = crossover
        self._in_force: dict[Model, InForce | None] = {}
        self._grids: dict[Model, Grid | None] = {}
        #: Conditions: whether it is faster by a launch plan, from Python, and in compiled graphs.
        self.by_plan, self.from_python, self.in_graphs = (
            Lookup(crossover.features, column, column_name, self)
            for column, column_name in enumerate(rule.COLUMNS)
        )

    @cached_property
    def _folders(self) -> Folders:
        """The tables. All that is asked is answered by the same ones, whatever becomes of files."""
        return sources.folders(self.owner, self.crossover)

    @cached_property
    def found(self) -> Found:
        """What all tables say of it, whatever the device."""
        with garbage.collection_paused():  # thousands of cells, which stay
            return sources.find(self.name, self.crossover, self._folders)

    @property
    def digest(self) -> str:
        """A hash of what all tables say, which needs no device."""
        parts = [
            f"{table.model} {entry.digest}"
            for table, entry in (*self.found.user, *self.found.author)
        ]
        margins = (
            *(rule.MARGIN, rule.HOST_MARGIN),
            *(rule.OTHER_DEVICE_MARGIN, rule.OTHER_ARCHITECTURE_MARGIN),
        )
        ends = sorted(self.crossover.open_ended)
        text = f"{margins} {parts} {len(self.found.user)} {ends}"
        return hashlib.sha256(text.encode()).hexdigest()

    def in_force(self, model: Model) -> InForce | None:
        """The tables that are in force on a model of device; None if there are none."""
        if model not in self._in_force:
            with garbage.collection_paused():
                alone = sources.find_complete(self.name, self.crossover, self._folders, model)
            found = alone or self.found
            chosen = sources.choose(found, model, self.owner)
            made = InForce(model, chosen, found.refused) if chosen else None
            self._in_force.setdefault(model, made)
        return self._in_force[model]

    def grid_on(self, model: Model) -> Grid | None:
        """What the tables decide on a model of device; None if there are none in force."""
        if model not in self._grids:
            made = model in self._in_force
            self._grids.setdefault(model, self._made(model) if made else self._kept(model))
        return self._grids[model]

    def _kept(self, model: Model) -> Grid | None:
        """The grid that another process made of the same tables, or else one that is made now."""
        texts = sources.hashes(self._folders)
        place = kept.Kept(self.name, self.owner, self.crossover, model, texts)
        if (grid := place.load()) is not None:
            return grid
        in_force = self.in_force(model)
        if in_force is not None and not in_force.is_told:
            place.save(in_force.grid)
        return self._made(model)

    def _made(self, model: Model) -> Grid | None:
        in_force = self.in_force(model)
        return None if in_force is None else in_force.grid

    def prepare(self, dispatch_key: str) -> None:
        """Make the grids of the devices here that a dispatch key is of."""
        for model in models.of_dispatch_key(dispatch_key):
            self.grid_on(model)

    def by_model(self, dispatch_key: str) -> Mapping[Model, InForce | None]:
        """What is in force on each model of device here that a dispatch key is of."""
        return {model: self.in_force(model) for model in models.of_dispatch_key(dispatch_key)}

    # What a lookup asks.

    def grid(self, device: torch.device) -> Grid | None:
        return self.grid_on(models.of_device(device))

    def failure(self, device: torch.device, values: tuple[Any, ...], column: int) -> Failure:
        model = models.of_device(device)
        in_force = self.in_force(model)
        if in_force is None:
            return Failure(
                "not measured here", f"no table for {model.name}; opgraft tune makes one"
            )
        return in_force.failure(list(self.crossover.features), values, column)
