"""The differences between versions of Triton that matter for recording launches.

Each function inspects Triton itself if it can: a release candidate or a patched build may not match
its version number.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

__all__ = ["is_instrumented", "launch_arguments"]


def launch_arguments(descriptor: Any, meta: Any) -> list[Any]:
    """The arguments that the launcher passes for a tensor descriptor of the host.

    Up to 3.7 Triton's function takes the descriptor and the compiler's metadata of it. 3.9's also
    takes the launch's other arguments, since it serves all backends. CUDA's ignores them.

    Args:
        descriptor: a `TensorDescriptor`.
        meta: how the compiler has it copied; None if the kernel gets pointer and sizes instead.

    Returns:
        The kernel's arguments in its place, shape and strides last.
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg

    rest = (None,) if _arity(make_tensordesc_arg) == 3 else ()
    return list(make_tensordesc_arg(descriptor, meta, *rest))


@functools.cache
def _arity(function: Any) -> int:
    return len(inspect.signature(function).parameters)


def is_instrumented(metadata: Any) -> bool:
    """Whether a kernel was compiled with Triton's sanitizer or profiler.

    Such a kernel gets memory for its findings. From 3.9 on, under the sanitizer, it gets three more
    parameters that its signature does not list. 3.6 has no such modes.
    """
    return bool(metadata.profile_scratch_size or getattr(metadata, "instrumentation_mode", ""))
