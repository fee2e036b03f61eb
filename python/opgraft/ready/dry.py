"""Running an impl without running its kernels: what it launches is compiled, and recorded.

A worker does this, in a process that has no GPU and creates no CUDA context. The tensors are
PyTorch's fake ones: they have metadata and no memory. Triton compiles for the device that the
request describes, and its launcher is one that launches nothing. Where its interpreter is on, there
is nothing to compile.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from opgraft.cache import cutedsl, origins, plans
from opgraft.cache.entries import Entry
from opgraft.core import loader
from opgraft.ops.schema import Call, resolve
from opgraft.ready import derivative, request, triton_kernels
from opgraft.ready.dry_recording import DryRecording
from opgraft.ready.request import Compiled, Request
from opgraft.ready.triton_kernels import CannotSay
from opgraft.router import composite

#: Fake tensors have addresses from here on, and storages are so many bytes apart: no number that is
#: not an address is as large. csrc/plan_recorder.cpp knows the first, too.
_ADDRESSES, _APART = 2**62, 2**42
#: Bytes by which tensors begin later when an impl is run again: no kernel is specialised on more.
_SHIFT = request.ALIGNMENT


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
        launches = _Launches(names.append, loadable.append)
        if asked["device"] is not None:
            stack.enter_context(_device(asked["device"]["properties"]))
        if importlib.util.find_spec("triton") is not None:
            stack.enter_context(_triton(asked, launches))
        functions = stack.enter_context(_cutedsl(launches)) if asked["dsl"] == "cutedsl" else []
        # Here: a module that asks for the GPU while it is imported is told of the request's.
        impl = request.load(asked["impl"])
        autograd = request.load_derivative(asked["autograd"]) if asked["autograd"] else None
        stack.enter_context(default_dtype(request.decode(asked["default_dtype"])))
        if asked.get("autocast") is not None:
            device_type, dtype = asked["autocast"]
            stack.enter_context(torch.autocast(device_type, request.decode(dtype)))
        key = "CPU" if asked["device"] is None else "CUDA"
        excluded = composite.excluded(resolve(asked["op"]), key)
        stack.enter_context(composite.excluding(excluded))  # as the router does
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._AutoDispatchBelowADInplaceOrView())
        again: _Recorded | None = None
        with FakeTensorMode():
            call = request.call_of(asked)
            leading: tuple[torch.DispatchKeySet, ...] = ()
            if asked["keyset"] is not None:
                leading = (torch._C.DispatchKeySet.from_raw_repr(asked["keyset"]),)
            for value, needed in zip(call.values, asked["needs"], strict=False):
                if needed:
                    value.requires_grad_()  # as the impl gets it
            output = impl(*leading, *call.args, **call.kwargs)
            if autograd is None and asked.get("plan") is not None:
                # Not the first run, which imports modules: what these do as they are imported, such
                # as to make a tensor, is not what a replay would have to do.
                launches.recording = _begin(asked, call)
            if launches.recording is not None:
                with launches.recording.watching():
                    output = impl(*leading, *call.args, **call.kwargs)
            if autograd is not None:
                derivative.run(autograd, call.values, output, asked["needs"])
            first = launches.recording
            if first is not None and not first.refusal:
                again = _record_again(asked, launches, impl)
        # Out of the mode: it reads the numbers that ops got.
        no_plan = _keep(asked, impl, None if first is None else _Recorded(first, output), again)
    # An impl ran several times.
    triton = {json.dumps(each, sort_keys=True): each for each in loadable}
    compiled = [*dict.fromkeys(names + functions)]
    return {"compiled": compiled, "triton": [*triton.values()], "no_plan": no_plan}


def _begin(asked: Request, call: Call) -> DryRecording | None:
    core = loader.load()
    if core is None:
        return None
    is_cpu = asked["device"] is None
    return DryRecording(core, call, torch.device("cpu") if is_cpu else torch.device("cuda", 0))


class _Recorded(NamedTuple):
    """A run that was recorded, and what it returned."""

    recording: DryRecording
    output: Any


def _record_again(asked: Request, launches: _Launches, impl: Callable[..., Any]) -> _Recorded:
    """Run an impl on tensors that differ in what a plan's key does not hold: where they begin in
    their memory, how large that is, and its address."""
    call = request.call_of(asked, _SHIFT)
    recording = _begin(asked, call)
    assert recording is not None
    with launches.told_to(recording), recording.watching():
        return _Recorded(recording, impl(*call.args, **call.kwargs))


def _keep(
    asked: Request, impl: Callable[..., Any], first: _Recorded | None, again: _Recorded | None
) -> str:
    """Write the plan of a run to the cache; why there is none, empty where there is one."""
    if first is None:
        return "no plan was asked for"
    recording = first.recording
    saved = recording.finish(first.output)
    if saved is None:
        return recording.refusal
    assert again is not None
    other = again.recording.finish(again.output)
    if other is None:
        return again.recording.refusal
    if json.dumps(saved) != json.dumps(other) or recording.functions != again.recording.functions:
        return "two runs with the same metadata did different things"
    try:
        modules = request.modules_of(asked["impl"], impl)
        sources = origins.hashes(*modules) | recording.sources
        plans.write(asked["plan"], saved, recording.functions, sources)
    except (OSError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Launches:
    """Who is told of what an impl launches."""

    def __init__(
        self, note: Callable[[str], None], describe: Callable[[dict[str, Any]], None]
    ) -> None:
        self.note = note
        self.describe = describe
        self.recording: DryRecording | None = None
        #: The kernel of the launch that was announced last, and its arguments.
        self._announced: tuple[Any, tuple[Any, ...]] | None = None

    @contextmanager
    def told_to(self, recording: DryRecording) -> Iterator[None]:
        """Tell another recording for a while, and nobody else."""
        before = self.note, self.describe, self.recording
        self.note, self.describe, self.recording = lambda _: None, lambda _: None, recording
        try:
            yield
        finally:
            self.note, self.describe, self.recording = before

    def refuse(self, reason: str) -> None:
        if self.recording is not None:
            self.recording.refuse(reason)

    def announce(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        self._announced = kernel, arguments

    def launch(self, grid: tuple[int, int, int]) -> None:
        """In place of a launch of Triton's."""
        announced, self._announced = self._announced, None
        if self.recording is None:
            return
        if announced is None:
            self.refuse("it does not use Triton's own `kernel[grid](...)`")
        else:
            self.recording.launch(*announced, grid)

    def call_cutedsl(self, entry: Entry, arguments: tuple[Any, ...]) -> None:
        """In place of a call of a function that CuteDSL compiled."""
        if self.recording is not None:
            self.recording.call_cutedsl(entry, arguments)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors of a dtype where none is named."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _addresses() -> Iterator[None]:
    """Give fake tensors an address: kernels are specialised on its alignment, and on no more."""
    storages: dict[int, int] = {}

    def data_ptr(tensor: FakeTensor) -> int:
        storage = storages.setdefault(tensor.untyped_storage()._cdata, len(storages))
        begin = _ADDRESSES + storage * _APART
        return int(begin + tensor.storage_offset() * tensor.element_size())

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
def _triton(asked: Request, launches: _Launches) -> Iterator[None]:
    """Compile, and launch nothing."""
    import triton
    from triton.compiler.compiler import CompiledKernel
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
            kernel = jit_run(self, *args, grid=grid, warmup=warmup or driver is None, **kwargs)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        launches.note(self.fn.__name__)
        if id(kernel) in _descriptions:
            launches.describe(_descriptions[id(kernel)])
        return kernel

    def tune(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Which configuration is best, a call on the device finds. All are compiled for it.
        launches.refuse("it is tuned by a call on the device")
        kwargs.pop("warmup", None)
        return self.warmup(*args, **kwargs)

    def interpret(self: Any, *_: Any, **__: Any) -> None:
        launches.refuse("it runs in Triton's interpreter")

    def launch_metadata(self: Any, grid: Any, stream: Any, *arguments: Any) -> Any:
        launches.announce(self, arguments)
        return known_metadata(self, grid, stream, *arguments)

    driver, known_metadata = None, CompiledKernel.launch_metadata
    with ExitStack() as stack:
        stack.enter_context(mock.patch(f"{__name__}._launches", launches))
        if asked["device"] is not None:
            # For good: Triton would look for a real one to put it back.
            driver = _driver(asked)
            triton.runtime.driver.set_active(driver)
        patches: dict[Any, Any] = {JITFunction: run, Autotuner: tune}
        for kind, function in (patches | {InterpretedFunction: interpret}).items():
            stack.enter_context(mock.patch.object(kind, "run", function))
        announcing = mock.patch.object(CompiledKernel, "launch_metadata", launch_metadata)
        stack.enter_context(announcing)
        compiling = mock.patch.object(JITFunction, "_do_compile", do_compile_and_describe)
        if do_compile is not None:  # a version that has another such method describes nothing
            stack.enter_context(compiling)
        yield


#: Those of the present run. Triton makes a kernel's launcher once, for all runs.
_launches: _Launches | None = None
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
def _cutedsl(launches: _Launches) -> Iterator[list[str]]:
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
        yield stack.enter_context(cutedsl.compiling_for_others(launches.call_cutedsl))


def _build_launcher(source: Any, metadata: Any) -> None:
    """Have Triton keep on disk the launcher that it compiles for each signature, where it does."""
    from triton.backends.nvidia.driver import CudaLauncher

    with contextlib.suppress(Exception):  # no compiler or driver here: whoever launches needs them
        CudaLauncher(source, metadata)


def _driver(asked: Request) -> Any:
    """A driver of Triton's that knows for which device is compiled, and launches nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    properties = asked["device"]["properties"]
    capability = 10 * properties["major"] + properties["minor"]

    class Launcher:
        """As Triton's own: made once for each kernel."""

        def __init__(self, source: Any, metadata: Any) -> None:
            if asked.get("builds_launchers"):
                _build_launcher(source, metadata)

        def __call__(self, x: int, y: int, z: int, stream: int, function: int, *_: Any) -> None:
            if _launches is not None:
                _launches.launch((x, y, z))

    class Utils:
        """As Triton's own: what looks at the device, and loads kernels onto it."""

        def load_binary(self, *_: Any) -> tuple[int, ...]:
            return 1, 1, 0, 0, properties.get("max_threads_per_block", 1024)

        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": properties.get("shared_memory_per_block_optin", 2**31 - 1)}

    class CompileOnly(DriverBase):  # type: ignore[misc]
        launcher_cls = Launcher

        def __init__(self) -> None:
            self.utils = Utils()

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, kind: str) -> str:
            return kind

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return capability  # by which Triton knows what it compiled: no other device's

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> Any:
            raise RuntimeError("nothing is measured without a device")

    return CompileOnly()
