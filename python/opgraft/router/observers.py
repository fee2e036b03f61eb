"""Observers: functions that are told of every call that is routed on a thread. Traces use them.

Observers are in torch's thread-local state, as scopes are, so they are also told of a backward that
is started under them. Without observers calls cost no more: the compiled router checks for scopes
anyway, and looks for observers only inside one.
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
        fell_back: the hit ended in the native kernel, by the impl's decision or after an error.
        error: the impl's error, if native ran instead.
        raised: whether the call raised.
        seconds: wall time of routing and of what ran, on the host.
    """

    # Not a dataclass: this is imported with registration, and creating one takes longer than all
    # else.
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


#: Called before a call is routed, with the chain, the call, and whether autograd differentiates the
#: call of a composite op. It returns a function that is called with the outcome.
Observer: TypeAlias = "Callable[[Chain, Call, bool], Callable[[Outcome], None]]"


class _Current(threading.local):
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []


_current = _Current()
#: The number of observers in the process. At 0 the Python router skips all the rest.
_observer_count = 0
_lock = fork_safe_lock()


@contextmanager
def observing(observer: Observer, *, exclusive: bool = False) -> Iterator[None]:
    """Tell `observer` of the calls of this thread, and of backwards that it starts.

    `exclusive`: the thread's other observers are not told.
    """
    _count(1)
    try:
        with threads.observed_by((observer, exclusive)):
            yield
    finally:
        _count(-1)


def of_this_thread() -> tuple[Observer, ...]:
    """The observers of this thread."""
    found: list[Observer] = []
    for observer, exclusive in threads.observers():
        found = [observer] if exclusive else [*found, observer]
    return tuple(found)


def any_thread() -> bool:
    """Whether any thread has an observer."""
    return _observer_count > 0


def begin(chain: Chain, call: Call, *, keeps_derivative: bool) -> Callable[[Outcome], None] | None:
    """Tell this thread's observers of a call before it is routed; None if there are none.

    `keeps_derivative`: autograd differentiates the call of a composite op, so no override can take
        it.

    Returns:
        A function to call with the outcome.
    """
    observers = of_this_thread()
    if not observers:
        return None
    ends = [observer(chain, call, keeps_derivative) for observer in observers]
    # What happens in Python until then is noted in this.
    _current.outcomes.append(Outcome())

    def end(outcome: Outcome) -> None:
        noted = _current.outcomes.pop()
        outcome.error = noted.error
        outcome.fell_back |= noted.fell_back
        outcome.ran = outcome.ran or noted.ran
        for each in ends:
            each(outcome)

    return end


def route_observed(
    chain: Chain, call: Call, route: Callable[[], Any], *, keeps_derivative: bool = False
) -> Any:
    """Route a call in Python, and tell this thread's observers."""
    end = (
        begin(chain, call, keeps_derivative=keeps_derivative)
        if _observer_count and chain.members
        else None
    )
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
    """Note that an impl is about to run on this thread."""
    if _observer_count and _current.outcomes:
        _current.outcomes[-1].ran = override


def note_fallback(error: Exception | None = None) -> None:
    """Note that the impl on this thread ended in the native kernel, after `error` if given."""
    if _observer_count and _current.outcomes:
        outcome = _current.outcomes[-1]
        outcome.fell_back = True
        outcome.error = f"{type(error).__name__}: {error}" if error is not None else None


def _count(change: int) -> None:
    global _observer_count
    with _lock:
        before = _observer_count > 0
        _observer_count += change
        changed = before != (_observer_count > 0)
    if changed:
        registry.republish()  # routers report chains that are all off, too
