"""The check of what becomes of an index that is out of range."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from opgraft.ops.schema import Call
from opgraft.router import threads
from opgraft.verification import isolated
from opgraft.verification.checks.registry import check
from opgraft.verification.isolated import CallOutcome
from opgraft.verification.layouts import INDEX_DTYPES, index_in_layout, layout_with_index
from opgraft.verification.observation import (
    Failed,
    NotApplicable,
    Observation,
    needs_plain_hit,
)
from opgraft.verification.reference import on_host
from opgraft.verification.samples import CannotMake, Position, Sample, run, tensors_of
from opgraft.verification.single_override import past_the_contract, raising_errors

#: Of each tensor of indices, what is tried on a CUDA device: each takes two processes' start.
_ON_CUDA = 2


def _index_positions(call: Call) -> list[Position]:
    """The tensors of a call that may hold indices into another one."""
    tensors = list(tensors_of(call.op, call.values))
    may_write = {argument.name for argument in call.op.arguments if argument.written}
    return [
        position
        for number, (position, tensor) in enumerate(tensors)
        if tensor.dtype in INDEX_DTYPES and tensor.numel() and position.argument not in may_write
        # The first is what is computed from, unless it alone has indices.
        if number or any(other.is_floating_point() for _, other in tensors)
    ]


@check("once", suits=lambda seen: bool(_index_positions(seen.override_run.call)))
def check_bad_index(seen: Observation) -> None:
    """An index that native refuses is refused: by the same error on a CPU, by an assertion or an
    error on a CUDA device, without a read out of bounds."""
    needs_plain_hit(seen)
    call = seen.sample.call()
    positions = _index_positions(call)
    if not positions:
        raise NotApplicable("no argument is a tensor of indices")
    refused = 0
    for position in positions:
        samples = _refused(seen, position)
        refused += len(samples)
        if seen.subject.device.type == "cuda":
            for sample, _ in samples[:_ON_CUDA]:
                _check_on_cuda(seen, sample)
        else:
            _check_on_cpu(seen, samples)
    if not refused:
        raise NotApplicable("native refuses no index, or this cannot be told without it")


def _refused(seen: Observation, position: Position) -> list[tuple[Sample, CallOutcome]]:
    """The samples with an index that native refuses on the CPU, the nearest first."""
    call = seen.sample.call()
    tensor = next(t for p, t in tensors_of(call.op, call.values) if p == position)
    sizes = [size for t in call.tensors() for size in t.shape]
    limit = torch.iinfo(tensor.dtype).max
    samples = [
        seen.sample.with_layout(position, layout_with_index(number))
        for number in isolated.out_of_range_indices(sizes)
        if number <= limit
    ]
    made: list[tuple[Sample, Call]] = []
    for sample in samples:
        try:
            made.append((sample, on_host(sample.call())))
        except CannotMake:  # the tensor is laid out so that it cannot hold it
            continue
    outcomes = isolated.run_in_forks([_natively(call) for _, call in made])
    return [
        (sample, outcome)
        for (sample, _), outcome in zip(made, outcomes, strict=True)
        if outcome.what == "raised" and outcome.error not in ("NotImplementedError", "MemoryError")
        if "allocate memory" not in outcome.message
    ]


def _natively(call: Call) -> Callable[[], Any]:
    def work() -> None:
        with threads.scope(threads.EVERYTHING):
            run(call)

    return work


def _check_on_cpu(seen: Observation, samples: list[tuple[Sample, CallOutcome]]) -> None:
    override = seen.subject.override
    calls = [sample.call() for sample, _ in samples]
    with raising_errors(override, False), past_the_contract(override, calls):
        outcomes = isolated.run_in_forks([partial(run, call) for call in calls])
    for (sample, native), mine in zip(samples, outcomes, strict=True):
        if mine.what == "no process":
            raise NotApplicable("no process can be forked here")
        if mine.what != "raised" or not _same_error_type(mine.error, native.error):
            raise Failed(
                f"{_with_index(sample)} {_describe_outcome(mine)}; "
                f"native {_describe_outcome(native)}"
            )


def _same_error_type(error: str, native: str) -> bool:
    """Whether errors are of a type; native's own is one or the other for the same op, by its path:
    `index_select` raises the one for a vector and the other for a matrix."""
    either = ("IndexError", "RuntimeError")
    return error == native or (error in either and native in either)


def _check_on_cuda(seen: Observation, sample: Sample) -> None:
    native = isolated.run_in_new_process(seen.subject.override, sample, natively=True)
    if native.what == "no process":
        raise NotApplicable(f"no other process can register the override: {native.message}")
    if native.what == "returned":
        return
    mine = isolated.run_in_new_process(seen.subject.override, sample, natively=False)
    if mine.what == "returned" or "illegal memory access" in mine.message:
        raise Failed(
            f"{_with_index(sample)} {_describe_outcome(mine)}: it reads out of bounds; "
            f"native {_describe_outcome(native)}"
        )


def _with_index(sample: Sample) -> str:
    of = {position: index_in_layout(layout) for position, layout in sample.layouts.items()}
    where = [
        f"{number} in {str(position)!r}" for position, number in of.items() if number is not None
    ]
    return f"with {where[0]} it"


def _describe_outcome(outcome: CallOutcome) -> str:
    if outcome.what == "returned":
        return "returned a result"
    if outcome.what == "died":
        return f"ended the process ({outcome.error})"
    return f"raised {outcome.error}: {outcome.message.splitlines()[0] if outcome.message else ''}"
