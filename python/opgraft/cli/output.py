"""How the commands print: tables for people, JSON for programs, errors to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table


def print_json(value: Any) -> None:
    """Print what `json` can write to stdout."""
    click.echo(json.dumps(value, indent=2))


def console(stream: TextIO | None = None) -> Console:
    """A console on a stream, by default stdout. It prints text unchanged: `[name]` is no markup.

    If the output is no terminal, lines are not wrapped: `grep` searches line by line.
    """
    stream = stream or sys.stdout
    soft_wrap = not stream.isatty()
    return Console(file=stream, markup=False, emoji=False, highlight=False, soft_wrap=soft_wrap)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    prose: Sequence[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Print a table to stdout or `stream`, without truncating names; None prints as nothing.

    On a terminal, empty columns are left out and the columns of `prose` wrap. If the terminal is
    too narrow for the others, each row becomes a paragraph. Elsewhere (a pipe, a file) each row is
    a line, and tabs separate its cells.
    """
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if not (stream or sys.stdout).isatty():
        for row in ([title.upper()], columns, *cells):
            click.echo("\t".join(" ".join(cell.split()) for cell in row), file=stream)
        return
    used = [i for i, _ in enumerate(columns) if any(row[i] for row in cells)]
    to = console(stream)
    if (
        sum(_min_width(columns[i], [row[i] for row in cells], columns[i] in prose) for i in used)
        + (3 * len(used) + 1)
        > to.width
    ):
        _print_paragraphs(title, columns, cells, stream)
        return
    result = Table(title=title, title_justify="left", title_style="bold")
    for i in used:
        result.add_column(columns[i], overflow="fold", no_wrap=columns[i] not in prose)
    for row in cells:
        result.add_row(*(row[i] for i in used))
    to.print(result)


#: The least width of a prose column.
_MIN_PROSE_WIDTH = 24


def _min_width(heading: str, cells: Sequence[str], is_prose: bool) -> int:
    widest = max(map(cell_len, (heading, *cells)))
    if not is_prose:
        return widest
    words = max((cell_len(word) for cell in (heading, *cells) for word in cell.split()), default=0)
    return min(widest, max(_MIN_PROSE_WIDTH, words))


def _print_paragraphs(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    stream: TextIO | None,
) -> None:
    """Print rows as paragraphs. Not through rich, which would break a long name in two."""
    click.echo(click.style(title, bold=True), file=stream)
    for row in rows:
        first, *rest = [(name, cell) for name, cell in zip(columns, row, strict=True) if cell]
        click.echo(first[1], file=stream)
        for name, cell in rest:
            click.echo(f"  {name}: {cell}" if name else f"  {cell}", file=stream)
