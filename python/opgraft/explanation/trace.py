"""`trace`: where the calls of a program went, why, and how long they took."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from opgraft.base import events
from opgraft.base.notebook import TextDisplay
from opgraft.explanation.op_calls import native_origin
from opgraft.explanation.verdicts import Status, Verdict, judge_overrides, label
from opgraft.ops.schema import Call
from opgraft.registry import Chain, Override, Selector, registry
from opgraft.router import installed, observers

log = logging.getLogger(__name__)

#: How many of the values that a part of a condition saw a trace keeps.
MAX_SAW = 3


@dataclass
class Miss:
    """Calls that an override did not take, for one reason."""

    status: Status
    #: The part of the condition that did not hold, or the reason in words.
    reason: str
    count: int = 0
    #: What that part saw: the first few different values.
    saw: list[str] = field(default_factory=list)
    #: It saw other values as well.
    saw_more: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
        return {
            "status": self.status,
            "reason": self.reason,
            "count": self.count,
            "saw": list(self.saw),
            "saw_more": self.saw_more,
        }

    def __str__(self) -> str:
        more = ", ..." if self.saw_more else ""
        return f"{self.reason} ({_join_values(self.saw)}{more})" if self.saw else self.reason


@dataclass
class OverrideRow:
    """What one override did during a trace."""

    override: Override
    #: Runs of its impl.
    hits: int = 0
    #: Hits that ended in the native kernel.
    fallbacks: int = 0
    #: Wall time of its hits on the host, their routing included.
    seconds: float = 0.0
    misses: list[Miss] = field(default_factory=list)
    #: Errors of its impl after which the native kernel ran, each once.
    errors: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
        return {
            "name": self.override.name,
            "dsl": self.override.dsl,
            "pack": self.override.pack,
            "hits": self.hits,
            "fallbacks": self.fallbacks,
            "seconds": self.seconds,
            "misses": [miss.as_dict() for miss in self.misses],
            "errors": list(self.errors),
        }


@dataclass
class Row:
    """The calls of one op at one dispatch key during a trace."""

    op: str
    dispatch_key: str
    #: Where the native kernel was registered.
    native: str = ""
    calls: int = 0
    #: Calls that no override took.
    native_calls: int = 0
    #: Wall time of those on the host, their routing included.
    native_seconds: float = 0.0
    #: Calls that raised.
    raised: int = 0
    overrides: list[OverrideRow] = field(default_factory=list)

    @property
    def hits(self) -> int:
        """Calls that some override took."""
        return sum(row.hits for row in self.overrides)

    @property
    def seconds(self) -> float:
        """Wall time of all calls on the host; a call inside another one counts in both."""
        return self.native_seconds + sum(row.seconds for row in self.overrides)

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
        return {
            "op": self.op,
            "dispatch_key": self.dispatch_key,
            "calls": self.calls,
            "hits": self.hits,
            "seconds": self.seconds,
            "native": self.native,
            "native_calls": self.native_calls,
            "native_seconds": self.native_seconds,
            "raised": self.raised,
            "overrides": [row.as_dict() for row in self.overrides],
        }


class Trace(TextDisplay):
    """The routing decisions made while it was open. Prints as a table; iterates over rows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], Row] = {}
        self._scope: AbstractContextManager[None] | None = None
        self._opened = 0.0
        #: Wall time between opening and closing.
        self.seconds = 0.0

    def __enter__(self) -> Trace:
        if self._scope is not None:
            raise RuntimeError("this trace is open already: use another one to nest traces")
        self._scope = observers.observing(self._observe)
        self._scope.__enter__()
        self._opened = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.seconds += time.perf_counter() - self._opened
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(kind, error, traceback)
        log.debug("%s", self)
        events.emit("opgraft_trace", self.as_dict)

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row per op and dispatch key that was called and has overrides, most time first."""
        with self._lock:
            return tuple(sorted(self._rows.values(), key=lambda row: -row.seconds))

    @property
    def notes(self) -> tuple[str, ...]:
        """Overrides that no call can reach, because no router is installed for them."""
        return tuple(
            f"{label(override)} of {override.op} at {override.dispatch_key}: {override.why_off()}"
            for override in registry.overrides(Selector())
            if installed(registry.chain(override.operator, override.dispatch_key)) is None
        )

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
        return {
            "seconds": self.seconds,
            "ops": [row.as_dict() for row in self.rows],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return render(self)

    def _observe(
        self, chain: Chain, call: Call, keeps_derivative: bool
    ) -> Callable[[observers.Outcome], None]:
        verdicts = judge_overrides(chain, call, keeps_derivative=keeps_derivative)

        def end(outcome: observers.Outcome) -> None:
            with self._lock:
                self._add_call(chain, verdicts, outcome)

        return end

    def _add_call(
        self, chain: Chain, verdicts: tuple[Verdict, ...], outcome: observers.Outcome
    ) -> None:
        row = self._row(chain)
        row.calls += 1
        row.raised += outcome.raised
        if outcome.ran is None:
            row.native_calls += 1
            row.native_seconds += outcome.seconds
        for verdict in verdicts:
            mine = _override_row(row, verdict.override)
            if verdict.override is outcome.ran:
                mine.hits += 1
                mine.fallbacks += outcome.fell_back
                mine.seconds += outcome.seconds
                if outcome.error is not None and outcome.error not in mine.errors:
                    mine.errors.append(outcome.error)
            else:
                _count_miss(mine, verdict)

    def _row(self, chain: Chain) -> Row:
        key = (chain.op.name, chain.dispatch_key)
        if key not in self._rows:
            self._rows[key] = Row(*key, native=native_origin(chain))
        return self._rows[key]


def trace() -> Trace:
    """Record where the calls inside a `with` go: hits and misses by override, reasons, time.

    A trace records each call that reaches an op with overrides on this thread, in compiled graphs
    too, and in backwards that this thread starts. Calls on other threads are neither recorded nor
    slowed down. Recording makes a call slower, but its recorded time does not contain that. Without
    an open trace there is no cost. Times are wall times on the host, so a GPU kernel may still run
    after them. Traces nest, and each records all calls.

    Returns:
        The trace: print it, iterate over its rows, or take `as_dict()`.

    >>> import torch, opgraft
    >>> from opgraft import when
    >>> def softmax(self, dim, half_to_float):
    ...     weights = (self - self.amax(dim, keepdim=True)).exp()
    ...     return (weights / weights.sum(dim, keepdim=True)).contiguous()
    >>> override = opgraft.register_op_override(
    ...     "aten", "_softmax", "CPU", softmax, cond=when.size("self", -1) >= 8, name="doc"
    ... )
    >>> with trace() as t:
    ...     _ = torch.softmax(torch.zeros(2, 8), -1), torch.softmax(torch.zeros(2, 4), -1)
    >>> row = t.rows[0]
    >>> row.op, row.calls, row.hits, str(row.overrides[0].misses[0])
    ('aten::_softmax', 2, 1, "when.size('self', -1) >= 8 (when.size('self', -1) is 4)")
    >>> override.remove()
    """
    return Trace()


def _override_row(row: Row, override: Override) -> OverrideRow:
    for each in row.overrides:
        if each.override is override:
            return each
    row.overrides.append(OverrideRow(override))
    return row.overrides[-1]


def _count_miss(row: OverrideRow, verdict: Verdict) -> None:
    if verdict.failure is not None:
        reason, saw = verdict.failure.part, verdict.failure.saw
    elif verdict.takes:
        reason, saw = "declined at the last moment", ""
    else:
        reason, saw = verdict.reason.removeprefix("declines: "), ""
    miss = next((m for m in row.misses if (m.status, m.reason) == (verdict.status, reason)), None)
    if miss is None:
        miss = Miss("declines" if verdict.takes else verdict.status, reason)
        row.misses.append(miss)
    miss.count += 1
    if not saw or saw in miss.saw:
        return
    if len(miss.saw) < MAX_SAW:
        miss.saw.append(saw)
    else:
        miss.saw_more = True


def _join_values(saw: list[str]) -> str:
    """The values that a part saw over several calls; the common beginning is printed once.

    >>> _join_values(["when.size('x', 0) is 4", "when.size('x', 0) is 5"])
    "when.size('x', 0) is 4, 5"
    """
    subject, verb, _ = saw[0].partition(" is ")
    if all(each.startswith(subject + verb) and each.count(" is ") == 1 for each in saw):
        return saw[0] + "".join(f", {each.removeprefix(subject + verb)}" for each in saw[1:])
    return "; ".join(saw)


def render(trace: Trace) -> str:
    """A trace as a table in plain text."""
    rows = trace.rows
    calls, hits = sum(row.calls for row in rows), sum(row.hits for row in rows)
    head = f"opgraft trace: {calls} calls of ops with overrides, {hits} taken"
    table = [("", "calls", "host time", "each")]
    for row in rows:
        table += _lines(row)
    widths = [max(len(line[column]) for line in table) for column in (1, 2, 3)]
    first = max(len(line[0]) for line in table if any(line[1:]))
    lines = [head]
    for name, *cells in table if rows else ():
        aligned = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append("  ".join([f"{name:<{first}}", *aligned]).rstrip())
    return "\n".join([*lines, *(f"note: {note}" for note in trace.notes)])


def _lines(row: Row) -> list[tuple[str, str, str, str]]:
    lines = [_line(f"{row.op} at {row.dispatch_key}", row.calls, row.seconds)]
    for each in row.overrides:
        lines.append(_line(f"  {label(each.override)}", each.hits, each.seconds))
        if each.fallbacks:
            why = f", after {'; '.join(each.errors)}" if each.errors else ""
            lines.append((f"    {each.fallbacks} x ended in the native kernel{why}", "", "", ""))
        lines += [(f"    {miss.count} x {_verb(miss)}{miss}", "", "", "") for miss in each.misses]
    lines.append(_line("  native kernel", row.native_calls, row.native_seconds))
    if row.raised:
        lines.append((f"  {row.raised} x raised", "", "", ""))
    return lines


def _verb(miss: Miss) -> str:
    return "declined: " if miss.status == "declines" else ""


def _line(name: str, calls: int, seconds: float) -> tuple[str, str, str, str]:
    times = (_time(seconds), _time(seconds / calls)) if calls else ("", "")
    return (name, str(calls), *times)


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
