"""A hit: what happens from the guard of its device to what its caller gets, in this order.

Both routers run their hits in Python here. The core runs warm hits itself, alike
(csrc/python_impl.cpp); for first hits and for recordings it asks this one, having done for them
what it does for its own: see `Router.is_compiled`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from opgraft.ops.schema import Call
from opgraft.registry import Override
from opgraft.router import (
    composite,
    contract,
    device,
    failure,
    observers,
    profile,
    shadow,
    threads,
    timebox,
)
from opgraft.router.base import Router
from opgraft.router.signature import exact_key, signature


class Recording(Protocol):
    """A hit that is being recorded, for a launch plan."""

    def watching(self) -> AbstractContextManager[object]:
        """While this lasts, what the impl launches is written down."""


def hit(
    router: Router,
    override: Override,
    keyset: torch.DispatchKeySet,
    call: Call,
    recording: Recording | None = None,
) -> Any:
    """Run an override's impl on a call that it takes.

    Args:
        router: whose call it is.
        override: the override.
        keyset: the call's dispatch keys.
        call: the call.
        recording: what watches the impl; a hit that is recorded is always compared with native,
            because its replays are not.

    Returns:
        What the caller gets: what the impl returned, or native's result where the hit fell back.

    Raises:
        ContractError: the impl returned something else than native promises.
        Exception: the impl's own, where the hit may not fall back.
    """
    where = device.at(call, override.dispatch_key)
    capturing = device.is_capturing(where)
    observers.note_hit(override)
    try:
        return _hit(router, override, keyset, call, where, capturing, recording)
    except Exception as error:
        if not failure.may_fall_back(override, error, call, capturing=capturing):
            raise
        return fall_back(router, override, keyset, call, error)


def _hit(
    router: Router,
    override: Override,
    keyset: torch.DispatchKeySet,
    call: Call,
    where: torch.device | None,
    capturing: bool,
    recording: Recording | None,
) -> Any:
    def native(each: Call) -> Any:
        return router.run_native(keyset, each)

    in_python = not router.is_compiled
    books = composite.bookkeeping(call) if in_python and router.is_composite else None
    # Before the impl runs: one that writes to its arguments changes what they are.
    check = None if capturing else contract.begin(override, call, native, recording is not None)
    compared = shadow.begin_if_drawn(override, call) if in_python else None
    override.state.hits.add()
    with (
        threads.running(call.op, router.chain) as frame,
        device.guard(where),
        profile.record(override) if in_python else nullcontext(),
        nullcontext() if recording is None else recording.watching(),
    ):
        result = run_impl(router, override, keyset, call)
    contract.returned(override, result)
    if frame.ended_in_native(result):
        override.state.fallbacks.add()
        observers.note_fallback()
    if check is not None:
        check.end(result, lambda each: _run_again(router, override, keyset, each))
    if not capturing and where is not None and where.type == "cuda":
        override.state.note_ran(exact_key(call))
    if books is not None:
        result = books.settle(result)
    if compared is None:
        return result
    natives = shadow.end(override, compared, result, native)
    return result if natives is None else natives


def run_impl(router: Router, override: Override, keyset: torch.DispatchKeySet, call: Call) -> Any:
    """Run the impl as a native kernel at its key would run: below autograd."""
    leading: tuple[torch.DispatchKeySet, ...] = ()
    if override.takes_keyset:
        leading = (composite.below(keyset) if router.is_composite else keyset,)
    with composite.as_a_kernel(router.excluded):
        return impl_of(override)(*leading, *call.args, **call.kwargs)


def impl_of(override: Override) -> Callable[..., Any]:
    """What is run for an override: its impl, with the bound on compiling where there is one."""
    if override.state.impl is None:
        override.state.impl = timebox.impl_of(override)
    return override.state.impl


def fall_back(
    router: Router, override: Override, keyset: torch.DispatchKeySet, call: Call, error: Exception
) -> Any:
    """Run the native kernel instead of an impl that raised, and keep calls of this kind from it.

    Raises:
        Exception: native's own. Where native raises as well, that is the error.
    """
    result = router.run_native(keyset, call)
    failure.quarantine(override, signature(call), error)
    override.state.fallbacks.add()
    observers.note_fallback(error)
    return result


def _run_again(
    router: Router, override: Override, keyset: torch.DispatchKeySet, call: Call
) -> None:
    """Run the impl on other arguments, for its contract to be checked: that is no hit."""
    where = device.at(call, override.dispatch_key)
    with threads.running(call.op, router.chain), device.guard(where):
        run_impl(router, override, keyset, call)
