"""The override of the op that the backward of ``F.embedding`` calls; `register` puts it there.

Nothing here imports Triton: the first call that the condition wants does.
"""

from __future__ import annotations

from typing import Any

import torch

from opgraft import Crossover, Override, lazy, when
from opgraft_kernels.conditions import triton_computes
from opgraft_kernels.crossovers import crossover_of, misalignment
from opgraft_kernels.registration import register_triton_op

__all__ = ["VERSION", "condition", "register"]


def condition(dispatch_key: str) -> Any:
    """Which calls go to Triton at `dispatch_key`."""
    tokens, num_weights = when.numel("indices"), when.value("num_weights")
    return (
        triton_computes("grad_output", dispatch_key)
        & when.dtype("indices", torch.int64, torch.int32)
        & when.same_device("grad_output", "indices")
        # An empty grid is a launch error.
        & (when.numel("grad_output") > 0)
        & (num_weights > 0)
        # Fewer gradients would be read out of bounds.
        & (when.numel("grad_output") == tokens * when.size("grad_output", -1))
        # Tokens and rows are counted with 32 bits; tokens are rounded up to whole chunks.
        & (tokens <= 2**30)
        & (num_weights <= 2**30)
    )


#: Of the kernels: raised when they become faster or slower. A test says when they change.
VERSION = 2


def _crossover() -> Crossover | None:
    """On what it depends whether the kernels are faster than ATen's."""
    width, itemsize = when.size("grad_output", -1), when.itemsize("grad_output")
    return crossover_of(
        lazy("opgraft_kernels.embedding.samples:calls"),
        VERSION,
        sizes={
            "tokens": (when.numel("indices"), 2**8, 2**18),
            "width": (width, 2**6, 2**13),
            "num_weights": (when.value("num_weights"), 2**9, 2**18),
        },
        # Hardly an embedding has a width of another alignment: native computes those.
        exact={"itemsize": (itemsize, 2, 4), "misalignment": (misalignment(width * itemsize), 0)},
        # More are sorted in more than linear time.
        bounded=["tokens"],
    )


def register(dispatch_key: str) -> list[Override]:
    """Register the op at `dispatch_key`: ``"CUDA"``, or ``"CPU"`` (the interpreter)."""
    return [
        register_triton_op(
            "embedding_dense_backward",
            dispatch_key,
            lazy("opgraft_kernels.embedding.triton_kernels:embedding_dense_backward"),
            name="embedding.backward",
            cond=condition(dispatch_key),
            crossover=_crossover,
            samples=lazy("opgraft_kernels.embedding.samples:samples"),
        )
    ]
