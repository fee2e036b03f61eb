"""Calls of the softmax ops: for `opgraft verify` at the ends of the range, for `opgraft tune`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from opgraft_kernels.crossovers import aligned_widths
from opgraft_kernels.integers import ceil_div
from opgraft_kernels.samples import MEASURED, Calls, dtypes_and_float64_on, tensor_of

if TYPE_CHECKING:
    from opgraft_kernels.softmax.overrides import Op

__all__ = ["calls", "samples"]

#: The shape, the dimension, and what is particular.
_CASES: tuple[tuple[tuple[int, ...], int, str], ...] = (
    # Rows that share a program, that fit one, that are read in blocks; odd sizes of each.
    ((129, 16), -1, ""),
    ((3, 5, 100), -1, ""),
    ((7, 4096), 1, ""),
    ((3, 4097), -1, ""),
    ((2, 40000), -1, ""),
    ((2, 50257), -1, ""),
    # On a GPU split over programs.
    ((3, 65600), -1, ""),
    ((3, 65600), -1, "masked"),
    ((5, 1), -1, ""),
    # Lines that are strided: short, and read in blocks.
    ((2, 21, 33, 17), 1, ""),
    ((2, 64, 128), -2, ""),
    ((40, 3), 0, ""),
    ((9000, 70), 0, ""),
    # A mask: some rows are nothing but -inf.
    ((64, 200), -1, "masked"),
    ((2, 40000), -1, "masked"),
    ((64, 200), -1, "NaN"),
    # In place, or after a copy.
    ((32, 200), -1, "sliced"),
    ((32, 200), -1, "transposed"),
    ((32, 200), 0, "transposed"),
    # Native's.
    ((0, 16), -1, ""),
    ((), 0, ""),
)


def samples(op: Op, device: torch.device) -> Calls:
    """Calls of an op, as arguments by name.

    Args:
        op: which.
        device: where the tensors are to live.
    """
    for shape, dim, particular in _CASES:
        for dtype in dtypes_and_float64_on(device):
            x = tensor_of(shape, particular, dtype, device)
            yield _call(op, x, torch.randn_like(x), dim)
    if device.type != "cpu":
        x = torch.randn(64, 200, dtype=torch.float16, device=device)
        yield _call(op, x, torch.randn_like(x, dtype=torch.float32), -1, half_to_float=True)


def calls(
    op: Op,
    device: torch.device,
    *,
    elements: int,
    size: int,
    inner: int,
    itemsize: int,
    misalignment: int,
) -> Calls:
    """Calls of a softmax op to measure, as arguments by name; none if there is no such call.

    Args:
        op: which.
        device: where the tensors are to live.
        elements: of the input, at least.
        size: of the softmax's dimension, at least; less than twice as many.
        inner: elements of the dimensions behind it, likewise.
        itemsize: bytes of an element.
        misalignment: of a row if inner is 1, else of `inner` elements; see `crossovers`.
    """
    widths = aligned_widths(size if inner == 1 else inner, itemsize, misalignment)
    if elements < size * inner:
        return
    shapes: Iterable[tuple[int, ...]] = ((elements // size, width) for width in widths)
    if inner != 1:
        shapes = _strided_shapes(elements, size, next(widths, None))
    dtype = MEASURED[itemsize]
    for shape in shapes:
        x = torch.randn(shape, dtype=dtype, device=device)
        yield _call(op, x, torch.randn_like(x), 1)


def _strided_shapes(elements: int, size: int, inner: int | None) -> Iterator[tuple[int, ...]]:
    """One from the middle of the bucket of sizes, as in `aligned_widths`, where it has that many
    elements."""
    if inner is not None:
        sizes = (size + size // 2, size)
        shapes = [(ceil_div(elements, each * inner), each, inner) for each in sizes]
        yield from [each for each in shapes if math.prod(each) < 2 * elements][:1]


def _call(
    op: Op, x: torch.Tensor, grad: torch.Tensor, dim: int, half_to_float: bool = False
) -> dict[str, Any]:
    if op.direction == "forward":
        return {"self": x, "dim": dim, "half_to_float": half_to_float}
    output = getattr(torch, op.function)(x.to(grad.dtype), dim)
    return {"grad_output": grad, "output": output, "dim": dim, "input_dtype": x.dtype}
