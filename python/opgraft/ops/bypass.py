"""Calling ops past their overrides, where opgraft itself is made of ops; the router says how."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

#: Given an op's name, lets no override of it be asked on this thread while the context lasts.
Bypass = Callable[[str], AbstractContextManager[None]]

_bypass: Bypass | None = None


def bypass_by(bypass: Bypass) -> None:
    """Say how overrides are passed by; until then there are none."""
    global _bypass
    _bypass = bypass


def bypassing(op: str) -> AbstractContextManager[None]:
    """While this lasts, no override of an op is asked on this thread.

    Args:
        op: its name as torch prints it.
    """
    return nullcontext() if _bypass is None else _bypass(op)
