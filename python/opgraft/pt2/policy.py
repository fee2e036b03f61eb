"""What becomes of an overridden op in a compiled graph: the policy, and the decision for a call."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from opgraft.ops.schema import Call, Op
from opgraft.pt2 import opaque, randomness, tracing
from opgraft.registry import CompilePolicy, Override, registry
from opgraft.router import device
from opgraft.when import Condition, symbolic
from opgraft.when.symbolic import Outcomes

Action = Literal["opaque", "traced", "left"]

_NONE = type(None)
_NUMBERS = (torch.IntType, torch.FloatType, torch.BoolType, torch.NumberType)


@dataclass(frozen=True)
class Decision:
    """What becomes of one call in the graph that is being traced.

    Attributes:
        action: `"opaque"`: an op of the `opgraft` namespace takes its place; `"traced"`: the impl
            of `override` does; `"left"`: the compiler gets the op as it is.
        reason: for a person.
        override: the first that may take the call, unless it is left.
    """

    action: Action
    reason: str
    override: Override | None = None


def bind(op: Op, args: Any, kwargs: Any) -> Call:
    """A call that is being traced, its arguments as fake tensors."""
    with _disable_current_modes():  # a number in a Tensor slot becomes a real tensor
        return op.bind(tracing.plain(args), tracing.plain(kwargs))


def number_for_tensor(op: Op, args: Any, kwargs: Any) -> str | None:
    """The name of a Tensor argument that is a number in a call (`x * 2`); None if there is none.

    In eager the dispatcher makes it a tensor. In a graph it stays a number, which torch takes for a
    Tensor of certain ops of `aten` only, and for none of ours.
    """
    named = kwargs | {a.name: value for a, value in zip(op.positional, args, strict=False)}
    for argument in op.arguments:
        if argument.is_tensor and not isinstance(named.get(argument.name), (torch.Tensor, _NONE)):
            return argument.name
    return None


def decide(call: Call, *, traces: bool = True) -> Decision:
    """What becomes of a call that is being traced; installs no guard unless an impl is traced.

    Args:
        call: its tensors are fake, its sizes may be symbols.
        traces: whether an impl may be traced; else one that would be is opaque.
    """
    reasons = []
    for override in registry.chain(call.op, dispatch_key(call)).active:
        outcomes = _outcomes(override, call)
        if True not in outcomes:
            reasons.append(f"{override.name} never takes it: {_culprit(override, call)}")
            continue
        action, reason = _action(override, call, outcomes, traces=traces)
        if action != "left":
            return Decision(action, reason, override)
        reasons.append(reason)
        if outcomes == symbolic.HOLDS:
            break  # what comes behind it is never asked
    return Decision("left", "; ".join(reasons) or "no override is on")


def _action(
    override: Override, call: Call, outcomes: Outcomes, *, traces: bool
) -> tuple[Action, str]:
    policy, why = resolve(override, call)
    if policy == "inductor":
        return "left", f"{override.name} is left to the compiler: {why}"
    if policy == "traceable":
        if traces:
            return _trace(override, call, outcomes)
        why = "it is not traced here"
    obstacle = opaque.why_not(call.op) or _wrapper_obstacle(call.op) or randomness.obstacle(call.op)
    if obstacle is not None:
        return "left", f"{override.name} cannot be opaque: {obstacle}"
    when = "takes every call" if outcomes == symbolic.HOLDS else "is asked at run time"
    return "opaque", f"{override.name} {when}: {why}"


def _wrapper_obstacle(op: Op) -> str | None:
    """Why Inductor's C++ wrapper cannot hold an op's opaque one; None where it can or is not used.

    It declares every output of an op that it has no C function for as a tensor, and then does not
    compile where one is a number (torch 2.11 to 2.15): the attention ops return sequence lengths.
    An AOTInductor package, which it makes, too, takes no tensor of theirs that is undefined.
    """
    config = sys.modules.get("torch._inductor.config")
    virtualized = sys.modules.get("torch._inductor.virtualized")
    if config is None or virtualized is None:
        return None
    if not config.cpp_wrapper and not virtualized.V.aot_compilation:
        return None
    if not any(isinstance(each.type, _NUMBERS) for each in op.returns):
        return None
    return "Inductor's cpp_wrapper cannot call it: it returns a number"


def _trace(override: Override, call: Call, outcomes: Outcomes) -> tuple[Action, str]:
    if call.op.writes:
        return "left", f"{override.name} cannot be traced: {opaque.why_not(call.op)}"
    if outcomes == symbolic.HOLDS:
        return "traced", f"{override.name} takes every call"
    try:
        outcomes = _guarded_outcomes(override, call)
    except Exception as error:  # torch's own: a size that depends on data cannot be guarded on
        return "left", f"{override.name} cannot be traced: {type(error).__name__}: {error}"
    if outcomes == symbolic.HOLDS:
        return "traced", f"{override.name} takes calls of this kind, which are guarded"
    if True in outcomes:
        return "left", f"{override.name} cannot be traced: its condition depends on an address"
    return "left", f"{override.name} does not take calls of this kind, which are guarded"


def resolve(override: Override, call: Call) -> tuple[CompilePolicy, str]:
    """An override's policy for a call, never `"auto"`, and why it is that."""
    if isinstance(override.compile, Condition):
        outcomes = symbolic.of_condition(override.compile, call)
        if outcomes == symbolic.HOLDS:
            return "opaque", f"compile={override.compile!r}"
        # Where it is not known, Inductor's code is what there would be without the override.
        why = "is not sure to hold" if True in outcomes else "never holds"
        return "inductor", f"compile={override.compile!r} {why} for it"
    if override.compile != "auto":
        return override.compile, f"compile={override.compile!r}"
    if calls_as_it_is(override.operator.overload):
        return "opaque", "Inductor calls this op as it is"
    return "inductor", "Inductor has code of its own for this op; compile='opaque' prefers yours"


def calls_as_it_is(op: OpOverload) -> bool:
    """Whether Inductor itself does nothing with an op but call it.

    Not so where it decomposes the op or may generate code, however rarely. Then an override still
    runs where Inductor ends up calling the op through the dispatcher.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    decomposition = sys.modules.get("torch._inductor.decomposition")
    if lowering is None or decomposition is None:
        return False  # another compiler is at work: what it does not touch reaches the router
    if op in decomposition.decompositions:
        return False
    lowered = lowering.lowerings.get(op)
    return lowered is None or getattr(lowered, "_is_fallback_handler", False)


# ------------------------------------------------------------------ conditions at compile time


def _outcomes(override: Override, call: Call) -> Outcomes:
    if device.why_mixed(call) is not None:
        return symbolic.FAILS
    return symbolic.of_override(override, call)


def _guarded_outcomes(override: Override, call: Call) -> Outcomes:
    if isinstance(override.cond, Condition):
        return symbolic.guarded_outcomes(override.cond, call.named)
    return frozenset({override.condition_holds(call)})


def _culprit(override: Override, call: Call) -> str:
    obstacle = device.why_mixed(call)
    if obstacle is not None:
        return obstacle
    if isinstance(override.cond, Condition):
        return symbolic.first_failing_part(override.cond, call.named)
    return f"{getattr(override.cond, '__qualname__', override.cond)!s} is false whatever the sizes"


def dispatch_key(call: Call) -> str:
    """The backend key at which a call's tensors live."""
    where = device.of_tensors(call)
    if where is None:
        where = torch.device(call.named.get("device") or "cpu")
    return str(torch._C._dispatch_key_for_device(where.type))
