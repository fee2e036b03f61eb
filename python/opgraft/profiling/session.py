"""`profile`: what a program's ops cost, and how far that is from the device's limit."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerAction

from opgraft.base.notebook import TextDisplay
from opgraft.profiling import attribution, page, profile_report, timeline
from opgraft.profiling.limits import Limits
from opgraft.profiling.profile_report import Gain, Line, ProfileReport
from opgraft.profiling.routing import VerdictRecorder
from opgraft.profiling.timeline import Timeline


class Profile(TextDisplay):
    """What ran while it was open. Prints as a table; iterates over lines, most time first."""

    def __init__(self, *, warmup: int, steps: int | None) -> None:
        if warmup < 0 or (steps is not None and steps < 1):
            raise ValueError("warmup is 0 or more, and steps 1 or more")
        self._warmup = warmup
        self._steps = steps
        self._steps_ended = 0
        self._profiler: torch.profiler.profile | None = None
        self._verdicts = VerdictRecorder()
        self._recording_scope: AbstractContextManager[None] | None = None
        self._timeline: Timeline | None = None
        self._recorded = 0
        self._report: ProfileReport | None = None

    def __enter__(self) -> Profile:
        if self._profiler is not None:
            raise RuntimeError("this profile was used already: take another one")
        self._profiler = torch.profiler.profile(
            activities=torch.profiler.supported_activities(),
            record_shapes=True,
            schedule=self._action,
            on_trace_ready=self._read_timeline,
        )
        self._wait_before_recording(0)
        self._profiler.start()
        self._record_verdicts_if_recording()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_recording_verdicts()
        if self._profiler is not None:
            self._profiler.stop()

    def step(self) -> None:
        """Mark the end of a step of the program; the next step begins.

        Raises:
            RuntimeError: the profile is not open.
        """
        if self._profiler is None:
            raise RuntimeError("this profile is not open: use it as with opgraft.profile() as p")
        self._steps_ended += 1
        if self._action(self._steps_ended) is ProfilerAction.NONE:
            self._stop_recording_verdicts()
        self._wait_before_recording(self._steps_ended)
        self._profiler.step()
        self._record_verdicts_if_recording()

    def _wait_before_recording(self, step: int) -> None:
        """Wait for the device before the first step that is recorded.

        Kernels that the program queued before would run inside it, and belong to no op of it.
        """
        if step == self._warmup and torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def _action(self, step: int) -> ProfilerAction:
        """What torch's profiler does in a step. torch's own `schedule` warns if warmup is 0."""
        if step < self._warmup:
            return ProfilerAction.WARMUP
        if self._steps is None or step < self._warmup + self._steps - 1:
            return ProfilerAction.RECORD
        return (
            ProfilerAction.RECORD_AND_SAVE
            if step == self._warmup + self._steps - 1
            else ProfilerAction.NONE
        )

    def _record_verdicts_if_recording(self) -> None:
        is_recording = self._action(self._steps_ended) in (
            ProfilerAction.RECORD,
            ProfilerAction.RECORD_AND_SAVE,
        )
        if is_recording and self._recording_scope is None:
            self._recording_scope = self._verdicts.recording()
            self._recording_scope.__enter__()

    def _stop_recording_verdicts(self) -> None:
        scope, self._recording_scope = self._recording_scope, None
        if scope is not None:
            scope.__exit__(None, None, None)

    def _read_timeline(self, profiler: torch.profiler.profile) -> None:
        self._timeline = timeline.read_profile(profiler)
        # Without any call of `step` the whole block is one step.
        self._recorded = max(self._steps_ended - self._warmup, 1)

    @property
    def report(self) -> ProfileReport:
        """The report of what was recorded.

        Raises:
            RuntimeError: nothing was recorded.
        """
        if self._report is None:
            if self._timeline is None:
                raise RuntimeError(self._why_empty())
            self._report = _make_report(self._timeline, self._verdicts, self._recorded)
        return self._report

    def _why_empty(self) -> str:
        if self._profiler is None:
            return "nothing was recorded: run the program inside with opgraft.profile() as p"
        return (
            f"nothing was recorded: step() was called {self._steps_ended} times, and the first "
            f"warmup={self._warmup} steps are not recorded; call step() more often, or give a "
            "smaller warmup"
        )

    @property
    def lines(self) -> tuple[Line, ...]:
        """A line for each kind of call, most time first."""
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
            rows: how many kinds of call to show, those with most time; None for all.
        """
        return profile_report.table(self.report, rows)

    def as_dict(self) -> dict[str, Any]:
        """The report as a dict that `json` can write; docs/profile.md describes it."""
        return self.report.as_dict()

    def as_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.as_dict(), indent=2)

    def html(self) -> str:
        """The report as a self-contained HTML page, with a plot and the whole table."""
        return page.document(self.report)

    def save(self, path: str | Path) -> None:
        """Write the report to a file: as JSON if its name ends in `.json`, else as HTML."""
        place = Path(path)
        text = self.as_json() if place.suffix == ".json" else self.html()
        place.write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return page.fragment(self.report)


def _make_report(recorded: Timeline, verdicts: VerdictRecorder, steps: int) -> ProfileReport:
    kernels = list(recorded.kernels)
    where = torch.device("cpu")
    if kernels:
        accelerator = torch.accelerator.current_accelerator()
        kind = accelerator.type if accelerator is not None else "cuda"
        where = torch.device(kind, min(kernel.device for kernel in kernels))
    limits = Limits(where)
    groups = attribution.groups(recorded, verdicts, on_device=bool(kernels))
    return ProfileReport(
        profile_report.lines_of(groups, limits),
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
            "kernels that were launched outside any op, such as Inductor's and yours, are listed "
            "by name; what they move is not known, so neither is what they would gain"
        )
    if not on_device:
        notes.append("no kernel ran on a GPU: times are those of ops on the CPU")
    return notes


def profile(*, warmup: int = 0, steps: int | None = None) -> Profile:
    """Profile the ops inside a `with`: their time, bytes and flops, who took them, the limit.

    torch's profiler measures the times, so only one profile can be open. It records this thread and
    the backwards that it starts. Where a GPU is used, times are those of its kernels, else those of
    ops on the CPU. The device's limits are measured for the first report, and kept.

    Args:
        warmup: how many steps to leave out at first; `Profile.step` marks the end of a step.
        steps: how many steps to record; None for all. Without a call of `Profile.step`, the whole
            block is one step.

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
