"""The kernel. Only the first call that the override takes imports this, and Triton with it."""

import torch
import triton
import triton.language as tl


@triton.jit
def _row_softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # a tensor can have more than 2**31 elements
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, axis=0))
    y = weights / tl.sum(weights, axis=0)
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


def row_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension of a contiguous tensor, a row in one program."""
    columns = x.shape[-1]
    y = torch.empty_like(x)
    _row_softmax[(x.numel() // columns,)](x, y, columns, triton.next_power_of_2(columns))
    return y
