"""What stands in a compiled graph for a call of an overridden op."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from opgraft.errors import ContractError
from opgraft.ops.schema import Op
from opgraft.pt2 import caches, exports, opaque, policy, report, tracing
from opgraft.pt2.policy import Decision


def substitute(
    op: Op,
    mode: Any,
    func: OpOverload,
    types: Any,
    args: Any = (),
    kwargs: Any = None,
) -> Any:
    """What stands in the graph for a call of an overridden op.

    Args:
        op: the op.
        mode: the FunctionalTensorMode, which is off while this runs.
        func: the same op, as torch has it.
        types: the types of tensors that come first.
        args: its arguments, with FunctionalTensors for tensors.
        kwargs: its keyword-only ones.

    Returns:
        The call's result, as the mode would have it.
    """
    kwargs = kwargs or {}
    if not _is_compiling() or tracing.is_running(op) or not all(map(_is_plain, types)):
        return mode.__torch_dispatch__(func, types, args, kwargs)
    call = policy.bind(op, args, kwargs)
    if number := policy.number_for_tensor(op, args, kwargs):
        decision = Decision("left", f"a number stands for the tensor {number!r}")
    else:
        decision = policy.decide(call, traces=not exports.are_asked_for())
    if decision.action == "traced":
        assert decision.override is not None
        try:
            tracing.settle((args, kwargs))
            before = policy.bind(op, args, kwargs)
            result = tracing.run(decision.override, mode, args, kwargs)
            tracing.check(decision.override, before, policy.bind(op, args, kwargs), result)
        except ContractError:
            raise
        except Exception as error:
            report.tell_untraceable(decision.override, error)
            decision = policy.decide(call, traces=False)
    report.tell(call, decision)
    if decision.action == "traced":
        return result
    if decision.action == "opaque":
        # Not by calling it: autograd, which this call has passed, would be asked again.
        func = opaque.op_for(op)
    return mode.__torch_dispatch__(func, types, args, kwargs)


def _is_compiling() -> bool:
    """Whether this thread makes a graph that overrides belong in.

    `torch.compiler.is_compiling` would not do: on torch 2.11 it is false while a compiled function
    is traced here, and where it is true, it is so for all threads.
    """
    if not _caches_know_us():
        return False
    if exports.are_asked_for():
        return True
    return TracingContext.try_get() is not None and not _is_exporting()


def _is_exporting() -> bool:
    if torch.compiler.is_exporting():
        return True
    virtualized = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and bool(virtualized.V.aot_compilation)


def _caches_know_us() -> bool:
    return "torch._inductor.codecache" not in sys.modules or caches.are_salted()


def _is_plain(kind: type) -> bool:
    """Whether a tensor type is one that the compiler itself traces with.

    Other types are wrappers (DTensor, jagged tensors) whose own code comes first; it calls the op
    again for what they wrap.
    """
    return kind in (torch.Tensor, torch.nn.Parameter, FunctionalTensor) or issubclass(
        kind, FakeTensor
    )
