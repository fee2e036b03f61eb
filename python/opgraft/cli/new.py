"""`opgraft new`: creates a kernel pack to begin with."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from opgraft.cli import output

# The template is a working pack. Its two names are replaced: the distribution's and the module's.
_TEMPLATES = Path(__file__).parent / "templates" / "pack"
_NAME, _MODULE = "my-pack", "my_pack"


def command(name: str, into: Path, as_json: bool) -> None:
    """Make a kernel pack."""
    if problem := refuse(name):
        raise click.UsageError(f"{name!r} {problem}")
    folder = into / name
    if folder.exists():
        raise click.ClickException(f"{folder} is there already")
    try:
        files = [write(text, folder / path) for path, text in rendered(name)]
    except OSError as error:
        reason = error.strerror or str(error)
        raise click.ClickException(f"{folder} cannot be written: {reason}") from error
    if as_json:
        output.print_json({"folder": str(folder), "files": [str(file) for file in files]})
        return
    click.echo(f"{folder}: a kernel pack, {len(files)} files. Next:")
    click.echo(f"  cd {folder}")
    click.echo("  pip install -e '.[test]'   # with pytest; then opgraft list shows it")
    click.echo("  make test                  # without a GPU in Triton's interpreter")
    tables = f"src/{module_name(name)}/tables"
    click.echo(f"  opgraft tune {name} --output {tables}   # on a GPU: where is it faster?")


def refuse(name: str) -> str:
    """Why a pack cannot have that name; empty where it can.

    >>> refuse("fast-norms"), refuse("2fast")
    ('', 'is no name for a pack: use letters, digits and -, and begin with a letter')
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*", name):
        return "is no name for a pack: use letters, digits and -, and begin with a letter"
    module = module_name(name)
    if keyword.iskeyword(module) or module in sys.stdlib_module_names:
        return f"would be the module {module}, which is Python's own"
    if importlib.util.find_spec(module) is not None:
        return f"would be the module {module}, and a module of that name is installed"
    return ""


def module_name(name: str) -> str:
    """The name of a pack's module.

    >>> module_name("Fast-norms")
    'fast_norms'
    """
    return name.lower().replace("-", "_")


def rendered(name: str) -> Iterator[tuple[Path, str]]:
    """The pack's files: each one's path in its folder, and its text."""
    for file in sorted(_TEMPLATES.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            path, text = file.relative_to(_TEMPLATES), file.read_text(encoding="utf-8")
            yield Path(_named(str(path), name)), _named(text, name)


def _named(text: str, name: str) -> str:
    return text.replace(_MODULE, module_name(name)).replace(_NAME, name)


def write(text: str, path: Path) -> Path:
    """Write a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
