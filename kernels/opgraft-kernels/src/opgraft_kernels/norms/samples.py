"""Calls of the norms' ops: for `opgraft verify` on both sides of conditions, for `opgraft tune`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from opgraft_kernels.crossovers import aligned_widths
from opgraft_kernels.integers import ceil_div
from opgraft_kernels.samples import MEASURED, Calls, dtypes_on

if TYPE_CHECKING:
    from opgraft_kernels.norms.overrides import Direction, Norm

__all__ = ["calls", "permuted_samples", "samples"]

_SHORT, _LONG = 65536, 131072
#: Places of the images of permuted inputs that are measured.
_IMAGE = 28 * 28
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


def samples(norm: Norm, device: torch.device) -> Calls:
    """Calls of a forward op, as arguments by name.

    Args:
        norm: whose.
        device: where the tensors are to live.
    """
    for shape, dtype, particular in _CASES:
        random = partial(torch.randn, device=device, dtype=dtype)
        hidden = shape[-1]
        yield {
            "input": _input(shape, particular, random),
            "normalized_shape": [hidden],
            **{
                name: None if particular == "no weight" else random(hidden)
                for name in norm.parameters
            },
            "eps": 1e-6,
        }


#: The shape in memory, and what else is particular. The second dimension becomes the last.
_PERMUTED_CASES: tuple[tuple[tuple[int, ...], str], ...] = (
    # Images, sequences, a matrix, videos; the second are narrow and few.
    ((2, 96, 7, 8), ""),
    ((2, 8, 2, 3), ""),
    ((3, 33, 5, 7), ""),
    ((2, 24, 40), ""),
    ((1, 100, 64), ""),
    ((2, 16, 3, 4, 5), ""),
    ((2, 1024, 5, 8), ""),
    ((2, 2048, 5, 8), ""),
    ((2, 64, 7, 8), "strided"),
    ((4, 64, 64), "expanded"),
    # Native's, or a copy's.
    ((2, 2056, 64), ""),
    ((2, 64, 64), "contiguous"),
    ((2, 64, 0), ""),
)


def permuted_samples(norm: Norm, direction: Direction, device: torch.device) -> Calls:
    """Calls of an op with rows whose elements are far apart, as arguments by name.

    Args:
        norm: whose.
        direction: ``"forward"`` or ``"backward"``.
        device: where the tensors are to live.
    """
    for shape, particular in _PERMUTED_CASES:
        for dtype in dtypes_on(device):
            random = partial(torch.randn, device=device, dtype=dtype)
            input = _input(shape, particular, random).movedim(1, -1)
            if particular == "contiguous":
                input = input.contiguous()
            yield _call(input, norm, direction)


def calls(
    norm: Norm,
    direction: Direction,
    device: torch.device,
    *,
    elements: int,
    hidden: int,
    itemsize: int = 2,
    misalignment: int | None = None,
    is_permuted: bool = False,
) -> Calls:
    """Calls of a norm's op to measure, as arguments by name; none if there is no such call.

    Args:
        norm: whose.
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
    widths: Iterable[int] = [hidden]
    if misalignment is not None:
        widths = aligned_widths(hidden, itemsize, misalignment)
    dtype = MEASURED[itemsize]
    random = partial(torch.randn, device=device, dtype=dtype)
    for width in widths if rows else ():
        if is_permuted:  # of images of 28 x 28, if there are as many rows
            side = min(rows, _IMAGE)
            # Whole images of at least as many elements, and of less than twice as many.
            images = ceil_div(elements, side * width) if rows > _IMAGE else 1
            input = random(images, width, side).mT
        else:
            input = random(rows, width)
        yield _call(input, norm, direction)


def _call(input: torch.Tensor, norm: Norm, direction: Direction) -> dict[str, Any]:
    """A call with random parameters, and with statistics that are nobody's."""
    *outer, hidden = input.shape
    random = partial(torch.randn, device=input.device, dtype=input.dtype)
    call: dict[str, Any] = {
        "input": input,
        "normalized_shape": [hidden],
        **{name: random(hidden) for name in norm.parameters},
    }
    if direction == "forward":
        return {**call, "eps": 1e-6}
    for name in norm.statistics:
        call[name] = torch.ones(*outer, 1, device=input.device)
    call["grad_out"] = random(*outer, hidden)
    return {**call, "output_mask": [True] * (1 + len(norm.parameters))}


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
