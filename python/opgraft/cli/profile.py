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
    """Run a script, and print what its ops cost; returns the script's status."""
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
