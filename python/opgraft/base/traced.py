"""The impls that this thread traces into a graph that is being compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[object] = []


_thread = _Thread()


@contextmanager
def tracing(op: object) -> Iterator[None]:
    """While it is entered, this thread traces an impl of an op."""
    _thread.running.append(op)
    try:
        yield
    finally:
        _thread.running.pop()


def is_running(op: object) -> bool:
    """Whether this thread is tracing an impl of an op."""
    return any(each is op for each in _thread.running)


def is_traced() -> bool:
    """Whether a launch becomes a node of the graph that is being compiled: `compile="traceable"`.

    torch reads from such a kernel what it writes to. It takes one with inline assembly that is not
    pure for one that writes to all of its arguments, which an override may not do.

    >>> is_traced()
    False
    """
    return bool(_thread.running)
