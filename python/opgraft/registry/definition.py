"""Which code registered an override, to tell a second run of that code from a second override.

A notebook's cell is run again, and a module is reloaded: what they registered before is replaced.
What one run registers stays, as the overrides do that a loop or a factory function makes.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

#: How many decorators, partials and methods around a function are looked through.
_MOST_WRAPPERS = 32


class Run:
    """The module-level code that was running: a module's, a cell's, a statement's at a prompt.

    Each run of a cell, and each import or reload of a module, has a code object of its own.
    """

    def __init__(self, frame: FrameType) -> None:
        #: It is kept, so that no later one gets its identity.
        self.code: CodeType = frame.f_code
        self.line: int = frame.f_lineno
        self.module: object = frame.f_globals.get("__name__")
        #: The file that is imported; None for a cell, a statement and a script, whose editor may
        #: run a part of it.
        self.file: str | None = None
        is_imported = frame.f_globals.get("__spec__") is not None
        if is_imported and frame.f_globals.get("__file__") == frame.f_code.co_filename:
            self.file = frame.f_code.co_filename

    def repeats(self, other: Run) -> bool:
        """Whether this is a later run of the same source.

        The source of a file may have changed meanwhile. That of a cell may not: nothing but its
        source says which cell it is. Lines are compared because IPython compiles each statement of
        a cell, and two of them may be alike.
        """
        if self.code is other.code or self.module != other.module:
            return False
        if self.file is not None and self.file == other.file:
            return True
        return self.code == other.code and self.line == other.line


class Definition:
    """What registered an override without `name=`: a run of module-level code, and a function."""

    def __init__(self, name: str, impl: Callable[..., Any]) -> None:
        #: The name by default, before it is made unique in the chain.
        self.name = name
        self.run = _current_run()
        self.function = _function_of(impl)

    def repeats(self, other: Definition) -> bool:
        """Whether a later run of the same source registers what the other registered."""
        if self.run is None or other.run is None or self.name != other.name:
            return False
        return self.run.repeats(other.run)

    def redefines(self, other: Definition) -> bool:
        """Whether the other's function was defined again, by whatever code.

        Functions that one factory makes have the same code. Lambdas and functions inside of others
        share their names with their like, so their place and their code must be equal.
        """
        new, old = self.function, other.function
        if new is None or old is None or self.name != other.name:
            return False
        if new.__code__ is old.__code__ or _full_name(new) != _full_name(old):
            return False
        if self._is_of_run(other.run):
            return False  # one script has two functions of the same name
        if "<" not in new.__qualname__:
            return True
        is_there = new.__code__.co_filename == old.__code__.co_filename
        return is_there and new.__code__ == old.__code__

    def _is_of_run(self, run: Run | None) -> bool:
        """Whether a run, which is this one too, defined the function."""
        if self.run is None or run is None or self.function is None:
            return False
        return self.run.code is run.code and self.function.__module__ == run.module


def _full_name(function: FunctionType) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def _function_of(impl: Any) -> FunctionType | None:
    """The function that its author wrote, inside of decorators, partials and methods."""
    for _ in range(_MOST_WRAPPERS):
        if isinstance(impl, functools.partial):
            impl = impl.func
        elif isinstance(impl, MethodType):
            impl = impl.__func__
        elif (wrapped := getattr(impl, "__wrapped__", None)) is not None:
            impl = wrapped
        else:
            break
    if not isinstance(impl, FunctionType):
        impl = type(impl).__call__
    return impl if isinstance(impl, FunctionType) else None


def _current_run() -> Run | None:
    """The innermost run of module-level code on this thread's stack; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # A class's body has names of its own; a function's code is optimised.
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
        if not is_function and frame.f_locals is frame.f_globals:
            return Run(frame)
        frame = frame.f_back
    return None
