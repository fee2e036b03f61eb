"""Routers: one per op and dispatch key, installed at the dispatcher on the first registration.

A router stays for good, unless its op is defined anew: then it is withdrawn with its overrides.

To follow one call, read :mod:`opgraft.router.python` (from the dispatcher to an override) and
:mod:`opgraft.router.decision` (whether an override takes the call). Then read
:mod:`opgraft.router.native` for a miss, or :mod:`opgraft.router.hit` for a hit.
"""

from __future__ import annotations

import torch

from opgraft.core import loader
from opgraft.errors import warn_caller
from opgraft.ops.schema import Op
from opgraft.registry import Chain, registry
from opgraft.router import composite, dispatcher
from opgraft.router.base import Router
from opgraft.router.compiled import CompiledRouter, use

_routers: dict[tuple[str, str], Router] = {}


def install(chain: Chain) -> Router:
    """The router of a chain. The first call registers it at the dispatcher.

    Raises:
        RegistrationError: an override there would lose the op's derivative, or could not see the
            state that the op works on.
    """
    key = (chain.op.name, chain.dispatch_key)
    with dispatcher.lock:
        if key not in _routers:
            composite.check(chain.op, chain.dispatch_key)
            _routers[key] = _make(chain)
            dispatcher.clear_dispatch_cache(chain.op)
        return _routers[key]


def _make(chain: Chain) -> Router:
    core = loader.in_use()
    if core is None:
        from opgraft.router.python import PythonRouter  # few need it

        return PythonRouter(chain, _withdraw)
    use(core)
    return CompiledRouter(chain, _withdraw)


def withdraw_outdated() -> None:
    """Remove the routers and the overrides of ops that were defined anew. A call does so, too.

    Whatever reads or changes overrides from Python calls this first.
    """
    for router in list(_routers.values()):
        if router.is_outdated:
            _withdraw(router)


def _withdraw(router: Router) -> None:
    """Remove a router, and its overrides: they were registered for an op that is gone.

    They could not stay. The new op may have other arguments, and its author's other kernels, which
    the same module registers, are gone with the former op too.
    """
    chain = router.chain
    key = (chain.op.name, chain.dispatch_key)
    with dispatcher.lock:
        if _routers.get(key) is not router:
            return  # another thread has done it
        router.deregister()
        del _routers[key]
    if removed := registry.forget(chain):
        names = ", ".join(repr(override.name) for override in removed)
        warn_caller(
            f"{chain.op.name} was defined anew, which removed its overrides at "
            f"{chain.dispatch_key}: {names}. Register them again, after the op"
        )


def installed(chain: Chain) -> Router | None:
    """The router of a chain; None where none is installed."""
    return _routers.get((chain.op.name, chain.dispatch_key))


def has_own_kernel(op: Op, dispatch_key: str) -> bool:
    """Whether the op has a kernel of its own at the key. Our routers do not count."""
    router = _routers.get((op.name, dispatch_key))
    if router is not None:
        return router.has_own_kernel
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name, dispatch_key)


def hides_composite(op: Op, dispatch_key: str) -> bool:
    """Whether the kernel at a key is our router, and the op is composite without it.

    Others may have registered theirs after the router, in its place.
    """
    router = _routers.get((op.name, dispatch_key))
    if router is None or not router.is_composite:
        return False
    return dispatcher.is_ours(dispatcher.current_kernel_origin(op, dispatch_key))
