"""The files of the kernel cache: written whole, read only where nobody else could have written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from opgraft.base import files
from opgraft.core import store

log = logging.getLogger(__name__)

#: How many bytes of files the cache keeps. Those that were used longest ago go first.
MAX_BYTES = 2**30
#: Seconds after which a temporary file is one that its writer has left behind.
LEFT_BEHIND_SECONDS = 3600.0
#: What the names of files in the cache end with.
_SUFFIXES = (".json", ".so", ".cubin")


class Place:
    """A folder of entries, and how its files are read.

    Args:
        folder: the folder.
        hashes: of each file that counts, as a bundle's manifest has them. The files may be another
            user's then, who alone may write to them. None: the user's own cache, whose entries say
            the hashes of their files, and which nobody else could have written.
    """

    def __init__(self, folder: Path, hashes: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._hashes = hashes

    @property
    def is_cache(self) -> bool:
        """Whether it is the user's own cache, which this process may write to."""
        return self._hashes is None

    def has(self, name: str) -> bool:
        """Whether a file of this name is there; it may be damaged.

        Raises:
            OSError: this user may not look there.
        """
        if self._hashes is not None:
            return name in self._hashes
        try:
            os.stat(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def count(self) -> int:
        """How many entries a bundle has."""
        return sum(name.endswith(".json") for name in self._hashes or ())

    def path(self, name: str) -> Path:
        """Where a file is.

        Raises:
            ValueError: an entry names a file that would be in another folder.
        """
        return Path(self._path(name))

    def _path(self, name: str) -> str:
        # A string: a plan is loaded beside calls that wait for the interpreter, and making path
        # objects would take a good part of the time that it takes to find one.
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is no name of a file in {self.folder}")
        return os.path.join(self.folder, name)

    def read(self, name: str, sha256: str | None = None) -> bytes:
        """The content of a file.

        Args:
            name: its name.
            sha256: the hash that it must have; None: a manifest's alone counts.

        Raises:
            OSError: it is not there, damaged, or others could have written it.
            ValueError: it can be no file of this folder.
        """
        content = store.read_trusted_bytes(self._path(name), by_anybody=not self.is_cache)
        self._check(name, content, sha256)
        return content

    def open(self, name: str, sha256: str | None = None) -> str:
        """A name of the open file, by which it can be loaded, whatever becomes of its path.

        Args and errors are those of :meth:`read`.
        """
        opened = store.open_trusted(self._path(name), by_anybody=not self.is_cache)
        self._check(name, Path(opened).read_bytes(), sha256)
        return opened

    def _check(self, name: str, content: bytes, sha256: str | None) -> None:
        wanted = [] if sha256 is None else [sha256]
        if self._hashes is not None:
            if name not in self._hashes:
                raise OSError(f"{self.path(name)} is not in the bundle's manifest")
            wanted.append(self._hashes[name])
        if any(each != hash_of(content) for each in wanted):
            raise OSError(f"{self.path(name)} is damaged")

    def note_use(self, name: str) -> None:
        """Note that a file is used, so that others make room first."""
        if self.is_cache:
            with contextlib.suppress(OSError):  # it may be read only
                os.utime(self._path(name))


class File(NamedTuple):
    """A file that an entry names."""

    name: str
    sha256: str


class Entry(NamedTuple):
    """What was kept for a key.

    Attributes:
        name: of its own file.
        place: where it is.
        files: its files, by what the writer called them.
        facts: what was written with them.
    """

    name: str
    place: Place
    files: dict[str, File]
    facts: dict[str, Any]

    def open(self, label: str) -> str:
        """A name of one of its files, opened: see :meth:`Place.open`."""
        return self.place.open(*self.files[label])

    def read(self, label: str) -> bytes:
        """The content of one of its files: see :meth:`Place.read`."""
        return self.place.read(*self.files[label])


def folder() -> Path:
    """Where the cache is: `kernels` in opgraft's cache."""
    return store.root() / "kernels"


def cache() -> Place:
    """The user's own cache.

    Raises:
        RuntimeError: this user has no home.
    """
    return Place(folder())


def hash_of(content: bytes) -> str:
    """The hash by which files are known."""
    return hashlib.sha256(content).hexdigest()


def digest(key: dict[str, Any]) -> str:
    """The name of a key: the same for the same key of any process.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hash_of(json.dumps(key, sort_keys=True).encode())[:32]


def file_of(key: dict[str, Any]) -> str:
    """The name of a key's entry."""
    return f"{digest(key)}.json"


def write(
    key: dict[str, Any], contents: Mapping[str, bytes | File], facts: dict[str, Any]
) -> Entry:
    """Keep files, and what is to be known of them.

    Args:
        key: what they were made of and for, as JSON has it.
        contents: by what the entry calls them, with the suffix of the file: `"function.so"`. A file
            that another entry has is named, and stays as it is.
        facts: what is to be known of them, as JSON has it.

    Raises:
        OSError: the folder cannot be written to, or there is no room.
    """
    place = cache()
    files.make_folder(place.folder)
    kept: dict[str, File] = {}
    for label, content in contents.items():
        if isinstance(content, bytes):
            sha256 = hash_of(content)
            suffix = Path(label).suffix
            kept[label] = File(f"{sha256[:32]}{suffix}", sha256)
            mode = 0o700 if suffix == ".so" else 0o600
            files.replace(place.path(kept[label].name), content, mode=mode)
        else:
            kept[label] = content
    body = json.dumps({"key": key, "files": kept, "facts": facts}, sort_keys=True)
    # The entry says of itself, too, what its hash is: a damaged number in it would be a wrong one.
    files.replace(place.path(file_of(key)), f"{body}\n{hash_of(body.encode())}\n")
    _make_room(place.folder, keep={file_of(key), *(each.name for each in kept.values())})
    return Entry(file_of(key), place, kept, facts)


def read(
    key: dict[str, Any], place: Place | None = None, *, checks_files: bool = True
) -> Entry | None:
    """What was kept for a key; None where there is nothing that can be trusted.

    Why a file that is there is not used is logged, in one line.

    Args:
        key: what was written with it.
        place: where to look; None: in the user's own cache.
        checks_files: whether the entry's files are looked at, too. Each is when it is read.
    """
    try:
        place, name = place or cache(), file_of(key)
        if not place.has(name):  # the common case
            return None
        return _read(place, name, key, checks_files)
    except FileNotFoundError:  # removed meanwhile, by who made room
        return None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        # No home, no access, damaged, or no entry at all.
        log.warning("a compiled kernel of the cache is not used, and is compiled anew: %s", error)
        return None


def _read(place: Place, name: str, key: dict[str, Any], checks_files: bool) -> Entry:
    text = place.read(name).decode()
    body, _, rest = text.partition("\n")
    if rest != f"{hash_of(body.encode())}\n":
        raise OSError(f"{place.path(name)} is damaged")
    found = json.loads(body)
    if found["key"] != key:
        raise ValueError(f"{place.path(name)} is of another key")
    entry = Entry(
        name, place, {label: File(*file) for label, file in found["files"].items()}, found["facts"]
    )
    for label in entry.files if checks_files else ():
        entry.read(label)
    for each in (name, *(file.name for file in entry.files.values())):
        place.note_use(each)
    return entry


def _make_room(place: Path, keep: set[str]) -> None:
    """Remove what was used longest ago, where there is too much, and what writers left behind.

    A file goes without its entry and an entry without its files: who finds one alone makes both.
    """
    with contextlib.suppress(OSError):  # another process does the same
        _remove_left_behind(place)
        found = [path for path in place.iterdir() if _is_kept(path)]
        states = {path: path.stat() for path in found}
        size = sum(state.st_size for state in states.values())
        for path in sorted(found, key=lambda path: states[path].st_mtime):
            if size <= MAX_BYTES:
                return
            if path.name not in keep:
                path.unlink(missing_ok=True)
                size -= states[path].st_size


def _is_kept(path: Path) -> bool:
    return path.suffix in _SUFFIXES and not path.name.startswith(".")


def _remove_left_behind(place: Path) -> None:
    before = time.time() - LEFT_BEHIND_SECONDS
    for path in place.glob(".*"):
        if path.stat().st_mtime < before:
            path.unlink(missing_ok=True)


def why_unusable() -> str:
    """Why nothing can be kept here; empty where it can. Nothing is created."""
    try:
        place = folder()
    except (OSError, RuntimeError) as error:
        return str(error)
    there = next(each for each in (place, *place.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written"
    return store.why_untrusted(there)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for what is being made, of this process alone."""
    return tempfile.TemporaryDirectory(prefix="opgraft-")
