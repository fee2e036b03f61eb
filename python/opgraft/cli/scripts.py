"""Runs a user's script inside a command, as `python` runs it."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO

import click

#: The exit status after Ctrl-C.
INTERRUPTED = 130


def output_stream(path: str | None) -> AbstractContextManager[TextIO]:
    """The stream for a command's own output: a file, or stderr, because stdout is the script's."""
    if path is None:
        return nullcontext(sys.stderr)
    return Path(path).open("w", encoding="utf-8")


def prepare(script: str, arguments: tuple[str, ...], *, is_module: bool) -> Callable[[], Any]:
    """Set `sys.argv` and `sys.path` for the script; returns a function that runs it.

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
    sys.argv = [name, *arguments]  # runpy replaces the first by the file's name
    _search_first(os.getcwd())
    return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)


def _search_first(folder: str) -> None:
    """Search modules in the folder where `python` would, instead of this command's own folder."""
    if not getattr(sys.flags, "safe_path", False):  # with -P (Python 3.11) neither is searched
        sys.path[0] = folder


def run(script_main: Callable[[], Any]) -> int:
    """Run the script; returns the exit status with which Python would end.

    In a process that the script forked, nothing is returned: it ends, as it would without opgraft,
    and the caller goes on in this process alone.
    """
    process = os.getpid()
    status = _run(script_main)
    if os.getpid() != process:
        raise SystemExit(status)
    return status


def _run(script_main: Callable[[], Any]) -> int:
    try:
        script_main()
    except SystemExit as end:
        return _status(end.code)
    except KeyboardInterrupt:
        traceback.print_exc()
        return INTERRUPTED
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
    """Print a traceback as Python would: from the script's first frame on, if it got that far."""
    frames = error.__traceback__
    while frames is not None and _is_between(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _is_between(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen runpy") or file == runpy.__file__
