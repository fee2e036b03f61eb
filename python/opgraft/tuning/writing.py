"""Writes tables: a line for each cell, so that two tables can be compared line by line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from opgraft.base import env, files, locks
from opgraft.crossover import sources
from opgraft.crossover.models import Model, file_name
from opgraft.crossover.rule import Indices
from opgraft.crossover.tables import (
    COMPLETE,
    COMPLETE_IN_GRAPHS,
    FORMAT,
    BadTable,
    Cell,
    Table,
    columns_of,
    line_of,
    parse,
    read,
    text_of_range,
)
from opgraft.ops.describing import dtype_name
from opgraft.when.grid import Axis, ExactAxis, Feature

#: Of the keys of an override's part, in a table's text.
_INDENT = 3


def entry(
    version: int,
    measured: Mapping[str, str],
    axes: Mapping[str, Axis],
    cells: Mapping[Indices, Cell],
    others: Mapping[tuple[Feature, ...], Cell] = MappingProxyType({}),
    *,
    ranges: Mapping[str, Sequence[Feature]] = MappingProxyType({}),
    is_complete: bool = False,
    is_complete_in_graphs: bool = False,
) -> dict[str, Any]:
    """One override's part of a table, as JSON has it.

    Args:
        version: of the kernel.
        measured: with what it was measured.
        axes: the buckets of each feature, by name.
        cells: what was measured, by the buckets' indices.
        others: cells outside of the axes, by where their buckets begin.
        ranges: what was declared to be measured.
        is_complete: whether no cell in the ranges is left that decides of calls.
        is_complete_in_graphs: the same of compiled graphs.
    """
    by_corner = {
        tuple(axis.lower(place) for axis, place in zip(axes.values(), at, strict=True)): cell
        for at, cell in cells.items()
    }
    lines = [([*map(_value, at)], cell) for at, cell in (by_corner | dict(others)).items()]
    said = {COMPLETE: is_complete, COMPLETE_IN_GRAPHS: is_complete_in_graphs}
    complete: dict[str, Any] = {key: True for key, is_so in said.items() if is_so}
    if complete:
        complete["ranges"] = {name: text_of_range(each) for name, each in ranges.items()}
    return {
        "version": version,
        "features": {name: _kind(axis) for name, axis in axes.items()},
        "measured": dict(measured),
        **complete,
        "columns": columns_of(axes),
        "cells": [
            line_of(at, map(_rounded, cell)) for at, cell in sorted(lines, key=lambda line: line[0])
        ],
    }


def _kind(axis: Axis) -> object:
    return "exact" if isinstance(axis, ExactAxis) else {"steps": axis.steps}


def _value(value: Feature) -> int | str:
    return dtype_name(value) if isinstance(value, torch.dtype) else int(value)  # False is 0


def _rounded(microseconds: float | None) -> float | None:
    return None if microseconds is None else float(f"{microseconds:.4g}")


def existing(folder: Path, model: Model) -> Table | None:
    """The table of a model of device in a folder; None if there is none yet.

    Raises:
        BadTable: what is there is no table, or cannot be read; with its name.
    """
    path = folder / file_name(model.name)
    if not os.path.lexists(path):
        return None
    try:
        return read(path)
    except BadTable as error:
        raise BadTable(f"the table {path} stays as it is: {error}; mend or delete it") from None


def write(folder: Path, model: Model, entries: Mapping[str, Mapping[str, Any]]) -> Path:
    """Put overrides' parts into the table of a model of device; others' parts stay.

    Args:
        folder: where the table is, or will be.
        model: what was measured on.
        entries: by the override's name, what `entry` makes.

    Returns:
        The table's path.

    Raises:
        BadTable: the file that is there is no table: nothing is overwritten.
    """
    return update(folder, model, lambda table: entries)


def update(
    folder: Path,
    model: Model,
    entries: Callable[[Table | None], Mapping[str, Mapping[str, Any]]],
) -> Path:
    """As `write`, with parts that depend on what the table has now.

    No other process writes to it meanwhile. The table is never half written: a reader, which needs
    no lock, sees the one before or this one.

    Args:
        folder: where the table is, or will be.
        model: what was measured on.
        entries: what to put there, given the table that is there.
    """
    files.make_folder(folder, mode=0o755)  # a pack's own is for everybody to read
    path = folder / file_name(model.name)
    with _writing_alone(path):
        found = existing(folder, model)
        before = {} if found is None else found.overrides
        table = {
            "format": FORMAT,
            "device": model.name,
            "capability": model.capability and list(model.capability),
            "overrides": dict(sorted({**before, **entries(found)}.items())),
        }
        text = _with_a_line_for_each_cell(table)
        parse(path, text)
        files.replace(path, text, mode=0o644)
    return path


@contextmanager
def _writing_alone(path: Path) -> Iterator[None]:
    """A scope in which no other process of this user's writes a table.

    The lock is beside the user's tables: a pack's folder of tables has nothing else in it.
    """
    with ExitStack() as held:
        try:
            files.make_folder(sources.user_folder())
            held.enter_context(locks.file_lock(sources.user_folder() / ".lock"))
        except (OSError, RuntimeError) as error:  # no home, or one that cannot be written to
            env.warn_once(f"{path} is written without a lock: {error}")
        yield


def _with_a_line_for_each_cell(table: Mapping[str, Any]) -> str:
    # Parts of others stay whatever they are: a hand may have added to them, or damaged them.
    cells = {
        name: each["cells"]
        for name, each in table["overrides"].items()
        if isinstance(each, dict) and isinstance(each.get("cells"), list)
    }
    short = {
        name: {**each, "cells": f"cells of {name}"} if name in cells else each
        for name, each in table["overrides"].items()
    }
    lines: list[str] = []
    for line in json.dumps({**table, "overrides": short}, indent=1).splitlines():
        before, found, rest = line.partition('"cells": "cells of ')
        quoted, comma = (rest[:-1], ",") if rest.endswith(",") else (rest, "")
        name = json.loads(f'"{quoted}') if found and len(before) == _INDENT else None
        if name not in cells:
            lines.append(line)
            continue
        lines.append(f'{before}"cells": [')
        lines.append(",\n".join(f"{before} {json.dumps(cell)}" for cell in cells[name]))
        lines.append(f"{before}]{comma}")
    return "\n".join(lines) + "\n"
