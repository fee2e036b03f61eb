"""Compiling in this process what no worker can: the impl runs on stand-ins, on another thread."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from opgraft import dsl
from opgraft.ops.lazy_impl import Lazy
from opgraft.ops.schema import Call
from opgraft.ready import derivative
from opgraft.registry import Override
from opgraft.router import device, threads

#: Bytes of stand-ins that an impl may be run on.
MAX_BYTES = 2**30


class Metadata:
    """A call without its tensors."""

    def __init__(self, call: Call, needs: Sequence[bool] = ()) -> None:
        #: Of each argument whether it gets a gradient.
        self.needs = tuple(needs)
        self._op = call.op
        self._values = tuple(_described(value) for value in call.values)
        self.bytes = sum(t.numel() * t.element_size() for t in call.tensors())

    def call(self) -> Call:
        """The call on tensors of its own, of zeros."""
        values = tuple(_made(value) for value in self._values)
        for value, needed in zip(values, self.needs, strict=False):
            if needed:
                value.requires_grad_()
        return Call(self._op, values)


class _Tensor(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Tensor(tuple(value.shape), value.stride(), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return type(value)(_described(each) for each in value)
    return value


def _made(value: Any) -> Any:
    if isinstance(value, _Tensor):
        made = torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=value.device)
        return made.zero_()
    if isinstance(value, (list, tuple)):
        return type(value)(_made(each) for each in value)
    return value


def import_ahead(override: Override) -> None:
    """Import what the first hit would: no call waits for that.

    Raises:
        Exception: whatever a module raises.
    """
    if isinstance(override.impl, Lazy):
        override.impl.load()
    known = None if override.dsl is None else dsl.find(override.dsl)
    for module in known.to_launch if known is not None and known.available() else ():
        importlib.import_module(module)


def may_run(override: Override, metadata: Metadata) -> bool:
    """Whether an impl may be run on stand-ins.

    Not where they would take much memory, nor where it would draw random numbers: those are the
    program's. Its next call then waits for its kernels.
    """
    return metadata.bytes <= MAX_BYTES and not override.operator.is_random


def run(override: Override, metadata: Metadata, keyset: torch.DispatchKeySet) -> None:
    """Run the impl once, as a native kernel would be run; and the derivative, if it is asked for.

    Raises:
        Exception: the impl's own.
    """
    call = metadata.call()
    leading = (keyset,) if override.takes_keyset else ()
    with (
        torch.no_grad(),
        torch._C._AutoDispatchBelowADInplaceOrView(),
        threads.bypassing(override.operator),
        device.guard(device.of_tensors(call)),
    ):
        output = override.impl(*leading, *call.args, **call.kwargs)
        if override.derivative is not None and any(metadata.needs):
            derivative.run(override.derivative, call.values, output, metadata.needs)
