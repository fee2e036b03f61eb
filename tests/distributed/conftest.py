"""What the scenarios computed, over which processes: each number of them is started once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import filelock
import pytest

ROOT = Path(__file__).parents[2]

#: Of a scenario's name, how many processes and the backend: what each rank found.
Trained: TypeAlias = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one of several, whose folder is in the shared one
        shared = shared.parent

    def of(name: str, world: int, backend: str = "gloo") -> list[dict[str, Any]]:
        folder = shared / f"{backend}{world}"
        with filelock.FileLock(f"{folder}.lock"):
            if not folder.exists():
                folder.mkdir()
                start(world, folder, backend)
        try:
            return [json.loads((folder / f"{r}.json").read_text())[name] for r in range(world)]
        except FileNotFoundError:
            log = (folder / "log").read_text()
            raise AssertionError(f"a rank did not end:\n{log}") from None

    return of


def start(world: int, folder: Path, backend: str) -> None:
    command = [sys.executable, "-m", "tests.distributed.scenarios", str(world), str(folder)]
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(
            [*command, backend], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        try:
            process.wait(timeout=240)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks, too
            raise
