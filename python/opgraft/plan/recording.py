"""The recording of one run of an impl."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from opgraft.ops.schema import Call
from opgraft.plan import dlpack, ffi_calls, triton_launches

if TYPE_CHECKING:
    from opgraft.core.interface import Core, Router


class Recording:
    """One run of an impl that is recorded, for a launch plan."""

    def __init__(
        self,
        core: Core,
        router: Router,
        call: Call,
        device: torch.device,
    ) -> None:
        self.call = call
        #: The core's recorder. Adapters report launches to it.
        self.recorder = router.recorder(call.values, device)
        #: Objects that must live as long as the plan: compiled kernels.
        self.keep_alive: list[Any] = []
        self._core = core
        self._router = router
        self._was_watched = False
        #: The current stream when the recording began.
        self.stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0

    @property
    def refusal(self) -> str:
        """Why the run gives no plan; empty if it gives one."""
        return str(self.recorder.refusal)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what happens on this thread."""
        if self._core.current_recorder() is not None:
            self.recorder.refuse("it runs inside another impl that is being recorded")
            yield
            return
        with ExitStack() as stack:
            for adapter in (triton_launches, ffi_calls, dlpack):
                stack.enter_context(adapter.watching(self))
            self.recorder.start()
            try:
                yield
            except BaseException as error:
                self.recorder.refuse(f"it raised {type(error).__name__}: {error}")
                raise
            finally:
                self.recorder.stop()
        self._was_watched = True

    def finish(self, result: Any) -> Any | None:
        """The plan of the run, or None and a :attr:`refusal`."""
        if not self._was_watched:
            self.recorder.refuse("it did not run to its end")
        return self._router.finish(self.recorder, result, self.keep_alive)
