"""What kernels in CuteDSL share: functions compiled for tensors that are not there yet.

What imports this imports CuteDSL: only modules do that compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch

__all__ = ["CUTLASS_DTYPES", "compile_function", "fake_tensor"]

CUTLASS_DTYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}


def fake_tensor(dtype: Any, ndim: int, aligned: int) -> Any:
    """A tensor to compile for: any sizes, the last dimension contiguous.

    The other strides, and the address, are multiples of `aligned` elements.
    """
    stride = [cute.sym_int64(divisibility=aligned) for _ in range(ndim - 1)]
    return cute.runtime.make_fake_tensor(
        dtype,
        tuple(cute.sym_int() for _ in range(ndim)),
        stride=(*stride, 1),
        assumed_align=aligned * dtype.width // 8,
    )


def compile_function(function: Any, *arguments: Any) -> Callable[..., None]:
    """Compile for fake arguments; needs no GPU where ``CUTE_DSL_ARCH`` names one."""
    # The stream is the one that tvm-ffi's environment holds, torch's current one.
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled: Callable[..., None] = cute.compile(
        function, *arguments, stream, options="--enable-tvm-ffi"
    )
    return compiled
