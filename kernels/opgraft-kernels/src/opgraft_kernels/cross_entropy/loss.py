"""``aten::cross_entropy_loss`` in the ops of `ops.py`. No DSL is imported here.

The derivative saves the logits, where native saves log-probabilities: so whoever writes to logits
before the backward gets autograd's error, which native does not raise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opgraft_kernels.cross_entropy import ops

__all__ = ["cross_entropy"]

_forward = getattr(getattr(torch.ops, ops.NAMESPACE), ops.FORWARD).default


def cross_entropy(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """``aten::cross_entropy_loss``, of one row of logits or a matrix, and class indices.

    Raises:
        IndexError: on the CPU, a target is no class. On a GPU that is an assertion on the device.
    """
    # Native's autocast computes what cross-entropy is made of in float32.
    dtype = torch.float32 if torch.is_autocast_enabled(self.device.type) else self.dtype
    loss: Tensor
    loss, *_ = _forward(self, target, weight, reduction, ignore_index, label_smoothing, dtype=dtype)
    return loss
