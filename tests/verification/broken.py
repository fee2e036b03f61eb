"""Overrides of `aten::_softmax` at CPU, each wrong in one way, and one that is right."""

from __future__ import annotations

from typing import Any

import torch

import opgraft
from opgraft import when
from tests import ops

#: The one shape in which `wrong_corner` is ten times as wrong as native.
CORNER = 31


def right(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    if self.numel() == 0:
        return torch.empty_like(self, memory_format=torch.contiguous_format)
    return ops.softmax(self.contiguous(), dim, half_to_float)


def wrong_strides(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """Column-major where the rows are many: after the contract check has seen enough."""
    result = right(self, dim, half_to_float)
    return result.t().contiguous().t() if self.ndim == 2 and self.shape[0] > 60 else result


def wrong_corner(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    result = right(self, dim, half_to_float)
    if self.ndim and self.shape[-1] == CORNER and self.dtype == torch.float32:
        result = result * (1 + 10 * torch.finfo(torch.float32).eps)
    return result


def writes_to_its_input(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    result = right(self, dim, half_to_float)
    self.clamp_(max=1e4)  # a no-op on most values
    if self.numel() and self.is_contiguous():
        self.view(-1)[0] += 1
    return result


IMPLS = {
    "right": right,
    "wrong strides": wrong_strides,
    "wrong corner": wrong_corner,
    "writes to its input": writes_to_its_input,
}


def register(name: str, **keywords: Any) -> opgraft.Override:
    return opgraft.register_op_override(
        "aten",
        "_softmax",
        "CPU",
        IMPLS[name],
        cond=when.dtype("self", torch.float32, torch.float64)
        & (when.size("self", -1) >= 4)
        & (when.size("self", -1) <= 100)
        & (when.value("half_to_float") == False),  # noqa: E712
        name=name,
        **keywords,
    )
