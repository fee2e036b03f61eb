"""What a launch of Triton's is, as the core records it."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from opgraft.dsl import triton_versions

__all__ = ["NotRecordable", "Parameter", "parameter", "parameters", "shape"]

_FLOATS = {"fp16": ("<e", 2), "fp32": ("<f", 4), "f32": ("<f", 4), "fp64": ("<d", 8)}
_INTEGER = re.compile(r"[iu](\d+)")
_UINT64 = 2**64 - 1
# CPython's object header, then a CUtensorMap at the next multiple of 128 bytes.
_TENSOR_MAP_OFFSET, _TENSOR_MAP_BYTES = 128, 128


class NotRecordable(Exception):
    """The launch cannot be recorded; the message says why."""


class Parameter(NamedTuple):
    """One parameter of a kernel: its description for the core, and its size in bytes."""

    description: tuple[Any, ...]
    size: int


def shape(kernel: Any, grid: tuple[int, int, int]) -> dict[str, Any]:
    """All of a launch but the function and its parameters, as the core's `cuda_launch` takes it.

    Raises:
        NotRecordable: such a launch is not made by a plan.
    """
    metadata = kernel.metadata
    if metadata.target.backend != "cuda":
        raise NotRecordable(f"kernels for {metadata.target.backend} cannot be recorded")
    if triton_versions.is_instrumented(metadata):
        raise NotRecordable("its kernel is instrumented, for a profiler or a sanitizer")
    return {
        "grid": grid,
        "threads": metadata.num_warps * metadata.target.warp_size,
        "shared": metadata.shared,
        "cluster": metadata.num_ctas,
        "cooperative": bool(metadata.launch_cooperative_grid),
        "dependent": bool(metadata.launch_pdl),
        "name": metadata.name,
    }


def parameters(
    kernel: Any, arguments: tuple[Any, ...], grid: tuple[int, int, int]
) -> Iterator[Parameter]:
    """The kernel's parameters in order. Triton's own two follow the arguments.

    Args:
        kernel: the `CompiledKernel`.
        arguments: those of the launch, in the order of the kernel's signature.
        grid: of the launch.

    Raises:
        NotRecordable: an argument is of a kind that no plan can hold.
    """
    metadata = kernel.metadata
    descriptors = iter(getattr(metadata, "tensordesc_meta", None) or ())
    signature = kernel.src.signature
    if len(signature) != len(arguments):
        raise NotRecordable(f"{len(arguments)} arguments for {len(signature)} parameters")
    for type_, value in _flattened(tuple(signature.values()), arguments):
        if type_.startswith("tensordesc"):
            yield from _tensor_descriptor(value, next(descriptors, None))
        else:
            yield parameter(type_, value)
    scratch = metadata.global_scratch_size
    if scratch:
        size = grid[0] * grid[1] * grid[2] * metadata.num_ctas * scratch
        yield Parameter(("scratch", size), 8)
    else:
        yield Parameter(("pointer", None), 8)
    yield Parameter(("pointer", None), 8)


def _flattened(types: tuple[Any, ...], values: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Types and values with tuples flattened and without constants, as the launcher takes them."""
    for type_, value in zip(types, values, strict=True):
        if isinstance(type_, tuple):
            yield from _flattened(type_, tuple(value))
        elif type_ != "constexpr":
            yield type_, value


def parameter(type_: str, value: Any) -> Parameter:
    """One parameter, by its type in the kernel's signature."""
    if type_.startswith("*"):
        return Parameter(("pointer", _tensor(value)), 8)
    if type_ in _FLOATS:
        layout, size = _FLOATS[type_]
        return Parameter(_value(int.from_bytes(struct.pack(layout, float(value)), "little")), size)
    if type_ == "bf16":
        (bits,) = struct.unpack("<I", struct.pack("<f", float(value)))
        return Parameter(_value(bits >> 16), 2)
    if match := _INTEGER.fullmatch(type_):
        return Parameter(_value(int(value)), max(1, int(match[1]) // 8))
    raise NotRecordable(f"an argument of type {type_}")


def _value(bits: int) -> tuple[Any, ...]:
    return ("value", bits & _UINT64)


def _tensor(value: Any) -> torch.Tensor | None:
    value = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value
    if value is None or isinstance(value, torch.Tensor):
        return value
    raise NotRecordable(f"a pointer that is no tensor, but {type(value).__name__}")


def _tensor_descriptor(descriptor: Any, meta: Any) -> Iterator[Parameter]:
    """The parameters that the launcher passes for a tensor descriptor of the host."""
    expanded = triton_versions.launch_arguments(descriptor, meta)
    rank = len(descriptor.shape)
    head, shape, strides = expanded[: -2 * rank], expanded[-2 * rank : -rank], expanded[-rank:]
    if meta is None:
        yield parameter("*", head[0])
        yield from (parameter("i64", value) for value in head[1 : 1 + 2 * rank])
        yield from (parameter("i1", value) for value in head[1 + 2 * rank :])
    else:
        (tensor_map,) = head
        yield Parameter(("map", _bytes_of(tensor_map), _tensor(descriptor.base)), 128)
    yield from (parameter("i32", value) for value in shape)
    yield from (parameter("i64", value) for value in strides)


def _bytes_of(tensor_map: Any) -> bytes:
    size = _TENSOR_MAP_OFFSET + _TENSOR_MAP_BYTES
    if type(tensor_map).__basicsize__ != size or id(tensor_map) % _TENSOR_MAP_OFFSET:
        raise NotRecordable("tensor descriptors of this Triton are not known")
    return ctypes.string_at(id(tensor_map) + _TENSOR_MAP_OFFSET, _TENSOR_MAP_BYTES)
