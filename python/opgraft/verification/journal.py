"""Which sample a process is at, for a process that outlives it; and which samples it leaves out.

A native kernel can end the process that verifies an override: those of internal ops trust their
callers. The process that started it then reads here at which sample that was.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

_descriptor: int | None = None
_left_out: frozenset[str] = frozenset()


@contextmanager
def writing_to(path: str | Path | None, *, leaving_out: Collection[str] = ()) -> Iterator[None]:
    """Write the sample that is made last to a file, and make none of those left out."""
    global _descriptor, _left_out
    _left_out = frozenset(leaving_out)
    _descriptor = (
        None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    )
    try:
        yield
    finally:
        _left_out = frozenset()
        if _descriptor is not None:
            os.close(_descriptor)
            _descriptor = None


def note(sample_id: str) -> None:
    """A sample is made now."""
    if _descriptor is not None:
        text = sample_id.encode()
        os.ftruncate(_descriptor, 0)
        os.pwrite(_descriptor, text, 0)


def is_left_out(sample_id: str) -> bool:
    """Whether a sample is not to be made."""
    return sample_id in _left_out


def read(path: str | Path) -> str:
    """The sample that a process made last; empty if it made none."""
    try:
        return Path(path).read_text()
    except FileNotFoundError:
        return ""
