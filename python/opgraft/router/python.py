"""The router in Python, from the dispatcher to an override or the native kernel.

It defines what routing means: the compiled router is tested against it. It also replaces the
compiled router where there is none. It costs microseconds and holds the GIL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from opgraft.ops.schema import Call, is_current, resolve
from opgraft.registry import Chain, Override
from opgraft.router import composite, device, dispatcher, observers, threads
from opgraft.router.base import Router
from opgraft.router.decision import keeps_place, takes
from opgraft.router.hit import hit
from opgraft.router.native import NativeKernel


class PythonRouter(Router):
    """The kernel that torch's dispatcher calls call_device calls are routed in Python."""

    is_compiled = False

    def __init__(self, chain: Chain, withdraw: Callable[[bool], None]) -> None:
        self._withdraw = withdraw
        #: Of what else was registered for it.
        self.libraries: list[torch.library.Library] = []
        super().__init__(chain)

    def _install(self) -> None:
        from opgraft.ops import wrapped_number

        op, key = self.chain.op, self.chain.dispatch_key
        wrapped_number.prepare()
        self.is_composite = dispatcher.is_composite(op, key)
        self.has_own_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(op.name, key)
        self.excluded = composite.excluded(op, key)
        if self.is_composite:
            self.composite_kernel = composite.CompositeAutogradKernel(self.chain, self)
        self._native = NativeKernel(op, key, self._reinstall)
        self._library = dispatcher.register(op, key, self)
        if self.composite_kernel is not None:
            self.libraries.append(self.composite_kernel.library)

    def deregister(self) -> None:
        # Not for threads: torch frees a kernel in Python at once, whoever is calling it.
        for library in (self._library, *self.libraries):
            library._destroy()

    @property
    def is_outdated(self) -> bool:
        # Sometimes of an op that is the same: its overrides are lost, with a warning, but no call
        # runs a former op's kernels. Nothing else tells.
        return not is_current(self.chain.op)

    def result_of_new_op(
        self, keyset: torch.DispatchKeySet, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Pass a call on to its op if that was defined anew; NotImplemented if it was not."""
        if sys.is_finalizing() or not self.is_outdated:
            return NotImplemented
        self._withdraw(True)
        return resolve(self.chain.op.name).overload.redispatch(keyset, *args, **kwargs)

    def _reinstall(self) -> None:
        self._library._destroy()
        self._native.capture()
        self._library = dispatcher.register(self.chain.op, self.chain.dispatch_key, self)

    @property
    def native_origin(self) -> str:
        return self._native.origin or dispatcher.capture_for_all_backends(self.chain.op)[1]

    def __call__(self, keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        result = self.result_of_new_op(keyset, args, kwargs)
        if result is not NotImplemented:
            return result
        call = self.chain.op.bind(args, kwargs)
        if sys.is_finalizing():
            return self.run_native(keyset, call)
        if threads.is_bypassed(self.chain):
            result = self.run_native(keyset, call)
            threads.note_native(self.chain, result)
            return result
        return observers.route_observed(self.chain, call, lambda: self._route(keyset, call))

    def _route(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        return self.route_to(self.chain.active, keyset, call)

    def route_to(
        self, overrides: Iterable[Override], keyset: torch.DispatchKeySet, call: Call
    ) -> Any:
        """Run a call by the first of these overrides that takes it, or natively."""
        for override in overrides:
            call_device = device.of_call(call, override.dispatch_key)
            if takes(override, call, capturing=device.is_capturing(call_device)):
                return hit(self, override, keyset, call)
            if keeps_place(override, call):
                break
        return self.run_native(keyset, call)

    def run_native(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        """Run what a call with these keys runs without opgraft."""
        if self.composite_kernel is not None and composite.is_at_autograd(keyset):
            return self.composite_kernel.composite(keyset, call)
        return self._native(keyset, call)
