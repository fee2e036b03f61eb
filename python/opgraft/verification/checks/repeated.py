"""Checks that call again: the same bits, whatever memory held, by a launch plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from opgraft.verification.checks.registry import check
from opgraft.verification.checks.results import (
    check_aliasing,
    check_dtype,
    check_shape,
    check_strides,
    check_values,
)
from opgraft.verification.observation import (
    Failed,
    NotApplicable,
    Observation,
    agree,
    first_difference,
    needs_plain_hit,
    observe_again,
    output_name,
)

#: Calls after which a launch plan is there: one to see that the call comes again, two recordings,
#: and some that an autotuned kernel needs to settle.
_RUNS_TO_A_PLAN = 8


@check("some")
def check_determinism(seen: Observation) -> None:
    """The same call gives the same bits, wherever native's does."""
    if seen.is_random:
        raise NotApplicable("the op is random")
    needs_plain_hit(seen)
    if seen.repeats:
        return
    if not seen.native_is_deterministic:
        raise NotApplicable("native's own results differ from run to run")
    with deterministic():
        first = observe_again(seen)
        if first.override_run.hits and not first.repeats:
            raise Failed(
                "two runs of the same call differ, under torch.use_deterministic_algorithms(True) "
                "too, and native's do not"
            )


@check("some")
def check_uninitialized(seen: Observation) -> None:
    """Nothing of the result comes from memory that was never written."""
    if seen.is_random:
        raise NotApplicable("the op is random")
    needs_plain_hit(seen)
    with deterministic():  # torch.empty then holds NaN, or the largest integer
        filled = observe_again(seen)
        if filled.override_run.error is not None:
            raise Failed(f"with memory filled it raised {filled.override_run.error!r}")
    index = first_difference(
        seen, seen.override_run.outputs, filled.override_run.outputs, partial(agree, seen)
    )
    if index is not None:
        raise Failed(
            f"{output_name(seen, index)} changes with what its memory held before: a part of it is "
            "never written, or read before it is"
        )


@contextmanager
def deterministic() -> Iterator[None]:
    stated = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(stated, warn_only=warn_only)


@check("some")
def check_replay(seen: Observation) -> None:
    """Replayed from a launch plan, a call gives what the other checks ask of a hit."""
    needs_plain_hit(seen)
    plans = seen.subject.override.plans
    if plans is None:
        raise NotApplicable("it has no launch plans")
    before = plans.hits
    for _ in range(_RUNS_TO_A_PLAN):
        again = observe_again(seen)
        if again.override_run.error is not None:
            raise Failed(f"called again, it raised {again.override_run.error!r}")
        if plans.hits > before:
            break
    else:
        reasons = "; ".join(dict.fromkeys(plans.refusals.values()))
        unlike = "its kind is another each time, by the address or a number on the CPU"
        raise NotApplicable(f"no launch plan was recorded: {reasons or unlike}")
    for of_a_hit in (check_dtype, check_shape, check_strides, check_aliasing, check_values):
        try:
            of_a_hit(again)
        except NotApplicable:
            pass
        except Failed as failed:
            raise Failed(f"replayed from a launch plan, {failed}") from None
