"""`opgraft run`: runs a program with a trace, and prints where its calls went."""

from __future__ import annotations

import json

import click

import opgraft
from opgraft.cli import programs


@click.command("run", context_settings=programs.CONTEXT)
@programs.options
def command(
    is_module: bool, path: str | None, as_json: bool, script: str, arguments: tuple[str, ...]
) -> int:
    """Run SCRIPT with its ARGUMENTS and print to stderr where the calls of its ops went.

    The packs are active in it, as after `import torch`. The exit status is the script's.
    """
    opgraft.packs.activate()
    program = programs.prepare(script, arguments, is_module=is_module)
    with opgraft.trace() as trace:
        status = programs.run(program)
    with programs.report_stream(path) as stream:
        print(json.dumps(trace.as_dict(), indent=2) if as_json else trace, file=stream)
    return status
