"""The files of the kernel cache: written whole, read only where nobody else could have written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from opgraft.base import files
from opgraft.core import store

log = logging.getLogger(__name__)

#: How many bytes of files the cache keeps. Those that were used longest ago go first.
MAX_BYTES = 2**30
#: Seconds after which a temporary file is one that its writer has left behind.
LEFT_BEHIND_SECONDS = 3600.0


class Entry(NamedTuple):
    """A compiled library, and what is known of it.

    Attributes:
        path: the library.
        sha256: the hash of what was written there.
        facts: what was written with it.
    """

    path: Path
    sha256: str
    facts: dict[str, Any]

    def open(self) -> str:
        """A name of the open library, by which it can be loaded, whatever becomes of its path.

        Raises:
            OSError: it is not there any more, or not what it was.
        """
        opened = store.open_trusted(self.path)
        _check(self.path, Path(opened).read_bytes(), self.sha256)
        return opened


def folder() -> Path:
    """Where the cache is: `kernels` in opgraft's cache."""
    return store.root() / "kernels"


def digest(key: dict[str, Any]) -> str:
    """The name of a key: the same for the same key of any process.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def write(key: dict[str, Any], library: bytes, facts: dict[str, Any]) -> None:
    """Keep a compiled library.

    Args:
        key: what it was compiled of and for, as JSON has it.
        library: the content of a shared library.
        facts: what is to be known of it, as JSON has it.

    Raises:
        OSError: the folder cannot be written to, or there is no room.
    """
    place, name = folder(), digest(key)
    files.make_folder(place)
    content = hashlib.sha256(library).hexdigest()
    library_name = f"{name}-{content[:16]}.so"
    body = json.dumps(
        {"key": key, "library": library_name, "sha256": content, "facts": facts}, sort_keys=True
    )
    files.replace(place / library_name, library, mode=0o700)
    # The entry says of itself, too, what its hash is: a damaged number in it would be a wrong one.
    check = hashlib.sha256(body.encode()).hexdigest()
    files.replace(place / f"{name}.json", f"{body}\n{check}\n")
    _make_room(place, keep={f"{name}.json", library_name})


def read(key: dict[str, Any]) -> Entry | None:
    """The library that was kept for a key; None where there is none that can be trusted.

    Why a file that is there is not used is logged, in one line.
    """
    try:
        place = folder()
        path = place / f"{digest(key)}.json"
        if not path.exists():  # the common case
            return None
        return _read(path, key)
    except FileNotFoundError:  # removed meanwhile, by who made room
        return None
    except (OSError, RuntimeError, ValueError) as error:  # no home, no access, damaged
        log.warning("a compiled kernel of the cache is not used, and is compiled anew: %s", error)
        return None


def _read(path: Path, key: dict[str, Any]) -> Entry:
    text = store.read_trusted(path)
    body, _, rest = text.partition("\n")
    _check(path, body.encode(), rest.removesuffix("\n"))
    found = json.loads(body)
    if found["key"] != key:
        raise ValueError(f"{path} is of another key")
    library = path.parent / found["library"]
    _check(library, store.read_trusted_bytes(library), found["sha256"])
    with contextlib.suppress(OSError):  # it may be read only
        os.utime(path)
    return Entry(library, found["sha256"], found["facts"])


def _check(path: Path, content: bytes, expected: str) -> None:
    if hashlib.sha256(content).hexdigest() != expected:
        raise OSError(f"{path} is damaged")


def _make_room(place: Path, keep: set[str]) -> None:
    """Remove what was used longest ago, where there is too much, and what writers left behind."""
    with contextlib.suppress(OSError):  # another process does the same
        _remove_left_behind(place)
        kernels = sorted(_kernels(place), key=lambda each: each.used)
        size = sum(each.size for each in kernels)
        for each in kernels:
            if size <= MAX_BYTES:
                return
            if not keep & {path.name for path in each.paths}:
                for path in each.paths:
                    path.unlink(missing_ok=True)
                size -= each.size


class _Kernel(NamedTuple):
    """The files of one key."""

    paths: tuple[Path, ...]
    size: int
    used: float


def _kernels(place: Path) -> Iterator[_Kernel]:
    found: dict[str, list[Path]] = {}
    for path in place.iterdir():
        if path.suffix in (".json", ".so") and not path.name.startswith("."):
            found.setdefault(path.name[:32], []).append(path)
    for paths in found.values():
        # The entry before its libraries: who finds no entry looks no further.
        paths.sort(key=lambda path: path.suffix != ".json")
        states = [path.stat() for path in paths]
        size = sum(state.st_size for state in states)
        yield _Kernel(tuple(paths), size, max(state.st_mtime for state in states))


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
