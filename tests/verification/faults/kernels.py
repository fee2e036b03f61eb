"""Kernels that are right, of torch's ops: what faults are planted in."""

from __future__ import annotations

import numpy
import torch

from tests import ops


def relu(self: torch.Tensor) -> torch.Tensor:
    return torch.where(self <= 0, torch.zeros_like(self), self)


def softmax(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    if self.numel() == 0:
        return torch.empty_like(self, memory_format=torch.contiguous_format)
    return ops.softmax(self.contiguous(), dim, half_to_float)


def gather(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Of a matrix, with the errors of a gather."""
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.shape[dim]:
        raise RuntimeError("index is out of bounds")
    if index.ndim != 2:
        raise RuntimeError("the index has another number of dimensions")
    rows, columns = index.shape
    own = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    positions = (index, own[1]) if dim % 2 == 0 else (own[0], index)
    return self[positions].contiguous()


def index_select(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    if index.ndim == 0:
        index = index.view(1)
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.shape[dim]:
        raise IndexError("index out of range in self")
    shape = [1] * self.ndim
    shape[dim] = -1
    sizes = list(self.shape)
    sizes[dim] = index.numel()
    return self.gather(dim, index.long().view(shape).expand(sizes))


def like(self: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A result in the memory format that a pointwise op gives it."""
    return torch.empty_like(self, dtype=out.dtype).copy_(out)


def running_sum(
    self: torch.Tensor, dim: int, dtype: torch.dtype | None, *, block: int
) -> torch.Tensor:
    """By blocks of so many elements, each sum rounded to the dtype of the result."""
    dtype = dtype or self.dtype
    if not dtype.is_floating_point or dtype == torch.bfloat16 or self.numel() == 0:
        return torch.ops.aten.cumsum.default(self, dim, dtype=dtype)  # type: ignore[no-any-return]
    values = self.detach().to(dtype).movedim(dim, -1).numpy()
    size = values.shape[-1]
    with numpy.errstate(all="ignore"):
        blocks = [
            numpy.cumsum(values[..., start : start + block], axis=-1, dtype=values.dtype)
            for start in range(0, size, block)
        ]
        before = blocks[0][..., -1:]
        for index, each in enumerate(blocks[1:], 1):
            blocks[index] = each + before
            before = blocks[index][..., -1:]
    return torch.from_numpy(numpy.concatenate(blocks, axis=-1)).movedim(-1, dim).contiguous()
