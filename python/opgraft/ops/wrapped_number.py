"""Wrapped numbers: the 0-dim tensors that the dispatcher makes of Python numbers.

In `x * 2` the dispatcher turns `2` into a 0-dim tensor that is marked as a *wrapped number*: in
type promotion it counts as a number, not as a tensor (an int32 tensor times `2.5` is float32; times
a 0-dim float64 tensor it is float64). A kernel written in Python gets the bare number instead,
which `call_boxed` refuses. Python cannot set the mark, but copies of a marked tensor keep it.
Autograd provides one to copy: the operand that `x * 2` saves for its backward.

Making one calls no op. An op may have overrides, and if the Python router got a call with a wrapped
number (`detach` of one), it would have to make another one, without end.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import torch

from opgraft.ops.bypass import bypassing


class _Type(NamedTuple):
    """A Python number's type in C++."""

    dtype: torch.dtype
    format: str  # of its bytes, for `struct`
    one: bool | int | float | complex  # some number of this type


_TYPES = {
    bool: _Type(torch.bool, "?", True),
    int: _Type(torch.int64, "q", 1),
    float: _Type(torch.float64, "d", 1.0),
    complex: _Type(torch.complex128, "dd", 1j),
}
_UNSIGNED = _Type(torch.uint64, "Q", 2**63)  # for integers that do not fit int64
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def wrapped_number(value: bool | int | float | complex) -> torch.Tensor:
    """`value` as the 0-dim CPU tensor that the dispatcher would make of it.

    Args:
        value: a Python number.

    Returns:
        A tensor of dtype bool, int64, uint64, float64 or complex128 that promotes as a number.

    >>> import torch
    >>> torch.result_type(torch.ones(2, dtype=torch.int32), wrapped_number(2.5))
    torch.float32
    """
    kind = _type_of(value)
    parts = (value.real, value.imag) if isinstance(value, complex) else (value,)
    raw = struct.pack(kind.format, *parts)
    storage = torch.UntypedStorage.from_buffer(raw, dtype=torch.uint8)
    seeds, set_storage = _tools()
    # Unlike `detach`, `.data` calls no op, except under dispatch modes.
    with torch._C._DisableTorchDispatch():
        number = seeds[kind].data
        set_storage(_CPU, number, storage, 0, [], [])
    return number


def as_tensors(value: Any) -> Any:
    """`value`, or a list, with bare numbers replaced by wrapped numbers.

    >>> as_tensors(2), as_tensors([None, True])
    (tensor(2), [None, tensor(True)])
    """
    if isinstance(value, (list, tuple)):
        return type(value)(map(as_tensors, value))
    return wrapped_number(value) if isinstance(value, (bool, int, float, complex)) else value


def prepare() -> None:
    """Prepare :func:`wrapped_number` before any Python router is installed.

    A Python router calls this before it is installed. Done at import, it would cost every `import
    torch` more than a millisecond.
    """
    _tools()


def _type_of(value: bool | int | float | complex) -> _Type:
    if type(value) is int and value >= 2**63:
        return _UNSIGNED
    return next(found for kind, found in _TYPES.items() if isinstance(value, kind))


@cache
def _tools() -> tuple[dict[_Type, torch.Tensor], Callable[..., Any]]:
    """A wrapped number of each type, and the kernel of `set_`, which sets a tensor's storage."""
    kernel = torch.library.get_kernel("aten::set_.source_Storage_storage_offset", "CPU")
    # On a thread of its own, where autograd is on and no mode is active. Inside a kernel autograd
    # is off and saves nothing.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_seeds).result(), kernel.call_boxed


def _seeds() -> dict[_Type, torch.Tensor]:
    with ExitStack() as passed_by:
        for op in ("ones", "empty.memory_format", "fill_.Scalar", "mul.Tensor"):
            passed_by.enter_context(bypassing(f"aten::{op}"))  # the ops may have overrides by now
        return {kind: _seed(kind) for kind in (*_TYPES.values(), _UNSIGNED)}


def _seed(kind: _Type) -> torch.Tensor:
    product = torch.ones((), device="cpu", requires_grad=True) * kind.one
    return product.grad_fn._saved_other  # type: ignore[union-attr, no-any-return]
