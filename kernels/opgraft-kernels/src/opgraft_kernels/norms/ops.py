"""ATen's norm ops around kernels: what each takes and returns, whatever the DSL.

`F.rms_norm` calls ``aten::_fused_rms_norm`` and its backward, `F.layer_norm`
``aten::native_layer_norm`` and its backward. The four functions have these ops' signatures, after
the function that runs the kernels. They allocate what the op returns, and the kernels fill it.

With ``rows x hidden`` the input seen as a matrix, and all arithmetic in float32::

    rstd = rsqrt(mean((x - m) ** 2) + eps)                    one value a row, like m
    y    = (x - m) * rstd * w + b                             LayerNorm: m = mean(x)
    dx   = rstd * (w * g - mean(w * g) - xhat * mean(w * g * xhat))    xhat = (x - m) * rstd
    dw   = sum over rows of g * xhat                          db = sum over rows of g

RMSNorm is the same without m, b, db and ``mean(w * g)``. (Ba, Kiros and Hinton, "Layer
Normalization", 2016; Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; the backward
is the derivative.) The variance is the mean of squared differences from the mean. The difference
of means stands for it only where the mean is so near to zero that no digits are lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

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


class Forward(NamedTuple):
    """A forward for kernels to compute: they fill `output`, `rstd` and, if there is one, `mean`."""

    input: Tensor  # not empty
    weight: Tensor | None  # one element a column
    bias: Tensor | None
    output: Tensor  # like the input, contiguous
    mean: Tensor | None  # one float32 a row, contiguous; None makes it RMSNorm
    rstd: Tensor
    hidden: int  # elements of a row
    eps: float

    @property
    def rows(self) -> int:
        return self.input.numel() // self.hidden


class Backward(NamedTuple):
    """A backward for kernels to compute: they fill those gradients that there are, contiguous.

    Those of weight and bias are summed in float32 in a fixed order: the same bits on every run on
    one kind of device. The other fields are as in `Forward`, the input's gradient like the input.
    """

    grad_out: Tensor
    input: Tensor
    weight: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None
    hidden: int

    @property
    def rows(self) -> int:
        return self.input.numel() // self.hidden

    @property
    def sums(self) -> list[Tensor]:
        """Those gradients that are sums over rows."""
        return [each for each in (self.dw, self.db) if each is not None]

    def partial_sums(self, partials: int) -> Tensor | None:
        """Memory for so many rows of partial sums of each, one after the other, in float32."""
        if not self.sums:
            return None
        matrices = (2,) if len(self.sums) == 2 else ()
        shape = (*matrices, partials, self.hidden)
        return torch.empty(shape, dtype=torch.float32, device=self.input.device)


# What both of ATen's implementations, CPU and CUDA, take where eps is None, whatever the input's
# dtype: the epsilon of the type that they accumulate in.
_DEFAULT_EPS = torch.finfo(torch.float32).eps


def rms_norm_forward(
    run: Callable[[Forward], None],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
) -> tuple[Tensor, Tensor]:
    """``aten::_fused_rms_norm``: the output and rstd."""
    hidden, output = _hidden(normalized_shape), _like(input)
    rstd = _statistic(input, normalized_shape)
    if output.numel():
        eps = _DEFAULT_EPS if eps is None else float(eps)
        run(Forward(input, weight, None, output, None, rstd, hidden, eps))
    return output, rstd


def rms_norm_backward(
    run: Callable[[Backward], None],
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """``aten::_fused_rms_norm_backward``: those gradients of input and weight that are wanted."""
    mask = (*output_mask, False)
    dx, dw, _ = layer_norm_backward(
        run, grad_out, input, normalized_shape, None, rstd, weight, None, mask
    )
    return dx, dw


def layer_norm_forward(
    run: Callable[[Forward], None],
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
        run(Forward(input, weight, bias, output, mean, rstd, hidden, float(eps)))
    return output, mean, rstd


def layer_norm_backward(
    run: Callable[[Backward], None],
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``aten::native_layer_norm_backward``: those gradients of input, weight and bias that are
    wanted. The bias's values don't matter. Without a mean it is RMSNorm's."""
    hidden, elements = _hidden(normalized_shape), input.numel()
    dx = _like(input) if output_mask[0] else None
    dw = _sum_over_rows(weight, elements) if output_mask[1] else None
    db = _sum_over_rows(bias, elements) if output_mask[2] else None
    if elements and not (dx is None and dw is None and db is None):
        run(Backward(grad_out, input, weight, mean, rstd, dx, dw, db, hidden))
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
    dims = len(normalized_shape)
    shape = (*input.shape[: input.dim() - dims], *(1,) * dims)
    return torch.empty(shape, dtype=torch.float32, device=input.device)


def _sum_over_rows(parameter: Tensor | None, elements: int) -> Tensor | None:
    """The gradient of a weight or bias, if there is one; zeros where there is nothing to sum."""
    if parameter is None:
        return None
    allocate = torch.empty if elements else torch.zeros
    return allocate(parameter.shape, dtype=parameter.dtype, device=parameter.device)
