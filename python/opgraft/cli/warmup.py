"""`opgraft warmup`: runs a program to fill the DSLs' caches, and tells what its plans would be."""

from __future__ import annotations

import json

import click

import opgraft
from opgraft.cli import programs
from opgraft.plan import warm


@click.command("warmup", context_settings=programs.CONTEXT)
@programs.options
def command(
    is_module: bool, path: str | None, as_json: bool, script: str, arguments: tuple[str, ...]
) -> int:
    """Run SCRIPT with its ARGUMENTS, to compile and tune the kernels that it needs ahead.

    What is compiled stays in the caches on disk, for the next process. Launch plans belong to their
    process; what is printed to stderr of them is how many a run of the script records, and what
    cannot be recorded. The packs are active, as after `import torch`. The exit status is the
    script's.
    """
    opgraft.packs.activate()
    program = programs.prepare(script, arguments, is_module=is_module)
    with warm.watching() as report, opgraft.when_not_ready("wait"):
        status = programs.run(program)
    with programs.report_stream(path) as stream:
        print(json.dumps(report.as_dict(), indent=2) if as_json else report, file=stream)
    return status
