"""Cores that `opgraft build` compiled: where they are, and whether they can be trusted.

To load a core is to run it. So no file is loaded that anyone but this user and root could have
written, or whose parent folders they could have. The file is opened first, and the open file is
both checked and loaded: between a check of a path and its use, the path may come to name another
file.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import stat
from pathlib import Path

from opgraft.core import building

__all__ = [
    "core_path",
    "find",
    "open_trusted",
    "read_trusted",
    "read_trusted_bytes",
    "root",
    "why_untrusted",
]


def root() -> Path:
    """The cache's folder: `OPGRAFT_CACHE`, or `~/.cache/opgraft`."""
    given = os.environ.get("OPGRAFT_CACHE") or "~/.cache/opgraft"
    home = os.environ.get("HOME", "")
    # Each plan that is loaded asks. Other homes depend on the working folder, or on the user that
    # the process has become.
    if given.startswith("~/") and home.startswith("/"):
        return _below_home(given, home)
    return Path(given).expanduser().absolute()


@functools.cache
def _below_home(path: str, home: str) -> Path:
    """`path`, which begins with ``~/``, where `HOME` is `home`."""
    return Path(path).expanduser()


def core_path(torch_version: str) -> Path:
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
    """The core for a torch, if one can be loaded, and why an existing one is not loaded."""
    try:
        if not root().is_dir():  # the common case, which need not read the sources
            return None, ""
        path = core_path(torch_version)
        if not path.is_file():
            return None, ""
        reason = why_untrusted(path)
    except (OSError, RuntimeError, building.BuildError) as error:  # no home, no access, no sources
        return None, f"the cache of cores cannot be used ({error})"
    return (None, f"the core {path} is not loaded: {reason}") if reason else (path, "")


#: How often a file is opened that others replace meanwhile.
_ATTEMPTS = 10


def open_trusted(path: str | Path, *, by_anybody: bool = False) -> str:
    """Open a file that nobody else could have written; returns a name of the open file.

    The name stays that of the checked file, even if another one replaces it at `path`. The file is
    never closed: the dynamic linker identifies what it loads by this name, so no other file may get
    it.

    Args:
        path: the file.
        by_anybody: whether it may belong to any user, as long as its owner alone may write it.

    Raises:
        PermissionError: another user could have written it.
        FileNotFoundError: there is none, or not any more.
        OSError: it cannot be opened.
    """
    return f"/proc/self/fd/{_open(path, by_anybody=by_anybody)}"


def read_trusted(path: Path) -> str:
    """The text of a file that nobody else could have written.

    Raises:
        PermissionError: another user could have written it.
        FileNotFoundError: there is none, or not any more.
        OSError: it cannot be opened.
    """
    return read_trusted_bytes(path).decode()


def read_trusted_bytes(path: str | Path, *, by_anybody: bool = False) -> bytes:
    """The content of a file that nobody else could have written.

    Args:
        path: the file.
        by_anybody: as for :func:`open_trusted`.

    Raises:
        PermissionError: another user could have written it.
        FileNotFoundError: there is none, or not any more.
        OSError: it cannot be opened.
    """
    with os.fdopen(_open(path, by_anybody=by_anybody), "rb") as file:
        return file.read()


def _open(path: str | Path, *, by_anybody: bool) -> int:
    for _ in range(_ATTEMPTS):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        reason = _why_open_file_untrusted(descriptor, by_anybody=by_anybody)
        if not reason:
            return descriptor
        removed = not os.fstat(descriptor).st_nlink
        os.close(descriptor)
        if not removed:
            raise PermissionError(reason)
        # Another process has removed or replaced it since it was opened.
    raise FileNotFoundError(errno.ENOENT, "replaced each time that it was opened", str(path))


def why_untrusted(path: Path, *, by_anybody: bool = False) -> str:
    """Why another user could have written the file at `path`; empty if none could.

    This is for messages. To read or run the file, use `open_trusted`, which checks the open file.
    """
    if not hasattr(os, "geteuid") or not hasattr(os, "O_PATH"):
        return "who may write there cannot be told on this system"
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return _why_open_file_untrusted(descriptor, by_anybody=by_anybody)
    finally:
        os.close(descriptor)


def _why_open_file_untrusted(descriptor: int, *, by_anybody: bool) -> str:
    """Why another user could have written an open file; empty if none could."""
    # Note [Who could have written it]
    # The kernel reports the present path of the open file, with all links resolved. The folders of
    # that path are checked from the root down. Once a folder is known to be writable by us alone,
    # nobody else can replace what is in it, so each check still holds when the next is made. The
    # file at the end of the path must be the open file.
    try:
        real = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        return f"who may write there cannot be told without /proc ({error})"
    info = None
    parts = real.split("/")
    # Strings, since each file of the cache is looked at like this, and paths take far longer.
    for number in range(1, len(parts) + 1):
        each = "/".join(parts[:number]) or "/"
        try:
            info = os.lstat(each)
        except FileNotFoundError:
            return f"{each} is there no more"
        if not by_anybody and info.st_uid not in (os.geteuid(), 0):
            return (
                f"{each} belongs to user {info.st_uid}, and this is user {os.geteuid()}; set "
                "OPGRAFT_CACHE to a folder of your own"
            )
        # In a sticky folder, such as /tmp, users can remove or rename only their own files.
        sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            return (
                f"others may write to {each}; chmod go-w it, or set OPGRAFT_CACHE to a folder that "
                "is yours alone"
            )
    if info is None or not os.path.samestat(info, os.fstat(descriptor)):
        return f"{real} was replaced while it was looked at"
    return ""
