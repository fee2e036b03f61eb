"""Which ops, for which calls.

A condition is what keeps an override right and worth it: it sees dtypes, shapes, strides and
numbers of a call, never values, and is decided before anything runs. The arguments are named as the
op's schema names them: `print(torch.ops.aten._softmax.default._schema)`.
"""

from __future__ import annotations

import torch
from opgraft import Override, triton_utils, when

# One row is one block of the kernel.
MAX_COLUMNS = 16384
# Where it is worth it: `make bench` says so for your GPU. On an H200, in bfloat16, calls got 1.4 to
# 3.2 times as fast from 2**24 elements on, in rows of 1024 to 16384. With fewer elements PyTorch's
# own kernel is done before a Triton launch is; in rows of 128 it is faster at any size.
MIN_ELEMENTS = 2**24
MIN_COLUMNS = 1024
# In Triton's interpreter nothing is worth it: a small number lets both ways be seen.
MIN_ELEMENTS_INTERPRETED = 2**10


def softmax(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """`aten::_softmax` over the last dimension: what `torch.softmax` and `F.softmax` call."""
    from my_pack.triton_kernels import softmax_last_dimension

    return softmax_last_dimension(self)


def right(dispatch_key: str) -> when.Condition:
    """The calls that the kernel computes right. What it takes for granted stands here."""
    floats = [torch.float32, torch.float16]
    if dispatch_key != "CPU":  # the interpreter computes bfloat16 wrongly, without a word
        floats.append(torch.bfloat16)
    return (
        when.dtype("self", *floats)
        & (when.ndim("self") >= 1)
        & ((when.value("dim") == -1) | (when.value("dim") == when.ndim("self") - 1))
        & (when.value("half_to_float") == False)  # noqa: E712 - a condition, not a comparison
        & when.is_contiguous("self")
        & (when.numel("self") > 0)  # an empty grid is a launch error
        & (when.size("self", -1) <= MAX_COLUMNS)
    )


def worth_it(dispatch_key: str) -> when.Condition:
    """The calls that the kernel makes faster, the time on the host included."""
    if dispatch_key == "CPU":
        return when.numel("self") >= MIN_ELEMENTS_INTERPRETED
    return (when.numel("self") >= MIN_ELEMENTS) & (when.size("self", -1) >= MIN_COLUMNS)


def register_softmax(dispatch_key: str) -> Override:
    """Register :func:`softmax` at a dispatch key, `"CUDA"` or `"CPU"`."""
    return triton_utils.register_op_override(
        "aten",
        "_softmax",
        dispatch_key,
        softmax,
        cond=right(dispatch_key) & worth_it(dispatch_key),
        name="my_pack.softmax",
    )
