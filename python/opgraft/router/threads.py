"""The state of a thread: which impls it is running, and which overrides are off for it.

There are two kinds of thread-local state, and they differ on purpose:

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
from opgraft.ops.bypass import set_bypass
from opgraft.ops.schema import Op, resolve
from opgraft.registry import Chain, Override, Selector

_SCOPES_KEY = "opgraft.scopes"
_PROBE_KEY = "opgraft.probe"

#: Matches every override.
EVERYTHING = Selector()


class PassedBy(Selector):
    """Selects an override that is not asked for a call, though no user switched it off."""

    REASON = (
        "not asked: autograd differentiates the call of a composite op, and it has no autograd="
    )

    def __init__(self, override: Override) -> None:
        # Without a pack it selects none of a pack's: these may have the same name.
        super().__init__(**{key: value or "" for key, value in override.identity.items()})


class PassedByForNative(PassedBy):
    """The same, where native is to run the call."""

    REASON = (
        "not asked: the override that differentiates the call of a composite op is quarantined, "
        "and native runs its forward"
    )


class Frame:
    """An impl that is running on this thread, and what the native kernel returned inside it."""

    __slots__ = ("_native_results", "chain", "op")

    def __init__(self, op: Op, chain: Chain | None) -> None:
        self.op = op
        self.chain = chain  #: None: every override of `op` is bypassed, at every dispatch key
        self._native_results: list[Any] = []

    def note_native(self, result: Any) -> None:
        """Note a result of the native kernel, weakly: an impl may get many."""
        self._native_results.append(_weak(result))

    def ended_in_native(self, result: Any) -> bool:
        """Whether the impl returned what the native kernel returned to it."""
        return any(_is_same(result, native) for native in self._native_results)


class _Frames(threading.local):
    def __init__(self) -> None:
        self.stack: list[Frame] = []
        #: The ops and dispatch keys of forwards that autograd functions of ours run.
        self.forwards: list[tuple[Op, str]] = []


_frames = _Frames()


@contextmanager
def running_forward(op: Op, dispatch_key: str) -> Iterator[None]:
    """Call an op again for a derivative of one's own, where autograd has switched grad mode off."""
    _frames.forwards.append((op, dispatch_key))
    try:
        yield
    finally:
        _frames.forwards.pop()


def callers_grad_mode(override: Override) -> AbstractContextManager[object]:
    """The grad mode of whoever made the call that this thread routes to an override's chain."""
    if (override.operator, override.dispatch_key) in _frames.forwards:
        return torch.enable_grad()  # else there would be no derivative
    return nullcontext()


@contextmanager
def running(op: Op, chain: Chain | None) -> Iterator[Frame]:
    """Bypass `chain`, or every chain of `op`, on this thread."""
    frame = Frame(op, chain)
    _frames.stack.append(frame)
    try:
        yield frame
    finally:
        _frames.stack.pop()


def is_bypassed(chain: Chain) -> bool:
    """Whether this thread bypasses a chain, for instance because it is running one of its impls."""
    return any(
        frame.chain is chain or (frame.chain is None and frame.op is chain.op)
        for frame in _frames.stack
    )


def note_native(chain: Chain, result: Any) -> None:
    """Note what the native kernel returned to the impl that is running on this thread."""
    frame = next((frame for frame in reversed(_frames.stack) if frame.chain is chain), None)
    if frame is not None:
        frame.note_native(result)


@contextmanager
def bypassing(op: Op) -> Iterator[None]:
    """Bypass every override of `op` on this thread, in either router."""
    core = loader.in_use()
    with running(op, None), core.Bypass(op.name) if core is not None else nullcontext():
        yield


set_bypass(lambda op: bypassing(resolve(op)))


def scope(selector: Selector) -> AbstractContextManager[None]:
    """Switch off what `selector` matches, for this thread and backwards that it starts."""
    core = loader.in_use()
    if core is None:
        return PythonScope(selector, observes=False)
    return core.Scope(selector.given(), selector)  # type: ignore[no-any-return]


def observed_by(observer: object) -> AbstractContextManager[None]:
    """Add an observer to this thread, and to backwards that it starts."""
    core = loader.in_use()
    if core is None:
        return PythonScope(observer, observes=True)
    return core.Scope(None, observer)  # type: ignore[no-any-return]


def scopes() -> tuple[Selector, ...]:
    """The selectors that are switched off on this thread, outermost first."""
    return _tags(observing=False)


def observers() -> tuple[Any, ...]:
    """The observers of this thread, outermost first."""
    return _tags(observing=True)


def _tags(*, observing: bool) -> tuple[Any, ...]:
    core = loader.in_use()
    if core is not None:
        return tuple(core.Scope.tags(observing))
    return tuple(e.tag for e in PythonScope.entries() if e.observes == observing)


class _Entry:
    """A scope in the lists of all threads that are in it."""

    __slots__ = ("observes", "open", "tag")

    def __init__(self, tag: Any, observes: bool) -> None:
        self.tag = tag
        self.observes = observes
        self.open = True


class PythonScope:
    """The Python router's scope. The core's does the same (csrc/threads.h)."""

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
        self._close()  # this may run on any thread

    def _close(self) -> None:
        if self._entry is not None:
            self._entry.open = False
            self._entry.tag = None
            self._entry = None

    @staticmethod
    def entries() -> Iterator[_Entry]:
        """The scopes that this thread is in, outermost first."""
        return (entry for entry in _stashed() if entry.open)


def is_disabled_here(override: Override) -> bool:
    """Whether a scope on this thread has switched the override off."""
    core = loader.in_use()
    if core is not None:
        return bool(core.Scope.is_off(override.identity))
    return any(selector.matches(override) for selector in scopes())


def disabling_scope(override: Override) -> Selector | None:
    """What the scope on this thread selects that has switched the override off."""
    return next((each for each in reversed(scopes()) if each.matches(override)), None)


def _stash(value: tuple[_Entry, ...]) -> None:
    """Store `value` for this thread, and for the autograd engine's in backwards that it starts.

    torch cannot delete a stored object from Python, so `()` remains in the end.
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
    """Whether torch's stash steals a reference to the object, as torch 2.11's does."""
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
