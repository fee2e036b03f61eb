"""Compiling and recording ahead of time."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

from opgraft.plan.plans import MAX_ATTEMPTS
from opgraft.registry import Override, Selector, registry
from opgraft.schema import resolve

# Runs in which a call is recorded, if it can be: it is seen once first.
_RUNS = 1 + MAX_ATTEMPTS


@dataclass(frozen=True)
class WarmUp:
    """What a warm-up made. Prints as a short report."""

    #: The overrides that ran, with the hits that they had and the plans that there are now.
    overrides: tuple[tuple[Override, int, str], ...]

    def __str__(self) -> str:
        if not self.overrides:
            return "no override ran"
        return "\n".join(
            f"{override.name}: {hits} hits" + (f"; {plans}" if plans else "")
            for override, hits, plans in self.overrides
        )


def warmup(
    op: str | OpOverload | OpOverloadPacket | Callable[..., Any], /, *args: Any, **kwargs: Any
) -> WarmUp:
    """Compile the kernels of a call ahead, and record its launch plans.

    The call is made a few times, on real tensors: what it returns is thrown away, but an op that
    writes to its arguments does so.

    Args:
        op: by the name that torch prints, as `OpOverload`, or any function that comes to such an
            op, `F.rms_norm` or a module of a model.
        *args: the arguments.
        **kwargs: the keyword arguments.

    Returns:
        The overrides that took the call and those below it, and what plans they have now.

    Raises:
        RegistrationError: there is no such op.

    >>> import torch
    >>> print(warmup(torch.softmax, torch.ones(2, 3), -1))
    no override ran
    """
    is_function = callable(op) and not isinstance(op, (OpOverload, OpOverloadPacket))
    function: Any = op if is_function else resolve(op).overload  # type: ignore[arg-type]
    before = _hits()
    for _ in range(_RUNS):
        function(*args, **kwargs)
    return _report(before)


def warmup_script(path: str | Path, arguments: Sequence[str] = ()) -> WarmUp:
    """Run a script as its own program, to compile the kernels that it needs ahead.

    What it compiles stays in the DSLs' caches on disk, for the next process. Launch plans belong
    to their process, so what is told of them is what a run of the script would have: how many, and
    what cannot be recorded.

    Args:
        path: the script.
        arguments: its command line.

    Returns:
        The overrides that ran.
    """
    argv, path0 = sys.argv, sys.path[0]
    before = _hits()
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[0] = argv, path0
    return _report(before)


def _hits() -> dict[Override, int]:
    return {override: override.hits for override in registry.overrides(Selector())}


def _report(before: dict[Override, int]) -> WarmUp:
    ran = []
    for override, hits in _hits().items():
        if more := hits - before.get(override, 0):
            plans = "" if override.plans is None else override.plans.summary()
            ran.append((override, more, plans))
    return WarmUp(tuple(ran))
