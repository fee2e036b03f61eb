"""Replacing methods of a DSL's classes during recordings."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from opgraft.base.locks import fork_safe_lock


class Patches:
    """Methods that are replaced while any thread records.

    All threads call a replacement, so it must do what the original does on a thread that records
    nothing. `current` is this thread's recording, or None.
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._users = 0
        self._originals: list[tuple[type, str, Any]] = []
        self._local = threading.local()
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._forget_other_threads)

    @property
    def current(self) -> Any:
        return getattr(self._local, "recording", None)

    @contextmanager
    def applied(
        self, recording: Any, replacements: Callable[[], dict[tuple[type, str], Any]]
    ) -> Iterator[None]:
        """Replace the methods, and set this thread's recording.

        Args:
            recording: what `current` returns on this thread.
            replacements: returns the replacements, by class and method. The first user calls it.
        """
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._apply(replacements())
        self._local.recording = recording
        try:
            yield
        finally:
            self._local.recording = None
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._restore()

    def _apply(self, replacements: dict[tuple[type, str], Any]) -> None:
        for (owner, name), replacement in replacements.items():
            self._originals.append((owner, name, owner.__dict__[name]))
            setattr(owner, name, replacement)

    def _forget_other_threads(self) -> None:
        users = 0 if self.current is None else 1
        if self._users and not users:
            self._restore()
        self._users = users

    def _restore(self) -> None:
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals.clear()
