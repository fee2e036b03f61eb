"""Running an impl without running its kernels: what it launches is compiled, and nothing else.

A worker does this, in a process that has no GPU and creates no CUDA context. The tensors are
PyTorch's fake ones: they have metadata and no memory. Triton compiles for the device that the
request describes. Where its interpreter is on, there is nothing to compile.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from opgraft.cache import cutedsl
from opgraft.core import loader
from opgraft.ready import derivative, request, triton_kernels
from opgraft.ready.request import Compiled, Request
from opgraft.ready.triton_kernels import CannotSay


def run(asked: Request) -> Compiled:
    """Compile what the impl of a request launches.

    Raises:
        CannotAsk: the impl cannot be imported.
        Exception: the impl's own, or a compiler's.
    """
    _say_architecture(asked)
    names: list[str] = []
    loadable: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(_addresses())
        if asked["device"] is not None:
            stack.enter_context(_device(asked["device"]["properties"]))
        if importlib.util.find_spec("triton") is not None:
            stack.enter_context(_triton(asked["device"], names.append, loadable.append))
        functions = stack.enter_context(_cutedsl()) if asked["dsl"] == "cutedsl" else []
        # Here: a module that asks for the GPU while it is imported is told of the request's.
        impl = request.load(asked["impl"])
        autograd = request.load_derivative(asked["autograd"]) if asked["autograd"] else None
        stack.enter_context(_default_dtype(request.decode(asked["default_dtype"])))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._AutoDispatchBelowADInplaceOrView())
        stack.enter_context(FakeTensorMode())
        call = request.call_of(asked)
        leading: tuple[torch.DispatchKeySet, ...] = ()
        if asked["keyset"] is not None:
            leading = (torch._C.DispatchKeySet.from_raw_repr(asked["keyset"]),)
        for value, needed in zip(call.values, asked["needs"], strict=False):
            if needed:
                value.requires_grad_()  # as the impl gets it
        output = impl(*leading, *call.args, **call.kwargs)
        if autograd is not None:
            derivative.run(autograd, call.values, output, asked["needs"])
    return {"compiled": names + functions, "triton": loadable}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _addresses() -> Iterator[None]:
    """Give fake tensors an address: kernels are specialised on its alignment, and on no more."""

    def data_ptr(tensor: FakeTensor) -> int:
        return int(tensor.storage_offset() * tensor.element_size())

    with mock.patch.object(FakeTensor, "data_ptr", data_ptr, create=True):
        yield


@contextmanager
def _device(properties: dict[str, Any]) -> Iterator[None]:
    """Let torch answer for the device of the request, which this process does not have."""
    stream = SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0))
    stands_in: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: stream,
        "get_device_properties": lambda device=None: SimpleNamespace(**properties),
        "get_device_capability": lambda device=None: (properties["major"], properties["minor"]),
        "get_device_name": lambda device=None: properties["name"],
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_lazy_init": lambda: None,
    }
    with ExitStack() as stack:
        for name, function in stands_in.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function, create=True))
        # Which would make a context as soon as torch says that there is a device.
        nothing = mock.patch.object(fake_tensor, "init_gpu_context", lambda *_: None, create=True)
        stack.enter_context(nothing)
        # For good. `contiguous`, `copy_` and indexing guard a tensor's device before they look
        # whether it is a fake one.
        if (core := loader.load()) is not None:
            core.guard_cuda_without_device()
        yield


@contextmanager
def _triton(
    device: dict[str, Any] | None,
    note: Callable[[str], None],
    describe: Callable[[dict[str, Any]], None],
) -> Iterator[None]:
    """Compile in place of launching."""
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    jit_run, do_compile = JITFunction.run, getattr(JITFunction, "_do_compile", None)

    def do_compile_and_describe(self: Any, *arguments: Any) -> Any:
        kernel: Any = do_compile(self, *arguments)  # type: ignore[misc]
        with contextlib.suppress(CannotSay):
            _descriptions[id(kernel)] = triton_kernels.description(self, kernel, arguments)
        return kernel

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fake tensors' addresses
            kernel = jit_run(self, *args, grid=grid, warmup=True, **kwargs)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        note(self.fn.__name__)
        if id(kernel) in _descriptions:
            describe(_descriptions[id(kernel)])
        return kernel

    def tune(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Which configuration is best, a call on the device finds. All are compiled for it.
        kwargs.pop("warmup", None)
        return self.warmup(*args, **kwargs)

    with ExitStack() as stack:
        if device is not None:
            properties = device["properties"]
            # For good: Triton would look for a real one to put it back.
            capability = 10 * properties["major"] + properties["minor"]
            triton.runtime.driver.set_active(_driver(capability))
        patches = {JITFunction: run, Autotuner: tune, InterpretedFunction: lambda *_, **__: None}
        for kind, function in patches.items():
            stack.enter_context(mock.patch.object(kind, "run", function))
        compiling = mock.patch.object(JITFunction, "_do_compile", do_compile_and_describe)
        if do_compile is not None:  # a version that has another such method describes nothing
            stack.enter_context(compiling)
        yield


#: By the `id` of a compiled kernel, which Triton keeps: it is compiled once, whoever asks.
_descriptions: dict[int, dict[str, Any]] = {}


def _say_architecture(asked: Request) -> None:
    """Tell CuteDSL for what to compile. It reads that when it is imported, and looks for a GPU."""
    if asked["dsl"] != "cutedsl" or asked["device"] is None:
        return
    wanted = cutedsl.architecture(SimpleNamespace(**asked["device"]["properties"]))
    if wanted != os.environ.setdefault("CUTE_DSL_ARCH", wanted):
        raise request.CannotAsk(f"this worker compiles for {os.environ['CUTE_DSL_ARCH']} alone")


@contextmanager
def _cutedsl() -> Iterator[list[str]]:
    """Compile functions for the cache; any other way in which CuteDSL compiles is refused.

    What `cute.compile` returns can be called with tensors that have memory alone, and a process
    that has compiled it cannot give it to another one.
    """
    from cutlass.base_dsl.jit_executor import JitExecutor
    from cutlass.cutlass_dsl import tvm_ffi_provider

    def refuse(*_: Any, **__: Any) -> None:
        raise request.CannotAsk(
            "it calls what cute.compile returned; kernels that opgraft.cutedsl_utils.Functions has "
            "compiled are compiled by workers"
        )

    with ExitStack() as stack:
        for kind in (
            JitExecutor,
            tvm_ffi_provider.TVMFFIJitCompiledFunction,
            tvm_ffi_provider.TVMFFIJitCompiledFunctionWithKwargs,
        ):
            stack.enter_context(mock.patch.object(kind, "__call__", refuse))
        yield stack.enter_context(cutedsl.compiling_for_others())


def _driver(capability: int) -> Any:
    """A driver of Triton's that knows for which device is compiled, and launches nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class CompileOnly(DriverBase):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, kind: str) -> str:
            return kind

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> Any:
            raise RuntimeError("nothing is measured without a device")

    return CompileOnly()
