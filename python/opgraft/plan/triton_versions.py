"""What differs between the versions of Triton whose launches are recorded, and nothing else.

Each function asks Triton itself where it can: a release candidate or a patched build may have what
its version number denies.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

__all__ = ["is_instrumented", "launch_arguments"]


def launch_arguments(descriptor: Any, meta: Any) -> list[Any]:
    """What the launcher makes of a tensor descriptor of the host.

    Up to 3.7 Triton's function takes the descriptor and what the compiler says of it. 3.9's takes
    the launch's other arguments as well, since it serves all backends; CUDA's ignores them.

    Args:
        descriptor: a `TensorDescriptor`.
        meta: how the compiler has it copied; None where the kernel gets pointer and sizes instead.

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
    """Whether a kernel was compiled with checks or a profiler of Triton's inside.

    Such a kernel gets memory for what it finds, and from 3.9 on, under the sanitizer, three more
    parameters, of which its signature says nothing. 3.6 knows no such modes.
    """
    return bool(metadata.profile_scratch_size or getattr(metadata, "instrumentation_mode", ""))
