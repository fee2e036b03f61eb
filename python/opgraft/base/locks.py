"""Locks that a fork does not break, and locks between processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_locks: list[threading.RLock] = []
#: Those that a fork holds. Another thread may make more meanwhile, by importing a module.
_held: list[threading.RLock] = []


def fork_safe_lock() -> threading.RLock:
    """A lock for state that must be consistent in the child of a fork. For module level only.

    A fork copies one thread and all locks. A lock that another thread holds would stay locked in
    the child for good, and its state would be half changed. So a fork first acquires all these
    locks, which are never freed.

    >>> with fork_safe_lock():
    ...     pass
    """
    lock = threading.RLock()
    _locks.append(lock)
    return lock


@contextmanager
def file_lock(path: Path, wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A scope in which one process at a time is. A process that ends leaves it.

    Args:
        path: a file for this alone, which stays. Its folder exists.
        wait: called once before this waits for another process.

    Raises:
        OSError: the file cannot be created.
    """
    import filelock  # few need it

    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _acquire_all() -> None:
    global _held
    # Other threads may acquire the locks in any order, so hold none while waiting for another.
    acquired: list[threading.RLock] = []
    while len(acquired) < len(_locks):
        lock = _locks[len(acquired)]
        if lock.acquire(timeout=0.01):
            acquired.append(lock)
        else:
            while acquired:
                acquired.pop().release()
    _held = acquired


def _release_all() -> None:
    for lock in _held:
        lock.release()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_acquire_all, after_in_parent=_release_all, after_in_child=_release_all
    )
