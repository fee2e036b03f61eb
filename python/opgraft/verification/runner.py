"""Runs a verification: makes samples, runs checks on them, and reports the results."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from opgraft.registry import Override
from opgraft.router import device
from opgraft.verification import opinfo, sources
from opgraft.verification.boundaries import Coverage, predicates
from opgraft.verification.candidates import Candidates, main_dtype
from opgraft.verification.checks import CHECKS
from opgraft.verification.observation import Failed, NotApplicable, Observation, Subject
from opgraft.verification.process_state import keeping_settings
from opgraft.verification.samples import CannotMake, Sample
from opgraft.verification.single_override import only
from opgraft.verification.verification_report import (
    Check,
    Failure,
    OverrideReport,
    VerificationReport,
)
from opgraft.when import Condition

#: After so many failures a check is not run any more, because a failure may take many runs.
_MAX_FAILURES = 3


@dataclass(frozen=True)
class Options:
    """The options of a verification; see :func:`opgraft.verify`."""

    k: float = 2.0
    seed: int = 0
    max_samples: int = 300
    max_seconds: float = math.inf
    max_bytes: int = 2**30
    only: Collection[str] | None = None
    use_opinfo: bool = True
    compile: bool = False

    def wants(self, check: str) -> bool:
        if self.only is not None:
            return check in self.only
        return self.compile or CHECKS[check].cost != "seconds"


Progress = Callable[[str], None]


def verify_override(
    override: Override, options: Options, progress: Progress = lambda line: None
) -> OverrideReport:
    """Verify one override.

    Args:
        override: the override to verify; all others are disabled meanwhile, on this thread.
        options: the options.
        progress: called with a text for each step.
    """
    report = OverrideReport(
        override.name, override.op, override.dispatch_key, override.dsl, override.pack
    )
    start = time.perf_counter()
    problem = override.why_off() or why_no_device(override.dispatch_key)
    if problem is not None:
        report.skipped = problem
        return report
    device = device_of(override.dispatch_key)
    subject = Subject(override, device, options.k, options.seed)
    run = _Verification(subject, options, report, progress)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of unusual dtypes
        try:
            with keeping_settings(), only(override):
                run.run_checks()
        except Failed as failed:
            report.failures.append(Failure("hit", "", str(failed), ""))
    report.worst_error = subject.worst_error
    report.references = list(subject.references)
    report.seconds = time.perf_counter() - start
    return report


def device_of(dispatch_key: str) -> torch.device:
    """The device that a backend key's tensors live on."""
    kind = "cuda" if dispatch_key == "HIP" else dispatch_key.lower()
    return (
        torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )


def why_no_device(dispatch_key: str) -> str | None:
    """Why nothing of a dispatch key can run here; None if something can."""
    kind = "cuda" if dispatch_key == "HIP" else dispatch_key.lower()
    if device.is_available(kind):
        return None
    mend = "; TRITON_INTERPRET=1 runs Triton kernels on the CPU" if kind == "cuda" else ""
    return f"there is no {kind} device here{mend}"


class _Verification:
    """The samples of one override, and the checks on each."""

    def __init__(
        self,
        subject: Subject,
        options: Options,
        report: OverrideReport,
        progress: Progress,
    ) -> None:
        self._subject = subject
        self._options = options
        self._report = report
        self._progress = progress
        override = subject.override
        condition = override.cond if isinstance(override.cond, Condition) else None
        self._coverage = Coverage([] if condition is None else predicates(condition))
        self._hits: list[Observation] = []

    def run_checks(self) -> None:
        self._progress("collecting samples")
        seen: set[str] = set()
        start = math.inf
        for sample in self._candidates():
            if sample.id in seen:
                continue
            bound = "max_samples=" if len(seen) == self._options.max_samples else ""
            if time.perf_counter() - start > self._options.max_seconds:
                bound = "max_seconds="
            # The time to find the first sample does not count.
            start = min(start, time.perf_counter())
            if bound:
                self._report.notes.append(
                    f"stopped at {len(seen)} samples: there are more ({bound})"
                )
                break
            seen.add(sample.id)
            self._progress(sample.id)
            self._check_each(sample)
        self._check_hits(len(seen))
        if self._hits:
            self._check_some()
        self._report.not_generated += self._coverage.missing()
        # PyTorch's own tests have no samples of other libraries' ops, so none is missing.
        is_torchs = self._subject.op.name.startswith("aten::")
        if is_torchs and self._options.use_opinfo and (reason := opinfo.missing()):
            self._report.incomplete = f"there are none of PyTorch's own samples: {reason}"

    def _candidates(self) -> Candidates:
        return Candidates(
            self._subject.override,
            self._subject.device,
            self._options.seed,
            self._options.max_bytes,
            self._coverage,
            use_opinfo=self._options.use_opinfo,
        )

    # ------------------------------------------------------------------ checks

    def _check_each(self, sample: Sample) -> None:
        try:
            call = sample.call()
        except Exception:  # the tensor cannot have such a layout
            return
        seen = Observation(self._subject, sample)
        try:
            self._count(seen, sample)
        except Exception as error:
            # Whether a large tensor can be made depends on what else is in memory.
            if not isinstance(error, CannotMake) and not device.is_out_of_memory(error):
                raise
            self._report.notes.append(f"too little memory for {sample.id}")
            return
        self._coverage.add(call)
        special = seen.is_special
        for name, check in CHECKS.items():
            if check.scope == "each" and self._options.wants(name):
                self._apply(
                    name, seen, as_check="special" if special and name == "values" else name
                )
        # Samples that take gigabytes are not kept for later checks.
        if seen.took and not special and "huge-strides" not in sample.layouts.values():
            self._hits.append(seen)

    def _count(self, seen: Observation, sample: Sample) -> None:
        source = sources.source_kind(sample.base.id)
        changed = sample.edits or sample.layouts or sources.has_other_rank(sample.base.id)
        made = " + changes" if changed else ""
        key = f"{source}{made}"
        self._report.samples[key] = self._report.samples.get(key, 0) + 1
        self._report.hits += seen.took
        self._report.misses += seen.override_run.hits == 0

    def _check_hits(self, samples: int) -> None:
        if self._report.hits or (self._options.only and "hit" not in self._options.only):
            return
        if any(failure.check == "hit" for failure in self._report.failures):
            return
        if samples == 0:
            reason = "no sample of the op could be made: give register_op_override samples="
        elif self._report.misses < samples:
            reason = f"it handed each of {samples - self._report.misses} calls to the native kernel"
        else:
            reason = f"it took none of {samples} samples: give register_op_override samples= of its"
        check = self._report.checks.setdefault("hit", Check("hit"))
        check.failures += 1
        self._report.failures.append(Failure("hit", "", f"it was never hit: {reason}", ""))

    def _check_some(self) -> None:
        chosen = self._representatives()
        for name, check in CHECKS.items():
            if check.scope == "each":
                continue
            if not self._options.wants(name):
                self._report.checks[name] = Check(name, reason="not asked for")
                continue
            count = 1 if check.scope == "once" else len(chosen)
            applicable = self._for_check(name, chosen)
            for seen in itertools.islice(applicable, max(count, 1)):
                self._progress(f"{name}: {seen.sample.id}")
                self._apply(name, seen)

    def _for_check(self, name: str, chosen: list[Observation]) -> Iterable[Observation]:
        """The samples for a check: those that suit it, of the representatives or of all hits."""
        suits = CHECKS[name].suits
        if suits is None:
            return chosen
        suited = [seen for seen in dict.fromkeys((*chosen, *self._hits)) if suits(seen)]
        return _distinct_scalars_first(suited) or chosen

    def _representatives(self) -> list[Observation]:
        """For each dtype the hit of median size: not empty, not the largest."""
        by_dtype: dict[Any, list[Observation]] = {}
        for seen in self._hits:
            call = seen.override_run.call
            usable = seen.override_run.error is None and not seen.refused
            if usable and all(t.numel() for t in call.tensors()):
                by_dtype.setdefault(main_dtype(seen.override_run.call), []).append(seen)
        return [
            sorted(each, key=lambda seen: sum(t.numel() for t in seen.override_run.call.tensors()))[
                len(each) // 2
            ]
            for each in by_dtype.values()
        ]

    def _apply(self, name: str, seen: Observation, as_check: str = "") -> None:
        as_check = as_check or name
        check = self._report.checks.setdefault(as_check, Check(as_check))
        if check.failures == _MAX_FAILURES:
            return
        try:
            with keeping_settings():  # an impl's changes must not affect other checks
                CHECKS[name](seen)
        except NotApplicable as reason:
            check.reason = check.reason or str(reason)
            return
        except CannotMake as error:  # whether a large one can be made depends on the free memory
            check.reason = check.reason or str(error)
            return
        except Failed as failed:
            self._fail(check, name, seen, str(failed))
        except Exception as error:  # neither the override nor native raised: report it, and go on
            if device.is_out_of_memory(error):  # the reference's, in float64
                check.reason = check.reason or "the device has too little memory"
                return
            self._fail(check, name, seen, f"the check itself raised {error!r}")
        check.samples += 1

    def _fail(self, check: Check, name: str, seen: Observation, message: str) -> None:
        check.failures += 1
        # One failure of each check is enough to mend it; the others are counted.
        if check.failures == 1:
            self._report.failures.append(
                Failure(check.name, seen.sample.id, message, reproducer(seen, name, self._options))
            )


def _distinct_scalars_first(observations: list[Observation]) -> list[Observation]:
    """The observations with distinct numbers first: a dropout of one half alone shows little."""
    firsts: dict[Any, Observation] = {}
    for seen in observations:
        numbers = (v for v in seen.override_run.call.values if isinstance(v, (bool, int, float)))
        firsts.setdefault(tuple(numbers), seen)
    return list(dict.fromkeys((*firsts.values(), *observations)))


def reproducer(seen: Observation, check: str, options: Options) -> str:
    """Five lines of Python that reproduce a failure."""
    override = seen.subject.override
    terms = f", seed={options.seed}" + (f", k={options.k:g}" if options.k != 2 else "")
    where = f"op={override.op!r}, dispatch_key={override.dispatch_key!r}, name={override.name!r}"
    return "\n".join(
        [
            "import opgraft",
            _registering(override),
            "from opgraft.verification import sample",
            f"call = sample({seen.sample.id!r}, {where}{terms})",
            f"call.check({check!r})  # {seen.describe()}",
        ]
    )


def _registering(override: Override) -> str:
    if override.pack is not None:
        return f"opgraft.packs.load({override.pack!r})"
    module = getattr(override.impl, "__module__", None)
    if module is None or module == "__main__" or module.startswith("opgraft."):
        return f"# register {override.name!r} here, as your program does"
    return f"import {module}  # registers {override.name!r}, or do so here"


def verify_all(
    overrides: Sequence[Override], options: Options, *, progress: bool
) -> list[OverrideReport]:
    """Verify one override after another, with a bar on the terminal if `progress`."""
    with progress_bar(progress) as tell:
        return [
            verify_override(override, options, partial(tell, override.name))
            for override in overrides
        ]


@contextmanager
def progress_bar(wanted: bool) -> Iterator[Callable[[str, str], None]]:
    """A progress bar, if stderr is a terminal; yields a function to call for each step."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    if not wanted or not (console := Console(stderr=True)).is_terminal:
        yield lambda name, step: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn(
            "{task.fields[override]}: {task.completed} steps",
            table_column=Column(overflow="fold", ratio=2),
        ),
        TimeElapsedColumn(),
        TextColumn(
            "{task.description}", style="dim", table_column=Column(overflow="fold", ratio=1)
        ),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as shown:
        task = shown.add_task("", total=None, override="")
        yield lambda name, step: shown.update(task, advance=1, override=name, description=step)


def report_of(overrides: list[OverrideReport], k: float, seed: int) -> VerificationReport:
    """The report of a verification in this process."""
    nothing = "" if overrides else "no override is registered that matches"
    return VerificationReport(overrides, k, seed, environment(), nothing)


def environment() -> dict[str, str]:
    """Where a verification ran."""
    from opgraft.core import loader

    found = {"torch": torch.__version__, "router": "C++" if loader.in_use() else "Python"}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found
