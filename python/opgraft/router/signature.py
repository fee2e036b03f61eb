"""Two keys of a call: its kind, for checks and quarantine; and its exact metadata."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from opgraft.ops.schema import Argument, Call
from opgraft.when.nodes import address

#: Integers up to this size that choose what is done are part of a call's kind.
MAX_CHOICE = 16


def signature(call: Call) -> Hashable:
    """The call's kind: what its outputs' dtypes, ranks and layouts can depend on.

    Of tensors that is dtype, rank and layout class; of other arguments whether they are given,
    their type, and the value of what chooses among few ways: booleans, dtypes, layouts, memory
    formats, devices, strings, small integers that may not be symbols (`dim`). Not sizes, nor
    numbers at large, so that there are few kinds. Autocast counts. `kind_of` of the core is alike.
    """
    return (*map(_kind, call.op.arguments, call.values), *_autocast(call))


def exact_key(call: Call) -> Hashable:
    """Everything that a compiled kernel can be specialised on, sizes and pointer alignment too."""
    return tuple(map(_exact, call.values))


def _autocast(call: Call) -> tuple[Hashable, ...]:
    """What native is made of may go through autocast, though an impl does not."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    devices = sorted({tensor.device.type for tensor in call.tensors()})
    return tuple(
        ("autocast", device, torch.get_autocast_dtype(device))
        for device in devices
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    )


def _kind(argument: Argument, value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        # The length alone, where the items are sizes: those must not multiply the kinds.
        return (len(value), *(_kind(argument, item) for item in value if _counts(argument, item)))
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.ndim, _layout(value))
    is_choice = isinstance(value, _CHOICES)
    if type(value) is int:
        is_choice = argument.is_choice and abs(value) <= MAX_CHOICE
    kind = type(value).__name__
    return (kind, value) if is_choice else kind


def _counts(argument: Argument, item: Any) -> bool:
    return argument.is_choice if type(item) is int else not isinstance(item, float)


_CHOICES = (
    *(bool, str),
    *(torch.dtype, torch.layout, torch.memory_format, torch.device),
)


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
