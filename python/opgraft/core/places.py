"""Routers that are in at an op before anything is registered there, and who will register it.

Packs may wait for a first call of one of their ops (:mod:`opgraft.packs.waiting`). The registry and
the routers, which packs are built on, know of that no more than what is here: a function that
registers what waits, the core's routers that wait for a chain, and what stands in them meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgraft.core.interface import Router

#: Registers what waits, and returns whether nothing waits any more; None while nothing does.
_register: Callable[[], bool] | None = None
#: What stands first in the chain of each of these routers.
_placeholder: Any = None
#: The core's routers that no chain has taken over, by op and dispatch key.
_places: dict[tuple[str, str], Any] = {}


def settle_by(register: Callable[[], bool] | None) -> None:
    """Let :func:`settle` call a function from here on; None: there is nothing left to do.

    Args:
        register: returns whether nothing waits any more.
    """
    global _register
    _register = register


def settle() -> bool:
    """Register what waits, if anything does.

    Returns:
        Whether nothing waits any more.

    >>> settle()
    True
    """
    register = _register
    return register is None or register()


def fill(placeholder: Any | None) -> None:
    """Let something stand first in the chains of these routers; None: nothing any more."""
    global _placeholder
    _placeholder = placeholder


def placeholder() -> Any | None:
    """What stands first in the chains of routers that were taken over; None once all is settled."""
    return _placeholder


def keep(op: str, dispatch_key: str, router: Router) -> None:
    """Remember the core's router that is in at an op and key."""
    _places[op, dispatch_key] = router


def take(op: str, dispatch_key: str) -> Any | None:
    """The core's router that is in at an op and key already, for its chain to take over."""
    return _places.pop((op, dispatch_key), None)


def left() -> dict[tuple[str, str], Any]:
    """The routers that no chain has taken over, by op and dispatch key."""
    return dict(_places)
