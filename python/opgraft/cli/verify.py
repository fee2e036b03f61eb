"""`opgraft verify`: are the overrides right? Compares them with PyTorch's kernels, on its tests."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import click

import opgraft
from opgraft import verification
from opgraft.cli import modules as named_modules
from opgraft.cli import output
from opgraft.verification import journal, reproduction
from opgraft.verification.subprocesses import verify_in_subprocesses
from opgraft.verification.verification_report import VerificationReport


@click.command("verify")
@click.argument("what", required=False, metavar="[PACK|OP]")
@click.option("--dispatch-key", help="Only at this key, such as CUDA.")
@click.option("--op", help="Only overrides of this op, where PACK is given.")
@click.option("--name", help="Only the override of this name.")
@click.option("--dsl", help="Only overrides of this DSL.")
@named_modules.option
@click.option("--check", "checks", multiple=True, help="Only this check; can be repeated.")
@click.option(
    "--k", default=2.0, show_default=True, help="The allowed error, as a multiple of native's own."
)
@click.option("--seed", default=0, show_default=True, help="The seed of all values.")
@click.option("--max-samples", default=300, show_default=True, help="Samples for each override.")
@click.option(
    "--max-seconds", default=math.inf, help="Begin no sample of an override after this time."
)
@click.option("--opinfo/--no-opinfo", default=True, help="Use PyTorch's own samples, or not.")
@click.option("--compile", is_flag=True, help="Also under torch.compile: seconds for each.")
@click.option(
    "--jobs", default=1, show_default=True, type=click.IntRange(min=1), help="Processes at a time."
)
@click.option("--junit", type=click.Path(dir_okay=False), help="Write JUnit XML to a file.")
@click.option("--journal", "journal_path", hidden=True, help="Write the sample it is at to a file.")
@click.option("--leave-out", multiple=True, hidden=True, help="Do not make this sample.")
@click.option("--only-native", hidden=True, help="Run native on this sample, and nothing else.")
@output.json_option
def command(
    what: str | None,
    dispatch_key: str | None,
    op: str | None,
    name: str | None,
    dsl: str | None,
    modules: tuple[str, ...],
    checks: tuple[str, ...],
    k: float,
    seed: int,
    max_samples: int,
    max_seconds: float,
    opinfo: bool,
    compile: bool,
    jobs: int,
    junit: str | None,
    journal_path: str | None,
    leave_out: tuple[str, ...],
    only_native: str | None,
    as_json: bool,
) -> int:
    """Check overrides against the native kernels that they replace.

    It checks the overrides of a PACK, those of an OP such as aten::_softmax, or all that are
    registered. The samples are those of PyTorch's own tests, those of the pack, and samples made
    from each override's condition, on both sides of every boundary. The exit status is 0 if
    everything passed, 1 if something failed, 3 if something could not be verified here.

    With --jobs above 1 each override has a process of its own. What one override does to the device
    or to the process then does not affect the others. A sample on which the native kernel itself
    ends the process is left out.
    """
    named_modules.import_all(modules)
    if what is None or "::" in what:
        opgraft.packs.activate()
    selection: dict[str, Any] = {"op": op, "dispatch_key": dispatch_key, "name": name, "dsl": dsl}
    terms: dict[str, Any] = {
        "k": k,
        "seed": seed,
        "max_samples": max_samples,
        "max_seconds": max_seconds,
        "opinfo": opinfo,
        "compile": compile,
    }
    try:
        if only_native is not None:
            (override,) = verification.select(what, pack=None, **selection)
            sample = reproduction.reproduce(override, only_native, seed=seed, k=k)
            for _ in range(2):  # cuDNN's attention raises on the first call that it has no plan for
                with contextlib.suppress(Exception):
                    sample.native()
            return 0
        if jobs == 1:
            with journal.writing_to(journal_path, leaving_out=leave_out):
                report = opgraft.verify(
                    what, **selection, **terms, checks=checks or None, progress=not as_json
                )
        else:
            verification.check_names(checks)
            chosen = verification.select(what, pack=None, **selection)
            arguments = [*_repeated("--import", modules), *_repeated("--check", checks)]
            arguments += [] if what is None else [what]
            arguments += [f"--k={k}", f"--seed={seed}", f"--max-samples={max_samples}"]
            arguments += [f"--max-seconds={max_seconds}"]
            arguments += ["--opinfo" if opinfo else "--no-opinfo"]
            arguments += ["--compile"] if compile else []
            report = verify_in_subprocesses(
                chosen,
                arguments,
                jobs,
                k=k,
                seed=seed,
                log=lambda line: click.echo(line, err=True),
            )
    except opgraft.RegistrationError as error:
        raise click.UsageError(str(error)) from error
    if junit is not None:
        Path(junit).write_text(report.junit() + "\n")
    if as_json:
        output.print_json(report.as_dict())
    else:
        _print(report)
    return report.exit_code


def _repeated(option: str, values: tuple[str, ...]) -> list[str]:
    return [f"{option}={value}" for value in values]


def _print(report: VerificationReport) -> None:
    if report.overrides:
        columns = ["override", "op", "samples", "hits", "misses", "error", "verdict"]
        rows = [
            [
                each.name,
                f"{each.op} at {each.dispatch_key}",
                sum(each.samples.values()),
                each.hits,
                each.misses,
                f"{each.worst_error:.2g} x native" if each.worst_error else "",
                each.verdict,
            ]
            for each in report.overrides
        ]
        output.print_table("opgraft verify", columns, rows)
    for line in report.details():
        # Not through the console, which would wrap a reproducer's lines.
        click.echo(line)
