"""Derivatives of overrides' own: `autograd=(setup_context, backward)`.

By default an override sits below autograd, and the op's derivative is ATen's. One that brings its
own derivative needs a kernel at the backend's autograd key, in front of ATen's. A call there that
must be differentiated, and that the override takes, goes through a `torch.autograd.Function`, whose
forward is the op again, below autograd: what runs is routed as any call is. In a graph that is
compiled for all sizes, an override whose condition depends on them leaves the op its derivative.

Forward-mode differentiation keeps the op's own derivative, which is right. Differentiating an
override's backward once more is an error: it may be made of kernels that autograd cannot see into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch._C import DispatchKey
from torch.autograd import forward_ad

from opgraft.core import loader
from opgraft.errors import OpgraftError, RegistrationError
from opgraft.ops.bypass import bypassing
from opgraft.ops.schema import Call, Op
from opgraft.registry import Chain, Override, registry
from opgraft.router import dispatcher, threads
from opgraft.router.composite import AutogradCompanion, needs_grad
from opgraft.router.native import NativeKernel
from opgraft.when import Condition, symbolic
from opgraft.when.compilation import Node, compile_condition

if TYPE_CHECKING:
    from opgraft.core.interface import Core

Autograd = tuple[Callable[..., Any], Callable[..., Any]]

_FUNCTORCH_KEYS = [
    key for name, key in DispatchKey.__members__.items() if name.startswith("FuncTorch")
]
_DYNAMIC_LAYER_KEYS = [
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
]

_installed: dict[tuple[str, str], DerivativeKernel] = {}

#: Told of each chain that is asked whose derivative a call gets: a graph that is being made depends
#: on the answer.
listener: Callable[[Chain], None] | None = None


def check(autograd: object, op: Op) -> None:
    """Refuse a derivative that cannot be called, or that the op cannot have.

    Raises:
        RegistrationError: it says which, and what to do.
    """
    if not (isinstance(autograd, tuple) and len(autograd) == 2 and all(map(callable, autograd))):
        raise RegistrationError(
            f"autograd= for {op.name} must be two functions, (setup_context, backward), as "
            f"torch.library.register_autograd takes them; it is {autograd!r}"
        )
    if op.mutates or any(returned.alias_info is not None for returned in op.returns):
        raise RegistrationError(
            f"autograd= for {op.name}: the op writes to an argument or returns a view of one, and "
            "keeps its own derivative; leave autograd= out"
        )
    lists = [a.name for a in op.arguments if "List[" in a.kind and "Tensor" in a.kind]
    if lists:
        raise RegistrationError(
            f"autograd= for {op.name}: {', '.join(lists)} is a list of tensors, through which "
            "torch.autograd.Function does not differentiate; leave autograd= out"
        )


def install(chain: Chain, companion: AutogradCompanion | None) -> None:
    """Put a kernel for derivatives of overrides' own in front of the op's. Idempotent.

    Args:
        chain: its router is in.
        companion: the kernel in Python, if there is one, that keeps the derivative of a composite
            op. Torch would not let us capture it: while a mode is on, a captured Python kernel
            calls whatever Python kernel was registered last, which is ours.

    Raises:
        RegistrationError: the backend has no autograd key of its own.
    """
    key = (chain.op.name, chain.dispatch_key)
    with dispatcher.lock:
        if key in _installed:
            return
        if f"Autograd{chain.dispatch_key}" not in DispatchKey.__members__:
            raise RegistrationError(
                f"autograd= for {chain.op.name}: {chain.dispatch_key} has no autograd key of its "
                "own; leave autograd= out"
            )
        core = loader.in_use()
        _installed[key] = (
            PythonKernel(chain, companion) if core is None else CompiledKernel(chain, core)
        )
        dispatcher.look_up_anew(chain.op)


def owner(chain: Chain, call: Call) -> Override | None:
    """The override whose own derivative a call gets; None where it gets the op's."""
    installed = _installed.get((chain.op.name, chain.dispatch_key))
    return None if installed is None else installed.owner(call)


class DerivativeKernel:
    """Our kernel at the autograd key of one op's backend."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        #: Weakly: what was removed goes, with all that its impl holds.
        self._functions: WeakKeyDictionary[Override, type[torch.autograd.Function]] = (
            WeakKeyDictionary()
        )

    def owner(self, call: Call) -> Override | None:
        """The override whose own derivative a call gets; None where it gets the op's."""
        if not needs_grad(call) or _is_forward_mode() or threads.is_bypassed(self._chain):
            return None
        if not any(override.autograd for override in self._chain.members):
            return None
        if listener is not None:
            listener(self._chain)
        for override in self._chain.active:
            if not threads.is_off_here(override) and _takes(override, call):
                return override if override.autograd is not None else None
        return None

    def differentiate(self, override: Override, call: Call) -> Any:
        """Run the op with the derivative of `override`."""
        if override not in self._functions:
            self._functions[override] = _function_of(override)
        function = self._functions[override]
        if torch._C._functorch.peek_interpreter_stack() is None:
            result = function.apply(*call.values)
        else:
            from torch._functorch.autograd_function import custom_function_call

            with _at_the_top_of_functorch():
                result = custom_function_call(function, *call.values)
        *outputs, _ = result
        return tuple(outputs) if len(self._chain.op.returns) > 1 else outputs[0]


class PythonKernel(DerivativeKernel):
    """The kernel in Python."""

    def __init__(self, chain: Chain, companion: AutogradCompanion | None) -> None:
        super().__init__(chain)
        key = f"Autograd{chain.dispatch_key}"
        self._native = companion.call if companion else NativeKernel(chain.op, key)
        self._library = dispatcher.register(chain.op, key, self)

    def __call__(self, keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        call = self._chain.op.bind(args, kwargs)
        override = self.owner(call)
        if override is None:
            return self._native(keyset, call)
        return self.differentiate(override, call)


class CompiledKernel(DerivativeKernel):
    """The kernel in C++, which asks Python where an override with a derivative may take a call."""

    def __init__(self, chain: Chain, core: Core) -> None:
        super().__init__(chain)
        schema = chain.op.overload._schema
        self._kernel = core.Derivative(schema.name, schema.overload_name, chain.dispatch_key)
        self._kernel.set_hook(self._own)
        registry.watch(self._follow)

    def _own(self, keyset: torch.DispatchKeySet, values: tuple[Any, ...]) -> Any:
        call = Call(self._chain.op, values)
        override = self.owner(call)
        return NotImplemented if override is None else self.differentiate(override, call)

    def _follow(self, chain: Chain) -> None:
        if chain is not self._chain:
            return
        owners = [override for override in chain.active if override.autograd is not None]
        self._kernel.publish([_compiled_condition(override) for override in owners])


def _compiled_condition(override: Override) -> list[Node] | None:
    if isinstance(override.cond, Condition):
        return compile_condition(override.cond, override.operator)
    return None


def _takes(override: Override, call: Call) -> bool:
    if symbolic.is_symbolic(call):
        # A graph for all sizes: the override's derivative is for those that it takes only.
        return symbolic.of_override(override, call) == symbolic.HOLDS
    try:
        return override.wants(call)
    except Exception:  # routing asks again, below autograd, and raises or falls back
        return False


def _is_forward_mode() -> bool:
    if forward_ad._current_level >= 0:
        return True
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


@contextmanager
def _at_the_top_of_functorch() -> Iterator[None]:
    """Let functorch see a call that comes from inside an op that it is decomposing.

    `torch.softmax` under `torch.func.grad` reaches `_softmax` with functorch's own dispatch keys
    switched off. A `torch.autograd.Function` has to pass all of its levels.
    """
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in _FUNCTORCH_KEYS:
        exclude = exclude.remove(key)
    for key in _DYNAMIC_LAYER_KEYS:
        include = include | torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


# ------------------------------------------------------------------ the autograd function


class _Context:
    """The `ctx` that an author's functions get: the node's own, but for what it saves.

    One tensor more is saved, the last output of the function of :func:`_function_of`; and what is
    saved is read once at most, as whoever packs it (checkpointing, offloading) pays each time.
    """

    def __init__(self, ctx: Any) -> None:
        # All other names are the author's.
        self.__dict__["opgraft state"] = _State(ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(_state(self).ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_state(self).ctx, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_state(self).ctx, name)

    def save_for_backward(self, *tensors: Any) -> None:
        _state(self).to_save = tensors

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return _state(self).saved()[:-1]


class _State:
    """What a :class:`_Context` saves, and has saved: the author's tensors, and the inlet."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.to_save: tuple[Any, ...] = ()
        self._saved: tuple[Any, ...] | None = None

    def save(self, inlet: torch.Tensor) -> None:
        self.ctx.save_for_backward(*self.to_save, inlet)

    def hold(self, inlet: torch.Tensor) -> None:
        self._saved = (*self.to_save, inlet)

    def saved(self) -> tuple[Any, ...]:
        if self._saved is None:
            self._saved = self.ctx.saved_tensors
        return self._saved


def _state(context: _Context) -> _State:
    state: _State = context.__dict__["opgraft state"]
    return state


class _Later:
    """An author's `setup_context` that waits for the backward, and what it is to be called with.

    Inside an op that functorch is in the middle of, no other op can be called at its level. It is
    called at once where it calls none.
    """

    _ATTRIBUTE = "opgraft_later"

    def __init__(self, inputs: tuple[Any, ...], outputs: list[Any]) -> None:
        self._split = len(inputs)
        self._template = [_HERE if _is_tensor(each) else each for each in (*inputs, *outputs)]

    @staticmethod
    def keep(ctx: Any, inputs: tuple[Any, ...], outputs: list[Any], inlet: torch.Tensor) -> None:
        setattr(ctx, _Later._ATTRIBUTE, _Later(inputs, outputs))
        ctx.save_for_backward(*filter(_is_tensor, (*inputs, *outputs)), inlet)

    @staticmethod
    def kept(ctx: Any) -> _Later | None:
        return getattr(ctx, _Later._ATTRIBUTE, None)

    def restore(self, ctx: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], torch.Tensor]:
        *tensors, inlet = ctx.saved_tensors
        remaining = iter(tensors)
        values = [next(remaining) if each is _HERE else each for each in self._template]
        return tuple(values[: self._split]), tuple(values[self._split :]), inlet


_HERE = object()


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_inside_functorch(error: RuntimeError) -> bool:
    """Whether an op failed as functorch is in the middle of another one at the same level."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        and "savedLocalDispatchKeySet" in str(error)
    )


def _function_of(override: Override) -> type[torch.autograd.Function]:
    """The autograd function of an override's own derivative.

    Its last output is an empty tensor, of no use but that autograd goes from it to the function's
    inputs. A gradient that is to be differentiated once more hangs on it, whatever the author keeps
    in `ctx`: see :func:`_not_twice`.
    """
    assert override.autograd is not None
    op = override.operator
    setup_context, backward = override.autograd
    positional = len(op.positional)
    names = [argument.name for argument in op.keyword_only]
    who = f"override {override.name!r} of {override.op} at {override.dispatch_key}"

    def results(outputs: tuple[Any, ...]) -> Any:
        return tuple(outputs) if len(op.returns) > 1 else outputs[0]

    class OwnDerivative(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*values: Any) -> Any:
            rest = dict(zip(names, values[positional:], strict=True))
            result = op.overload(*values[:positional], **rest)
            outputs = result if isinstance(result, tuple) else (result,)
            return (*outputs, _empty_beside(outputs))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            *outputs, inlet = output
            theirs = _Context(ctx)
            try:
                setup_context(theirs, inputs, results(outputs))
            except RuntimeError as error:
                if not _is_inside_functorch(error):
                    raise
                _Later.keep(ctx, inputs, outputs, inlet)
            else:
                _state(theirs).save(inlet)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            theirs = _Context(ctx)
            later = _Later.kept(ctx)
            if later is not None:
                inputs, outputs, inlet = later.restore(ctx)
                setup_context(theirs, inputs, results(outputs))
                _state(theirs).hold(inlet)
            result = backward(theirs, *grads[:-1])
            gradients = result if isinstance(result, tuple) else (result,)
            if len(gradients) != len(op.arguments):
                raise OpgraftError(
                    f"the backward of {who} returned {len(gradients)} gradients; the op has "
                    f"{len(op.arguments)} arguments, and those that have no gradient get None"
                )
            if not torch.is_grad_enabled() and not _is_forward_mode():
                return gradients
            return _not_twice(who, gradients, (*grads[:-1], _state(theirs).saved()[-1]))

    OwnDerivative.__name__ = OwnDerivative.__qualname__ = f"OwnDerivative[{override.name}]"
    return OwnDerivative


def _empty_beside(outputs: tuple[Any, ...]) -> torch.Tensor:
    """An empty tensor of a kind that can have a gradient, on the device of an op's outputs."""
    device = next(each.device for each in outputs if isinstance(each, torch.Tensor))
    with bypassing("aten::empty.memory_format"):
        return torch.empty(0, device=device)


def _not_twice(who: str, gradients: tuple[Any, ...], sources: tuple[Any, ...]) -> tuple[Any, ...]:
    """`gradients`, such that differentiating them is an error.

    Args:
        who: names the override.
        gradients: what its backward returned.
        sources: tensors that autograd goes from to all that the gradients may depend on. Their own
            history is not enough: a kernel made them, or tensors that were detached.
    """
    present = [gradient for gradient in gradients if isinstance(gradient, torch.Tensor)]
    tensors = [*present, *(each for each in sources if isinstance(each, torch.Tensor))]
    closed = iter(_Once.apply(who, len(present), *tensors))
    return tuple(next(closed) if isinstance(g, torch.Tensor) else g for g in gradients)


class _Once(torch.autograd.Function):
    """Hands its first tensors on, and refuses to be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(who: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.who = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _unknown(ctx.who)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _unknown(ctx.who)


def _unknown(who: str) -> OpgraftError:
    return OpgraftError(
        f"the derivative of the backward of {who} is not known: its autograd= says how to "
        "differentiate once; switch the override off (opgraft.disabled) to differentiate twice"
    )
