"""Descriptions of values for messages: a tensor's dtype and sizes, and other details."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Returns a further detail of a tensor; empty if there is nothing to say.
Detail = Callable[[torch.Tensor], str]


def strides(tensor: torch.Tensor) -> str:
    """Its strides, if it is not contiguous."""
    return "" if tensor.is_contiguous() else f" strides {list(tensor.stride())}"


def offset(tensor: torch.Tensor) -> str:
    """Its storage offset, if that is not 0."""
    return f" offset {tensor.storage_offset()}" if tensor.storage_offset() else ""


def accelerator(tensor: torch.Tensor) -> str:
    """Its device, if that is not the CPU."""
    return "" if tensor.device.type == "cpu" else f" {tensor.device}"


def device(tensor: torch.Tensor) -> str:
    """Its device."""
    return f" on {tensor.device}"


def gradient(tensor: torch.Tensor) -> str:
    """Whether it requires grad."""
    return ", requires grad" if tensor.requires_grad else ""


def describe(value: Any, *details: Detail) -> str:
    """A value as text for people.

    Args:
        value: an argument or an output of an op.
        *details: what to say of tensors after their dtype and sizes.

    >>> x = torch.empty(2, 3, dtype=torch.bfloat16).t()
    >>> describe(x), describe([x, None, torch.float16], strides)
    ('bfloat16[3, 2]', '[bfloat16[3, 2] strides [1, 3], None, float16]')
    """
    if isinstance(value, torch.Tensor):
        text = f"{dtype_name(value.dtype)}{list(value.shape)}"
        return text + "".join(detail(value) for detail in details)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(describe(each, *details) for each in value)}]"
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


def dtype_name(dtype: torch.dtype) -> str:
    """
    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device | None) -> str:
    """The name of a device's hardware, if it has one.

    >>> device_name(torch.device("cpu"))
    'cpu'
    """
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(device)
