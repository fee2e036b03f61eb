"""One hit, from the device guard to the result for the caller.

The Python router runs every hit here. The core runs warm hits itself, in the same way
(csrc/python_impl.cpp), and calls this module for first hits and recordings. It wraps those as it
wraps its own hits: see `Router.is_compiled`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from opgraft.errors import OpgraftError
from opgraft.ops.schema import Call
from opgraft.registry import Override
from opgraft.router import (
    composite,
    contract,
    device,
    failure,
    observers,
    profile,
    saved_tensors,
    shadow,
    threads,
    timebox,
    torch_function,
)
from opgraft.router.base import Router
from opgraft.router.call_keys import exact_key, kind_of, repeatable_key


class Recording(Protocol):
    """The recording of a hit, for a launch plan."""

    def watching(self) -> AbstractContextManager[object]:
        """Record what the impl launches inside the context."""


def hit(
    router: Router,
    override: Override,
    keyset: torch.DispatchKeySet,
    call: Call,
    recording: Recording | None = None,
) -> Any:
    """Run an override's impl for a call that it takes.

    Args:
        router: the router that got the call.
        override: the override.
        keyset: the call's dispatch keys.
        call: the call.
        recording: records what the impl does. A recorded hit is always compared with native,
            because its replays are not.

    Returns:
        The result for the caller: the impl's, or native's if the hit fell back.

    Raises:
        ContractError: the impl's result breaks the contract.
        Exception: what the impl raised, if the override may not fall back.
    """
    call_device = device.of_call(call, override.dispatch_key)
    capturing = device.is_capturing(call_device)
    observers.note_hit(override)
    repeatable = _Repeatable.begin(override, keyset, call)
    try:
        with torch_function.hidden(call.values), repeatable or nullcontext():
            result = _hit(router, override, keyset, call, call_device, capturing, recording)
    except Exception as error:
        if not failure.may_fall_back(override, error, call, capturing=capturing):
            raise
        if repeatable is not None:
            repeatable.fail(error)
        return fall_back(router, override, keyset, call, error)
    if repeatable is not None:
        repeatable.end()
    return result


class _Repeatable:
    """A hit of an impl that autograd differentiates, where hooks get what it saves.

    Checkpointing may run it again, and compares what both runs save.
    """

    def __init__(self, override: Override, call: Call) -> None:
        self._override = override
        self._key = repeatable_key(call)
        self._saved = saved_tensors.HeldBack() if saved_tensors.can_be_held_back() else None

    @classmethod
    def begin(
        cls, override: Override, keyset: torch.DispatchKeySet, call: Call
    ) -> _Repeatable | None:
        """The hit, before its impl runs; None if it is another one, or what it raises is raised."""
        may_fail = override.on_error == "fallback" and saved_tensors.are_hooked()
        if may_fail and composite.is_differentiated(override, keyset, call):
            return cls(override, call)
        return None

    def __enter__(self) -> None:
        if self._saved is not None:
            self._saved.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._saved is not None:
            self._saved.__exit__(*error)

    def end(self) -> None:
        """Give hooks what was saved, and remember who took the call."""
        self._override.state.note_repeatable(self._key)
        if self._saved is not None:
            self._saved.hand_on()

    def fail(self, error: Exception) -> None:
        """Remember that native runs the call.

        Raises:
            OpgraftError: a backward runs, and the impl worked before: the call is a second forward,
                to whose first one native's tensors do not belong.
        """
        state, override = self._override.state, self._override
        if state.is_repeatable(self._key) and torch._C._current_graph_task_id() != -1:
            raise OpgraftError(
                f"{contract.display_name(override)} failed where checkpointing runs a call again "
                "that it took before, and native cannot take its place, as it saves other "
                f"tensors; opgraft.disable(name={override.name!r}) leaves such calls to native"
            ) from error
        state.forget_repeatable(self._key)


def _hit(
    router: Router,
    override: Override,
    keyset: torch.DispatchKeySet,
    call: Call,
    call_device: torch.device | None,
    capturing: bool,
    recording: Recording | None,
) -> Any:
    def run_native(each: Call) -> Any:
        return router.run_native(keyset, each)

    def run_native_to_compare(each: Call) -> Any:
        # Hooks get what the impl saves. Checkpointing counts it.
        are_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        hooks = torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing)
        with hooks if are_enabled else nullcontext():
            return run_native(each)

    in_python = not router.is_compiled
    differentiated = composite.is_differentiated(override, keyset, call)
    compared_with = run_native_to_compare if differentiated else run_native
    keeps_books = in_python and router.is_composite and not differentiated
    bookkeeping = composite.bookkeeping_for(call) if keeps_books else None
    # Before the impl runs, because an impl may write to its arguments.
    check = None
    if not capturing:
        check = contract.begin(
            *(override, call, compared_with),
            always=recording is not None,
            differentiated=differentiated,
        )
    compared = shadow.begin_if_sampled(override, call) if in_python else None
    override.state.hits.add()
    with (
        threads.running(call.op, router.chain) as frame,
        device.guard(call_device),
        profile.record(override) if in_python else nullcontext(),
        nullcontext() if recording is None else recording.watching(),
    ):
        result = run_impl(router, override, keyset, call)
    contract.checked_outputs(override, result)
    if frame.ended_in_native(result):
        override.state.fallbacks.add()
        observers.note_fallback()
    if check is not None:
        check.end(result, lambda each: _run_again(router, override, keyset, each))
    if not capturing and call_device is not None and call_device.type == "cuda":
        override.state.note_run(exact_key(call))
    if bookkeeping is not None:
        result = bookkeeping.finish(result)
    if differentiated:
        composite.check_differentiated(override, result)
    if compared is None:
        return result
    native_result = shadow.end(override, compared, result, run_native)
    return result if native_result is None else native_result


def _nothing(_: Any) -> Any:
    """For a graph that nobody runs. To keep the tensor itself would be a cycle through C++."""


def run_impl(router: Router, override: Override, keyset: torch.DispatchKeySet, call: Call) -> Any:
    """Run the impl as a native kernel at its key runs: below autograd.

    If autograd differentiates what it calls, it runs as a composite kernel does.
    """
    leading: tuple[torch.DispatchKeySet, ...] = ()
    differentiated = composite.is_differentiated(override, keyset, call)
    if override.takes_keyset:
        below = router.is_composite and not differentiated
        leading = (composite.below_autograd(keyset) if below else keyset,)
    excluded = router.excluded
    if differentiated:
        excluded = composite.without_autograd(excluded)
    with composite.excluding(excluded):
        return impl_of(override)(*leading, *call.args, **call.kwargs)


def impl_of(override: Override) -> Callable[..., Any]:
    """What runs for an override: its impl, wrapped in a compile timeout if one is set."""
    if override.state.impl is None:
        override.state.impl = timebox.impl_of(override)
    return override.state.impl


def fall_back(
    router: Router, override: Override, keyset: torch.DispatchKeySet, call: Call, error: Exception
) -> Any:
    """Run the native kernel after an impl raised, and quarantine the override for this kind.

    Raises:
        Exception: what native raised, if it raises as well.
    """
    result = router.run_native(keyset, call)
    failure.quarantine(override, kind_of(call), error)
    override.state.fallbacks.add()
    observers.note_fallback(error)
    return result


def _run_again(
    router: Router, override: Override, keyset: torch.DispatchKeySet, call: Call
) -> None:
    """Run the impl on copies for the contract check. This counts as no hit."""
    call_device = device.of_call(call, override.dispatch_key)
    with threads.running(call.op, router.chain), device.guard(call_device):
        run_impl(router, override, keyset, call)
