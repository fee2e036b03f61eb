"""Checks under what traces or casts: FakeTensors, opcheck, autocast, torch.compile."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from opgraft.ops.schema import Call
from opgraft.router import threads
from opgraft.router.outputs import as_outputs, is_rng_state
from opgraft.verification.accuracy import check_accuracy
from opgraft.verification.checks.registry import check
from opgraft.verification.observation import (
    Failed,
    NotApplicable,
    Observation,
    described,
    first_line,
    has_values,
    needs_plain_hit,
    observe,
    output_name,
    reference_at,
    unless_refused,
)
from opgraft.verification.reference import native
from opgraft.verification.samples import run


@check("some")
def check_fake(seen: Observation) -> None:
    """FakeTensors of the same call give outputs of the same dtype, shape and strides."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    needs_plain_hit(seen)
    real = seen.sample.call()
    with FakeTensorMode() as mode:
        fake = Call(real.op, tuple(_faked(value, mode) for value in real.values))
        try:
            with torch.no_grad():
                result = run(fake)
        except Exception as error:
            raise NotApplicable(f"the op has no FakeTensor rule: {first_line(error)}") from None
    results = as_outputs(real.op, result)
    for index, (mine, promised) in enumerate(zip(seen.override_run.outputs, results, strict=False)):
        if not isinstance(mine, torch.Tensor) or not isinstance(promised, torch.Tensor):
            continue
        if is_rng_state(real.op, index):
            continue
        for what in ("dtype", "shape"):
            theirs = getattr(seen.native.outputs[index], what)
            one, other = getattr(mine, what), getattr(promised, what)
            if one != other and theirs == other:
                raise Failed(
                    f"{output_name(seen, index)} has {what} {one}, FakeTensor says {other}"
                )
    override = seen.subject.override
    if override.condition_holds(fake) != seen.wanted:
        raise Failed("its condition says something else on FakeTensors than on the real ones")


def _faked(value: Any, mode: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    return [_faked(each, mode) for each in value] if isinstance(value, (list, tuple)) else value


@check("once")
def check_opcheck(seen: Observation) -> None:
    """`torch.library.opcheck` finds nothing that it does not find natively."""
    needs_plain_hit(seen)
    _quietly_opcheck(seen, natively=True)
    hits = seen.subject.override.hits
    _quietly_opcheck(seen, natively=False)
    if seen.subject.override.hits == hits:
        raise Failed("torch.library.opcheck ran and the override was never hit")


def _quietly_opcheck(seen: Observation, *, natively: bool) -> None:
    call = seen.sample.call()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if natively:
                with threads.scope(threads.EVERYTHING):
                    torch.library.opcheck(call.op.overload, call.args, call.kwargs)
            else:
                torch.library.opcheck(call.op.overload, call.args, call.kwargs)
    except Exception as error:
        if natively:
            raise NotApplicable(f"native fails it: {first_line(error)}") from None
        raise Failed(f"torch.library.opcheck: {first_line(error)}") from error


@check("some")
def check_autocast(seen: Observation) -> None:
    """Under autocast the result is as right as native's."""
    if seen.subject.op.mutates or seen.is_random:
        raise NotApplicable("the op writes to its arguments or is random")
    if not any(t.dtype == torch.float32 for t in seen.sample.call().tensors()):
        raise NotApplicable("no call in float32 is taken")
    device = seen.subject.device.type
    for dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a dtype that this device does not cast to
            with torch.autocast(device, dtype=dtype):
                expected = unless_refused(lambda: native(seen.sample.call()))
                mine = observe(seen.subject.override, seen.sample.call(), seen.subject.device)
        if mine.error is not None:
            raise Failed(f"under autocast to {dtype} it raised {first_line(mine.error)}")
        for index, (one, other) in enumerate(zip(mine.outputs, expected.outputs, strict=False)):
            if not isinstance(one, torch.Tensor) or not has_values(seen, index):
                continue
            if one.dtype != other.dtype or one.shape != other.shape:
                raise Failed(
                    f"under autocast to {dtype}, {output_name(seen, index)} is {described(one)}, "
                    f"native's {described(other)}"
                )
            exact = reference_at(seen.reference.outputs, index, other)
            if isinstance(exact, torch.Tensor):
                check_accuracy(seen, index, one, other, exact)


@check("once", cost="seconds")
def check_compile(seen: Observation) -> None:
    """A compiled graph that calls the op gives results as right as native's, without a break."""
    if seen.subject.op.mutates or seen.is_random:
        raise NotApplicable("the op writes to its arguments or is random")
    needs_plain_hit(seen)
    overload = seen.subject.op.overload
    call = seen.sample.call()
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda args, kwargs: overload(*args, **kwargs), fullgraph=True, dynamic=dynamic
        )
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = compiled(call.args, call.kwargs)
        except Exception as error:
            with threads.scope(threads.EVERYTHING):
                torch._dynamo.reset()
                try:
                    compiled(call.args, call.kwargs)
                except Exception:
                    raise NotApplicable(f"stock fails it: {first_line(error)}") from None
            raise Failed(f"compiled with dynamic={dynamic}: {first_line(error)}") from error
        for index, one in enumerate(as_outputs(seen.subject.op, result)):
            other = seen.native.outputs[index]
            exact = reference_at(seen.reference.outputs, index, other)
            if isinstance(one, torch.Tensor) and isinstance(exact, torch.Tensor):
                if one.shape != other.shape or one.dtype != other.dtype:
                    raise Failed(f"compiled, {output_name(seen, index)} is {described(one)}")
                if has_values(seen, index):
                    check_accuracy(seen, index, one, other, exact)
