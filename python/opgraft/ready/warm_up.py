"""Runs before a capture wait for their kernels, and captures take them: that is what runs for good.

`torch.compile(mode="reduce-overhead")` runs a graph once before it captures it. Were the native
kernel to serve that run while another process compiles, or because a call is not worth Python
before it has a launch plan, the capture would hold native's for good.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from opgraft.base import imports
from opgraft.ready.readiness import for_a_capture

_CUDA_GRAPHS = "torch._inductor.cudagraph_trees"


@functools.cache
def attach() -> None:
    """Have Inductor's runs before captures wait from now on, whether it is imported or not."""
    imports.after(_CUDA_GRAPHS, _patch)


def _patch(module: ModuleType) -> None:
    # In another torch: captures hold native kernels, and a warning says so.
    if (node := getattr(module, "CUDAWarmupNode", None)) is not None:
        _wrap(node, "run", wait=True)
    if (node := getattr(module, "CUDAGraphNode", None)) is not None:
        _wrap(node, "_record", wait=False)


def _wrap(node: type, name: str, *, wait: bool) -> None:
    method = getattr(node, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def for_good(*args: Any, **kwargs: Any) -> Any:
        with for_a_capture(wait=wait):
            return method(*args, **kwargs)

    setattr(node, name, for_good)
