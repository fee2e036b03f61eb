"""Whether an override takes a call. Both routers and `explain` decide by this module."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from opgraft.base import interrupts
from opgraft.errors import warn_caller
from opgraft.ops.schema import Call
from opgraft.registry import Override
from opgraft.router import composite, device, failure, saved_tensors, threads, torch_function
from opgraft.router.call_keys import exact_key, kind_of, repeatable_key
from opgraft.when import Condition

#: The kinds of a :class:`Decline` that `.misses` counts: a condition declined, or a rule that all
#: overrides share.
MISSES = frozenset({"condition", "rule", "captured"})


class Decline(NamedTuple):
    """Why an override does not take a call."""

    reason: str
    kind: Literal["condition", "rule", "captured", "disabled", "quarantined", "passed by"]

    @property
    def is_miss(self) -> bool:
        """Whether `.misses` counts it."""
        return self.kind in MISSES


def takes(override: Override, call: Call, *, capturing: bool) -> bool:
    """Whether an active override takes a call. A miss is counted.

    Args:
        override: the override.
        call: the call.
        capturing: whether a CUDA graph is being captured on the call's device.

    Raises:
        Exception: what the condition raised, if the override may not fall back.
    """
    decline = decide(override, call, capturing=capturing)
    if decline is not None and decline.is_miss:
        override.state.misses.add()
    if decline is not None and decline.kind == "captured":
        warn_captured(override)
    return decline is None


def decide(override: Override, call: Call, *, capturing: bool) -> Decline | None:
    """As :func:`why_not`, for a call that runs: an override whose condition fails is quarantined.

    Raises:
        Exception: what the condition raised, if the override may not fall back.
    """
    try:
        return why_not(override, call, capturing=capturing)
    except Exception as error:  # a cond in Python, or an expression on an odd argument
        if not failure.may_fall_back(override, error, call, capturing=False):
            raise
        failure.quarantine(override, kind_of(call), error)
        return Decline(f"its condition raises {type(error).__name__}: {error}", "quarantined")


def warn_captured(override: Override) -> None:
    """Warn once of a call that is captured in a CUDA graph before it could be an override's."""
    if override.state.warned_of_capture:
        return
    override.state.warned_of_capture = True
    warn_caller(
        f"override {override.name!r} of {override.op} is not ready for a call that is captured in "
        "a CUDA graph: the graph has the native kernel for good. Make the call with opgraft.warmup "
        "before the capture"
    )


def why_not(override: Override, call: Call, *, capturing: bool) -> Decline | None:
    """Why an active override does not take a call; None if it does.

    Routing and `explain` both call this, so `explain` says what routing does.
    """
    if threads.is_disabled_here(override):
        scope = threads.disabling_scope(override)
        if isinstance(scope, threads.PassedBy):
            return Decline(scope.REASON, "passed by")
        by = "" if scope is None else scope
        return Decline(f"switched off on this thread by opgraft.disabled({by})", "disabled")
    obstacle = device.why_mixed(call) or _lazy_bits(call) or _torchscript()
    if obstacle is not None:
        return Decline(obstacle, "rule")
    quarantined = override.state.quarantined
    # A `when` expression is evaluated before the quarantine is checked, as in the core. A condition
    # in Python comes after it, since it may be what failed.
    is_expression = isinstance(override.condition, Condition)
    if is_expression and not override.condition_holds(call):
        return Decline("its condition does not hold", "condition")
    if quarantined and (error := quarantined.get(kind_of(call))) and not _repeats(override, call):
        return Decline(f"quarantined after {error}", "quarantined")
    if not is_expression and not condition_holds(override, call):
        return Decline("its condition does not hold", "condition")
    if capturing and not override.state.has_run(exact_key(call)):
        return Decline(
            "a CUDA graph is being captured and this call has not run before: compiling would "
            "break the capture",
            "captured",
        )
    return None


def keeps_place(override: Override, call: Call) -> bool:
    """Whether native runs a call in place of a quarantined override, and nobody behind is asked.

    A checkpoint compares what two forwards save. In the first one the override may have failed, and
    native may have run the call: whoever is behind would save other tensors in the second one.
    """
    if not (override.state.quarantined and _is_hooked(override, call)):
        return False
    try:
        decline = why_not(override, call, capturing=False)
        return (
            decline is not None
            and decline.kind == "quarantined"
            and condition_holds(override, call)
        )
    except Exception as error:  # what failed was the condition, in both forwards
        if interrupts.is_interrupt(error):
            raise
        return False


def _repeats(override: Override, call: Call) -> bool:
    """Whether a call may be a second forward of one that a quarantined override took before."""
    return _is_hooked(override, call) and override.state.is_repeatable(repeatable_key(call))


def _is_hooked(override: Override, call: Call) -> bool:
    """Whether hooks would get what an override's impl saves for a call that is differentiated."""
    return composite.would_differentiate(override, call) and saved_tensors.are_hooked()


def condition_holds(override: Override, call: Call) -> bool:
    """Whether a condition holds. What one in Python calls of the op itself is native's.

    One that is asked again, in the forward of a derivative, sees the grad mode of the first time:
    it must decide the same.
    """
    condition = override.condition
    if condition is None or isinstance(condition, Condition):
        return override.condition_holds(call)
    with (
        threads.bypassing(call.op),
        torch_function.hidden(call.values),
        threads.callers_grad_mode(override),
    ):
        return override.condition_holds(call)


def _torchscript() -> str | None:
    """Why a trace of `torch.jit` would miss what the op computes; None if none is recorded here.

    The tracer records most ops, and is off while they run. Of a few, such as convolutions, it
    records what they call: a kernel that writes memory by itself leaves an empty tensor there.
    """
    is_included = torch._C._dispatch_tls_is_dispatch_key_included("Tracer")
    if is_included and not torch._C._dispatch_tls_is_dispatch_key_excluded("Tracer"):
        return "torch.jit.trace records what this op calls, which a kernel would hide"
    return None


def _lazy_bits(call: Call) -> str | None:
    """Why an impl would read wrong values from a tensor's memory; None if it would not."""
    for tensor in call.tensors():
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return "a tensor is lazily conjugated, negated or zero, and its memory says otherwise"
    return None
