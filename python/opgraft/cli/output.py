"""How the commands print: tables for people, JSON for programs, errors to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

Command = TypeVar("Command", bound=Callable[..., Any])

#: Columns where the output is no terminal: a log, a file, another program.
WIDTH = 160


def json_option(command: Command) -> Command:
    """Add `--json` to a command, as its parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def print_json(value: Any) -> None:
    """Print what `json` can write to stdout."""
    click.echo(json.dumps(value, indent=2))


def console(*, stderr: bool = False) -> Console:
    """Where tables go. What is printed is shown as it is: `[name]` is no markup here."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table; None is printed as nothing."""
    result = Table(*columns, title=title, title_justify="left", title_style="bold")
    for row in rows:
        result.add_row(*("" if cell is None else str(cell) for cell in row))
    return result
