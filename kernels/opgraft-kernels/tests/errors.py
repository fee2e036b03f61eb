"""How far results are from the right ones."""

from __future__ import annotations

import torch

__all__ = ["largest_error", "relative_error"]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to the largest element."""
    return _error(actual, expected, least=1e-30)


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to the largest element, or to 1 where that is more."""
    return _error(actual, expected, least=1.0)


def _error(actual: torch.Tensor, expected: torch.Tensor, least: float) -> float:
    assert actual.shape == expected.shape
    assert not actual.isnan().any()
    if not expected.numel():
        return 0.0
    worst = (actual.double() - expected.double()).abs().max()
    return float(worst / expected.double().abs().max().clamp(min=least))
