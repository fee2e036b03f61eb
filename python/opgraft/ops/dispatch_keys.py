"""The dispatch keys that an override can have."""

from __future__ import annotations

#: The keys of dense backends, where native kernels are registered below autograd and autocast. An
#: override belongs there, so that everything above (derivatives, casting, functorch) keeps working.
BACKEND_KEYS = (
    *("CPU", "CUDA", "HIP", "XLA", "MPS", "IPU", "XPU", "HPU", "VE", "Lazy", "MTIA", "MAIA"),
    *("PrivateUse1", "PrivateUse2", "PrivateUse3"),
)


def is_built_for(dispatch_key: str) -> bool:
    """Whether this torch has kernels at a backend key; a CPU build has none at `"CUDA"`.

    >>> is_built_for("CPU")
    True
    """
    import torch  # not at the top: the keys are also used before torch is imported

    key = "CUDA" if dispatch_key == "HIP" else dispatch_key
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::empty.memory_format", key))
