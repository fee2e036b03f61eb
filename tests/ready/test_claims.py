"""Claims: one process of a machine holds a name at a time, and a dead one holds none."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from opgraft.ready import claims
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


#: Claims in a thread, as the pool does.
CLAIMS = """
import os, signal, sys, threading
from pathlib import Path
from opgraft.ready.claims import Claim

done = threading.Event()
def hold():
    assert Claim("key", Path(sys.argv[1])).take()
    print("held", flush=True)
    done.wait()
thread = threading.Thread(target=hold)
thread.start()
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    "ending",
    [
        "os.execvp('sleep', ['sleep', '1000'])",
        "done.set(); thread.join(); print('gone', flush=True); signal.pause()",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ],
    ids=["another program", "its thread ended", "stopped"],
)
def test_the_claim_of_a_process_that_lives_on_without_it_is_void(
    tmp_path: Path, ending: str
) -> None:
    command = [sys.executable, "-c", CLAIMS + ending, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            claim = Claim("key", tmp_path)
            assert claim.owner() is not None and not claim.take()
            process.stdin.write("\n")
            deadline = time.monotonic() + 60
            while claim.owner() is not None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert process.poll() is None and claim.take()
        finally:
            process.kill()


def test_a_process_with_the_same_number_that_started_later_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(json.dumps([os.getpid(), 1]))
    assert Claim("key", tmp_path).take()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", "[null, null]", '"text"', "[-1, -1]", "[Infinity, 1]", "[" * 10_000, "\0"],
)
def test_a_damaged_claim_is_void(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    assert Claim("key", tmp_path).owner() is None
    assert Claim("key", tmp_path).take()


def test_a_process_that_ended_while_it_removed_a_void_claim_stops_nobody(tmp_path: Path) -> None:
    gone = json.dumps([2**22, 5])
    (tmp_path / "key").write_text(gone)
    (tmp_path / f"key.void-{2**22}-5").write_text(gone)
    assert Claim("key", tmp_path).take()


def test_where_nothing_can_be_written_everybody_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = (Claim("key", tmp_path / "file" / "folder") for _ in range(2))
    assert first.take() and second.take()
    first.release()


def test_a_full_disk_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    claim = Claim("key", tmp_path)
    assert claim.take()
    claim.release()
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_claimed_stays_its_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Claim("key", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError()))
        assert claim.take()
    other = json.dumps([1, claims._started(1)])
    (tmp_path / "key").write_text(other)
    claim.release()
    assert (tmp_path / "key").read_text() == other


@pytest.mark.parametrize(
    "of", ["opgraft.ready.claims._boot", "opgraft.ready.claims._namespace", "socket.gethostname"]
)
def test_another_machines_claim_is_none_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """Nor one from before the machine was started anew, nor a container's: numbers of processes
    say nothing of theirs."""
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(of, lambda: "another")
        theirs = Claim("key")
        assert theirs.take() and not Claim("key").take()
    assert Claim("key").owner() is None
    assert Claim("key").take()


def test_who_waits_for_a_claim_writes_nothing(tmp_path: Path) -> None:
    assert Claim("key", tmp_path).take()
    before = tmp_path.stat().st_mtime_ns
    assert not Claim("key", tmp_path).take()
    assert tmp_path.stat().st_mtime_ns == before


def test_a_user_without_a_home_has_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPGRAFT_CACHE", raising=False)
    monkeypatch.setenv("HOME", "~nobody-at-all")
    claim = Claim("tests")
    assert claim.take() and claim.owner() == os.getpid()
    claim.release()


def test_without_proc_no_claim_stays_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_started", lambda process: -1)
    (tmp_path / "key").write_text(json.dumps([2**22, -1]))
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
