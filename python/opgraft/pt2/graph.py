"""Replaces a call of an overridden op while a graph is traced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from opgraft.base import traced
from opgraft.errors import ContractError
from opgraft.ops.bypass import bypassing
from opgraft.ops.schema import Call, Op
from opgraft.pt2 import caches, compile_log, exports, impl_tracing, opaque, policy
from opgraft.pt2.policy import Decision
from opgraft.router import composite


def substitute(
    op: Op,
    mode: Any,
    func: OpOverload,
    types: Any,
    args: Any = (),
    kwargs: Any = None,
) -> Any:
    """Trace a call of an overridden op: opaque, by its impl, or as the compiler would.

    Args:
        op: the op.
        mode: the FunctionalTensorMode, which is off while this runs.
        func: the same op, as torch's overload.
        types: the tensor types with a `__torch_dispatch__` of their own.
        args: its positional arguments; its tensors are FunctionalTensors.
        kwargs: its keyword-only arguments.

    Returns:
        The call's result, as the mode would return it.
    """
    kwargs = kwargs or {}
    if not all(map(_is_plain, types)):
        return mode.__torch_dispatch__(func, types, args, kwargs)
    if not _is_compiling() or traced.is_running(op):
        return _leave_to_compiler(op, mode, func, types, args, kwargs)
    call = policy.bind(op, args, kwargs)
    if number := policy.number_for_tensor(op, args, kwargs):
        decision = Decision("left", f"a number stands for the tensor {number!r}")
    else:
        decision = policy.decide(call, traces=not exports.in_scope())
    if decision.action == "traced":
        assert decision.override is not None
        try:
            impl_tracing.sync_functional((args, kwargs))
            before = policy.bind(op, args, kwargs)
            with impl_tracing.leaving_arguments(
                decision.override, before, lambda: policy.bind(op, args, kwargs)
            ):
                result = impl_tracing.run(decision.override, mode, args, kwargs)
            impl_tracing.check_result(decision.override, before, result)
        except ContractError:
            raise
        except Exception as error:
            untraceable = decision.override
            decision = policy.decide(call, traces=False)
            compile_log.log_untraceable(untraceable, error, decision.action)
    compile_log.log_decision(call, decision)
    if decision.action == "traced":
        return result
    if decision.action == "opaque":
        # Calling the op would run autograd again, which this call has already passed.
        return mode.__torch_dispatch__(opaque.op_for(op), types, args, kwargs)
    return _leave_to_compiler(op, mode, func, types, args, kwargs)


def trace_differentiated(call: Call) -> Any:
    """Trace a call of a composite op that autograd differentiates, by an override's impl.

    It is at the autograd key, above the mode that calls `substitute`, which sees only the ops that
    a call is made of.

    Args:
        call: its tensors are FunctionalTensors.

    Returns:
        The call's result; NotImplemented if no impl is traced.
    """
    op = call.op
    if not _is_compiling() or exports.in_scope() or traced.is_running(op) or _shows_pieces(call):
        return NotImplemented
    impl_tracing.sync_functional(call.values)
    before = policy.bind(op, call.args, call.kwargs)
    decision = policy.decide(before, is_differentiated=True)
    override = decision.override
    # One with a derivative of its own is not differentiated by what its impl calls.
    if decision.action != "traced" or override is None or not override.is_differentiated:
        return NotImplemented
    try:
        with impl_tracing.leaving_arguments(
            override, before, lambda: policy.bind(op, call.args, call.kwargs)
        ):
            result = impl_tracing.run_differentiated(override, call)
        fake = detect_fake_mode(before.values)
        with bypassing(op.name), _disable_current_modes(), fake or nullcontext():
            with torch.no_grad():
                impl_tracing.check_result(override, before, result)
            impl_tracing.check_derivative(override, before, call, result)
    except ContractError:
        raise
    except Exception as error:
        compile_log.log_untraceable(override, error, "left")
        return NotImplemented
    compile_log.log_decision(before, decision)
    return result


def _shows_pieces(call: Call) -> bool:
    """Whether a transform of functorch or a tensor's type is to see what a composite op calls."""
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return is_transformed or not all(_is_plain(type(tensor)) for tensor in call.tensors())


def _leave_to_compiler(
    op: Op, mode: Any, func: OpOverload, types: Any, args: Any, kwargs: Any
) -> Any:
    """The result of a call that opgraft leaves to the compiler.

    Stock PyTorch would have decomposed a composite op before the call got here. The mode decomposes
    only an op without a backend kernel, and it takes our router for such a kernel.
    """
    is_kept = mode.export or not opaque.is_composite(op)
    if not is_kept and policy.is_composite(policy.bind(op, args, kwargs)):
        with mode, _above_autograd():
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:  # export keeps some composite ops this way
            return result
    return mode.__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _above_autograd() -> Iterator[None]:
    """Dispatch the ops of a composite op through autograd, as where torch decomposes it."""
    if torch.is_inference_mode_enabled():  # there torch itself leaves autograd out
        yield
        return
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in composite.AUTOGRAD_KEYS:
        exclude = exclude.remove(key)
    include = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


def _is_compiling() -> bool:
    """Whether this thread traces a graph that may contain overrides.

    `torch.compiler.is_compiling` does not say so: on torch 2.11 it is false while a compiled
    function is traced here, and where it is true, it is true on all threads.
    """
    if not _caches_are_salted():
        return False
    if exports.in_scope():
        return True
    return TracingContext.try_get() is not None and not _is_exporting()


def _is_exporting() -> bool:
    if torch.compiler.is_exporting():
        return True
    virtualized = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and bool(virtualized.V.aot_compilation)


def _caches_are_salted() -> bool:
    return "torch._inductor.codecache" not in sys.modules or caches.are_salted()


def _is_plain(kind: type) -> bool:
    """Whether a tensor type is one that the compiler itself traces with.

    Other types are wrappers (DTensor, jagged tensors). Their own code runs first, and calls the op
    again on the tensors that they wrap.
    """
    return kind in (torch.Tensor, torch.nn.Parameter, FunctionalTensor) or issubclass(
        kind, FakeTensor
    )
