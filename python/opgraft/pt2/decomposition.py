"""Lets tracers decompose composite ops that have a router.

Below autograd, where `torch.compile` runs the decompositions of other ops (softmax calls
`aten::to`), a tracer decomposes an op that has no kernel at the backend's key, and keeps any other.
Our router is such a kernel, and it stays when its overrides are gone. A graph that keeps the op
differs from stock PyTorch's: Inductor's patterns no longer match, and the compiler's caches would
give it to processes without opgraft.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType

import torch
from torch._ops import OpOverload

from opgraft import router
from opgraft.ops.schema import resolve

log = logging.getLogger(__name__)

_WOULD_DECOMPOSE = "autograd_would_have_decomposed"


def see_past_routers(proxy_tensor: ModuleType) -> None:
    """Answer a tracer's question whether an op is decomposed as if no router were there.

    Args:
        proxy_tensor: `torch.fx.experimental.proxy_tensor`, which traces below autograd. The
            tracer above it, FunctionalTensorMode, asks :func:`opgraft.pt2.graph.substitute`.
    """
    asked = getattr(proxy_tensor, _WOULD_DECOMPOSE, None)
    if asked is None:
        log.warning(
            "opgraft does not know how torch %s decomposes composite ops while it traces: compiled "
            "graphs keep those that are overridden and that another op's decomposition calls",
            torch.__version__,
        )
        return

    @functools.wraps(asked)
    def would_decompose(func: OpOverload, flat_args: Sequence[object]) -> bool:
        return asked(func, flat_args) or _has_only_router(func, flat_args)

    setattr(proxy_tensor, _WOULD_DECOMPOSE, would_decompose)


def _has_only_router(func: OpOverload, flat_args: Sequence[object]) -> bool:
    """Whether the kernel of a composite op, where torch looks for one, is our router."""
    for each in flat_args:
        if isinstance(each, torch.Tensor):
            key = torch._C._dispatch_key_for_device(each.device.type)
            return router.hides_composite(resolve(func), key)
    return False
