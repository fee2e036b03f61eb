"""FlashAttention-4's functions with other meanings for some of the names that they use.

To replace the names in the library's modules would change the kernels that others compile
meanwhile. Importing this imports CuteDSL.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import cutlass.cute as cute

__all__ = ["renamed"]


def renamed(function: Any, names: dict[str, Any], compiled: Any = cute.jit) -> Any:
    """One of the library's functions, in which some names of its module mean something else.

    Args:
        function: the library's.
        names: what they mean.
        compiled: what the library decorates it with.
    """
    known = inspect.unwrap(function)
    same = FunctionType(
        known.__code__,
        {**known.__globals__, **names},
        known.__name__,
        known.__defaults__,
        known.__closure__,
    )
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__annotations__"):
        setattr(same, name, getattr(known, name))
    return compiled(same)
