"""What Triton's interpreter needs before it runs the pack's kernels on the CPU."""

from __future__ import annotations

from typing import Any

import triton

from opgraft import triton_utils

__all__ = ["let_tensors_bound_loops"]


def let_tensors_bound_loops() -> None:
    """Let the interpreter of Triton 3.6 run loops between tensors with numpy 2.4 and newer.

    It makes an index of a scalar by `int` of an array with one dimension, which numpy has refused
    since 2.4. Triton 3.7 squeezes the array first, as this does.
    """
    if not triton_utils.interpreted() or not triton.__version__.startswith("3.6."):
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if patch.__module__ == __name__:
        return

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_with_index
