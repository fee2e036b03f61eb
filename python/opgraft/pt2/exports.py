"""Whether exported programs hold overrides."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scopes = 0


_thread = _Thread()


@contextmanager
def export_overrides() -> Iterator[None]:
    """A scope in which exported programs hold overrides.

    An exported program and an AOTInductor package are free of opgraft, so that they load anywhere.
    In one that is made in this scope, on this thread, overridden ops have the names that they have
    in compiled graphs, `opgraft::aten___softmax`, and are routed at run time. It needs `import
    opgraft` where it is loaded; an AOTInductor package needs the overrides registered before, too.

    `torch.export.export` itself keeps composite ops (`aten.softmax`), which reach overrides
    wherever opgraft is: it is `run_decompositions` and AOTInductor that make the difference.

    >>> import torch
    >>> class Softmax(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.softmax(x, -1)
    >>> with export_overrides():
    ...     program = torch.export.export(Softmax(), (torch.ones(2, 8),)).run_decompositions()
    """
    _thread.scopes += 1
    try:
        yield
    finally:
        _thread.scopes -= 1


def are_asked_for() -> bool:
    """Whether this thread is in a scope of :func:`export_overrides`."""
    return _thread.scopes > 0
