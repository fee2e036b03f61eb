"""Where the `opgraft` command begins: outside of the package, so that torch can wait.

Importing opgraft imports torch, which activates the packs and takes seconds. `opgraft --version`,
the help of every command, errors in a command line and `opgraft new` need neither. opgraft looks
whether this module is imported, and then leaves torch to the commands that run.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    from opgraft import cli

    return cli.main(arguments)
