"""A simple Triton kernel, such as a library may have already."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, hidden, eps, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden
    x = tl.load(x_ptr + row * hidden + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / hidden + eps)
    y = x * rstd
    if HAS_WEIGHT:
        y *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * hidden + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd)


def rms_norm_forward(
    input: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last dimension of a contiguous tensor."""
    hidden = input.shape[-1]
    out = torch.empty_like(input)
    rstd = torch.empty((*input.shape[:-1], 1), dtype=torch.float32, device=input.device)
    grid = (input.numel() // hidden,)
    block = triton.next_power_of_2(hidden)
    _kernel[grid](input, weight, out, rstd, hidden, eps, weight is not None, block)
    return out, rstd
