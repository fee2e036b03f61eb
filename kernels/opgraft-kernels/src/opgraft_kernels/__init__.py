"""The first-party kernels of opgraft: PyTorch's own ops in Triton, where that is faster.

`pip install opgraft-kernels` and `opgraft.packs.load("opgraft-kernels")`, or call :func:`register`.
Importing and registering import no DSL; a kernel's first call does.
"""

from __future__ import annotations

import os

from opgraft import Override
from opgraft_kernels.rms_norm import overrides as rms_norm

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
    return rms_norm.register("CPU" if _interprets() else "CUDA")


def _interprets() -> bool:
    # Triton's own variable and words; asking Triton would import it.
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
