"""Whether an override takes a call: what both routers ask, and `explain` too."""

from __future__ import annotations

from typing import Literal, NamedTuple

from opgraft.ops.schema import Call
from opgraft.registry import Override
from opgraft.router import device, failure, threads
from opgraft.router.signature import exact_key, signature
from opgraft.when import Condition


class Decline(NamedTuple):
    """Why an override does not take a call."""

    reason: str
    kind: Literal["condition", "rule", "disabled", "quarantined"]

    @property
    def is_miss(self) -> bool:
        """Its condition, or a rule that holds for every override, declined: `.misses` counts it."""
        return self.kind in ("condition", "rule")


def takes(override: Override, call: Call, *, capturing: bool) -> bool:
    """Whether an active override takes a call; where it does not, the miss is counted.

    Args:
        override: the override.
        call: the call.
        capturing: a CUDA graph is being captured on the call's device.

    Raises:
        Exception: its condition's own, where it may not fall back.
    """
    try:
        decline = why_not(override, call, capturing=capturing)
    except Exception as error:  # a cond in Python, or an expression on an odd argument
        if not failure.may_fall_back(override, error, call, capturing=False):
            raise
        failure.quarantine(override, signature(call), error)
        return False
    if decline is not None and decline.is_miss:
        override.state.misses.add()
    return decline is None


def why_not(override: Override, call: Call, *, capturing: bool) -> Decline | None:
    """Why an active override does not take a call; None where it does.

    Routing and `explain` both ask here, so that what is explained is what happens.
    """
    if threads.is_off_here(override):
        scope = threads.scope_of(override)
        return Decline(f"switched off on this thread by {scope}", "disabled")
    obstacle = device.mixed(call) or _lazy_bits(call)
    if obstacle is not None:
        return Decline(obstacle, "rule")
    quarantined = override.state.quarantined
    # An expression is asked first, as the core does; one in Python may be what failed.
    is_expression = isinstance(override.cond, Condition)
    if is_expression and not override.wants(call):
        return Decline("its condition does not hold", "condition")
    if quarantined and (error := quarantined.get(signature(call))):
        return Decline(f"quarantined after {error}", "quarantined")
    if not is_expression and not override.wants(call):
        return Decline("its condition does not hold", "condition")
    if capturing and not override.state.has_run(exact_key(call)):
        return Decline(
            "a CUDA graph is being captured and this call has not run before: compiling would "
            "break the capture",
            "rule",
        )
    return None


def _lazy_bits(call: Call) -> str | None:
    """A tensor whose memory does not hold its values, so that an impl would get them wrong."""
    for tensor in call.tensors():
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return "a tensor is lazily conjugated, negated or zero, and its memory says otherwise"
    return None
