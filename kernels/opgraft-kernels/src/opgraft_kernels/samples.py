"""Tensors that samples of several families have alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

__all__ = ["MEASURED", "Calls", "dtypes_and_float64_on", "dtypes_on", "tensor_of"]

#: Calls of an op, each as its arguments by name.
Calls: TypeAlias = Iterator[dict[str, Any]]

#: The dtype of calls that are measured, by the bytes of an element.
MEASURED = {2: torch.bfloat16, 4: torch.float32}


def dtypes_on(device: torch.device) -> list[torch.dtype]:
    """The floats of samples: without bfloat16 on the CPU, where Triton's interpreter is wrong."""
    dtypes = [torch.float32, torch.float16]
    return dtypes if device.type == "cpu" else [*dtypes, torch.bfloat16]


def dtypes_and_float64_on(device: torch.device) -> list[torch.dtype]:
    """The floats of `dtypes_on`, and on a GPU float64, which conditions leave to native."""
    dtypes = dtypes_on(device)
    return dtypes if device.type == "cpu" else [*dtypes, torch.float64]


def tensor_of(
    shape: tuple[int, ...], particular: str, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Random numbers, of a layout or with values that are particular.

    Args:
        shape: of two dimensions for ``"transposed"`` and ``"NaN"``.
        particular: ``"transposed"``, ``"sliced"``, ``"expanded"`` or ``"channels last"`` in memory;
            ``"masked"``, ``"NaN"`` or ``"beyond"`` (float16) in its values; ``"broadcast"``: the
            first row alone; anything else: neither.
        dtype: of the tensor.
        device: where it is to live.
    """
    if particular == "transposed":
        return torch.randn(shape[::-1], dtype=dtype, device=device).t()
    if particular == "sliced":
        return torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device)[..., : shape[-1]]
    if particular == "expanded":
        return torch.ones((), dtype=dtype, device=device).expand(shape)
    tensor = torch.randn(shape, dtype=dtype, device=device)
    if particular == "masked":
        tensor[..., shape[-1] // 3 :] = -torch.inf
        tensor[0] = -torch.inf
    if particular == "NaN":
        tensor[0, 0], tensor[1, 1] = torch.nan, torch.inf
    if particular == "beyond":
        tensor *= 2.0**15
    if particular == "channels last":
        tensor = tensor.to(memory_format=torch.channels_last)
    return tensor[:1] if particular == "broadcast" else tensor
