"""`opgraft warmup`: runs a script to fill the DSLs' caches, and prints its launch plans."""

from __future__ import annotations

import json

import click

import opgraft
from opgraft.cli import scripts
from opgraft.plan import warm


@click.command("warmup", context_settings=scripts.CONTEXT)
@scripts.script_and_json_options
def command(
    is_module: bool, path: str | None, as_json: bool, script: str, arguments: tuple[str, ...]
) -> int:
    """Run SCRIPT with its ARGUMENTS, to compile and tune the kernels that it needs in advance.

    The caches on disk keep what is compiled for the next process. Launch plans belong to their
    process. How many of them a run of the script records, and what cannot be recorded, is printed
    to stderr. Packs are active, as after `import torch`. The exit status is the script's.
    """
    opgraft.packs.activate()
    script_main = scripts.prepare(script, arguments, is_module=is_module)
    with warm.watching() as report:
        status = scripts.run(script_main)
    with scripts.output_stream(path) as stream:
        print(json.dumps(report.as_dict(), indent=2) if as_json else report, file=stream)
    return status
