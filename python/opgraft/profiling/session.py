"""`profile`: what a program's ops cost, and how far that is from what the device can do."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerAction

from opgraft.base.notebook import TextDisplay
from opgraft.profiling import attribution, page, report, timeline
from opgraft.profiling.limits import Limits
from opgraft.profiling.report import Gain, Line, Report
from opgraft.profiling.routing import Watch
from opgraft.profiling.timeline import Timeline


class Profile(TextDisplay):
    """What ran while it was open. Prints as a table; iterates over lines, most time first."""

    def __init__(self, *, warmup: int, steps: int | None) -> None:
        if warmup < 0 or (steps is not None and steps < 1):
            raise ValueError("warmup is 0 or more, and steps 1 or more")
        self._warmup = warmup
        self._steps = steps
        self._marked = 0
        self._profiler: torch.profiler.profile | None = None
        self._watch = Watch()
        self._watching: AbstractContextManager[None] | None = None
        self._timeline: Timeline | None = None
        self._recorded = 0
        self._report: Report | None = None

    def __enter__(self) -> Profile:
        if self._profiler is not None:
            raise RuntimeError("this profile was used already: take another one")
        self._profiler = torch.profiler.profile(
            activities=torch.profiler.supported_activities(),
            record_shapes=True,
            schedule=self._action,
            on_trace_ready=self._take,
        )
        self._profiler.start()
        self._watch_if_recording()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_watching()
        if self._profiler is not None:
            self._profiler.stop()

    def step(self) -> None:
        """Say that a step of the program ends here, and the next one begins.

        Raises:
            RuntimeError: the profile is not open.
        """
        if self._profiler is None:
            raise RuntimeError("step() is for a profile that is open: with opgraft.profile() as p")
        self._marked += 1
        if self._action(self._marked) is ProfilerAction.NONE:
            self._stop_watching()
        self._profiler.step()
        self._watch_if_recording()

    def _action(self, step: int) -> ProfilerAction:
        """What torch's profiler does in a step. torch's own `schedule` warns of no warmup."""
        if step < self._warmup:
            return ProfilerAction.WARMUP
        if self._steps is None or step < self._warmup + self._steps - 1:
            return ProfilerAction.RECORD
        return (
            ProfilerAction.RECORD_AND_SAVE
            if step == self._warmup + self._steps - 1
            else ProfilerAction.NONE
        )

    def _watch_if_recording(self) -> None:
        is_recording = self._action(self._marked) in (
            ProfilerAction.RECORD,
            ProfilerAction.RECORD_AND_SAVE,
        )
        if is_recording and self._watching is None:
            self._watching = self._watch.watching()
            self._watching.__enter__()

    def _stop_watching(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.__exit__(None, None, None)

    def _take(self, profiler: torch.profiler.profile) -> None:
        self._timeline = timeline.recorded(profiler)
        # What comes after the last mark is a step only where nothing was marked.
        self._recorded = max(self._marked - self._warmup, 1)

    @property
    def report(self) -> Report:
        """What was recorded, as an object.

        Raises:
            RuntimeError: nothing was recorded.
        """
        if self._report is None:
            if self._timeline is None:
                raise RuntimeError(self._why_empty())
            self._report = _reported(self._timeline, self._watch, self._recorded)
        return self._report

    def _why_empty(self) -> str:
        if self._profiler is None:
            return "nothing was recorded: with opgraft.profile() as p runs what it profiles"
        return (
            f"nothing was recorded: step() was called {self._marked} times, and "
            f"warmup={self._warmup} steps come before those that are; mark more steps, or give a "
            "smaller warmup"
        )

    @property
    def lines(self) -> tuple[Line, ...]:
        """One for each kind of call, most time first."""
        return tuple(self.report.lines)

    @property
    def gains(self) -> tuple[Gain, ...]:
        """What the program would gain if an op were at 0.9 of the limit, largest first."""
        return tuple(self.report.gains)

    def __iter__(self) -> Any:
        return iter(self.lines)

    def table(self, rows: int | None = 30) -> str:
        """The report as plain text.

        Args:
            rows: how many kinds of call are shown, those with most time; None: all.
        """
        return report.table(self.report, rows)

    def as_dict(self) -> dict[str, Any]:
        """The same for machines: what `json` can write. docs/profile.md says what is in it."""
        return self.report.as_dict()

    def as_json(self) -> str:
        """The same as text."""
        return json.dumps(self.as_dict(), indent=2)

    def html(self) -> str:
        """The same as one page that needs nothing else: a plot, and the whole table."""
        return page.document(self.report)

    def save(self, path: str | Path) -> None:
        """Write it to a file: as JSON where that is called `.json`, else as HTML."""
        place = Path(path)
        text = self.as_json() if place.suffix == ".json" else self.html()
        place.write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return page.fragment(self.report)


def _reported(recorded: Timeline, watch: Watch, steps: int) -> Report:
    kernels = list(recorded.kernels)
    where = torch.device("cpu")
    if kernels:
        accelerator = torch.accelerator.current_accelerator()
        kind = accelerator.type if accelerator is not None else "cuda"
        where = torch.device(kind, min(kernel.device for kernel in kernels))
    limits = Limits(where)
    groups = attribution.groups(recorded, watch, on_device=bool(kernels))
    return Report(
        report.lines_of(groups, limits),
        "GPU" if kernels else "CPU",
        steps,
        recorded.seconds,
        recorded.busy_seconds,
        limits,
        _notes(groups, on_device=bool(kernels)),
    )


def _notes(groups: list[attribution.Group], *, on_device: bool) -> list[str]:
    notes = []
    if not all(group.is_op for group in groups):
        notes.append(
            "kernels that were launched in no op, such as those of Inductor and one's own, stand "
            "there by their names; what they move is not known, so neither is what they would gain"
        )
    if not on_device:
        notes.append("no kernel ran on a GPU: times are those of ops on the CPU")
    return notes


def profile(*, warmup: int = 0, steps: int | None = None) -> Profile:
    """Profile the ops inside a `with`: their time, what they have to do, who took them, the limit.

    torch's profiler does the timing, so only one of them can be open. It sees what runs on this
    thread and in backwards that are started here. Where a GPU is used, times are those of its
    kernels, else of ops on the CPU. What the device can do is measured when a report is first asked
    for, and kept.

    Args:
        warmup: how many steps come before what is recorded; `Profile.step` marks a step's end.
        steps: how many steps are recorded; None: all that come. Without marks the whole block is
        one.

    Returns:
        The profile: print it, iterate over its lines, or take `table()`, `as_dict()`, `html()`.

    Raises:
        ValueError: a number is too small.

    >>> import torch, opgraft
    >>> x = torch.randn(256, 256)
    >>> with opgraft.profile(warmup=1) as p:
    ...     for _ in range(3):
    ...         _ = torch.mm(x, x)
    ...         p.step()
    >>> line = p.lines[0]
    >>> line.op, line.inputs, line.taken_by, line.count
    ('aten::mm', 'f32[256,256], f32[256,256]', 'native', 2)
    >>> line.bytes == 2 * 3 * 256 * 256 * 4, line.flops == 2 * 2 * 256**3
    (True, True)
    """
    return Profile(warmup=warmup, steps=steps)
