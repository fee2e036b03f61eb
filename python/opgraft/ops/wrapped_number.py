"""The 0-dim tensor that the dispatcher makes of a Python number, made in Python.

In `x * 2` the dispatcher turns `2` into a 0-dim tensor that is marked as a *wrapped number*: it
takes part in type promotion as a number, not as a tensor (an int32 tensor times `2.5` is float32;
times a 0-dim float64 tensor it is float64). A kernel written in Python gets the bare number back,
and `call_boxed` refuses that. No binding sets the mark, but copies of a marked tensor keep it, and
autograd hands out one: the operand that `x * 2` saves for its backward.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from opgraft.ops.bypass import bypassing

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def wrapped_number(value: bool | int | float | complex) -> torch.Tensor:
    """`value` as the 0-dim CPU tensor that the dispatcher would make of it.

    Args:
        value: a Python number.

    Returns:
        A tensor of dtype bool, int64, float64 or complex128 that promotes as a number.

    >>> import torch
    >>> torch.result_type(torch.ones(2, dtype=torch.int32), wrapped_number(2.5))
    torch.float32
    """
    kind = next(kind for kind in _DTYPES if isinstance(value, kind))
    storage = torch.tensor(value, dtype=_DTYPES[kind], device="cpu")
    seed = seeds()[kind].detach()
    with bypassing("aten::set_.source_Tensor"):  # its overrides may want a number
        return seed.set_(storage)  # type: ignore[call-overload, no-any-return]


@cache
def seeds() -> dict[type, torch.Tensor]:
    """A wrapped number of each type.

    The router in Python asks for them before it goes in anywhere: to it `mul` brings a bare number,
    for which it would need them. Not made at import, where they would cost every `import torch`
    more than a millisecond.
    """
    # On a thread of its own, where autograd is on and no mode is: inside a kernel autograd is off
    # and saves nothing.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_make_seeds).result()


def _make_seeds() -> dict[type, torch.Tensor]:
    with bypassing("aten::mul.Tensor"):  # which may have overrides by now
        return {kind: _seed(kind) for kind in _DTYPES}


def _seed(kind: type) -> torch.Tensor:
    product = torch.ones((), device="cpu", requires_grad=True) * kind(1)
    return product.grad_fn._saved_other  # type: ignore[union-attr, no-any-return]
