"""Records why overrides did not take a call, as annotations in the profile.

An observer, as `opgraft.trace` uses it, is called in each call of an op with overrides. It writes
the verdicts into the profile as an annotation inside the op, so nothing has to be matched later.
Its own time is in separate ranges, which count for no op. So one run gives times and reasons, and a
program that runs only once can be profiled.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from opgraft.explanation.verdicts import Verdict, judge_overrides
from opgraft.ops.schema import Call
from opgraft.profiling.timeline import ANNOTATION, Node
from opgraft.registry import Chain
from opgraft.router import observers

_NUMBERED = re.compile(re.escape(ANNOTATION) + r" #(?P<number>\d+)")
_FALLBACK_ANNOTATION = f"{ANNOTATION} fell back"


@dataclass(frozen=True)
class Reason:
    """Why an override did not take a call."""

    override: str
    pack: str | None
    status: str
    reason: str


class VerdictRecorder:
    """Records overrides' verdicts on the calls of this thread and of backwards that it starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[tuple[Reason, ...], int] = {}

    def recording(self) -> AbstractContextManager[None]:
        """A scope in which verdicts are written into the profile that is being recorded."""
        return observers.observing(self._observe)

    def reasons(self, node: Node) -> tuple[Reason, ...]:
        """Why overrides did not take the call."""
        for child in node.children:
            if found := _NUMBERED.fullmatch(child.name):
                return tuple(self._numbers)[int(found["number"])]
        return ()

    def _observe(
        self, chain: Chain, call: Call, keeps_derivative: bool
    ) -> Callable[[observers.Outcome], None]:
        with torch.profiler.record_function(ANNOTATION):
            reasons = tuple(
                _reasons(judge_overrides(chain, call, keeps_derivative=keeps_derivative))
            )
            with self._lock:
                number = self._numbers.setdefault(reasons, len(self._numbers))
        with torch.profiler.record_function(f"{ANNOTATION} #{number}"):
            return _end


def _end(outcome: observers.Outcome) -> None:
    if outcome.fell_back:
        with torch.profiler.record_function(_FALLBACK_ANNOTATION):
            pass


def fell_back(node: Node) -> bool:
    """Whether an impl ran and its call ended in the native kernel."""
    return any(child.name == _FALLBACK_ANNOTATION for child in node.children)


def _reasons(verdicts: Iterable[Verdict]) -> Iterable[Reason]:
    for verdict in verdicts:
        if not verdict.takes:
            override = verdict.override
            text = str(verdict.failure) if verdict.failure else verdict.reason
            text = text.removeprefix("declines: ")
            yield Reason(override.name, override.pack, verdict.status, text)
