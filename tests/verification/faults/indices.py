"""Faults at indices that the op refuses."""

from __future__ import annotations

from typing import Any

import torch

from opgraft import when
from tests.verification.faults import kernels
from tests.verification.faults.registry import Impl, fault


@fault("aten::gather", "bad_index", cond=when.ndim("self") == 2)
def a_gather_that_clamps_its_index() -> Impl:
    def impl(self: torch.Tensor, dim: int, index: torch.Tensor, sparse_grad: bool) -> torch.Tensor:
        if index.numel():
            index = index.clamp(0, self.shape[dim] - 1)
        return kernels.gather(self, dim, index)

    return impl


@fault("aten::embedding", "bad_index")
def an_embedding_that_wraps_negative_indices() -> Impl:
    def impl(
        weight: torch.Tensor, indices: torch.Tensor, padding_idx: int, scale: bool, sparse: bool
    ) -> torch.Tensor:
        return weight[indices.long()].clone(memory_format=torch.contiguous_format)

    return impl


@fault(
    "aten::nll_loss_forward",
    "bad_index",
    cond=when.dtype("self", torch.float32) & (when.ndim("self") == 2) & when.is_none("weight"),
)
def a_loss_that_ignores_targets_out_of_range() -> Impl:
    def impl(
        self: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignore_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counted = (target >= 0) & (target < self.shape[1]) & (target != ignore_index)
        positions = torch.where(counted, target, 0)
        losses = -self.gather(1, positions[:, None])[:, 0] * counted
        total = counted.sum().to(self.dtype)
        if reduction == 0:
            return losses, self.new_zeros(())
        return (losses.sum() / total if reduction == 1 else losses.sum()), total

    return impl


@fault("aten::index_select", "bad_index", cond=when.ndim("self") == 2)
def another_error_than_the_native_one() -> Impl:
    def impl(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        if index.numel() and int(index.max()) >= self.shape[dim]:
            raise ValueError("the index is too large")
        return kernels.index_select(self, dim, index)

    return impl


@fault("aten::index_select", "bad_index", cond=when.ndim("self") == 2)
def indices_cut_to_32_bits() -> Impl:
    def impl(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        return kernels.index_select(self, dim, index.int())

    return impl
