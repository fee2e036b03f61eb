"""Calls of the norms' forward ops for `opgraft verify`, on both sides of the conditions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

__all__ = ["samples"]

_SHORT, _LONG = 65536, 131072
#: The shape, and what else is particular.
_CASES: tuple[tuple[tuple[int, ...], torch.dtype, str], ...] = (
    # Of each width first the fewest rows of which every backward is taken.
    ((256, _SHORT), torch.bfloat16, ""),
    ((128, _LONG), torch.float16, ""),
    ((512, 32768), torch.bfloat16, ""),
    ((2048, 16384), torch.float16, ""),
    # And of which LayerNorm's forward is.
    ((1, _SHORT), torch.bfloat16, ""),
    ((2, 32768), torch.float16, ""),
    ((1024, 16384), torch.bfloat16, ""),
    # One row less.
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
