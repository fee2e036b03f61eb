"""``aten::cross_entropy_loss`` in the ops of `ops.py`, and its derivative. No DSL is imported here.

The derivative saves the logits, where native saves log-probabilities: so whoever writes to logits
before the backward gets autograd's error, which native does not raise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import opgraft
from opgraft_kernels.cross_entropy import ops
from opgraft_kernels.cross_entropy.kept import Statistics, keep, take

__all__ = ["backward", "cross_entropy", "setup_context"]

_forward = getattr(getattr(torch.ops, ops.NAMESPACE), ops.FORWARD).default
_backward = getattr(getattr(torch.ops, ops.NAMESPACE), ops.BACKWARD).default


def cross_entropy(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """``aten::cross_entropy_loss``, of one row of logits or a matrix, and class indices.

    Raises:
        IndexError: on the CPU, a target is no class. On a GPU that is an assertion on the device.
    """
    # Native's autocast computes what cross-entropy is made of in float32.
    dtype = torch.float32 if torch.is_autocast_enabled(self.device.type) else self.dtype
    loss, *statistics = _forward(
        self, target, weight, reduction, ignore_index, label_smoothing, dtype=dtype
    )
    keep(self, loss, Statistics(*statistics))
    return loss


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, target, weight, *ctx.numbers = inputs
    kept = take(output) or (None, None)
    ctx.save_for_backward(logits, target, weight, *kept)


def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    logits, target, weight, rows, mass = ctx.saved_tensors
    if rows is None:
        dx = _native(grad, logits, target, weight, *ctx.numbers)
    else:
        # Autograd's gradients may be lazy: no router has looked at them.
        if grad._is_zerotensor():
            grad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
        grad = grad.resolve_neg()
        with torch.no_grad():  # `create_graph` or not: the op of the backward has no derivative
            dx = _backward(grad, logits, target, weight, rows, mass, *ctx.numbers)
    return dx, None, None, None, None, None


def _native(
    grad: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, *numbers: Any
) -> Tensor:
    """The gradient where the native kernel computed the loss: an override that failed fell back."""
    native = opgraft.native("aten::cross_entropy_loss")
    with torch.enable_grad():
        x = logits.detach().requires_grad_()
        # A gradient of autocast's dtype may be too large for that of the logits.
        weight = None if weight is None else weight.to(grad.dtype)
        loss = native(x.to(grad.dtype), target, weight, *numbers)
        (dx,) = torch.autograd.grad(loss, x, grad)
    return dx
