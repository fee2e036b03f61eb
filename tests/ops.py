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


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`aten::native_layer_norm`, by other ops than itself."""
    dims = tuple(range(-len(normalized_shape), 0))
    mean = input.mean(dims, keepdim=True)
    centred = input - mean
    rstd = torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    out = centred * rstd
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.contiguous(), mean.contiguous(), rstd.contiguous()
