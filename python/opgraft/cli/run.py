"""`opgraft run`: runs a program with a trace, and prints where its calls went."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import click

import opgraft
from opgraft.cli import output


@click.command(
    "run",
    # What comes after the script's name is the script's, options as well.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-m", "is_module", is_flag=True, help="Run a module by its name, as python -m does.")
@click.option(
    "-o", "--output", "path", type=click.Path(dir_okay=False), help="A file for the table."
)
@output.json_option
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    is_module: bool, path: str | None, as_json: bool, script: str, arguments: tuple[str, ...]
) -> int:
    """Run SCRIPT with its ARGUMENTS and print to stderr where the calls of its ops went.

    The packs are active in it, as after `import torch`. The exit status is the script's.
    """
    opgraft.packs.activate()
    program = _module(script, arguments) if is_module else _file(script, arguments)
    with opgraft.trace() as trace:
        status = _run(program)
    with _stream(path) as stream:
        if as_json:
            print(json.dumps(trace.as_dict(), indent=2), file=stream)
        else:
            print(trace, file=stream)
    return status


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


def _run(program: Callable[[], Any]) -> int:
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


def _stream(path: str | None) -> contextlib.AbstractContextManager[TextIO]:
    if path is None:
        return contextlib.nullcontext(sys.stderr)
    return Path(path).open("w", encoding="utf-8")
