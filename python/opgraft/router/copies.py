"""Copies of a call's arguments, for a second run of an op that writes to them."""

from __future__ import annotations

from typing import Any

import torch

from opgraft.ops.schema import Call

# Copies begin at an offset that is a multiple of this, so that they are aligned as the originals
# are.
_ALIGNMENT = 64

#: A range of bytes in a storage: the first, and the one past the last.
_Span = tuple[int, int]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """A tensor's storage; None for layouts without a storage (sparse, mkldnn)."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    return tensor.untyped_storage()


def span(tensor: torch.Tensor) -> _Span:
    """The range of bytes in its storage that a strided tensor's elements occupy."""
    size, first = tensor.element_size(), int(tensor.storage_offset())
    if tensor.numel() == 0:
        return first * size, first * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum(int((length - 1) * stride) for length, stride in steps)
    return first * size, (last + 1) * size


def copy_call(call: Call, *, everything: bool = False) -> Call:
    """The call with copies of what the op writes to, and of all that shares memory with it.

    The copies alias, overlap and are aligned as the arguments are: in `x.add_(x)` both are one
    tensor. All other arguments are the call's own.

    Args:
        call: the arguments.
        everything: copy every tensor.
    """
    return _Copier(call, everything).call()


def restore(call: Call, copied: Call) -> None:
    """Restore what a call writes to from a copy of the call."""
    for (_, ours), (_, other) in zip(call.written(), copied.written(), strict=True):
        if ours is other:
            continue
        if ours.shape != other.shape or ours.stride() != other.stride():
            ours.set_(other)  # type: ignore[call-overload]
        else:
            ours.copy_(other)


def copied_bytes(call: Call) -> int:
    """The bytes that :func:`copy_call` copies."""
    return sum(last - first for first, last in _spans(call, False).values())


def _spans(call: Call, everything: bool) -> dict[int, _Span]:
    """The range of bytes to copy, by storage."""
    chosen = call.tensors() if everything else (tensor for _, tensor in call.written())
    written = {s._cdata for t in chosen if (s := storage_of(t)) is not None}
    spans: dict[int, _Span] = {}
    for tensor in call.tensors():
        storage = storage_of(tensor)
        if storage is not None and storage._cdata in written:
            first, last = span(tensor)
            known = spans.get(storage._cdata, (first, last))
            spans[storage._cdata] = (min(first, known[0]), max(last, known[1]))
    return {key: (first - first % _ALIGNMENT, last) for key, (first, last) in spans.items()}


class _Copier:
    def __init__(self, call: Call, everything: bool) -> None:
        self._call = call
        self._everything = everything
        self._spans = _spans(call, everything)
        self._written = {id(tensor) for _, tensor in call.written()}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def call(self) -> Call:
        return Call(self._call.op, tuple(map(self._copied, self._call.values)))

    def _copied(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._copied(each) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._tensors:
            self._tensors[id(value)] = self._copy(value)
        return self._tensors[id(value)]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = storage_of(tensor)
        if storage is None or tensor.is_quantized:
            is_due = self._everything or id(tensor) in self._written
            return tensor.clone() if is_due else tensor
        if storage._cdata not in self._spans:
            return tensor
        first, last = self._spans[storage._cdata]
        if storage._cdata not in self._storages:
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            whole = raw.set_(storage)  # type: ignore[call-overload]
            self._storages[storage._cdata] = whole[first:last].clone().untyped_storage()
        offset = tensor.storage_offset() - first // tensor.element_size()
        copied = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return copied.set_(self._storages[storage._cdata], offset, tensor.shape, tensor.stride())
