"""What a thread is in the middle of: which impls it runs, which overrides are off for it.

Two kinds of thread-local state, on purpose different:

- *Frames* (an impl is running, or `opgraft.native` is) belong to one thread only. An impl that
  starts a backward or threads of its own gets overrides there.
- *Scopes* (`with opgraft.disabled(...)`, and observers) live in torch's own thread-local state,
  which autograd copies to its engine's threads: a backward that is started inside a scope stays
  inside it. They end in any order, and on any thread: Note [Scopes] in csrc/threads.h.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from opgraft.core import loader
from opgraft.ops.bypass import bypass_by
from opgraft.ops.schema import Op, resolve
from opgraft.registry import Chain, Override, Selector

_SCOPES_KEY = "opgraft.scopes"
_PROBE_KEY = "opgraft.probe"

#: Matches every override.
EVERYTHING = Selector()


class Frame:
    """An impl that runs on this thread, and what the native kernel returned inside it."""

    __slots__ = ("_native_results", "chain", "op")

    def __init__(self, op: Op, chain: Chain | None) -> None:
        self.op = op
        self.chain = chain  #: None: every override of `op` is bypassed, at every dispatch key
        self._native_results: list[Any] = []

    def note_native(self, result: Any) -> None:
        """Remember, weakly, what the native kernel returned: an impl may go through many."""
        self._native_results.append(_weak(result))

    def ended_in_native(self, result: Any) -> bool:
        """Whether the impl handed on what the native kernel returned to it."""
        return any(_is_same(result, native) for native in self._native_results)


class _Frames(threading.local):
    def __init__(self) -> None:
        self.stack: list[Frame] = []


_frames = _Frames()


@contextmanager
def running(op: Op, chain: Chain | None) -> Iterator[Frame]:
    """While this lasts, `chain` (or every chain of `op`) is not asked on this thread."""
    frame = Frame(op, chain)
    _frames.stack.append(frame)
    try:
        yield frame
    finally:
        _frames.stack.pop()


def is_bypassed(chain: Chain) -> bool:
    """Whether an impl of this chain is running on this thread, so that the call means native."""
    return any(
        frame.chain is chain or (frame.chain is None and frame.op is chain.op)
        for frame in _frames.stack
    )


def note_native(chain: Chain, result: Any) -> None:
    """Tell the impl that is running on this thread what the native kernel returned to it."""
    frame = next((frame for frame in reversed(_frames.stack) if frame.chain is chain), None)
    if frame is not None:
        frame.note_native(result)


@contextmanager
def bypassing(op: Op) -> Iterator[None]:
    """While this lasts, no override of `op` is asked on this thread, in either router."""
    core = loader.in_use()
    with running(op, None), core.Bypass(op.name) if core is not None else nullcontext():
        yield


bypass_by(lambda op: bypassing(resolve(op)))


def scope(selector: Selector) -> AbstractContextManager[None]:
    """While this lasts, what `selector` matches is off for this thread and backwards it starts."""
    core = loader.in_use()
    if core is None:
        return PythonScope(selector, observes=False)
    return core.Scope(selector.given(), selector)  # type: ignore[no-any-return]


def observed_by(observer: object) -> AbstractContextManager[None]:
    """While this lasts, `observer` is one of this thread's, and of backwards' that it starts."""
    core = loader.in_use()
    if core is None:
        return PythonScope(observer, observes=True)
    return core.Scope(None, observer)  # type: ignore[no-any-return]


def scopes() -> tuple[Selector, ...]:
    """What is switched off on this thread, outermost scope first."""
    return _tags(observing=False)


def observers() -> tuple[Any, ...]:
    """What observes this thread, outermost first."""
    return _tags(observing=True)


def _tags(*, observing: bool) -> tuple[Any, ...]:
    core = loader.in_use()
    if core is not None:
        return tuple(core.Scope.tags(observing))
    return tuple(e.tag for e in PythonScope.entries() if e.observes == observing)


class _Entry:
    """What all threads' lists know of a scope."""

    __slots__ = ("observes", "open", "tag")

    def __init__(self, tag: Any, observes: bool) -> None:
        self.tag = tag
        self.observes = observes
        self.open = True


class PythonScope:
    """A scope where Python routes; the core has its own, which does the same (csrc/threads.h)."""

    __slots__ = ("_entry", "_observes", "_tag")

    def __init__(self, tag: Any, *, observes: bool) -> None:
        self._tag = tag
        self._observes = observes
        self._entry: _Entry | None = None

    def __enter__(self) -> None:
        if self._entry is not None:
            raise RuntimeError("this scope was entered already")
        self._entry = _Entry(self._tag, self._observes)
        _stash((*self.entries(), self._entry))

    def __exit__(self, *_: object) -> None:
        self._close()
        if _stashed():
            _stash(tuple(self.entries()))

    def __del__(self) -> None:
        self._close()  # this may be any thread

    def _close(self) -> None:
        if self._entry is not None:
            self._entry.open = False
            self._entry.tag = None
            self._entry = None

    @staticmethod
    def entries() -> Iterator[_Entry]:
        """The scopes that this thread is in, outermost first."""
        return (entry for entry in _stashed() if entry.open)


def is_off_here(override: Override) -> bool:
    """Whether a scope on this thread has switched the override off."""
    core = loader.in_use()
    if core is not None:
        return bool(core.Scope.is_off(override.identity))
    return any(selector.matches(override) for selector in scopes())


def scope_of(override: Override) -> str:
    """The scope on this thread that has switched the override off, as it was written."""
    matching = (selector for selector in reversed(scopes()) if selector.matches(override))
    return f"opgraft.disabled({next(matching, '')})"


def _stash(value: tuple[_Entry, ...]) -> None:
    """Keep `value` for this thread and for the autograd engine's in backwards that it starts.

    torch has no way in Python to take out what it keeps so: what is left in the end is `()`.
    """
    if _stash_steals():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(_SCOPES_KEY, value)


def _stashed() -> tuple[_Entry, ...]:
    if not torch._C._is_key_in_tls(_SCOPES_KEY):
        return ()
    value: tuple[_Entry, ...] = torch._C._get_obj_in_tls(_SCOPES_KEY)
    return value


@cache
def _stash_steals() -> bool:
    """Whether torch's stash drops a reference that it never took, as torch 2.11's does."""
    probe = (object(),)
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_PROBE_KEY, probe)
    stole = sys.getrefcount(probe) == before
    empty = ()
    if stole:
        for each in (probe, empty):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    torch._C._stash_obj_in_tls(_PROBE_KEY, empty)
    return stole


def _weak(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return tuple(map(_weak, result))
    return weakref.ref(result) if isinstance(result, torch.Tensor) else result


def _is_same(result: Any, native: Any) -> bool:
    """Whether `result` is what :func:`_weak` made `native` of."""
    if isinstance(result, (tuple, list)) and isinstance(native, tuple):
        pairs = zip(result, native, strict=False)
        return len(result) == len(native) and all(_is_same(mine, its) for mine, its in pairs)
    if isinstance(result, torch.Tensor):
        return isinstance(native, weakref.ref) and native() is result
    return not isinstance(native, (tuple, weakref.ref)) and bool(result == native)
