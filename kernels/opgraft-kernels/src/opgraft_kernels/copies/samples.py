"""Calls of the op: for `opgraft verify` at the ends of the range, for `opgraft tune`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opgraft_kernels.samples import MEASURED, dtypes_on, tensor_of

__all__ = ["calls", "samples"]

#: The shape, and what is particular.
_CASES: tuple[tuple[tuple[int, ...], str], ...] = (
    ((8192,), ""),
    ((64, 130), ""),
    ((3, 1, 1501), ""),
    ((2, 8, 20, 30), "channels last"),
    ((64, 130), "masked"),
    ((64, 130), "NaN"),
    ((64, 130), "beyond"),
    # Native's.
    ((64, 130), "transposed"),
    ((64, 130), "sliced"),
    ((64, 130), "expanded"),
    ((64, 130), "broadcast"),
    ((0, 130), ""),
    ((), ""),
)


def samples(device: torch.device) -> Iterator[dict[str, Any]]:
    """Calls of the op, as arguments by name.

    Args:
        device: where the tensors are to live.
    """
    dtypes = dtypes_on(device)
    for shape, particular in _CASES:
        for source in dtypes:
            for target in [*dtypes, torch.float64]:
                src = tensor_of(shape, particular, source, device)
                if particular == "beyond":  # float16
                    src *= 2.0**15
                if particular == "broadcast":
                    src = src[:1]
                result = torch.zeros(shape, dtype=target, device=device)
                if particular == "channels last":
                    src, result = (
                        each.to(memory_format=torch.channels_last) for each in (src, result)
                    )
                yield {"self": result, "src": src, "non_blocking": False}


def calls(
    device: torch.device, *, elements: int, source: int, target: int
) -> Iterator[dict[str, Any]]:
    """A call to measure, as arguments by name; none if there is no such call.

    Args:
        device: where the tensors are to live.
        elements: of either tensor.
        source: bytes of an element of what is read.
        target: bytes of an element of what is written.
    """
    if source == target == 4:  # there is one such dtype
        return
    reads = MEASURED[source]
    writes = {2: torch.float16, 4: torch.float32}[target]
    yield {
        "self": torch.empty(elements, dtype=writes, device=device),
        "src": torch.randn(elements, dtype=reads, device=device),
        "non_blocking": False,
    }
