"""What stands in a compiled graph for a call of an overridden op."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
from opgraft.registry import registry
from opgraft.router import composite, installed


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
    if not all(map(_is_plain, types)):
        return mode.__torch_dispatch__(func, types, args, kwargs)
    if not _is_compiling() or tracing.is_running(op):
        return _left(op, mode, func, types, args, kwargs)
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
        return mode.__torch_dispatch__(opaque.op_for(op), types, args, kwargs)
    return _left(op, mode, func, types, args, kwargs)


def _left(op: Op, mode: Any, func: OpOverload, types: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call that the compiler gets without us.

    A composite op would have been taken apart before it got here. The mode does that for one that
    has no kernel at the backend, and takes our router for one.
    """
    if not mode.export and _is_composite(op, args, kwargs):
        with mode, _above_autograd():
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:  # export keeps some ops so
            return result
    return mode.__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _above_autograd() -> Iterator[None]:
    """Let the pieces of a composite op pass autograd, as they do where torch takes it apart."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in composite.AUTOGRAD_KEYS:
        exclude = exclude.remove(key)
    include = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


def _is_composite(op: Op, args: Any, kwargs: Any) -> bool:
    """Whether an op has no kernel but ours where a call's tensors live."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name, "CompositeImplicitAutograd"):
        return False
    key = policy.dispatch_key(policy.bind(op, args, kwargs))
    router = installed(registry.chain(op, key))
    return router is not None and router.is_composite


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
