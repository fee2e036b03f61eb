"""Composite ops run as without opgraft, unless an override takes the call.

A CompositeImplicitAutograd op (`aten::_fused_rms_norm` on CPU) runs at the autograd key. Autograd
differentiates the ops that it calls, tracks their views and counts their writes; dispatch modes and
tensor subclasses see them one by one. As soon as the op has a kernel at a backend key, torch puts
the generated autograd kernel in front of that. The generated kernel needs a backward op that the
backend lacks, so training would raise. So a kernel of ours (:class:`CompositeAutogradKernel`)
stands at the backend's autograd key. It calls the router, and runs the composite where no override
takes the call. An impl runs below autograd, which then sees neither its writes nor its views.
:class:`AutogradBookkeeping` reports them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from opgraft.core import loader
from opgraft.errors import ContractError, RegistrationError
from opgraft.ops.bypass import bypassing
from opgraft.ops.dispatch_keys import BACKEND_KEYS
from opgraft.ops.schema import Call, Op
from opgraft.registry import Chain, Override
from opgraft.router import dispatcher, observers, threads
from opgraft.router.native import NativeKernel

if TYPE_CHECKING:
    from opgraft.router.python import PythonRouter

NOTE = (
    "composite here: calls in grad mode with a tensor that requires grad, and forward-mode AD, "
    "keep the composite derivative and never reach an override without autograd=; nor do calls "
    "under a dispatch mode or a functorch transform, which see what the op is made of"
)

_BELOW = torch._C._after_ADInplaceOrView_keyset
_BACKENDS = {k for name, k in DispatchKey.__members__.items() if name in BACKEND_KEYS}
_AUTOCAST = [k for name, k in DispatchKey.__members__.items() if name.startswith("Autocast")]
#: Autograd's keys above a backend's kernel.
AUTOGRAD_KEYS = (
    *(DispatchKey.ADInplaceOrView, DispatchKey.AutogradFunctionality),
    *(DispatchKey.AutogradOther, DispatchKey.AutogradNestedTensor),
)
#: Composite ops on autograd's own state, which is above every backend.
_AUTOGRAD_STATE_OPS = frozenset(
    {
        *("aten::_backward", "aten::set_data", "aten::data", "aten::is_leaf", "aten::output_nr"),
        *("aten::_version", "aten::requires_grad_", "aten::retain_grad", "aten::retains_grad"),
        *("aten::_unpack_dual", "aten::_fw_primal", "aten::_make_dual"),
        # Its results are in its argument's memory, with versions of their own, and views in
        # inference mode alone.
        "aten::unsafe_chunk",
    }
)
#: Ops whose results torch makes tensors of subclasses of, such as `nn.Parameter`.
_MAKES_SUBCLASSES = frozenset({"aten::detach", "aten::alias", "aten::empty.memory_format"})
#: The same at `CPU` alone: a subclass's constructor (`Subclass([1.0, 2.0])`) calls them, and makes
#: tensors nowhere else. It calls `aten::copy_` and `aten::_to_copy` too, for NumPy arrays of
#: another dtype. These are not refused: their overrides have uses, and that is a rare way to get a
#: tensor.
_MAKES_SUBCLASSES_ON_CPU = frozenset(
    {
        *("aten::lift_fresh", "aten::empty_strided", "aten::to.device"),
        *("aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset"),
    }
)
#: Asked of parameters that have no sizes yet (`nn.LazyLinear`), when they get some. Of these Python
#: can look at nothing, and the answer is about keys of tensors that no impl sees. Other ops that
#: such parameters reach, as `aten::copy_`, have uses.
_OF_UNINITIALIZED = frozenset({"aten::_has_compatible_shallow_copy_type"})
#: Ops whose own kernels call ops that autocast casts, such as `linear`. Autocast casts none of them
#: itself, but for the second on the CPU.
_CALL_CAST_OPS = frozenset(
    {"aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"}
)
#: Types of dispatch modes that see composite ops whole, not decomposed.
_tracing_modes: set[type] = set()
_AUTOGRAD = DispatchKeySet(DispatchKey.AutogradCPU)  # it is the same kernel for all backends
#: The error of a tangent that is none, which only a tensor without one comes to.
_REFUSES_NONE = "Expected a proper Tensor but got None"


def register_tracing_mode(mode: type) -> None:
    """Show overridden composite ops to dispatch modes of a type whole, not decomposed."""
    _tracing_modes.add(mode)
    core = loader.in_use()
    if core is not None:
        core.register_tracing_mode(mode)


def check(op: Op, dispatch_key: str) -> None:
    """Refuse an op that cannot be overridden at a key.

    Raises:
        RegistrationError: the backend has no autograd key of its own, so that the derivative would
            be lost; or the op works on autograd's own state; or torch needs results that no Python
            object wraps yet; or torch calls it with parameters that no impl in Python can look at.
    """
    on_cpu = dispatch_key == "CPU" and op.name in _MAKES_SUBCLASSES_ON_CPU
    if on_cpu or op.name in _MAKES_SUBCLASSES:
        raise RegistrationError(
            f"{op.name} makes the tensors that nn.Parameter and other subclasses wrap, and what "
            "an impl in Python returns is wrapped by a Python object already: the op cannot be "
            f"overridden{' at CPU' if on_cpu else ''}"
        )
    if op.name in _OF_UNINITIALIZED:
        raise RegistrationError(
            f"{op.name} is asked of uninitialized parameters, such as those of nn.LazyLinear, and "
            "an impl in Python can look at nothing of them: the op cannot be overridden"
        )
    if not dispatcher.is_composite(op, dispatch_key):
        return
    if f"Autograd{dispatch_key}" not in DispatchKey.__members__:
        raise RegistrationError(
            f"{op.name} is composite at {dispatch_key}, and {dispatch_key} has no autograd key "
            "of its own: an override would lose its derivative. Override the ops that it calls"
        )
    if op.name in _AUTOGRAD_STATE_OPS:
        raise RegistrationError(
            f"{op.name} reads or writes what autograd knows of a tensor, and an override runs "
            "below autograd, where it cannot see that: the op cannot be overridden"
        )


class CompositeAutogradKernel:
    """Our kernel at the autograd key of a composite op's backend, in front of the router."""

    def __init__(self, chain: Chain, router: PythonRouter) -> None:
        self._router = router
        self._chain = chain
        self._op = chain.op
        self._backend = DispatchKey.__members__[chain.dispatch_key]
        autograd_key = f"Autograd{chain.dispatch_key}"
        # Without `reinstall`: once the backend key has a kernel, the kernel that could be captured
        # here is no longer the composite. The composite goes only when the op's own library does.
        self._composite = NativeKernel(self._op, autograd_key)
        self.library = dispatcher.register(self._op, autograd_key, self)

    def __call__(self, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        result = self._router.result_of_new_op(keyset, args, kwargs)
        if result is not NotImplemented:
            return result
        return self.call(keyset, self._op.bind(args, kwargs))

    def call(self, keyset: DispatchKeySet, call: Call) -> Any:
        """Pass a call to the router, or to the composite."""
        if not self._chain.active or threads.is_bypassed(self._chain):
            return self._router(keyset, *call.args, **call.kwargs)
        keeps_derivative = must_differentiate(call)
        interceptor = interceptor_of(keyset, self._backend)
        if keeps_derivative and interceptor == "none":
            return self._differentiated(keyset, call)
        if interceptor == "none":
            return self._router(keyset, *call.args, **call.kwargs)
        if interceptor == "tracer" and not (keeps_derivative or self._op.writes_or_aliases):
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return self._op.overload.redispatch(keyset & _BELOW, *call.args, **call.kwargs)
        if not keeps_derivative:
            for override in self._chain.active:
                if not threads.is_disabled_here(override):
                    override.state.misses.add()
        return observers.route_observed(
            self._chain,
            call,
            lambda: self.composite(keyset, call),
            keeps_derivative=keeps_derivative,
        )

    def _differentiated(self, keyset: DispatchKeySet, call: Call) -> Any:
        """Pass a call that autograd differentiates to overrides whose impls it differentiates."""

        def route() -> Any:
            # What an impl calls may have no forward-mode derivative: the composite has.
            if has_tangents(call) or sys.is_finalizing():
                return self.composite(keyset, call)
            asked = (override for override in self._chain.active if override.is_differentiated)
            return self._router.route_to(asked, keyset, call)

        return observers.route_observed(self._chain, call, route, keeps_derivative=True)

    def composite(self, keyset: DispatchKeySet, call: Call) -> Any:
        """Run what a call with these keys runs at the autograd key without opgraft."""
        result = decompose(call) if keyset.has(DispatchKey.PythonDispatcher) else NotImplemented
        return self._composite(keyset, call) if result is NotImplemented else result


def decompose(call: Call) -> Any:
    """Run a composite op's decomposition in Python, for traces.

    torch's Python dispatcher runs it for ops that have no kernel at the backend key or its autograd
    key. Our kernels are there, so it would not. The decomposition may call other ops than the
    composite in C++ does (`dropout`).

    Returns:
        The result; NotImplemented if there is no decomposition.
    """
    kernel = call.op.overload.py_kernels.get(DispatchKey.CompositeImplicitAutograd)
    return NotImplemented if kernel is None else kernel(*call.args, **call.kwargs)


def interceptor_of(
    keyset: DispatchKeySet, backend: DispatchKey
) -> Literal["none", "tracer", "other"]:
    """What intercepts a call with these keys between autograd and the backend's kernel.

    Returns:
        "none"; "tracer": `torch.compile` or `explain`, which must see the op whole; "other": a
        dispatch mode, a tensor subclass, functorch, lazy bits, or `torch.compile` under autocast,
        which see its decomposition.
    """
    if (keyset & _BELOW).highestPriorityTypeId() == backend:
        return "none"
    return "tracer" if keyset.has(DispatchKey.Python) and _is_traced(backend) else "other"


def is_backend_next(keyset: DispatchKeySet) -> bool:
    """Whether the next kernel below autograd is that of a dense backend."""
    return (keyset & _BELOW).highestPriorityTypeId() in _BACKENDS


def is_compiling() -> bool:
    """Whether what is called here is traced into a graph of `torch.compile`."""
    functional = torch._C._TorchDispatchModeKey.FUNCTIONAL  # type: ignore[attr-defined]
    return torch._C._get_dispatch_mode(functional) is not None


def _is_traced(backend: DispatchKey) -> bool:
    if is_compiling():
        # Autocast casts for the ops that a composite op calls, so they need the caller's autocast.
        # What a compiler makes of an op that it sees whole, it makes and runs without autocast.
        autocast = f"Autocast{backend.name}"
        return autocast not in DispatchKey.__members__ or (
            torch._C._dispatch_tls_is_dispatch_key_excluded(autocast)
        )
    return is_explained()


def is_explained() -> bool:
    """Whether what is called here is called on stand-ins, to see what it would call."""
    depth = range(torch._C._len_torch_dispatch_stack())
    return any(type(torch._C._get_dispatch_stack_at(i)) in _tracing_modes for i in depth)


def is_at_autograd(keyset: DispatchKeySet) -> bool:
    """Whether a call with these keys is at the autograd key of its backend, or above."""
    return keyset.has(DispatchKey.AutogradFunctionality)


def excluded(op: Op, dispatch_key: str) -> DispatchKeySet:
    """The keys to exclude while an impl runs, so that it runs as a kernel at its key does.

    A kernel for all backends calls other ops, which go through autocast. So autocast's keys are
    excluded only where the op has a kernel of its own, which calls none. Call this before a router
    is installed.
    """
    keys: list[DispatchKey] = []
    has_own_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(op.name, dispatch_key)
    if has_own_kernel and not calls_other_ops(op, dispatch_key):
        keys += _AUTOCAST
    if dispatcher.is_composite(op, dispatch_key):
        keys += AUTOGRAD_KEYS
    keyset = DispatchKeySet(DispatchKey.Undefined)
    for key in keys:
        keyset = keyset.add(key)
    return keyset


def calls_other_ops(op: Op, dispatch_key: str) -> bool:
    """Whether an op's own kernel at a key calls ops that go through its caller's autocast.

    One that was registered in Python may. An impl that it does not concern can leave autocast, but
    none could find out what its results have to be if it did not see it.
    """
    return op.name in _CALL_CAST_OPS or dispatcher.is_registered_in_python(op, dispatch_key)


@contextmanager
def excluding(excluded: DispatchKeySet) -> Iterator[None]:
    """Exclude dispatch keys on this thread.

    If autocast stays on, its cache is switched off. A parameter would be cast below autograd here,
    and whoever took that cast from the cache later would lose the parameter's gradient.
    """
    with torch._C._ExcludeDispatchKeyGuard(excluded):
        caches = torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()
        if not caches:
            yield
            return
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(True)


def without_autograd(excluded: DispatchKeySet) -> DispatchKeySet:
    """Keys to exclude while an impl runs whose calls autograd differentiates."""
    for key in AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    return excluded


def below_autograd(keyset: DispatchKeySet) -> DispatchKeySet:
    """The keys of a keyset that are below autograd."""
    return keyset & _BELOW


class AutogradBookkeeping:
    """Tells autograd what an impl did below it. Created before the impl runs, finished after."""

    def __init__(self, call: Call) -> None:
        """Check a call before its impl runs.

        Raises:
            RuntimeError: it would write to an inference tensor outside of inference mode.
        """
        self._call = call
        if torch.is_inference_mode_enabled():
            return
        if any(tensor.is_inference() for tensor in self._written()):
            raise RuntimeError(
                "Inplace update to inference tensor outside InferenceMode is not allowed. You can "
                "make a clone to get a normal tensor before doing inplace update"
            )

    def _written(self) -> Iterator[torch.Tensor]:
        for argument, value in zip(self._call.op.arguments, self._call.values, strict=True):
            if argument.declares_write:
                values = value if isinstance(value, (list, tuple)) else (value,)
                yield from (each for each in values if isinstance(each, torch.Tensor))

    def finish(self, result: Any) -> Any:
        """Bump the versions of written arguments, and make views of results that alias an argument.

        Returns:
            The result, in which views are tracked by autograd.

        Raises:
            ContractError: it is an argument's memory with another dtype, conjugate or negative bit.
        """
        for tensor in self._written():
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        return self._tracked_views(result)

    def _tracked_views(self, result: Any) -> Any:
        if isinstance(result, (tuple, list)):
            return type(result)(map(self._tracked_views, result))
        if not isinstance(result, torch.Tensor) or result._is_view():
            return result
        tensors = list(self._call.tensors())
        if any(result is tensor for tensor in tensors):
            return result
        base = next((t for t in tensors if _storage_of(t) == _storage_of(result) is not None), None)
        if base is None or base.is_inference():
            return result
        if _element_type(base) != _element_type(result):
            raise ContractError(
                f"an override of {self._call.op.name} returned the memory of an argument with "
                "another dtype, conjugate or negative bit, which autograd cannot track; return a "
                "new tensor, or leave such calls to the native kernel"
            )
        with bypassing("aten::as_strided"):  # this call is ours: no override takes it
            return base.as_strided(result.size(), result.stride(), result.storage_offset())


def bookkeeping_for(call: Call) -> AutogradBookkeeping | None:
    """A call's bookkeeping; None if autograd's keys have seen the call already."""
    if torch._C._dispatch_tls_is_dispatch_key_excluded("ADInplaceOrView"):
        return None
    return AutogradBookkeeping(call)


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # a layout without a storage
        return None


def _element_type(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def must_differentiate(call: Call) -> bool:
    """Whether autograd, backward or forward, needs to see through the call."""
    return needs_grad(call) or has_tangents(call)


def has_tangents(call: Call) -> bool:
    """Whether a tensor of a call has a forward-mode tangent."""
    return any(map(has_tangent, call.tensors()))


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a forward-mode tangent, and calls are differentiated by it here."""
    if forward_ad._current_level < 0 or torch.is_inference_mode_enabled():
        return False
    if torch._C._dispatch_tls_is_dispatch_key_excluded("ADInplaceOrView"):  # below autograd
        return False
    core = loader.in_use()
    if core is not None:
        return core.has_tangent(tensor)
    # Without the core only an op tells. It refuses a tensor that has a tangent before it looks at
    # the second argument; and it is called where no mode, subclass or transform sees it.
    level = 0  # torch has one alone
    try:
        torch.ops.aten._make_dual.default.redispatch(_AUTOGRAD, tensor, None, level)
    except RuntimeError as error:
        return _REFUSES_NONE not in str(error)
    return False


def needs_grad(call: Call) -> bool:
    """Whether autograd needs to see through the call for a backward."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors())


def is_differentiated(override: Override, keyset: DispatchKeySet, call: Call) -> bool:
    """Whether autograd differentiates what an override's impl calls for a call that it takes."""
    return override.is_differentiated and is_at_autograd(keyset) and needs_grad(call)


def would_differentiate(override: Override, call: Call) -> bool:
    """Whether autograd would differentiate what an override's impl calls for a call made here."""
    is_below = torch._C._dispatch_tls_is_dispatch_key_excluded("ADInplaceOrView")
    return override.is_differentiated and not is_below and needs_grad(call)


def check_differentiated(override: Override, result: Any) -> None:
    """Refuse results that have lost the derivative.

    A call's first hits are compared with native, which says whether its result has one.

    Raises:
        ContractError: no result that could be differentiated is, and one was before.
    """
    results = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
    wanted = [each for each in results if each.is_floating_point() or each.is_complex()]
    if any(each.requires_grad for each in wanted):
        override.state.has_made_derivative = True
    elif wanted and override.state.has_made_derivative:
        raise ContractError(
            f"override {override.name!r} of {override.op} at {override.dispatch_key} is declared "
            "with autograd='impl' and returned what autograd cannot differentiate; let its impl "
            "call ops that have derivatives, outside of torch.no_grad()"
        )
