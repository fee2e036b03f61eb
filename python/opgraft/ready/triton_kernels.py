"""Triton's kernels from a worker to the process that it compiled them for.

What a worker compiles is in Triton's cache on disk. A first launch still takes as long as a step:
Triton hashes itself, builds the launcher of the kernel's signature, and loads the kernel onto the
device. So the worker says which kernels it compiled, and a thread that no call waits for loads
them.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from opgraft.router import device

log = logging.getLogger(__name__)

_CU_STREAM_CAPTURE_MODE_RELAXED = 2

# One at a time: they would only keep each other, and the program, from the interpreter. It may be
# held for seconds: a fork must not wait for it, and its child gets another.
_loading = threading.Lock()


def _forget_in_child() -> None:
    global _loading
    _loading = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)


class CannotSay(Exception):
    """A kernel cannot be described to another process."""


def description(function: Any, kernel: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What another process needs to load a kernel, as JSON has it.

    Args:
        function: the `JITFunction`.
        kernel: what it compiled.
        arguments: what `JITFunction._do_compile` got: the key, the signature, the device, the
            constants, the options, the attributes.

    Raises:
        CannotSay: it has a constant that is no number, string or dtype.
    """
    key, signature, _, constants, options, attributes = arguments[:6]
    return {
        "module": function.fn.__module__,
        "name": function.fn.__qualname__,
        "hash": kernel.hash,
        "arguments": [
            _encoded(each) for each in (key, signature, constants, options.__dict__, attributes)
        ],
    }


def load(descriptions: Iterable[dict[str, Any]], where: torch.device) -> None:
    """Load kernels onto a device. One that cannot be loaded is left to the call that needs it.

    Args:
        descriptions: of the kernels, as :func:`description` returned them.
        where: the device.
    """
    for each in descriptions:
        try:
            with _loading, device.guard(where), _captures_allowed():
                _load(each)
        except Exception as error:  # whatever another version of Triton's makes of it
            log.debug("%s is loaded by the call that needs it: %s", each["name"], error)


def _load(described: dict[str, Any]) -> None:
    from triton.runtime import driver

    found = attrgetter(described["name"])(importlib.import_module(described["module"]))
    while not hasattr(found, "_do_compile"):  # autotuners and heuristics are around it
        found = found.fn
    here = driver.active.get_current_device()
    cache, _, _, backend, _ = found.device_caches[here]
    key, signature, constants, options, attributes = map(_decoded, described["arguments"])
    kernel = cache.get(key)
    if kernel is None:
        options = backend.parse_options(options)
        kernel = found._do_compile(key, signature, here, constants, options, attributes, True)
        if kernel.hash != described["hash"]:  # then it is not what a call would compile
            cache.pop(key, None)
            raise RuntimeError("it was compiled otherwise")
    kernel.run  # noqa: B018 (which builds the launcher and loads the kernel)


@contextmanager
def _captures_allowed() -> Iterator[None]:
    """Let no other thread's capture of a CUDA graph fail for what this thread does meanwhile."""
    mode = ctypes.c_int(_CU_STREAM_CAPTURE_MODE_RELAXED)
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


# --------------------------------------------------------------------------------------------------
# As JSON
# --------------------------------------------------------------------------------------------------


def _encoded(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "_fields"):  # whose kernel reads it by its fields' names
        named = type(value)
        if "<locals>" in named.__qualname__:
            raise CannotSay(f"it has a {named.__name__}, which no other process can import")
        return {"named": [named.__module__, named.__qualname__, *map(_encoded, value)]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encoded(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(name), _encoded(each)] for name, each in value.items()]}
    if type(value).__name__ == "dtype" and type(value).__module__.startswith("triton."):
        return {"dtype": str(value)}
    if type(value).__name__ == "constexpr":
        return {"constexpr": _encoded(value.value)}
    raise CannotSay(f"it has a {type(value).__name__}")


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    import triton.language as tl

    ((kind, content),) = value.items()
    if kind == "dict":
        return {_decoded(name): _decoded(each) for name, each in content}
    if kind == "dtype":
        return tl.dtype(content)
    if kind == "constexpr":
        return tl.constexpr(_decoded(content))
    if kind == "named":
        module, name, *values = content
        return attrgetter(name)(importlib.import_module(module))(*map(_decoded, values))
    several = [_decoded(each) for each in content]
    return tuple(several) if kind == "tuple" else several
