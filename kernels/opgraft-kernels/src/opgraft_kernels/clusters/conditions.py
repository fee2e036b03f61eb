"""Which tensors the kernels over clusters can read. Imports no DSL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opgraft import when

__all__ = ["CLUSTER_ROWS", "for_clusters"]

# Rows that a cluster of Hopper's blocks shares, for which Triton has no reduction. Of shorter ones
# Triton's kernel holds half in a block; other widths do not fill the blocks.
CLUSTER_ROWS = (65536, 131072)


def for_clusters(
    elements: int, matrices: Sequence[str], parameters: Sequence[str], numbers: Sequence[str] = ()
) -> Any:
    """Whether `matrices`, ``input`` the first of them, are Hopper's, 16 bits, and long enough.

    Args:
        elements: of ``input``, from which the kernel pays.
        matrices: the tensors of ``input``'s shape.
        parameters: one row each, or None.
        numbers: the tensors of one float32 a row.
    """
    hidden = when.size("input", -1)
    condition = (
        ((hidden == CLUSTER_ROWS[0]) | (hidden == CLUSTER_ROWS[1]))
        & (when.numel("input") >= elements)
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
