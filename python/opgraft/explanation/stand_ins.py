"""Finds out which ops a function calls, by calling it on tensors without memory.

`torch._subclasses.FakeTensorMode` does the same and more. But creating one imports Dynamo, Sympy
and Triton, which takes seconds, and `explain` must be quick. Here a *stand-in* replaces a tensor.
It has the tensor's sizes, strides, dtype, device and autograd state. So everything above the
backend (autograd, autocast, composite ops, the choice of an SDPA backend) treats it like the
tensor. The calls that reach the backend are recorded, and torch's own meta kernels make their
outputs.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from opgraft import router
from opgraft.errors import OpgraftError
from opgraft.ops.schema import Call, Op, resolve
from opgraft.router import composite, device

# torch's errors where code needs the memory of a stand-in.
_MEMORY_ERRORS = (
    "its data is not allocated yet",
    "Cannot access data pointer",
    "not supported for tensor subclasses",
    "Can't export tensors on",
)

#: Called with each call that reaches a backend.
OnCall = Callable[[Call], None]

_COMPOSITE_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd


class StandInError(OpgraftError, TypeError):
    """A tensor cannot have a stand-in, or code needs the memory of one."""


class Stopped(BaseException):
    """The rest of the function depends on values, which stand-ins do not have.

    It is no `Exception`: code that catches those would go on as it never does with tensors.
    """


class StandIn(torch.Tensor):
    """A tensor's metadata, device included, and no memory."""

    #: The same tensor on the meta device, for meta kernels.
    meta: torch.Tensor
    #: The tensor that it replaces; None for a result.
    original: torch.Tensor | None
    #: The address of that tensor's storage; 0 where there is none.
    base_address: int

    @staticmethod
    def __new__(
        cls,
        meta: torch.Tensor,
        device: torch.device,
        *,
        requires_grad: bool = False,
        original: torch.Tensor | None = None,
        base_address: int = 0,
    ) -> StandIn:
        stand_in: StandIn = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        # Without this its address is 0, and a kernel launched on it would break the CUDA context.
        torch._C._set_throw_on_mutable_data_ptr(stand_in)  # type: ignore[attr-defined]
        torch._C._set_conj(stand_in, meta.is_conj())  # type: ignore[attr-defined]
        torch._C._set_neg(stand_in, meta.is_neg())  # type: ignore[attr-defined]
        stand_in.meta, stand_in.original, stand_in.base_address = meta, original, base_address
        return stand_in

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StandIn({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise StandInError(
            f"{func} needs the values of a tensor that opgraft.explain only imagines: a condition, "
            "a hook or another thread reads them"
        )


class Recorder(TorchDispatchMode):
    """While this mode is active no kernel runs: ops are recorded, and return stand-ins.

    Args:
        on_call: called with each call that would reach a backend. The call has the user's own
            tensors, and stand-ins for results.
        is_overridden: whether an op has overrides at a dispatch key, so that it is not decomposed.
    """

    def __init__(self, on_call: OnCall, is_overridden: Callable[[Op, str], bool]) -> None:
        super().__init__()
        self._on_call = on_call
        self._is_overridden = is_overridden
        #: By id. A tensor has only one stand-in, which keeps the tensor alive.
        self._stand_ins: dict[int, StandIn] = {}
        self._by_meta: dict[int, StandIn] = {}
        self._created: list[weakref.ref[StandIn]] = []
        #: By meta storage: the address of the storage that views share.
        self._addresses: dict[int, int] = {}
        self._captured: list[_Captured] = []
        self._muted = False
        #: Whether the function used a tensor of the user's own autograd graph that was no argument.
        self._saw_user_graph = False
        #: Why the function could not be followed to its end; None where it was.
        self.stopped: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch would import Dynamo at the first call, only to skip it.
        return False

    supports_higher_order_operators = True

    # ------------------------------------------------------------------ running

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Call a function with stand-ins for tensors; returns what it returned.

        Afterwards `stopped` says whether the function came to its end.

        Raises:
            StandInError: an argument is a tensor that cannot have a stand-in.
            Exception: whatever the function itself raises.
        """
        with _disable_current_modes():
            args, kwargs = self._with_stand_ins((tuple(args), dict(kwargs)))
        return self._run(lambda: function(*args, **kwargs))

    def run_backward(self, outputs: Any) -> bool:
        """Differentiate what :meth:`run` returned; returns whether anything requires grad."""
        ends = [t for t in pytree.tree_leaves(outputs) if _is_differentiable(t)]
        tensors = (
            stand_in.original if captured else stand_in for stand_in, captured in self._inputs()
        )
        starts = [t for t in tensors if t is not None and t.requires_grad]
        if not ends or not starts:
            return False
        with _disable_current_modes():
            grads = [self._stand_in_of_meta(torch.empty_like(_meta(t)), t.device) for t in ends]
        try:
            self._run(lambda: torch.autograd.grad(ends, starts, grads, allow_unused=True))
        except (
            Exception
        ) as error:  # a hook's, or of a graph that has to be differentiated otherwise
            self.stopped = f"its backward raises {type(error).__name__}: {error}"
        return True

    def _inputs(self) -> Iterator[tuple[StandIn, bool]]:
        """Each stand-in, and whether the function used the tensor itself instead."""
        captured = {id(captured.tensor) for captured in self._captured}
        for stand_in in self._stand_ins.values():
            yield stand_in, id(stand_in.original) in captured

    def _run(self, function: Callable[[], Any]) -> Any:
        try:
            with _disable_current_modes(), _force_eager(), _no_autocast_cache(), self:
                return function()
        except Stopped as stopped:
            self.stopped = str(stopped)
            return None
        except (RuntimeError, StandInError) as error:
            if not isinstance(error, StandInError) and not any(
                sign in str(error) for sign in _MEMORY_ERRORS
            ):
                raise
            self.stopped = f"it needs a tensor's memory ({str(error).splitlines()[0]})"
            return None
        finally:
            for captured in self._captured:
                captured.restore()

    def release(self) -> int:
        """Forget every stand-in; returns how many are still referenced elsewhere."""
        self._stand_ins.clear()
        self._by_meta.clear()
        self._captured.clear()
        if any(ref() is not None for ref in self._created):
            gc.collect()
        return sum(ref() is not None for ref in self._created)

    def _with_stand_ins(self, values: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self._stand_in_argument, values)

    def _stand_in_argument(self, tensor: torch.Tensor) -> torch.Tensor:
        stand_in: torch.Tensor = self._stand_in_for(tensor)
        if stand_in.requires_grad and tensor.grad_fn is not None:
            with self._mute(), self:
                # Not a leaf of autograd, as the tensor: ops may write to it.
                stand_in = stand_in.clone()
        if composite.has_tangent(tensor):
            tangent = self._stand_in_for(forward_ad.unpack_dual(tensor).tangent)
            with self._mute(), self:
                return forward_ad.make_dual(stand_in, tangent)
        return stand_in

    @contextmanager
    def _mute(self) -> Iterator[None]:
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    # ------------------------------------------------------------------ one call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            raise self._stop(f"{func} is a higher-order operator, which is not followed")
        op = resolve(func)
        if not _has_tensors(op):  # for example an op of the profiler
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            return args[0]  # torch.tensor(...): its values are known
        if func is torch.ops.aten._local_scalar_dense.default and self._is_known(args[0]):
            return func(args[0])
        if self._saw_user_graph and torch._C._current_graph_task_id() != -1:
            raise self._stop(
                "it differentiates into a graph of a tensor that was not among the arguments; give "
                "that tensor as an argument"
            )
        call = op.bind(args, kwargs)
        device = _device(call)
        for argument, value in zip(op.arguments, call.values, strict=True):
            if argument.declares_write:
                self._note_writes(value, call)
        dispatch_key = str(torch._C._dispatch_key_for_device(device.type))
        is_composite = self._is_composite(op, dispatch_key)
        if not is_composite and not self._muted:
            self._on_call(Call(op, tuple(map(_original, call.values))))
        result = None
        if is_composite or self._calls_other_ops(op, dispatch_key):
            kernel = func.decompose if is_composite else partial(func._op_dk, _COMPOSITE_EXPLICIT)
            result = self._run_decomposition(kernel, args, kwargs)
        if result is None:
            result = self._results(call, args, kwargs, device)
        return self._returned(call, result)

    def _is_composite(self, op: Op, dispatch_key: str) -> bool:
        """Whether the op never reaches the key, because it is decomposed into other ops."""
        if self._is_overridden(op, dispatch_key) or router.has_own_kernel(op, dispatch_key):
            return False
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return has(op.name, "CompositeImplicitAutograd") and not has(
            op.name, _COMPOSITE_EXPLICIT.name
        )

    def _calls_other_ops(self, op: Op, dispatch_key: str) -> bool:
        """Whether its kernel is one for all backends, which may call other ops."""
        if self._is_overridden(op, dispatch_key) or router.has_own_kernel(op, dispatch_key):
            return False
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        # Such kernels of view ops create tensors directly, which would not be stand-ins. Those of
        # other libraries may launch kernels, so they must not run.
        is_view = op.overload.is_view or torch.Tag.inplace_view in op.overload.tags
        is_aten = op.name.startswith("aten::")
        return is_aten and not is_view and has(op.name, _COMPOSITE_EXPLICIT.name)

    def _run_decomposition(
        self, kernel: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Run a kernel that calls other ops on stand-ins; None where it cannot finish."""
        args, kwargs = tuple(map(self._to_stand_in, args)), _map_values(kwargs, self._to_stand_in)
        try:
            with self._below_autograd():
                result = kernel(*args, **kwargs)
        except (Exception, Stopped):
            # Many such kernels also read memory themselves, and there is none.
            return None
        leaves = pytree.tree_leaves(result)
        plain = any(isinstance(t, torch.Tensor) and not isinstance(t, StandIn) for t in leaves)
        return None if plain else result

    @contextmanager
    def _below_autograd(self) -> Iterator[None]:
        """Go on recording below autograd and autocast, which the call has already passed."""
        with self, torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableAutocast():
            yield

    def _results(self, call: Call, args: Sequence[Any], kwargs: Any, device: torch.device) -> Any:
        """What the op returns, by its meta kernel."""
        op, tags = call.op, call.op.overload.tags
        if torch.Tag.data_dependent_output in tags:
            raise self._stop(f"{op.name} reads a tensor's values, and the rest depends on it")
        if torch.Tag.dynamic_output_shape in tags:
            raise self._stop(f"the shape of what {op.name} returns depends on values")
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if not op.name.startswith("aten::") and not has(op.name, "Meta"):
            raise self._stop(f"{op.name} has no fake kernel, which would say what it returns")
        # The arguments as given, not as bound: a Python number promotes as a number.
        args, kwargs = tuple(map(self._to_meta, args)), _map_values(kwargs, self._to_meta)
        try:
            result = _META_KERNELS.get(op.name, op.overload)(*args, **kwargs)
        except Exception as error:
            raise self._stop(f"{op.name}: {type(error).__name__}: {error}") from error
        for tensor in pytree.tree_leaves(call.values):
            if isinstance(tensor, torch.Tensor):
                self._follow_shape(tensor, call)

        def wrap(value: torch.Tensor) -> StandIn:
            existing = self._by_meta.get(id(value))
            return self._stand_in_of_meta(value, device) if existing is None else existing

        return pytree.tree_map_only(torch.Tensor, wrap, result)

    def _returned(self, call: Call, result: Any) -> Any:
        """What the caller gets: an op that writes to an argument returns that argument."""
        declared = call.op.returns
        if len(declared) == 1:
            return self._written(call, declared[0], result)
        if not declared:
            return None
        pairs = zip(declared, result, strict=True)
        return tuple(self._written(call, each, value) for each, value in pairs)

    def _written(self, call: Call, declared: Any, value: Any) -> Any:
        if declared.alias_info is None or not declared.alias_info.is_write:
            return value
        aliases = declared.alias_info.before_set
        for argument, given in zip(call.op.overload._schema.arguments, call.values, strict=True):
            if argument.alias_info is not None and argument.alias_info.before_set == aliases:
                return given
        return value

    def _stop(self, why: str) -> Stopped:
        return Stopped(why)

    # ------------------------------------------------------------------ tensors and stand-ins

    def _stand_in_for(self, tensor: torch.Tensor) -> StandIn:
        if isinstance(tensor, StandIn):
            return tensor
        stand_in = self._stand_ins.get(id(tensor))
        if stand_in is None:
            stand_in = self._stand_ins[id(tensor)] = self._new_stand_in(tensor)
        return stand_in

    def _new_stand_in(self, tensor: torch.Tensor) -> StandIn:
        _check_supported(tensor)
        with _metadata_only():
            meta = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            if tensor.storage_offset():
                room = tensor.storage_offset() + meta.untyped_storage().nbytes() // max(
                    1, meta.element_size()
                )
                meta = torch.empty(room, dtype=tensor.dtype, device="meta").as_strided(
                    tensor.size(), tensor.stride(), tensor.storage_offset()
                )
            if tensor.is_conj():
                meta = torch._conj(meta)
            if tensor.is_neg():
                meta = torch._neg_view(meta)
        address = _base_address(tensor)
        self._addresses[meta.untyped_storage()._cdata] = address
        stand_in = StandIn(
            meta,
            tensor.device,
            requires_grad=tensor.requires_grad,
            original=tensor,
            base_address=address,
        )
        self._remember(stand_in)
        return stand_in

    def _stand_in_of_meta(self, meta: torch.Tensor, device: torch.device) -> StandIn:
        address = self._addresses.get(meta.untyped_storage()._cdata, 0)
        stand_in = StandIn(meta, device, base_address=address)
        self._remember(stand_in)
        return stand_in

    def _remember(self, stand_in: StandIn) -> None:
        self._by_meta[id(stand_in.meta)] = stand_in
        self._created.append(weakref.ref(stand_in))

    def _to_stand_in(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._capture(value)
        return [self._to_stand_in(v) for v in value] if isinstance(value, (list, tuple)) else value

    def _to_meta(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._capture(value).meta
        if isinstance(value, (list, tuple)):
            return [self._to_meta(item) for item in value]
        if isinstance(value, torch.device):
            return torch.device("meta")
        return None if isinstance(value, torch.Generator) else value

    def _capture(self, tensor: torch.Tensor) -> StandIn:
        """The stand-in of a tensor in a call; a tensor of the user's own is noted as captured."""
        existing = isinstance(tensor, StandIn) or any(
            captured.tensor is tensor for captured in self._captured
        )
        if not existing:
            self._captured.append(_Captured(tensor))
            self._saw_user_graph |= tensor.grad_fn is not None
        return self._stand_in_for(tensor)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values can be read now: they are in memory, and no op changed them."""
        is_real = not isinstance(tensor, StandIn) and tensor.device.type == "cpu"
        return is_real and not any(s.tensor is tensor and s.written for s in self._captured)

    def _note_writes(self, value: Any, call: Call) -> None:
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, StandIn):
                self._note_write(tensor, call)

    def _note_write(self, tensor: torch.Tensor, call: Call) -> None:
        # Autograd, above, would make the user's own tensor part of a graph of stand-ins.
        if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors()):
            raise self._stop(
                f"{call.op.name} writes to a tensor that was not among the arguments, with a "
                "derivative; give that tensor as an argument"
            )
        self._capture(tensor)
        for captured in self._captured:
            captured.written |= captured.tensor is tensor

    def _follow_shape(self, tensor: torch.Tensor, call: Call) -> None:
        """Update a stand-in whose shape an op changed in place (`squeeze_`, `resize_`)."""
        stand_in = self._stand_in_for(tensor)
        meta = stand_in.meta
        if (stand_in.size(), stand_in.stride()) == (meta.size(), meta.stride()):
            return
        if stand_in is not tensor:
            raise self._stop(
                f"{call.op.name} changes the shape of a tensor that was not among the arguments"
            )
        with torch._C._DisableTorchDispatch():
            stand_in.data = StandIn(meta, stand_in.device)
        stand_in.original = None


composite.register_tracing_mode(Recorder)


class _Captured:
    """A tensor of the user's that the function used without getting it as an argument."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.written = False
        self._version = None if tensor.is_inference() else tensor._version
        self._accumulates = tensor.is_leaf and tensor.requires_grad
        self._grad = tensor.grad if self._accumulates else None

    def restore(self) -> None:
        # Autograd counted a write that did not happen, so a backward that needs the tensor would
        # refuse to run. Or it left a stand-in as the tensor's gradient.
        if self._version is not None and self.tensor._version != self._version:
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self._version,))
        if self._accumulates and self.tensor.grad is not self._grad:
            self.tensor.grad = self._grad


def _fused_rms_norm_meta(
    input: torch.Tensor, normalized_shape: list[int], *_: Any
) -> tuple[torch.Tensor, ...]:
    """What `_fused_rms_norm` returns."""
    dims = len(normalized_shape)
    statistics = (*input.shape[: input.ndim - dims], *(1 for _ in range(dims)))
    wide = torch.promote_types(input.dtype, torch.float32)
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format),
        torch.empty(statistics, dtype=wide, device="meta"),
    )


def _layer_norm_meta(*args: Any) -> tuple[torch.Tensor, ...]:
    out, rstd = _fused_rms_norm_meta(*args)
    return out, torch.empty_like(rstd), rstd


# They replace torch's own, which call elementwise ops: the first of those in a process imports
# Dynamo, and norms are explained often.
_META_KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_fused_rms_norm": _fused_rms_norm_meta,
    "aten::native_layer_norm": _layer_norm_meta,
}


def _has_tensors(op: Op) -> bool:
    declared = (*(a.kind for a in op.arguments), *(str(r.type) for r in op.returns))
    return any("Tensor" in kind for kind in declared)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, StandIn)
    return tensor.meta


def _original(value: Any) -> Any:
    if isinstance(value, StandIn):
        # A zero tensor is materialized above the backend; its stand-in has no ZeroTensor key.
        real = value.original
        return value if real is None or real._is_zerotensor() else real
    return [_original(item) for item in value] if isinstance(value, (list, tuple)) else value


def _map_values(mapping: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: change(value) for name, value in mapping.items()}


def _device(call: Call) -> torch.device:
    """Where the results of a call live."""
    given = call.named.get("device")
    if given is None:
        tensors = list(call.tensors())
        devices = [t.device for t in tensors if t.device.type != "cpu" or t.ndim > 0]
        given = next(iter(devices), tensors[0].device if tensors else torch.get_default_device())
    device = torch.device(given)
    if device.index is None and device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device.type)
        return torch.device(device.type, module.current_device() if module.is_initialized() else 0)
    return device


def _base_address(tensor: torch.Tensor) -> int:
    try:
        address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    except RuntimeError:  # a FakeTensor
        return 0
    return address


def _check_supported(tensor: torch.Tensor) -> None:
    kind = type(tensor)
    own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if own and not isinstance(tensor, FakeTensor):
        what = f"a {kind.__name__}, a subclass with a __torch_dispatch__ of its own"
    elif tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        what = f"{tensor.layout}, nested or quantized"
    elif torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        what = "inside vmap or grad"
    elif tensor.requires_grad and not device.is_available(tensor.device.type):
        # Autograd asks the device for its stream, and ends the process where there is no device.
        raise StandInError(
            f"there is no {tensor.device.type} device here, and autograd cannot be followed "
            "without one: leave out requires_grad, or name the op itself or the backward's op"
        )
    else:
        return
    raise StandInError(
        f"opgraft.explain supports dense tensors only, and this one is {what}; opgraft.trace() "
        "shows the real call"
    )


@contextmanager
def _metadata_only() -> Iterator[None]:
    """Touch metadata only: neither autograd nor autocast, whatever the caller has set."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield


@contextmanager
def _force_eager() -> Iterator[None]:
    """Run compiled functions in eager mode: Dynamo would compile the recorder as well."""
    with torch.compiler.set_stance("force_eager") if _dynamo_is_imported() else nullcontext():
        yield


def _dynamo_is_imported() -> bool:
    return "torch._dynamo" in sys.modules  # without it nothing is compiled


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Switch autocast's cache of cast parameters off: it must not keep stand-ins."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
