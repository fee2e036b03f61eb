"""`opgraft profile`: runs a script, and prints what its ops cost and could cost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

import click
import torch

import opgraft
from opgraft.cli import output, scripts
from opgraft.profiling import profile_report


@click.command("profile", context_settings=scripts.CONTEXT)
@scripts.script_options
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Leave out everything before the end of an optimizer's Nth step.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Profile N steps of an optimizer.  [default: to the script's end]",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    metavar="N",
    help="How many kinds of call to print, those with most time.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write JSON to a file.")
@click.option(
    "--html", "html_path", type=click.Path(dir_okay=False), help="Write a page with a plot."
)
def command(
    is_module: bool,
    path: str | None,
    warmup: int,
    steps: int | None,
    rows: int,
    json_path: str | None,
    html_path: str | None,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run SCRIPT and print to stderr what its ops cost, who took them, and the device's limit.

    The whole script is profiled, or with --warmup and --steps some steps of its training: a step
    ends where an optimizer's step does. A script without an optimizer can mark its steps itself,
    with opgraft.profile(). Packs are active. The exit status is the script's.

    opgraft profile --warmup 3 --steps 5 --html profile.html train.py
    """
    opgraft.packs.activate()
    script_main = scripts.prepare(script, arguments, is_module=is_module)
    profile = opgraft.profile(warmup=warmup, steps=steps)
    with profile, _marked(profile.step) if warmup or steps else nullcontext():
        status = scripts.run(script_main)
    try:
        found = profile.report
    except RuntimeError as error:
        click.echo(f"opgraft profile: {error}", err=True)
        return status or 1
    with scripts.output_stream(path) as stream:
        _print(found, rows, stream)
    for place in filter(None, (json_path, html_path)):
        text = profile.as_json() if place == json_path else profile.html()
        Path(place).write_text(text, encoding="utf-8")
    return status


@contextmanager
def _marked(step: Callable[[], None]) -> Iterator[None]:
    """A scope in which each optimizer step on this thread calls `step`."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    here = threading.get_ident()

    def mark(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == here:
            step()

    handle = register_optimizer_step_post_hook(mark)
    try:
        yield
    finally:
        handle.remove()


def _print(found: profile_report.ProfileReport, rows: int, stream: TextIO) -> None:
    shown = found.lines[:rows]
    to = output.console(stream)
    for line in profile_report.head(found):
        to.print(line)
    cells = [profile_report.cells(line, found.steps) for line in shown]
    prose = ["inputs", "note"]
    output.print_table(
        "opgraft profile", profile_report.HEADINGS, cells, prose=prose, stream=stream
    )
    for line in filter(
        None, [profile_report.rest_text(found, len(shown)), *profile_report.tail(found)]
    ):
        to.print(line)
