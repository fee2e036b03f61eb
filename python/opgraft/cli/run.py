"""`opgraft run`: runs a script with a trace, and prints where its calls went."""

from __future__ import annotations

import json

import opgraft
from opgraft.cli import scripts


def command(
    is_module: bool, path: str | None, as_json: bool, script: str, arguments: tuple[str, ...]
) -> int:
    """Run a script, and print where the calls of its ops went; returns the script's status."""
    opgraft.packs.activate()
    script_main = scripts.prepare(script, arguments, is_module=is_module)
    with opgraft.trace() as trace:
        status = scripts.run(script_main)
    with scripts.output_stream(path) as stream:
        print(json.dumps(trace.as_dict(), indent=2) if as_json else trace, file=stream)
    return status
