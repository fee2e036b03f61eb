"""Functions of libraries that CuteDSL compiled, called through tvm-ffi, without CuteDSL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi

from opgraft.cache import libraries


class LoadedFunction(tvm_ffi.Function):  # type: ignore[misc]  # tvm-ffi's types are Any where it is missing
    """A function of a library.

    Recordings of launch plans replace `__call__` of this class.
    """

    def __init__(self, path: str, needs: Sequence[str]) -> None:
        library, address = libraries.load(path, needs)
        function = tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=library)
        self.__move_handle_from__(function)

    def __call__(self, *arguments: Any) -> Any:
        return tvm_ffi.Function.__call__(self, *arguments)


def load(path: str, needs: Sequence[str]) -> LoadedFunction:
    """The function of a library; see :func:`opgraft.cache.libraries.load`."""
    return LoadedFunction(path, needs)
