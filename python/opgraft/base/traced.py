"""Whether this thread traces an impl into a graph that is being compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    impls = 0


_thread = _Thread()


@contextmanager
def tracing() -> Iterator[None]:
    """While it is entered, this thread traces an impl."""
    _thread.impls += 1
    try:
        yield
    finally:
        _thread.impls -= 1


def is_traced() -> bool:
    """Whether a launch becomes a node of the graph that is being compiled: `compile="traceable"`.

    torch reads from such a kernel what it writes to. It takes one with inline assembly that is not
    pure for one that writes to all of its arguments, which an override may not do.

    >>> is_traced()
    False
    """
    return _thread.impls > 0
