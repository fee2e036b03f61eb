"""Kernels written in Triton under PyTorch's own operators.

Importing this and registering import no Triton: the first call that a condition wants does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opgraft import Override

__all__ = ["register"]


def register() -> list[Override]:
    """Register every override of this pack: what the entry point in pyproject.toml names.

    Under `TRITON_INTERPRET=1` at the `CPU` key, so that they can be tried out without a GPU.
    """
    # Here, not above: these import torch, which calls this function, and must find it whole also
    # where a program imports this module before torch.
    from opgraft import triton_utils

    from my_pack import overrides

    dispatch_key = "CPU" if triton_utils.interpreted() else "CUDA"
    return [overrides.register_softmax(dispatch_key)]
