"""Runs before a capture wait for their kernels: what is captured is what runs for good.

`torch.compile(mode="reduce-overhead")` runs a graph once before it captures it. Were the native
kernel to serve that run while another process compiles, the capture would hold native's for good.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from opgraft.base import imports
from opgraft.ready.readiness import when_not_ready

_CUDA_GRAPHS = "torch._inductor.cudagraph_trees"


@functools.cache
def attach() -> None:
    """Have Inductor's runs before captures wait from now on, whether it is imported or not."""
    imports.after(_CUDA_GRAPHS, _patch)


def _patch(module: ModuleType) -> None:
    node = getattr(module, "CUDAWarmupNode", None)
    if node is None:  # another torch's: captures hold native kernels, and a warning says so
        return
    run = node.run

    @functools.wraps(run)
    def run_waiting(*args: Any, **kwargs: Any) -> Any:
        with when_not_ready("wait"):
            return run(*args, **kwargs)

    node.run = run_waiting
