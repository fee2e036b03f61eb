"""Inputs that several families' tests have alike: layouts, and rows at the ends of the range."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

__all__ = ["LAYOUTS", "special_rows"]

#: Matrices that are not laid out as they were made.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced rows": lambda t: torch.cat([t, t[:, :3]], dim=1)[:, : t.shape[1]],
    "spread": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
    "misaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "one row": lambda t: t[:1].expand(t.shape),
}


def special_rows(size: int) -> torch.Tensor:
    """Ten rows at the ends of the range."""
    rows = torch.randn(10, size)
    rows[0] = -math.inf
    rows[1] = -math.inf
    rows[1, size // 2] = 3.0  # one finite value
    rows[2, 0] = math.nan
    rows[3, -1] = math.inf
    rows[4] = 7.0
    rows[5, : size - 1] = -math.inf
    rows[6, size // 3 :] = -math.inf
    rows[7] = torch.finfo(torch.float32).min
    rows[8] = torch.linspace(-3e38, 3e38, size)
    rows[9] = math.inf
    return rows
