"""Which tensors the kernels over clusters can read. Imports no DSL."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from opgraft import when

__all__ = ["for_clusters", "long_enough"]


def for_clusters(
    crossovers: Mapping[int, int],
    matrices: Sequence[str],
    parameters: Sequence[str],
    numbers: Sequence[str] = (),
) -> Any:
    """Whether `matrices`, ``input`` the first of them, are Hopper's, 16 bits, and long enough.

    Args:
        crossovers: by the width of the rows that there are kernels for, the elements of ``input``
            from which they pay.
        matrices: the tensors of ``input``'s shape.
        parameters: one row each, or None.
        numbers: the tensors of one float32 a row.
    """
    condition = (
        # First what is false of most rows.
        (when.size("input", -1) >= min(crossovers))
        & long_enough(crossovers)
        & (when.device_capability("input") == (9, 0))
        & when.dtype("input", torch.float16, torch.bfloat16)
    )
    # Loads of 16 bytes.
    for name in matrices:
        condition = condition & when.is_contiguous(name) & when.aligned(name, 16)
    for name in parameters:
        condition = condition & (
            when.is_none(name) | (when.is_contiguous(name) & when.aligned(name, 16))
        )
    for name in numbers:
        condition = condition & when.is_contiguous(name)
    return condition


def long_enough(crossovers: Mapping[int, int]) -> Any:
    """Whether ``input`` has rows of one of the widths, and as many elements as are given for it."""
    return functools.reduce(
        operator.or_,
        (
            (when.size("input", -1) == width) & (when.numel("input") >= elements)
            for width, elements in crossovers.items()
        ),
    )
