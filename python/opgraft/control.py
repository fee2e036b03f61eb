"""Enables, disables, lists and bypasses overrides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

from opgraft import router, spelling
from opgraft.errors import RegistrationError
from opgraft.ops.schema import Op, resolve
from opgraft.registry import Override, Rule, Selector, registry, selector_from
from opgraft.router import threads

OpName = str | OpOverload | OpOverloadPacket


def overrides(
    *,
    dsl: str | None = None,
    op: OpName | None = None,
    dispatch_key: str | None = None,
    pack: str | None = None,
    name: str | None = None,
) -> list[Override]:
    """The registered overrides that match every keyword given, chain by chain in order of asking.

    >>> overrides(dsl="no-such-dsl")
    []
    """
    router.withdraw_outdated()
    return registry.overrides(_selector(dsl, op, dispatch_key, pack, name))


def enable(
    *,
    dsl: str | None = None,
    op: OpName | None = None,
    dispatch_key: str | None = None,
    pack: str | None = None,
    name: str | None = None,
) -> None:
    """Enable, process-wide, the overrides that match every keyword given; without keywords, all.

    `enable` and `disable` are ordered rules: for each override, the last rule that matches it wins.
    Overrides that are registered later obey them too.

    >>> disable(dsl="triton"); enable(dsl="triton", op="aten::bmm")  # Triton for bmm only
    >>> enable()
    """
    router.withdraw_outdated()
    selector = _selector(dsl, op, dispatch_key, pack, name)
    spelling.check_selector(selector, "enable")
    registry.add_rule(Rule(True, selector))


def disable(
    *,
    dsl: str | None = None,
    op: OpName | None = None,
    dispatch_key: str | None = None,
    pack: str | None = None,
    name: str | None = None,
) -> None:
    """Disable, process-wide, the overrides that match every keyword given; see :func:`enable`.

    >>> disable(op="aten::bmm", dispatch_key="CPU")
    >>> enable()
    """
    router.withdraw_outdated()
    selector = _selector(dsl, op, dispatch_key, pack, name)
    spelling.check_selector(selector, "disable")
    registry.add_rule(Rule(False, selector))


@contextmanager
def disabled(
    *,
    dsl: str | None = None,
    op: OpName | None = None,
    dispatch_key: str | None = None,
    pack: str | None = None,
    name: str | None = None,
) -> Iterator[None]:
    """A scope in which the overrides that match every keyword given are disabled.

    It applies to this thread, to a backward that is started inside it, and to compiled graphs that
    run inside it. Other threads are not affected. Scopes nest.

    >>> import torch
    >>> with disabled():
    ...     _ = torch.softmax(torch.ones(2, 8), -1)  # PyTorch's own kernel, whatever is registered
    """
    selector = _selector(dsl, op, dispatch_key, pack, name)
    spelling.check_selector(selector, "disabled")
    with threads.scope(selector):
        yield


def native(op: OpName) -> Callable[..., Any]:
    """The native op: a callable that bypasses every override of that op.

    It goes through the dispatcher like any call, so autograd, autocast and the like apply. Only the
    op's own overrides are bypassed. Other ops, also those of its backward, are routed as usual.

    Args:
        op: the op, by the name that torch prints or as `OpOverload`.

    Returns:
        A callable with the op's signature.

    Raises:
        RegistrationError: there is no such op.

    >>> import torch
    >>> native("aten::_softmax")(torch.zeros(2), 0, False)
    tensor([0.5000, 0.5000])
    """
    resolved = resolve(op)

    def call_native(*args: Any, **kwargs: Any) -> Any:
        with threads.bypassing(resolved):
            return resolved.as_returned(resolved.overload(*args, **kwargs))

    call_native.__name__ = call_native.__qualname__ = f"native[{resolved.name}]"
    return call_native


def _selector(
    dsl: str | None,
    op: OpName | None,
    dispatch_key: str | None,
    pack: str | None,
    name: str | None,
) -> Selector:
    given = {"dsl": dsl, "op": op, "dispatch_key": dispatch_key, "pack": pack, "name": name}
    return selector_from(given, normalise_op=_op_name)


def _op_name(op: Any) -> str:
    """An op's printed name; the name itself if the op's library is not loaded yet."""
    if isinstance(op, str) and "::" in op and not op.startswith("aten::"):
        try:
            return resolve(op).name
        except RegistrationError:
            return op
    resolved: Op = resolve(op)
    return resolved.name
