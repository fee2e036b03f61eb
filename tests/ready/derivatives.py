"""Impls with derivatives of their own, which worker processes import."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from tests.ready.impls import is_dry

#: What ran here, in order.
ran: list[str] = []


def _note(what: str, tensor: torch.Tensor) -> None:
    if is_dry(tensor):
        with open(os.environ["OPGRAFT_TEST_NOTES"], "a", encoding="utf-8") as notes:
            notes.write(f"{what}\n")
    elif not threading.current_thread().name.startswith("opgraft"):  # which runs on stand-ins
        ran.append(what)


def silu(self: torch.Tensor) -> torch.Tensor:
    _note(f"forward, requires_grad {self.requires_grad}", self)
    return self * self.sigmoid()


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    _note(f"backward {ctx.needs_input_grad}", x)
    s = x.sigmoid()
    return grad * s * (1 + x * (1 - s))


def backward_that_needs_values(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    assert float(grad.detach().flatten()[0]) < 1e30
    return backward(ctx, grad)


def backward_that_never_works(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no compiler found for the backward")


def linear_sum(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    _note("composite forward", input)
    return (input * other).sum(-1)


def setup_linear_sum(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def backward_linear_sum(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, y = ctx.saved_tensors
    _note("composite backward", x)
    return grad[..., None] * y, grad[..., None] * x
