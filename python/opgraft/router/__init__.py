"""Routers: one per op and dispatch key, installed at the dispatcher on the first registration.

A router stays for good, unless its op is destroyed: then it is withdrawn with its overrides.

To follow one call, read :mod:`opgraft.router.python` (from the dispatcher to an override) and
:mod:`opgraft.router.decision` (whether an override takes the call). Then read
:mod:`opgraft.router.native` for a miss, or :mod:`opgraft.router.hit` for a hit.
"""

from __future__ import annotations

import torch

from opgraft.core import loader
from opgraft.errors import warn_caller
from opgraft.ops.schema import Op
from opgraft.registry import Chain, Override, registry
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

        return PythonRouter(chain, withdraw_outdated)
    use(core, withdraw_outdated)
    return CompiledRouter(chain)


def withdraw_outdated(wait: bool = True) -> None:
    """Remove the routers and the overrides of ops that were destroyed.

    They could not stay. An op that is defined under the name again may have other arguments, and
    its author's other kernels, which the same module registers, are gone with the former op too.

    Args:
        wait: for locks. If not, nothing happens where this thread, or another one, is changing
            overrides; whatever reads or changes them from Python calls this first.
    """
    outdated = [router for router in list(_routers.values()) if router.is_outdated]
    if not outdated:
        return
    removed: list[Override] = []
    if wait:
        with dispatcher.lock:
            taken = [router for router in outdated if _take_off(router)]
        for router in taken:
            removed += registry.forget(router.chain)
    elif dispatcher.lock.acquire(blocking=False):
        try:
            with registry.unless_changing() as is_free:
                for router in outdated if is_free else ():
                    if _take_off(router):
                        removed += registry.forget(router.chain)
        finally:
            dispatcher.lock.release()
    if removed:
        names = ", ".join(f"{o.name!r} of {o.op} at {o.dispatch_key}" for o in removed)
        warn_caller(
            f"the op was destroyed or defined anew, which removed its overrides: {names}. Register "
            "them again, after the op"
        )


def _take_off(router: Router) -> bool:
    """Deregister a router; False if another thread has done it."""
    chain = router.chain
    key = (chain.op.name, chain.dispatch_key)
    if _routers.get(key) is not router:
        return False
    from opgraft.router import derivative

    router.deregister()
    derivative.uninstall(chain)
    # torch may know the former op still, if it was defined anew before this.
    dispatcher.clear_dispatch_cache(chain.op)
    del _routers[key]
    return True


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
