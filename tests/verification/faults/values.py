"""Faults in some values: large, small, special ones, ties, a dtype, rounding."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from opgraft import when
from tests.verification.faults import kernels
from tests.verification.faults.registry import Impl, fault

WIDE = when.dtype("self", torch.float32, torch.float64)


@fault("aten::_softmax", "special", cond=WIDE)
def softmax_without_subtracting_the_maximum() -> Impl:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if self.numel() == 0:
            return kernels.softmax(self, dim, half_to_float)
        weights = self.contiguous().exp()
        return weights / weights.sum(dim, keepdim=True)

    return impl


@fault("aten::relu", "special")
def infinities_clamped() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        return out.clamp(max=torch.finfo(out.dtype).max) if out.is_floating_point() else out

    return impl


@fault("aten::_softmax", "special", cond=WIDE)
def a_masked_row_is_uniform() -> Impl:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return kernels.softmax(self.clamp(min=-1e4), dim, half_to_float)

    return impl


@fault("aten::relu", "special")
def denormals_flushed() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        if out.is_floating_point():
            out[out.abs() < torch.finfo(out.dtype).smallest_normal] = 0
        return out

    return impl


@fault("aten::relu", "special")
def zero_instead_of_NaN() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        return torch.where(self > 0, self, torch.zeros_like(self))

    return impl


@fault("aten::native_layer_norm", "special", cond=when.dtype("input", torch.float32))
def variance_as_a_difference_of_means() -> Impl:
    def impl(
        input: torch.Tensor, normalized_shape: list[int], weight: Any, bias: Any, eps: float
    ) -> tuple[torch.Tensor, ...]:
        dims = tuple(range(input.ndim - len(normalized_shape), input.ndim))
        mean = input.mean(dims, keepdim=True)
        variance = (input.square().mean(dims, keepdim=True) - mean.square()).clamp(min=0)
        rstd = torch.rsqrt(variance + eps)
        out = (input - mean) * rstd
        out = out if weight is None else out * weight
        out = out if bias is None else out + bias
        return out.contiguous(), mean.contiguous(), rstd.contiguous()

    return impl


@fault("aten::argmax", "special")
def the_last_of_equal_maxima() -> Impl:
    def impl(self: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        native = torch.ops.aten.argmax.default
        if self.ndim == 0:
            return native(self, dim, keepdim)
        size = self.numel() if dim is None else self.shape[dim]
        dims = list(range(self.ndim)) if dim is None else [dim]
        return (size - 1 - native(self.flip(dims), dim, keepdim)).contiguous()

    return impl


@fault("aten::sort", "values", cond=when.dtype("self", torch.int64) & (when.numel("self") > 0))
def values_one_off_in_a_sort_of_integers() -> Impl:
    def impl(self: torch.Tensor, dim: int, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.ops.aten.sort.default(self, dim, descending)
        return values + 1, indices

    return impl


@fault("aten::sort", "values", cond=when.dtype("self", torch.int64) & (when.ndim("self") == 1))
def one_index_for_all_equal_values() -> Impl:
    def impl(self: torch.Tensor, dim: int, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.ops.aten.sort.default(self, dim, descending)
        _, groups, sizes = values.unique_consecutive(return_inverse=True, return_counts=True)
        firsts = sizes.cumsum(0) - sizes
        return values, indices.gather(0, firsts[groups])

    return impl


@fault("aten::relu", "special")
def integers_through_float32() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        if self.is_floating_point():
            return kernels.relu(self)
        return kernels.relu(self.float()).to(self.dtype)

    return impl


@fault("aten::relu", "values")
def float64_through_float32() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        return out.float().double() if out.dtype == torch.float64 else out

    return impl


@fault("aten::relu", "values")
def wrong_in_float16_only() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        return out * 1.01 if out.dtype == torch.float16 else out

    return impl


@fault("aten::relu", None)
def off_by_1_ulp() -> Impl:
    return _off_by(1)


@fault("aten::relu", "values")
def off_by_4_ulp() -> Impl:
    return _off_by(4)


def _off_by(ulp: int) -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        if out.is_floating_point():
            out = out * (1 + ulp * torch.finfo(out.dtype).eps)
        return out

    return impl


@fault("aten::relu", "values")
def a_random_value() -> Impl:
    drawn = random.Random()

    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        if out.numel():
            position = tuple(drawn.randrange(size) for size in out.shape)
            out[position] = drawn.randrange(100)
        return out

    return impl


@fault(
    "aten::sum.dim_IntList",
    "values",
    cond=when.dtype("self", torch.float16) & (when.length("dim") == 1) & (when.numel("self") > 0),
)
def sums_kept_in_float16() -> Impl:
    def impl(self: torch.Tensor, dim: list[int], keepdim: bool, dtype: Any) -> torch.Tensor:
        if self.ndim == 0 or dtype not in (None, torch.float16):
            return torch.ops.aten.sum.dim_IntList(self, dim, keepdim, dtype=dtype)
        total = torch.zeros_like(self.narrow(dim[0], 0, 1))
        for part in self.split(16, dim[0]):
            total = total + part.sum(dim[0], keepdim=True)
        return (total if keepdim else total.squeeze(dim[0])).contiguous()

    return impl


@fault("aten::cumsum", "values", cond=when.dtype("self", torch.float16) & (when.ndim("self") >= 1))
def running_sums_kept_in_float16() -> Impl:
    return lambda self, dim, dtype: kernels.running_sum(self, dim, dtype, block=128)


@fault("aten::cumsum", "values", cond=when.dtype("self", torch.float32) & (when.ndim("self") >= 1))
def running_sums_of_what_was_rounded_to_float16() -> Impl:
    def impl(self: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
        out = kernels.running_sum(self, dim, dtype, block=128)
        return out.half().to(out.dtype) if out.dtype == torch.float32 else out

    return impl


@fault("aten::mul.Tensor", "values", cond=when.dtype("self", torch.complex64))
def imaginary_parts_lost() -> Impl:
    def impl(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = torch.addcmul(torch.zeros((), dtype=self.dtype), self, other)
        return torch.complex(product.real, torch.zeros_like(product.real))

    return impl


@fault("aten::gelu", "values", cond=WIDE)
def an_argument_ignored() -> Impl:
    def impl(self: torch.Tensor, approximate: str) -> torch.Tensor:
        return kernels.like(self, self * 0.5 * (1 + torch.erf(self * math.sqrt(0.5))))

    return impl
