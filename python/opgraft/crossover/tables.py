"""Tables: what was measured on one model of device, in JSON.

docs/tuning.md describes the format. A table is data from outside: nothing in it is used before it
was looked at, and what is wrong with it is told in one line.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from opgraft.crossover.declaration import Crossover, is_dtype
from opgraft.crossover.models import Model, file_name
from opgraft.when.grid import MAX_CELLS, STEPS, Axis, ExactAxis, Feature, SteppedAxis

FORMAT = 1
#: A longer file is no table: at 100 bytes a cell, this is more cells than a grid can have.
MAX_BYTES = 32 * 2**20
#: No call takes longer, in microseconds.
MAX_MICROSECONDS = 1e9

Json: TypeAlias = Any


#: No name of a device, and nothing about what measured it, is longer. Logs and messages have them.
_MAX_TEXT = 200
#: Longer reasons are cut: they quote the table.
_MAX_REASON = 600


class BadTable(ValueError):
    """A table, or an override's part of it, that cannot be used, with the reason in one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))


def one_line(text: str, most: int = _MAX_REASON) -> str:
    """Text from outside as a log can have it: bounded, and no control characters.

    >>> one_line("a\\nb\\x1b[31m")
    'a\\\\nb\\\\x1b[31m'
    """
    if len(text) > most:
        text = f"{text[:most]}..."
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


class Cell(NamedTuple):
    """What was measured for one cell, in microseconds; None: it was not, or it failed.

    The fields without `host` are times on the device. `opaque` and `inductor` are of compiled
    graphs, where nothing is left to do on the host.
    """

    native: float | None
    override: float | None
    native_host: float | None
    plan_host: float | None
    python_host: float | None
    inductor: float | None
    opaque: float | None


class Entry(NamedTuple):
    """One override's part of a table.

    Attributes:
        version: of the kernel that was measured, as the crossover declared it.
        measured: with what it was measured: `date`, and versions such as `torch` and `triton`.
        axes: the buckets of each feature.
        cells: what was measured, by the buckets' indices.
        digest: a hash of all this.
    """

    version: int
    measured: Mapping[str, str]
    axes: tuple[Axis, ...]
    cells: Mapping[tuple[int, ...], Cell]
    digest: str


class Table(NamedTuple):
    """A table as it was read: its overrides are looked at when somebody asks for them."""

    path: Path
    model: Model
    overrides: Mapping[str, Json]


def read(path: Path, read_text: Callable[[Path, os.stat_result], str] | None = None) -> Table:
    """Read a table's file.

    Args:
        path: the file.
        read_text: reads a regular file that is not too long; None: as UTF-8.

    Raises:
        BadTable: it is no table, or one of another format, or it cannot be read.
    """
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise BadTable("it is no file")
        if info.st_size > MAX_BYTES:
            raise BadTable(f"it has {info.st_size} bytes, more than any table")
        text = path.read_text(encoding="utf-8") if read_text is None else read_text(path, info)
    except OSError as error:
        raise BadTable(f"it cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise BadTable(f"it is damaged: byte {error.start} is no UTF-8") from None
    return parse(path, text)


def parse(path: Path, text: str) -> Table:
    """Read a table's text.

    Raises:
        BadTable: it is no table, or one of another format.
    """
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise BadTable("it is damaged: it is nested too deeply") from None
    except ValueError as error:
        raise BadTable(f"it is damaged: {error}") from None
    try:
        return _table(path, found)
    except RecursionError:  # where it is quoted
        raise BadTable("it is damaged: it is nested too deeply") from None


def _table(path: Path, found: Json) -> Table:
    if not isinstance(found, dict) or "format" not in found:
        raise BadTable('it is no table: it has no "format"')
    if found["format"] != FORMAT:
        raise BadTable(
            f"its format is {found['format']!r}, and this opgraft reads {FORMAT}: run opgraft tune"
        )
    name, capability = found.get("device"), found.get("capability")
    if not isinstance(name, str) or not name or not _is_text(name):
        raise BadTable('"device" is no name')
    if file_name(name) != path.name:
        raise BadTable(f"it is of another device: it says {name}, which is {file_name(name)}")
    if capability is not None and not _is_capability(capability):
        raise BadTable('"capability" is neither null nor [major, minor]')
    overrides = found.get("overrides")
    if not isinstance(overrides, dict):
        raise BadTable('"overrides" is no object')
    return Table(path, Model(name, capability and (capability[0], capability[1])), overrides)


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _is_capability(value: Json) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _is_text(value: Json) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT and value.isprintable()


def _is_count(value: Json) -> bool:
    return type(value) is int and 0 <= value < 2**16


def entry_of(table: Table, name: str, crossover: Crossover) -> Entry | None:
    """An override's part of a table; None if the table does not have it.

    Raises:
        BadTable: it is not what the crossover declares, or has absurd values.
    """
    found = table.overrides.get(name)
    if found is None:
        return None
    try:
        return _entry(found, crossover)
    except BadTable as error:
        raise BadTable(f"override {name!r}: {error}") from None
    except RecursionError:
        raise BadTable(f"override {name!r}: it is nested too deeply") from None


def _entry(found: Json, crossover: Crossover) -> Entry:
    if not isinstance(found, dict):
        raise BadTable("it is no object")
    if found.get("version") != crossover.version:
        raise BadTable(
            f"it was measured with version {found.get('version')!r} of the kernel, and this is "
            f"{crossover.version}: run opgraft tune"
        )
    features = found.get("features")
    if not isinstance(features, dict) or list(features) != list(crossover.features):
        declared = ", ".join(crossover.features)
        raise BadTable(f'"features" are not those that it declares, in their order: {declared}')
    cells = found.get("cells")
    if not isinstance(cells, list) or not all(isinstance(each, dict) for each in cells):
        raise BadTable('"cells" is no list of objects')
    if not cells:
        raise BadTable("it has no cells")
    corners = [_corner(cell, crossover) for cell in cells]
    axes = tuple(
        _axis(name, features[name], [corner[which] for corner in corners], crossover)
        for which, name in enumerate(crossover.features)
    )
    if math.prod(axis.count for axis in axes) > MAX_CELLS:
        raise BadTable(f"its cells span more than {MAX_CELLS} buckets")
    known: list[dict[Feature, int]] = [{} for _ in axes]
    measured = {
        _indices(axes, corner, known): _cell(cell)
        for corner, cell in zip(corners, cells, strict=True)
    }
    if len(measured) != len(cells):
        raise BadTable("two cells are at one place")
    return Entry(crossover.version, _measured(found.get("measured")), axes, measured, _hash(found))


def _hash(found: Json) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _corner(cell: Mapping[str, Json], crossover: Crossover) -> tuple[Feature, ...]:
    at = cell.get("at")
    if not isinstance(at, list) or len(at) != len(crossover.features):
        raise BadTable(f'"at" is {at!r}, and there are {len(crossover.features)} features')
    return tuple(
        _feature(value, feature)
        for value, feature in zip(at, crossover.features.values(), strict=True)
    )


def _feature(value: Json, feature: object) -> Feature:
    if isinstance(value, str) and is_dtype(feature):
        dtype = vars(torch).get(value)  # getattr would import the modules that torch has lazily
        if isinstance(dtype, torch.dtype):
            return dtype
    elif isinstance(value, int) and not is_dtype(feature) and -(2**63) <= value < 2**63:
        return value
    raise BadTable(f'"at" has {value!r}, which {feature!r} is never')


def _axis(name: str, kind: Json, values: list[Feature], crossover: Crossover) -> Axis:
    if kind == "exact":
        return ExactAxis(dict.fromkeys(values))
    steps = kind.get("steps") if isinstance(kind, dict) else None
    if type(steps) is not int or steps not in STEPS:
        raise BadTable(f'the feature {name} is neither "exact" nor {{"steps": 1, 2, 4 or 8}}')
    if name in crossover.exact:
        raise BadTable(f"the feature {name} is declared exact, and has steps")
    numbers = [value for value in values if type(value) is int and value >= 1]
    if len(numbers) != len(values):
        raise BadTable(f"the feature {name} has steps, and not all of its values are from 1 on")
    is_open = name in crossover.open_ended
    return SteppedAxis(steps, min(numbers), max(numbers), open_ended=is_open)


def _indices(
    axes: tuple[Axis, ...], corner: tuple[Feature, ...], known: list[dict[Feature, int]]
) -> tuple[int, ...]:
    """The place of a cell.

    Args:
        axes: the grid's.
        corner: what the features are where the cell begins.
        known: by axis, the buckets of values that were looked up before.
    """
    found = []
    for axis, value, indices in zip(axes, corner, known, strict=True):
        index = indices.get(value)
        if index is None:
            index = axis.index_of(value)
            if index is None or axis.lower(index) != value:
                raise BadTable(f"{value} is not where a bucket begins")
            indices[value] = index
        found.append(index)
    return tuple(found)


_FIELDS = tuple(f"{field}_us" for field in Cell._fields)


def _cell(cell: Mapping[str, Json]) -> Cell:
    return Cell(*[_microseconds(cell, field) for field in _FIELDS])


def _microseconds(cell: Mapping[str, Json], field: str) -> float | None:
    value = cell.get(field)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value <= MAX_MICROSECONDS:
        raise BadTable(f"{field} at {cell['at']} is {str(value)[:40]}, which no time is")
    return float(value)


def _measured(found: Json) -> Mapping[str, str]:
    found = {} if found is None else found
    if not isinstance(found, dict) or not all(map(_is_text, found.values())):
        raise BadTable('"measured" is no object of short strings')
    return found
