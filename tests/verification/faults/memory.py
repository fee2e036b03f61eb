"""Faults in how memory is read, written and kept."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from opgraft import when
from tests import ops
from tests.verification.faults import kernels
from tests.verification.faults.registry import Impl, fault


@fault("aten::relu", "values")
def strides_ignored() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        needed = (self.storage_offset() + self.numel()) * self.element_size()
        if self.is_contiguous() or needed > self.untyped_storage().nbytes():
            return out
        flat = self.as_strided((self.numel(),), (1,), self.storage_offset())
        return out.copy_(kernels.relu(flat).view(self.shape))

    return impl


@fault("aten::relu", "values")
def the_storage_offset_ignored() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        return kernels.relu(self.as_strided(self.shape, self.stride(), 0))

    return impl


@fault("aten::relu", "values")
def an_address_that_is_not_aligned() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        return out + 1 if self.data_ptr() % 16 else out

    return impl


@fault("aten::relu", "inputs")
def writes_to_its_input() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        if self.numel() > 3 and self.is_contiguous():
            self.view(-1)[3] = 0
        return out

    return impl


@fault("aten::relu", "inputs")
def writes_beside_its_input() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        end = self.storage_offset() + self.numel()
        if self.is_contiguous() and self.untyped_storage().nbytes() > end * self.element_size():
            self.as_strided((1,), (1,), end).fill_(1)
        return out

    return impl


@fault("aten::relu", "meanwhile")
def writes_to_its_input_and_restores_it() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        if self.ndim and self.numel() and self.is_floating_point():
            first = self[0].clone()
            self[0].mul_(2)
            self[0].copy_(first)
        return out

    return impl


@fault("aten::relu", "uninitialized")
def an_element_never_written() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(self)
        if self.ndim == 0:
            return out.copy_(kernels.relu(self))
        out[:-1] = kernels.relu(self)[:-1]
        if self.numel() and bool((self[-1] != 0).any()):
            rest = kernels.relu(self)[-1]
            out[-1] = torch.where(rest != 0, rest, out[-1])
        return out

    return impl


@fault("aten::relu", "references")
def keeps_its_input() -> Impl:
    kept: list[Any] = []

    def impl(self: torch.Tensor) -> torch.Tensor:
        kept[:] = [self]
        return kernels.relu(self)

    return impl


@fault("aten::relu", "references")
def keeps_a_view_of_its_input() -> Impl:
    kept: list[Any] = []

    def impl(self: torch.Tensor) -> torch.Tensor:
        kept.append(self.detach().view(-1) if self.is_contiguous() else None)
        return kernels.relu(self)

    return impl


@fault("aten::relu", "again")
def keeps_a_result_and_writes_to_it_later() -> Impl:
    kept: list[torch.Tensor] = []

    def impl(self: torch.Tensor) -> torch.Tensor:
        for each in kept:
            each.add_(1)
        kept[:] = [kernels.relu(self)]
        return kept[0]

    return impl


@fault("aten::relu", "again")
def a_result_remembered_by_its_tensor() -> Impl:
    results: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def impl(self: torch.Tensor) -> torch.Tensor:
        of, result = results.get(id(self), (None, None))
        if of is None or result is None or of() is not self:
            result = kernels.relu(self)
            results[id(self)] = weakref.ref(self), result
        return result.clone()

    return impl


@fault("aten::relu", "storage")
def a_result_in_a_much_larger_storage() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        room = out.new_empty(max(4 * out.numel(), 1 << 16))
        return room.as_strided(out.shape, out.stride()).copy_(out)

    return impl


@fault("aten::relu", "form")
def a_result_with_the_negative_bit() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        if not self.is_floating_point() or self.ndim < 2:
            return kernels.relu(self)
        return torch._neg_view(-kernels.relu(self))

    return impl


@fault("aten::relu", "form")
def a_parameter_returned() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        if not out.is_floating_point() or self.ndim < 2:
            return out
        return torch.nn.Parameter(out, requires_grad=False)

    return impl


@fault("aten::mul.Tensor", "values")
def both_arguments_are_one_tensor() -> Impl:
    def impl(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if self.dtype == torch.bool or other.dtype == torch.bool:
            return torch.ops.aten.mul.Tensor(self, other)  # type: ignore[no-any-return]
        out = torch.addcmul(torch.zeros((), dtype=torch.result_type(self, other)), self, other)
        return out + 1 if self.ndim and self is other else out

    return impl


@fault("aten::relu", "growth")
def keeps_a_buffer_of_every_call() -> Impl:
    kept: list[torch.Tensor] = []

    def impl(self: torch.Tensor) -> torch.Tensor:
        kept.append(torch.empty(16))
        return kernels.relu(self)

    return impl


@fault("aten::relu", "values")
def offsets_in_32_bits() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.stride(), strict=True))
        if self.numel() and last >= 2**31:
            out[(-1,) * out.ndim] = 7
        return out

    return impl


@fault("aten::native_layer_norm", "aliasing", cond=when.dtype("input", torch.float32))
def two_results_in_one_storage() -> Impl:
    def impl(
        input: torch.Tensor, shape: list[int], weight: Any, bias: Any, eps: float
    ) -> tuple[torch.Tensor, ...]:
        out, mean, rstd = ops.layer_norm(input, shape, weight, bias, eps)
        both = torch.cat([mean.view(-1), rstd.view(-1)])
        one, other = both.split(mean.numel())
        return out, one.view(mean.shape), other.view(mean.shape)

    return impl


@fault("aten::mul.Tensor", "values", cond=when.dtype("self", torch.float32))
def a_row_that_is_broadcast_read_as_a_column() -> Impl:
    def impl(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if 0 < other.ndim < self.ndim and len({*self.shape, *other.shape}) == 1:
            other = other.reshape(*other.shape, *(1 for _ in range(self.ndim - other.ndim)))
        return torch.addcmul(torch.zeros((), dtype=torch.result_type(self, other)), self, other)

    return impl
