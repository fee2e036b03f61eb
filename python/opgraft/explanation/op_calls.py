"""Explains one call of one op, as it reaches a backend."""

from __future__ import annotations

import torch

from opgraft import router
from opgraft.explanation import neighbourhood
from opgraft.explanation.result import Explanation
from opgraft.explanation.verdicts import judge_overrides
from opgraft.ops.dispatch_keys import is_built_for
from opgraft.ops.schema import Call
from opgraft.registry import Chain, Override
from opgraft.router import composite, device, dispatcher


def explain_op_call(
    call: Call, chain: Chain, *, keeps_derivative: bool, differentiating: Override | None = None
) -> Explanation:
    """The verdict of each override of the chain on a call, and what runs.

    Args:
        call: the call with the arguments that the backend gets.
        chain: the op's chain at the call's dispatch key.
        keeps_derivative: whether autograd differentiates the call of a composite op, so that only
            overrides with a derivative are asked.
        differentiating: the override whose two functions differentiate it, if one's do.
    """
    notes: list[str] = []
    if router.installed(chain) is not None:
        notes += neighbourhood.of_chain(chain).notes()
    return Explanation(
        chain.op.name,
        chain.dispatch_key,
        judge_overrides(
            chain, call, keeps_derivative=keeps_derivative, differentiating=differentiating
        ),
        native_origin(chain),
        tuple(notes),
    )


def device_of_call(call: Call) -> torch.device:
    """The device that the call runs on."""
    where = device.of_tensors(call)
    if where is not None:
        return where
    named = call.named.get("device")
    return torch.device(named) if named is not None else torch.get_default_device()


def key_of_call(call: Call) -> str:
    """The dispatch key of the backend that the call reaches."""
    return str(torch._C._dispatch_key_for_device(device_of_call(call).type))


def keeps_composite_derivative(chain: Chain, call: Call) -> bool:
    """Whether the op is composite here and autograd must see the ops that it calls."""
    installed = router.installed(chain)
    if installed is None or not installed.is_composite:
        return False
    if not is_built_for(chain.dispatch_key):  # in a build with it, the op may have a kernel
        return False
    return composite.must_differentiate(call)


def native_origin(chain: Chain) -> str:
    """Where the native kernel of a chain's op was registered; empty where there is none."""
    if not is_built_for(chain.dispatch_key):
        return f"this torch is built without {chain.dispatch_key}"
    installed = router.installed(chain)
    if installed is None:
        return dispatcher.current_kernel_origin(chain.op, chain.dispatch_key)
    return installed.native_origin
