"""Running a function without running it: which ops it calls, found on tensors without memory.

`torch._subclasses.FakeTensorMode` does the same and more, but making one imports Dynamo, Sympy and
Triton, which takes seconds and is no business of a question. Here a tensor is replaced by a
*ghost*: it has the sizes, strides, dtype, device and place in autograd of the tensor that it
stands for, so everything above the backend (autograd, autocast, composite ops, the choice of an
SDPA backend) does with it what it does with the tensor; what reaches the backend is recorded, and
torch's own meta kernels say what comes out.
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
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from opgraft import router
from opgraft.errors import OpgraftError
from opgraft.ops.schema import Call, Op, resolve
from opgraft.router import composite, device

# What torch says where a ghost's memory is wanted.
_MEMORY_WANTED = (
    "its data is not allocated yet",
    "Cannot access data pointer",
    "not supported for tensor subclasses",
    "Can't export tensors on",
)

#: Told of each call that reaches a backend.
OnCall = Callable[[Call], None]

_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd


class GhostError(OpgraftError, TypeError):
    """A tensor that no ghost can stand for, or a ghost where memory is needed."""


class Stopped(BaseException):
    """What comes next depends on values, which ghosts do not have.

    No `Exception`: code that catches those would go on as it never does with tensors.
    """


class Ghost(torch.Tensor):
    """A tensor's metadata, device included, and no memory."""

    #: The same on the meta device, for meta kernels.
    meta: torch.Tensor
    #: The tensor that it stands for; None for a result.
    stands_for: torch.Tensor | None
    #: Where the memory of what it stands for begins; 0 where there is none.
    base_address: int

    @staticmethod
    def __new__(
        cls,
        meta: torch.Tensor,
        device: torch.device,
        *,
        requires_grad: bool = False,
        stands_for: torch.Tensor | None = None,
        base_address: int = 0,
    ) -> Ghost:
        ghost: Ghost = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        # Without this its address is 0, and a kernel that is launched on it loses the device.
        torch._C._set_throw_on_mutable_data_ptr(ghost)  # type: ignore[attr-defined]
        torch._C._set_conj(ghost, meta.is_conj())  # type: ignore[attr-defined]
        torch._C._set_neg(ghost, meta.is_neg())  # type: ignore[attr-defined]
        ghost.meta, ghost.stands_for, ghost.base_address = meta, stands_for, base_address
        return ghost

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Ghost({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise GhostError(
            f"{func} wants the values of a tensor that opgraft.explain only imagines: a condition, "
            "a hook or another thread reads them"
        )


class Recorder(TorchDispatchMode):
    """While it is on, nothing runs: ops are recorded, and return ghosts.

    Args:
        on_call: told of each call that would reach a backend, the user's own tensors in it, or
            ghosts where a tensor does not exist.
        is_overridden: whether an op has overrides at a dispatch key, so that it is not looked into.
    """

    def __init__(self, on_call: OnCall, is_overridden: Callable[[Op, str], bool]) -> None:
        super().__init__()
        self._on_call = on_call
        self._is_overridden = is_overridden
        #: By id: a tensor has one ghost throughout; each keeps its tensor alive.
        self._ghosts: dict[int, Ghost] = {}
        self._of_meta: dict[int, Ghost] = {}
        self._made: list[weakref.ref[Ghost]] = []
        #: By meta storage: where the memory begins that views share.
        self._addresses: dict[int, int] = {}
        self._seen: list[_Seen] = []
        self._muted = False
        #: A tensor that was not among the arguments belongs to a graph of the user's.
        self._met_graph = False
        #: Why the rest could not be followed; None where it was to the end.
        self.stopped: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import Dynamo at the first call, only to tell it to stay away.
        return False

    supports_higher_order_operators = True

    # ------------------------------------------------------------------ running

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Call a function with ghosts for tensors; returns what it returned.

        `stopped` says afterwards whether it came to its end.

        Raises:
            GhostError: a tensor among the arguments is of a kind that has no ghost.
            Exception: whatever the function itself raises.
        """
        with _disable_current_modes():
            args, kwargs = self._imagined((tuple(args), dict(kwargs)))
        return self._run(lambda: function(*args, **kwargs))

    def run_backward(self, outputs: Any) -> bool:
        """Differentiate what :meth:`run` returned; whether there was anything to differentiate."""
        ends = [t for t in pytree.tree_leaves(outputs) if _is_differentiable(t)]
        tensors = (ghost.stands_for if seen else ghost for ghost, seen in self._inputs())
        starts = [t for t in tensors if t is not None and t.requires_grad]
        if not ends or not starts:
            return False
        with _disable_current_modes():
            grads = [self._ghost_of_meta(torch.empty_like(_meta(t)), t.device) for t in ends]
        try:
            self._run(lambda: torch.autograd.grad(ends, starts, grads, allow_unused=True))
        except (
            Exception
        ) as error:  # a hook's, or of a graph that has to be differentiated otherwise
            self.stopped = f"its backward raises {type(error).__name__}: {error}"
        return True

    def _inputs(self) -> Iterator[tuple[Ghost, bool]]:
        """The ghosts of tensors, and whether the function met the tensor itself, not the ghost."""
        captured = {id(seen.tensor) for seen in self._seen}
        for ghost in self._ghosts.values():
            yield ghost, id(ghost.stands_for) in captured

    def _run(self, function: Callable[[], Any]) -> Any:
        try:
            with _disable_current_modes(), _eager(), _no_autocast_cache(), self:
                return function()
        except Stopped as stopped:
            self.stopped = str(stopped)
            return None
        except (RuntimeError, GhostError) as error:
            if not isinstance(error, GhostError) and not any(
                sign in str(error) for sign in _MEMORY_WANTED
            ):
                raise
            self.stopped = f"it wants a tensor's memory ({str(error).splitlines()[0]})"
            return None
        finally:
            for seen in self._seen:
                seen.put_back()

    def let_go(self) -> int:
        """Forget every ghost; returns how many somebody else has kept."""
        self._ghosts.clear()
        self._of_meta.clear()
        self._seen.clear()
        if any(ref() is not None for ref in self._made):
            gc.collect()
        return sum(ref() is not None for ref in self._made)

    def _imagined(self, values: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self._argument, values)

    def _argument(self, tensor: torch.Tensor) -> torch.Tensor:
        ghost = self._ghost(tensor)
        if ghost.requires_grad and tensor.grad_fn is not None:
            with self._mute(), self:
                return ghost.clone()  # not a leaf either: it may be written to
        return ghost

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
        if not _has_tensors(op):  # what profilers call, say
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            return args[0]  # torch.tensor(...): its values are known
        if func is torch.ops.aten._local_scalar_dense.default and self._is_known(args[0]):
            return func(args[0])
        if self._met_graph and torch._C._current_graph_task_id() != -1:
            raise self._stop(
                "it differentiates into a graph of a tensor that was not among the arguments; give "
                "that tensor as an argument"
            )
        call = op.bind(args, kwargs)
        where = _device(call)
        for argument, value in zip(op.arguments, call.values, strict=True):
            if argument.declares_write:
                self._mind_writing(value, call)
        dispatch_key = str(torch._C._dispatch_key_for_device(where.type))
        taken_apart = self._is_composite(op, dispatch_key)
        if not taken_apart and not self._muted:
            self._on_call(Call(op, tuple(map(_real, call.values))))
        result = None
        if taken_apart or self._is_made_of_others(op, dispatch_key):
            kernel = func.decompose if taken_apart else partial(func._op_dk, _EXPLICIT)
            result = self._look_into(kernel, args, kwargs)
        if result is None:
            result = self._results(call, args, kwargs, where)
        return self._returned(call, result)

    def _is_composite(self, op: Op, dispatch_key: str) -> bool:
        """Whether the op never gets to the key, because others are called in its place."""
        if self._is_overridden(op, dispatch_key) or router.has_own_kernel(op, dispatch_key):
            return False
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return has(op.name, "CompositeImplicitAutograd") and not has(op.name, _EXPLICIT.name)

    def _is_made_of_others(self, op: Op, dispatch_key: str) -> bool:
        """Whether its kernel at the key is one for all backends, which may call other ops."""
        if self._is_overridden(op, dispatch_key) or router.has_own_kernel(op, dispatch_key):
            return False
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        # Those of views make tensors themselves, which would be no ghosts. Those of other libraries
        # are what would run: for all that we know they launch kernels.
        is_view = op.overload.is_view or torch.Tag.inplace_view in op.overload.tags
        is_atens = op.name.startswith("aten::")
        return is_atens and not is_view and has(op.name, _EXPLICIT.name)

    def _look_into(self, kernel: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Run a kernel that calls other ops, on ghosts; None where it does not come to an end."""
        args, kwargs = tuple(map(self._to_ghost, args)), _values(kwargs, self._to_ghost)
        try:
            with self._below():
                result = kernel(*args, **kwargs)
        except (Exception, Stopped):
            # Many such kernels compute something themselves, and find no memory.
            return None
        leaves = pytree.tree_leaves(result)
        plain = any(isinstance(t, torch.Tensor) and not isinstance(t, Ghost) for t in leaves)
        return None if plain else result

    @contextmanager
    def _below(self) -> Iterator[None]:
        """Record further, below autograd and autocast, which have had their turn."""
        with self, torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableAutocast():
            yield

    def _results(self, call: Call, args: Sequence[Any], kwargs: Any, where: torch.device) -> Any:
        """What the op returns, as its meta kernel says."""
        op, tags = call.op, call.op.overload.tags
        if torch.Tag.data_dependent_output in tags:
            raise self._stop(f"{op.name} reads a tensor's values, and the rest depends on it")
        if torch.Tag.dynamic_output_shape in tags:
            raise self._stop(f"the shape of what {op.name} returns depends on values")
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if not op.name.startswith("aten::") and not has(op.name, "Meta"):
            raise self._stop(f"{op.name} has no fake kernel, which would say what it returns")
        # As given, not as bound: a Python number promotes as a number.
        args, kwargs = tuple(map(self._to_meta, args)), _values(kwargs, self._to_meta)
        try:
            result = _META_KERNELS.get(op.name, op.overload)(*args, **kwargs)
        except Exception as error:
            raise self._stop(f"{op.name}: {type(error).__name__}: {error}") from error
        for tensor in pytree.tree_leaves(call.values):
            if isinstance(tensor, torch.Tensor):
                self._follow_shape(tensor, call)

        def wrap(value: torch.Tensor) -> Ghost:
            known = self._of_meta.get(id(value))
            return self._ghost_of_meta(value, where) if known is None else known

        return pytree.tree_map_only(torch.Tensor, wrap, result)

    def _returned(self, call: Call, result: Any) -> Any:
        """What the caller gets: from an op that writes to an argument, that argument."""
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

    # ------------------------------------------------------------------ tensors and ghosts

    def _ghost(self, tensor: torch.Tensor) -> Ghost:
        if isinstance(tensor, Ghost):
            return tensor
        ghost = self._ghosts.get(id(tensor))
        if ghost is None:
            ghost = self._ghosts[id(tensor)] = self._new_ghost(tensor)
        return ghost

    def _new_ghost(self, tensor: torch.Tensor) -> Ghost:
        _check_has_ghost(tensor)
        with _plain():
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
        ghost = Ghost(
            meta,
            tensor.device,
            requires_grad=tensor.requires_grad,
            stands_for=tensor,
            base_address=address,
        )
        self._keep(ghost)
        return ghost

    def _ghost_of_meta(self, meta: torch.Tensor, device: torch.device) -> Ghost:
        address = self._addresses.get(meta.untyped_storage()._cdata, 0)
        ghost = Ghost(meta, device, base_address=address)
        self._keep(ghost)
        return ghost

    def _keep(self, ghost: Ghost) -> None:
        self._of_meta[id(ghost.meta)] = ghost
        self._made.append(weakref.ref(ghost))

    def _to_ghost(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._meet(value)
        return [self._to_ghost(v) for v in value] if isinstance(value, (list, tuple)) else value

    def _to_meta(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._meet(value).meta
        if isinstance(value, (list, tuple)):
            return [self._to_meta(item) for item in value]
        if isinstance(value, torch.device):
            return torch.device("meta")
        return None if isinstance(value, torch.Generator) else value

    def _meet(self, tensor: torch.Tensor) -> Ghost:
        """The ghost of a tensor that came with a call; one of the user's own is minded."""
        known = isinstance(tensor, Ghost) or any(seen.tensor is tensor for seen in self._seen)
        if not known:
            self._seen.append(_Seen(tensor))
            self._met_graph |= tensor.grad_fn is not None
        return self._ghost(tensor)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values can be read here and now: they are in memory, and will be."""
        is_real = not isinstance(tensor, Ghost) and tensor.device.type == "cpu"
        return is_real and not any(s.tensor is tensor and s.written for s in self._seen)

    def _mind_writing(self, value: Any, call: Call) -> None:
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, Ghost):
                self._mind_writing_to(tensor, call)

    def _mind_writing_to(self, tensor: torch.Tensor, call: Call) -> None:
        # Autograd, above, would make the user's own tensor part of a graph of ghosts.
        if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors()):
            raise self._stop(
                f"{call.op.name} writes to a tensor that was not among the arguments, with a "
                "derivative; give that tensor as an argument"
            )
        self._meet(tensor)
        for seen in self._seen:
            seen.written |= seen.tensor is tensor

    def _follow_shape(self, tensor: torch.Tensor, call: Call) -> None:
        """Give a ghost the shape that an op has given it in place (`squeeze_`, `resize_`)."""
        ghost = self._ghost(tensor)
        meta = ghost.meta
        if (ghost.size(), ghost.stride()) == (meta.size(), meta.stride()):
            return
        if ghost is not tensor:
            raise self._stop(
                f"{call.op.name} changes the shape of a tensor that was not among the arguments"
            )
        with torch._C._DisableTorchDispatch():
            ghost.data = Ghost(meta, ghost.device)
        ghost.stands_for = None


composite.register_tracing_mode(Recorder)


class _Seen:
    """A tensor of the user's that the function met, and how to leave it as it was found."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.written = False
        self._version = None if tensor.is_inference() else tensor._version
        self._accumulates = tensor.is_leaf and tensor.requires_grad
        self._grad = tensor.grad if self._accumulates else None

    def put_back(self) -> None:
        # Autograd counts a write that did not happen, and a backward that needs the tensor would
        # refuse to run; or it leaves a ghost as its gradient.
        if self._version is not None and self.tensor._version != self._version:
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self._version,))
        if self._accumulates and self.tensor.grad is not self._grad:
            self.tensor.grad = self._grad


def _norm(input: torch.Tensor, normalized_shape: list[int], *_: Any) -> tuple[torch.Tensor, ...]:
    """What `_fused_rms_norm` returns."""
    dims = len(normalized_shape)
    statistics = (*input.shape[: input.ndim - dims], *(1 for _ in range(dims)))
    wide = torch.promote_types(input.dtype, torch.float32)
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format),
        torch.empty(statistics, dtype=wide, device="meta"),
    )


def _layer_norm(*args: Any) -> tuple[torch.Tensor, ...]:
    out, rstd = _norm(*args)
    return out, torch.empty_like(rstd), rstd


# In place of torch's own, which are made of elementwise ops: the first of those in a process
# imports Dynamo, and norms are what people ask about.
_META_KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_fused_rms_norm": _norm,
    "aten::native_layer_norm": _layer_norm,
}


def _has_tensors(op: Op) -> bool:
    declared = (*(a.kind for a in op.arguments), *(str(r.type) for r in op.returns))
    return any("Tensor" in kind for kind in declared)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, Ghost)
    return tensor.meta


def _real(value: Any) -> Any:
    if isinstance(value, Ghost):
        # A zero tensor is filled in above the backend, a ghost of one has no such key.
        real = value.stands_for
        return value if real is None or real._is_zerotensor() else real
    return [_real(item) for item in value] if isinstance(value, (list, tuple)) else value


def _values(mapping: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
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


def _check_has_ghost(tensor: torch.Tensor) -> None:
    kind = type(tensor)
    own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if own and not isinstance(tensor, FakeTensor):
        what = f"a {kind.__name__}, which does with ops what it wants"
    elif tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        what = f"{tensor.layout}, nested or quantized"
    elif torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        what = "inside vmap or grad"
    elif tensor.requires_grad and not device.is_available(tensor.device.type):
        # torch asks autograd's device for its stream, and ends the process where there is none.
        raise GhostError(
            f"there is no {tensor.device.type} device here, and autograd cannot be followed "
            "without one: leave out requires_grad, or name the op itself, or the backward's"
        )
    else:
        return
    raise GhostError(
        f"opgraft.explain follows a function on dense tensors, and this one is {what}; "
        "opgraft.trace() shows the real call"
    )


@contextmanager
def _plain() -> Iterator[None]:
    """Metadata only: no derivative, whatever the caller has on."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled functions run as they were written: Dynamo would compile the recorder as well."""
    with torch.compiler.set_stance("force_eager") if _dynamo_is_there() else nullcontext():
        yield


def _dynamo_is_there() -> bool:
    return "torch._dynamo" in sys.modules  # else nothing is compiled


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Autocast keeps what it makes of a parameter for the calls that follow: not a ghost."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
