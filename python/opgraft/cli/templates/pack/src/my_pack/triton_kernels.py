"""The kernels. Only the first call that an override takes imports this, and with it Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax_rows(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    # 64 bits: a row's offset passes 2**31 elements in a tensor that fits on a GPU.
    start = tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_ptr + start + offsets, mask=mask, other=-float("inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, axis=0))
    y = weights / tl.sum(weights, axis=0)
    tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


def softmax_last_dimension(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension.

    Args:
        x: contiguous and not empty, float32, float16 or bfloat16; at least one dimension.

    Returns:
        A new tensor like `x`.
    """
    columns = x.shape[-1]
    rows = x.numel() // columns
    y = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    warps = min(max(block // 512, 4), 16)
    _softmax_rows[(rows,)](x, y, columns, BLOCK=block, num_warps=warps)
    return y
