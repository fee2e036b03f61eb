"""Faults at some sizes, ranks and dimensions."""

from __future__ import annotations

import torch

from opgraft import when
from tests.verification.faults import kernels
from tests.verification.faults.registry import Impl, fault

WIDE = when.dtype("self", torch.float32, torch.float64)


def hidden(number: int) -> int:
    """A number that an impl's code does not show."""
    return int(str(number)[::-1][::-1])


def wrong_where(wrong: object) -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        return out + 1 if wrong(self) else out  # type: ignore[operator]

    return impl


@fault("aten::_softmax", "values", cond=WIDE)
def dim_0_of_3_dimensions() -> Impl:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if self.ndim == 3 and dim in (0, -3):
            dim = 1
        return kernels.softmax(self, dim, half_to_float)

    return impl


@fault("aten::cumsum", "values", cond=when.dtype("self", torch.float32))
def a_scan_from_the_wrong_end_at_dim_0_of_3_dimensions() -> Impl:
    def impl(self: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
        native = torch.ops.aten.cumsum.default
        if self.ndim == 3 and dim % 3 == 0:
            return native(self.flip(0), 0, dtype=dtype).flip(0)
        return native(self, dim, dtype=dtype)

    return impl


@fault("aten::_softmax", "values", cond=WIDE)
def always_the_last_dimension() -> Impl:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return kernels.softmax(self, -1, half_to_float)

    return impl


@fault("aten::relu", "values")
def a_tensor_without_dimensions() -> Impl:
    return wrong_where(lambda self: self.ndim == 0)


@fault("aten::relu", "values")
def four_dimensions() -> Impl:
    return wrong_where(lambda self: self.ndim == 4)


@fault("aten::relu", "values")
def sizes_over_4096() -> Impl:
    return wrong_where(lambda self: self.ndim and self.shape[-1] > 4096)


@fault("aten::relu", "values")
def sizes_over_4096_that_the_code_does_not_show() -> Impl:
    return wrong_where(lambda self: self.ndim and self.shape[-1] > hidden(4096))


@fault("aten::relu", "values")
def one_size_1000() -> Impl:
    return wrong_where(lambda self: self.ndim and self.shape[-1] == 1000)


@fault("aten::relu", "values")
def one_size_1000_that_the_code_does_not_show() -> Impl:
    return wrong_where(lambda self: self.ndim and self.shape[-1] == hidden(1000))


@fault("aten::relu", "values")
def one_odd_size_that_the_code_shows() -> Impl:
    return wrong_where(lambda self: self.ndim and self.shape[0] == 789)


@fault("aten::relu", "values")
def multiples_of_128() -> Impl:
    return wrong_where(lambda self: self.ndim and self.shape[-1] and self.shape[-1] % 128 == 0)


@fault("aten::relu", "values")
def the_last_row_of_an_odd_number() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        if out.ndim > 1 and out.shape[0] > 2 and out.shape[0] % 2:
            out[-1] = 0
        return out

    return impl


@fault("aten::relu", "shape")
def an_empty_result_of_another_shape() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        return kernels.relu(self) if self.numel() else self.new_empty(0)

    return impl


@fault("aten::relu", "aliasing")
def the_input_returned_at_size_1() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        return self if self.numel() == 1 and bool(self > 0) else kernels.relu(self)

    return impl


@fault("aten::_softmax", "values", cond=WIDE)
def a_shape_kept_by_the_number_of_elements() -> Impl:
    widths: dict[int, int] = {}

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if self.ndim != 2 or dim not in (1, -1) or self.numel() == 0:
            return kernels.softmax(self, dim, half_to_float)
        width = widths.setdefault(self.numel(), self.shape[1])
        rows = self.contiguous().view(-1, width)
        return kernels.softmax(rows, 1, half_to_float).view(self.shape)

    return impl
