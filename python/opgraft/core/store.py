"""Cores that `opgraft build` compiled: where they lie, and whether they may be loaded.

To load a core is to run it. So nothing is loaded that anyone but this user and root could have
written: not the file, and no folder on the way to it. It is opened first, and what is open is both
looked at and loaded: between a look at a path and its use the path may come to lead elsewhere.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from opgraft.core import building

__all__ = ["distrust", "find", "opened", "place", "read", "root"]


def root() -> Path:
    """The cache: what `OPGRAFT_CACHE` says, or `~/.cache/opgraft`."""
    return Path(os.environ.get("OPGRAFT_CACHE") or "~/.cache/opgraft").expanduser().absolute()


def place(torch_version: str) -> Path:
    """The file of the core for a torch, compiled from these sources for this Python."""
    import sysconfig  # as in building

    module = building.module_name(torch_version)
    parts = [
        module.rpartition(".")[2],
        str(sysconfig.get_config_var("SOABI")),
        re.sub(r"[^\w.+-]", "_", torch_version),
        building.digest(building.sources()),
    ]
    return root() / "-".join(parts) / building.file_name(module)


def find(torch_version: str) -> tuple[Path | None, str]:
    """The core for a torch, if there is one to load, and why one that is there is not loaded."""
    try:
        if not root().is_dir():  # the common case, which costs no look at the sources
            return None, ""
        path = place(torch_version)
        if not path.is_file():
            return None, ""
        reason = distrust(path)
    except (OSError, RuntimeError, building.BuildError) as error:  # no home, no access, no sources
        return None, f"the cache of cores cannot be used ({error})"
    return (None, f"the core {path} is not loaded: {reason}") if reason else (path, "")


def opened(path: Path) -> str:
    """A file that nobody else could have written, opened: a name that stands for what was checked.

    Whatever is put at `path` from then on is not what the name leads to. The file stays open for
    good: the dynamic linker knows by this name what it loads, so it must not become another's.

    Raises:
        PermissionError: another user could have written it.
        OSError: it cannot be opened.
    """
    return f"/proc/self/fd/{_open(path)}"


def read(path: Path) -> str:
    """The text of a file that nobody else could have written.

    Raises:
        PermissionError: another user could have written it.
        OSError: it cannot be opened.
    """
    with os.fdopen(_open(path), encoding="utf-8") as file:
        return file.read()


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if reason := _distrust_open(descriptor):
        os.close(descriptor)
        raise PermissionError(reason)
    return descriptor


def distrust(path: Path) -> str:
    """Why another user could have written what is at `path`; empty where none could.

    For those who tell people so. Who reads or runs what is there must have it open: `opened`.
    """
    if not hasattr(os, "geteuid") or not hasattr(os, "O_PATH"):
        return "who may write there cannot be told on this system"
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return _distrust_open(descriptor)
    finally:
        os.close(descriptor)


def _distrust_open(descriptor: int) -> str:
    """Why another user could have written what is open; empty where none could."""
    # Note [Who could have written it]
    # The kernel says where what is open lies now, all links followed. From the root down each
    # folder on the way is looked at: once one is known to be ours alone, nobody else can put
    # another thing in the place of what is in it, so that each answer still holds when the next is
    # asked for. What stands at the end of the way must be what is open.
    try:
        real = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError as error:
        return f"who may write there cannot be told without /proc ({error})"
    info = None
    for each in (*reversed(real.parents), real):
        try:
            info = each.lstat()
        except FileNotFoundError:
            return f"{each} is there no more"
        if info.st_uid not in (os.geteuid(), 0):
            return (
                f"{each} belongs to user {info.st_uid}, and this is user {os.geteuid()}; set "
                "OPGRAFT_CACHE to a folder of your own"
            )
        # In a sticky folder, such as /tmp, nobody can take away or rename what is another's.
        sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            return (
                f"others may write to {each}; chmod go-w it, or set OPGRAFT_CACHE to a folder that "
                "is yours alone"
            )
    if info is None or not os.path.samestat(info, os.fstat(descriptor)):
        return f"{real} was replaced while it was looked at"
    return ""
