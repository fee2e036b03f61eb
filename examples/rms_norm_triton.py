"""RMSNorm over the last dimension in Triton: the kernel of smart_rms_norm.py."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(
    x_ptr, w_ptr, y_ptr, rstd_ptr, columns, eps, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / columns + eps)
    y = x * rstd
    if HAS_WEIGHT:
        y *= tl.load(w_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two outputs of `aten::_fused_rms_norm`: the result, and 1 / rms for the backward."""
    columns = x.shape[-1]
    y = torch.empty_like(x)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    grid = (x.numel() // columns,)
    block = triton.next_power_of_2(columns)
    _rms_norm[grid](x, weight, y, rstd, columns, eps, weight is not None, block)
    return y, rstd
