"""Launch plans on disk, with the kernels that they launch.

A plan is what :func:`opgraft.core.interface.Core.saved_plan` gives, in which each function is a
number. Beside it an entry says what each number is: a kernel of a cubin, which the driver loads, or
the function of a library that CuteDSL compiled. Nothing here imports a DSL.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opgraft.base.locks import fork_safe_lock
from opgraft.cache import entries, libraries, origins
from opgraft.ops.schema import Op

if TYPE_CHECKING:
    from opgraft.core.interface import Core, Plan

__all__ = ["FORMAT", "Cubin", "Library", "exists", "find", "load", "write"]

#: Raised when what `saved_plan` writes gets another meaning: older files are then of other keys.
FORMAT = 1

Key = dict[str, Any]


class Cubin(NamedTuple):
    """A kernel that Triton compiled."""

    image: bytes
    name: str
    #: Bytes of dynamic shared memory.
    shared: int
    #: Thread blocks per program.
    cluster: int


class Library(NamedTuple):
    """A function that CuteDSL compiled, in the cache."""

    file: entries.File
    #: The libraries that it needs, as :func:`origins.relative` has them.
    needs: tuple[str, ...]


def write(
    key: Key, saved: dict[str, Any], functions: list[Cubin | Library], sources: dict[str, str]
) -> None:
    """Keep a plan.

    Args:
        key: the kind of call that it is for, and all that it depends on, but for the sources.
        saved: the plan.
        functions: what the numbers in it stand for.
        sources: the hashes of the files that it was made of.

    Raises:
        OSError: the folder cannot be written to, or there is no room.
    """
    contents: dict[str, bytes | entries.File] = {}
    told: list[dict[str, Any]] = []
    for number, function in enumerate(functions):
        if isinstance(function, Cubin):
            label = f"{number}.cubin"
            contents[label] = function.image
            launch = {"shared": function.shared, "cluster": function.cluster}
            told.append({"file": label, "name": function.name, **launch})
        else:
            label = f"{number}.so"
            contents[label] = function.file
            told.append({"file": label, "needs": list(function.needs)})
    entries.write(key, contents, {"plan": saved, "functions": told, "sources": sources})


def exists(key: Key, place: entries.Place | None = None) -> bool:
    """Whether there is a file of a plan, which may be damaged. It costs a look at the folder."""
    try:
        return (place or entries.cache()).has(entries.file_of(key))
    except (OSError, RuntimeError):  # no home
        return False


def find(key: Key, place: entries.Place | None = None) -> entries.Entry | None:
    """A plan that was kept; None where there is none, or its sources have changed since."""
    entry = entries.read(key, place, checks_files=False)
    return entry if entry and origins.are_unchanged(entry.facts["sources"]) else None


def load(core: Core, entry: entries.Entry, op: Op, device: torch.device) -> Plan:
    """Make a plan of what was kept, and load its kernels.

    Args:
        core: the core.
        entry: what :func:`find` returned.
        op: the overridden op.
        device: where the calls' tensors are.

    Raises:
        OSError: a file is not there any more, or damaged.
        Exception: the driver's, or the entry is no plan of this op.
    """
    functions = [_function(core, entry, each, device) for each in entry.facts["functions"]]
    schema = op.overload._schema
    return core.load_plan(
        schema.name,
        schema.overload_name,
        entry.facts["plan"],
        [each.address for each in functions],
        device,
        [each.keep_alive for each in functions],
    )


class _Function(NamedTuple):
    address: int
    keep_alive: ctypes.CDLL | None


_lock = fork_safe_lock()
#: By the hash of the file, the name in it, and the device. Many plans launch the same kernel.
_loaded: dict[tuple[str, str, torch.device], _Function] = {}


def _function(
    core: Core, entry: entries.Entry, told: dict[str, Any], device: torch.device
) -> _Function:
    file = entry.files[told["file"]]
    key = file.sha256, told.get("name", ""), device
    with _lock:
        found = _loaded.get(key)
    if found is None:
        found = _load(core, entry, told, device)
        with _lock:
            found = _loaded.setdefault(key, found)
    return found


def _load(
    core: Core, entry: entries.Entry, told: dict[str, Any], device: torch.device
) -> _Function:
    label = told["file"]
    if "needs" in told:
        library, address = libraries.load(
            entry.open(label), list(map(origins.absolute, told["needs"]))
        )
        return _Function(address, library)
    address = core.load_cuda_kernel(
        entry.read(label), told["name"], told["shared"], told["cluster"], device
    )
    return _Function(address, None)


def _forget_in_child() -> None:
    """A device's context does not survive a fork."""
    for key in [key for key in _loaded if key[-1].type != "cpu"]:
        del _loaded[key]


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)
