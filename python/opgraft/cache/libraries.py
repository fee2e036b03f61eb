"""Libraries that CuteDSL compiled, and the function in each."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

#: What the one function of a library is called.
NAME = "opgraft_function"


def load(path: str, needs: Sequence[str]) -> tuple[ctypes.CDLL, int]:
    """A library, and the address of its function, as tvm-ffi's C interface declares functions.

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
    library = ctypes.CDLL(path)
    address = ctypes.cast(getattr(library, f"__tvm_ffi_{NAME}"), ctypes.c_void_p).value
    assert address is not None
    return library, address


@cache
def _load(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)
