"""The `opgraft` command: a module for each of its commands.

The exit status is

- 0: the command succeeded;
- 1: it failed (the core cannot be built, a name is taken), or something that is installed does not
  work (`doctor`) or is wrong (`verify`);
- 2: the command line is wrong;
- 3: something cannot be verified here (`verify`).

`run`, `profile` and `warmup` end with the status of the script that they ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from opgraft.cli.command_line import opgraft

__all__ = ["main", "opgraft"]


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
