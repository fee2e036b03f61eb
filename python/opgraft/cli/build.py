"""`opgraft build`: compiles the core for the torch that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

import click
import torch

from opgraft.base import locks
from opgraft.cli import output
from opgraft.core import building, loader, store

# It runs in its own process: a core cannot be unloaded, and a broken one may crash the process.
_TRIAL = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location(*sys.argv[1:])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""


def command(force: bool, as_json: bool) -> None:
    """Compile the core, and print where it is."""
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            path = build(force=force)
    except (building.BuildError, OSError) as error:
        raise click.ClickException(f"the core cannot be built: {error}") from error
    if as_json:
        output.print_json({"torch": str(torch.__version__), "core": str(path)})


def build(*, force: bool = False) -> Path:
    """Compile the core for the running torch into the cache, unless there already is one.

    Returns:
        The core's file.

    Raises:
        BuildError: it cannot be compiled here.
    """
    status = loader.status()
    if status.built and not force:
        print(f"opgraft: nothing to do, there is one: {status}")
        return Path(str(getattr(loader.load(), "__file__", "")))
    target = store.core_path(torch.__version__)
    root = target.parent.parent
    replaces = target.is_file()  # the existing core does not fit, or --force is given
    with _private_files():
        root.mkdir(parents=True, exist_ok=True)
        if reason := store.why_untrusted(root):
            raise building.BuildError(f"the cache {root} cannot be used: {reason}")
        with locks.file_lock(root / f"{target.parent.name}.lock", _say_that_it_waits):
            if replaces or not target.is_file():
                _build_into(target)
    print(f"opgraft: the core for torch {torch.__version__} is {target}")
    return target


def _build_into(target: Path) -> None:
    include = Path(torch.__file__).parent / "include"
    _check_headers(include)
    print(
        f"opgraft: compiling the core for torch {torch.__version__} with "
        f"{' '.join(building.find_compiler())}, about a minute on two processors",
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=target.parent.parent, prefix=".build") as place:
        fresh = Path(place) / "core" / target.name
        building.compile_core(
            include, fresh, folder=building.sources(), objects=Path(place) / "objects"
        )
        _try(fresh)
        if target.parent.exists():
            target.parent.rename(Path(place) / "replaced")
        fresh.parent.rename(target.parent)


def _check_headers(include: Path) -> None:
    found = building.headers_release(include)
    if building.release(found) != building.release(torch.__version__):
        raise building.BuildError(
            f"{include} has the headers of torch {found}, and this is {torch.__version__}: "
            "reinstall torch"
        )


def _try(core: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TRIAL, building.module_name(torch.__version__), str(core)],
        cwd=core.parent,  # Python looks for modules there first
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise building.BuildError(f"it was compiled, but does not load:\n{done.stderr.strip()}")


@contextmanager
def _private_files() -> Iterator[None]:
    """A scope in which created files are private to this user; the umask is the whole process's."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _say_that_it_waits() -> None:
    print("opgraft: waiting for another process that is building it", flush=True)
