"""Two keys of a call: its kind, for checks and quarantine; and its exact metadata."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from opgraft.schema import Call
from opgraft.when import address


def signature(call: Call) -> Hashable:
    """The call's kind: dtypes, ranks and layout classes; not sizes, so that there are few."""
    return tuple(map(_kind, call.values))


def exact_key(call: Call) -> Hashable:
    """Everything that a compiled kernel can be specialised on, sizes and pointer alignment too."""
    return tuple(map(_exact, call.values))


def _kind(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.ndim, _layout(value))
    if isinstance(value, (list, tuple)):
        # The length alone, where the items are numbers: sizes must not multiply the signatures.
        return (len(value), *(_kind(item) for item in value if isinstance(item, torch.Tensor)))
    return type(value).__name__


def _layout(tensor: torch.Tensor) -> str:
    if tensor.is_contiguous():
        return "contiguous"
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    return "strided"


def _exact(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.device, value.shape, value.stride(), address(value) % 16)
    if isinstance(value, (list, tuple)):
        return tuple(map(_exact, value))
    return (type(value), value)
