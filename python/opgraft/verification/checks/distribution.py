"""The check of what is drawn: random results cannot be compared, how they are distributed can."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from opgraft.router import threads
from opgraft.router.outputs import has_comparable_values
from opgraft.verification import opinfo
from opgraft.verification.checks.registry import check
from opgraft.verification.observation import (
    Failed,
    NotApplicable,
    Observation,
    needs_plain_hit,
    output_name,
)
from opgraft.verification.samples import run, tensors_of

#: Calls of each that are compared, and how many standard errors the means of them may be apart.
_RUNS = 48
_APART = 6.0


@check("some", suits=lambda seen: seen.is_random)
def check_distribution(seen: Observation) -> None:
    """What is drawn has native's mean and spread, and goes with the other results as native's."""
    if not seen.is_random or seen.subject.op.mutates:
        raise NotApplicable("the op is not random, or writes to its arguments")
    needs_plain_hit(seen)
    with opinfo.seeded(seen.subject.seed), torch.no_grad():
        mine = _statistics(seen)
        with threads.scope(threads.EVERYTHING):
            native = _statistics(seen)
    for what in mine.keys() & native.keys():
        one, other = mine[what], native[what]
        difference = abs(float(one.mean() - other.mean()))
        error = math.sqrt(float(one.var() + other.var()) / _RUNS)
        rounding = 1e-3 * float(torch.cat([one, other]).abs().max())
        if difference > _APART * error + rounding:
            raise Failed(
                f"over {_RUNS} calls {what} is {float(one.mean()):.3g}, native's "
                f"{float(other.mean()):.3g}; {_APART:g} standard errors are {_APART * error:.2g}"
            )


def _statistics(seen: Observation) -> dict[str, torch.Tensor]:
    """By what each is: a number of each of many calls."""
    found: dict[str, list[torch.Tensor]] = {}
    for _ in range(_RUNS):
        for what, value in _of_one_call(seen):
            if value.isfinite():
                found.setdefault(what, []).append(value)
    return {what: torch.stack(values) for what, values in found.items() if len(values) == _RUNS}


def _of_one_call(seen: Observation) -> Iterator[tuple[str, torch.Tensor]]:
    call = seen.sample.call()
    given = [(repr(str(position)), t) for position, t in tensors_of(call.op, call.values)]
    result = run(call)
    results = (result,) if len(call.op.returns) == 1 else tuple(result)
    named = [
        (output_name(seen, index), each.double())
        for index, each in enumerate(results)
        # What a generator's state is depends on how often it was asked, and on the kernel.
        if has_comparable_values(call.op, index)
        if isinstance(each, torch.Tensor) and not each.is_complex() and each.numel()
    ]
    for name, each in named:
        yield f"the mean of {name}", each.mean()
        yield f"the mean square of {name}", each.square().mean()
    others = [(name, t.double()) for name, t in given if not t.is_complex()]
    pairs = itertools.chain(itertools.combinations(named, 2), itertools.product(named, others))
    for (name, one), (other_name, other) in pairs:
        if one.shape == other.shape:
            yield f"the mean size of {name} times {other_name}", (one * other).abs().mean()
