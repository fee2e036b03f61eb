"""What a thread is in the middle of: which impls it runs, which overrides are off for it.

Two kinds of thread-local state, on purpose different:

- *Frames* (an impl is running, or `opgraft.native` is) belong to one thread only. An impl that
  starts a backward or threads of its own gets overrides there.
- *Scopes* (`with opgraft.disabled(...)`) live in torch's own thread-local state, which autograd
  copies to its engine's threads: a backward that is started inside a scope stays inside it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from opgraft import _core
from opgraft.registry import Chain, Override, Selector
from opgraft.schema import Op

_SCOPE_KEY = "opgraft.disabled"
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
    core = _core.in_use()
    with running(op, None), core.Bypass(op.name) if core is not None else nullcontext():
        yield


@contextmanager
def scope(selector: Selector) -> Iterator[None]:
    """While this lasts, what `selector` matches is off for this thread and backwards it starts."""
    core = _core.in_use()
    with (
        core.Scope(selector.given()) if core is not None else nullcontext(),
        _known_scope(selector),
    ):
        yield


@contextmanager
def _known_scope(selector: Selector) -> Iterator[None]:
    """A scope for the Python router, and for telling which one it was."""
    outer = scopes()
    stash(_SCOPE_KEY, (*outer, selector))
    try:
        yield
    finally:
        stash(_SCOPE_KEY, outer)


def is_off_here(override: Override) -> bool:
    """Whether a scope on this thread has switched the override off."""
    core = _core.in_use()
    if core is not None:
        return bool(core.Scope.is_off(override.identity))
    return any(selector.matches(override) for selector in scopes())


def scope_of(override: Override) -> str:
    """The scope on this thread that has switched the override off, as it was written."""
    matching = (selector for selector in reversed(scopes()) if selector.matches(override))
    return f"opgraft.disabled({next(matching, '')})"


def stash(key: str, value: tuple[Any, ...]) -> None:
    """Keep `value` for this thread and for the autograd engine's in backwards that it starts."""
    if not value and _unstash(key):
        return
    if _stash_steals():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


def _unstash(key: str) -> bool:
    """Take what is kept out of the thread's state; false where there is no way to.

    A thread that ends with an object there asks for the GIL to free it, after it was joined. Where
    Python has come to its end by then, that ends the process by SIGABRT.
    """
    core = _core.in_use()
    if core is not None:
        core.unstash(key)
    return core is not None


def stashed(key: str) -> tuple[Any, ...]:
    """What :func:`stash` keeps here; empty where there is nothing."""
    value: tuple[Any, ...] = torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else ()
    return value


@cache
def _stash_steals() -> bool:
    """Whether torch's stash drops a reference that it never took, as torch 2.11's does."""
    probe = (object(),)
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_PROBE_KEY, probe)
    stole = sys.getrefcount(probe) == before
    if stole:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    _unstash(_PROBE_KEY)
    return stole


def scopes() -> tuple[Selector, ...]:
    """What is switched off on this thread, outermost scope first."""
    return stashed(_SCOPE_KEY)


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
