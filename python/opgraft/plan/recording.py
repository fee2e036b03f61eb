"""Recording one run of an impl: what is watched while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from opgraft.ops.schema import Call
from opgraft.plan import ffi_calls, reads, triton_launches

if TYPE_CHECKING:
    from opgraft.core.interface import Core, Router


class Recording:
    """One run of an impl that is watched, to make a launch plan of it."""

    def __init__(
        self,
        core: Core,
        router: Router,
        call: Call,
        device: torch.device,
    ) -> None:
        self.call = call
        #: The core's half, which adapters tell of launches.
        self.recorder = router.recorder(call.values, device)
        #: What the plan keeps alive: compiled kernels.
        self.keep: list[Any] = []
        self._core = core
        self._router = router
        self._was_watched = False
        #: The current stream when the recording began.
        self.stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0

    @property
    def refusal(self) -> str:
        """Why no plan can be made of the run; empty where one can."""
        return str(self.recorder.refusal)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, what happens on this thread is recorded."""
        if self._core.current_recorder() is not None:
            self.recorder.refuse("it runs inside another impl that is being recorded")
            yield
            return
        with ExitStack() as stack:
            for adapter in (triton_launches, ffi_calls, reads):
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
        return self._router.finish(self.recorder, result, self.keep)
