"""What a callable does, as a hash that is the same in every process."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

#: How far to follow what a callable holds: its closure, its defaults, the functions it calls.
_DEPTH = 6
#: Packages with more files than this are told apart by their files' sizes and times.
_MAX_FILES = 500


def digest(value: Any) -> str:
    """A hash of a callable's code and of what it refers to in its own module.

    Code that another module holds counts by name only.

    >>> digest(lambda x: x + 1) == digest(lambda x: x + 1), digest(len) == digest(abs)
    (True, False)
    """
    return _hash(_Description().of(value, _DEPTH))


def sources(function: Callable[..., Any]) -> str:
    """A hash of all Python sources of the top-level package that a callable comes from."""
    name = getattr(function, "__module__", None) or type(function).__module__
    module = sys.modules.get(name.partition(".")[0])
    file = getattr(module, "__file__", None)
    if file is None:  # an interactive session
        return ""
    path = Path(file)
    paths = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    if len(paths) > _MAX_FILES:
        return _hash(f"{each} {each.stat().st_size} {each.stat().st_mtime_ns}" for each in paths)
    return _hash(hashlib.sha256(each.read_bytes()).hexdigest() for each in paths)


def _hash(lines: Any) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Description:
    """Lines that describe values; a function that was described before is only named."""

    def __init__(self) -> None:
        self._seen: set[FunctionType] = set()

    def of(self, value: Any, depth: int) -> Iterator[str]:
        if isinstance(value, FunctionType):
            yield from self._function(value, depth)
        elif isinstance(value, CodeType):
            yield from self._code(value)
        elif isinstance(value, MethodType):
            yield from self._parts((value.__func__, value.__self__), depth)
        elif isinstance(value, functools.partial):
            yield from self._parts((value.func, value.args, value.keywords), depth)
        elif isinstance(value, (tuple, list)):
            yield from self._parts(value, depth)
        elif isinstance(value, dict):
            yield from self._parts(value.items(), depth)
        elif isinstance(value, (set, frozenset)):
            yield from sorted("\n".join(self.of(item, depth)) for item in value)
        elif isinstance(value, torch.Tensor):
            yield f"tensor {value.dtype} {tuple(value.shape)}"  # its values would cost a sync
        elif _has_stable_repr(value):
            yield repr(value)
        else:
            yield from self._object(value, depth)

    def _parts(self, parts: Any, depth: int) -> Iterator[str]:
        for part in parts:
            yield from self.of(part, depth)

    def _object(self, value: Any, depth: int) -> Iterator[str]:
        kind = type(value)
        yield f"{kind.__module__}.{kind.__qualname__} {getattr(value, '__qualname__', '')}"
        if depth > 0:
            yield from self._parts(
                (kind.__dict__.get("__call__"), getattr(value, "__dict__", None)), depth - 1
            )

    def _function(self, function: FunctionType, depth: int) -> Iterator[str]:
        yield f"{function.__module__}.{function.__qualname__}"
        if depth <= 0 or function in self._seen:
            return
        self._seen.add(function)
        yield from self._code(function.__code__)
        held = (function.__defaults__, function.__kwdefaults__, *_cells(function))
        yield from self._parts(held, depth - 1)
        for name in sorted(set(_names(function.__code__))):
            value = function.__globals__.get(name)
            if _is_module_state(value, function):
                yield f"{name}="
                yield from self.of(value, depth - 1)

    def _code(self, code: CodeType) -> Iterator[str]:
        yield code.co_code.hex()
        yield repr((code.co_names, code.co_varnames))
        yield from self._parts(code.co_consts, _DEPTH)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that is not assigned yet
            yield None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_module_state(value: Any, function: FunctionType) -> bool:
    if isinstance(value, FunctionType):
        return value.__module__ == function.__module__
    return isinstance(value, (bool, int, float, str, tuple, frozenset, torch.dtype))


def _has_stable_repr(value: Any) -> bool:
    return " at 0x" not in repr(value)
