"""What a profile says: a line for each kind of call, and what would be gained at the limit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opgraft.profiling.attribution import NATIVE, Group
from opgraft.profiling.limits import Limits
from opgraft.profiling.work import Work

#: The share of the limit that a good kernel gets to, which gains are told for.
REACHABLE = 0.9
#: Of the JSON. It counts up where a name in it changes its meaning or goes.
VERSION = 1


@dataclass
class Line:
    """The calls of one op on inputs of one kind that went the same way.

    Attributes:
        op: its name, or that of a kernel that was launched outside any op.
        inputs: dtypes and sizes of its tensors.
        taken_by: the override that ran, or "native"; empty where that is no op.
        count: how many calls there were.
        seconds: the time of its kernels, or on the CPU of the op without those that it called.
        share: of the time of all lines.
        bytes: what the calls had to move; None where that is not known.
        flops: what they had to compute; None where torch does not count it.
        limit_seconds: how long the device needs for that at least; None where it is not known.
        reasons: why overrides did not take calls, with how many calls.
        fell_back: hits that ended in the native kernel.
        note: why something is not known.
    """

    op: str
    inputs: str
    taken_by: str
    count: int
    seconds: float
    share: float = 0.0
    bytes: int | None = None
    flops: int | None = None
    limit_seconds: float | None = None
    reasons: list[dict[str, Any]] = field(default_factory=list)
    fell_back: int = 0
    note: str = ""

    @property
    def share_of_limit(self) -> float | None:
        """How near it is to what the device can do: 1 is as fast as that."""
        if self.limit_seconds is None or not self.limit_seconds or not self.seconds:
            return None
        return self.limit_seconds / self.seconds

    @property
    def gain_seconds(self) -> float:
        """What would be saved if it were at `REACHABLE` of the limit."""
        if not self.limit_seconds:
            return 0.0
        return max(self.seconds - self.limit_seconds / REACHABLE, 0.0)

    @property
    def why_not(self) -> str:
        """Why overrides did not take calls, in words."""
        return "; ".join(
            f"{each['override']}: {each['reason']}"
            + (f" ({each['count']} x)" if each["count"] != self.count else "")
            for each in self.reasons
        )

    def as_dict(self) -> dict[str, Any]:
        """The same for machines: what `json` can write."""
        return {
            "op": self.op,
            "inputs": self.inputs,
            "taken_by": self.taken_by or None,
            "count": self.count,
            "seconds": self.seconds,
            "share": self.share,
            "bytes": self.bytes,
            "flops": self.flops,
            "limit_seconds": self.limit_seconds,
            "share_of_limit": self.share_of_limit,
            "gain_seconds": self.gain_seconds,
            "reasons": [dict(each) for each in self.reasons],
            "fell_back": self.fell_back,
            "note": self.note or None,
        }


@dataclass
class Gain:
    """What the program would gain if an op's calls were all at `REACHABLE` of the limit."""

    op: str
    seconds: float
    #: Of the time of all lines.
    share: float

    @property
    def speedup(self) -> float:
        """How many times as fast the device would be done."""
        return 1 / (1 - self.share) if self.share < 1 else float("inf")

    def as_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "op": self.op,
            "seconds": self.seconds,
            "share": self.share,
            "speedup": self.speedup,
        }


@dataclass
class Report:
    """A profile's lines, most time first, and what they add up to.

    Attributes:
        lines: of each kind of call.
        time: "GPU" where kernels ran, else "CPU".
        steps: how many steps were recorded.
        wall_seconds: from the first to the last thing that was recorded.
        busy_seconds: of these, how long the device ran something.
        limits: of the device.
        notes: what a reader must know.
    """

    lines: list[Line]
    time: str
    steps: int
    wall_seconds: float
    busy_seconds: float
    limits: Limits
    notes: list[str]

    @property
    def seconds(self) -> float:
        """The time of all lines."""
        return sum(line.seconds for line in self.lines)

    @property
    def gains(self) -> list[Gain]:
        """By op, largest first."""
        saved: dict[str, float] = defaultdict(float)
        for line in self.lines:
            saved[line.op] += line.gain_seconds
        total = self.seconds
        found = [Gain(op, each, each / total) for op, each in saved.items() if each > 0]
        return sorted(found, key=lambda gain: -gain.seconds)

    @property
    def whole_gain(self) -> Gain:
        """Of all ops together."""
        saved = sum(line.gain_seconds for line in self.lines)
        return Gain("all of them", saved, saved / self.seconds if self.lines else 0.0)

    def as_dict(self) -> dict[str, Any]:
        """The same for machines: what `json` can write."""
        return {
            "version": VERSION,
            "device": self.limits.device,
            "torch": str(torch.__version__),
            "time": self.time,
            "steps": self.steps,
            "wall_seconds": self.wall_seconds,
            "busy_seconds": self.busy_seconds,
            "seconds": self.seconds,
            "ops": [line.as_dict() for line in self.lines],
            "reachable": REACHABLE,
            "gains": [gain.as_dict() for gain in self.gains],
            "gain": self.whole_gain.as_dict(),
            "limits": self.limits.as_dict(),
            "notes": list(self.notes),
        }


def lines_of(groups: Iterable[Group], limits: Limits) -> list[Line]:
    """A line for each group, most time first."""
    lines = [_line(group, limits) for group in groups]
    total = sum(line.seconds for line in lines)
    for line in lines:
        line.share = line.seconds / total if total else 0.0
    return sorted(lines, key=lambda line: -line.seconds)


def _line(group: Group, limits: Limits) -> Line:
    line = Line(group.op, group.inputs, group.taken_by, group.count, group.seconds)
    line.fell_back = group.fell_back
    line.reasons = [
        {
            "override": each.override,
            "pack": each.pack,
            "status": each.status,
            "reason": each.reason,
            "count": count,
        }
        for each, count in group.reasons.most_common()
    ]
    flops = [work.flops * count for work, count in group.work.items() if work.flops is not None]
    line.flops = sum(flops) if flops else None
    if any(work.bytes is None for work in group.work):
        line.note = next(work.reason for work in group.work if work.bytes is None)
        return line
    line.bytes = sum((work.bytes or 0) * count for work, count in group.work.items())
    times = [_least(work, limits) for work in group.work]
    if None in times:
        line.note = "this device's product of its dtype could not be measured"
        return line
    line.limit_seconds = sum(
        (each or 0.0) * count for each, count in zip(times, group.work.values(), strict=True)
    )
    return line


def _least(work: Work, limits: Limits) -> float | None:
    """How long the device needs for one call at least; None where that is not known."""
    moving = limits.seconds_to_move(work.bytes) if work.bytes else 0.0
    if not work.flops or work.dtype is None:
        return moving
    rate = limits.flops_per_second(work.dtype)
    return None if rate is None else max(moving, work.flops / rate)


HEADINGS = (
    *("op", "inputs", "taken by", "calls", "time", "share", "bytes", "flops", "of limit", "note"),
)


def cells(line: Line, steps: int) -> list[str]:
    """A line as text; its numbers are of one step."""
    near = line.share_of_limit
    notes = [line.why_not, line.note]
    if line.fell_back:
        notes.append(f"{line.fell_back} ended in the native kernel")
    return [
        line.op,
        line.inputs,
        line.taken_by,
        f"{line.count / steps:.4g}",
        time_text(line.seconds / steps),
        f"{line.share:.1%}",
        "?" if line.bytes is None else unit_text(line.bytes / steps, "B") if line.bytes else "",
        unit_text(line.flops / steps, "FLOP") if line.flops else "",
        "" if near is None else f"{near:.2f}",
        "; ".join(note for note in notes if note),
    ]


def head(report: Report) -> list[str]:
    """What stands above the table."""
    steps = report.steps
    total = sum(line.count for line in report.lines)
    per_step = f"; {steps} steps, of which each number is that of one" if steps > 1 else ""
    lines = [
        f"opgraft profile: {time_text(report.seconds / steps)} of {report.time} time in "
        f"{total / steps:.6g} calls on {report.limits.device}{per_step}"
    ]
    if report.time == "GPU" and report.wall_seconds:
        busy = report.busy_seconds / report.wall_seconds
        lines.append(f"The GPU was busy for {busy:.0%} of {time_text(report.wall_seconds)}.")
    return lines


def tail(report: Report, most: int = 10) -> list[str]:
    """What would be gained, below the table."""
    gains, whole = report.gains, report.whole_gain
    if not gains:
        return [f"note: {note}" for note in report.notes]
    steps = report.steps
    lines = [
        f"If each op were at {REACHABLE} of the device's limit, {report.time} time would go down:"
    ]
    rows = [*gains[:most], whole]
    width = max(len(gain.op) for gain in rows)
    for gain in rows:
        lines.append(
            f"  {gain.op:<{width}}  {time_text(gain.seconds / steps):>9}  {gain.share:>6.1%}  "
            f"{gain.speedup:.2f} x as fast"
        )
    return [*lines, *(f"note: {note}" for note in report.notes)]


def table(report: Report, rows: int | None = 30) -> str:
    """The report as plain text.

    Args:
        rows: how many lines of it; None: all.
    """
    shown = report.lines[:rows]
    body = [list(HEADINGS), *(cells(line, report.steps) for line in shown)]
    used = [i for i in range(len(HEADINGS)) if any(row[i] for row in body[1:])]
    widths = {i: max(len(row[i]) for row in body) for i in used}
    lines = head(report)
    for row in body if shown else []:
        lines.append("  ".join(_aligned(row, i, widths[i]) for i in used).rstrip())
    if rest := rest_text(report, len(shown)):
        lines.append(rest)
    return "\n".join([*lines, *tail(report)])


def rest_text(report: Report, shown: int) -> str:
    """What the lines that are not shown come to."""
    rest = report.lines[shown:]
    if not rest:
        return ""
    return f"and {len(rest)} more kinds of call: {sum(line.share for line in rest):.1%}"


def _aligned(row: Sequence[str], index: int, width: int) -> str:
    is_text = HEADINGS[index] in ("op", "inputs", "taken by", "note")
    return f"{row[index]:<{width}}" if is_text else f"{row[index]:>{width}}"


def time_text(seconds: float) -> str:
    """A time as a person reads it.

    >>> time_text(0.0123), time_text(2e-6)
    ('12.30 ms', '2.0 us')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def unit_text(value: float, unit: str) -> str:
    """A number with three digits.

    >>> unit_text(2_147_483_648, "FLOP"), unit_text(512, "B")
    ('2.15 GFLOP', '512 B')
    """
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def is_native(line: Line) -> bool:
    """Whether the native kernel ran."""
    return line.taken_by == NATIVE
