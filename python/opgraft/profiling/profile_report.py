"""The report of a profile: a line for each kind of call, and what would be gained at the limit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opgraft.profiling.attribution import NATIVE, Group
from opgraft.profiling.limits import Limits
from opgraft.profiling.work import Work

#: The share of the limit that a good kernel reaches. Gains are computed for it.
REACHABLE = 0.9
#: The version of the JSON. It increases when a key changes its meaning or is removed.
VERSION = 1


@dataclass
class Line:
    """The calls of one op on inputs of one kind that went the same way.

    Attributes:
        op: the op's name, or that of a kernel that was launched outside any op.
        inputs: dtypes and sizes of its tensors.
        taken_by: the override that ran, or "native"; empty for a kernel outside any op.
        count: how many calls there were.
        seconds: the time of its kernels; on the CPU, of the op without the ops that it called.
        share: the share of the time of all lines.
        bytes: the bytes that the calls had to move; None where they are not known.
        flops: the flops that they had to compute; None where torch does not count them.
        limit_seconds: the least time that the device needs for them; None where it is not known.
        reasons: why overrides did not take calls, each with the number of calls.
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
        """The limit's time over the time that was taken: 1 is as fast as the device can be."""
        if self.limit_seconds is None or not self.limit_seconds or not self.seconds:
            return None
        return self.limit_seconds / self.seconds

    @property
    def gain_seconds(self) -> float:
        """The time that would be saved if it were at `REACHABLE` of the limit."""
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
        """The same as a dict that `json` can write."""
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
    """What the program would gain if all calls of an op were at `REACHABLE` of the limit."""

    op: str
    seconds: float
    #: The share of the time of all lines.
    share: float

    @property
    def speedup(self) -> float:
        """How many times as fast the device would finish."""
        return 1 / (1 - self.share) if self.share < 1 else float("inf")

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
        return {
            "op": self.op,
            "seconds": self.seconds,
            "share": self.share,
            "speedup": self.speedup,
        }


@dataclass
class ProfileReport:
    """A profile's lines, most time first, and their totals.

    Attributes:
        lines: one for each kind of call.
        time: what the times are of: "GPU" where kernels ran on one, else "CPU".
        steps: how many steps were recorded.
        wall_seconds: the time from the first to the last recorded event.
        busy_seconds: how much of that the device ran something.
        limits: the limits of the device.
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
        """The gain of each op, largest first."""
        saved: dict[str, float] = defaultdict(float)
        for line in self.lines:
            saved[line.op] += line.gain_seconds
        total = self.seconds
        found = [Gain(op, each, each / total) for op, each in saved.items() if each > 0]
        return sorted(found, key=lambda gain: -gain.seconds)

    @property
    def whole_gain(self) -> Gain:
        """The gain of all ops together."""
        saved = sum(line.gain_seconds for line in self.lines)
        return Gain("all of them", saved, saved / self.seconds if self.lines else 0.0)

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
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
    times = [_limit_seconds(work, limits) for work in group.work]
    if None in times:
        line.note = "this device's product of its dtype could not be measured"
        return line
    line.limit_seconds = sum(
        (each or 0.0) * count for each, count in zip(times, group.work.values(), strict=True)
    )
    return line


def _limit_seconds(work: Work, limits: Limits) -> float | None:
    """The least time that the device needs for one call; None where it is not known."""
    moving = limits.seconds_to_move(work.bytes) if work.bytes else 0.0
    if not work.flops or work.dtype is None:
        return moving
    rate = limits.flops_per_second(work.dtype)
    return None if rate is None else max(moving, work.flops / rate)


HEADINGS = (
    *("op", "inputs", "taken by", "calls", "time", "share", "bytes", "flops", "of limit", "note"),
)


def cells(line: Line, steps: int) -> list[str]:
    """A line as text, with the numbers of one step."""
    share = line.share_of_limit
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
        "" if share is None else f"{share:.2f}",
        "; ".join(note for note in notes if note),
    ]


def head(report: ProfileReport) -> list[str]:
    """The lines above the table."""
    steps = report.steps
    total = sum(line.count for line in report.lines)
    per_step = f"; {steps} steps, and each number is for one step" if steps > 1 else ""
    lines = [
        f"opgraft profile: {time_text(report.seconds / steps)} of {report.time} time in "
        f"{total / steps:.6g} calls on {report.limits.device}{per_step}"
    ]
    if report.time == "GPU" and report.wall_seconds:
        busy = report.busy_seconds / report.wall_seconds
        lines.append(f"The GPU was busy for {busy:.0%} of {time_text(report.wall_seconds)}.")
    return lines


def tail(report: ProfileReport, most: int = 10) -> list[str]:
    """The lines below the table: what would be gained."""
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


def table(report: ProfileReport, rows: int | None = 30) -> str:
    """The report as plain text.

    Args:
        rows: how many lines to show; None for all.
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


def rest_text(report: ProfileReport, shown: int) -> str:
    """A summary of the lines that are not shown."""
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
