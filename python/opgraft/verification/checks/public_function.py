"""The check of what users call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from opgraft.router import threads
from opgraft.verification import opinfo
from opgraft.verification.accuracy import error_over_redraws, is_accurate_enough
from opgraft.verification.checks.registry import check
from opgraft.verification.observation import (
    Failed,
    NotApplicable,
    Observation,
    Subject,
    described,
    first_line,
)
from opgraft.verification.reference import Error, errors


@check("some", suits=lambda seen: seen.sample.base.function_call is not None)
def check_front(seen: Observation) -> None:
    """What users call (`F.softmax`), forward and backward, as PyTorch's own tests call it."""
    function_call = seen.sample.base.function_call
    if function_call is None:
        raise NotApplicable("the sample is none of PyTorch's own")
    if seen.is_random:
        raise NotApplicable("the op is random")
    subject = seen.subject
    mine, expected, exact = _front_results(function_call, subject)
    for index, (one, other) in enumerate(zip(mine, expected, strict=True)):
        best = exact[index] if exact is not None else other
        if one is None or other is None or best is None:
            if (one is None) != (other is None):
                raise Failed(
                    f"{function_call.id}: result {index} is {described(one)}, stock is not"
                )
            continue
        if one.dtype != other.dtype or one.shape != other.shape:
            raise Failed(
                f"{function_call.id}: result {index} is {described(one)}, stock {described(other)}"
            )
        if not (one.is_floating_point() or one.is_complex()):
            if not torch.equal(one, other):
                raise Failed(f"{function_call.id}: result {index} differs from stock")
            continue
        error, problem = errors(one, other, best)
        if problem is None and not is_accurate_enough(error, one, other, subject.k):
            error = _function_error_over_redraws(function_call, subject, index, error)
        if problem is not None or not is_accurate_enough(error, one, other, subject.k):
            raise Failed(
                f"{function_call.id}: result {index} (gradients last) has {problem or error}"
            )


def _function_error_over_redraws(
    function_call: opinfo.FunctionCall, subject: Subject, index: int, error: Error
) -> Error:
    """As :func:`error_over_redraws`, of what users call."""

    def results(draw: int) -> Sequence[Any]:
        try:
            drawn = _front_results(function_call, replace(subject, seed=subject.seed + draw))
            found = [each[index] for each in drawn if each is not None]
        except (NotApplicable, IndexError):
            return ()
        return found[0], found[1], found[-1]

    return error_over_redraws(error, results)


def _front_results(
    function_call: opinfo.FunctionCall, subject: Subject
) -> tuple[list[Any], list[Any], list[Any] | None]:
    """Results and gradients with the override, natively, and natively in float64 if there is that.

    Raises:
        Failed: with the override it raises.
        NotApplicable: it raises natively.
    """
    # Natively first: where that raises it is no call.
    expected = _run_front(function_call, subject, natively=True, wide=False)
    mine = _run_front(function_call, subject, natively=False, wide=False)
    assert mine is not None and expected is not None
    return mine, expected, _run_front(function_call, subject, natively=True, wide=True)


def _run_front(
    function_call: opinfo.FunctionCall, subject: Subject, *, natively: bool, wide: bool
) -> list[Any] | None:
    """Results and gradients of a front, flat."""
    kind = subject.device.type
    requires_grad = function_call.dtype in function_call.info.supported_backward_dtypes(kind)
    samples = opinfo.function_calls(
        function_call.info,
        function_call.dtype,
        subject.device,
        subject.seed,
        requires_grad=requires_grad,
        limit=function_call.index + 1,
    )
    sample = next((sample for each, sample in samples if each.index == function_call.index), None)
    if sample is None:
        raise NotApplicable("there is no such sample with other values")
    if wide:
        if not function_call.dtype.is_floating_point:
            return None
        sample = sample.transform(_widened)
    scope = threads.scope(threads.EVERYTHING) if natively else nullcontext()
    with scope, warnings.catch_warnings(), opinfo.seeded(subject.seed):
        warnings.simplefilter("ignore")
        try:
            result = function_call.info(sample.input, *sample.args, **sample.kwargs)
            gradients = opinfo.gradients(result, opinfo.grad_inputs(sample), subject.seed)
        except Exception as error:
            if wide:
                return None
            if natively:
                raise NotApplicable(f"native raises {first_line(error)}") from None
            raise Failed(f"{function_call.id} raised {first_line(error)}") from error
    from torch.utils._pytree import tree_leaves

    flat = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    return [*flat, *gradients]


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
