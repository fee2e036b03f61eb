"""`explain`: which override would take a call, and why each of the others would not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from opgraft import packs, router
from opgraft.errors import RegistrationError
from opgraft.explanation.neighbourhood import Kernel, Neighbours, neighbours
from opgraft.explanation.op_calls import (
    device_of_call,
    explain_op_call,
    keeps_composite_derivative,
    key_of_call,
)
from opgraft.explanation.result import Explanation
from opgraft.explanation.verdicts import Status, Verdict
from opgraft.ops.schema import Call, Op, resolve
from opgraft.registry import Chain, registry
from opgraft.router import derivative

__all__ = [
    "Explanation",
    "Kernel",
    "Neighbours",
    "Status",
    "Verdict",
    "explain",
    "neighbours",
]


def explain(
    op: str | OpOverload | OpOverloadPacket | Callable[..., Any],
    /,
    *args: Any,
    backward: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Which override would take this call, and why each other one would not. No kernel runs.

    An op with a kernel of its own is explained for exactly this call. A composite op, a function
    such as `F.scaled_dot_product_attention`, or a module is called on tensors without memory.
    Autograd mode, autocast, `sdpa_kernel` and the like apply as they are set now. The function's
    Python code does run, so its effects on Python objects happen. `explain` does not see what a
    native kernel itself calls; `opgraft.trace` does.

    Args:
        op: an op, by the name that torch prints or as `OpOverload`; or any callable.
        *args: the arguments; FakeTensors work too.
        backward: also explain what differentiating the result would call.
        **kwargs: keyword arguments.

    Returns:
        For an op: a verdict for each override of its chain, the winner, and where the native kernel
        was registered. For any other callable: the same in `reached`, for each op with overrides
        that it calls.

    Raises:
        RegistrationError: there is no such op.
        TypeError: the arguments do not fit the op, or a tensor is of an unsupported kind.

    >>> import torch
    >>> print(explain("aten::bmm", torch.ones(1, 2, 2), torch.ones(1, 2, 2)))
    aten::bmm at CPU -> native (...)
    >>> print(explain(torch.bmm, torch.ones(1, 2, 2), torch.ones(1, 2, 2)))
    torch.bmm -> no op that has overrides
      calls aten::bmm
    """
    router.withdraw_outdated()
    explanation = _explain(op, args, kwargs, backward)
    return replace(explanation, notes=(*explanation.notes, *_pack_notes()))


def _explain(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool) -> Explanation:
    resolved = _resolved(op)
    if resolved is None:
        return _explain_function(op, args, kwargs, backward)
    call = resolved.bind(args, kwargs)
    if device_of_call(call).type == "meta":
        note = "meta tensors have shapes only: no kernel runs, and no override"
        return Explanation(resolved.name, None, notes=(note,))
    chain = registry.chain(resolved, key_of_call(call))
    if backward or _calls_other_ops(resolved, chain):
        return _explain_function(resolved.overload, args, kwargs, backward)
    if _is_changed_above_backend(call):
        return _explain_at_backend(resolved, args, kwargs)
    return explain_op_call(
        call,
        chain,
        keeps_derivative=keeps_composite_derivative(chain, call),
        differentiating=derivative.differentiating_override(chain, call),
    )


def _pack_notes() -> list[str]:
    """Notes on packs that are not active, because a requirement is missing or they failed."""
    return [
        f"pack {status.pack.name} is not active: {status.reason}"
        for status in packs.statuses()
        if status.state in ("unmet", "failed")
    ]


def _resolved(op: Any) -> Op | None:
    """The op that a user named; None for a callable that is not a single op."""
    if isinstance(op, (str, OpOverload)):
        return resolve(op)
    if isinstance(op, OpOverloadPacket):
        return resolve(op) if "default" in op.overloads() else None
    if not callable(op):
        raise RegistrationError(
            f"{op!r} is neither an op nor a callable: give an op's name, such as 'aten::_softmax', "
            "or a function that you call, such as torch.softmax"
        )
    return None


def _explain_function(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backward: bool,
    target: Op | None = None,
) -> Explanation:
    # Not at the top: it would make `import opgraft` slower for everybody.
    from opgraft.explanation.functions import explain_function

    return explain_function(function, args, kwargs, backward=backward, target=target)


def _calls_other_ops(op: Op, chain: Chain) -> bool:
    """Whether the op has no backend kernel and no overrides, so that it only calls other ops."""
    if chain.members or router.has_own_kernel(op, chain.dispatch_key):
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    own = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return has(op.name, "CompositeImplicitAutograd") and not any(has(op.name, key) for key in own)


def _is_changed_above_backend(call: Call) -> bool:
    """Whether something above the backend (autocast, lazy conjugation) changes the arguments."""
    if torch.is_autocast_enabled(device_of_call(call).type):
        return True
    return any(t.is_conj() or t.is_neg() or t._is_zerotensor() for t in call.tensors())


def _explain_at_backend(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    """Explain the call with the arguments that the backend gets from the dispatch keys above it."""
    front = _explain_function(op.overload, args, kwargs, False, op)
    return next((each for each in front.reached if each.op == op.name), front)
