"""Who is told of every call that is routed on a thread: what traces are made of.

Observers live where scopes do, in torch's thread-local state, so a backward that is started under
one is told of too. Nobody observing costs a call nothing: the compiled router looks at scopes
anyway, and finds out about observers only inside one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from opgraft.base.locks import fork_safe_lock
from opgraft.ops.schema import Call
from opgraft.registry import Chain, Override, registry
from opgraft.router import threads


class Outcome:
    """What became of a call.

    Attributes:
        ran: the override whose impl ran; None: the native kernel.
        fell_back: it ended in the native kernel, by its own decision or after an error.
        error: the error of the impl that native ran instead of.
        raised: the call raised.
        seconds: wall time of routing and of what ran, on the host.
    """

    # No dataclass: this is imported with registration, and making one takes longer than the rest.
    __slots__ = ("error", "fell_back", "raised", "ran", "seconds")

    def __init__(
        self,
        ran: Override | None = None,
        *,
        fell_back: bool = False,
        raised: bool = False,
        seconds: float = 0.0,
    ) -> None:
        self.ran = ran
        self.fell_back = fell_back
        self.error: str | None = None
        self.raised = raised
        self.seconds = seconds


#: Asked before each call is routed, with the chain, the call and whether it keeps the derivative of
#: a composite op; what it returns is called with the outcome.
Observer: TypeAlias = "Callable[[Chain, Call, bool], Callable[[Outcome], None]]"


class _Current(threading.local):
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []


_current = _Current()
#: How many observers there are in the process: 0 spares the Python router the rest.
_running = 0
_lock = fork_safe_lock()


@contextmanager
def observing(observer: Observer, *, alone: bool = False) -> Iterator[None]:
    """While this lasts, `observer` is told of what this thread, and backwards it starts, route.

    `alone`: the thread's other observers are not told.
    """
    _count(1)
    try:
        with threads.observed_by((observer, alone)):
            yield
    finally:
        _count(-1)


def here() -> tuple[Observer, ...]:
    """The observers of this thread."""
    found: list[Observer] = []
    for observer, alone in threads.observers():
        found = [observer] if alone else [*found, observer]
    return tuple(found)


def anywhere() -> bool:
    """Whether any thread is observed."""
    return _running > 0


def begin(chain: Chain, call: Call, *, kept: bool) -> Callable[[Outcome], None] | None:
    """Tell this thread's observers of a call that comes; None where there are none.

    `kept`: it keeps the derivative of a composite op, so no override will be asked.

    Returns:
        A function to call with what became of it.
    """
    observers = here()
    if not observers:
        return None
    ends = [observer(chain, call, kept) for observer in observers]
    # What happens in Python meanwhile is noted here.
    _current.outcomes.append(Outcome())

    def end(outcome: Outcome) -> None:
        noted = _current.outcomes.pop()
        outcome.error = noted.error
        outcome.fell_back |= noted.fell_back
        outcome.ran = outcome.ran or noted.ran
        for each in ends:
            each(outcome)

    return end


def watch(chain: Chain, call: Call, route: Callable[[], Any], *, kept: bool = False) -> Any:
    """Route a call in Python, this thread's observers being told."""
    end = begin(chain, call, kept=kept) if _running and chain.members else None
    if end is None:
        return route()
    outcome = Outcome(raised=True)
    start = time.perf_counter()
    try:
        result = route()
        outcome.raised = False
        return result
    finally:
        outcome.seconds = time.perf_counter() - start
        end(outcome)


def note_hit(override: Override) -> None:
    """An impl is about to run on this thread."""
    if _running and _current.outcomes:
        _current.outcomes[-1].ran = override


def note_fallback(error: Exception | None = None) -> None:
    """The impl that runs on this thread ended in the native kernel, after `error` if given."""
    if _running and _current.outcomes:
        outcome = _current.outcomes[-1]
        outcome.fell_back = True
        outcome.error = f"{type(error).__name__}: {error}" if error is not None else None


def _count(change: int) -> None:
    global _running
    with _lock:
        before = _running > 0
        _running += change
        changed = before != (_running > 0)
    if changed:
        registry.republish()  # routers look at chains with nothing switched on, or stop to
