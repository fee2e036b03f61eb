"""Calls whose kernels are not ready are native's, while worker processes compile them."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import when
from opgraft.core import loader
from opgraft.ready import pool, readiness
from opgraft.ready.claims import Claim
from tests.ready import impls

pytestmark = pytest.mark.skipif(
    loader.in_use() is None, reason="plans, which say what is ready, need the compiled core"
)

LIMIT = 200
Register = Callable[..., opgraft.Override]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Claims of other processes are not this one's; a worker serves one test after the other."""
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPGRAFT_CACHE", str(place))
        patch.setenv("OPGRAFT_TEST_NOTES", str(place / "notes"))
        yield place
        end_workers()


@pytest.fixture(autouse=True)
def notes(own_cache: Path) -> Iterator[Path]:
    """Where impls write down that they ran dry. No worker that is at something is left behind."""
    path = own_cache / "notes"
    path.unlink(missing_ok=True)
    yield path
    if not all(each.is_idle for each in pool.shared()._attendants):
        end_workers()


def end_workers() -> None:
    workers = pool.shared().workers()
    pool.shared().close()
    pool._forget_in_child()
    until(lambda: not any(map(is_alive, workers)))


@pytest.fixture
def register() -> Iterator[Register]:
    made: list[opgraft.Override] = []

    def register(impl: Callable[..., Any], op: str = "neg", **options: Any) -> opgraft.Override:
        given = {"launch_plan": True, "when_not_ready": "native", "name": f"ready-{len(made)}"}
        if "cond" not in options:
            given["unconditional_override"] = True
        override = opgraft.register_op_override("aten", op, "CPU", impl, **given | options)
        made.append(override)
        return override

    yield register
    for each in made:
        each.remove()


def is_alive(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def call(size: int = 4) -> None:
    x = torch.arange(size, dtype=torch.float32) + 1
    assert torch.equal(torch.neg(x), 0 - x)


def states(override: opgraft.Override) -> list[readiness.State]:
    assert override.plans is not None
    return override.plans.readiness.states()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_call_is_natives_until_its_kernels_are_ready(register: Register) -> None:
    override = register(impls.negated)
    call()
    assert (override.hits, override.misses) == (0, 1)
    assert opgraft.wait_until_ready(LIMIT)
    call()
    assert (override.hits, override.misses) == (1, 1)
    (state,) = states(override)
    assert state.status == "ready" and state.by.startswith("worker ")


def test_a_call_that_is_ready_is_recorded_and_replayed(register: Register) -> None:
    override = register(impls.negated)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    for _ in range(6):
        call()
    assert override.hits == 6
    assert override.plans is not None and len(override.plans) == 1 and override.plans.hits > 0


def test_waiting_is_the_default(register: Register) -> None:
    override = register(impls.negated, when_not_ready="wait")
    call()
    assert (override.hits, override.misses) == (1, 0)
    assert states(override) == []


def test_a_worker_is_another_process_and_gets_metadata(register: Register, notes: Path) -> None:
    register(impls.tells_when_dry)
    torch.neg(torch.ones(6, 4, dtype=torch.float64)[::2].t())
    assert opgraft.wait_until_ready(LIMIT)
    process, said = notes.read_text().strip().split(" ", 1)
    assert int(process) != os.getpid()
    assert said == "(4, 3) (1, 8) torch.float64"


@pytest.mark.parametrize("impl", [impls.prints_when_dry, impls.reads_its_input, impls.looks_around])
def test_what_an_impl_does_besides_harms_nobody(register: Register, impl: Any) -> None:
    override = register(impl)
    call(4)
    call(5)
    assert opgraft.wait_until_ready(LIMIT)
    assert {state.status for state in states(override)} == {"ready"}
    assert all(state.by.startswith("worker") for state in states(override))
    call(4)
    assert override.hits == 1


@pytest.mark.parametrize(
    "impl", [impls.crashes_when_dry, impls.is_killed_when_dry, impls.exits_when_dry]
)
def test_a_worker_that_ends_leaves_the_call_to_native(
    register: Register, impl: Any, caplog: pytest.LogCaptureFixture
) -> None:
    override = register(impl)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    for _ in range(3):
        call()
    assert (override.hits, override.misses) == (0, 4)
    (state,) = states(override)
    assert state.status == "failed" and "ended with" in state.reason
    assert caplog.text.count("native serves it") == 1


def test_another_worker_comes_after_one_that_ended(register: Register) -> None:
    bad, good = register(impls.crashes_when_dry, "sin"), register(impls.negated)
    torch.sin(torch.ones(3))
    assert opgraft.wait_until_ready(LIMIT)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    call()
    assert (bad.hits, good.hits) == (0, 1)


def test_a_worker_that_hangs_holds_nobody_up(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "COMPILE_SECONDS", 8.0)
    end_workers()
    override = register(impls.hangs_when_dry)
    call()
    until(lambda: states(override)[0].status == "compiling")
    (worker,) = pool.shared().workers()
    for size in range(5, 50):
        call(size)
    assert override.hits == 0 and is_alive(worker)
    until(lambda: states(override)[0].status != "compiling")
    assert not is_alive(worker)


def test_what_cannot_be_run_dry_is_compiled_in_this_process(register: Register) -> None:
    override = register(impls.needs_memory)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    (state,) = states(override)
    assert (state.status, state.by) == ("ready", "this process")
    assert "Error" in state.reason or "DataDependent" in state.reason
    call()
    assert override.hits == 1


def test_what_cannot_be_imported_is_compiled_in_this_process(register: Register) -> None:
    threads = []

    def local(self: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread())
        return 0 - self

    override = register(local)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    (state,) = states(override)
    assert (state.status, state.by) == ("ready", "this process")
    assert "inside a function" in state.reason
    assert threads and threads[0] is not threading.main_thread()
    call()
    assert override.hits == 1


def test_what_cutedsl_compiles_is_compiled_in_this_process(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opgraft.registration._unavailable", lambda dsl, owner: None)
    override = register(impls.negated, dsl="cutedsl")
    call()
    assert opgraft.wait_until_ready(LIMIT)
    (state,) = states(override)
    assert (state.status, state.by) == ("ready", "this process")


def test_what_compiles_nowhere_is_natives_for_good(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    override = register(impls.never_works)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    call()
    (state,) = states(override)
    assert state.status == "failed" and "no compiler found" in state.reason
    assert override.hits == 0
    assert "no compiler found" in caplog.text


def test_the_environment_says_it_for_all(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPGRAFT_WHEN_NOT_READY", "wait")
    override = register(impls.negated)
    call()
    assert override.hits == 1
    monkeypatch.setenv("OPGRAFT_WHEN_NOT_READY", "native")
    other = register(impls.negated, "sin", when_not_ready="wait")
    torch.sin(torch.ones(3))
    assert other.hits == 0


def test_a_scope_says_it_for_all_while_it_lasts(register: Register) -> None:
    override = register(impls.negated)
    with opgraft.when_not_ready("wait"):
        call()
        with opgraft.when_not_ready("native"):
            call(5)
        call(6)
    call(7)
    assert (override.hits, override.misses) == (2, 2)


def test_a_scope_of_another_word_is_refused() -> None:
    scope = opgraft.when_not_ready("later")  # type: ignore[arg-type]
    with pytest.raises(opgraft.RegistrationError, match="choose one of"), scope:
        pass


@pytest.mark.parametrize(
    "options, mend",
    [
        ({"launch_plan": False}, "launch_plan=True"),
        ({"when_not_ready": "later"}, "choose one of"),
        ({"autograd": (lambda *_: None, lambda *_: None)}, "autograd="),
    ],
)
def test_what_cannot_be_is_refused_at_registration(
    register: Register, options: dict[str, Any], mend: str
) -> None:
    with pytest.raises(opgraft.RegistrationError, match=mend):
        register(impls.negated, **options)


def test_warmup_waits(register: Register) -> None:
    override = register(impls.negated)
    report = opgraft.warmup(torch.neg, torch.ones(4))
    assert override.hits > 0 and [each.override for each in report] == [override]


def test_deterministic_programs_wait(register: Register) -> None:
    override = register(impls.negated)
    torch.use_deterministic_algorithms(True)
    try:
        call()
    finally:
        torch.use_deterministic_algorithms(False)
    assert (override.hits, override.misses) == (1, 0)


def test_a_call_keeps_no_tensor_alive(register: Register) -> None:
    register(impls.hangs_when_dry)
    x = torch.ones(7)
    gone = []
    import weakref

    weakref.finalize(x, gone.append, True)
    torch.neg(x)
    del x
    gc.collect()
    assert gone


def test_each_key_is_asked_for_once(register: Register) -> None:
    override = register(impls.hangs_when_dry)
    together = [threading.Thread(target=lambda: [call(n) for n in range(8, 24)]) for _ in range(4)]
    for each in together:
        each.start()
    for each in together:
        each.join()
    assert len(states(override)) == 16
    assert override.misses == 64


def test_a_thousand_kinds_of_calls_wait_in_a_bounded_queue(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_WAITING", 16)
    override = register(impls.hangs_when_dry)
    for size in range(1, 1000):
        call(size)
    assert len(pool.shared()._waiting) <= 16
    assert len(states(override)) <= 16 + pool.most_workers()
    assert override.hits == 0


def test_what_most_calls_want_comes_first(
    register: Register, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_workers()
    monkeypatch.setattr(pool, "most_workers", lambda: 1)
    started = threading.Event()
    monkeypatch.setattr(pool._Attendant, "start", lambda self: started.set())
    override = register(impls.tells_when_dry)
    for size, times in ((4, 1), (5, 9), (6, 3)):
        for _ in range(times):
            call(size)
    (attendant,) = pool.shared()._attendants
    threading.Thread.start(attendant)
    assert opgraft.wait_until_ready(LIMIT)
    shapes = [line.split(" ")[1] for line in notes.read_text().splitlines()]
    assert shapes == ["(5,)", "(6,)", "(4,)"]
    assert override.hits == 0


def test_explain_says_what_becomes_of_it(register: Register) -> None:
    override = register(impls.hangs_when_dry)
    x = torch.ones(4)
    assert "nobody has asked" in str(opgraft.explain("aten::neg", x))
    torch.neg(x)
    until(lambda: states(override)[0].status == "compiling")
    said = str(opgraft.explain("aten::neg", x))
    assert "natively so far" in said and "being compiled" in said and "by worker" in said


def test_a_condition_is_asked_before(register: Register) -> None:
    override = register(impls.negated, cond=when.numel("self") > 100)
    call()
    assert states(override) == [] and override.misses == 1


def test_who_wants_every_call_to_run_gets_that(register: Register) -> None:
    override = register(impls.negated)
    assert override.plans is not None
    override.plans.table.runs_all = True  # as `opgraft.verify` does
    call()
    assert (override.hits, override.misses) == (1, 0)


PROGRAM = """
import os, sys, time, torch, opgraft
from tests.ready import impls
opgraft.register_op_override(
    "aten", "neg", "CPU", getattr(impls, sys.argv[1]), unconditional_override=True,
    launch_plan=True, when_not_ready="native",
)
torch.neg(torch.ones(4))
from opgraft.ready import pool
deadline = time.monotonic() + 60
while not pool.shared().workers() and time.monotonic() < deadline:
    time.sleep(0.01)
print(*pool.shared().workers(), flush=True)
"""


@pytest.mark.parametrize("ending", ["", "os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_no_worker_outlives_its_process(ending: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + ending, "hangs_when_dry"],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
    )
    workers = [int(word) for word in done.stdout.split()]
    assert workers, done.stderr
    until(lambda: not any(map(is_alive, workers)))


def test_a_child_of_a_fork_has_workers_of_its_own(register: Register, own_cache: Path) -> None:
    override = register(impls.hangs_when_dry)
    call()
    until(lambda: bool(pool.shared().workers()))
    child = os.fork()
    if child == 0:
        code = 1
        os.environ["OPGRAFT_CACHE"] = str(own_cache / "child")  # the parent's worker has its turn
        try:
            assert pool.shared().workers() == [] and states(override) == []
            call()
            call(9)
            until(lambda: bool(pool.shared().workers()))
            pool.shared().close()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + LIMIT
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert all(map(is_alive, pool.shared().workers()))


def test_processes_that_need_the_same_compile_it_one_after_the_other(
    own_cache: Path, notes: Path
) -> None:
    program = PROGRAM + "assert opgraft.wait_until_ready(60)\n"
    command = [sys.executable, "-c", program, "tells_when_dry"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    assert [each.wait(2 * LIMIT) for each in running] == [0, 0]
    for each in running:
        assert each.stdout is not None
        each.stdout.close()
    assert len(notes.read_text().splitlines()) == 2
    held = [path for path in (own_cache / "claims").rglob("*") if path.is_file()]
    assert not [path for path in held if Claim(path.name, path.parent).owner() is not None]


def test_states_are_told_to_machines(register: Register) -> None:
    override = register(impls.negated)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    assert override.plans is not None
    json.dumps(override.plans.as_dict())
