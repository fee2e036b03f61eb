"""Traces an impl into the graph that is being compiled, in place of the op.

The impl may call torch ops and launch Triton kernels, by `torch.library.wrap_triton` or as it does
in eager: a launch while an impl is traced becomes a node of the graph. Inductor then sees what the
impl is made of, fuses its torch ops with what is around them, and launches its kernels itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_leaves

from opgraft.base import imports
from opgraft.errors import ContractError
from opgraft.ops.schema import Call, Op
from opgraft.registry import Override
from opgraft.router import contract, outputs
from opgraft.router.outputs import OpResult


class NotTraceable(Exception):
    """The impl does something that no graph can hold."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[Override] = []


_thread = _Thread()


def is_running(op: Op) -> bool:
    """Whether this thread traces an impl of an op, in which the op means the native one."""
    return any(override.operator is op for override in _thread.running)


def run(override: Override, mode: Any, args: Any, kwargs: Any) -> Any:
    """Trace an impl.

    Args:
        override: whose impl.
        mode: the FunctionalTensorMode that is being traced under.
        args: the call's arguments, FunctionalTensors among them.
        kwargs: its keyword-only ones.

    Returns:
        The impl's result, FunctionalTensors.

    Raises:
        NotTraceable: the call or the impl has what no graph can hold.
        Exception: what the impl raises on tensors that have no values.
    """
    args, kwargs = _filled(override.operator, args, kwargs)
    if override.takes_keyset:
        key = torch._C.DispatchKey.__members__[override.dispatch_key]
        args = (torch._C.DispatchKeySet(key), *args)
    trace_launches()
    _thread.running.append(override)
    try:
        # Below autograd, as in eager: the derivative is the op's.
        with mode, torch._C._AutoDispatchBelowAutograd():
            return override.impl(*args, **kwargs)
    finally:
        _thread.running.pop()


def _filled(op: Op, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All of an op's arguments: torch drops those that equal their default."""
    positional = (*args, *(argument.default for argument in op.positional[len(args) :]))
    named = {argument.name: argument.default for argument in op.keyword_only} | kwargs
    return positional, named


def plain(value: Any) -> Any:
    """What FunctionalTensors wrap: fake tensors."""
    if isinstance(value, FunctionalTensor):
        return torch._from_functional_tensor(value.elem)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def settle(value: Any) -> None:
    """Bring FunctionalTensors up to date: views are behind where their base was written to."""
    for each in tree_leaves(value):
        if isinstance(each, FunctionalTensor):
            torch._sync(each)  # type: ignore[attr-defined]


def check(override: Override, before: Call, now: Call, result: Any) -> None:
    """Refuse a traced result that the op would not have returned.

    Args:
        override: whose impl was traced.
        before: its arguments as they were, as fake tensors.
        now: its arguments as they are: where one was written to, another fake tensor.
        result: what the impl returned.

    Raises:
        ContractError: the number of outputs, or a dtype, device, shape or stride differs, an output
            is an argument's memory, or an argument was written to.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    op = before.op
    if any(one is not other for one, other in zip(before.tensors(), now.tensors(), strict=True)):
        raise ContractError(
            f"{contract.display_name(override)}, traced, wrote to an argument, which the op leaves "
            "as it is: let it work on a copy"
        )
    got = OpResult(op, plain(contract.checked_outputs(override, result)), before.tensors())
    with disable_proxy_modes_tracing():
        expected = op.overload(*before.args, **before.kwargs)
    native = OpResult(op, outputs.as_outputs(op, expected), before.tensors())
    for label, difference in outputs.compare(got, native):
        raise ContractError(
            f"{contract.display_name(override)}, traced, returned {label} {difference}"
        )


# ------------------------------------------------------------------ Triton launches

# What Inductor takes over from a launch; it would drop any other option, and with
# `launch_cooperative_grid` dropped a kernel whose programs wait for one another would never end.
_LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages"})

_patching = threading.Lock()
_is_patched = False


def trace_launches() -> None:
    """From now on a Triton launch by a thread that traces an impl becomes a node of the graph."""
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
        return _node_of(kernel, grid) if _thread.running else getitem(kernel, grid)

    return launcher_of


def _node_of(kernel: Any, grid: Any) -> Callable[..., None]:
    def launch(*args: Any, **kwargs: Any) -> None:
        strange = set(kwargs) - set(kernel.arg_names) - _LAUNCH_OPTIONS
        if strange:
            raise NotTraceable(f"Inductor would drop {', '.join(sorted(strange))} of a launch")
        torch.library.wrap_triton(kernel)[grid](*args, **kwargs)

    return launch
