"""What one compiled function over clusters is for, of either direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from opgraft_kernels.clusters.backward import BackwardKind, compile_backward
from opgraft_kernels.clusters.forward import ForwardKind, compile_forward

__all__ = ["Kind", "compile_kind"]

Kind: TypeAlias = ForwardKind | BackwardKind


def compile_kind(kind: Kind) -> Callable[..., None]:
    """Compile the function for `kind`; needs no GPU where ``CUTE_DSL_ARCH`` names one."""
    return compile_backward(kind) if isinstance(kind, BackwardKind) else compile_forward(kind)
