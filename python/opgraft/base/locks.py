"""Locks that a fork does not break."""

from __future__ import annotations

import os
import threading

_locks: list[threading.RLock] = []


def fork_safe_lock() -> threading.RLock:
    """A lock for state that must be whole in the child of a fork; for module level, it is kept.

    A fork copies one thread and all locks: a lock that another thread holds would stay locked in
    the child for good, and what it protects would be half changed. So whoever forks takes it first.

    >>> with fork_safe_lock():
    ...     pass
    """
    lock = threading.RLock()
    _locks.append(lock)
    return lock


def _take_all() -> None:
    # Whoever holds one and waits for another may do so in any order: none is held while waiting.
    taken: list[threading.RLock] = []
    while len(taken) < len(_locks):
        lock = _locks[len(taken)]
        if lock.acquire(timeout=0.01):
            taken.append(lock)
        else:
            while taken:
                taken.pop().release()


def _release_all() -> None:
    for lock in _locks:
        lock.release()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_take_all, after_in_parent=_release_all, after_in_child=_release_all)
