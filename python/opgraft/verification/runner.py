"""One verification: which samples, which checks, and the report of both."""

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
from opgraft.verification import checks, opinfo, sources
from opgraft.verification.boundaries import Coverage, Explorer, claimed_dtypes, parts, takes_layout
from opgraft.verification.checks import CHECKS, EACH, ONCE, SLOW, SOME, Failed, NotApplicable
from opgraft.verification.report import Check, Failure, OverrideReport, Report
from opgraft.verification.samples import Place, Sample, layouts, tensors_of
from opgraft.when import Condition

#: What samples come in where a condition names no dtypes.
_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.complex64, torch.bool),
)
#: Sizes to give every size: none, one, primes, and beside powers of two.
_SIZES = (0, 1, 2, 3, 31, 64, 127, 257)
#: Calls that a condition wants, around which samples are made: for each dtype, of different ranks.
_ANCHORS = 2
#: Those around which sizes are changed.
_VARIED = 3


@dataclass(frozen=True)
class Options:
    """The terms of a verification; see :func:`opgraft.verify`."""

    k: float = 2.0
    seed: int = 0
    max_samples: int = 120
    max_seconds: float = math.inf
    max_bytes: int = 2**30
    only: Collection[str] | None = None
    use_opinfo: bool = True
    compile: bool = False

    def wants(self, check: str) -> bool:
        if self.only is not None:
            return check in self.only
        return self.compile or check not in SLOW


Progress = Callable[[str], None]


def verify_override(
    override: Override, options: Options, progress: Progress = lambda line: None
) -> OverrideReport:
    """Verify one override.

    Args:
        override: what to verify; others are off meanwhile, on this thread.
        options: the terms.
        progress: told of each step.
    """
    report = OverrideReport(
        override.name, override.op, override.dispatch_key, override.dsl, override.pack
    )
    start = time.perf_counter()
    problem = override.why_off() or _no_device(override.dispatch_key)
    if problem is not None:
        report.skipped = problem
        return report
    device = device_of(override.dispatch_key)
    subject = checks.Subject(override, device, options.k, options.seed)
    run = _Run(subject, options, report, progress)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what samples of odd dtypes make torch say
        try:
            with checks.alone(override):
                run.go()
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


def _no_device(dispatch_key: str) -> str | None:
    kind = "cuda" if dispatch_key == "HIP" else dispatch_key.lower()
    if kind == "cpu":
        return None
    try:
        available = bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):
        available = False
    if available:
        return None
    mend = "; TRITON_INTERPRET=1 runs Triton kernels on the CPU" if kind == "cuda" else ""
    return f"there is no {kind} device here{mend}"


class _Run:
    """The samples of one override, and the checks on each."""

    def __init__(
        self,
        subject: checks.Subject,
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
        self._condition = condition
        self._coverage = Coverage([] if condition is None else parts(condition))
        self._taken: list[checks.Observation] = []
        self._raised = False

    def go(self) -> None:
        self._progress("collecting samples")
        seen: set[str] = set()
        start = math.inf
        for sample in self._samples():
            if sample.id in seen:
                continue
            bound = "max_samples=" if len(seen) == self._options.max_samples else ""
            if time.perf_counter() - start > self._options.max_seconds:
                bound = "max_seconds="
            # What it takes to find the first one does not count.
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
        if self._taken:
            self._check_some()
        self._report.not_generated += self._coverage.missing()
        if (reason := opinfo.missing()) and self._options.use_opinfo:
            self._report.notes.append(f"none of PyTorch's own samples: {reason}")

    # ------------------------------------------------------------------ samples

    def _samples(self) -> Iterator[Sample]:
        override = self._subject.override
        dtypes = claimed_dtypes(override.cond) or list(_DTYPES)
        device = self._subject.device
        bases = list(
            sources.bases(
                override, dtypes, device, self._options.seed, use_opinfo=self._options.use_opinfo
            )
        )
        explorers = [Explorer(base, self._options.seed, self._options.max_bytes) for base in bases]
        # An author's calls are the ones to look around, if there are any: it takes long to make one
        # of torch's own into one that the condition wants.
        given = [explorer for explorer in explorers if explorer.base.is_given]
        anchors = list(self._anchors(given or explorers))
        yield from _in_turn(
            [
                # What is there as it is, then around each call that the override wants.
                (explorer.sample({}) for explorer in explorers),
                (sample for _, sample in anchors),
                *(self._boundaries(e, s) for e, s in anchors[:_VARIED]),
                *(self._layouts(e, s) for e, s in anchors),
                *(self._sizes(e, s) for e, s in anchors[:_VARIED]),
            ]
        )

    def _anchors(self, explorers: Sequence[Explorer]) -> Iterator[tuple[Explorer, Sample]]:
        """A few calls of each dtype that the condition wants, of different ranks."""
        found: dict[Any, dict[int, tuple[Explorer, Sample]]] = {}
        for explorer in explorers:
            # Kernels of internal ops trust what their callers pass, and crash on what is not right:
            # the author alone knows what else there is.
            if explorer.base.is_given and explorer.is_internal:
                continue
            call = explorer.call({})
            edits = None if call is None else self._wanted(explorer)
            made = None if edits is None else explorer.call(edits)
            if made is not None and edits is not None:
                rank = max((tensor.ndim for tensor in made.tensors()), default=0)
                of_dtype = found.setdefault(_main_dtype(made), {})
                of_dtype.setdefault(rank, (explorer, explorer.sample(edits)))
        # Two dimensions first: with fewer there is less to vary, with more less of each.
        ranked = [[by[rank] for rank in sorted(by, key=_oddity)] for by in found.values()]
        for row in itertools.zip_longest(*(each[:_ANCHORS] for each in ranked)):
            yield from (each for each in row if each is not None)

    def _wanted(self, explorer: Explorer) -> dict[Place, Any] | None:
        if self._condition is not None:
            return explorer.wanted(self._condition, {})
        call = explorer.call({})
        try:
            wanted = call is not None and self._subject.override.wants(call)
        except Exception:  # a condition in Python: checks say what it raises
            wanted = False
        return {} if wanted else None

    def _boundaries(self, explorer: Explorer, anchor: Sample) -> Iterator[Sample]:
        if self._condition is None:
            return
        from opgraft import when

        for index, leaf in enumerate(parts(self._condition)):
            explorer.refusal = ""
            if isinstance(leaf, when._Comparison):
                yield from map(explorer.sample, explorer.crossings(leaf, anchor.edits))
            else:
                yield from map(explorer.sample, explorer.beside(leaf, anchor.edits))
            if explorer.refusal:
                self._coverage.reasons.setdefault(
                    index, f"calls beyond it are refused: {explorer.refusal}"
                )

    def _layouts(self, explorer: Explorer, anchor: Sample) -> Iterator[Sample]:
        call = anchor.call()
        places = list(tensors_of(call.op, call.values))
        for place, tensor in places:
            for layout in layouts(anchor.base, place, tensor):
                sample = anchor.with_layout(place, layout)
                if not explorer.is_internal or takes_layout(sample):
                    yield sample
        yield from self._shared(anchor, places)

    def _shared(self, anchor: Sample, places: list[tuple[Place, torch.Tensor]]) -> Iterator[Sample]:
        """The same tensor given twice."""
        free = [(p, t) for p, t in places if p.item is None and p.argument in anchor.base.free]
        if self._subject.op.mutates or len(free) < 2:
            return
        (first, one), *rest = free
        for place, other in rest:
            if other.shape == one.shape and other.dtype == one.dtype:
                yield anchor.with_layout(place, f"={first.argument}")

    def _sizes(self, explorer: Explorer, anchor: Sample) -> Iterator[Sample]:
        now = {**anchor.base.places, **anchor.edits}
        for place, value in now.items():
            if place.dim is None:
                continue
            for size in _SIZES:
                edits = explorer.together(place, size, anchor.edits)
                if size != value and edits is not None:
                    yield explorer.sample(edits)

    # ------------------------------------------------------------------ checks

    def _check_each(self, sample: Sample) -> None:
        try:
            call = sample.call()
        except Exception:  # a layout that such a tensor cannot have
            return
        seen = checks.Observation(self._subject, sample)
        self._count(seen, sample)
        self._coverage.add(call)
        special = any(layout == "special" for layout in sample.layouts.values())
        for name in EACH:
            if self._options.wants(name):
                self._apply(
                    name, seen, as_check="special" if special and name == "values" else name
                )
        if seen.took and not special:
            self._taken.append(seen)

    def _count(self, seen: checks.Observation, sample: Sample) -> None:
        source = sample.base.id.removeprefix("for:").partition(":")[0].partition("-")[0]
        made = " + changes" if sample.edits or sample.layouts else ""
        key = f"{source}{made}"
        self._report.samples[key] = self._report.samples.get(key, 0) + 1
        self._report.hits += seen.took
        self._report.misses += seen.mine.hits == 0

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
        for name in SOME:
            if not self._options.wants(name):
                self._report.checks[name] = Check(name, reason="not asked for")
                continue
            count = 1 if name in ONCE else len(chosen)
            applicable = self._for_check(name, chosen)
            for seen in itertools.islice(applicable, max(count, 1)):
                self._progress(f"{name}: {seen.sample.id}")
                self._apply(name, seen)

    def _for_check(
        self, name: str, chosen: list[checks.Observation]
    ) -> Iterable[checks.Observation]:
        if name == "front":
            return [seen for seen in self._taken if seen.sample.base.front is not None] or chosen
        if name == "gradcheck":
            return [
                seen for seen in self._taken if _main_dtype(seen.mine.call) == torch.float64
            ] or chosen
        return chosen

    def _representatives(self) -> list[checks.Observation]:
        """For each dtype the middling one of the hits: not empty, not the largest."""
        by_dtype: dict[Any, list[checks.Observation]] = {}
        for seen in self._taken:
            call = seen.mine.call
            huge = "huge-strides" in seen.sample.layouts.values()
            usable = seen.mine.error is None and not huge and not seen.refused
            if usable and all(t.numel() for t in call.tensors()):
                by_dtype.setdefault(_main_dtype(seen.mine.call), []).append(seen)
        return [
            sorted(each, key=lambda seen: sum(t.numel() for t in seen.mine.call.tensors()))[
                len(each) // 2
            ]
            for each in by_dtype.values()
        ]

    def _apply(self, name: str, seen: checks.Observation, as_check: str = "") -> None:
        as_check = as_check or name
        check = self._report.checks.setdefault(as_check, Check(as_check))
        try:
            CHECKS[name](seen)
        except NotApplicable as reason:
            check.reason = check.reason or str(reason)
            return
        except torch.OutOfMemoryError:  # the reference's, in float64
            check.reason = check.reason or "the device has too little memory"
            return
        except Failed as failed:
            self._fail(check, name, seen, str(failed))
        except Exception as error:  # neither the override nor native: tell, and go on
            self._fail(check, name, seen, f"the check itself raised {error!r}")
        check.samples += 1

    def _fail(self, check: Check, name: str, seen: checks.Observation, message: str) -> None:
        check.failures += 1
        # One of each check is enough to mend it; what else fails is counted.
        if check.failures == 1:
            self._report.failures.append(
                Failure(check.name, seen.sample.id, message, reproducer(seen, name, self._options))
            )


def _in_turn(sources_: Iterable[Iterator[Sample]]) -> Iterator[Sample]:
    """From each source in turn, so that a bound on the whole cuts none of them off."""
    live = list(sources_)
    while live:
        for source in list(live):
            try:
                yield next(source)
            except StopIteration:
                live.remove(source)


def _oddity(rank: int) -> tuple[int, int]:
    return (abs(rank - 2), -rank)


def _main_dtype(call: Any) -> torch.dtype | None:
    return next((tensor.dtype for tensor in call.tensors()), None)


def reproducer(seen: checks.Observation, check: str, options: Options) -> str:
    """Five lines that make a failure happen again."""
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
    """Verify one override after another, with a bar on the terminal if so asked."""
    with bar(progress) as tell:
        return [
            verify_override(override, options, partial(tell, override.name))
            for override in overrides
        ]


@contextmanager
def bar(wanted: bool) -> Iterator[Callable[[str, str], None]]:
    """A progress bar where there is a terminal; yields what is told of each step."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    if not wanted or not (console := Console(stderr=True)).is_terminal:
        yield lambda name, step: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[override]}: {task.completed} steps"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", style="dim"),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("", total=None, override="")
        yield lambda name, step: shown.update(task, advance=1, override=name, description=step[:60])


def report_of(overrides: list[OverrideReport], k: float, seed: int) -> Report:
    """The report of a verification that ran here."""
    nothing = "" if overrides else "no override is registered that matches"
    return Report(overrides, k, seed, environment(), nothing)


def environment() -> dict[str, str]:
    """Where a verification ran."""
    from opgraft import _core

    found = {"torch": torch.__version__, "router": "C++" if _core.in_use() else "Python"}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found
