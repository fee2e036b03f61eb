"""Composite ops keep their derivative.

A CompositeImplicitAutograd op (`aten::_fused_rms_norm` on CPU) has no derivative formula that fits:
its derivative is that of the ops it is made of. As soon as it has a kernel at a backend key, torch
puts the generated autograd kernel in front of it, which wants a backward op that the backend lacks:
training raises. So a companion goes to the backend's autograd key and gives a call that must be
differentiable back to the composite; the override gets the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from opgraft.errors import RegistrationError
from opgraft.registry import Chain
from opgraft.router import dispatcher, observers
from opgraft.router.native import NativeKernel
from opgraft.schema import Call

NOTE = (
    "composite here: calls in grad mode with a tensor that requires grad, and forward-mode AD, "
    "keep the composite derivative and never reach an override"
)


class AutogradCompanion:
    """Stands at the autograd key of the backend of a composite op.

    Raises:
        RegistrationError: the backend has no autograd key of its own, so that the derivative could
            not be kept.
    """

    def __init__(self, chain: Chain) -> None:
        op, dispatch_key = chain.op, chain.dispatch_key
        autograd_key = f"Autograd{dispatch_key}"
        if autograd_key not in torch._C.DispatchKey.__members__:
            raise RegistrationError(
                f"{op.name} is composite at {dispatch_key}, and {dispatch_key} has no autograd key "
                "of its own: an override would lose its derivative. Override the ops it is made of"
            )
        self._chain = chain
        self._op = op
        # No reinstalling: once the backend key has a kernel, what could be captured here is not the
        # composite any more. The composite goes only when the op's own library does.
        self._composite = NativeKernel(op, autograd_key)
        self._library = dispatcher.register(op, autograd_key, self)

    def __call__(self, keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return self.call(keyset, self._op.bind(args, kwargs))

    def call(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        """Give a call to the composite, or on to the backend."""
        if must_differentiate(call):
            return observers.watch(
                self._chain, call, lambda: self._composite(keyset, call), kept=True
            )
        below = keyset & torch._C._after_ADInplaceOrView_keyset
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._op.overload.redispatch(below, *call.args, **call.kwargs)


def must_differentiate(call: Call) -> bool:
    """Whether autograd, backward or forward, needs to see through the call."""
    # An open dual level is enough: asking each tensor for a tangent at that level would miss those
    # of outer levels, and a missed tangent is a silently wrong jvp.
    return forward_ad._current_level >= 0 or needs_grad(call)


def needs_grad(call: Call) -> bool:
    """Whether autograd needs to see through the call for a backward."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors())
