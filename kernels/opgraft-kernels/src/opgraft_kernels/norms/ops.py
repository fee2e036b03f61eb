"""ATen's norm ops around kernels: what each takes and returns, whatever the DSL.

`F.rms_norm` calls ``aten::_fused_rms_norm`` and its backward, `F.layer_norm`
``aten::native_layer_norm`` and its backward. The functions below have these ops' signatures, after
the function that runs the kernels. They allocate what the op returns, and the kernels fill it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "Backward",
    "Forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "rms_norm_backward",
    "rms_norm_forward",
]


class Forward(Protocol):
    def __call__(
        self,
        input: Tensor,
        hidden: int,
        weight: Tensor | None,
        bias: Tensor | None,
        output: Tensor,
        mean: Tensor | None,
        rstd: Tensor,
        eps: float,
    ) -> None:
        """Fill `output`, the norm of `input`, contiguous, and `rstd`, one float32 a row.

        Args:
            input: rows of `hidden` elements.
            hidden: how many there are; not 0.
            weight: one element a column, or None.
            bias: likewise.
            output: contiguous, not empty, like `input`.
            mean: of LayerNorm; None makes it RMSNorm. One float32 a row, contiguous.
            rstd: likewise.
            eps: added to the mean of squares.
        """


class Backward(Protocol):
    def __call__(
        self,
        grad_out: Tensor,
        input: Tensor,
        hidden: int,
        weight: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        dx: Tensor | None,
        dw: Tensor | None,
        db: Tensor | None,
    ) -> None:
        """Fill the gradients that there are: of the input, the weight and the bias, contiguous.

        Those of weight and bias are summed in float32 in a fixed order: the same bits on every run
        on one kind of device. The other arguments are as in the forward.
        """


# What both of ATen's implementations, CPU and CUDA, take where eps is None, whatever the input's
# dtype: the epsilon of the type that they accumulate in.
_DEFAULT_EPS = torch.finfo(torch.float32).eps


def rms_norm_forward(
    forward: Forward,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
) -> tuple[Tensor, Tensor]:
    """``aten::_fused_rms_norm``: the output and rstd."""
    hidden = _hidden(normalized_shape)
    output, rstd = _like(input), _statistic(input, normalized_shape)
    if output.numel():
        eps = _DEFAULT_EPS if eps is None else eps
        forward(input, hidden, weight, None, output, None, rstd, eps)
    return output, rstd


def rms_norm_backward(
    backward: Backward,
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """``aten::_fused_rms_norm_backward``: those gradients of input and weight that are wanted."""
    hidden, elements = _hidden(normalized_shape), input.numel()
    dx = _like(input) if output_mask[0] else None
    dw = _sum_over_rows(weight, elements) if output_mask[1] else None
    if elements and not (dx is None and dw is None):
        backward(grad_out, input, hidden, weight, None, rstd, dx, dw, None)
    return dx, dw


def layer_norm_forward(
    forward: Forward,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::native_layer_norm``: the output, the mean and rstd."""
    hidden, output = _hidden(normalized_shape), _like(input)
    mean = _statistic(input, normalized_shape)
    rstd = torch.empty_like(mean)
    if output.numel():
        forward(input, hidden, weight, bias, output, mean, rstd, eps)
    return output, mean, rstd


def layer_norm_backward(
    backward: Backward,
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``aten::native_layer_norm_backward``: those gradients of input, weight and bias that are
    wanted. The bias's values don't matter."""
    hidden, elements = _hidden(normalized_shape), input.numel()
    dx = _like(input) if output_mask[0] else None
    dw = _sum_over_rows(weight, elements) if output_mask[1] else None
    db = _sum_over_rows(bias, elements) if output_mask[2] else None
    if elements and not (dx is None and dw is None and db is None):
        backward(grad_out, input, hidden, weight, mean, rstd, dx, dw, db)
    return dx, dw, db


def _hidden(normalized_shape: Sequence[int]) -> int:
    hidden = math.prod(normalized_shape)
    if hidden == 0:
        raise ValueError("normalized_shape has no elements")
    return hidden


def _like(input: Tensor) -> Tensor:
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


def _statistic(input: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    """One float32 a row, ``[*outer, 1, ..., 1]`` with as many dimensions as `input`."""
    outer = input.shape[: input.dim() - len(normalized_shape)]
    shape = (*outer, *(1 for _ in normalized_shape))
    return torch.empty(shape, dtype=torch.float32, device=input.device)


def _sum_over_rows(parameter: Tensor | None, elements: int) -> Tensor | None:
    """The gradient of a weight or bias, if there is one; zeros where there is nothing to sum."""
    if parameter is None:
        return None
    allocate = torch.empty if elements else torch.zeros
    return allocate(parameter.shape, dtype=parameter.dtype, device=parameter.device)
