"""Decides what replaces a call of an overridden op in a compiled graph, by the compile policy."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from opgraft.ops.schema import Call, Op
from opgraft.pt2 import impl_tracing, opaque, randomness
from opgraft.registry import CompilePolicy, Override, registry
from opgraft.router import device, hides_composite
from opgraft.when import Condition, symbolic
from opgraft.when.symbolic import Outcomes

Action = Literal["opaque", "traced", "left"]

_NONE_TYPE = type(None)
_NUMBER_TYPES = (torch.IntType, torch.FloatType, torch.BoolType, torch.NumberType)


@dataclass(frozen=True)
class Decision:
    """What becomes of one call in the graph that is being traced.

    Attributes:
        action: `"opaque"`: an opaque op replaces it; `"traced"`: the impl of `override` replaces
            it; `"left"`: the compiler gets the op unchanged.
        reason: why, in words.
        override: the first override that may take the call; None where the call is left.
    """

    action: Action
    reason: str
    override: Override | None = None


def bind(op: Op, args: Any, kwargs: Any) -> Call:
    """A call that is being traced, with fake tensors as arguments."""
    with _disable_current_modes():  # a number in a Tensor slot becomes a real tensor
        return op.bind(impl_tracing.unwrap_functional(args), impl_tracing.unwrap_functional(kwargs))


def number_for_tensor(op: Op, args: Any, kwargs: Any) -> str | None:
    """The name of a Tensor argument that is a number in a call (`x * 2`); None if there is none.

    In eager the dispatcher makes it a tensor. In a graph it remains a number. Torch accepts that
    for certain ops of `aten` only, and not for opaque ops.
    """
    named = kwargs | {a.name: value for a, value in zip(op.positional, args, strict=False)}
    for argument in op.arguments:
        if argument.is_tensor and not isinstance(
            named.get(argument.name), (torch.Tensor, _NONE_TYPE)
        ):
            return argument.name
    return None


def decide(call: Call, *, traces: bool = True, is_differentiated: bool = False) -> Decision:
    """What becomes of a call that is being traced; installs no guard unless an impl is traced.

    Args:
        call: a call with fake tensors, whose sizes may be symbolic.
        traces: whether an impl may be traced; if not, a traceable override is opaque.
        is_differentiated: whether only overrides with a derivative are asked.
    """
    reasons = []
    for override in registry.chain(call.op, dispatch_key(call)).active:
        if is_differentiated and override.autograd is None:
            continue
        outcomes = _outcomes(override, call)
        if True not in outcomes:
            reasons.append(f"{override.name} never takes it: {_culprit(override, call)}")
            continue
        action, reason = _action(override, call, outcomes, traces=traces)
        if action != "left":
            return Decision(action, reason, override)
        reasons.append(reason)
        if outcomes == symbolic.HOLDS:
            break  # it takes every call, so the overrides after it are never asked
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
    obstacle = (
        opaque.obstacle(call.op)
        or _wrapper_obstacle(call.op)
        or randomness.obstacle(call.op)
        or _alias_obstacle(call)
    )
    if obstacle is not None:
        return "left", f"{override.name} cannot be opaque: {obstacle}"
    when = "takes every call" if outcomes == symbolic.HOLDS else "is asked at run time"
    return "opaque", f"{override.name} {when}: {why}"


def _alias_obstacle(call: Call) -> str | None:
    """Why a call of a composite op cannot be opaque; None where it can.

    Some return an argument, or a view of one, without saying so in their schema (`einsum`,
    `broadcast_tensors`, `type_as`). In eager mode a write to such a result is one to the argument.
    An opaque op has the same schema, so a compiler would lose that write, and reuse the argument's
    memory.
    """
    if not is_composite(call):
        return None
    fake = detect_fake_mode(call.values)
    trial = impl_tracing.outside_of_graphs(call)
    try:
        with _disable_current_modes(), trial, fake or nullcontext():
            # Not the op itself: for that, a cache of fake results takes the schema's word.
            result = call.op.overload.decompose(*call.args, **call.kwargs)
    except Exception:  # the same is raised where the call is traced
        return None
    if opaque.shares_undeclared_memory(call, result):
        return "its native kernel returns an argument's memory, which its schema does not say"
    return None


def _wrapper_obstacle(op: Op) -> str | None:
    """Why Inductor's C++ wrapper cannot call an op's opaque op; None where it can or is not used.

    Where the wrapper has no C function for an op, it declares every output as a tensor. With a
    number among the outputs it does not compile (torch 2.11 to 2.15): the attention ops return
    sequence lengths. An AOTInductor package uses the wrapper too, and refuses the undefined tensors
    that these ops return.
    """
    config = sys.modules.get("torch._inductor.config")
    virtualized = sys.modules.get("torch._inductor.virtualized")
    if config is None or virtualized is None:
        return None
    if not config.cpp_wrapper and not virtualized.V.aot_compilation:
        return None
    if not any(isinstance(each.type, _NUMBER_TYPES) for each in op.returns):
        return None
    return "Inductor's cpp_wrapper cannot call it: it returns a number"


def _trace(override: Override, call: Call, outcomes: Outcomes) -> tuple[Action, str]:
    if call.op.writes:
        return "left", f"{override.name} cannot be traced: {opaque.obstacle(call.op)}"
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
        # Where the condition is not known, Inductor's code runs, as without the override.
        why = "is not sure to hold" if True in outcomes else "never holds"
        return "inductor", f"compile={override.compile!r} {why} for it"
    if override.compile != "auto":
        return override.compile, f"compile={override.compile!r}"
    if is_inductor_fallback(override.operator.overload):
        return "opaque", "Inductor calls this op as it is"
    if override.decisions is not None:
        in_graphs = override.decisions.in_graphs
        if symbolic.of_condition(in_graphs, call) == symbolic.HOLDS:
            return "opaque", "its table says that it is faster than Inductor"
        return "inductor", "its table does not say that it is faster than Inductor"
    return "inductor", "Inductor has its own code for this op; compile='opaque' prefers yours"


def is_inductor_fallback(op: OpOverload) -> bool:
    """Whether Inductor has only a fallback for an op: it never does anything but call it.

    That is false where Inductor decomposes the op or may generate code for it, however rarely. Then
    an override still runs where Inductor ends up calling the op through the dispatcher.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    decomposition = sys.modules.get("torch._inductor.decomposition")
    if lowering is None or decomposition is None:
        return False  # another compiler: the ops that it does not replace reach the router
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
    if isinstance(override.eligible, Condition):
        return symbolic.guarded_outcomes(override.eligible, call.named)
    return frozenset({override.condition_holds(call)})


def _culprit(override: Override, call: Call) -> str:
    obstacle = device.why_mixed(call)
    if obstacle is not None:
        return obstacle
    if isinstance(override.eligible, Condition):
        return symbolic.first_failing_part(override.eligible, call.named)
    return f"{getattr(override.cond, '__qualname__', override.cond)!s} is false whatever the sizes"


def is_composite(call: Call) -> bool:
    """Whether our router is the only backend kernel of an op where a call's tensors live."""
    return hides_composite(call.op, dispatch_key(call))


def dispatch_key(call: Call) -> str:
    """The backend key at which a call's tensors live."""
    where = device.of_tensors(call)
    if where is None:
        where = torch.device(call.named.get("device") or "cpu")
    return str(torch._C._dispatch_key_for_device(where.type))
