"""The router in Python, from the dispatcher to an override or the native kernel.

It defines what routing means: the compiled router is tested against it. It also replaces the
compiled router where there is none. It costs microseconds and holds the GIL.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from opgraft.ops.schema import Call
from opgraft.router import composite, device, dispatcher, observers, threads
from opgraft.router.base import Router
from opgraft.router.decision import takes
from opgraft.router.hit import hit
from opgraft.router.native import NativeKernel


class PythonRouter(Router):
    """The kernel that torch's dispatcher calls call_device calls are routed in Python."""

    is_compiled = False

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

    def _reinstall(self) -> None:
        self._library._destroy()
        self._native.capture()
        self._library = dispatcher.register(self.chain.op, self.chain.dispatch_key, self)

    @property
    def native_origin(self) -> str:
        return self._native.origin

    def __call__(self, keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        call = self.chain.op.bind(args, kwargs)
        if sys.is_finalizing():
            return self.run_native(keyset, call)
        if threads.is_bypassed(self.chain):
            result = self.run_native(keyset, call)
            threads.note_native(self.chain, result)
            return result
        return observers.route_observed(self.chain, call, lambda: self._route(keyset, call))

    def _route(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        for override in self.chain.active:
            call_device = device.of_call(call, override.dispatch_key)
            if takes(override, call, capturing=device.is_capturing(call_device)):
                return hit(self, override, keyset, call)
        return self.run_native(keyset, call)

    def run_native(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        """Run what a call with these keys runs without opgraft."""
        if self.composite_kernel is not None and composite.is_at_autograd(keyset):
            return self.composite_kernel.composite(keyset, call)
        return self._native(keyset, call)
