"""`opgraft verify`: are the overrides right? Compares them with PyTorch's kernels, on its tests."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click
import torch

import opgraft
from opgraft import verification
from opgraft.cli import modules as named_modules
from opgraft.cli import output
from opgraft.verification import journal, reproduction
from opgraft.verification.subprocesses import lost_its_device, verify_in_subprocesses
from opgraft.verification.verification_report import VerificationReport


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
    """Print what was verified of overrides."""
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
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # raises where the device was lost
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
    except Exception as error:
        if not lost_its_device(error):
            raise
        raise click.ClickException(
            f"the device was lost, so nothing more can be verified in this process: {error}\n"
            "With --jobs 2 each override has a process of its own, and calls on which the native "
            "kernel alone loses the device are left out"
        ) from error
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
