"""Which native kernels call ops that autocast casts: their results have other dtypes under it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from opgraft.ops.schema import Call
from opgraft.router import composite
from tests import opinfo_calls

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def dtypes(call: Call, *, autocast: bool) -> list[torch.dtype]:
    """The dtypes of what the CPU's kernel returns, which autocast itself has not cast for."""
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False),
        torch._C._AutoDispatchBelowADInplaceOrView(),
    ):
        results: Any = call.op.overload.redispatch(CPU, *call.args, **call.kwargs)
    return [each.dtype for each in tree_leaves(results) if isinstance(each, torch.Tensor)]


def test_no_other_kernel_calls_what_autocast_casts() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    unknown, looked_at = set(), 0
    for op, calls in opinfo_calls.calls(samples=1).items():
        if not has_kernel(op.name, "CPU") or composite.calls_other_ops(op, "CPU"):
            continue
        for call in calls:
            looked_at += 1
            if dtypes(call, autocast=True) != dtypes(call, autocast=False):
                unknown.add(op.name)
    assert unknown == set()
    assert looked_at > 400
