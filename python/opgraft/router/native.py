"""The native kernel: what an op ran at a key before the router, callable whatever others do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opgraft.ops.schema import Call, Op
from opgraft.router import dispatcher


class NativeKernel:
    """The kernel that an op had at a dispatch key when the router was installed.

    Args:
        op: the op.
        dispatch_key: the backend key.
        reinstall: called when the captured kernel is gone. torch ties a kernel that was captured in
            Python to its registration: once a third party deregisters its kernel, calling it
            raises. Python can reach the kernel below ours only while ours is not registered.
            `reinstall` deregisters ours, captures again and registers ours again. (The compiled
            router has a copy of the kernel and needs none of this.) Without `reinstall` the caller
            gets the error.
    """

    def __init__(
        self, op: Op, dispatch_key: str, reinstall: Callable[[], None] | None = None
    ) -> None:
        self._op = op
        self._dispatch_key = dispatch_key
        self._reinstall = reinstall
        self._kernel: Any | None = None
        #: Where the kernel was registered, as torch reports it.
        self.origin = ""
        self.capture()

    def capture(self) -> None:
        self._kernel, self.origin = dispatcher.capture(self._op, self._dispatch_key)

    def __call__(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        kernel = self._kernel
        if kernel is None:
            kernel, _ = dispatcher.capture_for_all_backends(self._op)
        if kernel is None:
            raise NotImplementedError(
                f"{self._op.name} has no native kernel at {self._dispatch_key}, and no override "
                f"took the call; opgraft.explain({self._op.name!r}, ...) says why"
            )
        try:
            return self._op.as_returned(kernel.call_boxed(keyset, *call.args, **call.kwargs))
        except RuntimeError as error:
            if not self._is_gone(error):
                raise
        self._recapture(kernel)
        return self(keyset, call)

    def _is_gone(self, error: RuntimeError) -> bool:
        gone = "has been invalidated" in str(error) and self.origin in str(error)
        return gone and self._reinstall is not None

    def _recapture(self, gone: Any) -> None:
        with dispatcher.lock:
            if self._kernel is gone and self._reinstall:  # else another thread has done it
                self._reinstall()
