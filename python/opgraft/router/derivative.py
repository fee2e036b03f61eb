"""Derivatives of overrides: `autograd=(setup_context, backward)`, or `autograd="impl"`.

By default an override is below autograd, and the op keeps ATen's derivative. An override with a
custom derivative needs a kernel at the backend's autograd key, in front of ATen's. (The router of a
composite op is at that key already.) That kernel runs a call that must be differentiated, and that
the override takes, through a `torch.autograd.Function`. The function's forward calls the op again,
below autograd, where it is routed like any call. In a graph that is compiled for all sizes, the op
keeps its own derivative if the override's condition depends on them; in a graph that leaves the op
to the compiler, always. So does a composite op whose pieces somebody must see: a dispatch mode, a
tensor subclass, a functorch transform.

Of a composite op's overrides only those with a derivative, of either kind, are asked for a call
that is differentiated, in the order of the chain. The pairs of functions are asked here, the others
by the router, so this kernel passes a call on to the router where one of the others comes first.

Forward-mode differentiation uses the op's own derivative, which is correct. Double backward is an
error: an override's backward may call kernels that autograd cannot differentiate.

With `"impl"` autograd differentiates the ops that the impl calls, as it does those that a composite
op calls: the router runs the impl at the autograd key (`Router.pending_differentiated` in csrc,
`composite.py` in Python). What is here is needed only for an impl that is traced into graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch._C import DispatchKey
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from opgraft.base import interrupts
from opgraft.core import loader
from opgraft.errors import OpgraftError, RegistrationError
from opgraft.ops.schema import Call, Op
from opgraft.registry import Chain, Override, registry
from opgraft.router import composite, dispatcher, saved_tensors, threads
from opgraft.router.base import Router
from opgraft.router.compiled import CompiledRouter
from opgraft.router.composite import needs_grad
from opgraft.router.decision import MISSES, condition_holds, decide, why_not
from opgraft.router.native import NativeKernel
from opgraft.when import Condition, symbolic
from opgraft.when.compilation import Node, compile_condition

if TYPE_CHECKING:
    from opgraft.core.interface import Core, PlanKey
    from opgraft.router.python import PythonRouter

Autograd = tuple[Callable[..., Any], Callable[..., Any]]

_FUNCTORCH_KEYS = [
    key for name, key in DispatchKey.__members__.items() if name.startswith("FuncTorch")
]
_DYNAMIC_LAYER_KEYS = [
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
]
#: Excluded at a level of functorch, although a call passes them after autograd, or needs them to
#: reach a `__torch_dispatch__`.
_KEYS_BELOW_FUNCTORCH = [
    DispatchKey.Functionalize,
    DispatchKey.Conjugate,
    DispatchKey.Negative,
    DispatchKey.ZeroTensor,
    DispatchKey.PythonTLSSnapshot,
]

_installed: dict[Chain, DerivativeKernel] = {}

#: Called with each chain that decides on the derivative of a call. A graph that is being traced
#: depends on the decision.
listener: Callable[[Chain], None] | None = None
#: Whether a call is being traced into a graph that leaves an override's op to the compiler.
is_left_to_compiler: Callable[[Override, Call], bool] | None = None
#: Traces the impl of one of a composite op's overrides into a graph, for a call that autograd
#: differentiates there. Returns NotImplemented if none is traced.
trace_differentiated: Callable[[Call], Any] | None = None


def check(autograd: object, op: Op, *, launch_plan: bool) -> None:
    """Refuse an invalid `autograd=`, or one for an op that cannot have it.

    Raises:
        RegistrationError: the message says what is wrong, and what to do.
    """
    if autograd == "impl":
        if launch_plan:
            raise RegistrationError(
                f"autograd='impl' for {op.name}: a launch plan replays kernels, and autograd would "
                "not see the ops that the impl calls; give launch_plan=True to overrides of those"
            )
    elif not (isinstance(autograd, tuple) and len(autograd) == 2 and all(map(callable, autograd))):
        raise RegistrationError(
            f"autograd= for {op.name} must be two functions, (setup_context, backward), as "
            "torch.library.register_autograd takes them, or 'impl', for what impl calls to be "
            f"differentiated; it is {autograd!r}"
        )
    if op.mutates or any(returned.alias_info is not None for returned in op.returns):
        raise RegistrationError(
            f"autograd= for {op.name}: the op writes to an argument or returns a view of one, and "
            "keeps its own derivative; leave autograd= out"
        )
    lists = [a.name for a in op.arguments if "List[" in a.kind and "Tensor" in a.kind]
    if lists and autograd != "impl":
        raise RegistrationError(
            f"autograd= for {op.name}: {', '.join(lists)} is a list of tensors, through which "
            "torch.autograd.Function does not differentiate; leave autograd= out"
        )


def check_composite(router: Router) -> None:
    """Refuse `autograd="impl"` for an op that is not composite at a router's key.

    Raises:
        RegistrationError: it is not.
    """
    if not router.is_composite:
        op, key = router.chain.op.name, router.chain.dispatch_key
        raise RegistrationError(
            f"autograd='impl' for {op}: the op is not composite at {key}, so its impl runs below "
            "autograd, which does not see what it calls; give two functions, (setup_context, "
            "backward), or leave autograd= out to keep the op's own derivative"
        )


def install(router: Router) -> None:
    """Let a router's chain have custom derivatives. Idempotent.

    That registers a kernel in front of the op's autograd kernel. For a composite op in the core it
    does not: the dispatcher, which threads may be using, stays as it is.

    Args:
        router: the chain's installed router.

    Raises:
        RegistrationError: the backend has no autograd key of its own.
    """
    chain = router.chain
    with dispatcher.lock:
        if chain in _installed:
            return
        if f"Autograd{chain.dispatch_key}" not in DispatchKey.__members__:
            raise RegistrationError(
                f"autograd= for {chain.op.name}: {chain.dispatch_key} has no autograd key of its "
                "own; leave autograd= out"
            )
        if isinstance(router, CompiledRouter):
            core = loader.in_use()
            assert core is not None
            _installed[chain] = CompiledKernel(router, core)
        else:
            from opgraft.router.python import PythonRouter  # few need it

            assert isinstance(router, PythonRouter)
            _installed[chain] = PythonKernel(router)
        dispatcher.clear_dispatch_cache(chain.op)


def uninstall(chain: Chain) -> None:
    """Forget a chain whose router is deregistered."""
    _installed.pop(chain, None)


def differentiating_override(chain: Chain, call: Call) -> Override | None:
    """The override whose custom derivative a call would get; None if it would get the op's.

    Nobody is asked to make kernels ready.
    """
    installed = _installed.get(chain)
    if installed is None:
        return None
    return installed.differentiating_override(
        call, lambda each: _would_be_ready(each, call), runs=False
    )


def _would_be_ready(override: Override, call: Call) -> bool:
    return override.plans is None or override.plans.predict_derivative(call)


def is_traced_in_training(override: Override) -> bool:
    """Whether graphs of calls that autograd differentiates may have an override's impl."""
    return override.is_differentiated and override.compile == "traceable"


class DerivativeKernel:
    """Our kernel for custom derivatives, at the autograd key of an op's backend."""

    def __init__(self, router: Router) -> None:
        self._chain = router.chain
        self._is_composite = router.is_composite
        #: Weak keys: an override that was removed is freed with all that its impl holds.
        self._functions: WeakKeyDictionary[Override, type[torch.autograd.Function]] = (
            WeakKeyDictionary()
        )

    def differentiating_override(
        self,
        call: Call,
        is_ready: Callable[[Override], bool] = lambda override: True,
        *,
        runs: bool = True,
    ) -> Override | None:
        """The override whose custom derivative a call gets; None if it gets another.

        Args:
            call: the call.
            is_ready: whether the kernels of a composite op's override are ready; else the next one
                is asked.
            runs: whether the call runs, so that misses are counted, and that what fails is
                quarantined, or raised.

        Raises:
            Exception: what the condition of a composite op's override raised, if the call runs and
                the override may not fall back.
        """
        if not needs_grad(call) or _is_forward_mode(call) or threads.is_bypassed(self._chain):
            return None
        if not any(override.derivative for override in self._chain.members):
            return None
        if listener is not None:
            listener(self._chain)
        if self._asks_those_with_a_derivative(call):
            return self._first_with_a_derivative(call, is_ready, runs=runs)
        for override in self._chain.active:
            if not threads.is_disabled_here(override) and _takes_call(override, call):
                return override if _differentiates(override, call) else None
        return None

    def _asks_those_with_a_derivative(self, call: Call) -> bool:
        """Whether only overrides with a derivative are asked for a call that is differentiated.

        A graph holds the op, which asks the whole chain when it runs.
        """
        return self._is_composite and not (composite.is_compiling() or symbolic.is_symbolic(call))

    def _first_with_a_derivative(
        self, call: Call, is_ready: Callable[[Override], bool], *, runs: bool
    ) -> Override | None:
        """The first override with a derivative that takes a call; None if that is an "impl".

        Where hooks get what is saved, one that is only quarantined keeps its place: a pair gives
        its derivative, with a native forward. A checkpoint compares what a forward saved, in which
        the impl ran or failed, with what a second one saves.

        Misses of pairs are counted here where no pair is found, and else in its forward.
        """
        keeps_quarantined = saved_tensors.are_hooked()
        declining: list[Override] = []
        for override in self._chain.active:
            if override.autograd is None:
                continue
            obstacle = _obstacle_of(override, call, runs=runs)
            keeps_place = obstacle is None or (
                obstacle == "quarantined" and keeps_quarantined and _takes_call(override, call)
            )
            if keeps_place and override.is_differentiated:
                break  # the router asks it, and those after it
            if keeps_place and (obstacle is not None or is_ready(override)):
                return override
            if obstacle in MISSES and not override.is_differentiated:
                declining.append(override)
        for override in declining if runs else ():
            override.state.misses.add()
        return None

    def _passing_by(self, override: Override, call: Call) -> ExitStack:
        """Have the forward of a call run by `override`, though others may take it there.

        The forward runs below autograd, where overrides without a derivative are asked, too. If
        `override` is quarantined, it is native: another impl may draw other random numbers.
        """
        scopes = ExitStack()
        if self._asks_those_with_a_derivative(call):
            for other, scope in self._others_in_forward(override, call):
                if _obstacle_of(other, call) in (None, "raises"):
                    scopes.enter_context(threads.scope(scope(other)))
        return scopes

    def _others_in_forward(
        self, override: Override, call: Call
    ) -> Iterator[tuple[Override, type[threads.PassedBy]]]:
        """The overrides that a forward may not be run by, and why."""
        is_native = override.state.quarantined and _obstacle_of(override, call) == "quarantined"
        is_before = True
        for other in self._chain.active:
            if other is override:
                is_before = False
            elif is_native:
                yield other, threads.PassedByForNative
            elif is_before and other.autograd is None:
                yield other, threads.PassedBy

    def trace(self, call: Call) -> Any:
        """Trace a call by an override's impl; NotImplemented if no graph is to have one."""
        if trace_differentiated is None or not composite.is_compiling():
            return NotImplemented
        if not any(map(is_traced_in_training, self._chain.active)):
            return NotImplemented
        if not needs_grad(call) or _is_forward_mode(call) or threads.is_bypassed(self._chain):
            return NotImplemented
        return trace_differentiated(call)

    def differentiate(self, override: Override, call: Call) -> Any:
        """Run the op with the derivative of `override`."""
        if override not in self._functions:
            self._functions[override] = _function_of(override)
        function = self._functions[override]
        with self._passing_by(override, call):
            return self._apply(function, call)

    def _apply(self, function: type[torch.autograd.Function], call: Call) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is None:
            # `Function.apply` would bind the values to the forward's signature first. They are all
            # of its arguments already, and each call would inspect the signature anew.
            values = unwrap_dead_wrappers(call.values)
            result = super(torch.autograd.Function, function).apply(*values)  # type: ignore[misc]
        else:
            from torch._functorch.autograd_function import custom_function_call

            with _reentering_functorch():
                result = custom_function_call(function, *call.values)
        *outputs, _ = result
        return tuple(outputs) if len(self._chain.op.returns) > 1 else outputs[0]


class PythonKernel(DerivativeKernel):
    """The kernel in Python."""

    def __init__(self, router: PythonRouter) -> None:
        super().__init__(router)
        chain = router.chain
        key = f"Autograd{chain.dispatch_key}"
        self._router = router
        self._backend = DispatchKey.__members__[chain.dispatch_key]
        # Ours cannot be captured: while a mode is on, a captured Python kernel calls the Python
        # kernel that was registered last, which would be this one.
        composite_kernel = router.composite_kernel
        self._native = composite_kernel.call if composite_kernel else NativeKernel(chain.op, key)
        router.libraries.append(dispatcher.register(chain.op, key, self))

    def __call__(self, keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        result = self._router.result_of_new_op(keyset, args, kwargs)
        if result is not NotImplemented:
            return result
        call = self._chain.op.bind(args, kwargs)
        are_pieces_seen = self._is_composite and (
            composite.interceptor_of(keyset, self._backend) == "other"
        )
        override = None
        if not are_pieces_seen:
            result = self.trace(call)
            if result is not NotImplemented:
                return result
            override = self.differentiating_override(call, runs=not composite.is_explained())
        if override is None:
            return self._native(keyset, call)
        return self.differentiate(override, call)


class CompiledKernel(DerivativeKernel):
    """The kernel in C++. It calls Python if an override with a derivative may take a call."""

    def __init__(self, router: CompiledRouter, core: Core) -> None:
        super().__init__(router)
        if router.is_composite:
            self._kernel = core.Derivative.of_composite(router.handle, self._differentiate)
        else:
            self._kernel = core.Derivative(router.handle)
            self._kernel.set_hook(self._differentiate)

    def _differentiate(
        self, keyset: torch.DispatchKeySet, values: tuple[Any, ...], key: PlanKey | None
    ) -> Any:
        call = Call(self._chain.op, values)
        result = self.trace(call)
        if result is not NotImplemented:
            return result

        def is_ready(override: Override) -> bool:
            plans = override.plans
            if plans is None or not key or plans.may_differentiate(call, keyset, key):
                return True
            override.state.misses.add()
            return False

        runs = not composite.is_explained()
        override = self.differentiating_override(call, is_ready, runs=runs)
        if override is None:
            return NotImplemented
        if not self._is_composite and not is_ready(override):
            return ...  # native kernels alone: the forward may be ready, and the backward not
        return self.differentiate(override, call)

    def publish(self) -> None:
        """Tell the core for which calls an override may have a derivative."""
        active = self._chain.active
        differentiating = [override for override in active if override.derivative is not None]
        self._kernel.publish([_compiled_condition(override) for override in differentiating])


def _publish(chain: Chain) -> None:
    installed = _installed.get(chain)
    if isinstance(installed, CompiledKernel):
        installed.publish()


registry.add_listener(_publish)


def _compiled_condition(override: Override) -> list[Node] | None:
    if isinstance(override.eligible, Condition):
        return compile_condition(override.eligible, override.operator)
    return None


def _takes_call(override: Override, call: Call) -> bool:
    if symbolic.is_symbolic(call):
        # The graph is for all sizes, so the override must take the call whatever they are.
        return symbolic.of_override(override, call) == symbolic.HOLDS
    try:
        return condition_holds(override, call)
    except Exception as error:  # routing evaluates it again, and raises or falls back
        if interrupts.is_interrupt(error):
            raise
        return False


def _obstacle_of(override: Override, call: Call, *, runs: bool = False) -> str | None:
    """What keeps an override from a call that is no part of a graph: the kind of a `Decline`, or
    that its condition "raises"; None if it takes the call.

    `runs`: `on_error` says what comes of a condition that raises. Nobody asks it again.
    """
    try:
        decline = (decide if runs else why_not)(override, call, capturing=False)
    except Exception as error:
        if runs or interrupts.is_interrupt(error):
            raise
        return "raises"
    return None if decline is None else decline.kind


def _differentiates(override: Override, call: Call) -> bool:
    """Whether a call that an override takes gets its derivative."""
    if override.derivative is None:
        return False
    return is_left_to_compiler is None or not is_left_to_compiler(override, call)


def _is_forward_mode(call: Call) -> bool:
    """Whether a call is differentiated forward: by a tangent, or by functorch."""
    return composite.has_tangents(call) or _is_functorch_jvp()


def _is_functorch_jvp() -> bool:
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


@contextmanager
def _reentering_functorch() -> Iterator[None]:
    """Re-enter functorch from inside an op that it is decomposing.

    `torch.softmax` under `torch.func.grad` calls `_softmax` with functorch's dispatch keys
    excluded. A `torch.autograd.Function` has to pass through all of functorch's levels. What is
    called below them is then a call of its own: a native kernel would take a tensor with a
    conjugate bit for one without, if the key that resolves the bit stayed excluded.
    """
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in (*_FUNCTORCH_KEYS, *_KEYS_BELOW_FUNCTORCH):
        exclude = exclude.remove(key)
    for key in _DYNAMIC_LAYER_KEYS:
        include = include | torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


# ------------------------------------------------------------------ the autograd function


class _Context:
    """The `ctx` that an author's functions get: the node's `ctx`, except for saved tensors.

    It saves one more tensor, the last output of the function of :func:`_function_of`. It unpacks
    saved tensors at most once, because hooks (checkpointing, offloading) make each unpacking
    expensive.
    """

    def __init__(self, ctx: Any) -> None:
        # The author may use any other name.
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
    """The tensors of a :class:`_Context`, to save and saved: the author's, and the anchor."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.to_save: tuple[Any, ...] = ()
        self._saved: tuple[Any, ...] | None = None

    def save(self, anchor: torch.Tensor) -> None:
        self.ctx.save_for_backward(*self.to_save, anchor)

    def hold(self, anchor: torch.Tensor) -> None:
        self._saved = (*self.to_save, anchor)

    def saved(self) -> tuple[Any, ...]:
        if self._saved is None:
            self._saved = self.ctx.saved_tensors
        return self._saved


def _state(context: _Context) -> _State:
    state: _State = context.__dict__["opgraft state"]
    return state


class _DeferredSetup:
    """An author's `setup_context` that is deferred to the backward, with its arguments.

    While functorch runs an op, no other op can be called at the same level. So a `setup_context`
    that calls one is deferred. One that calls none runs at once.
    """

    _ATTRIBUTE = "opgraft_deferred_setup"

    def __init__(self, inputs: tuple[Any, ...], outputs: list[Any]) -> None:
        self._split = len(inputs)
        self._template = [
            _TENSOR_SLOT if _is_tensor(each) else each for each in (*inputs, *outputs)
        ]

    @staticmethod
    def store(ctx: Any, inputs: tuple[Any, ...], outputs: list[Any], anchor: torch.Tensor) -> None:
        setattr(ctx, _DeferredSetup._ATTRIBUTE, _DeferredSetup(inputs, outputs))
        ctx.save_for_backward(*filter(_is_tensor, (*inputs, *outputs)), anchor)

    @staticmethod
    def stored(ctx: Any) -> _DeferredSetup | None:
        return getattr(ctx, _DeferredSetup._ATTRIBUTE, None)

    def restore(self, ctx: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], torch.Tensor]:
        *tensors, anchor = ctx.saved_tensors
        remaining = iter(tensors)
        values = [next(remaining) if each is _TENSOR_SLOT else each for each in self._template]
        return tuple(values[: self._split]), tuple(values[self._split :]), anchor


_TENSOR_SLOT = object()


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_inside_functorch(error: RuntimeError) -> bool:
    """Whether an op failed because functorch is running another one at the same level."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        and "savedLocalDispatchKeySet" in str(error)
    )


def _function_of(override: Override) -> type[torch.autograd.Function]:
    """The autograd function of an override's custom derivative.

    Its last output is an empty tensor, the anchor, which connects the backward to the function's
    inputs in the autograd graph, whatever the author saves in `ctx`. So differentiating a gradient
    once more always reaches an error: see :func:`_once_differentiable`.
    """
    assert override.derivative is not None
    op, dispatch_key = override.operator, override.dispatch_key
    setup_context, backward = override.derivative
    positional = len(op.positional)
    names = [argument.name for argument in op.keyword_only]
    display_name = f"override {override.name!r} of {override.op} at {override.dispatch_key}"
    name = override.name

    # Whether its kernels are ready was asked before, for the backward too: the forward must not be
    # native's, and the backward ours.
    core = loader.in_use()
    # Not the override: what this returns is kept for as long as that lives.
    table = None if override.plans is None else override.plans.table

    def run_decided() -> AbstractContextManager[None]:
        return nullcontext() if core is None or table is None else core.RunUnready(table)

    def results(outputs: tuple[Any, ...]) -> Any:
        return tuple(outputs) if len(op.returns) > 1 else outputs[0]

    class OwnDerivative(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*values: Any) -> Any:
            rest = dict(zip(names, values[positional:], strict=True))
            with run_decided(), threads.running_forward(op, dispatch_key):
                result = op.overload(*values[:positional], **rest)
            outputs = result if isinstance(result, tuple) else (result,)
            return (*outputs, _empty_on_device_of(outputs))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            *outputs, anchor = output
            author_ctx = _Context(ctx)
            try:
                setup_context(author_ctx, inputs, results(outputs))
            except RuntimeError as error:
                if not _is_inside_functorch(error):
                    raise
                _DeferredSetup.store(ctx, inputs, outputs, anchor)
            else:
                _state(author_ctx).save(anchor)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            author_ctx = _Context(ctx)
            deferred = _DeferredSetup.stored(ctx)
            if deferred is not None:
                inputs, outputs, anchor = deferred.restore(ctx)
                setup_context(author_ctx, inputs, results(outputs))
                _state(author_ctx).hold(anchor)
            result = backward(author_ctx, *grads[:-1])
            gradients = result if isinstance(result, tuple) else (result,)
            if len(gradients) != len(op.arguments):
                raise OpgraftError(
                    f"the backward of {display_name} returned {len(gradients)} gradients; the op "
                    f"has {len(op.arguments)} arguments, and those that have no gradient get None"
                )
            in_forward_mode = forward_ad._current_level >= 0 or _is_functorch_jvp()
            if not torch.is_grad_enabled() and not in_forward_mode:
                return gradients
            return _once_differentiable(
                _OnceOnly(display_name, name),
                gradients,
                (*grads[:-1], _state(author_ctx).saved()[-1]),
            )

    OwnDerivative.__name__ = OwnDerivative.__qualname__ = f"OwnDerivative[{override.name}]"
    # Torch asks for it in each call, and finds it out again where it is not there.
    forward: Any = OwnDerivative.forward
    forward.__signature__ = inspect.signature(forward)
    return OwnDerivative


def _empty_on_device_of(outputs: tuple[Any, ...]) -> torch.Tensor:
    """An empty floating-point tensor on the device of an op's outputs."""
    device = next(each.device for each in outputs if isinstance(each, torch.Tensor))
    # No override can be of this op.
    return torch.empty(0, device=device)


class _OnceOnly(NamedTuple):
    """An override whose functions say how to differentiate once."""

    display_name: str
    name: str

    def error(self, wish: str) -> OpgraftError:
        """The error of differentiating its backward, in the way that `wish` names."""
        return OpgraftError(
            f"the derivative of the backward of {self.display_name} is not known: its autograd= "
            f"says how to differentiate once. To differentiate {wish}, call the op under "
            f"opgraft.disabled(name={self.name!r}), where it keeps its own derivative"
        )


def _once_differentiable(
    once_only: _OnceOnly, gradients: tuple[Any, ...], sources: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Make differentiating `gradients` an error.

    Args:
        once_only: the override.
        gradients: what the override's backward returned.
        sources: tensors whose autograd graph holds all that the gradients may depend on. The
            gradients' own graph is not enough: kernels, or operations on detached tensors, may have
            computed them.
    """
    present = [gradient for gradient in gradients if isinstance(gradient, torch.Tensor)]
    tensors = [*present, *(each for each in sources if isinstance(each, torch.Tensor))]
    closed = iter(_OnceDifferentiable.apply(once_only, len(present), *tensors))
    return tuple(next(closed) if isinstance(g, torch.Tensor) else g for g in gradients)


class _OnceDifferentiable(torch.autograd.Function):
    """Returns its first tensors, and raises when it is differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        once_only: _OnceOnly, count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.once_only = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ctx.once_only.error("twice")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ctx.once_only.error(
            "the backward in forward mode, as an upstream gradient with a tangent does"
        )
