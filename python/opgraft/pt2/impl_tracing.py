"""Traces an impl into the graph that is being compiled, in place of the op.

The impl may call torch ops and launch Triton kernels, by `torch.library.wrap_triton` or as it does
in eager: a launch while an impl is traced becomes a node of the graph. Inductor then sees the ops
and launches of the impl. It fuses the ops with their neighbours and launches the kernels itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_leaves

from opgraft.base import imports, traced
from opgraft.errors import ContractError
from opgraft.ops.schema import Call, Op
from opgraft.pt2.decomposition import Decomposing
from opgraft.registry import Override
from opgraft.router import contract, outputs
from opgraft.router.outputs import OpResult


class NotTraceable(Exception):
    """The impl does something that no graph can contain."""


def run(override: Override, mode: Any, args: Any, kwargs: Any) -> Any:
    """Trace an impl.

    Args:
        override: the override whose impl is traced.
        mode: the FunctionalTensorMode in which the graph is traced.
        args: the call's positional arguments; its tensors are FunctionalTensors.
        kwargs: its keyword-only arguments.

    Returns:
        The impl's result; its tensors are FunctionalTensors.

    Raises:
        NotTraceable: the impl does something that no graph can contain.
        Exception: what the impl raises on fake tensors.
    """
    args, kwargs = _with_defaults(override.operator, args, kwargs)
    # Below autograd, as in eager: the op's own derivative applies.
    with mode, torch._C._AutoDispatchBelowAutograd():
        return _run(override, args, kwargs)


def run_differentiated(override: Override, call: Call) -> Any:
    """Trace an impl at the autograd key, for autograd to differentiate what it calls.

    Args:
        override: the override whose impl is traced.
        call: its tensors are FunctionalTensors, and the mode in which the graph is traced is on.

    Returns:
        As `run`.

    Raises:
        Exception: as `run`.
    """
    return _run(override, call.args, call.kwargs)


def _run(override: Override, args: Any, kwargs: Any) -> Any:
    if override.takes_keyset:
        key = torch._C.DispatchKey.__members__[override.dispatch_key]
        args = (torch._C.DispatchKeySet(key), *args)
    trace_launches()
    with traced.tracing(override.operator):
        return override.impl(*args, **kwargs)


def _with_defaults(op: Op, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All of an op's arguments: torch leaves out those that equal their default."""
    positional = (*args, *(argument.default for argument in op.positional[len(args) :]))
    named = {argument.name: argument.default for argument in op.keyword_only} | kwargs
    return positional, named


def unwrap_functional(value: Any) -> Any:
    """The fake tensors that FunctionalTensors wrap."""
    if isinstance(value, FunctionalTensor):
        return torch._from_functional_tensor(value.elem)
    if isinstance(value, (list, tuple)):
        return [unwrap_functional(item) for item in value]
    if isinstance(value, dict):
        return {key: unwrap_functional(item) for key, item in value.items()}
    return value


def sync_functional(value: Any) -> None:
    """Bring FunctionalTensors up to date: a write to a base has not reached its views yet."""
    for each in tree_leaves(value):
        if isinstance(each, FunctionalTensor):
            torch._sync(each)  # type: ignore[attr-defined]


@contextmanager
def leaving_arguments(override: Override, before: Call, bind: Callable[[], Call]) -> Iterator[None]:
    """While it is entered, an impl is traced that must not write to the call's arguments.

    One that fails after it wrote would leave what it wrote to whoever runs the call instead.

    Args:
        override: the override whose impl is traced.
        before: its arguments, as fake tensors.
        bind: binds these once more. Of an argument that was written to it is another one.

    Raises:
        ContractError: it wrote to one.
    """
    try:
        yield
    finally:
        pairs = zip(before.tensors(), bind().tensors(), strict=True)
        if any(one is not other for one, other in pairs):
            raise ContractError(
                f"{contract.display_name(override)}, traced, wrote to an argument that the op does "
                "not change: let it work on a copy"
            )


def check_result(override: Override, before: Call, result: Any) -> None:
    """Refuse a traced result that the op would not have returned.

    Args:
        override: the override whose impl was traced.
        before: its arguments before the trace, as fake tensors.
        result: what the impl returned.

    Raises:
        ContractError: the number of outputs, a dtype, device, shape or stride differs, or an output
            shares an argument's memory.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    op = before.op
    got = OpResult(
        op, unwrap_functional(contract.checked_outputs(override, result)), before.tensors()
    )
    with disable_proxy_modes_tracing(), outside_of_graphs(before), Decomposing():
        expected = op.overload(*before.args, **before.kwargs)
        native = OpResult(op, outputs.as_outputs(op, expected), before.tensors())
        # Sizes that are computed from others are in no graph, neither are comparisons of them.
        differences = list(outputs.compare(got, native))
    for label, difference in differences:
        raise ContractError(
            f"{contract.display_name(override)}, traced, returned {label} {difference}"
        )


def check_derivative(override: Override, before: Call, call: Call, result: Any) -> None:
    """Refuse a traced result that has lost a derivative, which the op's has.

    Args:
        override: the override whose impl was traced.
        before: the call's arguments, as fake tensors, of which none requires grad.
        call: the call, of whose tensors some require grad.
        result: what the impl returned.

    Raises:
        ContractError: an output has lost it.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    op = call.op
    returned = OpResult(op, contract.checked_outputs(override, result), call.tensors())
    if all(each.requires_grad for each in returned.tensors()):
        return
    requires_grad = iter([each.requires_grad for each in call.tensors()])

    def stand_in(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().requires_grad_(next(requires_grad))

    given = before.changed(stand_in)
    with disable_proxy_modes_tracing(), outside_of_graphs(before), Decomposing():
        expected = op.overload(*given.args, **given.kwargs)
    native = OpResult(op, outputs.as_outputs(op, expected), given.tensors())
    for (index, item, one), (_, _, other) in zip(returned.flat(), native.flat(), strict=True):
        if isinstance(other, torch.Tensor) and other.requires_grad and not one.requires_grad:
            raise ContractError(
                f"{contract.display_name(override)}, traced, returned "
                f"{outputs.name_of(op, index, item)} without a derivative, native's has one: let "
                "the impl call ops that have derivatives, outside of torch.no_grad()"
            )


def outside_of_graphs(call: Call) -> AbstractContextManager[None]:
    """A scope for a trial of a call that is traced, whose result no graph has.

    Sizes of it that depend on data need not be bound then. Else the compilation would fail for
    them.
    """
    symbols = getattr(detect_fake_mode(list(call.tensors())), "shape_env", None)
    return nullcontext() if symbols is None else symbols.ignore_fresh_unbacked_symbols()


# ------------------------------------------------------------------ Triton launches

# The options that Inductor keeps of a launch. It would drop any other one. Without
# `launch_cooperative_grid`, a kernel whose programs wait for one another would never end.
_LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages"})

_patching = threading.Lock()
_is_patched = False


def trace_launches() -> None:
    """From now on, each Triton launch by a thread that traces an impl becomes a graph node."""
    global _is_patched
    with _patching:
        if not _is_patched:
            _is_patched = True
            imports.after("triton.runtime.jit", _patch)


def _patch(jit: Any) -> None:
    jit.KernelInterface.__getitem__ = _traceable(jit.KernelInterface.__getitem__)


def _traceable(getitem: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @wraps(getitem)
    def launcher_of(kernel: Any, grid: Any) -> Any:
        return _launch_as_node(kernel, grid) if traced.is_traced() else getitem(kernel, grid)

    return launcher_of


def _launch_as_node(kernel: Any, grid: Any) -> Callable[..., None]:
    def launch(*args: Any, **kwargs: Any) -> None:
        known = {*kernel.arg_names, *_LAUNCH_OPTIONS}
        options = {name: value for name, value in kwargs.items() if name not in known}
        if dropped := sorted(_unlike_defaults(options)):
            raise NotTraceable(f"Inductor would drop {', '.join(dropped)} of a launch")
        kept = {name: value for name, value in kwargs.items() if name not in options}
        torch.library.wrap_triton(kernel)[grid](*args, **kept)

    return launch


def _unlike_defaults(options: dict[str, Any]) -> set[str]:
    """The options of a launch whose values are not those that Triton compiles with by itself."""
    if not options:
        return set()
    try:
        defaults = _default_options()
    except Exception:  # Triton has no device to compile for
        return set(options)
    missing = object()
    return {name for name, value in options.items() if getattr(defaults, name, missing) != value}


def _default_options() -> Any:
    from triton.compiler import make_backend
    from triton.runtime import driver

    return make_backend(driver.active.get_current_target()).parse_options({})
