"""The kernels in `opgraft_kernels.norms.clusters` compiled, for calls of `cutedsl_kernels`.

Importing this imports CuteDSL, which takes seconds; only compiling needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from cutlass import Float32, Int32

from opgraft_kernels.cutedsl import CUTLASS_DTYPES, compile_function, fake_tensor
from opgraft_kernels.norms.clusters.backward import Backward
from opgraft_kernels.norms.clusters.forward import Forward
from opgraft_kernels.norms.clusters.tile import VECTOR
from opgraft_kernels.norms.cutedsl_kernels import ForwardKind, Kind

__all__ = ["compile_kind"]


def compile_kind(kind: Kind) -> Callable[..., None]:
    """Compile the function for `kind`; needs no GPU where ``CUTE_DSL_ARCH`` names one."""
    dtype = CUTLASS_DTYPES[kind.dtype]
    matrix, row = (functools.partial(fake_tensor, dtype, ndim, VECTOR) for ndim in (2, 1))
    value = functools.partial(fake_tensor, Float32, 1, 1)
    partial = functools.partial(fake_tensor, Float32, 2, VECTOR)
    weight = row() if kind.has_weight else None
    mean = value() if kind.has_mean else None
    if isinstance(kind, ForwardKind):
        bias = row() if kind.has_bias else None
        return compile_function(
            Forward(kind.tile), matrix(), weight, bias, matrix(), mean, value(), Float32(1.0)
        )
    return compile_function(
        Backward(kind.tile),
        *(matrix(), matrix(), weight, mean, value(), matrix()),
        *(partial() if needed else None for needed in (kind.needs_dw, kind.needs_db)),
        *(row() if needed else None for needed in (kind.needs_dw, kind.needs_db)),
        Int32(1),
    )
