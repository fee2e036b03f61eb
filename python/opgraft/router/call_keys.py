"""Keys of a call: its kind, for checks and quarantine, and its exact metadata."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from opgraft.ops.schema import Argument, Call
from opgraft.when.nodes import address

#: Integers that select a behaviour (`dim`) are part of a call's kind up to this absolute value.
MAX_CHOICE = 16


def kind_of(call: Call) -> Hashable:
    """The call's kind: all that its outputs' dtypes, ranks and layouts can depend on.

    For a tensor: dtype, rank and layout class. For any other argument: whether it is given, its
    type, and its value if it selects a behaviour (booleans, dtypes, layouts, memory formats,
    devices, strings, and small integers that cannot be symbolic, such as `dim`). Sizes and other
    numbers are left out, so that there are few kinds. The state of autocast is part of the kind.
    `kind_of` in csrc/python_impl.cpp does the same.
    """
    return (*map(_argument_kind, call.op.arguments, call.values), *_autocast(call))


def exact_key(call: Call) -> Hashable:
    """Everything that a compiled kernel can be specialised on: sizes and alignment too."""
    return tuple(map(_exact_argument, call.values))


def repeatable_key(call: Call) -> Hashable:
    """What a call has in common with itself when checkpointing runs it again.

    Of two calls with this key the kind is the same.
    """
    return exact_key(call), _autocast(call)


def _autocast(call: Call) -> tuple[Hashable, ...]:
    """The ops inside a native kernel may go through autocast, although an impl does not."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    devices = sorted({tensor.device.type for tensor in call.tensors()})
    return tuple(
        ("autocast", device, torch.get_autocast_dtype(device))
        for device in devices
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    )


def _argument_kind(argument: Argument, value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        # Of a list of sizes only the length counts, so that sizes do not multiply the kinds.
        return (
            len(value),
            *(_argument_kind(argument, item) for item in value if _is_part_of_kind(argument, item)),
        )
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.ndim, _layout_class(value))
    is_choice = isinstance(value, _CHOICE_TYPES)
    if type(value) is int:
        is_choice = argument.is_choice and abs(value) <= MAX_CHOICE
    kind = type(value).__name__
    return (kind, value) if is_choice else kind


def _is_part_of_kind(argument: Argument, item: Any) -> bool:
    return argument.is_choice if type(item) is int else not isinstance(item, float)


_CHOICE_TYPES = (
    *(bool, str),
    *(torch.dtype, torch.layout, torch.memory_format, torch.device),
)


def _layout_class(tensor: torch.Tensor) -> str:
    if tensor.is_contiguous():
        return "contiguous"
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    return "strided"


def _exact_argument(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.device, value.shape, value.stride(), address(value) % 16)
    if isinstance(value, (list, tuple)):
        return tuple(map(_exact_argument, value))
    return (type(value), value)
