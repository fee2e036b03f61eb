"""Tests that run once more with calls routed in Python."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opgraft.core import loader
from tests import forked_programs

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
    options = "-q", "-p", "no:cacheprovider", "-p", "no:xdist"
    done = forked_programs.run_module(
        *("pytest", *options, *(["-k", selected] if selected else []), *files),
        env=os.environ | {"OPGRAFT_ROUTER": "python"},
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
