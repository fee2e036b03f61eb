"""Bundles: folders of launch plans and their kernels, for other processes and other machines.

A bundle is what `opgraft warmup --bundle` leaves: the entries of the cache that a script needs,
their files, and a manifest with the hash of each. It is read, never written to, and may belong to
another user, who alone may write to it. A pack may have one in its package.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from opgraft.base import files
from opgraft.cache import entries
from opgraft.core import store

MANIFEST = "manifest.json"
#: Where a pack has its bundle: in its package.
FOLDER_OF_PACK = "bundle"
#: Raised when a manifest gets another form.
FORMAT = 1


class BundleError(Exception):
    """A folder is no bundle, or one that is not trusted."""


def write(folder: Path, kept: Iterable[entries.Entry], about: dict[str, Any]) -> int:
    """Write a bundle.

    Args:
        folder: it is created, or holds a bundle, to which this is added.
        kept: entries of the cache. One that was removed meanwhile is left out.
        about: what is told of it, as JSON has it. Of `"devices"` those before stay.

    Returns:
        How many of the entries are in it.

    Raises:
        BundleError: the folder holds something else.
        OSError: it cannot be written to.
    """
    before = _before(folder)
    hashes = dict(before["files"])
    files.make_folder(folder, mode=0o755)
    count = 0
    for entry in kept:
        try:
            contents = {each.name: entry.place.read(*each) for each in entry.files.values()}
            contents[entry.name] = entry.place.read(entry.name)
        except FileNotFoundError:
            continue
        for name, content in contents.items():
            files.replace(folder / name, content, mode=0o644)
            hashes[name] = entries.hash_of(content)
        count += 1
    devices = {*before["about"].get("devices", ()), *about.get("devices", ())}
    about = about | {"devices": sorted(devices)}
    manifest = {"format": FORMAT, "about": about, "files": hashes}
    text = json.dumps(manifest, indent=1, sort_keys=True)
    files.replace(folder / MANIFEST, text + "\n", mode=0o644)
    return count


def _before(folder: Path) -> dict[str, Any]:
    """The manifest of the bundle that a folder holds; without files if it is empty or not there."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return {"about": {}, "files": {}}
    return _manifest(folder)


def place(folder: Path) -> entries.Place:
    """What reads a bundle.

    Raises:
        BundleError: it is none, or others than its owner could have written it.
    """
    return entries.Place(folder, _manifest(folder)["files"])


def about(folder: Path) -> dict[str, Any]:
    """What a bundle's manifest tells of it.

    Raises:
        BundleError: as for :func:`place`.
    """
    told: dict[str, Any] = _manifest(folder)["about"]
    return told


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(store.read_trusted_bytes(path, by_anybody=True))
        if manifest["format"] != FORMAT:
            raise BundleError(f"{folder} is a bundle of another version: make it anew")
        names = manifest["files"].items()
        if not all(isinstance(each, str) for pair in names for each in pair):
            raise ValueError("a hash is no text")
        if not isinstance(about := manifest["about"], dict):
            raise ValueError("it does not say what it was made with")
        devices, versions = about.get("devices", []), about.get("versions", {})
        if not isinstance(devices, list) or not all(isinstance(each, str) for each in devices):
            raise ValueError("it does not say for which devices it was made")
        if not isinstance(versions, dict):
            raise ValueError("it does not say with which versions it was made")
    except FileNotFoundError:
        raise BundleError(f"{folder} is no bundle: it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path} is not used: {error}") from error
    return dict(manifest)


def problems(folder: Path) -> list[str]:
    """What is wrong with a bundle's files, a line each.

    Raises:
        BundleError: as for :func:`place`.
    """
    found = []
    reader = place(folder)
    for name in sorted(_manifest(folder)["files"]):
        try:
            reader.read(name)
        except (OSError, ValueError) as error:
            found.append(str(error))
    return found


@cache
def in_use() -> entries.Place | None:
    """The bundle that `OPGRAFT_KERNELS` names; None where it names none.

    Raises:
        BundleError: as for :func:`place`.
    """
    named = os.environ.get("OPGRAFT_KERNELS", "").strip()
    return None if named.lower() in ("", "none") else place(Path(named).expanduser().absolute())


def of_module(module: str) -> entries.Place | None:
    """The bundle that a module's package ships, or else one that it is in; None if none does.

    A package that has not been imported ships none yet.

    Raises:
        BundleError: as for :func:`place`.
    """
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        package = sys.modules.get(".".join(parts[:count]))
        for parent in getattr(package, "__path__", None) or ():
            folder = Path(parent).absolute() / FOLDER_OF_PACK
            if _is_bundle(folder):
                return _place(folder)
    return None


def _is_bundle(folder: Path) -> bool:
    try:
        return (folder / MANIFEST).is_file()
    except OSError as error:  # a folder that this user may not read
        raise BundleError(f"{folder} is not used: {error}") from error


_place = cache(place)
