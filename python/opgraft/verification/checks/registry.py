"""Which checks there are: each says on which samples it runs, and whether only when asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from opgraft.verification.observation import Observation

Function = Callable[[Observation], None]
#: On every sample, on one sample of each dtype that it takes, on one sample in all.
Scope = Literal["each", "some", "once"]


@dataclass(frozen=True)
class Check:
    """One check: a function of an observed call.

    It returns where the call is as it should be, and raises :class:`Failed` with what is wrong or
    :class:`NotApplicable` with why it says nothing here.
    """

    name: str
    function: Function
    scope: Scope
    #: Seconds each: only when asked for.
    slow: bool

    def __call__(self, seen: Observation) -> None:
        self.function(seen)


#: By name, in the order in which they run.
CHECKS: dict[str, Check] = {}


def check(scope: Scope, *, slow: bool = False) -> Callable[[Function], Function]:
    """Register a function `check_NAME` as the check `NAME`."""

    def register(function: Function) -> Function:
        name = function.__name__.removeprefix("check_")
        CHECKS[name] = Check(name, function, scope, slow)
        return function

    return register
