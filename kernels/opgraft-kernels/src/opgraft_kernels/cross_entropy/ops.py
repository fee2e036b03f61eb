"""The two ops that cross-entropy is made of here: its forward, and its backward.

``aten::cross_entropy_loss`` returns the loss alone, and has no backward op. These return and take
what the backward needs, so each is overridden as any op is, with launch plans of its own. Their
native kernels are below, in ATen's ops: they serve while nothing is compiled, and are what the
kernels are compared with. They keep no log-probabilities either, but those of some rows at a time:
who has no memory for all of them has none while a kernel compiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = [
    "BACKWARD",
    "FORWARD",
    "MEAN",
    "NAMESPACE",
    "NONE",
    "check_targets",
    "cross_entropy",
    "cross_entropy_backward",
]

NAMESPACE, FORWARD, BACKWARD = "opgraft_kernels", "_cross_entropy", "_cross_entropy_backward"

#: Values of the argument `reduction`.
NONE, MEAN = 0, 1

#: Elements whose log-probabilities the native kernels keep at a time. As many stay in a GPU's cache
#: from one of ATen's ops to the next.
_CHUNK = 2**22

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
# Of the logits: `statistics` has each row's maximum and, below, the logarithm of the sum of what
# the others are to it, [2, rows]; `mass` the sum of the rows' weights for a mean, else nothing.
# Both statistics are NaN of a row without probabilities (-inf throughout, or with inf or NaN): a
# launch plan is compared with native in its first calls, whatever their rows are.
_library.define(
    f"{FORWARD}(Tensor self, Tensor target, Tensor? weight, int reduction, int ignore_index, "
    "float label_smoothing, *, ScalarType dtype) -> (Tensor loss, Tensor statistics, Tensor mass)"
)
_library.define(
    f"{BACKWARD}(Tensor grad, Tensor self, Tensor target, Tensor? weight, Tensor statistics, "
    "Tensor mass, int reduction, int ignore_index, float label_smoothing) -> Tensor"
)


# Neither has a derivative: without `no_grad`, autograd would find one in ATen's ops.


@torch.no_grad()
def cross_entropy(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of one row of logits or a matrix, and class indices; and what its backward needs."""
    loss, statistics, mass = _allocated(self, target, reduction, dtype)
    x, indices = _as_rows(self, target)
    losses = statistics.new_empty(indices.shape)
    w = None if weight is None else weight.to(statistics.dtype)
    for rows in _chunks(x):
        t = indices[rows]
        log_p = torch.log_softmax(x[rows], -1, dtype=statistics.dtype)
        statistics[1, rows] = -log_p.amax(-1)
        lacks_probabilities = statistics[1, rows].isnan()
        statistics[0, rows] = x[rows].amax(-1).masked_fill(lacks_probabilities, math.nan)
        # With its assertion that there is such a class.
        part, _ = torch.ops.aten.nll_loss_forward(log_p, t, w, NONE, ignore_index)
        if label_smoothing > 0:
            of_all = -(log_p if w is None else log_p * w).sum(-1) / x.shape[1]
            of_all = of_all.masked_fill(t == ignore_index, 0)
            part = (1 - label_smoothing) * part + label_smoothing * of_all
        losses[rows] = part
    if reduction == NONE:
        loss.copy_(losses.view(loss.shape))
    elif reduction == MEAN:
        mass.copy_(_weights(indices, weight, ignore_index, statistics.dtype).sum())
        loss.copy_(losses.sum() / mass)
    else:
        loss.copy_(losses.sum())
    return loss, statistics, mass


@torch.no_grad()
def cross_entropy_backward(
    grad: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    mass: Tensor,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """The gradient of the logits, contiguous.

    Raises:
        IndexError: on the CPU, a target is no class.
    """
    check_targets(target, self.shape[-1], ignore_index)
    dx = _like_rows(self)
    x, indices = _as_rows(self, target)
    out, classes = dx.view(x.shape), x.shape[1]
    w = None if weight is None else weight.to(statistics.dtype)
    is_ignored = indices == ignore_index
    g = grad.to(statistics.dtype).expand(target.shape).reshape(-1)
    g = (g / mass if reduction == MEAN else g).masked_fill(is_ignored, 0)
    # Of the class of a row, and of each class.
    of_one = (1 - label_smoothing) * _weights(indices, weight, ignore_index, statistics.dtype)
    of_all = label_smoothing / classes
    indices = indices.masked_fill(is_ignored, 0)
    for rows in _chunks(x):
        t, one = indices[rows, None], of_one[rows, None]
        into = out[rows] if out.dtype == statistics.dtype else None
        p = torch.sub(x[rows], statistics[0, rows, None], out=into)
        p.sub_(statistics[1, rows, None]).exp_()
        if label_smoothing > 0:
            p *= one + of_all * (classes if w is None else w.sum())
            p -= of_all if w is None else of_all * w
        elif w is not None:
            p *= one
        p.scatter_(1, t, p.gather(1, t) - one)
        p *= g[rows, None]
        if into is None:
            out[rows] = p
    return dx


def check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """As native, on the CPU. On a GPU the forward fails an assertion.

    Triton's interpreter makes another error of an assertion, after the fact.
    """
    if target.device.type != "cpu":
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if wrong.any():
        raise IndexError(f"Target {target[wrong].flatten()[0].item()} is out of bounds.")


def _allocated(
    self: Tensor, target: Tensor, reduction: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """What the forward returns, without its values."""
    of_rows = torch.float64 if self.dtype == torch.float64 else torch.float32
    loss = self.new_empty(target.shape if reduction == NONE else (), dtype=dtype)
    statistics = self.new_empty((2, target.numel()), dtype=of_rows)
    return loss, statistics, self.new_empty(() if reduction == MEAN else (0,), dtype=of_rows)


def _like_rows(self: Tensor) -> Tensor:
    """What the backward returns, without its values."""
    return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def _as_rows(self: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return (self, target) if self.dim() == 2 else (self[None], target[None])


def _chunks(x: Tensor) -> Iterator[slice]:
    """Slices of rows that have no more elements than `_CHUNK`, or one row."""
    rows = max(1, _CHUNK // max(1, x.shape[1]))
    for first in range(0, x.shape[0], rows):
        yield slice(first, first + rows)


def _weights(
    indices: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """The weight of each row's class, 0 where the row is ignored."""
    is_ignored = indices == ignore_index
    if weight is None:
        return (~is_ignored).to(dtype)
    chosen = weight.to(dtype)[indices.masked_fill(is_ignored, 0)]
    return chosen.masked_fill(is_ignored, 0)


def _forward_metadata(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return _allocated(self, target, reduction, dtype)


def _backward_metadata(grad: Tensor, self: Tensor, *_: object) -> Tensor:
    return _like_rows(self)


_library.impl(FORWARD, cross_entropy, "CompositeExplicitAutograd")
_library.impl(BACKWARD, cross_entropy_backward, "CompositeExplicitAutograd")
_library.impl(FORWARD, _forward_metadata, "Meta")
_library.impl(BACKWARD, _backward_metadata, "Meta")
