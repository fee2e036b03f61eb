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
from typing import Any

import torch
from torch._C import DispatchKey
from torch.autograd import forward_ad

from opgraft import _core, symbolic
from opgraft.errors import OpgraftError, RegistrationError
from opgraft.program import Node, compile_condition
from opgraft.registry import Chain, Override, registry
from opgraft.router import dispatcher, threads
from opgraft.router.composite import AutogradCompanion, needs_grad
from opgraft.router.native import NativeKernel
from opgraft.schema import Call, Op
from opgraft.when import Condition

Autograd = tuple[Callable[..., Any], Callable[..., Any]]

_FUNCTORCH_KEYS = [
    key for name, key in DispatchKey.__members__.items() if name.startswith("FuncTorch")
]
_DYNAMIC_LAYER_KEYS = [
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
]

_installed: dict[tuple[str, str], DerivativeKernel] = {}


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
        core = _core.in_use()
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
        self._functions: dict[Override, type[torch.autograd.Function]] = {}

    def owner(self, call: Call) -> Override | None:
        """The override whose own derivative a call gets; None where it gets the op's."""
        if not needs_grad(call) or _is_forward_mode() or threads.is_bypassed(self._chain):
            return None
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
            return function.apply(*call.values)
        from torch._functorch.autograd_function import custom_function_call

        with _at_the_top_of_functorch():
            return custom_function_call(function, *call.values)


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

    def __init__(self, chain: Chain, core: Any) -> None:
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


def _function_of(override: Override) -> type[torch.autograd.Function]:
    assert override.autograd is not None
    op = override.operator
    setup_context, backward = override.autograd
    positional = len(op.positional)
    names = [argument.name for argument in op.keyword_only]
    who = f"override {override.name!r} of {override.op} at {override.dispatch_key}"

    class OwnDerivative(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*values: Any) -> Any:
            rest = dict(zip(names, values[positional:], strict=True))
            return op.overload(*values[:positional], **rest)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            setup_context(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            result = backward(ctx, *grads)
            gradients = result if isinstance(result, tuple) else (result,)
            if len(gradients) != len(op.arguments):
                raise OpgraftError(
                    f"the backward of {who} returned {len(gradients)} gradients; the op has "
                    f"{len(op.arguments)} arguments, and those that have no gradient get None"
                )
            return _not_twice(who, gradients, (*grads, *ctx.saved_tensors, *vars(ctx).values()))

    OwnDerivative.__name__ = OwnDerivative.__qualname__ = f"OwnDerivative[{override.name}]"
    return OwnDerivative


def _not_twice(who: str, gradients: tuple[Any, ...], sources: tuple[Any, ...]) -> tuple[Any, ...]:
    """`gradients`, such that differentiating them is an error.

    Args:
        who: names the override.
        gradients: what its backward returned.
        sources: what they were computed from; some of it may have been done by a kernel that
            autograd did not see.
    """
    present = [gradient for gradient in gradients if isinstance(gradient, torch.Tensor)]
    tensors = [*present, *(each for each in sources if isinstance(each, torch.Tensor))]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return gradients
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
        raise OpgraftError(
            f"the derivative of the backward of {ctx.who} is not known: its autograd= says how to "
            "differentiate once; switch the override off (opgraft.disabled) to differentiate twice"
        )
