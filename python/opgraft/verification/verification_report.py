"""The report of a verification: as a table, as JSON, as JUnit XML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from xml.etree import ElementTree

Verdict = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class Failure:
    """One check that failed on one sample."""

    check: str
    sample: str
    message: str
    #: Python code that reproduces the failure.
    reproducer: str

    def __str__(self) -> str:
        indented = "\n".join(f"    {line}" for line in self.reproducer.splitlines())
        return f"{self.check}: {self.message}\n  sample: {self.sample}\n{indented}"


@dataclass
class Check:
    """One check of an override, over all the samples that it applies to."""

    name: str
    samples: int = 0  #: how many it ran on
    failures: int = 0
    #: Why it did not run on any sample.
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.failures:
            return "failed"
        return "passed" if self.samples else "not run"


@dataclass
class OverrideReport:
    """The results of one override."""

    name: str
    op: str
    dispatch_key: str
    dsl: str | None
    pack: str | None
    samples: dict[str, int] = field(default_factory=dict)  #: by source: opinfo, pack, schema
    hits: int = 0
    misses: int = 0
    #: The largest error over all samples, as a multiple of native's own; and the references used.
    worst_error: float = 0.0
    references: list[str] = field(default_factory=list)
    checks: dict[str, Check] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    #: Sides of the condition that no sample has covered, and why.
    not_generated: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: Why it could not be verified at all.
    skipped: str = ""
    #: Why not everything could be tried: then it is not enough that nothing failed.
    incomplete: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        if self.failures:
            return "failed"
        return "not run" if self.skipped or self.incomplete else "passed"

    @classmethod
    def of_dict(cls, found: dict[str, Any]) -> OverrideReport:
        """The report of an override from :meth:`VerificationReport.as_dict`."""
        of_checks = {
            name: Check(check["name"], check["samples"], check["failures"], check["reason"])
            for name, check in found["checks"].items()
        }
        given = {key: value for key, value in found.items() if key != "verdict"}
        failures = [Failure(**failure) for failure in found["failures"]]
        return cls(**(given | {"checks": of_checks, "failures": failures}))


@dataclass
class VerificationReport:
    """What :func:`opgraft.verify` returns."""

    overrides: list[OverrideReport]
    k: float
    seed: int
    environment: dict[str, str]
    #: Why nothing was verified; empty if something was.
    nothing: str = ""

    @property
    def ok(self) -> bool:
        """Whether every override was verified and passed."""
        return bool(self.overrides) and all(o.verdict == "passed" for o in self.overrides)

    @property
    def exit_code(self) -> int:
        """0 if :attr:`ok`, 1 if something failed, 3 if something could not be verified."""
        if any(each.verdict == "failed" for each in self.overrides):
            return 1
        return 0 if self.ok else 3

    @property
    def failures(self) -> list[Failure]:
        return [failure for each in self.overrides for failure in each.failures]

    def as_dict(self) -> dict[str, Any]:
        """The report as a dict that `json` can write."""
        return {
            "ok": self.ok,
            "k": self.k,
            "seed": self.seed,
            "environment": self.environment,
            "nothing": self.nothing,
            "overrides": [
                {**asdict(each), "verdict": each.verdict, "checks": _checks(each)}
                for each in self.overrides
            ],
        }

    def json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def junit(self) -> str:
        """JUnit XML: a test suite for each override, a test case for each of its checks."""
        suites = ElementTree.Element("testsuites", name="opgraft verify")
        for each in self.overrides:
            _suite(suites, each)
        ElementTree.indent(suites)
        return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)

    def details(self) -> Iterable[str]:
        """The lines below the table, with the details."""
        if not self.overrides:
            yield f"nothing to verify: {self.nothing}"
            return
        for each in self.overrides:
            yield from _details(each)
            yield ""
        verdicts = [each.verdict for each in self.overrides]
        yield (
            f"{verdicts.count('passed')} passed, {verdicts.count('failed')} failed, "
            f"{verdicts.count('not run')} not run; errors up to {self.k:g} times native's own, "
            f"seed {self.seed}, {', '.join(f'{k} {v}' for k, v in self.environment.items())}"
        )

    def __str__(self) -> str:
        table = _table([_HEAD, *map(_row, self.overrides)]) if self.overrides else []
        return "\n".join([*table, *([""] if table else []), *self.details()])


def _checks(override: OverrideReport) -> dict[str, Any]:
    return {n: {**asdict(c), "verdict": c.verdict} for n, c in override.checks.items()}


def _suite(suites: ElementTree.Element, override: OverrideReport) -> None:
    checks = list(override.checks.values())
    suite = ElementTree.SubElement(
        suites,
        "testsuite",
        name=f"{override.op} at {override.dispatch_key}: {override.name}",
        tests=str(len(checks) or 1),
        failures=str(sum(check.verdict == "failed" for check in checks)),
        skipped=str(sum(check.verdict == "not run" for check in checks) or (not checks)),
        time=f"{override.seconds:.3f}",
    )
    for check in checks:
        case = ElementTree.SubElement(suite, "testcase", classname=override.name, name=check.name)
        if check.verdict == "not run":
            ElementTree.SubElement(case, "skipped", message=_printable(check.reason))
        for failure in override.failures:
            if failure.check == check.name:
                element = ElementTree.SubElement(
                    case, "failure", message=_printable(failure.message), type=check.name
                )
                element.text = _printable(str(failure))
    if not checks:
        case = ElementTree.SubElement(suite, "testcase", classname=override.name, name="verify")
        ElementTree.SubElement(case, "skipped", message=_printable(override.skipped))


def _printable(text: str) -> str:
    """Without what XML cannot hold."""
    return "".join(c if c in "\t\n\r" or c >= " " else "?" for c in text)


# ------------------------------------------------------------------ text

_HEAD = ("override", "op", "samples", "hits", "misses", "error", "verdict")


def _row(each: OverrideReport) -> tuple[str, ...]:
    return (
        each.name,
        f"{each.op} at {each.dispatch_key}",
        str(sum(each.samples.values())),
        str(each.hits),
        str(each.misses),
        f"{each.worst_error:.2g} x native" if each.worst_error else "-",
        each.verdict,
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _details(each: OverrideReport) -> Iterable[str]:
    sources = ", ".join(f"{count} from {source}" for source, count in each.samples.items())
    yield f"{each.name} ({each.op} at {each.dispatch_key}): {each.verdict}, {each.seconds:.1f} s"
    if each.skipped:
        yield f"  {each.skipped}"
        return
    yield f"  samples: {sources or 'none'}; reference: {', '.join(each.references) or 'none'}"
    done = [f"{c.name} ({c.samples})" for c in each.checks.values() if c.samples]
    yield f"  checks: {', '.join(done) or 'none'}"
    for check in each.checks.values():
        if not check.samples:
            yield f"  not run: {check.name}: {check.reason}"
    if each.incomplete:
        yield f"  incomplete: {each.incomplete}"
    for line in each.not_generated:
        yield f"  not generated: {line}"
    for note in each.notes:
        yield f"  note: {note}"
    for failure in each.failures:
        for line in f"FAILED {failure}".splitlines():
            yield f"  {line}"
