"""The verdict of an override on a call: it takes the call, or why it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from opgraft.ops.schema import Call
from opgraft.registry import Chain, Override
from opgraft.router import composite, device, threads
from opgraft.router.decision import Decline, why_not
from opgraft.when import Failure

Status = Literal[
    "takes",  # its impl runs
    "behind",  # its condition holds, but an override before it takes the call
    "declines",  # its condition, or a rule for all overrides, excludes this call
    "quarantined",  # it failed for a call of this kind before
    "disabled",  # by a rule, an environment variable or a scope
    "unavailable",  # it can never run here: a requirement is missing
    "not asked",  # autograd differentiates the call of a composite op, and not by this override
]


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
    forward_is_native = (
        keeps_derivative
        and differentiating is not None
        and _judge_override(differentiating, call, True, True).status == "quarantined"
    )
    for override in chain.members:
        is_taken = any(other.takes for other in verdicts)
        may_differentiate = is_taken or override is differentiating
        verdict = _judge_override(override, call, keeps_derivative, may_differentiate)
        if forward_is_native and verdict.status in ("takes", "not asked"):
            verdict = Verdict(override, "not asked", threads.PassedByForNative.REASON)
        elif verdict.takes and is_taken:
            verdict = Verdict(override, "behind", "would take it, but one before it does")
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
        failure = (
            override.condition_failure(call) if decline and decline.kind == "condition" else None
        )
    except Exception as error:  # a condition in Python; a real call would raise this
        reason = f"its condition raises {type(error).__name__}: {error}"
        return Verdict(override, "declines", reason)
    if decline is not None:
        return _declined(override, decline, failure)
    takes, plan = True, ""
    if override.plans is not None:
        # Of overrides with a derivative, only the pairs of functions wait until they are ready.
        takes, plan = override.plans.predict(call, differentiated=keeps_derivative)
    if not takes:
        return Verdict(override, "declines", f"declines: it would run {plan}")
    if keeps_derivative and not (override.is_differentiated or may_differentiate):
        return not_asked
    return Verdict(override, "takes", plan=plan)


def _declined(override: Override, decline: Decline, failure: Failure | None) -> Verdict:
    if decline.kind == "disabled":
        return Verdict(override, "disabled", decline.reason)
    if decline.kind == "passed by":
        return Verdict(override, "not asked", decline.reason)
    if decline.kind == "quarantined":
        return Verdict(override, "quarantined", decline.reason)
    return Verdict(override, "declines", f"declines: {failure or decline.reason}", failure)
