"""The device of a call: which one it is, whether all tensors are on it, and a guard for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from opgraft.ops.schema import Call


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short, which is not the fault of the call.

    CUDA itself raises another type than torch's allocator, for a kernel or a context, and each DSL
    one of its own.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("a bad size"))
    (True, False)
    >>> is_out_of_memory(Exception("cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY: out of memory"))
    True
    """
    short = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, short) or "out of memory" in str(error).lower()


def of_tensors(call: Call) -> torch.device | None:
    """The device of the call's tensors; None if it has no tensors.

    A 0-dim CPU tensor beside tensors on another device does not count: numbers and seeds of random
    generators are passed that way.
    """
    tensors = list(call.tensors())
    devices = [t.device for t in tensors if t.device.type != "cpu" or t.ndim > 0]
    if devices:
        return devices[0]
    return tensors[0].device if tensors else None


def of_call(call: Call, dispatch_key: str) -> torch.device | None:
    """The device that a call at a dispatch key works on; None if it has none.

    A call without tensors, such as a factory function's, names its device by an argument. Without
    one it means the key's current device.
    """
    if any(tensor.device.type != "cpu" or tensor.ndim > 0 for tensor in call.tensors()):
        return of_tensors(call)
    device = _of_key(dispatch_key)
    if device is None:
        return of_tensors(call)
    given = (value for value in call.named.values() if isinstance(value, torch.device))
    return next((each for each in given if each.type == device.type), device)


@cache
def _of_key(dispatch_key: str) -> torch.device | None:
    """The type of device of a backend key; None if this torch has no such devices."""
    name = dispatch_key.lower()
    if name == "privateuse1":
        name = torch._C._get_privateuse1_backend_name()
    try:
        return torch.device(name)
    except RuntimeError:
        return None


def why_mixed(call: Call) -> str | None:
    """Why the call's devices rule out every override; None if all tensors are on one device.

    A kernel that gets another device's pointer crashes or reads garbage. The native kernel raises
    an error that says what is wrong.
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
        return False  # not initialised: the tensor is fake, and torch may be built without CUDA
    return torch.cuda.is_current_stream_capturing()


def is_available(kind: str) -> bool:
    """Whether a type of device is available here.

    >>> is_available("cpu")
    True
    """
    if kind in ("cpu", "meta"):
        return True
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):
        return False
