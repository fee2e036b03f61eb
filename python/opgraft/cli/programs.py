"""A user's program, run inside a command as `python` runs it."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from opgraft.cli import output

Command = TypeVar("Command", bound=Callable[..., Any])

#: What comes after the script's name is the script's, options as well.
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def options(command: Command) -> Command:
    """Add `-m`, `-o`, `--json`, SCRIPT and ARGUMENTS to a command."""
    return program_options(output.json_option(command))


def program_options(command: Command) -> Command:
    """Add `-m`, `-o`, SCRIPT and ARGUMENTS to a command."""
    command = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)(command)
    command = click.argument("script")(command)
    command = click.option(
        "-o", "--output", "path", type=click.Path(dir_okay=False), help="A file for the table."
    )(command)
    return click.option(
        "-m", "is_module", is_flag=True, help="Run a module by its name, as python -m does."
    )(command)


def report_stream(path: str | None) -> AbstractContextManager[TextIO]:
    """Where a command's own output goes, since stdout is the program's: to a file, or stderr."""
    if path is None:
        return nullcontext(sys.stderr)
    return Path(path).open("w", encoding="utf-8")


def prepare(script: str, arguments: tuple[str, ...], *, is_module: bool) -> Callable[[], Any]:
    """Give the program its command line and its place to import from; returns what runs it.

    Raises:
        click.UsageError: there is no such file.
    """
    return _module(script, arguments) if is_module else _file(script, arguments)


def _file(script: str, arguments: tuple[str, ...]) -> Callable[[], Any]:
    if not Path(script).exists():
        raise click.UsageError(f"there is no file {script!r}; -m runs a module by its name")
    sys.argv = [script, *arguments]
    _search_first(str(Path(script).resolve().parent))
    return lambda: runpy.run_path(script, run_name="__main__")


def _module(name: str, arguments: tuple[str, ...]) -> Callable[[], Any]:
    sys.argv = [name, *arguments]  # runpy puts the file's name first
    _search_first(os.getcwd())
    return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)


def _search_first(folder: str) -> None:
    """Look for modules where `python` would, in place of this command's own folder."""
    if not getattr(sys.flags, "safe_path", False):  # with -P, from Python 3.11 on, there is neither
        sys.path[0] = folder


def run(program: Callable[[], Any]) -> int:
    """The exit status that Python would end with."""
    try:
        program()
    except SystemExit as end:
        return _status(end.code)
    except KeyboardInterrupt:
        traceback.print_exc()
        return 130
    except BaseException as error:
        _print_traceback(error)
        return 1
    return 0


def _status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)  # sys.exit("message")
    return 1


def _print_traceback(error: BaseException) -> None:
    """As Python prints it: from the script's first frame on, where it got as far."""
    frames = error.__traceback__
    while frames is not None and _is_between(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _is_between(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen runpy") or file == runpy.__file__
