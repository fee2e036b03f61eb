"""The verdict of an override on a call: it takes the call, or why it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from opgraft.ops.schema import Call
from opgraft.registry import Chain, Override
from opgraft.router import composite, device, failure, threads
from opgraft.router.decision import Decline, keeps_place, why_not
from opgraft.when import Failure

_PYTHON = torch._C.DispatchKey.Python

Status = Literal[
    "takes",  # its impl runs
    "behind",  # its condition holds, but an override before it takes the call, or raises
    "declines",  # its condition, or a rule for all overrides, excludes this call
    "raises",  # its condition raises, and so does the call
    "unknown",  # its condition raises on tensors without values, and would perhaps not on others
    "quarantined",  # it failed for a call of this kind before
    "disabled",  # by a rule, an environment variable or a scope
    "unavailable",  # it can never run here: a requirement is missing
    "not asked",  # autograd differentiates the call of a composite op, and not by this override
]


#: What becomes of an override that would take a call, by the verdict of one before it.
_BEHIND: dict[Status, str] = {
    "takes": "would take it, but one before it does",
    "raises": "would take it, but the condition of one before it raises",
    "unknown": "would take it if the one before it, of which it is not known, does not",
}


@dataclass(frozen=True)
class Verdict:
    """Whether one override of a chain takes a call, and why."""

    override: Override
    status: Status
    #: Why, in words; empty where it takes the call.
    reason: str = ""
    #: The part of the condition that did not hold, and the values that it saw.
    failure: Failure | None = None
    #: Where it takes the call and may have launch plans: whether a plan runs or Python, and why.
    plan: str = ""

    @property
    def takes(self) -> bool:
        """Whether its impl runs."""
        return self.status == "takes"

    @property
    def decides(self) -> bool:
        """Whether nobody after it is asked, or it is not known who is."""
        return self.status in _BEHIND

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
        return {
            "name": self.override.name,
            "dsl": self.override.dsl,
            "pack": self.override.pack,
            "priority": self.override.priority,
            "status": self.status,
            "reason": self.reason,
            "part": self.failure.part if self.failure else None,
            "saw": self.failure.saw if self.failure else None,
            "plan": self.plan or None,
        }

    def __str__(self) -> str:
        takes = f"takes it, {self.plan}" if self.plan else "takes it"
        return f"{label(self.override)}: {takes if self.takes else self.reason}"


def label(override: Override) -> str:
    """An override by name, DSL and owner."""
    return f"{override.name} [{override.dsl or 'no DSL'}, {override.pack or 'user'}]"


def judge_overrides(
    chain: Chain, call: Call, *, keeps_derivative: bool, differentiating: Override | None = None
) -> tuple[Verdict, ...]:
    """The verdict of each override of a chain, in the order of asking; no kernel runs.

    Args:
        chain: the overrides.
        call: the call.
        keeps_derivative: whether autograd differentiates the call of a composite op.
        differentiating: the override whose two functions differentiate it, if one's do.
    """
    verdicts: list[Verdict] = []
    # Judged once, and first: what it says concerns the others.
    of_pair = None
    if keeps_derivative and differentiating is not None:
        of_pair = _judge_override(differentiating, call, True, True)
    forward_is_native = of_pair is not None and of_pair.status == "quarantined"
    for override in chain.members:
        decisive = next((each for each in verdicts if each.decides), None)
        if of_pair is not None and override is differentiating:
            verdict = of_pair
        else:
            verdict = _judge_override(override, call, keeps_derivative, decisive is not None)
        if forward_is_native and verdict.status in ("takes", "not asked"):
            verdict = Verdict(override, "not asked", threads.PassedByForNative.REASON)
        elif verdict.takes and decisive is not None:
            verdict = Verdict(override, "behind", _BEHIND[decisive.status])
        elif keeps_derivative and decisive is None and verdict.status == "quarantined":
            forward_is_native = forward_is_native or keeps_place(override, call)
        verdicts.append(verdict)
    return tuple(verdicts)


def _judge_override(
    override: Override, call: Call, keeps_derivative: bool, may_differentiate: bool
) -> Verdict:
    """`may_differentiate`: whether its two functions can, if it has them."""
    off = override.why_off()
    if off is not None:
        return Verdict(override, "unavailable" if override.unavailable else "disabled", off)
    not_asked = Verdict(override, "not asked", f"not asked: the op is {composite.NOTE}")
    # One with a derivative of its own is asked.
    if keeps_derivative and (override.autograd is None or composite.has_tangents(call)):
        return not_asked
    try:
        where = device.of_call(call, override.dispatch_key)
        decline = why_not(override, call, capturing=device.is_capturing(where))
        failed = (
            override.condition_failure(call) if decline and decline.kind == "condition" else None
        )
    except Exception as error:  # a condition in Python
        return _raising(override, call, error)
    if decline is not None:
        return _declined(override, decline, failed)
    takes, plan = True, ""
    if override.plans is not None:
        # Of overrides with a derivative, only the pairs of functions wait until they are ready.
        takes, plan = override.plans.predict(call, differentiated=keeps_derivative)
    if not takes:
        return Verdict(override, "declines", f"declines: it would run {plan}")
    if keeps_derivative and not (override.is_differentiated or may_differentiate):
        return not_asked
    return Verdict(override, "takes", plan=plan)


def _raising(override: Override, call: Call, error: Exception) -> Verdict:
    """The verdict of an override whose condition raises an error."""
    raises = f"its condition raises {type(error).__name__}: {error}"
    # At a backend only stand-ins for tensors have a `__torch_dispatch__`.
    if any(torch._C._dispatch_keys(tensor).has(_PYTHON) for tensor in call.tensors()):
        return Verdict(override, "unknown", f"{raises}, on tensors without values")
    if failure.may_fall_back(override, error, call, capturing=False):
        return Verdict(override, "declines", f"{raises}, for which a call quarantines it")
    return Verdict(override, "raises", raises)


def _declined(override: Override, decline: Decline, failed: Failure | None) -> Verdict:
    if decline.kind == "disabled":
        return Verdict(override, "disabled", decline.reason)
    if decline.kind == "passed by":
        return Verdict(override, "not asked", decline.reason)
    if decline.kind == "quarantined":
        return Verdict(override, "quarantined", decline.reason)
    return Verdict(override, "declines", f"declines: {failed or decline.reason}", failed)
