"""A counter that threads add to without a lock and without losing counts."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING

from opgraft.core import loader

if TYPE_CHECKING:
    from opgraft.core import interface


class Counter:
    """Counts events from any thread.

    Each thread writes only its own slot, so no two threads ever modify one value. A thread that
    gets the identity of one that ended continues that one's slot. Reading adds up the slots.

    >>> counter = Counter()
    >>> counter.add(); counter.add(); counter.total()
    2
    """

    __slots__ = ("_slots",)

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}

    def add(self) -> None:
        thread = get_ident()
        self._slots[thread] = self._slots.get(thread, 0) + 1

    def total(self) -> int:
        return sum(list(self._slots.values()))


def new() -> Counter | interface.Counter:
    """A counter that both routers can add to."""
    core = loader.in_use()
    return Counter() if core is None else core.Counter()
