"""Names of overrides in what `torch.profiler` records."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from opgraft.registry import Override


def label(override: Override) -> str:
    """The name of a run of the override's impl in a profile, for both routers."""
    dsl = f", {override.dsl}" if override.dsl else ""
    return f"opgraft: {override.name} [{override.op}{dsl}]"


def record(override: Override) -> AbstractContextManager[object]:
    """Record what runs inside as a run of the override, if a profiler is on."""
    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(label(override))
