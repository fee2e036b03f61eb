"""Compiling and recording ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

from opgraft.base.notebook import TextDisplay
from opgraft.ops.schema import resolve
from opgraft.plan.plans import MAX_ATTEMPTS
from opgraft.ready.readiness import State, compiling_ahead, when_not_ready
from opgraft.registry import Override, Selector, registry

# Runs that record a call, if that is possible. The first run only notes its key.
_RUNS = 1 + MAX_ATTEMPTS


@dataclass(frozen=True)
class Warmed:
    """An override that ran during a warm-up."""

    override: Override
    #: Runs of it during the warm-up.
    hits: int

    @property
    def states(self) -> list[State]:
        """What became of each kind of call that waited for no kernel."""
        plans = self.override.plans
        return [] if plans is None else plans.readiness.states()

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
        override = self.override
        return {
            "name": override.name,
            "op": override.op,
            "dispatch_key": override.dispatch_key,
            "dsl": override.dsl,
            "pack": override.pack,
            "hits": self.hits,
            "plans": None if override.plans is None else override.plans.as_dict(),
        }

    def __str__(self) -> str:
        plans = self.override.plans
        tail = "no launch plans" if plans is None else plans.summary()
        return f"{self.override.name}: {self.hits} hits; {tail}"


class WarmUp(TextDisplay):
    """The overrides that ran during a warm-up. Prints as a short report, and is iterable."""

    def __init__(self) -> None:
        self.overrides: tuple[Warmed, ...] = ()

    def __iter__(self) -> Iterator[Warmed]:
        return iter(self.overrides)

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
        return {"overrides": [each.as_dict() for each in self.overrides]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.overrides)) or "no override ran"


def warmup(
    op: str | OpOverload | OpOverloadPacket | Callable[..., Any], /, *args: Any, **kwargs: Any
) -> WarmUp:
    """Compile the kernels of a call ahead, and record its launch plans.

    The call is made a few times, on real tensors. Its results are discarded. An op that writes to
    its arguments does so.

    Args:
        op: its name as torch prints it, an `OpOverload`, or any function that calls such an op,
            such as `F.rms_norm` or a module.
        *args: the arguments.
        **kwargs: the keyword arguments.

    Returns:
        The overrides that took the call or calls inside it, and their plans.

    Raises:
        RegistrationError: there is no such op.

    >>> import torch
    >>> print(warmup(torch.softmax, torch.ones(2, 3), -1))
    no override ran
    """
    is_function = callable(op) and not isinstance(op, (OpOverload, OpOverloadPacket))
    function: Any = op if is_function else resolve(op).overload  # type: ignore[arg-type]
    with watching() as report:
        for _ in range(_RUNS):
            function(*args, **kwargs)
    return report


@contextmanager
def watching(*, in_parallel: bool = False) -> Iterator[WarmUp]:
    """Collect the overrides that run inside the context; the report is complete at its end.

    Args:
        in_parallel: whether workers compile for several calls at a time, while native serves them
            and after the context has ended. If not, each call waits until its kernels are compiled.
    """
    before = _hits()
    report = WarmUp()
    try:
        with compiling_ahead() if in_parallel else when_not_ready("wait"):
            yield report
    finally:
        report.overrides = tuple(
            Warmed(override, more)
            for override, hits in _hits().items()
            if (more := hits - before.get(override, 0)) or _was_asked(override)
        )


def _was_asked(override: Override) -> bool:
    return override.plans is not None and bool(override.plans.readiness.states())


def _hits() -> dict[Override, int]:
    return {override: override.hits for override in registry.overrides(Selector())}
