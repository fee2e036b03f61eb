"""Plain-torch implementations of ops, to register as overrides in tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def softmax(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """`aten::_softmax`, by other ops than itself."""
    wide = self.float() if half_to_float else self
    weights = (wide - wide.amax(dim, keepdim=True)).exp()
    return weights / weights.sum(dim, keepdim=True)


def softmax_by_itself(
    keyset: torch.DispatchKeySet, self: torch.Tensor, dim: int, half_to_float: bool
) -> torch.Tensor:
    """The form that decides for itself: always the native kernel, by the same op."""
    return torch.ops.aten._softmax.default(self, dim, half_to_float)


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`aten::_fused_rms_norm`, with float32 inside."""
    dims = tuple(range(-len(normalized_shape), 0))
    epsilon = torch.finfo(torch.float32).eps if eps is None else eps
    wide = input.float()
    rstd = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + epsilon)
    out = wide * rstd
    return (out if weight is None else out * weight).to(input.dtype), rstd
