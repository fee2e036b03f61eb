"""What a thread's calls save for their backward."""

from __future__ import annotations

import torch


def are_hooked() -> bool:
    """Whether hooks get what this thread's calls save for their backward, as checkpointing's do."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None
