"""Calls of the negative log-likelihood: for `opgraft verify` at the ends of the range, for `opgraft
tune`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from opgraft_kernels.cross_entropy.samples import (
    IGNORED,
    KINDS,
    Case,
    sample_of,
    target_of,
)
from opgraft_kernels.crossovers import aligned_widths
from opgraft_kernels.samples import MEASURED, dtypes_and_float64_on

__all__ = ["calls", "samples"]

_CASES: tuple[Case, ...] = (
    # Blocks that hold rows, and rows that hold blocks; more rows than a program adds up.
    ((15, 100), ""),
    ((5, 1), ""),
    ((2, 40000), ""),
    ((3000, 7), ""),
    ((40, 200), "ignored"),
    ((4, 100), "all ignored"),
    ((64, 200), "masked"),
    ((64, 200), "NaN"),
    ((32, 200), "sliced"),
    # Native's.
    ((100,), ""),
    ((8, 20), "transposed"),
    ((0, 16), ""),
)
#: No more elements are measured: there are several calls at once.
_LARGEST = 2**30


def samples(direction: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Calls of the ops of the negative log-likelihood.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        device: where the tensors are to live.
    """
    for case, dtype, kind in itertools.product(_CASES, dtypes_and_float64_on(device), KINDS):
        sample = sample_of(case, dtype, kind, device)
        del sample["label_smoothing"]
        yield _call(direction, sample)


def _call(direction: str, sample: dict[str, Any]) -> dict[str, Any]:
    """A call of the forward, or of the backward of what it returns."""
    if direction == "forward":
        return sample
    loss, total_weight = torch.ops.aten.nll_loss_forward(*sample.values())
    grad = torch.linspace(1, 2, loss.numel(), device=loss.device).to(loss.dtype).view(loss.shape)
    return {"grad_output": grad, **sample, "total_weight": total_weight}


def calls(
    direction: str,
    device: torch.device,
    *,
    rows: int,
    classes: int,
    itemsize: int,
    is_summed: int,
) -> Iterator[dict[str, Any]]:
    """A call to measure, as arguments by name; none if there is no such call, or it is too large.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        device: where the tensors are to live.
        rows: of the log-probabilities.
        classes: at least; less than twice as many.
        itemsize: bytes of an element.
        is_summed: whether the rows' losses are added up.
    """
    width = next(aligned_widths(classes, itemsize, 0), classes)
    if rows * width <= _LARGEST:
        dtype = MEASURED[itemsize]
        logits = torch.randn(rows, width, dtype=dtype, device=device)
        yield _call(
            direction,
            {
                "self": logits,
                "target": target_of(logits, ""),
                "weight": None,
                "reduction": is_summed,
                "ignore_index": IGNORED,
            },
        )
