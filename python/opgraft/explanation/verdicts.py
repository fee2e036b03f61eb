"""What an override says to a call: takes it, or why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from opgraft.ops.schema import Call
from opgraft.registry import Chain, Override
from opgraft.router import composite, device
from opgraft.router.decision import Decline, why_not
from opgraft.when import Failure

Status = Literal[
    "takes",  # its impl runs
    "behind",  # it would take the call, but one before it does
    "declines",  # its condition, or a rule for all overrides, keeps it from this call
    "quarantined",  # it failed for such a call before
    "disabled",  # by a rule, an environment variable or a scope
    "unavailable",  # it can never run here: what it needs is missing
    "not asked",  # the call keeps the derivative of a composite op
]


@dataclass(frozen=True)
class Verdict:
    """What one override of a chain does with a call."""

    override: Override
    status: Status
    #: In words; empty where it takes the call.
    reason: str = ""
    #: The part of the condition that did not hold, and the values that it saw.
    failure: Failure | None = None
    #: Of one that takes the call and may have launch plans: by one, or in Python, and why.
    plan: str = ""

    @property
    def takes(self) -> bool:
        """Whether its impl runs."""
        return self.status == "takes"

    def as_dict(self) -> dict[str, Any]:
        """The same for machines: strings, numbers and None only."""
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


def judge(chain: Chain, call: Call, *, kept: bool) -> tuple[Verdict, ...]:
    """A verdict of each override of a chain, in the order of asking; nothing runs.

    `kept`: the call keeps the derivative of a composite op.
    """
    verdicts: list[Verdict] = []
    for override in chain.members:
        verdict = _judge_alone(override, call, kept=kept)
        if verdict.takes and any(other.takes for other in verdicts):
            verdict = Verdict(override, "behind", "would take it, but one before it does")
        verdicts.append(verdict)
    return tuple(verdicts)


def _judge_alone(override: Override, call: Call, *, kept: bool) -> Verdict:
    off = override.why_off()
    if off is not None:
        return Verdict(override, "unavailable" if override.unavailable else "disabled", off)
    if kept:
        return Verdict(override, "not asked", f"not asked: the op is {composite.NOTE}")
    try:
        where = device.of_call(call, override.dispatch_key)
        decline = why_not(override, call, capturing=device.is_capturing(where))
        failure = (
            override.condition_failure(call) if decline and decline.kind == "condition" else None
        )
    except Exception as error:  # a condition in Python: what a call would raise, told instead
        reason = f"its condition raises {type(error).__name__}: {error}"
        return Verdict(override, "declines", reason)
    if decline is not None:
        return _declined(override, decline, failure)
    if override.plans is None:
        return Verdict(override, "takes")
    takes, plan = override.plans.predict(call)
    if takes:
        return Verdict(override, "takes", plan=plan)
    return Verdict(override, "declines", f"declines: it would run {plan}")


def _declined(override: Override, decline: Decline, failure: Failure | None) -> Verdict:
    if decline.kind == "disabled":
        return Verdict(override, "disabled", decline.reason)
    if decline.kind == "quarantined":
        return Verdict(override, "quarantined", decline.reason)
    return Verdict(override, "declines", f"declines: {failure or decline.reason}", failure)
