"""Checks of derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from opgraft.ops.schema import Call
from opgraft.router import threads
from opgraft.verification import opinfo
from opgraft.verification.accuracy import error_over_redraws, is_accurate_enough
from opgraft.verification.checks.registry import check
from opgraft.verification.observation import (
    Failed,
    NotApplicable,
    Observation,
    described,
    first_line,
)
from opgraft.verification.reference import Error, differentiable, errors, widened
from opgraft.verification.samples import CannotMake, Sample, run, tensors_of

#: Elements of the largest tensor of a call whose derivatives are taken numerically.
_MAX_CHECKED = 512


class Gradients(NamedTuple):
    """The gradients of a call's tensors, by three ways."""

    names: list[str]
    mine: list[torch.Tensor | None]
    native: list[torch.Tensor | None]
    exact: list[torch.Tensor | None]


@check("some")
def check_gradients(seen: Observation) -> None:
    """Gradients through the op are as right as native's."""
    subject = seen.subject
    if subject.op.mutates or seen.is_random:
        raise NotApplicable("the op writes to its arguments or is random")
    gradients = _three_gradients(seen)
    for index, (name, one, other, best) in enumerate(zip(*gradients, strict=True)):
        if (one is None) != (other is None):
            raise Failed(f"the gradient of {name} is {'missing' if one is None else 'there'}")
        if one is None or other is None or best is None:
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            raise Failed(f"the gradient of {name} is {described(one)}, native's {described(other)}")
        error, problem = errors(one, other, best)
        if problem is None and not is_accurate_enough(error, one, other, subject.k):
            error = _gradient_error_over_redraws(seen, index, error)
        if problem is not None or not is_accurate_enough(error, one, other, subject.k):
            raise Failed(f"the gradient of {name} has {problem or error}")


def _three_gradients(seen: Observation) -> Gradients:
    """The gradients with the override, natively, and in float64 if there is that.

    Raises:
        NotApplicable: there are none, or the op is a backward that is not reached.
    """
    subject, source = seen.subject, seen.sample.base.source
    call = _differentiable(seen) if source is None else _forward_call(seen)
    # Natively first: what native has no derivative of is nobody's to differentiate.
    with threads.scope(threads.EVERYTHING):
        expected = _native_gradients(call, subject.seed)
    hits = subject.override.hits
    try:
        mine = _gradients(call, subject.seed)
    except Exception as error:
        raise Failed(f"differentiated, it raises {first_line(error)}; native does not") from error
    if source is not None and subject.override.hits == hits:
        raise NotApplicable(f"a backward of {source.op.name} never reaches the op here")
    with threads.scope(threads.EVERYTHING):
        exact = _exact_gradients(call, subject.seed)
    names = [str(position) for position, t in tensors_of(call.op, call.values) if t.requires_grad]
    return Gradients(names, mine, expected, expected if exact is None else exact)


def _gradient_error_over_redraws(seen: Observation, index: int, error: Error) -> Error:
    """As :func:`error_over_redraws`, of a gradient."""

    def gradients(draw: int) -> Sequence[Any]:
        try:
            again = _three_gradients(Observation(seen.subject, seen.sample.with_new_values(draw)))
        except (CannotMake, NotApplicable):
            return ()
        return again.mine[index], again.native[index], again.exact[index]

    return error if seen.is_special else error_over_redraws(error, gradients)


def _differentiable(seen: Observation) -> Call:
    call = seen.sample.call()
    tensors = [t for _, t in tensors_of(call.op, call.values)]
    floating = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    if not floating:
        raise NotApplicable("no argument is floating-point")
    for tensor in floating:
        tensor.requires_grad_()
    return call


def _forward_call(seen: Observation) -> Call:
    base = seen.sample.base.source
    assert base is not None
    forward = Observation(seen.subject, Sample(base, seen.sample.edits, {}, seen.sample.seed))
    return _differentiable(forward)


def _gradients(
    call: Call, seed: int, forward: Callable[[Call], Any] = run
) -> list[torch.Tensor | None]:
    inputs = [t for _, t in tensors_of(call.op, call.values) if t.requires_grad]
    with torch.enable_grad():
        result = forward(call)
        return list(map(_dense, opinfo.gradients(result, inputs, seed)))


def _native_gradients(call: Call, seed: int) -> list[torch.Tensor | None]:
    try:
        return _gradients(call, seed)
    except Exception as error:
        raise NotApplicable(f"native has no derivative here: {first_line(error)}") from None


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """As an embedding's is sparse, if it is asked to."""
    if gradient is None or gradient.layout == torch.strided:
        return gradient
    return gradient.to_dense()


def _exact_gradients(call: Call, seed: int) -> list[torch.Tensor | None] | None:
    """In float64, where the op has that."""
    wide = widened(call, torch.float64)
    for (_, tensor), (_, narrow) in zip(
        tensors_of(wide.op, wide.values), tensors_of(call.op, call.values), strict=True
    ):
        if narrow.requires_grad:
            tensor.requires_grad_()
    try:
        return _gradients(wide, seed, differentiable)
    except Exception:
        return None


def _can_be_checked(call: Call) -> bool:
    """Whether numerical derivatives of a call mean something, and come soon."""
    floating = [t for t in call.tensors() if t.is_floating_point()]
    if {t.dtype for t in floating} != {torch.float64} or any(map(_is_expanded, floating)):
        return False
    return max(t.numel() for t in call.tensors()) <= _MAX_CHECKED


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory: gradcheck moves one at a time, and would move them all."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


@check("once", suits=lambda seen: _can_be_checked(seen.override_run.call))
def check_gradcheck(seen: Observation) -> None:
    """Numerical and analytical derivatives agree, in float64."""
    call = seen.sample.call()
    if not _can_be_checked(call):
        raise NotApplicable(
            f"it takes no call in float64 of at most {_MAX_CHECKED} elements in memory of their own"
        )
    if seen.subject.op.mutates or seen.is_random:
        raise NotApplicable("the op writes to its arguments or is random")
    call = _differentiable(seen)
    inputs = tuple(t for _, t in tensors_of(call.op, call.values) if t.requires_grad)

    def function(*tensors: torch.Tensor) -> Any:
        fresh = dict(zip(map(id, inputs), tensors, strict=True))
        values = tuple(_replaced(value, fresh) for value in call.values)
        result = run(Call(call.op, values))
        results = result if isinstance(result, tuple) else (result,)
        return tuple(r for r in results if isinstance(r, torch.Tensor) and r.requires_grad)

    with threads.scope(threads.EVERYTHING):
        try:
            torch.autograd.gradcheck(function, inputs, fast_mode=True)
        except Exception as error:
            raise NotApplicable(f"native fails it: {first_line(error)}") from None
    hits = seen.subject.override.hits
    try:
        torch.autograd.gradcheck(function, inputs, fast_mode=True)
    except Exception as error:
        raise Failed(f"gradcheck: {first_line(error)}") from error
    if seen.subject.override.hits == hits:
        raise NotApplicable("in grad mode it takes no call")


def _replaced(value: Any, fresh: dict[int, Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_replaced(each, fresh) for each in value]
    return fresh.get(id(value), value)
