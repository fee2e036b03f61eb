"""Calls of the norms' forward ops for `opgraft verify`, on both sides of the conditions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .conditions import CLUSTER_ROWS

__all__ = ["samples"]

_SHORT, _LONG = CLUSTER_ROWS
#: The shape, and what else is particular.
_CASES: tuple[tuple[tuple[int, ...], torch.dtype, str], ...] = (
    ((1, _SHORT), torch.bfloat16, ""),
    ((256, _SHORT), torch.bfloat16, ""),  # the fewest rows of which the backward is taken
    ((255, _SHORT), torch.float16, ""),
    ((128, _LONG), torch.float16, ""),
    ((3, _LONG), torch.bfloat16, ""),
    ((2, 131, _SHORT), torch.bfloat16, ""),
    ((257, _SHORT), torch.float16, "no weight"),
    ((256, _SHORT), torch.bfloat16, "expanded"),
    ((256, _SHORT), torch.bfloat16, "apart"),
    ((256, _SHORT), torch.float16, "misaligned"),
    ((256, _SHORT), torch.float32, ""),
    ((256, _SHORT - 8), torch.bfloat16, ""),
    ((0, _SHORT), torch.bfloat16, ""),
    ((64, 4096), torch.bfloat16, ""),
)


def samples(has_bias: bool, device: torch.device) -> Iterator[dict[str, Any]]:
    """Calls of a forward op, as arguments by name.

    Args:
        has_bias: LayerNorm has one.
        device: where the tensors are to live.
    """
    for shape, dtype, particular in _CASES:
        rows, hidden = shape[:-1], shape[-1]
        input = torch.randn(shape, device=device, dtype=dtype)
        if particular == "expanded":
            input = torch.randn(hidden, device=device, dtype=dtype).expand(shape)
        elif particular == "apart":
            input = torch.randn(*rows, 2 * hidden, device=device, dtype=dtype)[..., :hidden]
        elif particular == "misaligned":
            input = torch.randn(input.numel() + 1, device=device, dtype=dtype)[1:].view(shape)
        names = ("weight", "bias") if has_bias else ("weight",)
        parameters: dict[str, Any] = {
            name: None
            if particular == "no weight"
            else torch.randn(hidden, device=device, dtype=dtype)
            for name in names
        }
        yield {"input": input, "normalized_shape": [hidden], **parameters, "eps": 1e-6}
