"""Tables: what was measured on one model of device, in JSON.

docs/tuning.md describes the format. A table is data from outside: nothing in it is used before it
was looked at, and what is wrong with it is told in one line.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from opgraft.crossover.declaration import Crossover, is_dtype
from opgraft.crossover.models import Model, file_name
from opgraft.ops.describing import dtype_name
from opgraft.when.grid import MAX_CELLS, STEPS, Axis, ExactAxis, Feature, SteppedAxis

FORMAT = 2
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


_FIELDS = tuple(f"{field}_us" for field in Cell._fields)
#: In a cell's line, a time that was not measured.
_UNKNOWN = "-"
#: In a cell's line, between where it begins and its times.
_THEN = ":"


# A cell is a line of text, and not an object: JSON's reader would take twenty times as long for
# thousands of them, for which the first call of an override waits.


def columns_of(features: Iterable[str]) -> str:
    """What the lines of cells have, by the features of a crossover.

    >>> columns_of(["rows", "dtype"])[:33]
    'rows dtype : native_us override_u'
    """
    return " ".join([*features, _THEN, *_FIELDS])


def line_of(at: Iterable[object], times: Iterable[float | None]) -> str:
    """A cell as a table has it.

    Args:
        at: where its buckets begin; a dtype by its name.
        times: those of a `Cell`.

    >>> line_of([1024, "float32"], Cell(43.1, 39.0, 8.0, 6.0, 40.0, None, None))
    '1024 float32 : 43.1 39.0 8.0 6.0 40.0 - -'
    """
    shown = (_UNKNOWN if time is None else str(time) for time in times)
    return " ".join([*map(str, at), _THEN, *shown])


class Entry(NamedTuple):
    """One override's part of a table.

    Attributes:
        version: of the kernel that was measured, as the crossover declared it.
        measured: with what it was measured: `date`, and versions such as `torch` and `triton`.
        axes: the buckets of each feature.
        cells: what was measured, by the buckets' indices.
        is_complete: whether nothing is left to measure of calls, in the ranges that are declared.
        is_complete_in_graphs: the same of compiled graphs.
        digest: a hash of all this.
    """

    version: int
    measured: Mapping[str, str]
    axes: tuple[Axis, ...]
    cells: Mapping[tuple[int, ...], Cell]
    is_complete: bool
    is_complete_in_graphs: bool
    digest: str


class Table(NamedTuple):
    """A table as it was read: its overrides are looked at when somebody asks for them.

    Attributes:
        path: the file.
        model: of the device that it is of.
        overrides: what it says, by name.
        sha256: of its text.
    """

    path: Path
    model: Model
    overrides: Mapping[str, Json]
    sha256: str


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
        return _table(path, found, hashlib.sha256(text.encode()).hexdigest())
    except RecursionError:  # where it is quoted
        raise BadTable("it is damaged: it is nested too deeply") from None


def _table(path: Path, found: Json, sha256: str) -> Table:
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
    model = Model(name, capability and (capability[0], capability[1]))
    return Table(path, model, overrides, sha256)


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


#: What a part of a table says of itself where nothing is left to measure: of calls, of graphs.
COMPLETE, COMPLETE_IN_GRAPHS = "complete", "complete_in_graphs"


def says(table: Table, name: str, key: str) -> bool:
    """Whether an override's part of a table says that it is complete. What it says may be wrong.

    Args:
        table: the table.
        name: of the override.
        key: `COMPLETE` or `COMPLETE_IN_GRAPHS`.
    """
    found = table.overrides.get(name)
    return isinstance(found, dict) and found.get(key) is True


def may_have_graphs(table: Table, name: str) -> bool:
    """Whether an override's part of a table may have times of compiled graphs.

    It is not looked at for more than that, which takes no time.
    """
    found = table.overrides.get(name)
    cells = found.get("cells") if isinstance(found, dict) else None
    without = f" {_UNKNOWN} {_UNKNOWN}"
    return isinstance(cells, list) and not all(
        isinstance(each, str) and each.endswith(without) for each in cells
    )


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
    if found.get("columns") != (columns := columns_of(crossover.features)):
        raise BadTable(f'"columns" is not {columns!r}')
    cells = found.get("cells")
    if not isinstance(cells, list) or not all(isinstance(each, str) for each in cells):
        raise BadTable('"cells" is no list of lines')
    if not cells:
        raise BadTable("it has no cells")
    count = len(crossover.features)
    columns_at, columns_of_times = _columns(cells, count)
    # What each feature is where cells begin, by its text.
    places = [
        {text: _feature(text, feature) for text in dict.fromkeys(column)}
        for feature, column in zip(crossover.features.values(), columns_at, strict=True)
    ]
    axes = tuple(
        _axis(name, features[name], [*values.values()], crossover)
        for name, values in zip(crossover.features, places, strict=True)
    )
    if math.prod(axis.count for axis in axes) > MAX_CELLS:
        raise BadTable(f"its cells span more than {MAX_CELLS} buckets")
    indices = [
        {text: _index(axis, value) for text, value in values.items()}
        for axis, values in zip(axes, places, strict=True)
    ]
    corners = zip(*map(_each_in, indices, columns_at), strict=True)
    times = zip(*map(_times, _FIELDS, columns_of_times), strict=True)
    measured = dict(zip(corners, map(Cell._make, times), strict=True))
    if len(measured) != len(cells):
        raise BadTable("two cells are at one place")
    made_with = _measured(found.get("measured"))
    of_calls, of_graphs = _flag(found, COMPLETE), _flag(found, COMPLETE_IN_GRAPHS)
    if of_calls or of_graphs:
        is_of_these = _holds_ranges(found.get("ranges"), axes, crossover)
        of_calls, of_graphs = of_calls and is_of_these, of_graphs and is_of_these
    return Entry(crossover.version, made_with, axes, measured, of_calls, of_graphs, _hash(found))


def _flag(found: Json, key: str) -> bool:
    value = found.get(key, False)
    if type(value) is not bool:
        raise BadTable(f'"{key}" is neither true nor false')
    return value


def text_of_range(values: Iterable[Feature]) -> str:
    """A feature's range as a table has it.

    >>> text_of_range([1, 1024]), text_of_range([torch.float16, torch.float32])
    ('1 1024', 'float16 float32')
    """
    return " ".join(text_of(value) for value in values)


def text_of(value: Feature) -> str:
    """A feature of a call as a table has it: a dtype by its name, and a boolean as 0 or 1."""
    return dtype_name(value) if isinstance(value, torch.dtype) else str(int(value))


def _holds_ranges(said: Json, axes: Sequence[Axis], crossover: Crossover) -> bool:
    """Whether the ranges that a table is complete in hold those that are declared.

    With a version of its own a pack may declare other ones without another version of the kernel.
    An override that is measured as another one declares none.
    """
    if not crossover.ranges:
        return True
    if not isinstance(said, dict) or not all(isinstance(each, str) for each in said.values()):
        return False
    return all(
        _holds_range(said.get(name, "").split(), axis, name, crossover)
        for axis, name in zip(axes, crossover.features, strict=True)
    )


def _holds_range(said: Sequence[str], axis: Axis, name: str, crossover: Crossover) -> bool:
    declared = crossover.ranges[name]
    if name in crossover.exact or not all(type(value) is int for value in declared):
        return isinstance(axis, ExactAxis) and {*map(text_of, declared)} <= {*said}
    if isinstance(axis, ExactAxis) or len(said) != 2 or not all(map(_INTEGER.fullmatch, said)):
        return False
    low, high = map(int, said)
    return low <= min(declared) and max(declared) <= high


def _hash(found: Json) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


Columns: TypeAlias = Sequence[Sequence[str]]


def _columns(lines: Sequence[str], count: int) -> tuple[Columns, Columns]:
    """The texts of all cells by column: where cells begin, by each of `count` features, and times.

    By column is faster: a table has thousands of cells and a dozen columns.
    """
    cells = [line.split() for line in lines]
    for line, cell in zip(lines, cells, strict=True):
        if len(cell) != count + 1 + len(_FIELDS) or cell[count] != _THEN:
            raise BadTable(f'the cell {line!r} has not what "columns" names')
    columns = [*zip(*cells, strict=True)]
    return columns[:count], columns[count + 1 :]


def _each_in(found: Mapping[str, int], texts: Iterable[str]) -> list[int]:
    return [found[text] for text in texts]


_INTEGER = re.compile("-?[0-9]{1,19}")


def _feature(text: str, feature: object) -> Feature:
    if is_dtype(feature):
        dtype = vars(torch).get(text)  # getattr would import the modules that torch has lazily
        if isinstance(dtype, torch.dtype):
            return dtype
    elif _INTEGER.fullmatch(text) and -(2**63) <= (value := int(text)) < 2**63:
        return value
    raise BadTable(f"a cell is at {text!r}, which {feature!r} is never")


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


def _index(axis: Axis, value: Feature) -> int:
    """The bucket that begins at a value."""
    index = axis.index_of(value)
    if index is None or axis.lower(index) != value:
        raise BadTable(f"{value} is not where a bucket begins")
    return index


def _times(field: str, texts: Iterable[str]) -> list[float | None]:
    """The times of all cells in a column."""
    try:
        times = [None if text == _UNKNOWN else float(text) for text in texts]
    except ValueError as error:
        raise BadTable(f"{field}: {error}") from None
    for time in times:
        if time is not None and not 0 < time <= MAX_MICROSECONDS:
            raise BadTable(f"{field} is {time}, which no time is")
    return times


def _measured(found: Json) -> Mapping[str, str]:
    found = {} if found is None else found
    if not isinstance(found, dict) or not all(map(_is_text, found.values())):
        raise BadTable('"measured" is no object of short strings')
    return found
