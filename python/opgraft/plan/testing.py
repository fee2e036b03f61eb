"""A kernel that needs no GPU: a C function that is launched, and recorded, at the CPU key."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from opgraft import _core


def launch(function: int, *arguments: Any, name: str = "a C function") -> None:
    """Call a C function as a kernel is launched: `void f(void** parameters, int32_t count)`.

    Args:
        function: its address.
        *arguments: each becomes a parameter: a tensor its address, an int an `int64_t`, a float a
            `double`.
        name: for messages.

    Raises:
        RuntimeError: there is no compiled core, so that nothing could record it.
    """
    core = _core.in_use()
    if core is None:
        raise RuntimeError("launching C functions needs the compiled core")
    if (recorder := core.current_recorder()) is not None:
        recorder.function_call(function, [_described(each) for each in arguments], name)
    values = [_value(each) for each in arguments]
    addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(function)(
        ctypes.cast(addresses, ctypes.c_void_p), len(values)
    )


def scale(x: torch.Tensor, y: torch.Tensor, factor: float) -> None:
    """`y = factor * x`, for contiguous float32 tensors on the CPU, by a function of the core."""
    core = _core.in_use()
    address = 0 if core is None else core.scale_kernel
    launch(address, x, y, x.numel(), factor, name="scale")


def _described(argument: Any) -> tuple[Any, ...]:
    if isinstance(argument, torch.Tensor):
        return ("pointer", argument)
    value = _value(argument)
    return ("value", int.from_bytes(bytes(value), "little"))


def _value(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int64(argument)
