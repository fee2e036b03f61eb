"""Counts the captures of CUDA graphs, so that a call in one is looked at, and no other call is.

A call that is captured before its kernels are ready is the native kernel's for good, and the
program is told so. While nothing is captured, no call finds out whether it is.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from opgraft.base import imports

if TYPE_CHECKING:
    from opgraft.core.interface import Core

_GRAPHS = "torch.cuda.graphs"


@functools.cache
def attach(core: Core) -> None:
    """Tell the core of torch's captures from now on."""
    imports.after(_GRAPHS, functools.partial(_patch, core))


def _patch(core: Core, module: ModuleType) -> None:
    graph = module.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def capture_begin(*args: Any, **kwargs: Any) -> Any:
        core.count_captures(1)
        try:
            return begin(*args, **kwargs)
        except BaseException:
            core.count_captures(-1)
            raise

    @functools.wraps(end)
    def capture_end(*args: Any, **kwargs: Any) -> Any:
        core.count_captures(-1)
        return end(*args, **kwargs)

    graph.capture_begin, graph.capture_end = capture_begin, capture_end
