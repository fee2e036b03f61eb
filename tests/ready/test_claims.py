"""Claims: one process of a machine holds a name at a time, and a dead one holds none."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from opgraft.ready.claims import Claim


def test_one_holds_it_at_a_time(tmp_path: Path) -> None:
    first, second = Claim("key", tmp_path), Claim("key", tmp_path)
    assert first.take() and not second.take()
    assert first.owner() == second.owner() == os.getpid()
    first.release()
    assert second.take()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_taking_it_again_is_no_second_claim(tmp_path: Path) -> None:
    claim = Claim("key", tmp_path)
    assert claim.take() and claim.take()
    claim.release()
    claim.release()
    assert claim.owner() is None


def test_the_claim_of_a_process_that_ended_is_void(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from opgraft.ready.claims import Claim;"
        "assert Claim('key', Path(sys.argv[1])).take(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert (tmp_path / "key").exists()
    assert Claim("key", tmp_path).owner() is None
    assert Claim("key", tmp_path).take()


def test_a_process_with_the_same_number_that_started_later_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(json.dumps([os.getpid(), 1]))
    assert Claim("key", tmp_path).take()


@pytest.mark.parametrize("content", ["", "{", "[1]", "[null, null]", '"text"', "[-1, -1]"])
def test_a_damaged_claim_is_void(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    assert Claim("key", tmp_path).owner() is None
    assert Claim("key", tmp_path).take()


def _claim_often(place: str, told: Connection) -> None:
    """Holds it many times; tells how often it found somebody else inside."""
    claim, inside, met = Claim("key", Path(place)), Path(place) / "inside", 0
    held = 0
    while held < 100:
        if not claim.take():
            continue
        held += 1
        try:
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
            inside.unlink()
        except FileExistsError:
            met += 1
        if held % 10 == 0:  # as a process that dies leaves it
            (Path(place) / "key").write_text(json.dumps([2**22, 5]))
            claim._held = False
        else:
            claim.release()
    told.send(met)


def test_no_two_hold_it_whoever_dies(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(4)]
    processes = [
        context.Process(target=_claim_often, args=(str(tmp_path), theirs)) for _, theirs in pipes
    ]
    for each in processes:
        each.start()
    found = [mine.recv() if mine.poll(60) else "nothing" for mine, _ in pipes]
    for each in processes:
        each.join(10)
        each.kill()
    assert found == [0, 0, 0, 0]
