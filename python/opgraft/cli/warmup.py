"""`opgraft warmup`: runs a script to fill the DSLs' caches, and tells what it compiled."""

from __future__ import annotations

import datetime
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import click
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import opgraft
from opgraft import packs, spelling
from opgraft.base import env
from opgraft.cache import bundles
from opgraft.cli import output, scripts
from opgraft.plan import warm
from opgraft.ready import plan_keys, readiness

#: Seconds between two steps of the progress bar.
_STEP_SECONDS = 0.2


def command(
    is_module: bool,
    path: str | None,
    as_json: bool,
    wait: bool,
    bundle: Path | None,
    pack: str | None,
    dsl: str | None,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run a script, and print what was compiled for it; returns the script's status."""
    if bundle is None and (pack is not None or dsl is not None):
        raise click.UsageError("--pack and --dsl say what is in a bundle: give --bundle, too")
    if pack is not None and pack not in packs.installed():
        there = ", ".join(packs.installed()) or "none"
        raise click.UsageError(f"--pack: there is no pack {pack!r} installed; there is: {there}")
    if dsl is not None and (problem := spelling.problem_with("dsl", dsl)):
        raise click.UsageError(f"--dsl: {problem}")
    if bundle is not None and wait:
        raise click.UsageError("--bundle takes what workers record: leave out --wait")
    if bundle is not None and not env.shares_plans():
        raise click.UsageError("OPGRAFT_KERNELS=none keeps no launch plan: unset it for --bundle")
    opgraft.packs.activate()
    script_main = scripts.prepare(script, arguments, is_module=is_module)
    with warm.watching(in_parallel=not wait) as report:
        status = scripts.run(script_main)
    if status != scripts.INTERRUPTED and not _wait_for_workers():
        status = scripts.INTERRUPTED
    with scripts.output_stream(path) as stream:
        if as_json:
            print(json.dumps(report.as_dict(), indent=2), file=stream)
        else:
            _print_table(report, stream)
    if bundle is not None and status != scripts.INTERRUPTED:
        _write_bundle(bundle, pack, dsl)
    return status


def _write_bundle(folder: Path, pack: str | None, dsl: str | None) -> None:
    kept = readiness.kept_plans(pack, dsl)
    try:
        count = bundles.write(folder, kept, _about())
    except (bundles.BundleError, OSError) as error:
        raise click.ClickException(f"the bundle cannot be written: {error}") from error
    plans = "1 launch plan is" if count == 1 else f"{count} launch plans are"
    print(f"opgraft: {plans} in {folder}", file=sys.stderr)


def _about() -> dict[str, Any]:
    """What a bundle fits."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    made = datetime.date.today().isoformat()
    return {"devices": devices, "versions": plan_keys.versions(), "made": made}


def _wait_for_workers() -> bool:
    """Wait until the workers are done; False if Ctrl-C ended that."""
    done, total = readiness.progress()
    if done == total:
        return True
    console = output.console(sys.stderr)
    if not console.is_terminal:
        print(f"opgraft: compiling for {total - done} kinds of calls", file=sys.stderr, flush=True)
    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=total)
            while not readiness.wait_until_ready(_STEP_SECONDS):
                done, total = readiness.progress()
                bar.update(task, completed=done, total=total)
            bar.update(task, completed=total)
    except KeyboardInterrupt:
        return False
    return True


def _print_table(report: warm.WarmUp, stream: TextIO) -> None:
    if not report.overrides:
        print("no override ran", file=stream)
        return
    output.print_table(
        "opgraft warmup",
        ["override", "hits", "calls ready", "not ready", "launch plans"],
        [
            [each.override.name, each.hits, _ready(each), _not_ready(each), _plans(each)]
            for each in report
        ],
        prose=["calls ready", "not ready", "launch plans"],
        stream=stream,
    )


def _ready(warmed: warm.Warmed) -> str:
    by = Counter(
        "workers" if state.by.startswith("worker ") else state.by
        for state in warmed.states
        if state.status == "ready" and state.by != readiness.A_LATER_CALL
    )
    return ", ".join(f"{count} by {who}" for who, count in by.items())


def _not_ready(warmed: warm.Warmed) -> str:
    """How many failed, with each reason, and how many are not done."""
    failed = Counter(state.reason for state in warmed.states if state.status == "failed")
    parts = [f"{count} failed: {reason}" for reason, count in failed.items()]
    later = sum(state.by == readiness.A_LATER_CALL for state in warmed.states)
    if later:
        parts.append(f"{later} left to {readiness.A_LATER_CALL}")
    rest = readiness.summary(state for state in warmed.states if state.is_pending)
    return "; ".join([*parts, rest] if rest else parts)


def _plans(warmed: warm.Warmed) -> str:
    plans = warmed.override.plans
    return "none" if plans is None else plans.summary()
