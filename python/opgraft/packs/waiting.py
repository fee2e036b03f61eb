"""Packs that `import torch` has not registered yet, and what keeps the place of their overrides.

Importing packs and registering what they bring takes most of what opgraft adds to `import torch`.
A pack that says in its metadata which ops it overrides needs none of that before one of them is
called: until then a router is in at each of these ops, and what stands in its chain is a
placeholder. The first call that reaches it registers everything, and is routed anew. Whatever looks
at what is registered or changes it registers everything, too (:func:`settle`), and so does the
import of a compiler.

What `import torch` imports of opgraft then is this module, the core, and what reads metadata.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from opgraft.base import imports
from opgraft.base.locks import fork_safe_lock
from opgraft.core import deferred, loader

log = logging.getLogger("opgraft")

#: What compiles a program imports one of these first; they come in this order. More than one, as
#: the first may be imported where it is too early: by a part of a pack.
_COMPILERS = ("torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor.compile_fx")
#: Seconds that a thread waits for another one that is registering the packs. That one may be
#: waiting in turn, for an import that this one is in the middle of: then native is right as well.
_PATIENCE = 5.0

_lock = fork_safe_lock()
#: Whether packs are still to be registered.
_waits = False
#: The thread that registers them now.
_runner: int | None = None
_ended = threading.Event()
_register: Callable[[], bool] | None = None
#: Whether no call finds a placeholder any more.
_gone = False
#: The dispatcher's state at `import torch`: the keys that are included and excluded.
_state: Any = None


def keep_places(ops: Iterable[tuple[str, str]], register: Callable[[], bool]) -> None:
    """Let packs wait for a call of one of their ops.

    Args:
        ops: their names and dispatch keys; ops that this torch does not have are nothing to wait
            for.
        register: registers the packs; returns whether it could be done now. Called once it has to
            be, on any thread, until it returns true.
    """
    global _waits, _gone, _register, _state
    core = loader.in_use()
    assert core is not None
    loader.shut_down_at_exit(core)
    _register, placeholder = register, core.Override.placeholder(_arrive)
    deferred.set_placeholder(placeholder)
    deferred.set_registrar(settle)
    _state = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    _waits, _gone = True, False
    try:
        for op, key in sorted(ops):
            router = core.Router(*_name_and_overload(op), key)
            deferred.add_router(op, key, router)
            router.publish([placeholder])
    except Exception as error:  # registering says better what is wrong
        log.debug("no place can be kept at %s, %s: %r", op, key, error)
        settle()
    for name in _COMPILERS:
        imports.after(name, _before_compiling)


def exists(op: str) -> bool:
    """Whether there is an op of that name by now."""
    try:
        torch._C._get_schema(*_name_and_overload(op))
    except RuntimeError:
        return False
    return True


def _name_and_overload(op: str) -> tuple[str, str]:
    name, _, overload = op.partition(".")
    return name, "" if overload == "default" else overload


def waits() -> bool:
    """Whether packs are still to be registered."""
    return _waits


def settle() -> bool:
    """Register the packs that wait, if any do.

    A thread that comes while another one registers them waits for it, within limits. Where they
    cannot be registered now, as a part of one is being imported at this moment, they go on waiting.

    Returns:
        Whether none waits any more.

    >>> settle()
    True
    """
    global _runner
    if not _waits:
        return True
    me = threading.get_ident()
    with _lock:
        if _runner == me:
            return False  # what packs do while they are registered
        other = _runner
        if other is None:
            _runner = me
            _ended.clear()
    if other is not None:
        _ended.wait(_PATIENCE)
        return not _waits
    try:
        _settle()
    finally:
        with _lock:
            _runner = None
            _ended.set()
    return not _waits


def _arrive() -> bool:
    """Called by the core, for a call that reached a placeholder: whether to route it anew."""
    settle()
    return _gone


def _before_compiling(_: ModuleType) -> None:
    settle()


def _settle() -> None:
    assert _register is not None
    if not _waits:  # another thread was first
        return
    try:
        with _as_at_import():
            if _register():
                _release()
    except Exception as error:  # it must not become the error of whoever made the call
        log.warning("opgraft: packs are not activated: %s: %s", type(error).__name__, error)
        log.debug("packs are not activated", exc_info=error)
        _give_up()


@contextmanager
def _as_at_import() -> Iterator[None]:
    """What packs import must not find that a call is being made: its modes, below autograd.

    A tensor that a pack makes would be a fake one under FakeTensorMode, or without a gradient.
    """
    with (
        torch.inference_mode(False),
        torch._C.DisableTorchFunction(),
        torch._C._ForceDispatchKeyGuard(*_state),
    ):
        yield


def _release() -> None:
    """Take the placeholders out: from here on calls find what was registered."""
    global _waits, _gone
    from opgraft import router
    from opgraft.ops.schema import resolve
    from opgraft.registry import registry

    deferred.set_placeholder(None)
    for op, key in deferred.unclaimed_routers():  # where nobody registered anything, after all
        router.install(registry.chain(resolve(op), key))
    registry.republish()
    _waits, _gone = False, True
    deferred.set_registrar(None)


def _give_up() -> None:
    """Let the packs go: calls run what is registered, and the native kernels."""
    global _waits, _gone
    _waits = False
    deferred.set_placeholder(None)
    deferred.set_registrar(None)
    for router in deferred.unclaimed_routers().values():
        router.publish([])
    # No import: in the child of a fork it may wait for a thread that is not there.
    registry = getattr(sys.modules.get("opgraft.registry"), "registry", None)
    try:
        if registry is not None:
            registry.republish()
        _gone = True
    except Exception as error:
        log.debug("a placeholder stays, and calls that reach it run native: %r", error)


# A fork copies one thread. Where that is not the one that registers packs, the child has half of
# them, and modules that nobody will ever finish importing.


def _before_fork() -> None:
    if _runner not in (None, threading.get_ident()):
        _ended.wait(_PATIENCE)


def _after_fork_in_child() -> None:
    global _runner, _ended
    if _runner in (None, threading.get_ident()):
        return
    _runner, _ended = None, threading.Event()
    log.warning(
        "opgraft: this process was forked while another thread activated packs, and lacks some"
    )
    _give_up()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
