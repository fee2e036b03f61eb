"""A counter that threads add to without a lock and without losing counts."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING

from opgraft.core import loader

if TYPE_CHECKING:
    from opgraft.core import interface


class Counter:
    """Counts events from any thread.

    Each thread writes a slot of its own, so no read-modify-write is ever shared; a thread's
    identity that is used again after it ended goes on counting in the same slot. Reading adds the
    slots up.

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
