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
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opgraft import router
from opgraft.ops.schema import resolve
from opgraft.router import dispatcher

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
    key = _key_of(flat_args)
    return key is not None and router.hides_composite(resolve(func), key)


def _key_of(flat_args: Sequence[object]) -> str | None:
    """The dispatch key of the backend that the first tensor lives on; None without a tensor."""
    first = next((each for each in flat_args if isinstance(each, torch.Tensor)), None)
    return None if first is None else torch._C._dispatch_key_for_device(first.device.type)


class Decomposing(TorchDispatchMode):
    """Decomposes composite ops that run on fake tensors, as a tracer decomposes them.

    FakeTensorMode prefers a reference in Python, which may ask for more: `nll_loss`'s asks whether
    there are rows, and of a number of rows that depends on data torch does not know it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and _is_composite(func, tree_leaves((args, kwargs))):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _is_composite(func: OpOverload, flat_args: Sequence[object]) -> bool:
    """Whether an op has no kernel where its tensors live but a composite one, our router aside."""
    if not torch._C._dispatch_has_kernel(func.name()):  # TorchScript's own, as `prim::device`
        return False
    key = _key_of(flat_args)
    if key is None:
        return False
    op = resolve(func)
    return dispatcher.is_composite(op, key) or router.hides_composite(op, key)
