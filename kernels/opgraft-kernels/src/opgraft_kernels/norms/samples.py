"""Calls of the norms' ops: for `opgraft verify` on both sides of conditions, for `opgraft tune`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from opgraft_kernels.crossovers import aligned_width

__all__ = ["calls", "samples"]

_SHORT, _LONG = 65536, 131072
#: The shape, and what else is particular.
_CASES: tuple[tuple[tuple[int, ...], torch.dtype, str], ...] = (
    # Of each width many rows first.
    ((256, _SHORT), torch.bfloat16, ""),
    ((128, _LONG), torch.float16, ""),
    ((512, 32768), torch.bfloat16, ""),
    ((2048, 16384), torch.float16, ""),
    # Then few.
    ((1, _SHORT), torch.bfloat16, ""),
    ((2, 32768), torch.float16, ""),
    ((1024, 16384), torch.bfloat16, ""),
    # Odd numbers of them.
    ((255, _SHORT), torch.float16, ""),
    ((1, 32768), torch.bfloat16, ""),
    ((1023, 16384), torch.float16, ""),
    ((3, _LONG), torch.bfloat16, ""),
    ((2, 131, _SHORT), torch.bfloat16, ""),
    ((257, _SHORT), torch.float16, "no weight"),
    ((256, _SHORT), torch.bfloat16, "expanded"),
    ((256, _SHORT), torch.bfloat16, "strided"),
    ((256, _SHORT), torch.float16, "misaligned"),
    ((256, _SHORT), torch.float32, ""),
    ((256, _SHORT - 8), torch.bfloat16, ""),
    ((0, _SHORT), torch.bfloat16, ""),
    ((64, 4096), torch.bfloat16, ""),
)


def samples(parameters: Sequence[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """Calls of a forward op, as arguments by name.

    Args:
        parameters: the names of those arguments that have one element a column.
        device: where the tensors are to live.
    """
    for shape, dtype, particular in _CASES:
        random = partial(torch.randn, device=device, dtype=dtype)
        hidden = shape[-1]
        yield {
            "input": _input(shape, particular, random),
            "normalized_shape": [hidden],
            **{name: None if particular == "no weight" else random(hidden) for name in parameters},
            "eps": 1e-6,
        }


def calls(
    parameters: Sequence[str],
    statistics: Sequence[str],
    direction: str,
    device: torch.device,
    *,
    elements: int,
    hidden: int,
    itemsize: int = 2,
    misalignment: int | None = None,
    is_permuted: bool = False,
) -> Iterator[dict[str, Any]]:
    """A call of a norm's op to measure, as arguments by name; none if there is no such call.

    Args:
        parameters: as in `samples`.
        statistics: the names of what the forward returns for the backward.
        direction: ``"forward"`` or ``"backward"``.
        device: where the tensors are to live.
        elements: of the input, at least.
        hidden: elements of a row, at least; less than twice as many.
        itemsize: bytes of an element.
        misalignment: 0: rows are multiples of 16 bytes, 1: of 8, 2: of less. None: `hidden` is the
            exact number.
        is_permuted: whether rows are neighbours in memory, as of images whose channels they are.
    """
    rows = elements // hidden
    width: int | None = hidden
    if is_permuted:
        width = hidden + hidden // 2  # the middle of the bucket, as in `aligned_width`
    elif misalignment is not None:
        width = aligned_width(hidden, itemsize, misalignment)
    if rows == 0 or width is None:
        return
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    random = partial(torch.randn, device=device, dtype=dtype)
    # 28 x 28, where there are as many.
    shape = (-(-rows // 784), min(rows, 784)) if is_permuted else (rows,)
    call: dict[str, Any] = {
        "input": random(shape[0], width, shape[1]).mT if is_permuted else random(rows, width),
        "normalized_shape": [width],
        **{name: random(width) for name in parameters},
    }
    if direction == "forward":
        yield {**call, "eps": 1e-6}
        return
    for name in statistics:
        call[name] = torch.ones(*shape, 1, device=device)
    call["grad_out"] = random(*shape, width)
    yield {**call, "output_mask": [True] * (1 + len(parameters))}


def _input(
    shape: tuple[int, ...], particular: str, random: Callable[..., torch.Tensor]
) -> torch.Tensor:
    *rows, hidden = shape
    if particular == "expanded":
        return random(hidden).expand(shape)
    if particular == "strided":
        return random(*rows, 2 * hidden)[..., :hidden]
    if particular == "misaligned":
        return random(math.prod(shape) + 1)[1:].view(shape)
    return random(shape)
