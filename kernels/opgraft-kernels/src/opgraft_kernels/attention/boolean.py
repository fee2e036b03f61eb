"""``aten::scaled_dot_product_attention`` with a boolean mask, in the op of the forward that
`boolean_ops.py` has. No DSL is imported here.

The ops that it calls natively know additive masks alone. So natively a boolean mask is written out
in 16 bits, and what is False is a number there, of which a kernel must find out whether it stands
for nothing. Here the mask is read as it is.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import opgraft
from opgraft_kernels.attention import aten, boolean_ops

__all__ = ["attention"]

_forward = getattr(getattr(torch.ops, boolean_ops.NAMESPACE), boolean_ops.FORWARD).default
_choose = torch.ops.aten._fused_sdp_choice.default


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """``aten::scaled_dot_product_attention`` of ``[batch, heads, length, dim]``, under a mask."""
    given: tuple[Any, ...] = (query, key, value, attn_mask, dropout_p, is_causal)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    lowest = _lowest(query.dtype, query.device.type)
    if lowest is None or not _is_like_native(_choose(*given, **options), query.device.type):
        # Another backend was asked for, or this one is missing.
        return opgraft.native("aten::scaled_dot_product_attention")(*given, **options)
    is_differentiated = torch.is_grad_enabled() and any(
        t.requires_grad for t in (query, key, value)
    )
    mask = _copied(attn_mask) if is_differentiated else attn_mask
    out, _ = _forward(
        *(query, key, value, mask, aten.scale_of(query, scale), lowest, is_differentiated)
    )
    return out


def _copied(mask: Tensor) -> Tensor:
    """What a backward is to have of a mask, broadcast as it is.

    Native saves an additive mask that it makes of this one, of twice the size. So a buffer may have
    the next mask before the backward of this one has run, and may be made in inference mode, whose
    tensors cannot be saved.
    """
    stored = boolean_ops.stored(mask)
    copy = stored.clone(memory_format=torch.contiguous_format)
    return copy if stored is mask else copy.expand(mask.shape)


def _is_like_native(choice: int, device: str) -> bool:
    """Whether a query that attends to nothing gets here what it gets natively."""
    return device == "cpu" or choice == SDPBackend.CUDNN_ATTENTION.value


@functools.cache
def _lowest(dtype: torch.dtype, device: str) -> float | None:
    """What native adds to scores where a mask is False; None where that is not known.

    It is -inf, but a number for cuDNN until pytorch 177868, which torch 2.12 has, and 2.11.0 has
    not. A later 2.11 might: what attends to nothing would be another result.
    """
    version = torch.torch_version.TorchVersion(torch.__version__)
    if device == "cpu" or version >= "2.12":
        return -math.inf
    return torch.tensor(-65504.0).to(dtype).item() if version < "2.11.1" else None
