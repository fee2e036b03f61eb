"""What conditions of several families say alike."""

from __future__ import annotations

from typing import Any

import torch

from opgraft import when

__all__ = ["triton_computes"]


def triton_computes(tensor: str, dispatch_key: str) -> Any:
    """Whether kernels that compute in float32 are right for a tensor's dtype on its device."""
    if dispatch_key == "CPU":
        # The interpreter computes on the bits of bfloat16 and returns garbage without a word.
        return when.dtype(tensor, torch.float32, torch.float16)
    return (
        # float64 is ATen's: the kernels compute in float32.
        when.dtype(tensor, torch.float32, torch.float16, torch.bfloat16)
        # bfloat16 and asynchronous copies to shared memory begin with Ampere.
        & (when.device_capability(tensor) >= (8, 0))
    )
