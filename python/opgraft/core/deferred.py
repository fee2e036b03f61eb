"""Routers that are installed before the overrides of deferred packs are registered.

Registering packs may be deferred to the first call of one of their ops
(:mod:`opgraft.packs.waiting`). The registry and the routers are below packs, and know only what is
here: a function that registers the deferred packs, the core's routers that have no chain yet, the
placeholder in their chains, and what a thread may prepare for calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgraft.core.interface import Router

#: Registers the deferred packs. Returns whether all are registered. None: there are none.
_registrar: Callable[[], bool] | None = None
#: The first override in the chain of each of these routers.
_placeholder: Any = None
#: The core's routers that have no chain yet, by op and dispatch key.
_unclaimed: dict[tuple[str, str], Any] = {}
#: What first calls would have to wait for, unless a thread does it before.
_preparations: list[Callable[[], object]] = []


def set_registrar(register: Callable[[], bool] | None) -> None:
    """Set the function that :func:`register_now` calls; None: there is nothing to register.

    Args:
        register: registers the deferred packs, and returns whether all are registered.
    """
    global _registrar
    _registrar = register


def register_now() -> bool:
    """Register the deferred packs, if there are any.

    Returns:
        Whether none is deferred any more.

    >>> register_now()
    True
    """
    register = _registrar
    return register is None or register()


def set_placeholder(placeholder: Any | None) -> None:
    """Set the first override in the chains of these routers; None: there is none any more."""
    global _placeholder
    _placeholder = placeholder


def placeholder() -> Any | None:
    """The first override in the chains of these routers; None once all packs are registered."""
    return _placeholder


def add_router(op: str, dispatch_key: str, router: Router) -> None:
    """Add a router of the core that is installed and has no chain yet."""
    _unclaimed[op, dispatch_key] = router


def claim_router(op: str, dispatch_key: str) -> Any | None:
    """Take the router that is installed at an op and key, for its chain; None: there is none."""
    return _unclaimed.pop((op, dispatch_key), None)


def unclaimed_routers() -> dict[tuple[str, str], Any]:
    """The routers that have no chain, by op and dispatch key."""
    return dict(_unclaimed)


def add_preparation(prepare: Callable[[], object]) -> None:
    """Add what first calls would have to wait for.

    Args:
        prepare: called once at the most, on any thread, after the deferred packs were registered. A
            call that needs what it does makes it by itself, at the same time if it comes so.
    """
    _preparations.append(prepare)


def take_preparations() -> list[Callable[[], object]]:
    """The functions of :func:`add_preparation`, which the caller is to call.

    >>> add_preparation(print)
    >>> take_preparations()[-1] is print
    True
    """
    taken = _preparations[:]
    _preparations.clear()
    return taken
