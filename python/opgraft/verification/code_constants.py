"""Finds integers in an impl's code: sizes at which it may behave differently."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

__all__ = ["integer_constants"]

#: How many functions are searched: the impl first, then those that it calls.
_MAX_FUNCTIONS = 64
#: The integers that may be sizes.
_SMALLEST, _LARGEST = 4, 2**20
#: Packages that are not searched: their integers say nothing about the kernel.
_FOREIGN = frozenset({"torch", "opgraft", "triton", "cutlass", "numpy", "builtins"})


def integer_constants(impl: Callable[..., Any], limit: int) -> list[int]:
    """Integers in the code of an impl and of what it calls, the nearest first.

    >>> __name__ = "my_kernels"  # opgraft's own code is not searched
    >>> def tile(n): return n % 96
    >>> integer_constants(lambda x: tile(x.shape[0]) if x.shape[0] > 640 else x, 8)
    [640, 96]
    """
    found: dict[int, None] = {}
    for function in _functions(impl):
        for number in _in_function(function):
            if _SMALLEST <= number <= _LARGEST:
                found.setdefault(number)
        if len(found) >= limit:
            break
    return list(found)[:limit]


def _functions(impl: Callable[..., Any]) -> Iterator[FunctionType]:
    """The impl and what it calls, breadth first."""
    queue: list[Any] = [impl]
    seen: set[int] = set()
    while queue and len(seen) < _MAX_FUNCTIONS:
        function = _function_of(queue.pop(0))
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        queue += _named_in(function)


def _function_of(value: Any) -> FunctionType | None:
    """The Python function behind a callable; that of a Triton kernel is its `fn`."""
    for _ in range(8):
        if isinstance(value, FunctionType) and not hasattr(value, "__wrapped__"):
            foreign = (value.__module__ or "").partition(".")[0] in _FOREIGN
            return None if foreign else value
        if isinstance(value, functools.partial):
            value = value.func
        elif inspect.ismethod(value):
            value = value.__func__
        elif callable(getattr(value, "__wrapped__", None)):
            value = value.__wrapped__
        elif callable(getattr(value, "fn", None)):
            value = value.fn
        else:
            return None
    return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _values(function: FunctionType) -> Iterator[Any]:
    """The values that a function's code names: in its closure, its defaults and its module."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for code in _codes(function.__code__):
        for name in code.co_names:
            value = function.__globals__.get(name)
            yield value
            if inspect.ismodule(value) and value.__name__.partition(".")[0] not in _FOREIGN:
                yield from (getattr(value, each, None) for each in code.co_names)


def _named_in(function: FunctionType) -> list[Any]:
    return [value for value in _values(function) if callable(value) and not inspect.isclass(value)]


def _in_function(function: FunctionType) -> Iterator[int]:
    for code in _codes(function.__code__):
        for constant in code.co_consts:
            yield from _integers(constant)
    for value in _values(function):
        yield from _integers(value)


def _integers(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
    elif isinstance(value, (tuple, frozenset)):
        for each in value:
            yield from _integers(each)
