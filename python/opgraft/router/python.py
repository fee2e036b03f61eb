"""The router in Python: one call's way from the dispatcher to an impl or to the native kernel.

It is the plain meaning of routing: the oracle that a compiled router is tested against, and its
stand-in where there is none. It costs microseconds and holds the GIL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from opgraft.registry import Chain, Override
from opgraft.router import (
    composite,
    contract,
    device,
    dispatcher,
    failure,
    observers,
    profile,
    shadow,
    threads,
    timebox,
)
from opgraft.router.native import NativeKernel
from opgraft.router.signature import exact_key, signature
from opgraft.schema import Call
from opgraft.when import Condition

if TYPE_CHECKING:
    from opgraft.router.compiled import CompiledNative

#: Exact calls per override that are remembered as run outside a capture.
MAX_WARM = 4096


class Decline(NamedTuple):
    """Why an override does not take a call."""

    reason: str
    kind: Literal["condition", "rule", "disabled", "quarantined"]

    @property
    def is_miss(self) -> bool:
        """Its condition, or a rule that holds for every override, declined: `.misses` counts it."""
        return self.kind in ("condition", "rule")


class PythonRouter:
    """Our kernel at one op and dispatch key: installed once, there for good.

    Making one installs it. What it routes to changes by `chain.active` alone.
    """

    native: NativeKernel | CompiledNative
    #: Whether the op is composed of others here; then what is differentiated never comes by.
    is_composite: bool
    #: The dispatch keys that an impl's own calls do not pass.
    _excluded: torch.DispatchKeySet
    #: Whether the op had a kernel of its own here, not only one for all backends.
    has_own_kernel: bool
    #: What stands at the autograd key of a composite op, where it is in Python.
    companion: composite.AutogradCompanion | None = None

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._install(chain)

    def _install(self, chain: Chain) -> None:
        from opgraft import wrapped_number

        op, key = chain.op, chain.dispatch_key
        wrapped_number.seeds()
        self.is_composite = dispatcher.is_composite(op, key)
        self.has_own_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(op.name, key)
        self._excluded = composite.excluded(op, key)
        if self.is_composite:
            self.companion = composite.AutogradCompanion(self)
        self.native = self._captured = NativeKernel(op, key, self._reinstall)
        self._library = dispatcher.register(op, key, self)

    def _reinstall(self) -> None:
        self._library._destroy()
        self._captured.capture()
        self._library = dispatcher.register(self.chain.op, self.chain.dispatch_key, self)

    def __call__(self, keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        call = self.chain.op.bind(args, kwargs)
        if sys.is_finalizing():
            return self._native(keyset, call)
        if threads.is_bypassed(self.chain):
            result = self._native(keyset, call)
            threads.note_native(self.chain, result)
            return result
        return observers.watch(self.chain, call, lambda: self._route(keyset, call))

    def _route(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        for override in self.chain.active:
            if self._takes(override, call):
                return self._hit(override, keyset, call)
        return self._native(keyset, call)

    def _native(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        """Run what a call with these keys runs without us: at the autograd key, the composite."""
        if self.companion is not None and composite.is_at_autograd(keyset):
            return self.companion.composite(keyset, call)
        return self.native(keyset, call)

    def _takes(self, override: Override, call: Call) -> bool:
        try:
            decline = self._why_not(override, call)
        except Exception as error:  # a cond in Python, or an expression on an odd argument
            if not failure.may_fall_back(override, error, call, capturing=False):
                raise
            failure.quarantine(override, signature(call), error)
            return False
        if decline is not None and decline.is_miss:
            override._misses.add()
        return decline is None

    def _why_not(self, override: Override, call: Call) -> Decline | None:
        where = device.at(call, override.dispatch_key)
        return why_not(override, call, capturing=device.is_capturing(where))

    def _hit(self, override: Override, keyset: torch.DispatchKeySet, call: Call) -> Any:
        where = device.at(call, override.dispatch_key)
        capturing = device.is_capturing(where)
        observers.note_hit(override)
        try:
            return self._run(override, keyset, call, where, capturing)
        except Exception as error:
            if not failure.may_fall_back(override, error, call, capturing=capturing):
                raise
            return self._fall_back(override, keyset, call, error)

    def _fall_back(
        self, override: Override, keyset: torch.DispatchKeySet, call: Call, error: Exception
    ) -> Any:
        result = self._native(keyset, call)  # where native raises as well, that is the error
        failure.quarantine(override, signature(call), error)
        override._fallbacks.add()
        observers.note_fallback(error)
        return result

    def _run(
        self,
        override: Override,
        keyset: torch.DispatchKeySet,
        call: Call,
        where: torch.device | None,
        capturing: bool,
    ) -> Any:
        leading = (self._impl_keyset(keyset),) if override.takes_keyset else ()
        books = self._bookkeeping(call)
        check = None if capturing else self._begin_check(override, keyset, call)
        token = self._begin_shadow(override, call)
        override._hits.add()
        with (
            threads.running(call.op, self.chain) as frame,
            device.guard(where),
            self._profiled(override),
        ):
            result = self._invoke(override, leading, call)
        contract.returned(override, result)
        if frame.ended_in_native(result):
            override._fallbacks.add()
            observers.note_fallback()
        if check is not None:
            check.end(result, lambda again: self._rerun(override, leading, again))
        if not capturing and where is not None and where.type == "cuda":
            _remember(override, exact_key(call))
        if books is not None:
            result = books.settle(result)
        if token is None:
            return result
        other = self._end_shadow(override, keyset, token, result)
        return result if other is None else other

    def _impl_keyset(self, keyset: torch.DispatchKeySet) -> torch.DispatchKeySet:
        return composite.below(keyset) if self.is_composite else keyset

    def _bookkeeping(self, call: Call) -> composite.Bookkeeping | None:
        return composite.bookkeeping(call) if self.is_composite else None

    def _impl(self, override: Override) -> Callable[..., Any]:
        if override.wrapped is None:
            override.wrapped = timebox.impl_of(override)
        return override.wrapped

    def _begin_shadow(self, override: Override, call: Call) -> shadow.Token | None:
        return shadow.begin(override, call) if shadow.draw() else None

    def _end_shadow(
        self, override: Override, keyset: torch.DispatchKeySet, token: shadow.Token, result: Any
    ) -> Any:
        return shadow.end(override, token, result, lambda call: self._native(keyset, call))

    def _profiled(self, override: Override) -> AbstractContextManager[object]:
        return profile.record(override)

    def _invoke(self, override: Override, leading: tuple[Any, ...], call: Call) -> Any:
        impl = self._impl(override)
        with composite.as_a_kernel(self._excluded):
            return impl(*leading, *call.args, **call.kwargs)

    def _is_check_due(self, override: Override, key: Hashable) -> bool:
        return contract.is_due(override, key)

    def _begin_check(
        self, override: Override, keyset: torch.DispatchKeySet, call: Call
    ) -> contract.Check | None:
        # Before the impl runs: one that writes to its arguments changes what they are.
        key = signature(call)
        if not self._is_check_due(override, key):
            return None
        return contract.Check(override, key, call, lambda each: self._native(keyset, each))

    def _rerun(self, override: Override, leading: tuple[Any, ...], call: Call) -> None:
        where = device.at(call, override.dispatch_key)
        with threads.running(call.op, self.chain), device.guard(where):
            PythonRouter._invoke(self, override, leading, call)


def why_not(override: Override, call: Call, *, capturing: bool) -> Decline | None:
    """Why an active override does not take a call; None where it does.

    `capturing`: a CUDA graph is being captured.

    Routing and `explain` both ask here, so that what is explained is what happens.
    """
    if threads.is_off_here(override):
        scope = threads.scope_of(override)
        return Decline(f"switched off on this thread by {scope}", "disabled")
    obstacle = device.mixed(call) or _lazy_bits(call)
    if obstacle is not None:
        return Decline(obstacle, "rule")
    # An expression is asked first, as the core does; one in Python may be what failed.
    is_data = isinstance(override.cond, Condition)
    if is_data and not override.wants(call):
        return Decline("its condition does not hold", "condition")
    if override.quarantined and (error := override.quarantined.get(signature(call))):
        return Decline(f"quarantined after {error}", "quarantined")
    if not is_data and not override.wants(call):
        return Decline("its condition does not hold", "condition")
    if capturing and exact_key(call) not in override.warm:
        return Decline(
            "a CUDA graph is being captured and this call has not run before: compiling would "
            "break the capture",
            "rule",
        )
    return None


def _lazy_bits(call: Call) -> str | None:
    """A tensor whose memory does not hold its values, so that an impl would get them wrong."""
    for tensor in call.tensors():
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return "a tensor is lazily conjugated, negated or zero, and its memory says otherwise"
    return None


def _remember(override: Override, key: Hashable) -> None:
    if key in override.warm:
        return
    if len(override.warm) >= MAX_WARM:
        # Oldest first; `pop` with a default, because another thread may be evicting as well.
        override.warm.pop(next(iter(override.warm), key), None)
    override.warm[key] = None
