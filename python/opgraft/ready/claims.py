"""Claims: who of the processes of a machine does something that one of them is to do.

A claim is a file that exists for as long as its owner holds it. It is created atomically, and says
which thread created it, and when that thread started: a number alone comes again. The claim of a
thread that is gone is void: of one that ended, however it did, and of one whose process has become
another program by `exec`, under the same number. So is the claim of a process that is stopped, as
by Ctrl-Z: it may be stopped for good. No lock of the file system's is needed, which network file
systems do not all have.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import tempfile
import threading
from functools import cache
from pathlib import Path

from opgraft.base import files
from opgraft.core import store

log = logging.getLogger(__name__)


def folder() -> Path:
    """Where the claims of this machine, since it was started, lie.

    Those of a container lie apart, where numbers of processes are others.
    """
    machine = f"{socket.gethostname()}-{_boot()}{_namespace()}"
    try:
        root = store.root()
    except (RuntimeError, OSError):  # this user has no home, or this process no folder
        root = Path(tempfile.gettempdir()) / f"opgraft-{os.getuid()}"
    return root / "claims" / re.sub(r"[^\w.-]", "_", machine)


def why_unusable() -> str:
    """Why no claim can be made here; empty where one can. Nothing is created."""
    place = folder()
    there = next(each for each in (place, *place.parents) if each.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return ""
    return f"{there} cannot be written"


class Claim:
    """A name that one thread of the machine holds at a time. It releases what it has taken."""

    def __init__(self, name: str, place: Path | None = None) -> None:
        self.name = name
        self._path = (place or folder()) / name
        self._held = False

    def take(self) -> bool:
        """Hold it from now on; False where another thread does.

        Where no file can be created, nobody can tell, and it is held: the same is done twice then.
        """
        if not self._held:
            try:
                self._held = self._take()
            except OSError as error:
                log.debug("nothing can be claimed in %s: %s", self._path.parent, error)
                self._held = True
        return self._held

    def _take(self) -> bool:
        if self.owner() is not None:  # the common case, while somebody waits, writes nothing
            return False
        files.make_folder(self._path.parent)
        return _create(self._path) or (self._remove_void() and _create(self._path))

    def release(self) -> None:
        """Hold it no longer."""
        if self._held:
            self._held = False
            if _read(self._path) == _me():  # not where it could not be created
                with contextlib.suppress(OSError):
                    self._path.unlink()

    def owner(self) -> int | None:
        """The thread that holds it, by the number of the system's; None where nobody does."""
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
        name = f"{self._path.name}.void-{owner[0]}-{owner[1]}"
        removal = Claim(name, self._path.parent)  # which may be void in its turn
        if not removal.take():
            return False
        try:
            if _read(self._path) != owner:
                return False
            self._path.unlink(missing_ok=True)
            return True
        finally:
            removal.release()


Owner = tuple[int, int]


def _me() -> Owner:
    thread = threading.get_native_id()
    return thread, _started(thread)


def _create(path: Path) -> bool:
    """Create a claim, with what it says in it from the first moment."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        fresh.write_text(json.dumps(_me()))
        os.link(fresh, path)
    except FileExistsError:
        return False
    finally:
        fresh.unlink(missing_ok=True)
    return True


def _read(path: Path) -> Owner | None:
    """Which thread made a claim, and when that started; None where there is no claim."""
    try:
        thread, started = json.loads(path.read_text())
        return int(thread), int(started)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return 0, 0  # damaged: nobody's, and void


def _lives(owner: Owner) -> bool:
    return owner[0] > 0 and 0 <= owner[1] == _started(owner[0])


def _started(thread: int) -> int:
    """When a thread started, in ticks since the machine did; -1 where there is none that runs."""
    try:
        stat = Path(f"/proc/{thread}/stat").read_text()
    except OSError:
        return -1
    # The name, in parentheses, may hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return -1 if fields[0] in "ZXTt" else int(fields[19])


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


@cache
def _namespace() -> str:
    """By which numbers of processes are known; empty where they are the machine's own."""
    try:
        name = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return "" if name == "pid:[4026531836]" else f"-{name}"  # PROC_PID_INIT_INO of Linux
