"""Functions of libraries that CuteDSL compiled, called through tvm-ffi, without CuteDSL."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import tvm_ffi

#: What the one function of a library is called.
NAME = "opgraft_function"


class LoadedFunction(tvm_ffi.Function):  # type: ignore[misc]  # tvm-ffi's types are Any where it is missing
    """A function of a library.

    Recordings of launch plans replace `__call__` of this class.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        address = ctypes.cast(getattr(library, f"__tvm_ffi_{NAME}"), ctypes.c_void_p).value
        function = tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=library)
        self.__move_handle_from__(function)

    def __call__(self, *arguments: Any) -> Any:
        return tvm_ffi.Function.__call__(self, *arguments)


def load(path: str, needs: Sequence[str]) -> LoadedFunction:
    """The function of a library.

    Args:
        path: the library.
        needs: the libraries that it needs, which the dynamic linker finds by their names once they
            are loaded.

    Raises:
        OSError: one of them cannot be loaded.
        AttributeError: it has no such function.
    """
    for each in needs:
        _load(each)
    return LoadedFunction(ctypes.CDLL(path))


@cache
def _load(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)
