"""The devices of a call: whether its tensors live together, and the guard an impl runs under."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from opgraft.ops.schema import Call


def of(call: Call) -> torch.device | None:
    """The device that the call's tensors live on; None where it has no tensors.

    A 0-dim CPU tensor beside tensors of another device does not count: numbers, and the seeds of
    the random generator, come that way.
    """
    tensors = list(call.tensors())
    devices = [t.device for t in tensors if t.device.type != "cpu" or t.ndim > 0]
    if devices:
        return devices[0]
    return tensors[0].device if tensors else None


def at(call: Call, dispatch_key: str) -> torch.device | None:
    """The device that a call works on that came to a dispatch key; None where it has none.

    A call without tensors, such as one that makes some, says where by an argument, or means the
    key's current device.
    """
    if any(tensor.device.type != "cpu" or tensor.ndim > 0 for tensor in call.tensors()):
        return of(call)
    device = _of_key(dispatch_key)
    if device is None:
        return of(call)
    given = (value for value in call.named.values() if isinstance(value, torch.device))
    return next((each for each in given if each.type == device.type), device)


@cache
def _of_key(dispatch_key: str) -> torch.device | None:
    """The kind of device that a backend key is of; None where this torch has no such devices."""
    name = dispatch_key.lower()
    if name == "privateuse1":
        name = torch._C._get_privateuse1_backend_name()
    try:
        return torch.device(name)
    except RuntimeError:
        return None


def mixed(call: Call) -> str | None:
    """Why the call's devices keep every override away; None where they agree.

    A kernel launched with a pointer of another device crashes or reads garbage; the native kernel
    says in words what is wrong.
    """
    tensors = list(call.tensors())
    devices = {t.device for t in tensors if t.device.type != "cpu" or t.ndim > 0}
    if len(devices) < 2:
        return None
    return f"its tensors live on different devices: {', '.join(sorted(map(str, devices)))}"


def guard(device: torch.device | None) -> AbstractContextManager[object]:
    """Make `device` the current one: DSLs compile for and launch on the current device."""
    if device is None or device.type == "cpu" or device.index is None:
        return nullcontext()
    return torch.get_device_module(device.type).device(device.index)  # type: ignore[no-any-return]


def is_capturing(device: torch.device | None) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    if device is None or device.type != "cuda" or not torch.cuda.is_initialized():
        return False  # not initialised: a fake tensor, and maybe a torch built without CUDA
    return torch.cuda.is_current_stream_capturing()


def is_there(kind: str) -> bool:
    """Whether a tensor can have memory on a kind of device here.

    >>> is_there("cpu")
    True
    """
    if kind in ("cpu", "meta"):
        return True
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):
        return False
