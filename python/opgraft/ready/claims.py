"""Claims: who of the processes of a machine does something that one of them is to do.

A claim is a file that exists for as long as its owner holds it. It is created atomically, and says
which process created it, and when that process started: a process number alone comes again. The
claim of a process that is gone is void. No lock of the file system's is needed, which network file
systems do not all have.
"""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

from opgraft.core import store


def folder() -> Path:
    """Where the claims of this machine, since it was started, lie."""
    machine = f"{socket.gethostname()}-{_boot()}"
    return store.root() / "claims" / re.sub(r"[^\w.-]", "_", machine)


class Claim:
    """A name that one process of the machine holds at a time."""

    def __init__(self, name: str, place: Path | None = None) -> None:
        self._path = (place or folder()) / name
        self._held = False

    def take(self) -> bool:
        """Hold it from now on; False where another process does.

        Raises:
            OSError: files cannot be created there.
        """
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._held:
            self._held = _create(self._path) or (self._remove_void() and _create(self._path))
        return self._held

    def release(self) -> None:
        """Hold it no longer."""
        if self._held:
            self._held = False
            self._path.unlink(missing_ok=True)

    def owner(self) -> int | None:
        """The process that holds it; None where nobody does."""
        owner = _read(self._path)
        return owner[0] if owner is not None and _lives(owner) else None

    def _remove_void(self) -> bool:
        """Remove the claim of a process that is gone; whether this did.

        Of those who find it, one may: else the second would remove the claim that the first has
        made in its place. So who removes it claims that, by the name of the process that is gone.
        """
        owner = _read(self._path)
        if owner is None or _lives(owner):
            return False
        removal = self._path.with_name(f"{self._path.name}.void-{owner[0]}-{owner[1]}")
        if not _create(removal):
            return False
        try:
            if _read(self._path) != owner:
                return False
            self._path.unlink(missing_ok=True)
            return True
        finally:
            removal.unlink(missing_ok=True)


Owner = tuple[int, int]


def _create(path: Path) -> bool:
    """Create a claim, with what it says in it from the first moment."""
    me = os.getpid()
    fresh = path.with_name(f".{path.name}.{me}.{os.urandom(4).hex()}")
    fresh.write_text(json.dumps([me, _started(me)]))
    try:
        os.link(fresh, path)
    except FileExistsError:
        return False
    finally:
        fresh.unlink(missing_ok=True)
    return True


def _read(path: Path) -> Owner | None:
    """Which process made a claim, and when that started; None where there is no claim."""
    try:
        process, started = json.loads(path.read_text())
        return int(process), int(started)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        return 0, 0  # damaged: nobody's, and void


def _lives(owner: Owner) -> bool:
    return owner[0] > 0 and _started(owner[0]) == owner[1]


def _started(process: int) -> int:
    """When a process started, in ticks since the machine did; -1 where there is none."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return -1
    # The name, in parentheses, may hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return -1 if fields[0] == "Z" else int(fields[19])


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
