"""Overrides that are right, among them such as a verification has taken for wrong."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from opgraft import when
from tests import ops
from tests.verification.faults import kernels
from tests.verification.faults.kernels import running_sum
from tests.verification.faults.registry import Impl, right

WIDE = when.dtype("self", torch.float32, torch.float64)


@right("aten::relu")
def relu() -> Impl:
    return kernels.relu


@right("aten::_softmax", cond=WIDE)
def softmax() -> Impl:
    return kernels.softmax


@right(
    "aten::native_layer_norm",
    cond=when.dtype("input", torch.float32) & (when.numel("input") > 0),
)
def layer_norm() -> Impl:
    return ops.layer_norm


@right(
    "aten::_fused_rms_norm",
    cond=when.dtype("input", torch.float32, torch.float16, torch.bfloat16)
    & (when.numel("input") > 0),
)
def rms_norm() -> Impl:
    def impl(
        input: torch.Tensor, shape: list[int], weight: Any, eps: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.rms_norm(input.contiguous(), shape, weight, eps)

    return impl


@right("aten::mm.out", cond=when.dtype("self", torch.float64))
def a_matrix_product_in_float64_with_out() -> Impl:
    def impl(self: torch.Tensor, mat2: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        middle = self.shape[1] // 2
        halves = (self[:, :middle], mat2[:middle]), (self[:, middle:], mat2[middle:])
        one, other = (torch.bmm(a[None], b[None])[0] for a, b in halves)
        return out.resize_(one.shape).copy_(one + other)

    return impl


@right("aten::mm", cond=WIDE)
def a_matrix_product_in_two_parts() -> Impl:
    def impl(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
        middle = self.shape[1] // 2
        halves = (self[:, :middle], mat2[:middle]), (self[:, middle:], mat2[middle:])
        one, other = (torch.bmm(a[None], b[None])[0] for a, b in halves)
        return one + other

    return impl


@right("aten::cumsum", cond=WIDE & (when.ndim("self") >= 1))
def a_running_sum_in_float64() -> Impl:
    def impl(self: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
        dtype = dtype or self.dtype
        if not dtype.is_floating_point:
            return torch.ops.aten.cumsum.default(self, dim, dtype=dtype)
        total = numpy.cumsum(self.detach().to(dtype).double().numpy(), axis=dim)
        return torch.from_numpy(total).to(dtype).contiguous()

    return impl


@right("aten::cumsum", cond=when.dtype("self", torch.float32) & (when.ndim("self") >= 1))
def a_running_sum_in_float32_by_blocks() -> Impl:
    """Native's is in float64 on the CPU."""
    return lambda self, dim, dtype: running_sum(self, dim, dtype, block=128)


@right("aten::_log_softmax", cond=WIDE & (when.numel("self") > 0))
def log_softmax() -> Impl:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        shifted = self.contiguous() - self.amax(dim, keepdim=True)
        return (shifted - shifted.exp().sum(dim, keepdim=True).log()).contiguous()

    return impl


@right("aten::index_select", cond=when.ndim("self") >= 1)
def index_select() -> Impl:
    return kernels.index_select


@right("aten::gather", cond=when.ndim("self") == 2)
def gather() -> Impl:
    def impl(self: torch.Tensor, dim: int, index: torch.Tensor, sparse_grad: bool) -> torch.Tensor:
        return kernels.gather(self, dim, index)

    return impl


@right("aten::embedding")
def embedding() -> Impl:
    def impl(
        weight: torch.Tensor, indices: torch.Tensor, padding_idx: int, scale: bool, sparse: bool
    ) -> torch.Tensor:
        rows = weight.index_select(0, indices.reshape(-1))
        return rows.view(*indices.shape, *weight.shape[1:])

    return impl


@right("aten::sum.dim_IntList", cond=when.dtype("self", torch.float32) & (when.numel("self") > 0))
def a_sum_of_halves() -> Impl:
    def impl(self: torch.Tensor, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
        native = torch.ops.aten.sum.dim_IntList
        if not dim or len(dim) > 1 or self.ndim == 0 or self.shape[dim[0]] < 2:
            return native(self, dim, keepdim, dtype=dtype)
        halves = (
            half.transpose(dim[0], 0) for half in self.to(dtype or self.dtype).chunk(2, dim[0])
        )
        one, other = (torch.einsum("i...->...", half) for half in halves)
        total = (one + other)[None].transpose(0, dim[0])
        return (total if keepdim else total.squeeze(dim[0])).contiguous()

    return impl


@right("aten::native_dropout", cond=when.dtype("input", torch.float32) & (when.numel("input") > 0))
def dropout() -> Impl:
    def impl(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, ...]:
        if train is False or p in (0, 1):
            return torch.ops.aten.native_dropout.default(input, p, train)  # type: ignore[no-any-return]
        mask = kernels.like(input, torch.rand_like(input) >= p)
        return input * mask / (1 - p), mask

    return impl


@right("aten::topk", cond=when.dtype("self", torch.float32) & (when.ndim("self") >= 1))
def top_k_by_sorting() -> Impl:
    """Which of equal values it takes is its own choice."""

    def impl(
        self: torch.Tensor, k: int, dim: int, largest: bool, sorted: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flipped = self.flip(dim)
        values, indices = torch.sort(flipped, dim=dim, descending=largest, stable=True)
        both = values, self.shape[dim] - 1 - indices
        one, other = (each.narrow(dim, 0, k) for each in both)
        return tuple(  # type: ignore[return-value]
            each.clone(memory_format=torch.contiguous_format) for each in (one, other)
        )

    return impl


@right("aten::sort")
def a_stable_sort() -> Impl:
    """Of integers as well, where the values and their indices are of one dtype."""

    def impl(self: torch.Tensor, dim: int, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.aten.sort.stable(self, stable=True, dim=dim, descending=descending)

    return impl


@right("aten::mul.Tensor", cond=WIDE & when.same_dtype("self", "other"))
def a_product() -> Impl:
    def impl(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(torch.zeros((), dtype=self.dtype), self, other)

    return impl


@right("faultstest::negated")
def an_op_without_autograd() -> Impl:
    return lambda self: 0 - self
