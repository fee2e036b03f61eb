"""How many clusters a device runs at once, which a launch of clusters that walk over rows needs."""

from __future__ import annotations

import functools
from typing import Any

import cuda.bindings.driver as cuda
import torch

from opgraft_kernels.norms.clusters.tile import Tile

__all__ = ["clusters_for"]


# A kernel that does nothing, to ask how many clusters of a size run at once. The driver compiles
# it.
_EMPTY_PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry empty() { ret; }
\0"""


@functools.cache
def resident_clusters(tile: Tile, device_index: int) -> int:
    """How many clusters of `tile` run at once; more would start when others end."""
    device = _checked(cuda.cuDeviceGet(device_index))
    # Autograd calls from threads of its own, where no context need be current.
    _checked(cuda.cuCtxPushCurrent(_checked(cuda.cuDevicePrimaryCtxRetain(device))))
    try:
        library = _checked(cuda.cuLibraryLoadData(_EMPTY_PTX, None, None, 0, None, None, 0))
        try:
            return _count_clusters(library, tile, device)
        finally:
            _checked(cuda.cuLibraryUnload(library))
    finally:
        _checked(cuda.cuCtxPopCurrent())
        _checked(cuda.cuDevicePrimaryCtxRelease(device))


def clusters_for(tile: Tile, rows: int, device: torch.device) -> int:
    """How many clusters are to walk over `rows` rows; nothing is compiled for the number."""
    if not torch.cuda.is_initialized():  # a process that compiles for others has no device to ask
        return 1
    assert device.index is not None
    return max(1, min(rows, resident_clusters(tile, device.index)))


def _count_clusters(library: Any, tile: Tile, device: Any) -> int:
    (kernel,) = _checked(cuda.cuLibraryEnumerateKernels(1, library))
    function = _checked(cuda.cuKernelGetFunction(kernel))
    limit = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    # As much as leaves room for `per_sm` such blocks; 1024 bytes of each are the system's.
    shared = _checked(cuda.cuDeviceGetAttribute(limit, device)) // tile.per_sm - 1024
    attributes = cuda.CUfunction_attribute
    for attribute, value in (
        (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
        (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
    ):
        _checked(cuda.cuFuncSetAttribute(function, attribute, value))
    launch = _cluster_launch(tile, shared)
    return int(_checked(cuda.cuOccupancyMaxActiveClusters(function, launch)))


def _cluster_launch(tile: Tile, shared: int) -> Any:
    size = cuda.CUlaunchAttribute()
    size.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    value = cuda.CUlaunchAttributeValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = tile.cluster, 1, 1
    size.value = value
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = tile.cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = tile.threads, 1, 1
    config.sharedMemBytes = shared
    config.attrs = [size]
    config.numAttrs = 1
    return config


def _checked(result: Any) -> Any:
    """The value that a call of the driver returned."""
    error, *values = result
    if error != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a call of the CUDA driver failed with {error.name}")
    return values[0] if values else None
