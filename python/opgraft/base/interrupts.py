"""Exceptions that say nothing of the code that they came through.

A time limit (`signal.alarm`), a test's timeout and a framework that cancels a task raise an
exception from a signal handler, wherever the program is at that moment.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any


def is_interrupt(error: BaseException) -> bool:
    """Whether a signal handler raised an exception, or the one that it was made of.

    Checkpointing ends a recomputation by an exception, too, where the last tensor is saved that it
    needs: that may be anywhere.

    A handler that its code has taken away again, as a time limit of an impl's own has, was that
    code's business: such an exception is none.

    >>> is_interrupt(ValueError("raised by nothing"))
    False
    """
    if _ends_recomputation(error):
        return True
    handlers = set(_handlers())
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        if not handlers.isdisjoint(_codes(each)):
            return True
        seen.add(id(each))
        each = each.__cause__  # no `__context__`: the caller may be handling an interrupt already
    return False


def _ends_recomputation(error: BaseException) -> bool:
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("torch.utils.checkpoint", "_StopRecomputationError")


def _codes(error: BaseException) -> Iterator[CodeType]:
    """The code of the functions that an exception came through."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


def _handlers() -> Iterator[CodeType]:
    """The code of the signal handlers that are in force and written in Python."""
    for number in signal.valid_signals():
        if (code := _code_of(signal.getsignal(number))) is not None:
            yield code


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not isinstance(handler, (FunctionType, MethodType)) and callable(handler):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)
