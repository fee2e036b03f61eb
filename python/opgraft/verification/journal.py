"""Which sample a process is at, for a process that outlives it; and which samples it leaves out.

A native kernel can end the process that verifies an override, or lose its device: those of internal
ops trust their callers. The process that started it then reads here at which sample that was.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_descriptor: int | None = None
#: By changes to a call the calls that are left out with them.
_left_out: dict[frozenset[str], set[str]] = {}


@contextmanager
def writing_to(path: str | Path | None, *, leaving_out: Collection[str] = ()) -> Iterator[None]:
    """Write the sample that is made last to a file, and make none of those left out."""
    global _descriptor, _left_out
    for sample_id in leaving_out:
        base, changes = _parts(sample_id)
        _left_out.setdefault(changes, set()).add(base)
    _descriptor = (
        None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    )
    try:
        yield
    finally:
        _left_out = {}
        if _descriptor is not None:
            os.close(_descriptor)
            _descriptor = None


def note(sample_id: str) -> None:
    """A sample is made now.

    Raises:
        Exception: a kernel that ran for the sample before lost the device. Its error would come
            with any later call: here the journal still names its sample.
    """
    if _descriptor is not None:
        if torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork():
            torch.cuda.synchronize()
        text = sample_id.encode()
        os.ftruncate(_descriptor, 0)
        os.pwrite(_descriptor, text, 0)


def is_left_out(sample_id: str) -> bool:
    """Whether a sample is not to be made: it is left out, or one that it is a further change of.

    What ended the process on two calls would on others, and each costs a new process: such a change
    is made to no call.
    """
    base, changes = _parts(sample_id)
    return any(
        left_out <= changes and (base in bases or (len(left_out) > 0 and len(bases) > 1))
        for left_out, bases in _left_out.items()
    )


def _parts(sample_id: str) -> tuple[str, frozenset[str]]:
    """The call that a sample is made of, and the changes to it."""
    base, *changes = sample_id.split(" ")
    return base, frozenset(changes)


def read(path: str | Path) -> str:
    """The sample that a process made last; empty if it made none."""
    try:
        return Path(path).read_text()
    except FileNotFoundError:
        return ""
