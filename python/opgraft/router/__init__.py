"""Routers: one per op and dispatch key, installed at the dispatcher on the first registration.

The way of a call: :mod:`opgraft.router.python` (dispatcher to override),
:mod:`opgraft.router.decision` (whether an override takes it), then :mod:`opgraft.router.native` on
a miss, :mod:`opgraft.router.hit` on a hit.
"""

from __future__ import annotations

import torch

from opgraft.core import loader
from opgraft.ops.schema import Op
from opgraft.registry import Chain
from opgraft.router import composite, dispatcher
from opgraft.router.base import Router
from opgraft.router.compiled import CompiledRouter, use
from opgraft.router.python import PythonRouter

_routers: dict[tuple[str, str], Router] = {}


def install(chain: Chain) -> Router:
    """The router of a chain; the first call puts it in at the dispatcher, where it stays.

    Raises:
        RegistrationError: an override there would lose the op's derivative, or could not see what
            the op is about.
    """
    key = (chain.op.name, chain.dispatch_key)
    with dispatcher.lock:
        if key not in _routers:
            composite.check(chain.op, chain.dispatch_key)
            _routers[key] = _make(chain)
            dispatcher.look_up_anew(chain.op)
        return _routers[key]


def _make(chain: Chain) -> Router:
    core = loader.in_use()
    if core is None:
        return PythonRouter(chain)
    use(core)
    return CompiledRouter(chain)


def installed(chain: Chain) -> Router | None:
    """The router of a chain, if it is in."""
    return _routers.get((chain.op.name, chain.dispatch_key))


def has_own_kernel(op: Op, dispatch_key: str) -> bool:
    """Whether the op has a kernel of its own at the key, other than a router of ours."""
    router = _routers.get((op.name, dispatch_key))
    if router is not None:
        return router.has_own_kernel
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name, dispatch_key)
