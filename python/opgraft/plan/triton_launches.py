"""Recording Triton's launches.

Both ways to launch a kernel, `kernel[grid](...)` of a JIT function and of a compiled one, first
call `CompiledKernel.launch_metadata` with the grid, the stream and the arguments, and then the
kernel's launcher. The first call tells what is launched, and the second that it is launched. A
launch that reaches the launcher in another way is refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opgraft.dsl.triton_launch import NotRecordable, Parameter, parameters, shape
from opgraft.plan.patches import Patches

if TYPE_CHECKING:
    from opgraft.plan.recording import Recording

_patches = Patches()


class Announced(NamedTuple):
    """The arguments of `launch_metadata` for a launch."""

    kernel: Any
    stream: int
    arguments: tuple[Any, ...]


class _Local(threading.local):
    announced: Announced | None = None


_local = _Local()


@contextmanager
def watching(recording: Recording) -> Iterator[None]:
    """Record Triton's launches on this thread."""
    if "triton" not in sys.modules:
        yield
        if "triton" in sys.modules:
            recording.recorder.refuse("it imported Triton, so its launches were not recorded")
        return
    try:
        with _patches.applied(recording, _replacements):
            yield
    finally:
        _local.announced = None  # a launch that was not recorded would keep its arguments alive


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
    kernel = announced.kernel
    described = shape(kernel, grid)
    _check_device_and_stream(recording, stream)
    if 0 in grid:
        return  # Triton launches nothing
    recording.keep_alive.append(kernel)
    found = list(parameters(kernel, announced.arguments, grid))
    _check_sizes(function, found)
    watch_hooks()
    recording.recorder.watch_hooks()
    recording.recorder.cuda_launch(
        function=function, parameters=[each.description for each in found], **described
    )


def _check_device_and_stream(recording: Recording, stream: int) -> None:
    device = recording.recorder.device
    if device.type != "cuda" or torch.cuda.current_device() != device.index:
        raise NotRecordable("it is not on the tensors' device")
    if stream != recording.stream:
        raise NotRecordable("it is not on the stream that was current before")


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


def watch_hooks() -> None:
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
