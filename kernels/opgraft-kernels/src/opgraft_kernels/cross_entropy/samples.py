"""Calls of cross-entropy: for `opgraft verify` at the ends of the range, for `opgraft tune`."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import torch

from opgraft_kernels.cross_entropy import ops
from opgraft_kernels.crossovers import aligned_widths
from opgraft_kernels.samples import MEASURED, Calls, dtypes_and_float64_on, tensor_of

__all__ = [
    "KINDS",
    "Case",
    "Kind",
    "backward_samples",
    "calls",
    "forward_samples",
    "gradient_of",
    "sample_of",
    "samples",
]

#: The logits' shape, and what is particular.
Case: TypeAlias = tuple[tuple[int, ...], str]
#: Reduction, label smoothing, and whether classes have weights.
Kind: TypeAlias = tuple[int, float, bool]

_CASES: tuple[Case, ...] = (
    # Rows that share a program, that fit one, that are read in blocks; odd sizes of each.
    ((129, 16), ""),
    ((15, 100), ""),
    ((3, 4097), ""),
    ((2, 40000), ""),
    ((2, 50257), ""),
    ((5, 1), ""),
    ((100,), ""),
    # More rows than a program adds up.
    ((16500, 3), ""),
    ((40, 200), "ignored"),
    ((4, 40000), "ignored"),
    ((4, 100), "all ignored"),
    ((64, 200), "masked"),
    ((4, 40000), "masked"),
    ((64, 200), "NaN"),
    # In place.
    ((32, 200), "sliced"),
    # Native's.
    ((32, 200), "transposed"),
    ((32, 200), "probabilities"),
    ((4, 20, 5), ""),
    ((0, 16), ""),
)
#: Those of the two ops that the loss is made of: of class indices, for a matrix or a row.
_CASES_OF_PARTS: tuple[Case, ...] = (
    ((9, 16), ""),
    ((8, 20), "transposed"),
    ((15, 100), ""),
    ((100,), ""),
    ((40, 200), "ignored"),
    ((32, 200), "sliced"),
    ((64, 200), "masked"),
    ((4, 40000), "masked"),
    ((64, 200), "NaN"),
    ((4, 40000), "NaN"),
    ((4, 100), "all ignored"),
    ((2, 40000), ""),
    ((16500, 3), ""),
)
#: Of each case.
KINDS: tuple[Kind, ...] = ((0, 0.0, False), (1, 0.0, True), (1, 0.1, False), (2, 0.2, True))
_IGNORED = -100


def samples(device: torch.device) -> Calls:
    """Calls of ATen's op, as arguments by name.

    Args:
        device: where the tensors are to live.
    """
    for case, dtype, kind in itertools.product(_CASES, dtypes_and_float64_on(device), KINDS):
        yield sample_of(case, dtype, kind, device)


def forward_samples(device: torch.device) -> Calls:
    """Calls of the op of the forward.

    Args:
        device: where the tensors are to live.
    """
    dtypes = dtypes_and_float64_on(device)
    for kind, case, dtype in itertools.product(KINDS, _CASES_OF_PARTS, dtypes):
        yield {**sample_of(case, dtype, kind, device), "dtype": dtype}


def backward_samples(device: torch.device) -> Calls:
    """Calls of the op of the backward, of what native's forward returned.

    Args:
        device: where the tensors are to live.
    """
    for sample in forward_samples(device):
        loss, statistics, mass = ops.cross_entropy(**sample)
        del sample["dtype"]
        yield {"grad_loss": gradient_of(loss), **sample, "statistics": statistics, "mass": mass}


def sample_of(case: Case, dtype: torch.dtype, kind: Kind, device: torch.device) -> dict[str, Any]:
    """A call of ATen's op, as arguments by name."""
    (shape, particular), (reduction, smoothing, is_weighted) = case, kind
    logits = tensor_of(shape, particular, dtype, device)
    return {
        "self": logits,
        "target": _target(logits, particular),
        "weight": _weight(logits) if is_weighted else None,
        "reduction": reduction,
        "ignore_index": _IGNORED,
        "label_smoothing": smoothing,
    }


def calls(
    device: torch.device, *, elements: int, classes: int, itemsize: int, misalignment: int
) -> Calls:
    """Calls to measure, as arguments by name; none if there is no such call.

    Args:
        device: where the tensors are to live.
        elements: of the logits, at least.
        classes: at least; less than twice as many.
        itemsize: bytes of an element.
        misalignment: of a row; see `crossovers`.
    """
    rows = elements // classes
    dtype = MEASURED[itemsize]
    for width in aligned_widths(classes, itemsize, misalignment) if rows else ():
        yield sample_of(((rows, width), ""), dtype, (1, 0.0, False), device)


def gradient_of(loss: torch.Tensor) -> torch.Tensor:
    """A gradient, of which no two elements are alike."""
    return torch.linspace(1, 2, loss.numel(), device=loss.device).to(loss.dtype).view(loss.shape)


def _target(logits: torch.Tensor, particular: str) -> torch.Tensor:
    """Random classes; or ``"probabilities"``, or some or all of them ``"ignored"``."""
    if particular == "probabilities":
        return torch.randn_like(logits).softmax(-1)
    class_dim = min(1, logits.dim() - 1)
    shape = [size for dim, size in enumerate(logits.shape) if dim != class_dim]
    target = torch.randint(0, logits.shape[class_dim], shape, device=logits.device)
    if particular == "ignored":
        target[::2] = _IGNORED
    if particular == "all ignored":
        target.fill_(_IGNORED)
    return target


def _weight(logits: torch.Tensor) -> torch.Tensor:
    classes = logits.shape[min(1, logits.dim() - 1)]
    return torch.linspace(0.5, 2, classes, device=logits.device).to(logits.dtype)
