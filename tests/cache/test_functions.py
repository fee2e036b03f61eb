"""`cutedsl_utils.Functions`: when a function is compiled, kept, loaded, and when it is not.

What CuteDSL compiles stands in here; `kernels/opgraft-kernels/tests/test_ready.py` has it itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from opgraft.cache import cutedsl, entries, origins
from opgraft.cutedsl_utils import Functions
from tests.cache.compiles import (
    Compiled,
    Kind,
    compile_anything,
    compile_kind,
    compile_kind_without_facts,
    compile_with_facts,
    compiled,
    compiled_facts,
)

CPU = torch.device("cpu")


def load(path: str, needs: list[str]) -> Callable[..., None]:
    assert Path(path).read_bytes() == b"a library" and needs == ["/a/runtime.so"]
    return lambda called: called.append("loaded")


@pytest.fixture(autouse=True)
def without_cutedsl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled.clear()
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cutedsl, "_exported", lambda function: (b"a library", ["/a/runtime.so"]))
    monkeypatch.setattr(origins, "_began", lambda: time.time() + 1)
    origins._hash.cache_clear()
    stand_in = type(sys)("opgraft.cache.loaded")
    stand_in.load = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "opgraft.cache.loaded", stand_in)
    monkeypatch.setattr("opgraft.cache.loaded", stand_in, raising=False)


def call(functions: Functions, kind: Any = None, device: torch.device = CPU) -> str:
    called: list[str] = []
    functions(kind or Kind(64), device)(called)
    return called[0]


def test_the_first_process_compiles_and_the_next_loads() -> None:
    assert call(Functions(compile_kind)) == "compiled"
    second = Functions(compile_kind)
    assert call(second) == "loaded"
    assert second.facts(Kind(64), CPU) == [64, 128]
    assert len(compiled) == 1


def test_a_kind_is_compiled_once() -> None:
    functions = Functions(compile_kind)
    assert [call(functions) for _ in range(3)] == ["compiled"] * 3
    assert compiled == [Kind(64)]
    assert functions.facts(Kind(64), CPU) == [64, 128]
    assert Functions(compile_kind_without_facts).facts(Kind(64), CPU) is None


@pytest.mark.parametrize(
    "other", [Kind(65), Kind(64, torch.bfloat16), Kind(64, scale=1.0), Kind(64, scale=float("inf"))]
)
def test_another_kind_is_another_function(other: Kind) -> None:
    functions = Functions(compile_kind)
    call(functions)
    assert call(functions, other) == "compiled"
    assert call(Functions(compile_kind), other) == "loaded"


class OtherKind(NamedTuple):
    size: int


_EQUAL_FOR_PYTHON = [
    (Kind(1), Kind(True)),
    (Kind(1), Kind(1.0)),  # type: ignore[arg-type]
    (Kind(1, scale=0.0), Kind(1, scale=-0.0)),
    (OtherKind(64), (64,)),
    ((Kind(1), OtherKind(1)), (Kind(1), (1,))),
    ((1, (2, (3,))), (1, (2, (3.0,)))),
]


@pytest.mark.parametrize("first, second", _EQUAL_FOR_PYTHON, ids=repr)
def test_kinds_that_python_takes_for_equal_are_two(first: Any, second: Any) -> None:
    """One process must not call a function that was compiled for the other kind."""
    assert first == second
    functions = Functions(compile_anything)
    for _ in range(2):
        assert functions.facts(first, CPU) == repr(first)
        assert functions.facts(second, CPU) == repr(second)
    assert compiled == [first, second]


def test_a_kind_with_nan_is_compiled_once() -> None:
    functions = Functions(compile_anything)
    for _ in range(3):
        call(functions, Kind(1, scale=float("nan")))
    assert len(compiled) == 1


@pytest.mark.parametrize(
    "name, value",
    [("CUTE_DSL_ARCH", "sm_100a"), ("CUTE_DSL_LINEINFO", "1"), ("CUTLASS_SOMETHING", "1")],
)
def test_what_is_compiled_otherwise_is_another_function(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(Functions(compile_kind))
    monkeypatch.setenv(name, value)
    assert call(Functions(compile_kind)) == "compiled"


@pytest.mark.parametrize("distribution", ["nvidia-cutlass-dsl", "torch", "opgraft"])
def test_another_version_is_another_function(
    distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(Functions(compile_kind))
    known = origins.versions()
    monkeypatch.setattr(origins, "versions", lambda: known | {distribution: "99"})
    assert call(Functions(compile_kind)) == "compiled"


def test_a_change_of_the_sources_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    call(Functions(compile_kind))
    monkeypatch.setattr(origins, "_hash", lambda path: "another")
    assert call(Functions(compile_kind)) == "compiled"
    assert call(Functions(compile_kind)) == "loaded"


def test_what_cannot_be_loaded_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call(Functions(compile_kind))

    def fail(*_: object) -> None:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(sys.modules["opgraft.cache.loaded"], "load", fail)
    assert call(Functions(compile_kind)) == "compiled"
    assert "cannot open shared object file" in caplog.text


def test_what_was_damaged_is_compiled() -> None:
    call(Functions(compile_kind))
    for path in entries.folder().iterdir():
        path.write_bytes(b"")
    assert call(Functions(compile_kind)) == "compiled"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda patch, place: patch.setattr(
            entries, "write", lambda *_: (_ for _ in ()).throw(OSError("No space left"))
        ),
        lambda patch, place: place.write_text("no folder"),
        lambda patch, place: patch.setattr(cutedsl, "_exported", _no_linker),
    ],
    ids=["no room", "no folder", "no linker"],
)
def test_where_nothing_can_be_kept_all_compile(
    spoil: Callable[..., object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spoil(monkeypatch, tmp_path / "cache")
    assert [call(Functions(compile_kind)) for _ in range(2)] == ["compiled"] * 2
    with (
        cutedsl.compiling_for_others(lambda *_: None),
        pytest.raises(cutedsl.CannotKeep, match=r"No space|cache|linker"),
    ):
        Functions(compile_kind)(Kind(64), CPU)


def test_where_nobody_trusts_what_is_kept_a_worker_says_so(tmp_path: Path) -> None:
    """Else it would say that it has compiled, and the call would do so again, and wait."""
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    (tmp_path / "cache").chmod(0o777)
    with (
        cutedsl.compiling_for_others(lambda *_: None),
        pytest.raises(cutedsl.CannotKeep, match="others may write to"),
    ):
        Functions(compile_kind)(Kind(64), CPU)
    assert [call(Functions(compile_kind)) for _ in range(2)] == ["compiled"] * 2


@pytest.mark.parametrize("facts", [(1, 2), {64: (3,)}, [1.0, None], {"a": {"b": True}}], ids=repr)
def test_facts_are_the_same_in_the_process_that_compiles(facts: Any) -> None:
    read = []
    for _ in range(2):
        functions = Functions(compile_with_facts)
        compiled_facts[:] = [facts]
        read.append(functions.facts(Kind(64), CPU))
    assert len(compiled) == 1
    assert repr(read[0]) == repr(read[1])


def _no_linker(function: object) -> None:
    raise cutedsl.CannotKeep("no linker (cc, gcc, clang or ld) was found: install one")


def test_what_no_other_process_finds_is_not_kept() -> None:
    def inside(kind: Kind) -> Any:
        return compile_kind(kind)

    for function in (inside, lambda kind: compile_kind(kind)):
        assert [call(Functions(function)) for _ in range(2)] == ["compiled"] * 2
    assert not entries.folder().exists()


def test_who_compiles_for_others_calls_nothing() -> None:
    functions = Functions(compile_kind)
    called: list[str] = []
    for _ in range(2):
        with cutedsl.compiling_for_others(lambda *_: None) as names:
            functions(Kind(64), CPU)(called)
            assert functions.facts(Kind(64), CPU) == [64, 128]
        assert len(names) == 2 and "compile_kind" in names[0]
    assert called == [] and len(compiled) == 1
    assert call(functions) == "loaded"


def test_who_compiles_for_others_makes_what_was_removed_again() -> None:
    functions = Functions(compile_kind)
    for _ in range(2):
        with cutedsl.compiling_for_others(lambda *_: None):
            functions(Kind(64), CPU)
        shutil.rmtree(entries.folder())
    assert len(compiled) == 2


def test_a_kind_that_names_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="a kind with a device in it"):
        call(Functions(compile_kind), (1, CPU))


def test_threads_compile_once() -> None:
    functions = Functions(compile_kind)
    threads = [threading.Thread(target=call, args=(functions,)) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(compiled) == 1


class Slow:
    """Compiles a kind of one size once it is told to, and others at once."""

    def __init__(self, size: int, first: Callable[[], object] = lambda: None) -> None:
        self.compiling, self.may_end = threading.Event(), threading.Event()
        self._size, self._first = size, first

    def __call__(self, kind: Kind) -> Any:
        if kind.size == self._size:
            self.compiling.set()
            assert self.may_end.wait(600)
            self._first()
        return compile_kind(kind)


def in_threads(*works: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for each in threads:
        each.start()
    return threads


def test_what_can_be_loaded_does_not_wait_for_what_is_compiled() -> None:
    call(Functions(compile_kind))  # keeps it
    slow = Slow(1)
    (thread,) = in_threads(lambda: call(Functions(slow), Kind(1)))
    assert slow.compiling.wait(60)
    loaded: list[str] = []
    (other,) = in_threads(lambda: loaded.append(call(Functions(compile_kind))))
    other.join(60)
    assert loaded == ["loaded"] and thread.is_alive()
    slow.may_end.set()
    thread.join(60)


def test_who_waits_for_a_function_does_not_wait_for_the_next_that_is_compiled() -> None:
    slow, next_one = Slow(1), Slow(2)
    functions, others = Functions(slow), Functions(next_one)
    in_threads(lambda: call(functions, Kind(1)))
    assert slow.compiling.wait(60)
    called: list[str] = []
    waiting, queued = in_threads(
        lambda: called.append(call(functions, Kind(1))), lambda: call(others, Kind(2))
    )
    slow.may_end.set()
    assert next_one.compiling.wait(60)
    waiting.join(60)
    assert called == ["compiled"] and queued.is_alive()
    next_one.may_end.set()
    queued.join(60)


def test_two_kinds_are_not_compiled_at_once() -> None:
    slow = Slow(1)
    functions = Functions(slow)
    threads = in_threads(lambda: call(functions, Kind(1)))
    assert slow.compiling.wait(60)
    threads += in_threads(lambda: call(functions, Kind(2)))
    threads[1].join(0.2)
    assert compiled == [] and threads[1].is_alive()
    slow.may_end.set()
    for each in threads:
        each.join(60)
    assert compiled == [Kind(1), Kind(2)]


def test_what_compiles_may_need_what_another_thread_wants_to_compile() -> None:
    slow = Slow(1, lambda: call(functions, Kind(2)))
    functions = Functions(slow)
    threads = in_threads(lambda: call(functions, Kind(1)))
    assert slow.compiling.wait(60)
    threads += in_threads(lambda: call(functions, Kind(2)))
    threads[1].join(0.2)  # it waits for its turn
    slow.may_end.set()
    for each in threads:
        each.join(60)
    assert not any(each.is_alive() for each in threads)
    assert compiled == [Kind(2), Kind(1)]


def test_a_child_of_a_fork_does_not_wait_for_a_compiling_thread() -> None:
    compiling, done = threading.Event(), threading.Event()

    def slow(kind: Kind) -> Any:
        compiling.set()
        done.wait(60)
        return Compiled(kind)

    functions = Functions(slow)
    thread = threading.Thread(target=call, args=(functions,))
    thread.start()
    compiling.wait(60)
    child = os.fork()
    if child == 0:
        done.set()
        has_own = call(functions) == "compiled"
        os._exit(0 if has_own and call(Functions(compile_kind)) == "compiled" else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert status == 0


def test_the_linker_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{sys.executable} -B")
    assert cutedsl._linker() == [sys.executable, "-B"]
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", os.path.dirname(shutil.which("ld") or "/usr/bin"))
    assert subprocess.run([*cutedsl._linker(), "--version"], capture_output=True).returncode == 0
    monkeypatch.setenv("PATH", "")
    with pytest.raises(cutedsl.CannotKeep, match="no linker"):
        cutedsl._linker()
