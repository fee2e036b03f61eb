"""The first-party kernels of opgraft: PyTorch's own ops in Triton and CuteDSL, where faster.

`pip install opgraft-kernels` is enough: `import torch` then calls :func:`register`. Importing and
registering import no DSL; a kernel's first call does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opgraft import Override

__all__ = ["register"]


def register() -> list[Override]:
    """Register every override of this pack.

    At the `CUDA` key; under `TRITON_INTERPRET=1`, which runs Triton kernels on the CPU and is meant
    for trying them out, at the `CPU` key instead.

    Returns:
        The overrides, those included that cannot run here because Triton is missing.

    >>> overrides = register()
    >>> overrides[0].op
    'aten::_fused_rms_norm'
    >>> for override in overrides:
    ...     override.remove()
    """
    # Here, not above: these import torch, which calls this function, and must find it whole also
    # where a program imports this module before torch.
    from opgraft import triton_utils
    from opgraft_kernels.attention import overrides as attention_overrides
    from opgraft_kernels.copies import overrides as copies
    from opgraft_kernels.cross_entropy import overrides as cross_entropy
    from opgraft_kernels.embedding import overrides as embedding
    from opgraft_kernels.nll_loss import overrides as nll_loss
    from opgraft_kernels.norms import overrides as norms
    from opgraft_kernels.softmax import overrides as softmax

    key = "CPU" if triton_utils.interpreted() else "CUDA"
    return [
        *norms.register(norms.RMS_NORM, key),
        *norms.register(norms.LAYER_NORM, key),
        *softmax.register(key),
        *cross_entropy.register(key),
        *nll_loss.register(key),
        *embedding.register(key),
        *copies.register(key),
        *attention_overrides.register(key),
    ]
