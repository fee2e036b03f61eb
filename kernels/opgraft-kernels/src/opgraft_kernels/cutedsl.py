"""What kernels in CuteDSL share: functions compiled for tensors that are not there yet, by kind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch

__all__ = ["COMPILING", "CUTLASS_DTYPES", "Functions", "compile_function", "fake_tensor"]

CUTLASS_DTYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}
# Held while compiling: autograd's threads call backwards while others call forwards.
COMPILING = threading.Lock()


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


class Functions:
    """Compiled functions by kind, each compiled by the first call of its kind."""

    def __init__(self, compile_kind: Callable[[Any], Callable[..., None]]) -> None:
        self._compile_kind = compile_kind
        self._functions: dict[Any, Callable[..., None]] = {}

    def __getitem__(self, kind: Any) -> Callable[..., None]:
        found = self._functions.get(kind)
        if found is None:
            with COMPILING:
                found = self._functions.get(kind)
                if found is None:
                    found = self._functions[kind] = self._compile_kind(kind)
        return found
