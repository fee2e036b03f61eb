"""`--import`: the modules that a user names, which register overrides."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable

import click


def import_all(modules: Iterable[str]) -> None:
    """Import the modules that a user names."""
    for module in modules:
        # As for `python -m`, a user's module is searched in the current folder.
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)
        if not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
            raise click.UsageError(
                f"--import takes a module's name, as `import` has it, not {module!r}"
            )
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever its code raises
            about = f"{type(error).__name__}: {error}"
            raise click.ClickException(f"--import {module}: {about}") from error
