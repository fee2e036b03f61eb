"""The two ops that cross-entropy is made of here, its forward and its backward; and ATen's op.

``aten::cross_entropy_loss`` returns the loss alone, and has no backward op. These return and take
what the backward needs, so each is overridden as any op is, with launch plans of its own. Their
native kernels are below, in ATen's ops: they serve while nothing is compiled, and are what the
kernels are compared with. They keep no log-probabilities either, but those of some rows at a time:
who has no memory for all of them has none while a kernel compiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import opgraft

__all__ = [
    "BACKWARD",
    "FORWARD",
    "MEAN",
    "NAMESPACE",
    "NONE",
    "check_targets",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_loss",
]

NAMESPACE, FORWARD, BACKWARD = "opgraft_kernels", "_cross_entropy", "_cross_entropy_backward"

#: Values of the argument `reduction`.
NONE, MEAN, _SUM = 0, 1, 2

#: Elements whose log-probabilities the native kernels keep at a time.
_CHUNK = 2**24

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
    f"{BACKWARD}(Tensor grad_loss, Tensor self, Tensor target, Tensor? weight, Tensor statistics, "
    "Tensor mass, int reduction, int ignore_index, float label_smoothing) -> Tensor grad_self"
)
opgraft.register_backward(f"{NAMESPACE}::{FORWARD}", f"{NAMESPACE}::{BACKWARD}")


# Both compute by what native cross-entropy computes by, as far as that goes: each kernel of ATen's
# is loaded at its first call in a process, which the call waits for, and those of native before.


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
    # Of the classes, and with smoothing of all: divided apart, as each may be 0 / 0.
    losses = statistics.new_zeros((2, *(indices.shape if reduction == NONE else ())))
    total = statistics.new_zeros(())
    w = None if weight is None else weight.to(statistics.dtype)
    for rows in _chunks(x):
        t = indices[rows]
        logits = x[rows].to(statistics.dtype)
        log_p = torch.log_softmax(logits, -1)
        largest = torch.aminmax(log_p, dim=-1).max
        # NaN where that is.
        statistics[0, rows] = torch.aminmax(logits, dim=-1).max + (largest - largest)
        statistics[1, rows] = torch.zeros_like(largest) - largest
        # With its assertion that there is such a class.
        part, of_rows = torch.ops.aten.nll_loss_forward(
            log_p, t, w, NONE if reduction == NONE else _SUM, ignore_index
        )
        where = rows if reduction == NONE else ...
        losses[0, where] += part
        if reduction != NONE:
            total += of_rows
        if label_smoothing > 0:
            of_all = -(log_p if w is None else log_p * w).sum(-1) / x.shape[1]
            of_all = of_all.masked_fill(t == ignore_index, 0)
            losses[1, where] += of_all if reduction == NONE else of_all.sum()
    if reduction == MEAN:
        mass.copy_(total)
        losses /= mass
    result = losses[0]
    if label_smoothing > 0:
        result = (1 - label_smoothing) * result + label_smoothing * losses[1]
    loss.copy_(result.view(loss.shape))
    return loss, statistics, mass


def cross_entropy_backward(
    grad_loss: Tensor,
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
    g = grad_loss.to(statistics.dtype).reshape(indices.shape if reduction == NONE else ())
    total = mass if reduction == MEAN else statistics.new_zeros(())
    for rows in _chunks(x):
        t = indices[rows]
        log_p = torch.log_softmax(x[rows].to(statistics.dtype), -1)
        of_rows = g[rows] if reduction == NONE else g
        d = torch.ops.aten.nll_loss_backward(of_rows, log_p, t, w, reduction, ignore_index, total)
        if label_smoothing > 0:
            of_all = (of_rows / total if reduction == MEAN else of_rows).expand(t.shape)
            of_all = of_all.masked_fill(t == ignore_index, 0)[:, None] * (label_smoothing / classes)
            d = (1 - label_smoothing) * d - (of_all if w is None else of_all * w)
        out[rows] = torch._log_softmax_backward_data(d, log_p, -1, log_p.dtype)
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


def _forward_metadata(
    self: Tensor, target: Tensor, _weight: object, reduction: int, *_: object, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return _allocated(self, target, reduction, dtype)


def _backward_metadata(grad_loss: Tensor, self: Tensor, *_: object) -> Tensor:
    return _like_rows(self)


_library.impl(FORWARD, cross_entropy, "CompositeExplicitAutograd")
_library.impl(BACKWARD, cross_entropy_backward, "CompositeExplicitAutograd")
_library.impl(FORWARD, _forward_metadata, "Meta")
_library.impl(BACKWARD, _backward_metadata, "Meta")

_forward = getattr(getattr(torch.ops, NAMESPACE), FORWARD).default


def cross_entropy_loss(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """``aten::cross_entropy_loss``, of one row of logits or a matrix, and class indices.

    The derivative saves the logits, where native saves log-probabilities: so whoever writes to
    logits before the backward gets autograd's error, which native does not raise.

    Raises:
        IndexError: on the CPU, a target is no class. On a GPU that is an assertion on the device.
    """
    # Native's autocast computes what cross-entropy is made of in float32.
    dtype = torch.float32 if torch.is_autocast_enabled(self.device.type) else self.dtype
    loss: Tensor
    loss, *_ = _forward(self, target, weight, reduction, ignore_index, label_smoothing, dtype=dtype)
    return loss
