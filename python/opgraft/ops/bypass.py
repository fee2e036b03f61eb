"""Calling ops past their overrides, where opgraft itself calls ops. The router implements it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

#: Takes an op's name. Inside the context the op's overrides are bypassed on this thread.
Bypass = Callable[[str], AbstractContextManager[None]]

_bypass: Bypass | None = None


def set_bypass(bypass: Bypass) -> None:
    """Set how overrides are bypassed. Before that there are no overrides."""
    global _bypass
    _bypass = bypass


def bypassing(op: str) -> AbstractContextManager[None]:
    """Bypass the overrides of an op on this thread.

    Args:
        op: its name as torch prints it.
    """
    return nullcontext() if _bypass is None else _bypass(op)
