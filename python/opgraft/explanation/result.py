"""What `explain` returns, and how it prints."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from opgraft.base.notebook import TextDisplay
from opgraft.explanation.verdicts import Status, Verdict
from opgraft.registry import Override

#: How many ops without overrides an explanation prints; `others` has all of them.
MAX_OTHERS = 12


@dataclass(frozen=True, repr=False)
class Explanation(TextDisplay):
    """How a call would be routed. Prints as a short report.

    For a call of an op, `dispatch_key`, `verdicts`, `winner` and `native` say it. A call of a
    function, a module or a composite op has no dispatch key. Its `reached` has an explanation for
    each op with overrides that it calls.
    """

    #: The op as torch prints it, or the name of what was called.
    op: str
    dispatch_key: str | None
    #: One for each override of the chain, in the order of asking.
    verdicts: tuple[Verdict, ...] = ()
    #: Where the native kernel was registered; empty if the backend has none.
    native: str = ""
    notes: tuple[str, ...] = ()
    #: The ops with overrides that it calls, in order; calls with equal explanations are one entry.
    reached: tuple[Explanation, ...] = ()
    #: The other ops that it calls, each once; without views.
    others: tuple[str, ...] = ()
    #: How many calls this explains.
    calls: int = 1
    #: Whether it is called in the backward.
    backward: bool = False
    #: Whether the function could be followed to its end; if not, the last note says why.
    complete: bool = True

    @property
    def winner(self) -> Override | None:
        """The override that would run; None for the native kernel, where a condition raises, and
        for any other callable."""
        return next((verdict.override for verdict in self.verdicts if verdict.takes), None)

    @property
    def winners(self) -> tuple[Override, ...]:
        """The overrides that would run: its own, and those of the ops that it reaches."""
        own = () if self.winner is None else (self.winner,)
        return (*own, *(winner for each in self.reached for winner in each.winners))

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
        return {
            "op": self.op,
            "dispatch_key": self.dispatch_key,
            "runs": self._runs(),
            "native": self.native,
            "overrides": [verdict.as_dict() for verdict in self.verdicts],
            "notes": list(self.notes),
            "reached": [each.as_dict() for each in self.reached],
            "others": list(self.others),
            "calls": self.calls,
            "backward": self.backward,
            "complete": self.complete,
        }

    def _runs(self) -> str | None:
        """The override's name or "native"; None where a condition raises, and for a callable that
        is not an op."""
        if self.dispatch_key is None:
            return None
        decisive = self._decisive()
        if decisive is None:
            return "native"
        return decisive.override.name if decisive.takes else None

    def _decisive(self) -> Verdict | None:
        return next((verdict for verdict in self.verdicts if verdict.decides), None)

    def _outcome(self) -> str:
        """What runs, in words."""
        decisive = self._decisive()
        if decisive is None:
            return f"native ({self.native or 'none'})"
        if decisive.takes:
            return f"override {decisive.override.name}"
        return outcome_of_error(decisive.status, decisive.override.name)

    def __str__(self) -> str:
        if self.dispatch_key is None:
            return self._function_text()
        times = f" ({self.calls} calls)" if self.calls > 1 else ""
        when = "backward: " if self.backward else ""
        lines = [f"{when}{self.op} at {self.dispatch_key}{times} -> {self._outcome()}"]
        lines += [f"  {number}. {verdict}" for number, verdict in enumerate(self.verdicts, 1)]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _function_text(self) -> str:
        names = dict.fromkeys(each.op for each in self.reached)
        head = f"{self.op} -> {', '.join(names) or 'no op that has overrides'}"
        lines = [textwrap.indent(str(each), "  ") for each in self.reached]
        if self.others:
            more = len(self.others) - MAX_OTHERS
            shown = ", ".join(self.others[:MAX_OTHERS]) + (f" and {more} more" if more > 0 else "")
            lines.append(f"  {'also ' if self.reached else ''}calls {shown}")
        return "\n".join([head, *lines, *(f"  note: {note}" for note in self.notes)])


def outcome_of_error(status: Status, name: str) -> str:
    """What comes of a call, in words, where the condition of an override raises."""
    known = "an error" if status == "raises" else "not known"
    return f"{known}: the condition of override {name} raises"
