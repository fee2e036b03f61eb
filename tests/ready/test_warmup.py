"""`opgraft warmup script.py` has workers compile while the script runs, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opgraft.core import loader
from tests import forked_programs
from tests.test_output import on_a_terminal

pytestmark = pytest.mark.skipif(
    loader.in_use() is None, reason="plans, which say what is ready, need the compiled core"
)

LIMIT = 200
SCRIPT = f"""
import sys, torch, opgraft
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from opgraft.ready import pool
from tests.ready import impls
pool.MAX_WAITING = 1
print("the script runs")
def local(self):
    return 0 - self
impl = getattr(impls, sys.argv[1], None) or local
opgraft.register_op_override(
    "aten", "neg", "CPU", impl, unconditional_override=True, launch_plan=True, name="mine")
for size in range(1, 1 + int(sys.argv[2])):
    torch.neg(torch.ones(size))
"""


def command(folder: Path, *words: str, ending: str = "") -> tuple[list[str], dict[str, str]]:
    (folder / "script.py").write_text(SCRIPT + ending)
    environment = os.environ | {
        "OPGRAFT_CACHE": str(folder / "cache"),
        "OPGRAFT_TEST_NOTES": str(folder / "notes"),
    }
    return [sys.executable, "-m", "opgraft", "warmup", *words], environment


def warm_up(folder: Path, *words: str, ending: str = "") -> subprocess.CompletedProcess[str]:
    (_, _, name, *arguments), environment = command(folder, *words, ending=ending)
    return forked_programs.run_module(
        name, *arguments, env=environment, cwd=folder, forks_workers=True
    )


def cells(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The row of the override in the table that ends the output."""
    (row,) = [line for line in done.stderr.splitlines() if line.startswith("mine\t")]
    return row.split("\t")


def warm_up_json(folder: Path, *words: str) -> Any:
    done = warm_up(folder, "--json", "-o", "found.json", *words)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((folder / "found.json").read_text())["overrides"]
    return found


def test_workers_compile_for_every_call_of_a_script_that_runs_once(tmp_path: Path) -> None:
    done = warm_up(tmp_path, "script.py", "tells_when_dry", "6")
    assert (done.returncode, done.stdout) == (0, "the script runs\n"), done.stderr
    assert "opgraft: compiling for " in done.stderr
    assert cells(done)[2:4] == ["6 by workers", ""]
    shapes = {line.split()[1] for line in (tmp_path / "notes").read_text().splitlines()}
    assert shapes == {f"({size},)" for size in range(1, 7)}


def test_the_json_has_what_became_of_each_kind_of_call(tmp_path: Path) -> None:
    found = warm_up_json(tmp_path, "script.py", "negated", "2")
    states = found["plans"]["readiness"]
    assert [each["status"] for each in states] == ["ready", "ready"]
    assert all(each["by"].startswith("worker ") for each in states)


def test_the_table_tells_what_failed_and_why(tmp_path: Path) -> None:
    row = cells(warm_up(tmp_path, "script.py", "crashes_when_dry", "1"))
    assert row[1:3] == ["0", ""]
    assert "1 failed: the worker that compiled it ended with" in row[3]


def test_a_call_for_which_no_worker_can_compile_waits(tmp_path: Path) -> None:
    done = warm_up(tmp_path, "script.py", "local", "3")
    assert cells(done)[1:4] == ["3", "3 by the call itself", ""]
    assert "opgraft: compiling for" not in done.stderr


def test_with_wait_every_call_waits(tmp_path: Path) -> None:
    found = warm_up_json(tmp_path, "--wait", "script.py", "negated", "3")
    assert (found["hits"], found["plans"]["readiness"]) == (3, [])


def test_the_status_is_that_of_the_script(tmp_path: Path) -> None:
    done = warm_up(tmp_path, "script.py", "negated", "1", ending="\nsys.exit(3)\n")
    assert done.returncode == 3
    assert cells(done)[2] == "1 by workers"


def test_on_a_terminal_there_is_a_progress_bar(tmp_path: Path) -> None:
    line, environment = command(tmp_path, "script.py", "negated", "2")
    status, printed = on_a_terminal(
        line, environment | {"TERM": "xterm"}, 120, folder=tmp_path, only_errors=True
    )
    assert status == 0
    assert "compiling" in printed and "2/2" in printed
    assert "opgraft: compiling for" not in printed
