"""Composite ops run as without us, unless an override takes the call.

A CompositeImplicitAutograd op (`aten::_fused_rms_norm` on CPU) runs at the autograd key: what it
is made of is differentiated, tracked as views, counted as writes, and seen by dispatch modes and
tensor subclasses one by one. As soon as it has a kernel at a backend key, torch puts the generated
autograd kernel in front of it, which wants a backward op that the backend lacks: training raises.
So a companion goes to the backend's autograd key. It asks the router there, and what no override
takes runs the composite as if we were not here. An impl runs below autograd, where nobody keeps
books: what the pieces would have noted is noted for it (:class:`Bookkeeping`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad

from opgraft.core import loader
from opgraft.errors import ContractError, RegistrationError
from opgraft.ops.bypass import bypassing
from opgraft.ops.dispatch_keys import BACKEND_KEYS
from opgraft.ops.schema import Call, Op
from opgraft.registry import Chain
from opgraft.router import dispatcher, observers, threads
from opgraft.router.native import NativeKernel

NOTE = (
    "composite here: calls in grad mode with a tensor that requires grad, and forward-mode AD, "
    "keep the composite derivative and never reach an override; nor do calls under a dispatch mode "
    "or a functorch transform, which see what the op is made of"
)

_BELOW = torch._C._after_ADInplaceOrView_keyset
_BACKENDS = {k for name, k in DispatchKey.__members__.items() if name in BACKEND_KEYS}
_AUTOCAST = [k for name, k in DispatchKey.__members__.items() if name.startswith("Autocast")]
#: What stands above a backend's kernel for autograd.
AUTOGRAD_KEYS = (
    *(DispatchKey.ADInplaceOrView, DispatchKey.AutogradFunctionality),
    *(DispatchKey.AutogradOther, DispatchKey.AutogradNestedTensor),
)
#: Composite in their schema, but about autograd's own state, which is above every backend.
_AUTOGRADS_OWN = frozenset(
    {
        *("aten::_backward", "aten::set_data", "aten::data", "aten::is_leaf", "aten::output_nr"),
        *("aten::_version", "aten::requires_grad_", "aten::retain_grad", "aten::retains_grad"),
        *("aten::_unpack_dual", "aten::_fw_primal", "aten::_make_dual"),
    }
)
#: Dispatch modes that see composite ops whole, and not what they are made of.
_whole_ops_modes: set[type] = set()


def show_whole_ops_to(mode: type) -> None:
    """Let a dispatch mode, by its type, see overridden composite ops as they are."""
    _whole_ops_modes.add(mode)
    core = loader.in_use()
    if core is not None:
        core.show_whole_ops_to(mode)


def check(op: Op, dispatch_key: str) -> None:
    """Refuse an op that no override can stand in for at a key.

    Raises:
        RegistrationError: the backend has no autograd key of its own, so that the derivative could
            not be kept; or the op is about autograd's own state; or torch needs its results to be
            ones that Python has never seen.
    """
    if op.name == "aten::detach":
        raise RegistrationError(
            "aten::detach makes the tensors that nn.Parameter and other subclasses wrap, and what "
            "an impl in Python returns belongs to a Python object already: the op cannot be "
            "overridden"
        )
    if not dispatcher.is_composite(op, dispatch_key):
        return
    if f"Autograd{dispatch_key}" not in DispatchKey.__members__:
        raise RegistrationError(
            f"{op.name} is composite at {dispatch_key}, and {dispatch_key} has no autograd key "
            "of its own: an override would lose its derivative. Override the ops it is made of"
        )
    if op.name in _AUTOGRADS_OWN:
        raise RegistrationError(
            f"{op.name} reads or writes what autograd knows of a tensor, and an override runs "
            "below autograd, where none of that can be seen: the op cannot be overridden"
        )


class AutogradCompanion:
    """Stands at the autograd key of the backend of a composite op, in front of its router."""

    def __init__(self, chain: Chain, router: Callable[..., Any]) -> None:
        self._router = router
        self._chain = chain
        self._op = chain.op
        self._backend = DispatchKey.__members__[chain.dispatch_key]
        autograd_key = f"Autograd{chain.dispatch_key}"
        # No reinstalling: once the backend key has a kernel, what could be captured here is not the
        # composite any more. The composite goes only when the op's own library does.
        self._composite = NativeKernel(self._op, autograd_key)
        self._library = dispatcher.register(self._op, autograd_key, self)

    def __call__(self, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return self.call(keyset, self._op.bind(args, kwargs))

    def call(self, keyset: DispatchKeySet, call: Call) -> Any:
        """Give a call to the router, or to the composite."""
        if not self._chain.active or threads.is_bypassed(self._chain):
            return self._router(keyset, *call.args, **call.kwargs)
        kept = must_differentiate(call)
        way = "others" if kept else between(keyset, self._backend)
        if way == "nothing":
            return self._router(keyset, *call.args, **call.kwargs)
        if way == "tracer" and not self._op.writes_or_aliases:
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return self._op.overload.redispatch(keyset & _BELOW, *call.args, **call.kwargs)
        if not kept:
            for override in self._chain.active:
                if not threads.is_off_here(override):
                    override.state.misses.add()
        return observers.watch(self._chain, call, lambda: self.composite(keyset, call), kept=kept)

    def composite(self, keyset: DispatchKeySet, call: Call) -> Any:
        """Run what a call with these keys runs at the autograd key without us."""
        result = decompose(call) if keyset.has(DispatchKey.PythonDispatcher) else NotImplemented
        return self._composite(keyset, call) if result is NotImplemented else result


def decompose(call: Call) -> Any:
    """Run what stands in Python for a composite op, for traces.

    torch's dispatcher in Python takes it for an op without kernels at the backend and its autograd
    key, which ours are. It may be made of other ops than the composite in C++ (`dropout`).

    Returns:
        The result; NotImplemented where nothing stands for it.
    """
    kernel = call.op.overload.py_kernels.get(DispatchKey.CompositeImplicitAutograd)
    return NotImplemented if kernel is None else kernel(*call.args, **call.kwargs)


def between(keyset: DispatchKeySet, backend: DispatchKey) -> Literal["nothing", "tracer", "others"]:
    """What is between the autograd key and a backend's kernel, for a call with these keys.

    Returns:
        "nothing"; "tracer": somebody who wants to see the op whole, `torch.compile` or `explain`;
        "others": a dispatch mode, a tensor subclass, functorch, lazy bits, which see its pieces.
    """
    if (keyset & _BELOW).highestPriorityTypeId() == backend:
        return "nothing"
    return "tracer" if keyset.has(DispatchKey.Python) and _is_traced() else "others"


def is_next_to_a_backend(keyset: DispatchKeySet) -> bool:
    """Whether the kernel of some dense backend comes next below autograd."""
    return (keyset & _BELOW).highestPriorityTypeId() in _BACKENDS


def _is_traced() -> bool:
    functional = torch._C._TorchDispatchModeKey.FUNCTIONAL  # type: ignore[attr-defined]
    if torch._C._get_dispatch_mode(functional) is not None:
        return True
    depth = range(torch._C._len_torch_dispatch_stack())
    return any(type(torch._C._get_dispatch_stack_at(i)) in _whole_ops_modes for i in depth)


def is_at_autograd(keyset: DispatchKeySet) -> bool:
    """Whether a call with these keys stands at the autograd key of its backend, or above."""
    return keyset.has(DispatchKey.AutogradFunctionality)


def excluded(op: Op, dispatch_key: str) -> DispatchKeySet:
    """The keys that an impl's own calls do not pass: it runs as a kernel at its key would.

    A kernel for all backends is made of other ops, which go through autocast: so do its impls'. To
    be asked before a router is in.
    """
    keys: list[DispatchKey] = []
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name, dispatch_key):
        keys += _AUTOCAST
    if dispatcher.is_composite(op, dispatch_key):
        keys += AUTOGRAD_KEYS
    keyset = DispatchKeySet(DispatchKey.Undefined)
    for key in keys:
        keyset = keyset.add(key)
    return keyset


@contextmanager
def as_a_kernel(excluded: DispatchKeySet) -> Iterator[None]:
    """While this lasts, what is called on this thread runs as a kernel below these keys would.

    Where autocast stays on, its cache does not: what it keeps of a parameter here was cast below
    autograd, and whoever took it from there later would lose that parameter's gradient.
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


def below(keyset: DispatchKeySet) -> DispatchKeySet:
    """The keys that are left below autograd."""
    return keyset & _BELOW


class Bookkeeping:
    """What autograd has to know of an impl's run below it: made before, settled after."""

    def __init__(self, call: Call) -> None:
        """Look at a call before its impl runs.

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
            if argument.is_declared:
                values = value if isinstance(value, (list, tuple)) else (value,)
                yield from (each for each in values if isinstance(each, torch.Tensor))

    def settle(self, result: Any) -> Any:
        """Count what was written to as written, and make views of what shares an argument's memory.

        Returns:
            The result, views in it as autograd tracks them.

        Raises:
            ContractError: it is an argument's memory as elements of another kind.
        """
        for tensor in self._written():
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        return self._tracked(result)

    def _tracked(self, result: Any) -> Any:
        if isinstance(result, (tuple, list)):
            return type(result)(map(self._tracked, result))
        if not isinstance(result, torch.Tensor) or result._is_view():
            return result
        tensors = list(self._call.tensors())
        if any(result is tensor for tensor in tensors):
            return result
        base = next((t for t in tensors if _memory(t) == _memory(result) is not None), None)
        if base is None or base.is_inference():
            return result
        if _elements(base) != _elements(result):
            raise ContractError(
                f"an override of {self._call.op.name} returned the memory of an argument as "
                "elements of another kind, as which autograd cannot follow it; return a new "
                "tensor, or leave such calls to the native kernel"
            )
        with bypassing("aten::as_strided"):  # ours, and no call for its overrides
            return base.as_strided(result.size(), result.stride(), result.storage_offset())


def bookkeeping(call: Call) -> Bookkeeping | None:
    """None where the keys that the call has passed keep the books."""
    if torch._C._dispatch_tls_is_dispatch_key_excluded("ADInplaceOrView"):
        return None
    return Bookkeeping(call)


def _memory(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # a layout without a storage
        return None


def _elements(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def must_differentiate(call: Call) -> bool:
    """Whether autograd, backward or forward, needs to see through the call."""
    # An open dual level is enough: asking each tensor for a tangent at that level would miss those
    # of outer levels, and a missed tangent is a silently wrong jvp.
    return forward_ad._current_level >= 0 or needs_grad(call)


def needs_grad(call: Call) -> bool:
    """Whether autograd needs to see through the call for a backward."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors())
