"""`explain`: which override would take a call, and why each of the others would not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from opgraft import packs, router
from opgraft.errors import RegistrationError
from opgraft.explanation.leaf import device_of, explain_leaf, keeps_its_derivative, key_of
from opgraft.explanation.neighbourhood import Kernel, Neighbours, neighbours
from opgraft.explanation.report import Explanation
from opgraft.explanation.verdicts import Status, Verdict
from opgraft.ops.schema import Call, Op, resolve
from opgraft.registry import Chain, registry

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
    """Which override would take this call; for each that would not, why. Nothing runs.

    An op that has a kernel of its own is explained as the call stands. What is made of ops, a
    composite op, a function such as `F.scaled_dot_product_attention`, a module, is followed without
    running it, on tensors that have no memory: autograd mode, autocast, `sdpa_kernel` and the rest
    hold as they do at the moment. Its Python code does run, so what that does to Python objects is
    done. Kernels are not looked into: what a native kernel itself calls, `opgraft.trace` sees.

    Args:
        op: by the name that torch prints, as `OpOverload`, or anything that can be called.
        *args: the arguments; FakeTensors do as well.
        backward: also explain what differentiating the result would call.
        **kwargs: keyword arguments.

    Returns:
        For an op, its chain in order with a verdict each, the winner, and where the native kernel
        comes from. For what is made of ops, the same in `reached` for each op with overrides that
        it calls.

    Raises:
        RegistrationError: there is no such op.
        TypeError: the arguments do not fit; or a tensor is of a kind that cannot be followed.

    >>> import torch
    >>> print(explain("aten::bmm", torch.ones(1, 2, 2), torch.ones(1, 2, 2)))
    aten::bmm at CPU -> native (...)
    >>> print(explain(torch.bmm, torch.ones(1, 2, 2), torch.ones(1, 2, 2)))
    torch.bmm -> no op that has overrides
      calls aten::bmm
    """
    explanation = _explain(op, args, kwargs, backward)
    return replace(explanation, notes=(*explanation.notes, *_about_packs()))


def _explain(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool) -> Explanation:
    resolved = _resolved(op)
    if resolved is None:
        return _explain_front(op, args, kwargs, backward)
    call = resolved.bind(args, kwargs)
    if device_of(call).type == "meta":
        note = "meta tensors have shapes only: no kernel runs, and no override"
        return Explanation(resolved.name, None, notes=(note,))
    chain = registry.chain(resolved, key_of(call))
    if backward or _is_made_of_others(resolved, chain):
        return _explain_front(resolved.overload, args, kwargs, backward)
    if _is_changed_above(call):
        return _as_it_arrives(resolved, args, kwargs)
    return explain_leaf(call, chain, kept=keeps_its_derivative(chain, call))


def _about_packs() -> list[str]:
    """Packs that would have had a say, but are not active: what they need is not here."""
    return [
        f"pack {status.pack.name} is not active: {status.reason}"
        for status in packs.statuses()
        if status.state in ("unmet", "failed")
    ]


def _resolved(op: Any) -> Op | None:
    """The op that is meant; None for a callable that is no single op."""
    if isinstance(op, (str, OpOverload)):
        return resolve(op)
    if isinstance(op, OpOverloadPacket):
        return resolve(op) if "default" in op.overloads() else None
    if not callable(op):
        raise RegistrationError(
            f"{op!r} is neither an op nor can it be called: give an op's name, such as "
            "'aten::_softmax', or what you call yourself, such as torch.softmax"
        )
    return None


def _explain_front(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backward: bool,
    target: Op | None = None,
) -> Explanation:
    # Not at the top: imported with opgraft itself it would delay that for everybody.
    from opgraft.explanation.fronts import explain_front

    return explain_front(function, args, kwargs, backward=backward, target=target)


def _is_made_of_others(op: Op, chain: Chain) -> bool:
    """Whether the op has no kernel at the backend, and no overrides: then others do its work."""
    if chain.members or router.has_own_kernel(op, chain.dispatch_key):
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    own = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return has(op.name, "CompositeImplicitAutograd") and not any(has(op.name, key) for key in own)


def _is_changed_above(call: Call) -> bool:
    """Whether something above the backend hands it other arguments than the user gave."""
    if torch.is_autocast_enabled(device_of(call).type):
        return True
    return any(t.is_conj() or t.is_neg() or t._is_zerotensor() for t in call.tensors())


def _as_it_arrives(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    """The op's own call at the backend, as the keys above it leave it."""
    front = _explain_front(op.overload, args, kwargs, False, op)
    return next((each for each in front.reached if each.op == op.name), front)
