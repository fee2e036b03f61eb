"""Recording calls of tvm-ffi functions, which is how compiled CuteDSL kernels are launched.

A compiled kernel is an object of one of two Python classes. During a recording, their `__call__`
passes the arguments to a function of the core instead of the kernel's. That function gets them as
the kernel would, records them, and calls the kernel.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from opgraft.plan.patches import Patches

if TYPE_CHECKING:
    from opgraft.plan.recording import Recording

_patches = Patches()

#: Where CuteDSL defines what `cute.compile(..., options="--enable-tvm-ffi")` returns.
_PROVIDER = "cutlass.cutlass_dsl.tvm_ffi_provider"
#: Where functions are defined that were loaded without CuteDSL.
_LOADED = "opgraft.cache.loaded"
# The global by which a keyword wrapper that tvm-ffi generates calls the function.
_TARGET = "__i_target_func"


@contextmanager
def watching(recording: Recording) -> Iterator[None]:
    """Record the calls of compiled CuteDSL kernels on this thread."""
    before = _imported()
    if before:
        with _patches.applied(recording, _replacements):
            yield
    else:
        yield
    if _imported() != before:
        recording.recorder.refuse("it imported CuteDSL, so its launches were not recorded")


def _imported() -> list[str]:
    """Which of the modules are there whose classes are patched."""
    return [name for name in ("cutlass", _LOADED) if name in sys.modules]


def _replacements() -> dict[tuple[type, str], Any]:
    found: dict[tuple[type, str], Any] = {}
    provider = sys.modules.get(_PROVIDER)
    for name, patched in (
        ("TVMFFIJitCompiledFunction", positional),
        ("TVMFFIJitCompiledFunctionWithKwargs", with_keywords),
    ):
        owner = getattr(provider, name, None)
        if owner is not None:
            found[owner, "__call__"] = patched(owner.__call__)
    if (loaded := sys.modules.get(_LOADED)) is not None:
        owner = loaded.LoadedFunction
        found[owner, "__call__"] = positional(owner.__call__)
    executor = sys.modules.get("cutlass.base_dsl.jit_executor")
    if executor is not None and hasattr(executor, "JitExecutor"):
        # This launches kernels that were compiled without tvm-ffi, which cannot be recorded.
        owner = executor.JitExecutor
        if "__call__" in owner.__dict__:
            found[owner, "__call__"] = _refusing(owner.__call__)
    return found


def positional(original: Any) -> Any:
    """The replacement for `__call__` of a kernel that is itself a tvm-ffi function."""

    def __call__(self: Any, *arguments: Any) -> Any:
        recording = _patches.current
        if recording is None or recording.recorder.inside_op:
            return original(self, *arguments)
        if getattr(getattr(self, "execution_args", None), "has_pointer_address_arg_specs", False):
            recording.recorder.refuse("a CuteDSL kernel takes raw addresses")
            return original(self, *arguments)
        return _record(recording, self, lambda: _spy()(*arguments), (arguments, {}))

    return __call__


def with_keywords(original: Any) -> Any:
    """The replacement for `__call__` of a kernel with a keyword wrapper for its function."""

    def __call__(self: Any, *arguments: Any, **keywords: Any) -> Any:
        recording = _patches.current
        if recording is None or recording.recorder.inside_op:
            return original(self, *arguments, **keywords)
        wrapper = self._kwargs_wrapper
        addresses = getattr(self.execution_args, "has_pointer_address_arg_specs", False)
        if addresses or _TARGET not in getattr(wrapper, "__globals__", {}):
            recording.recorder.refuse("a CuteDSL kernel is called in an unknown way")
            return original(self, *arguments, **keywords)
        spied = types.FunctionType(
            wrapper.__code__,
            {**wrapper.__globals__, _TARGET: _spy()},
            wrapper.__name__,
            wrapper.__defaults__,
            wrapper.__closure__,
        )
        spied.__kwdefaults__ = wrapper.__kwdefaults__
        function = self.__tvm_ffi_object__()
        call = lambda: spied(*arguments, **keywords)  # noqa: E731 (it is passed on)
        return _record(recording, function, call, (arguments, keywords))

    return __call__


def _refusing(original: Any) -> Any:
    def __call__(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if (recording := _patches.current) is not None:
            recording.recorder.refuse(
                "a CuteDSL kernel was compiled without tvm-ffi: give cute.compile "
                'options="--enable-tvm-ffi"'
            )
        return original(self, *arguments, **keywords)

    return __call__


def _record(recording: Recording, function: Any, call: Any, given: tuple[Any, ...]) -> Any:
    recording.keep_alive.append(function)
    tensors = list(_tensors(given))
    return recording.recorder.ffi_call(function.__chandle__(), tensors, call)


def _spy() -> Any:
    import tvm_ffi

    from opgraft.core import loader

    core = loader.in_use()
    assert core is not None  # recording needs the core
    return tvm_ffi.Function.__from_extern_c__(core.ffi_spy())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors(tuple(getattr(value, name) for name in value.__dataclass_fields__))
