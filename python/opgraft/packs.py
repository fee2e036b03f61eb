"""Packs: distributions that bring overrides, found by entry point.

A pack declares an entry point in the group `opgraft.packs`; its value is a function that takes
nothing and registers through the public API. What it registers belongs to the pack: it comes after
the user's own overrides and falls back to the native kernel when it fails.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata

from opgraft.errors import RegistrationError

log = logging.getLogger(__name__)

GROUP = "opgraft.packs"

_loading: ContextVar[str | None] = ContextVar("opgraft_pack", default=None)


def loading() -> str | None:
    """The pack whose registering function runs now; None in the user's own code."""
    return _loading.get()


def installed() -> list[str]:
    """The names of the packs that are installed here."""
    return sorted({entry.name for entry in metadata.entry_points(group=GROUP)})


def load(name: str) -> None:
    """Let an installed pack register its overrides. Loading it again replaces them.

    Args:
        name: the pack's name, as :func:`installed` lists it.

    Raises:
        RegistrationError: there is no such pack.
        Exception: whatever the pack's own code raises.

    >>> load("no-such-pack")
    Traceback (most recent call last):
    opgraft.errors.RegistrationError: there is no pack 'no-such-pack' ...
    """
    entries = [entry for entry in metadata.entry_points(group=GROUP) if entry.name == name]
    if not entries:
        known = ", ".join(installed()) or "none"
        raise RegistrationError(f"there is no pack {name!r} installed; there is: {known}")
    register = entries[0].load()
    with _owning(name):
        register()


@contextmanager
def _owning(pack: str) -> Iterator[None]:
    token = _loading.set(pack)
    try:
        yield
    finally:
        _loading.reset(token)
