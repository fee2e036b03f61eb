"""A transformer in small, and overrides for what it calls, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import opgraft
from opgraft import Override, when
from opgraft.when import Condition
from tests import ops

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
#: The batch from which on the overrides of :func:`override_all` take a call.
BATCH = 8


class Block(nn.Module):
    """Normalise, attend, project, softmax: everything that the overrides take."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        h = F.rms_norm(x, (width,), self.weight, 1e-6)
        qkv = self.qkv(h).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = x + self.out(a.transpose(1, 2).reshape(batch, length, width))
        return torch.softmax(y, -1)


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, _, weight, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def rms_norm_backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, rstd = ctx.saved_tensors
    normed, scaled = x * rstd, grad * weight
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx, None, (grad * normed).sum(tuple(range(x.ndim - 1))), None


def itself(op: str) -> Any:
    """An impl that is the native kernel: inside an impl, the op is."""
    return getattr(torch.ops.aten, op).default


def softmax_backward(
    grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    weighted = output * grad_output
    return (weighted - output * weighted.sum(dim, keepdim=True)).to(input_dtype)


def override(op: str, impl: Any, cond: Condition | None = None, **options: Any) -> Override:
    options.setdefault("compile", "opaque")
    options.setdefault("unconditional_override", cond is None)
    return opgraft.register_op_override("aten", op, "CPU", impl, cond=cond, name=op, **options)


def override_all(batch: int = BATCH) -> dict[str, Override]:
    """Every op of :class:`Block`, forward and backward, from a batch size on."""
    rows = 6 * batch  # mm sees the batch times the sequence's length
    overrides = [
        override(
            "_fused_rms_norm",
            ops.rms_norm,
            when.dtype("input", torch.float32),  # composite here: takes all, for its derivative
            autograd=(rms_norm_setup, rms_norm_backward),
        ),
        override(ATTENTION, itself(ATTENTION), when.size("query", 0) >= batch),
        override(
            f"{ATTENTION}_backward", itself(f"{ATTENTION}_backward"), when.size("query", 0) >= batch
        ),
        override("_softmax", ops.softmax, when.size("self", 0) >= batch),
        override("_softmax_backward_data", softmax_backward, when.size("output", 0) >= batch),
        override("mm", itself("mm"), when.size("self", 0) >= rows),
    ]
    return {each.name: each for each in overrides}


def an_input(batch: int, length: int = 6, width: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, length, width, generator=generator)


def training_step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, the input's gradient, and the parameters'."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.arange(y.shape[-1])).pow(2).sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [y.detach(), *(grad.clone() for grad in grads if grad is not None)]


def stock_step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The same in eager PyTorch."""
    with opgraft.disabled():
        return training_step(model, x)


def hits(overrides: dict[str, Override]) -> dict[str, int]:
    return {name: override.hits for name, override in overrides.items()}
