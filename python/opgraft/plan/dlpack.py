"""Refusing recordings in which Python reads values by DLPack: a plan would hold them as constants.

`item`, `tolist`, `numpy` and the like call ops, which the recorder sees. DLPack calls none.
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
    """Refuse a recording on this thread that passes a CPU tensor's memory to another library.

    Only CPU memory can be read at once. Kernels get their tensors inside a launch.
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
                recorder.refuse("it passes a tensor's memory on by DLPack, which may read values")
        return original(self, *arguments, **keywords)

    return __dlpack__
