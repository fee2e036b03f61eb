"""The check of what becomes of an index that is out of range."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from opgraft.ops.schema import Call
from opgraft.router import threads
from opgraft.verification import isolated
from opgraft.verification.alone import raising_errors
from opgraft.verification.checks.registry import check
from opgraft.verification.isolated import Fate
from opgraft.verification.layouts import held, holding
from opgraft.verification.observation import (
    Failed,
    NotApplicable,
    Observation,
    needs_plain_hit,
)
from opgraft.verification.samples import CannotMake, Place, Sample, run, tensors_of

_INTEGERS = (torch.int32, torch.int64)
#: Of each tensor of indices, what is tried on a CUDA device: each takes two processes' start.
_ON_CUDA = 2


def _index_places(call: Call) -> list[Place]:
    """The tensors of a call that may hold indices into another one."""
    tensors = list(tensors_of(call.op, call.values))
    may_write = {argument.name for argument in call.op.arguments if argument.written}
    return [
        place
        for number, (place, tensor) in enumerate(tensors)
        if tensor.dtype in _INTEGERS and tensor.numel() and place.argument not in may_write
        # The first is what is computed from, unless it alone has indices.
        if number or any(other.is_floating_point() for _, other in tensors)
    ]


@check("once", suits=lambda seen: bool(_index_places(seen.mine.call)))
def check_bad_index(seen: Observation) -> None:
    """An index that native refuses is refused: by the same error on a CPU, by an assertion or an
    error on a CUDA device, without a read out of bounds."""
    needs_plain_hit(seen)
    call = seen.sample.call()
    places = _index_places(call)
    if not places:
        raise NotApplicable("no argument is a tensor of indices")
    refused = 0
    for place in places:
        samples = _refused(seen, place)
        refused += len(samples)
        if seen.subject.device.type == "cuda":
            for sample, _ in samples[:_ON_CUDA]:
                _check_on_cuda(seen, sample)
        else:
            _check_on_cpu(seen, samples)
    if not refused:
        raise NotApplicable("native refuses no index, or this cannot be told without it")


def _refused(seen: Observation, place: Place) -> list[tuple[Sample, Fate]]:
    """The samples with an index that native refuses on the CPU, the nearest first."""
    call = seen.sample.call()
    tensor = next(t for p, t in tensors_of(call.op, call.values) if p == place)
    sizes = [size for t in call.tensors() for size in t.shape]
    limit = torch.iinfo(tensor.dtype).max
    samples = [
        seen.sample.with_layout(place, holding(number))
        for number in isolated.candidates_of(sizes)
        if number <= limit
    ]
    made: list[tuple[Sample, Call]] = []
    for sample in samples:
        try:
            made.append((sample, _on_cpu(sample.call())))
        except CannotMake:  # the tensor is laid out so that it cannot hold it
            continue
    fates = isolated.forked([_natively(call) for _, call in made])
    return [
        (sample, fate)
        for (sample, _), fate in zip(made, fates, strict=True)
        if fate.what == "raised" and fate.error not in ("NotImplementedError", "MemoryError")
        if "allocate memory" not in fate.message
    ]


def _natively(call: Call) -> Callable[[], Any]:
    def work() -> None:
        with threads.scope(threads.EVERYTHING):
            run(call)

    return work


def _on_cpu(call: Call) -> Call:
    def moved(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [moved(each) for each in value]
        return value.cpu() if isinstance(value, torch.Tensor) else value

    return Call(call.op, tuple(map(moved, call.values)))


def _check_on_cpu(seen: Observation, samples: list[tuple[Sample, Fate]]) -> None:
    with raising_errors(seen.subject.override, False):
        calls = [sample.call() for sample, _ in samples]
        fates = isolated.forked([partial(run, call) for call in calls])
    for (sample, native), mine in zip(samples, fates, strict=True):
        if mine.what == "no process":
            raise NotApplicable("no process can be forked here")
        if mine.what != "raised" or not _alike(mine.error, native.error):
            raise Failed(f"{_with(sample)} {_told(mine)}; native {_told(native)}")


def _alike(error: str, native: str) -> bool:
    """Whether errors are of a type; native's own is one or the other for the same op, by its path:
    `index_select` raises the one for a vector and the other for a matrix."""
    either = ("IndexError", "RuntimeError")
    return error == native or (error in either and native in either)


def _check_on_cuda(seen: Observation, sample: Sample) -> None:
    native = isolated.anew(seen.subject.override, sample, natively=True)
    if native.what == "no process":
        raise NotApplicable(f"no other process can register the override: {native.message}")
    if native.what == "returned":
        return
    mine = isolated.anew(seen.subject.override, sample, natively=False)
    if mine.what == "returned" or "illegal memory access" in mine.message:
        raise Failed(
            f"{_with(sample)} {_told(mine)}: it reads out of bounds; native {_told(native)}"
        )


def _with(sample: Sample) -> str:
    of = {place: held(layout) for place, layout in sample.layouts.items()}
    where = [f"{number} in {str(place)!r}" for place, number in of.items() if number is not None]
    return f"with {where[0]} it"


def _told(fate: Fate) -> str:
    if fate.what == "returned":
        return "returned a result"
    if fate.what == "died":
        return f"ended the process ({fate.error})"
    return f"raised {fate.error}: {fate.message.splitlines()[0] if fate.message else ''}"
