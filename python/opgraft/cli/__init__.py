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

import importlib
from collections.abc import Sequence
from typing import NamedTuple

import click

import opgraft as package
from opgraft.base import distributions

__all__ = ["main"]


class _Command(NamedTuple):
    """A command's module, and its text in `opgraft --help`, which does not import the module."""

    module: str
    help: str
    needs_torch: bool = True


_COMMANDS = {
    "list": _Command(
        "listing",
        "List the installed packs, and the overrides that `import torch` brings here.",
    ),
    "explain": _Command(
        "explain",
        "Say which override would take a call of OP, and why each other one would not.",
    ),
    "doctor": _Command(
        "doctor",
        "Check torch, the DSLs, the GPU, cuDNN, the core, the packs, caches and neighbours.",
    ),
    "verify": _Command("verify", "Check overrides against the native kernels that they replace."),
    "tune": _Command(
        "tune", "Measure from where on overrides are faster than native, and write tables."
    ),
    "run": _Command(
        "run", "Run SCRIPT with its ARGUMENTS and print to stderr where the calls of its ops went."
    ),
    "profile": _Command(
        "profile",
        "Run SCRIPT and print to stderr what its ops cost, who took them, and the device's limit.",
    ),
    "warmup": _Command(
        "warmup",
        "Run SCRIPT with its ARGUMENTS, to compile the kernels that it needs in advance.",
    ),
    "new": _Command(
        "new",
        "Make a kernel pack called NAME: a Triton kernel with its conditions and tests.",
        needs_torch=False,
    ),
    "build": _Command("build", "Compile the core for the torch that is installed."),
}


class _Commands(click.Group):
    """Imports a command's module, and torch if it needs it, when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = _COMMANDS.get(cmd_name)
        if home is None:
            return None
        if home.needs_torch:
            package._import_torch()
        found: click.Command = importlib.import_module(f"{__name__}.{home.module}").command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, home.help) for name, home in _COMMANDS.items()])


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(distributions.version("opgraft") or "unknown", prog_name="opgraft")
def opgraft() -> None:
    """Kernels written in Triton or CuteDSL under PyTorch's own operators."""


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
