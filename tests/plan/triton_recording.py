"""Records launches of compiled kernels with no GPU: a driver stands in for CUDA's; nothing runs.

To be run in a process of its own, without `TRITON_INTERPRET`:

    python -m tests.plan.triton_recording CAPABILITY

prints, as one JSON object, what each impl of `triton_kernels.py` tells the recorder, by its name:
the launches with their parameters, or why there is no plan.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

from opgraft.core import loader
from opgraft.ops.schema import resolve
from opgraft.plan import triton_launches
from opgraft.plan.recording import Recording

# The pack's tests compile without a GPU, too.
sys.path.insert(0, str(Path(__file__).parents[2] / "kernels" / "opgraft-kernels" / "tests"))
from compile_only import use_driver

EPS = 1e-6


class Launcher:
    """Takes the place of `CudaLauncher`: the same call, and nothing is launched."""

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        pass


class Utils:
    def __init__(self) -> None:
        self.functions: dict[bytes, int] = {}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        function = self.functions.setdefault(kernel, 0x1000 + len(self.functions))
        return 1, function, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class Recorder:
    """The core's recorder, and what it was told."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.launches: list[dict[str, Any]] = []
        self.watches_hooks = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorder, name)

    def watch_hooks(self) -> None:
        self.recorder.watch_hooks()
        self.watches_hooks = True

    def cuda_launch(self, **launch: Any) -> None:
        self.recorder.cuda_launch(**launch)
        launch["watches_hooks"] = self.watches_hooks
        launch["parameters"] = [list(map(plain, each)) for each in launch["parameters"]]
        self.launches.append(launch)


def plain(part: Any) -> Any:
    return list(part.shape) if isinstance(part, torch.Tensor) else part


def stand_in(capability: int) -> None:
    use_driver(capability)
    active = driver.active
    active.launcher_cls = Launcher
    active.utils = Utils()
    active.get_benchmarker = lambda: lambda kernel_call, quantiles: kernel_call() or [1.0] * 3
    triton_launches._launcher = lambda: Launcher
    triton_launches._check_device_and_stream = lambda recording, stream: None


def record(impl: Any) -> dict[str, Any]:
    core = loader.in_use()
    assert core is not None
    op = resolve("aten::_fused_rms_norm")
    names = (
        "takes",
        "first_hit",
        "recover",
        "is_capturing",
        "warn_captured",
        "contract_error",
        "observe",
        "decompose",
    )
    hooks = dict.fromkeys(names)
    router = core.Router("aten::_fused_rms_norm", "", "CPU")
    router.set_hooks(**hooks)
    x, weight = torch.randn(64, 1024), torch.randn(1024)
    call = op.bind((x, [1024], weight, EPS), {})
    recording = Recording(core, router, call, torch.device("cpu"))
    inner = recording.recorder
    recording.recorder = recorder = Recorder(inner)
    with recording.watching():
        result = impl(*call.args)
    recording.recorder = inner
    plan = recording.finish(result)
    return {"launches": recorder.launches, "plan": str(plan), "refusal": recording.refusal}


def main(capability: str) -> None:
    stand_in(int(capability))
    from tests.plan import triton_kernels

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
    impls = {**triton_kernels.RECORDABLE, "around_the_front": triton_kernels.around_the_front}
    if int(capability) >= 90:
        del impls["with_host_descriptors"]  # CUDA's driver makes their maps
    else:
        del impls["with_clusters"]  # they begin with Hopper
    print(json.dumps({name: record(impl) for name, impl in impls.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
