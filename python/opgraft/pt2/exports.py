"""Whether exported programs contain overrides."""

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
    """A scope in which exported programs contain overrides.

    By default, an exported program and an AOTInductor package contain nothing of opgraft, so that
    they load anywhere. In a program that is made in this scope, on this thread, overridden ops have
    the names that they have in compiled graphs, such as `opgraft::aten___softmax`. They are routed
    at run time. The program needs `import opgraft` where it is loaded. An AOTInductor package also
    needs the overrides registered before it is loaded.

    `torch.export.export` itself keeps composite ops (`aten.softmax`), which reach overrides
    wherever opgraft is imported. The scope matters for `run_decompositions` and AOTInductor.

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


def in_scope() -> bool:
    """Whether this thread is in a scope of :func:`export_overrides`."""
    return _thread.scopes > 0
