"""Noticing values that Python reads behind the ops' back, which a plan would hold as constants.

`item`, `tolist`, `numpy` and what comes by them call ops, which the recorder sees. DLPack does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from opgraft.plan.patches import Patches

if TYPE_CHECKING:
    from opgraft.plan.recording import Recording

_patches = Patches()


@contextmanager
def watching(recording: Recording) -> Iterator[None]:
    """While this lasts, handing a tensor's memory on this thread to another library is refused.

    On the CPU alone, where whoever gets it can read it at once. Kernels get theirs inside a launch.
    """
    with _patches.applied(recording, _replacements):
        yield


def _replacements() -> dict[tuple[type, str], Any]:
    return {(torch.Tensor, "__dlpack__"): _refusing(torch.Tensor.__dlpack__)}


def _refusing(original: Any) -> Any:
    def __dlpack__(self: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        recording = _patches.current
        if recording is not None and self.device.type == "cpu":
            recorder = recording.recorder
            if not recorder.inside_op and not recorder.inside_call:
                recorder.refuse("it hands a tensor's memory on by DLPack, where values are read")
        return original(self, *arguments, **keywords)

    return __dlpack__
