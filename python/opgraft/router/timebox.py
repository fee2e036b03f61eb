"""A timeout on how long a call waits for its impl to be compiled.

A DSL compiles for seconds when a call first has new dtypes, sizes or alignments, and has been seen
to hang. With `OPGRAFT_COMPILE_TIMEOUT` set, an impl runs on a thread of its own for a call whose
exact key is new. If that takes longer than the timeout, the call gets the native kernel's result.
So do other calls with that key until the thread is done: nobody waits twice. Calls that would go
another way when checkpointing runs them again wait for as long as it takes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from opgraft.base import env
from opgraft.errors import warn_caller
from opgraft.ops.schema import Call
from opgraft.registry import Override
from opgraft.router import composite, contract, device, threads
from opgraft.router.call_keys import exact_key
from opgraft.router.randomness import depends_on_random_numbers

log = logging.getLogger(__name__)

#: Threads that may compile for one override at a time. Further calls run native.
MAX_COMPILING = 4
#: Exact keys of an override that are remembered as compiled.
MAX_KNOWN = 4096


def impl_of(override: Override) -> Callable[..., Any]:
    """What routers run for an override: its impl, with the timeout if one is set."""
    seconds = env.compile_timeout()
    # An op that writes to its arguments cannot be abandoned halfway: its writes cannot be undone.
    if seconds is None or override.operator.writes:
        return override.impl
    return TimeBoxed(override, seconds)


class TimeBoxed:
    """An impl whose first run for each exact key is waited for at most so many seconds."""

    def __init__(self, override: Override, seconds: float) -> None:
        self._override = override
        self._seconds = seconds
        self._lock = threading.Lock()
        self._known: dict[Hashable, None] = {}
        self._running: dict[Hashable, _Run] = {}
        self._warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        override = self._override
        plain = args[1:] if override.takes_keyset else args
        call = override.operator.bind(plain, kwargs)
        # Whether it is in time must not decide what it draws, nor what it saves for its backward.
        if depends_on_random_numbers(call) or composite.would_differentiate(override, call):
            return override.impl(*args, **kwargs)
        key = exact_key(call)
        if key in self._known or device.is_capturing(device.of_tensors(call)):
            return override.impl(*args, **kwargs)
        run, is_ours = self._start(key, call, args, kwargs)
        if run is not None and (is_ours or run.done.is_set()):
            run.done.wait(self._seconds)
            if run.done.is_set():
                return self._finish(key, run, call)
            self._warn()
        return _native(call)

    def _start(
        self, key: Hashable, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Run | None, bool]:
        with self._lock:
            if key in self._running:
                return self._running[key], False
            if len(self._running) >= MAX_COMPILING:
                return None, False
            run = self._running[key] = _Run(self._override, call, args, kwargs)
        run.start()
        return run, True

    def _finish(self, key: Hashable, run: _Run, call: Call) -> Any:
        with self._lock:
            self._running.pop(key, None)
            if run.error is None:
                if len(self._known) >= MAX_KNOWN:
                    self._known.pop(next(iter(self._known)))
                self._known[key] = None
        if run.error is not None:
            raise run.error
        if run.call is call:
            return run.result
        # The run was another call's, which stopped waiting. The kernel is compiled by now, so run
        # it for this call.
        return self._override.impl(*run.leading, *call.args, **call.kwargs)

    def _warn(self) -> None:
        if self._warned:
            return
        self._warned = True
        warn_caller(
            f"{contract.display_name(self._override)} is still compiling after {self._seconds:g} s "
            "(OPGRAFT_COMPILE_TIMEOUT); the native kernel runs until it is done"
        )


class _Run(threading.Thread):
    """One run of an impl on a thread of its own, with the state of the calling thread."""

    def __init__(
        self, override: Override, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # A daemon, so that a hanging compiler does not keep the process from ending.
        super().__init__(name=f"opgraft: {override.name} compiles", daemon=True)
        self.call = call
        self.leading = args[:1] if override.takes_keyset else ()
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None
        self._override = override
        self._arguments = (args, kwargs)
        self._contexts = _contexts(override, call)

    def run(self) -> None:
        args, kwargs = self._arguments
        try:
            with ExitStack() as stack:
                for enter in self._contexts:
                    stack.enter_context(enter())
                self.result = self._override.impl(*args, **kwargs)
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


def _contexts(override: Override, call: Call) -> list[Callable[[], AbstractContextManager[object]]]:
    """Contexts that give another thread the state of this one."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    contexts: list[Callable[[], AbstractContextManager[object]]] = [
        lambda: torch.inference_mode(inference),
        lambda: torch.set_grad_enabled(grad),
        torch._C._AutoDispatchBelowADInplaceOrView,  # an impl runs below autograd
        lambda: threads.bypassing(override.operator),
    ]
    for selector in threads.scopes():
        contexts.append(lambda selector=selector: threads.scope(selector))  # type: ignore[misc]
    call_device = device.of_tensors(call)
    if call_device is not None and torch.is_autocast_enabled(
        call_device.type
    ):  # as an impl sees it
        dtype = torch.get_autocast_dtype(call_device.type)
        contexts.append(lambda: torch.autocast(call_device.type, dtype, cache_enabled=False))
    if call_device is not None and call_device.type == "cuda":
        stream = torch.cuda.current_stream(call_device)
        contexts += [lambda: device.guard(call_device), lambda: torch.cuda.stream(stream)]
    return contexts


def _native(call: Call) -> Any:
    # Inside an impl, the same op is the native kernel. The router notices that its result is
    # returned.
    return call.op.overload(*call.args, **call.kwargs)
