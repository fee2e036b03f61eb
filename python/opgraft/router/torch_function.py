"""How Python code runs where a native kernel runs: below `__torch_function__`.

Calls from Python have passed the `__torch_function__` of modes and subclasses before they get to a
router. Calls from C++, such as those of a backward, never see it, nor does a native kernel. If an
impl did, a subclass with a meaning of its own for an op would change the impl's result.
`BelowTorchFunction` in csrc/torch_function.h is the same for warm hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def hidden(arguments: Iterable[Any]) -> AbstractContextManager[None]:
    """Hide this thread's modes with a `__torch_function__` from what runs inside.

    So are those of subclasses if one of a call's `arguments` is of a subclass. Otherwise an impl
    may make tensors of one. Modes that it enters hold inside it.
    """
    any_subclass = any(map(_is_subclass, arguments))
    if not any_subclass and not torch._C._len_torch_function_stack():
        return nullcontext()
    return _hidden(any_subclass)


def _is_subclass(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_subclass, value))
    return isinstance(value, torch.Tensor) and type(value) not in _PLAIN


@contextmanager
def _hidden(any_subclass: bool) -> Iterator[None]:
    count = torch._C._len_torch_function_stack()
    modes = [torch._C._pop_torch_function_stack() for _ in range(count)]
    try:
        with torch._C.DisableTorchFunctionSubclass() if any_subclass else nullcontext():
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)
