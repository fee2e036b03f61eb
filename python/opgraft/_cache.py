"""Cores that `opgraft build` compiled: where they lie, and whether they may be loaded.

To load a core is to run it. So nothing is loaded that anyone but this user and root could have
written: not the file, and no folder on the way to it.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from opgraft import _build

__all__ = ["distrust", "find", "place", "root"]


def root() -> Path:
    """The cache: what `OPGRAFT_CACHE` says, or `~/.cache/opgraft`."""
    return Path(os.environ.get("OPGRAFT_CACHE") or "~/.cache/opgraft").expanduser().absolute()


def place(torch_version: str) -> Path:
    """The file of the core for a torch, compiled from these sources for this Python."""
    import sysconfig  # as in _build

    module = _build.module_name(torch_version)
    parts = [
        module.rpartition(".")[2],
        str(sysconfig.get_config_var("SOABI")),
        re.sub(r"[^\w.+-]", "_", torch_version),
        _build.digest(_build.sources()),
    ]
    return root() / "-".join(parts) / _build.file_name(module)


def find(torch_version: str) -> tuple[Path | None, str]:
    """The core for a torch, if there is one to load, and why one that is there is not loaded."""
    try:
        if not root().is_dir():  # the common case, which costs no look at the sources
            return None, ""
        path = place(torch_version)
        if not path.is_file():
            return None, ""
        reason = distrust(path)
    except (OSError, RuntimeError, _build.BuildError) as error:  # no home, no access, no sources
        return None, f"the cache of cores cannot be used ({error})"
    return (None, f"the core {path} is not loaded: {reason}") if reason else (path, "")


def distrust(path: Path) -> str:
    """Why another user could have written what is at `path`; empty where none could."""
    if not hasattr(os, "geteuid"):
        return "who may write there cannot be told on this system"
    real = Path(os.path.realpath(path))
    for each in (real, *real.parents):
        info = each.lstat()
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
    return ""
