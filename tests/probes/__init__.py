"""What tests do in C++ and in a C function: an extension of their own, compiled when first needed.

`python -m tests.probes` compiles it, which takes half a minute; `make test` does so before the
tests, so that their processes need not.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opgraft.core import building, loader

HERE = Path(__file__).resolve().parent


def extension() -> Path:
    """The compiled module's file for the torch that is there."""
    tag = "_".join(torch.__version__.split("+")[0].split(".")[:2])
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    folder = HERE.parents[1] / "build" / "probes" / f"torch{tag}_python{python}"
    return folder / building.digest(HERE) / "opgraft_probes.so"


@cache
def load() -> ModuleType:
    """The module; compiled now where nobody has done it before."""
    file = extension()
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        include = Path(torch.__file__).parent / "include"
        objects = file.parent / "objects"
        building.compile_core(include, file, folder=HERE, objects=objects)
    spec = importlib.util.spec_from_file_location("opgraft_probes", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call_on_a_thread(
    op: str, tensors: list[torch.Tensor], rest: tuple[Any, ...] = (), times: int = 1
) -> float:
    """Call an op from a thread that Python never saw; returns the seconds of one call."""
    seconds: float = load().call_on_a_thread(*_name_and_overload(op), tensors, rest, times)
    return seconds


def needs_no_gil(op: str, tensors: list[torch.Tensor], rest: tuple[Any, ...] = ()) -> bool:
    """Whether a call on another thread gets to its end while this one holds the GIL."""
    answer: bool = load().needs_no_gil(*_name_and_overload(op), tensors, rest)
    return answer


def ends_without_gil(op: str, tensors: list[torch.Tensor], rest: tuple[Any, ...] = ()) -> bool:
    """Whether a thread that called an op ends while this one holds the GIL."""
    answer: bool = load().ends_without_gil(*_name_and_overload(op), tensors, rest)
    return answer


def _name_and_overload(op: str) -> tuple[str, str]:
    name, _, overload = op.partition(".")
    return name, overload


def launch(function: int, *arguments: Any, name: str = "a C function") -> None:
    """Call a C function as a kernel is launched: `void f(void** parameters, int32_t count)`.

    It needs no GPU: it is launched, and recorded, at the CPU key.

    Args:
        function: its address.
        *arguments: each becomes a parameter: a tensor its address, an int an `int64_t`, a float a
            `double`.
        name: for messages.

    Raises:
        RuntimeError: there is no compiled core, so that nothing could record it.
    """
    core = loader.in_use()
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
    """`y = factor * x`, for contiguous float32 tensors on the CPU, by a C function."""
    launch(load().scale_kernel, x, y, x.numel(), factor, name="scale")


def _described(argument: Any) -> tuple[Any, ...]:
    if isinstance(argument, torch.Tensor):
        return ("pointer", argument)
    value = _value(argument)
    return ("value", int.from_bytes(bytes(value), "little"))


def _value(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int64(argument)
