"""`explain`: which override would take a call, and why each of the others would not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from opgraft import router
from opgraft.explanation.verdicts import Verdict, judge
from opgraft.registry import Chain, Override, registry
from opgraft.router import composite, device, dispatcher
from opgraft.router.python import PythonRouter
from opgraft.schema import Call, resolve


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

    def as_dict(self) -> dict[str, Any]:
        """The same for machines: what `json` can write."""
        return {
            "op": self.op,
            "dispatch_key": self.dispatch_key,
            "runs": self.winner.name if self.winner else "native",
            "native": self.native,
            "overrides": [verdict.as_dict() for verdict in self.verdicts],
            "notes": list(self.notes),
        }

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
    verdicts = judge(chain, call, kept=_keeps_its_derivative(installed, call))
    winner = next((verdict.override for verdict in verdicts if verdict.takes), None)
    if installed is not None:
        notes += _shadow(installed, chain)
    native = native_origin(chain)
    return Explanation(resolved.name, key, verdicts, winner, native, tuple(notes))


def native_origin(chain: Chain) -> str:
    """Where the native kernel of a chain's op was registered; empty where there is none."""
    installed = router.installed(chain)
    if installed is None:
        return dispatcher.top_kernel(chain.op, chain.dispatch_key)
    return installed.native.origin


def _dispatch_key(call: Call) -> tuple[str | None, list[str]]:
    where = device.of(call)
    if where is None:
        named = call.named.get("device")
        where = torch.device(named) if named is not None else torch.device("cpu")
    if where.type == "meta":
        return None, ["meta tensors have shapes only: no kernel runs, and no override"]
    return str(torch._C._dispatch_key_for_device(where.type)), []


def _keeps_its_derivative(installed: PythonRouter | None, call: Call) -> bool:
    return installed is not None and installed.is_composite and composite.must_differentiate(call)


def _shadow(installed: PythonRouter, chain: Chain) -> list[str]:
    top = dispatcher.top_kernel(chain.op, chain.dispatch_key)
    if dispatcher.is_ours(top):
        return []
    return [f"shadowed by a kernel that was put on top of the overrides later, {top}"]
