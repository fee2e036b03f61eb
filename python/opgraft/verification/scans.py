"""Computes scans (`cumsum`) by blocks, as kernels do, to estimate their rounding errors.

On the CPU, native adds float32 values in float64. Its error is only that of the last rounding. So
it is no measure for a kernel that adds in float32, as native's own on a GPU does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from opgraft.ops.schema import Call, Op
from opgraft.router import threads

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: By op: how an element is joined to those before it.
_STEPS: dict[str, Step] = {
    "cumsum": torch.add,
    "cumprod": torch.mul,
    "logcumsumexp": torch.logaddexp,
    "_logcumsumexp": torch.logaddexp,
}


def is_scan(op: Op) -> bool:
    """Whether an op is a scan: each element of its result combines those before it.

    >>> from opgraft.ops.schema import resolve
    >>> is_scan(resolve("aten::cumsum_")), is_scan(resolve("aten::sum"))
    (True, False)
    """
    return _symbol(op) in _STEPS


def by_blocks(call: Call) -> torch.Tensor:
    """The result of a scan that is computed by blocks, in float32 or the call's wider dtype.

    There are as many blocks as elements in a block. So the number of roundings of each result is
    about twice the square root of the number of its terms.

    Args:
        call: a call of a scan, which is not changed.

    Returns:
        The result in the dtype of the call's result.

    >>> from opgraft.ops.schema import resolve
    >>> by_blocks(resolve("aten::cumsum").bind((torch.ones(5), 0), {}))
    tensor([1., 2., 3., 4., 5.])
    """
    values, dim = call.named["self"], call.named["dim"]
    dtype = call.named.get("dtype") or values.dtype
    with torch.no_grad(), threads.scope(threads.EVERYTHING):
        wide = values.detach().to(dtype).to(torch.promote_types(dtype, torch.float32))
        if wide.ndim == 0 or wide.numel() == 0:
            return wide.to(dtype)
        scanned = _by_blocks(wide.movedim(dim, 0), _STEPS[_symbol(call.op)])
        return scanned.movedim(0, dim).to(dtype)


def _symbol(op: Op) -> str:
    return op.name.partition("::")[2].partition(".")[0].removesuffix("_")


def _by_blocks(values: torch.Tensor, step: Step) -> torch.Tensor:
    """Along the first dimension."""
    size = math.isqrt(len(values) - 1) + 1
    blocks = [_in_order(block, step) for block in values.split(size)]
    totals = _in_order(torch.stack([block[-1] for block in blocks]), step)
    return torch.cat(
        [blocks[0], *(step(total, block) for total, block in zip(totals, blocks[1:], strict=False))]
    )


def _in_order(values: torch.Tensor, step: Step) -> torch.Tensor:
    out = values.clone()
    for index in range(1, len(out)):
        out[index] = step(out[index - 1], out[index])
    return out
