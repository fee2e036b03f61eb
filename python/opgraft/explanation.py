"""`explain`: which override would take a call, and why each of the others would not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from opgraft import router
from opgraft.registry import Chain, Override, registry
from opgraft.router import composite, device, dispatcher
from opgraft.router.python import PythonRouter, why_not
from opgraft.schema import Call, resolve


@dataclass(frozen=True)
class Verdict:
    """What one override of the chain would do with the call."""

    override: Override
    takes: bool
    reason: str

    def __str__(self) -> str:
        owner = self.override.pack or "user"
        label = f"{self.override.name} [{self.override.dsl or 'no DSL'}, {owner}]"
        return f"{label}: {'takes it' if self.takes else self.reason}"


@dataclass(frozen=True)
class Explanation:
    """How a call would be routed. Prints as a short report."""

    op: str
    dispatch_key: str | None
    verdicts: tuple[Verdict, ...]
    #: The override that would run; None for the native kernel.
    winner: Override | None
    #: Where the native kernel was registered; empty if the backend has none.
    native: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        runs = (
            f"override {self.winner.name}" if self.winner else f"native ({self.native or 'none'})"
        )
        head = f"{self.op} at {self.dispatch_key or 'no backend'} -> {runs}"
        lines = [f"  {number}. {verdict}" for number, verdict in enumerate(self.verdicts, 1)]
        return "\n".join([head, *lines, *(f"  note: {note}" for note in self.notes)])


def explain(op: str | OpOverload | OpOverloadPacket, /, *args: Any, **kwargs: Any) -> Explanation:
    """Which override would take this call; for each that would not, why. Nothing runs.

    Args:
        op: by the name that torch prints, or as `OpOverload`.
        *args: the op's arguments; FakeTensors do as well.
        **kwargs: the op's keyword arguments.

    Returns:
        The chain in order with a verdict each, the winner, and where the native kernel comes from.

    Raises:
        RegistrationError: there is no such op.
        TypeError: the arguments do not fit its schema.

    >>> import torch
    >>> print(explain("aten::bmm", torch.ones(1, 2, 2), torch.ones(1, 2, 2)))
    aten::bmm at CPU -> native (...)
    """
    resolved = resolve(op)
    call = resolved.bind(args, kwargs)
    key, notes = _dispatch_key(call)
    if key is None:
        return Explanation(resolved.name, None, (), None, "", tuple(notes))
    chain = registry.chain(resolved, key)
    installed = router.installed(chain)
    kept = _kept_by_autograd(installed, call)
    verdicts = _verdicts(chain, call, kept)
    winner = next((verdict.override for verdict in verdicts if verdict.takes), None)
    if installed is None:
        native = dispatcher.top_kernel(resolved, key)
    else:
        native = installed.native.origin
        notes += _shadow(installed, chain)
    return Explanation(resolved.name, key, tuple(verdicts), winner, native, tuple(notes))


def _verdicts(chain: Chain, call: Call, kept: str | None) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for override in chain.members:
        reason = override.why_off() or kept or _decline(override, call)
        if reason is None and any(verdict.takes for verdict in verdicts):
            reason = "would take it, but one before it does"
        verdicts.append(Verdict(override, takes=reason is None, reason=reason or ""))
    return verdicts


def _decline(override: Override, call: Call) -> str | None:
    try:
        decline = why_not(override, call, capturing=device.is_capturing(device.of(call)))
    except Exception as error:  # a condition in Python: what a call would raise, told instead
        return f"its condition raises {type(error).__name__}: {error}"
    if decline is None:
        return None
    if decline.is_miss and (failure := override.declines(call)):
        return f"declines: {failure}"
    return f"declines: {decline.reason}"


def _dispatch_key(call: Call) -> tuple[str | None, list[str]]:
    where = device.of(call)
    if where is None:
        named = call.named.get("device")
        where = torch.device(named) if named is not None else torch.device("cpu")
    if where.type == "meta":
        return None, ["meta tensors have shapes only: no kernel runs, and no override"]
    return str(torch._C._dispatch_key_for_device(where.type)), []


def _kept_by_autograd(installed: PythonRouter | None, call: Call) -> str | None:
    if installed is None or not installed.is_composite or not composite.must_differentiate(call):
        return None
    return f"not asked: the op is {composite.NOTE}"


def _shadow(installed: PythonRouter, chain: Chain) -> list[str]:
    top = dispatcher.top_kernel(chain.op, chain.dispatch_key)
    if dispatcher.is_ours(top):
        return []
    return [f"shadowed by a kernel that was put on top of the overrides later, {top}"]
