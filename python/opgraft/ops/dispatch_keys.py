"""Which dispatch keys an override can be at."""

from __future__ import annotations

#: Dense backends: the keys at which a native kernel lives below autograd and autocast. An override
#: belongs there, because everything above (derivatives, casting, functorch) then goes on working.
BACKEND_KEYS = (
    *("CPU", "CUDA", "HIP", "XLA", "MPS", "IPU", "XPU", "HPU", "VE", "Lazy", "MTIA", "MAIA"),
    *("PrivateUse1", "PrivateUse2", "PrivateUse3"),
)


def is_built_for(dispatch_key: str) -> bool:
    """Whether this torch has kernels at a backend key; a CPU build has none at `"CUDA"`.

    >>> is_built_for("CPU")
    True
    """
    import torch  # not at the top: the keys alone are wanted where torch is not there yet

    key = "CUDA" if dispatch_key == "HIP" else dispatch_key
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::empty.memory_format", key))
