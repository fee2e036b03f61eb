"""Packs that wait for the first call of one of their ops before they register.

Most of the time that opgraft adds to `import torch` is for importing packs and registering their
overrides. A pack that declares its ops in its metadata needs neither before one of them is called.
Until then each of these ops has a router, whose chain holds a placeholder. The first call that
reaches a placeholder registers all packs, and is then routed again. So does the import of a
compiler, and everything that reads or changes what is registered (:func:`register_waiting`). Each
op's own first call then compiles what its overrides need (:mod:`opgraft.router.compiled`).

When a program starts CUDA, and ops on a GPU are among them, a thread registers the packs and does
what the first call of each op would wait for, beside what the program does before it: making the
CUDA context, building a model.

Then `import torch` imports only this module, the core, and the code that reads metadata.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch

from opgraft.base import imports
from opgraft.base.locks import fork_safe_lock
from opgraft.core import deferred, loader

log = logging.getLogger("opgraft")

#: A compiler first imports one of these, in this order. There are several because the first may be
#: imported too early: by a part of a pack.
_COMPILERS = ("torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor.compile_fx")
#: Seconds that a thread waits while another one registers the packs. The other one may itself wait
#: for an import that this thread has begun.
_MAX_WAIT_SECONDS = 5.0
#: Seconds after which the thread looks again whether a module of a pack is still being imported.
_RETRY_SECONDS = 0.01

#: The file that the functions behind `import` are of.
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"

_lock = fork_safe_lock()
#: Whether packs are waiting to be registered.
_are_waiting = False
#: The thread that registers them now.
_registering_thread: int | None = None
_registration_ended = threading.Event()
_register: Callable[[], bool] | None = None
#: The thread that was started with CUDA.
_preparing_thread: threading.Thread | None = None
#: Whether that thread is to end, if it only waits until packs can be registered.
_is_to_end = threading.Event()
#: Whether all placeholders are removed.
_are_placeholders_gone = False
#: The included and the excluded dispatch keys at `import torch`.
_keysets_at_import: Any = None


def install_placeholders(ops: Iterable[tuple[str, str]], register: Callable[[], bool]) -> None:
    """Let packs wait for a call of one of their ops.

    Args:
        ops: the names and dispatch keys of ops that this torch has.
        register: registers the packs; returns whether that was possible now. It is called on any
            thread, until it returns true.
    """
    global _are_waiting, _are_placeholders_gone, _register, _keysets_at_import
    core = loader.in_use()
    assert core is not None
    loader.shut_down_at_exit(core)
    _register, placeholder = register, core.Override.placeholder(_on_placeholder_call)
    deferred.set_placeholder(placeholder)
    deferred.set_registrar(register_waiting)
    _keysets_at_import = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )
    _are_waiting, _are_placeholders_gone = True, False
    try:
        for op, key in sorted(ops):
            router = core.Router(*_name_and_overload(op), key)
            deferred.add_router(op, key, router)
            router.publish([placeholder])
    except Exception as error:  # registering raises a better error
        log.debug("no placeholder can be installed at %s, %s: %r", op, key, error)
        register_waiting()
    for name in _COMPILERS:
        imports.after(name, _before_compiling)
    if any(key == "CUDA" for _, key in ops):
        _call_when_cuda_starts(_start_preparing)


def op_exists(op: str) -> bool:
    """Whether an op of that name is defined now."""
    try:
        torch._C._get_schema(*_name_and_overload(op))
    except RuntimeError:
        return False
    return True


def _name_and_overload(op: str) -> tuple[str, str]:
    name, _, overload = op.partition(".")
    return name, "" if overload == "default" else overload


def are_waiting() -> bool:
    """Whether packs are waiting to be registered."""
    return _are_waiting


def register_waiting(is_call: bool = False) -> bool:
    """Register the waiting packs, if there are any.

    If another thread is registering them, this thread waits for it, within limits. While a part of
    a pack is being imported, the packs cannot be registered, and go on waiting.

    Args:
        is_call: whether a call asks, for which the native kernel is right as well: it does not wait
            while its thread imports a module, for which the other thread may be waiting.

    Returns:
        Whether no pack is waiting any more.

    >>> register_waiting()
    True
    """
    global _registering_thread
    if not _are_waiting:
        return True
    me = threading.get_ident()
    with _lock:
        if _registering_thread == me:
            return False  # a pack calls this while it is being registered
        other = _registering_thread
        if other is None:
            _registering_thread = me
            _registration_ended.clear()
    if other is not None:
        if not (is_call and _is_importing()):
            _registration_ended.wait(_MAX_WAIT_SECONDS)
        return not _are_waiting
    try:
        _register_now()
    finally:
        with _lock:
            _registering_thread = None
            _registration_ended.set()
    return not _are_waiting


def _is_importing() -> bool:
    """Whether this thread is importing a module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != _IMPORT_SYSTEM:
        frame = frame.f_back
    return frame is not None


def _on_placeholder_call() -> bool:
    """The core calls this for a call that reached a placeholder; returns whether to route again."""
    register_waiting(is_call=True)
    return _are_placeholders_gone


def _before_compiling(_: ModuleType) -> None:
    register_waiting()


def _call_when_cuda_starts(function: Callable[[], None]) -> None:
    """Call a function while `torch.cuda` initialises itself; never, where that cannot be had."""
    try:
        torch.cuda._lazy_call(function)
    except Exception as error:  # the first call registers the packs
        log.debug("nothing is called when CUDA starts: %r", error)


def _start_preparing() -> None:
    """Register and prepare on a thread. It never raises: CUDA's initialisation would fail."""
    global _preparing_thread
    thread = threading.Thread(target=_prepare, name="opgraft: preparing for calls")
    try:
        thread.start()
    except RuntimeError as error:  # the interpreter is ending, or there are too many threads
        log.debug("no thread registers the packs, so the first call does: %r", error)
    else:
        _preparing_thread = thread


def _prepare() -> None:
    """Register the packs, and do what first calls would have to wait for."""
    end = time.monotonic() + _MAX_WAIT_SECONDS
    while not register_waiting():  # the program is importing a module of a pack
        if _is_to_end.wait(_RETRY_SECONDS) or time.monotonic() > end:
            return
    for prepare in deferred.take_preparations():
        try:
            prepare()
        except Exception as error:  # the call that needs it makes it, and says what is wrong
            log.debug("%r failed: %r", prepare, error)


def _register_now() -> None:
    assert _register is not None
    if not _are_waiting:  # another thread was first
        return
    try:
        with _dispatch_state_of_import():
            if _register():
                _remove_placeholders()
    except Exception as error:  # it must not become the error of whoever made the call
        log.warning("opgraft: packs are not activated: %s: %s", type(error).__name__, error)
        log.debug("packs are not activated", exc_info=error)
        _drop_waiting_packs()


@contextmanager
def _dispatch_state_of_import() -> Iterator[None]:
    """Hide from packs that a call is running: its modes, and that it is below autograd.

    Otherwise a tensor that a pack creates could be fake under FakeTensorMode, or have no gradient.
    """
    with (
        torch.inference_mode(False),
        torch._C.DisableTorchFunction(),
        torch._C._ForceDispatchKeyGuard(*_keysets_at_import),
    ):
        yield


def _remove_placeholders() -> None:
    """Remove the placeholders: from now on calls find what was registered."""
    global _are_waiting, _are_placeholders_gone
    from opgraft import router
    from opgraft.ops.schema import resolve
    from opgraft.registry import registry

    deferred.set_placeholder(None)
    for op, key in deferred.unclaimed_routers():  # ops for which no pack has registered anything
        router.install(registry.chain(resolve(op), key))
    registry.republish()
    _are_waiting, _are_placeholders_gone = False, True
    deferred.set_registrar(None)


def _drop_waiting_packs() -> None:
    """Stop waiting for the packs: calls run registered overrides and native kernels only."""
    global _are_waiting, _are_placeholders_gone
    _are_waiting = False
    deferred.set_placeholder(None)
    deferred.set_registrar(None)
    for router in deferred.unclaimed_routers().values():
        router.publish([])
    # No import: in a forked child it could wait for a thread that does not exist there.
    registry = getattr(sys.modules.get("opgraft.registry"), "registry", None)
    try:
        if registry is not None:
            registry.republish()
        _are_placeholders_gone = True
    except Exception as error:
        log.debug("a placeholder remains; calls that reach it run the native kernel: %r", error)


# A fork copies one thread only. If another thread is registering packs, the child has only some of
# them, and modules whose import never finishes.


def _before_fork() -> None:
    end = time.monotonic() + _MAX_WAIT_SECONDS
    if (thread := _preparing_thread) is not None and thread is not threading.current_thread():
        _is_to_end.set()  # this thread may be the one whose import it waits for
        thread.join(_MAX_WAIT_SECONDS)
        _is_to_end.clear()
    if _registering_thread not in (None, threading.get_ident()):
        _registration_ended.wait(max(0.0, end - time.monotonic()))


def _after_fork_in_child() -> None:
    global _registering_thread, _registration_ended
    if _registering_thread in (None, threading.get_ident()):
        return
    _registering_thread, _registration_ended = None, threading.Event()
    log.warning(
        "opgraft: this process was forked while another thread activated packs, and lacks some"
    )
    _drop_waiting_packs()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
