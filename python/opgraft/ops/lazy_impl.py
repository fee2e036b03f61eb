"""`lazy`: an impl that is given by name, and imported by its first call."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

from opgraft.errors import RegistrationError


class Lazy:
    """A function that its first call imports, as `lazy` returns it."""

    def __init__(self, target: str) -> None:
        module, _, name = target.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
            raise RegistrationError(
                f"lazy({target!r}) names no function: write 'package.module:function'"
            )
        self.__module__: str = module
        self.__qualname__: str = name
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._function
        if function is None:
            function = self._function = self.load()
        return function(*args, **kwargs)

    def load(self) -> Callable[..., Any]:
        """The function, imported now."""
        module = importlib.import_module(self.__module__)
        try:
            function: Callable[..., Any] = operator.attrgetter(self.__qualname__)(module)
        except AttributeError as error:
            raise AttributeError(f"{self!r}: {error}") from None
        return function

    def __repr__(self) -> str:
        return f"lazy('{self.__module__}:{self.__qualname__}')"

    def __reduce__(self) -> tuple[Any, ...]:
        return lazy, (f"{self.__module__}:{self.__qualname__}",)


def lazy(target: str) -> Lazy:
    """A function given by name, whose module is imported by its first call.

    As the `impl` of an override it keeps a DSL from being imported before its kernel is needed,
    without a function that repeats the op's signature:

        impl = opgraft.lazy("my_kernels.softmax:softmax")

    The function takes the op's arguments as any impl does. Registration does not check its
    signature, since that would import it. If two threads make the first call, one imports.

    Args:
        target: `"package.module:function"`, as in entry points; the module's full name.

    Returns:
        A callable. Its first call raises what the import raises.

    Raises:
        RegistrationError: `target` is not of that form.

    >>> import opgraft
    >>> root = opgraft.lazy("math:sqrt")
    >>> root
    lazy('math:sqrt')
    >>> root(4.0)
    2.0
    """
    return Lazy(target)
