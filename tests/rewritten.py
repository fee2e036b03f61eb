"""Writes the bytecode of the tests, with assertions as pytest rewrites them: run as a program.

Each process that runs tests would rewrite all of them to collect them, workers at the same time,
and those that tests start would do it again for what they run. Pytest reads what is written here,
and rewrites what it does not find: it compares a hash of each file.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _pytest.assertion import rewrite

ROOT = Path(__file__).parents[1]
FOLDERS = "tests", "kernels/*/tests"


def files() -> list[Path]:
    """Those that pytest rewrites, the largest first."""
    found = {
        path
        for folder in FOLDERS
        for name in ("test_*.py", "conftest.py")
        for path in ROOT.glob(f"{folder}/**/{name}")
    }
    return sorted(found, key=lambda path: path.stat().st_size, reverse=True)


def write(path: Path) -> None:
    """Write what pytest reads in place of a file, where it is not there."""
    folder = rewrite.get_cache_dir(path)
    written = folder / (path.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, written) is not None:
        return
    state: Any = SimpleNamespace(trace=lambda text: None)
    facts, code = rewrite._rewrite_test(path, None)  # type: ignore[arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    rewrite._write_pyc(state, code, facts, written)


if __name__ == "__main__":
    with multiprocessing.Pool() as pool:
        pool.map(write, files(), chunksize=4)
