"""The derivative of cross-entropy. Nothing here imports Triton before a backward runs.

It saves the logits, where native saves log-probabilities: so whoever writes to logits before the
backward gets autograd's error, which native does not raise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import opgraft
from opgraft_kernels.cross_entropy.kept import Statistics, take

__all__ = ["backward", "setup_context"]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, target, weight, *ctx.numbers = inputs
    kept = take(output) or (None, None)
    ctx.save_for_backward(logits, target, weight, *kept)


def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    logits, target, weight, rows, mass = ctx.saved_tensors
    if rows is None:
        dx = _native(grad, logits, target, weight, *ctx.numbers)
    else:
        from opgraft_kernels.cross_entropy.triton_kernels import gradient

        _, *numbers = ctx.numbers
        dx = gradient(grad, logits, target, weight, Statistics(rows, mass), *numbers)
    return dx, None, None, None, None, None


def _native(grad: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    """The gradient where the native kernel computed the loss: an override that failed fell back."""
    native = opgraft.native("aten::cross_entropy_loss")
    with torch.enable_grad():
        x = logits.detach().requires_grad_()
        (dx,) = torch.autograd.grad(native(x, *rest), x, grad)
    return dx
