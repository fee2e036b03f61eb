"""What kernels of every DSL ask about a device."""

from __future__ import annotations

import functools

import torch

__all__ = [
    "begins_early",
    "can_begin_early",
    "can_prefetch",
    "multiprocessors",
]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2  # The interpreter: few enough for programs to walk.


def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU of NVIDIA's; (0, 0) of other devices."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if is_nvidia else (0, 0)


@functools.cache
def can_prefetch(device: torch.device) -> bool:
    """Whether one instruction can ask for many bytes to be loaded into the L2 cache."""
    return _capability(device) >= (9, 0)


def begins_early(major: int, minor: int) -> bool:
    """Whether devices of a compute capability are known to begin kernels early. Later ones than
    Hopper can, too, but no kernel here has run there."""
    return (major, minor) == (9, 0)


@functools.cache
def can_begin_early(device: torch.device) -> bool:
    """Whether a kernel may begin before the one before it in the stream has ended, and wait then:
    what CUDA calls programmatic dependent launch."""
    # Graphs know such launches from CUDA 12.3 on. Where there is no driver kernels are compiled for
    # other machines.
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    is_known_to_graphs = driver == 0 or driver >= 12030
    return is_known_to_graphs and begins_early(*_capability(device))
