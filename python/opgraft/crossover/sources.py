"""Where tables come from: the user's folder, a pack's, and which of several counts."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from opgraft.base import env
from opgraft.core import store
from opgraft.crossover import rule, tables
from opgraft.crossover.declaration import Crossover
from opgraft.crossover.models import Model
from opgraft.crossover.tables import BadTable, Entry, Table
from opgraft.when.grid import Axis, joined

#: Whose table it is.
Owner = Literal["user", "author"]

_MEND = "opgraft tune measures one"


def user_folder() -> Path:
    """The user's tables: `OPGRAFT_TABLES`, or `tables` in opgraft's cache."""
    return Path(env.tables() or store.root() / "tables").expanduser().absolute()


class Folder(NamedTuple):
    """The tables of a folder as they were read, and why others were refused."""

    tables: tuple[Table, ...]
    refused: tuple[str, ...]


class Source(NamedTuple):
    """An override's part of a table.

    Attributes:
        table: the file.
        entry: what it says of the override.
        owner: whose table it is: the user's own, or the override's author's.
        margin: by how much it must be faster, by this table.
        of: what the table's device is to the device that it is used for.
    """

    table: Table
    entry: Entry
    owner: Owner
    margin: float
    of: Literal["this device", "another device", "another architecture"]


@cache
def read(folder: Path, owner: Owner) -> Folder:
    """All tables of a folder. They are read once in a process; a refusal is logged, in one line."""
    found, refused = [], []
    for path in _files(folder):
        try:
            found.append(tables.read(path, _read_trusted if owner == "user" else _read_author_s))
        except BadTable as error:
            refused.append(_refuse(path, str(error)))
    return Folder(tuple(found), tuple(refused))


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except OSError:  # most users have none
        return []


def _read_trusted(path: Path, info: os.stat_result) -> str:
    return store.read_trusted(path)


def _read_author_s(path: Path, info: os.stat_result) -> str:
    # Beside it is the code that names the folder, which was run: whoever could have written that
    # could have done anything. So only a table that is more open than code ever is, is refused.
    if info.st_mode & stat.S_IWOTH:
        raise PermissionError(f"others may write to it; chmod o-w {path}")
    return path.read_text(encoding="utf-8")


def _refuse(path: Path, reason: str) -> str:
    name = str(path)
    return _warn(f"the table {tables.one_line(name, len(name))} is not used: {reason}")


def _warn(line: str) -> str:
    env.warn_once(line)
    return line


class Found(NamedTuple):
    """An override's parts of all tables, and why others were refused.

    Attributes:
        user: of the user's tables.
        author: of its author's.
        refused: the reasons.
        devices: the names of devices that there are tables of, whatever these say of the override.
    """

    user: tuple[tuple[Table, Entry], ...]
    author: tuple[tuple[Table, Entry], ...]
    refused: tuple[str, ...]
    devices: frozenset[str] = frozenset()


#: The user's tables and the author's.
Folders: TypeAlias = Mapping[Owner, Folder]


def hashes(folders: Folders) -> list[list[str]]:
    """Of the tables' texts: the user's, and the author's."""
    return [[table.sha256 for table in each.tables] for each in folders.values()]


def find_complete(name: str, crossover: Crossover, folders: Folders, model: Model) -> Found | None:
    """What the tables of one model say of an override, if no other model's counts there.

    The others are not looked at then: that takes as long again, and the first call of an override
    waits for it.

    Args:
        name: as in `find`, like `crossover` and `folders`.
        model: the model.
    """
    own: list[Table] = []
    others: list[Table] = []
    for table in itertools.chain.from_iterable(folder.tables for folder in folders.values()):
        (own if table.model.name == model.name else others).append(table)

    def one_says(key: str) -> bool:
        return any(tables.says(table, name, key) for table in own)

    if not one_says(tables.COMPLETE):
        return None
    has_graphs = any(tables.may_have_graphs(table, name) for table in others)
    if has_graphs and not one_says(tables.COMPLETE_IN_GRAPHS):
        return None
    own_alone = {
        whose: folder._replace(
            tables=tuple(table for table in folder.tables if table.model.name == model.name)
        )
        for whose, folder in folders.items()
    }
    found = find(name, crossover, own_alone)
    return found if _are_complete(_of_this_device(found, model), has_graphs) else None


def _are_complete(sources: Iterable[Source], in_graphs: bool) -> bool:
    """Whether nothing is left to measure beside these, of calls, or of both calls and graphs."""
    entries = [each.entry for each in sources]
    return any(entry.is_complete for entry in entries) and (
        not in_graphs or any(entry.is_complete_in_graphs for entry in entries)
    )


def folders(owner: str, crossover: Crossover) -> Folders:
    """The tables that there may be of an override, as they were read.

    Args:
        owner: its pack, or `"user"`: the user's tables are in a folder for each owner.
        crossover: what it declares.
    """

    def folder_of(whose: Owner) -> Folder:
        try:
            folder = user_folder() / owner if whose == "user" else crossover.tables
            return Folder((), ()) if folder is None else read(folder.expanduser().absolute(), whose)
        except (RuntimeError, OSError) as error:  # no home, or a working directory that is gone
            return Folder((), (_warn(f"the {whose}'s tables are not used: {error}"),))

    return {"user": folder_of("user"), "author": folder_of("author")}


def find(name: str, crossover: Crossover, folders: Folders) -> Found:
    """All that tables say of an override, whatever the device.

    Args:
        name: the override's name in tables.
        crossover: what it declares.
        folders: the tables.
    """
    refused: list[str] = []
    users, authors = (
        tuple(_entries(folders[whose], name, crossover, refused)) for whose in ("user", "author")
    )
    devices = {table.model.name for folder in folders.values() for table in folder.tables}
    return Found(users, authors, tuple(refused), frozenset(devices))


def _entries(
    folder: Folder, name: str, crossover: Crossover, refused: list[str]
) -> Iterator[tuple[Table, Entry]]:
    refused += folder.refused
    for table in folder.tables:
        try:
            entry = tables.entry_of(table, name, crossover)
        except BadTable as error:
            refused.append(_refuse(table.path, str(error)))
            continue
        if entry is not None:
            yield table, entry


def choose(found: Found, model: Model, label: str) -> tuple[Source, ...]:
    """The tables that count on a model of device, where the ones before them decide nothing.

    First the user's own for exactly this model, then the author's, then that of the nearest device
    of the same architecture, or else of the nearest architecture. A table that says little, such as
    one for the calls of a script, leaves the rest to those behind it. Where one of exactly this
    model is complete, no other model's counts, unless that one knows of graphs what this one does
    not. One whose buckets are others than those of the first does not count.

    Args:
        found: the tables.
        model: the model.
        label: whose overrides they are, for the log.
    """
    sources = exact = _of_this_device(found, model)
    others = [
        each
        for each in _every(found)
        if model.capability and each[1].model.capability and each[1].model.name != model.name
    ]
    if others:
        nearest = min(others, key=lambda it: _distance(it[1].model, model))
        has_graphs = any(rule.is_measured(cell, rule.GRAPH) for cell in nearest[2].cells.values())
        if not _are_complete(exact, has_graphs):
            sources = [*exact, _of_other_device(nearest, model)]
    if not sources and model.name not in found.devices:
        # Where there is one, whoever measured the device left this override out.
        env.warn_once(
            f"no crossover table for {model.name}: overrides of {label} that need one decline; "
            f"{_MEND}"
        )
    elif sources and not exact:
        env.warn_once(
            f"no crossover table of {label} for {model.name}, and that of "
            f"{sources[0].table.model.name} is used, with a larger margin; {_MEND}"
        )
    return tuple(_joinable(sources))


def _every(found: Found) -> list[tuple[Owner, Table, Entry]]:
    """The user's entries first."""
    users, authors = (
        [("user", *each) for each in found.user],
        [("author", *each) for each in found.author],
    )
    return [*users, *authors]  # type: ignore[list-item]


def _of_this_device(found: Found, model: Model) -> list[Source]:
    """The tables of exactly this model that count."""
    exact = [each for each in _every(found) if each[1].model.name == model.name]
    return [
        *_joinable(
            Source(table, entry, owner, rule.MARGIN, "this device") for owner, table, entry in exact
        )
    ]


def _of_other_device(chosen: tuple[Owner, Table, Entry], model: Model) -> Source:
    owner, table, entry = chosen
    if table.model.capability == model.capability:
        return Source(table, entry, owner, rule.OTHER_DEVICE_MARGIN, "another device")
    return Source(table, entry, owner, rule.OTHER_ARCHITECTURE_MARGIN, "another architecture")


def _joinable(sources: Iterable[Source]) -> Iterator[Source]:
    """Those whose buckets are like the first one's, and all of them no more than a grid holds."""
    axes: tuple[Axis, ...] | None = None
    for source in sources:
        both = source.entry.axes if axes is None else joined(axes, source.entry.axes)
        if both is not None:
            axes = both
            yield source


def _distance(one: Model, other: Model) -> tuple[int, int, str]:
    """How far two models with capabilities are from each other; of two as far, names decide."""
    (major, minor), (other_major, other_minor) = (
        one.capability or (0, 0),
        other.capability or (0, 0),
    )
    apart = abs(10 * major + minor - 10 * other_major - other_minor)
    return apart, -_alike(one.name, other.name), one.name


def _alike(one: str, other: str) -> int:
    """How many characters two names begin with alike."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def forget() -> None:
    """For tests and `opgraft tune`: read the folders again, for overrides registered from now."""
    read.cache_clear()
