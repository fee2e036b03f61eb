"""The native kernel: what was at an op and key before us, kept callable whatever others do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opgraft.ops.schema import Call, Op
from opgraft.router import dispatcher


class NativeKernel:
    """The kernel that an op ran at a dispatch key when the router went in.

    Args:
        op: the op.
        dispatch_key: the backend key.
        reinstall: called when the captured kernel is gone. torch ties a kernel captured in Python
            to its registration: when the third party that registered it takes it back, calling it
            raises. From Python the kernel below ours can only be reached by taking ours out for a
            moment, so `reinstall` does that and captures anew. (A compiled router keeps a copy of
            the kernel and needs none of this.) Without it, the error is the caller's.
    """

    def __init__(
        self, op: Op, dispatch_key: str, reinstall: Callable[[], None] | None = None
    ) -> None:
        self._op = op
        self._dispatch_key = dispatch_key
        self._reinstall = reinstall
        self._kernel: Any | None = None
        #: Where the kernel was registered, as torch says it.
        self.origin = ""
        self.capture()

    def capture(self) -> None:
        self._kernel, self.origin = dispatcher.capture(self._op, self._dispatch_key)

    def __call__(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        kernel = self._kernel
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
            if self._kernel is gone and self._reinstall:  # else another thread was here first
                self._reinstall()
