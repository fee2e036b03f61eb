"""The override of the op that copies from one dtype to another; `register` puts it there.

``x.to(dtype)``, ``x.float()`` and autocast call ``aten::_to_copy``, which makes the result and
calls ``aten::copy_``, like ``y.copy_(x)``: one override takes all of them.

Nothing here imports Triton: the first call that the condition wants does.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from opgraft import Crossover, Override, lazy, when
from opgraft_kernels.conditions import triton_computes
from opgraft_kernels.crossovers import crossover_of
from opgraft_kernels.registration import register_op
from opgraft_kernels.samples import MEASURED, Calls, dtypes_on, tensor_of

__all__ = ["VERSION", "condition", "register"]

# The interpreter is slower than native at every size, and tests convert many small tensors.
_CPU_ELEMENTS = 4096


def condition(dispatch_key: str) -> Any:
    """Which calls go to Triton at `dispatch_key`."""
    channels_last = torch.channels_last
    wanted = (
        # Within a dtype native's copy is the driver's, at the speed of the memory.
        ~when.same_dtype("self", "src")
        & triton_computes("src", dispatch_key)
        & triton_computes("self", dispatch_key)
        # A pointer to another device's memory faults, and takes the context with it.
        & when.same_device("self", "src")
        # An empty grid is a launch error; the impl compares the shapes themselves.
        & (when.numel("self") > 0)
        & (when.numel("self") == when.numel("src"))
        # The kernel sees memory and no dimensions: elements must be in the same order.
        & (
            (when.is_contiguous("self") & when.is_contiguous("src"))
            | (when.is_contiguous("self", channels_last) & when.is_contiguous("src", channels_last))
        )
        # Loads are by 16 bytes. Only slices of a flat buffer begin elsewhere.
        & when.aligned("self", 16)
        & when.aligned("src", 16)
    )
    return wanted & (when.numel("self") >= _CPU_ELEMENTS) if dispatch_key == "CPU" else wanted


#: The shape, and what is particular.
_CASES: tuple[tuple[tuple[int, ...], str], ...] = (
    ((8192,), ""),
    ((64, 130), ""),
    ((3, 1, 1501), ""),
    ((2, 8, 20, 30), "channels last"),
    *(((64, 130), particular) for particular in ("masked", "NaN", "beyond")),
    # Native's.
    *(((64, 130), particular) for particular in ("transposed", "sliced", "expanded", "broadcast")),
    ((0, 130), ""),
    ((), ""),
)


def samples(device: torch.device) -> Calls:
    """Calls of the op to verify, as arguments by name.

    Args:
        device: where the tensors are to live.
    """
    dtypes = dtypes_on(device)
    targets = [*dtypes, torch.float64]
    for (shape, particular), source, target in itertools.product(_CASES, dtypes, targets):
        result = torch.zeros(shape, dtype=target, device=device)
        if particular == "channels last":
            result = result.to(memory_format=torch.channels_last)
        src = tensor_of(shape, particular, source, device)
        yield {"self": result, "src": src, "non_blocking": False}


def calls(device: torch.device, *, elements: int, source: int, target: int) -> Calls:
    """A call to measure, as arguments by name; none if there is no such call.

    Args:
        device: where the tensors are to live.
        elements: of either tensor.
        source: bytes of an element of what is read.
        target: bytes of an element of what is written.
    """
    if source == target == 4:  # there is one such dtype
        return
    written = {2: torch.float16, 4: torch.float32}[target]
    yield {
        "self": torch.empty(elements, dtype=written, device=device),
        "src": torch.randn(elements, dtype=MEASURED[source], device=device),
        "non_blocking": False,
    }


#: Of the kernel: raised when it becomes faster or slower. A test says when it changes.
VERSION = 2


def _crossover() -> Crossover | None:
    """On what it depends whether the kernel is faster than ATen's."""
    return crossover_of(
        calls,
        VERSION,
        sizes={"elements": (when.numel("self"), 2**12, 2**30)},
        exact={"source": (when.itemsize("src"), 2, 4), "target": (when.itemsize("self"), 2, 4)},
    )


def register(dispatch_key: str) -> list[Override]:
    """Register the op at `dispatch_key`: ``"CUDA"``, or ``"CPU"`` (the interpreter)."""
    override = register_op(
        "copy_",
        dispatch_key,
        lazy("opgraft_kernels.copies.triton_kernels:copy_"),
        name="copy",
        cond=condition(dispatch_key),
        crossover=_crossover,
        samples=samples,
    )
    return [override]
