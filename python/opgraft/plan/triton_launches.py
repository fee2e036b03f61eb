"""Recording Triton's launches.

Both ways to launch a kernel, `kernel[grid](...)` of a JIT function and of a compiled one, first
call `CompiledKernel.launch_metadata` with the grid, the stream and the arguments, and then the
kernel's launcher. The first call tells what is launched, and the second that it is launched. A
launch that reaches the launcher in another way is refused.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opgraft.plan import triton_versions
from opgraft.plan.patches import Patches

if TYPE_CHECKING:
    from opgraft.plan.recording import Recording

_patches = Patches()

_FLOATS = {"fp16": ("<e", 2), "fp32": ("<f", 4), "f32": ("<f", 4), "fp64": ("<d", 8)}
_INTEGER = re.compile(r"[iu](\d+)")
_UINT64 = 2**64 - 1
# CPython's object header, then a CUtensorMap at the next multiple of 128 bytes.
_TENSOR_MAP_OFFSET, _TENSOR_MAP_BYTES = 128, 128


class NotRecordable(Exception):
    """The launch cannot be recorded; the message says why."""


class Announced(NamedTuple):
    """The arguments of `launch_metadata` for a launch."""

    kernel: Any
    stream: int
    arguments: tuple[Any, ...]


class _Local(threading.local):
    announced: Announced | None = None


_local = _Local()


class Parameter(NamedTuple):
    """One parameter of a kernel: its description for the core, and its size in bytes."""

    description: tuple[Any, ...]
    size: int


@contextmanager
def watching(recording: Recording) -> Iterator[None]:
    """Record Triton's launches on this thread."""
    if "triton" not in sys.modules:
        yield
        if "triton" in sys.modules:
            recording.recorder.refuse("it imported Triton, so its launches were not recorded")
        return
    with _patches.applied(recording, _replacements):
        yield


def _replacements() -> dict[tuple[type, str], Any]:
    from triton.compiler.compiler import CompiledKernel

    found = {(CompiledKernel, "launch_metadata"): _announcing(CompiledKernel.launch_metadata)}
    if (launcher := _launcher()) is not None:
        found[launcher, "__call__"] = _recording(launcher.__call__)
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        executor = interpreter.GridExecutor
        found[executor, "__call__"] = _refusing(executor.__call__)
    return found


def _launcher() -> Any | None:
    """The class of kernel launchers; None if there is no device."""
    if not torch.cuda.is_available():
        return None
    from triton.runtime import driver

    return driver.active.launcher_cls


def _announcing(original: Any) -> Any:
    def launch_metadata(self: Any, grid: Any, stream: Any, *arguments: Any) -> Any:
        if _patches.current is not None:
            _local.announced = Announced(self, stream, arguments)
        return original(self, grid, stream, *arguments)

    return launch_metadata


def _recording(original: Any) -> Any:
    def __call__(self: Any, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> Any:
        recording = _patches.current
        if recording is not None and not recording.recorder.inside_op:
            try:
                _record(recording, self, (x, y, z), stream, function)
            except Exception as error:  # whatever fails, the launch itself goes on
                recording.recorder.refuse(f"a Triton launch: {error}")
        return original(self, x, y, z, stream, function, *rest)

    return __call__


def _refusing(original: Any) -> Any:
    def __call__(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if (recording := _patches.current) is not None:
            recording.recorder.refuse("it runs in Triton's interpreter")
        return original(self, *arguments, **keywords)

    return __call__


def _record(
    recording: Recording, launcher: Any, grid: tuple[int, int, int], stream: int, function: int
) -> None:
    announced, _local.announced = _local.announced, None
    if announced is None or announced.kernel.function != function:
        raise NotRecordable("it does not use Triton's own `kernel[grid](...)`")
    kernel, metadata = announced.kernel, announced.kernel.metadata
    if metadata.target.backend != "cuda":
        raise NotRecordable(f"kernels for {metadata.target.backend} cannot be recorded")
    _check_device_and_stream(recording, stream)
    if triton_versions.is_instrumented(metadata):
        raise NotRecordable("its kernel is instrumented, for a profiler or a sanitizer")
    if 0 in grid:
        return  # Triton launches nothing
    recording.keep_alive.append(kernel)
    parameters = list(_parameters(kernel, announced.arguments, grid))
    _check_sizes(function, parameters)
    _watch_hooks()
    recording.recorder.watch_hooks()
    recording.recorder.cuda_launch(
        function=function,
        grid=grid,
        threads=metadata.num_warps * metadata.target.warp_size,
        shared=metadata.shared,
        cluster=metadata.num_ctas,
        cooperative=bool(metadata.launch_cooperative_grid),
        dependent=bool(metadata.launch_pdl),
        parameters=[parameter.description for parameter in parameters],
        name=metadata.name,
    )


def _check_device_and_stream(recording: Recording, stream: int) -> None:
    device = recording.recorder.device
    if device.type != "cuda" or torch.cuda.current_device() != device.index:
        raise NotRecordable("it is not on the tensors' device")
    if stream != recording.stream:
        raise NotRecordable("it is not on the stream that was current before")


def _parameters(
    kernel: Any, arguments: tuple[Any, ...], grid: tuple[int, int, int]
) -> Iterator[Parameter]:
    """The kernel's parameters in order. Triton's own two follow the arguments."""
    metadata = kernel.metadata
    descriptors = iter(getattr(metadata, "tensordesc_meta", None) or ())
    signature = kernel.src.signature
    if len(signature) != len(arguments):
        raise NotRecordable(f"{len(arguments)} arguments for {len(signature)} parameters")
    for type_, value in _flattened(tuple(signature.values()), arguments):
        if type_.startswith("tensordesc"):
            yield from _tensor_descriptor(value, next(descriptors, None))
        else:
            yield _parameter(type_, value)
    scratch = metadata.global_scratch_size
    if scratch:
        size = grid[0] * grid[1] * grid[2] * metadata.num_ctas * scratch
        yield Parameter(("scratch", size), 8)
    else:
        yield Parameter(("pointer", None), 8)
    yield Parameter(("pointer", None), 8)


def _flattened(types: tuple[Any, ...], values: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Types and values with tuples flattened and without constants, as the launcher takes them."""
    for type_, value in zip(types, values, strict=True):
        if isinstance(type_, tuple):
            yield from _flattened(type_, tuple(value))
        elif type_ != "constexpr":
            yield type_, value


def _parameter(type_: str, value: Any) -> Parameter:
    if type_.startswith("*"):
        return Parameter(("pointer", _tensor(value)), 8)
    if type_ in _FLOATS:
        layout, size = _FLOATS[type_]
        return Parameter(_value(int.from_bytes(struct.pack(layout, float(value)), "little")), size)
    if type_ == "bf16":
        (bits,) = struct.unpack("<I", struct.pack("<f", float(value)))
        return Parameter(_value(bits >> 16), 2)
    if match := _INTEGER.fullmatch(type_):
        return Parameter(_value(int(value)), max(1, int(match[1]) // 8))
    raise NotRecordable(f"an argument of type {type_}")


def _value(bits: int) -> tuple[Any, ...]:
    return ("value", bits & _UINT64)


def _tensor(value: Any) -> torch.Tensor | None:
    value = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value
    if value is None or isinstance(value, torch.Tensor):
        return value
    raise NotRecordable(f"a pointer that is no tensor, but {type(value).__name__}")


def _tensor_descriptor(descriptor: Any, meta: Any) -> Iterator[Parameter]:
    """The parameters that the launcher passes for a tensor descriptor of the host."""
    expanded = triton_versions.launch_arguments(descriptor, meta)
    rank = len(descriptor.shape)
    head, shape, strides = expanded[: -2 * rank], expanded[-2 * rank : -rank], expanded[-rank:]
    if meta is None:
        yield _parameter("*", head[0])
        yield from (_parameter("i64", value) for value in head[1 : 1 + 2 * rank])
        yield from (_parameter("i1", value) for value in head[1 + 2 * rank :])
    else:
        (tensor_map,) = head
        yield Parameter(("map", _bytes_of(tensor_map), _tensor(descriptor.base)), 128)
    yield from (_parameter("i32", value) for value in shape)
    yield from (_parameter("i64", value) for value in strides)


def _bytes_of(tensor_map: Any) -> bytes:
    size = _TENSOR_MAP_OFFSET + _TENSOR_MAP_BYTES
    if type(tensor_map).__basicsize__ != size or id(tensor_map) % _TENSOR_MAP_OFFSET:
        raise NotRecordable("tensor descriptors of this Triton are not known")
    return ctypes.string_at(id(tensor_map) + _TENSOR_MAP_OFFSET, _TENSOR_MAP_BYTES)


def _check_sizes(function: int, parameters: list[Parameter]) -> None:
    """Check the parameters' sizes against those of the machine code, if the driver tells them."""
    from opgraft.core import loader

    core = loader.in_use()
    sizes = core.cuda_parameter_sizes(function) if core is not None else []
    if sizes and sizes != [parameter.size for parameter in parameters]:
        raise NotRecordable(
            f"the kernel's parameters have {sizes} bytes, and those of the launch "
            f"{[parameter.size for parameter in parameters]}: this Triton is not known"
        )


# ---------------------------------------------------------------------------------- launch hooks

_watched = False


def _watch_hooks() -> None:
    """Let the core notice when launch hooks are set in Triton, by a profiler for instance."""
    global _watched
    if not _watched:
        _watch_current_hooks()
        _watched = True


def _watch_current_hooks() -> None:
    from opgraft.core import loader

    runtime = _runtime_knobs()
    lists = [hook.calls for hook in _hooks() if hasattr(hook, "calls")]
    core = loader.in_use()
    assert core is not None  # recording needs the core
    core.watch_launch_hooks(lists, [runtime.__dict__], _hooks_changed)


def _hooks_changed() -> bool:
    """Whether hooks are set, after knobs have changed. Perhaps they are other objects now."""
    if any(getattr(hook, "calls", True) for hook in _hooks()):
        return True
    _watch_current_hooks()
    return False


def _hooks() -> list[Any]:
    runtime = _runtime_knobs()
    return [h for h in (runtime.launch_enter_hook, runtime.launch_exit_hook) if h is not None]


def _runtime_knobs() -> Any:
    from triton import knobs

    return knobs.runtime
