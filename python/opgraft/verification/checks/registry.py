"""Which checks there are: each says on which samples it runs, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from opgraft.verification.observation import Observation

Function = Callable[[Observation], None]
#: On every sample, on one sample of each dtype that it takes, on one sample in all.
Scope = Literal["each", "some", "once"]
#: What one run costs: a few calls of the op, or seconds; that is paid only when asked for.
Cost = Literal["calls", "seconds"]


@dataclass(frozen=True)
class Check:
    """One check: a function of an observed call.

    It returns where the call is as it should be, and raises :class:`Failed` with what is wrong or
    :class:`NotApplicable` with why it says nothing here.
    """

    name: str
    function: Function
    scope: Scope
    cost: Cost
    #: Whether it has something to say about a call that the override takes; None: about any.
    suits: Callable[[Observation], bool] | None

    def __call__(self, seen: Observation) -> None:
        self.function(seen)


#: By name, in the order in which they run.
CHECKS: dict[str, Check] = {}


def check(
    scope: Scope,
    *,
    cost: Cost = "calls",
    suits: Callable[[Observation], bool] | None = None,
) -> Callable[[Function], Function]:
    """Register a function `check_NAME` as the check `NAME`.

    Args:
        scope: on which samples it runs.
        cost: what one run costs.
        suits: prefers samples about which it has something to say.
    """

    def register(function: Function) -> Function:
        name = function.__name__.removeprefix("check_")
        if name in CHECKS:
            raise ValueError(f"there is a check {name!r} already, {CHECKS[name].function}")
        CHECKS[name] = Check(name, function, scope, cost, suits)
        return function

    return register
