"""Tests that run once more with calls routed in Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opgraft.core import loader

#: For the test that runs a file's others once more.
where_the_core_routes = pytest.mark.skipif(
    loader.in_use() is None, reason="this is the router in Python"
)


def run_again(*files: str | Path, selected: str = "") -> None:
    """Run the tests of files in a process that routes in Python.

    Args:
        *files: of tests.
        selected: pytest's `-k`.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *(["-k", selected] if selected else []), *map(str, files)],
        env=os.environ | {"OPGRAFT_ROUTER": "python"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
