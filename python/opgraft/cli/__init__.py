"""The `opgraft` command: a module for each of its commands.

Exit status: 0, it was done; 1, it was not (the core cannot be built, a name is taken), or something
that is installed does not work (`doctor`) or is wrong (`verify`); 2, the command line is wrong; 3,
what should be verified cannot be here. `run` and `warmup` end with the status of the program that
they ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from opgraft import _metadata
from opgraft.cli import build, doctor, explain, listing, new, run, verify, warmup

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(_metadata.version("opgraft") or "unknown", prog_name="opgraft")
def opgraft() -> None:
    """Kernels written in Triton or CuteDSL under PyTorch's own operators."""


for _command in (
    listing.command,
    explain.command,
    doctor.command,
    verify.command,
    run.command,
    warmup.command,
    new.command,
    build.command,
):
    opgraft.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    try:
        status = opgraft.main(arguments, prog_name="opgraft", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:  # Ctrl-C
        click.echo("opgraft: interrupted", err=True)
        return 130
    return status if isinstance(status, int) else 0
