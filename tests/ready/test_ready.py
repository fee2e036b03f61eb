"""Calls whose kernels are not ready are native's, while worker processes compile them."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import when
from opgraft.core import loader
from opgraft.packs import owning
from opgraft.ready import ahead, captures, pool, readiness, warm_up
from opgraft.ready.claims import Claim
from tests import forked_programs
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
        patch.setenv("OPGRAFT_KERNELS", "none")  # calls that are ready run here
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


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[pool.Job]:
    """The jobs that pools get, of which none is done."""
    found: list[pool.Job] = []
    monkeypatch.setattr(pool.Pool, "submit", lambda self, job: found.append(job))
    return found


def end_workers() -> None:
    workers = pool.shared().workers()
    pool.shared().close()
    pool.here().close()
    pool._forget_in_child()
    until(lambda: not any(map(is_alive, workers)))


@pytest.fixture
def a_worker_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program's, where others are forked from a process that has imported torch."""
    end_workers()
    monkeypatch.setattr(pool, "subprocess", subprocess)


@pytest.fixture
def nobody_compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is asked for waits, in pools of this test's own: no worker of other tests ends."""
    monkeypatch.setattr(pool, "_pools", {})
    monkeypatch.setattr(pool._Attendant, "start", lambda self: None)
    yield
    pool._forget_in_child()


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


def expect_native_for_good(override: opgraft.Override, why: str) -> None:
    """Native serves the calls of a kind, because nobody can compile for them."""
    call()
    assert opgraft.wait_until_ready(LIMIT)
    (state,) = states(override)
    assert state.status == "failed" and why in state.reason
    call()
    assert override.hits == 0


@pytest.mark.usefixtures("a_worker_is_started")
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


def test_no_call_waits_for_an_import(
    register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, lines = "opgraft_tests_imported_ahead", inspect.getsource(impls.negated)
    lines = f"import threading, torch\nBY = threading.current_thread()\n{lines}"
    (tmp_path / f"{name}.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    end_workers()  # one that is there would not find it
    override = register(opgraft.lazy(f"{name}:negated"))
    call()
    assert name not in sys.modules
    assert opgraft.wait_until_ready(LIMIT)
    assert sys.modules[name].BY is not threading.main_thread()
    call()
    assert override.hits == 1


@pytest.mark.parametrize(
    "options, policy",
    [({}, "native"), ({"launch_plan": False}, "wait"), ({"when_not_ready": "wait"}, "wait")],
)
def test_native_is_the_default_of_packs_alone(
    register: Register, options: dict[str, Any], policy: str
) -> None:
    given = {"when_not_ready": None} | options
    assert register(impls.negated, **given).when_not_ready == "wait"
    with owning("norms"):
        override = register(impls.negated, "sin", **given)
    assert override.when_not_ready == policy
    torch.sin(torch.ones(3))
    assert override.hits == (policy == "wait")


def test_a_run_before_a_capture_waits(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Inductor makes one: it must have the kernel that the capture is to have."""

    class CUDAWarmupNode:
        def run(self, size: int) -> int:
            call(size)
            return size

    module = type(sys)("torch._inductor.cudagraph_trees")
    module.CUDAWarmupNode = CUDAWarmupNode  # type: ignore[attr-defined]
    warm_up._patch(module)
    override = register(impls.negated)
    call()  # another process compiles for this kind of call already
    assert override.hits == 0
    assert CUDAWarmupNode().run(4) == 4
    assert override.hits == 1
    call(5)
    assert override.hits == 1


def test_a_capture_has_calls_that_are_not_worth_python(register: Register) -> None:
    """Of its replays none pays for that, and Inductor runs a graph once before: without a plan."""

    class CUDAWarmupNode:
        def run(self, size: int) -> None:
            call(size)

    class CUDAGraphNode:
        def _record(self, size: int) -> None:
            call(size)

    module = type(sys)("torch._inductor.cudagraph_trees")
    module.CUDAWarmupNode = CUDAWarmupNode  # type: ignore[attr-defined]
    module.CUDAGraphNode = CUDAGraphNode  # type: ignore[attr-defined]
    override = register(impls.negated, unplanned=when.numel("self") > 10**9)
    warm_up._patch(module)
    CUDAWarmupNode().run(4)
    CUDAGraphNode()._record(4)
    assert override.hits == 2
    assert override.plans is not None and not override.plans.table.runs_all
    call(5)
    assert override.hits == 2


def test_an_override_that_is_registered_in_a_capture_is_in_it(register: Register) -> None:
    with readiness.for_a_capture(wait=False):
        override = register(impls.negated, unplanned=when.numel("self") > 10**9)
        with readiness.for_a_capture(wait=False):
            call(2)
        call(3)
    call(4)
    assert override.hits == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
@pytest.mark.filterwarnings("ignore")
def test_a_capture_of_another_thread_is_none_in_a_child(register: Register) -> None:
    override = register(impls.negated, unplanned=when.numel("self") > 10**9)
    opened, may_close = threading.Event(), threading.Event()

    def capture() -> None:
        with readiness.for_a_capture(wait=False):
            opened.set()
            may_close.wait()

    thread = threading.Thread(target=capture)
    thread.start()
    opened.wait()
    child = os.fork()
    if child == 0:
        os._exit(override.plans is None or override.plans.table.runs_all)
    _, status = os.waitpid(child, 0)
    assert override.plans is not None and override.plans.table.runs_all
    may_close.set()
    thread.join()
    assert status == 0 and not override.plans.table.runs_all


def test_inductors_run_before_a_capture_is_found(register: Register) -> None:
    """Where it is called what it is called today."""
    from torch._inductor import cudagraph_trees

    register(impls.negated)
    assert hasattr(cudagraph_trees.CUDAWarmupNode.run, "__wrapped__")
    assert hasattr(cudagraph_trees.CUDAGraphNode._record, "__wrapped__")


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """A capture of a CUDA graph, as far as calls see it."""
    graphs = type(sys)("torch.cuda.graphs")
    capturing = []

    class CUDAGraph:
        def capture_begin(self, pool: Any = None) -> None:
            capturing.append(self)

        def capture_end(self) -> None:
            capturing.remove(self)

    graphs.CUDAGraph = CUDAGraph  # type: ignore[attr-defined]
    captures._patch(loader.in_use(), graphs)
    monkeypatch.setattr(
        "opgraft.ready.readiness.device.is_capturing", lambda device: bool(capturing)
    )

    @contextmanager
    def capture() -> Iterator[None]:
        graph = CUDAGraph()
        graph.capture_begin(pool=None)
        yield
        graph.capture_end()

    return capture


@pytest.mark.usefixtures("nobody_compiles")
@pytest.mark.parametrize("is_asked_before", [False, True])
def test_one_warning_tells_of_calls_that_are_captured_before_they_are_ready(
    register: Register, capture: Any, recwarn: pytest.WarningsRecorder, is_asked_before: bool
) -> None:
    override = register(impls.hangs_when_dry)
    if is_asked_before:
        call()
    assert not told_of_captures(recwarn)
    with capture():
        call()
        call()
        call(5)
    assert override.hits == 0
    (said,) = told_of_captures(recwarn)
    assert override.name in said and "warmup" in said


def told_of_captures(recwarn: pytest.WarningsRecorder) -> list[str]:
    return [said for each in recwarn.list if "captured" in (said := str(each.message))]


def test_a_plan_that_cannot_be_compared_with_native_in_a_capture_is_warned_of(
    register: Register,
    capture: Any,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    override = register(impls.negated)
    monkeypatch.setattr(type(override.plans), "is_unproven", lambda self, key: True)
    with capture():
        call()
    assert len(told_of_captures(recwarn)) == 1 and states(override) == []


@pytest.mark.usefixtures("nobody_compiles")
def test_while_nothing_is_captured_no_call_looks_whether_it_is(
    register: Register, capture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(impls.hangs_when_dry)
    with capture():
        pass
    call()  # the one that asks
    looked: list[Any] = []
    monkeypatch.setattr("opgraft.ready.readiness.device.is_capturing", looked.append)
    call()
    assert not looked
    with capture():
        call()
    assert len(looked) == 1


def test_a_call_that_can_never_be_ready_is_not_warned_of(
    register: Register, capture: Any, recwarn: pytest.WarningsRecorder
) -> None:
    register(impls.never_works)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    with capture():
        call()
    assert not told_of_captures(recwarn)


@pytest.mark.usefixtures("nobody_compiles")
def test_a_capture_that_does_not_begin_is_not_counted(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CUDAGraph:
        def capture_begin(self) -> None:
            raise RuntimeError("another one is going on")

        def capture_end(self) -> None: ...

    graphs = type(sys)("torch.cuda.graphs")
    graphs.CUDAGraph = CUDAGraph  # type: ignore[attr-defined]
    captures._patch(loader.in_use(), graphs)
    with pytest.raises(RuntimeError):
        CUDAGraph().capture_begin()
    register(impls.hangs_when_dry)
    call()
    looked: list[Any] = []
    monkeypatch.setattr("opgraft.ready.readiness.device.is_capturing", looked.append)
    call()
    assert not looked


def test_torchs_captures_are_counted(register: Register) -> None:
    """Where they are called what they are called today."""
    from torch.cuda import graphs

    register(impls.negated)
    assert hasattr(graphs.CUDAGraph.capture_begin, "__wrapped__")
    assert hasattr(graphs.CUDAGraph.capture_end, "__wrapped__")


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
def test_a_call_whose_workers_end_is_tried_twice_and_left_to_native(
    register: Register,
    impl: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[pool.Job] = []
    answer = pool._Overseer._answer
    monkeypatch.setattr(
        pool._Overseer,
        "_answer",
        lambda self, job, asked: (tries.append(job), answer(self, job, asked))[1],
    )
    override = register(impl)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    assert len(tries) == 2
    for _ in range(3):
        call()
    assert (override.hits, override.misses) == (0, 4)
    (state,) = states(override)
    assert state.status == "failed" and "ended with" in state.reason
    assert caplog.text.count("native serves it") == 1


def test_a_call_whose_worker_ended_is_tried_again_in_another(
    register: Register, notes: Path
) -> None:
    override = register(impls.crashes_once_when_dry)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    (state,) = states(override)
    assert state.status == "ready", state.reason
    assert len(set(notes.read_text().split())) == 2
    call()
    assert override.hits == 1


@pytest.mark.parametrize("dsl", ["cutedsl", "triton"])
def test_a_worker_compiles_for_one_kind_of_device(
    dsl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuteDSL reads it once, and so do caches of what a device can: all are the first one there."""
    end_workers()
    monkeypatch.setattr(pool, "most_workers", lambda: 1)
    asked: list[int] = []

    def ask(self: pool._Overseer, process: Any, *_: Any) -> Any:
        asked.append(process.pid)
        return {"compiled": [], "triton": [], "no_plan": ""}

    monkeypatch.setattr(pool._Overseer, "_ask", ask)
    for major, multiprocessors in ((9, 132), (9, 132), (9, 114), (8, 108)):
        done = threading.Event()
        properties = {"major": major, "minor": 0, "multi_processor_count": multiprocessors}
        job = pool.Job(
            {"dsl": dsl, "device": {"properties": properties}, "plan": None},
            wanted=lambda: 1,
            started=lambda by: None,
            compiled=lambda compiled, done=done: done.set(),
            failed=lambda reason, may_run_here: pytest.fail(reason),
            dropped=lambda: None,
        )
        pool.shared().submit(job)
        assert done.wait(LIMIT)
    first, second, third, fourth = asked
    assert first == second
    assert len({second, third, fourth}) == 3


def test_what_a_worker_prints_does_not_pile_up(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_workers()
    monkeypatch.setattr(pool, "most_workers", lambda: 1)
    override = register(impls.prints_much_when_dry)
    for size in range(4, 9):
        call(size)
    (attendant,) = pool.shared()._attendants
    assert opgraft.wait_until_ready(LIMIT)
    assert isinstance(attendant, pool._Overseer)
    assert {state.status for state in states(override)} == {"ready"}
    assert 50_000 <= os.fstat(attendant._errors.fileno()).st_size < 100_000


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


@pytest.mark.usefixtures("nobody_compiles")
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


@pytest.mark.usefixtures("nobody_compiles")
def test_what_fewest_calls_want_is_let_go(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_WAITING", 2)
    override = register(impls.negated)
    for size, times in ((4, 5), (5, 1), (6, 3), (7, 1)):
        for _ in range(times):
            call(size)
    labels = sorted(state.call for state in states(override))
    assert len(labels) == 2 and "[4]" in labels[0] and "[6]" in labels[1]


@pytest.mark.parametrize("what", ["large", "random"])
def test_what_must_not_run_on_stand_ins_is_compiled_by_the_next_call(
    register: Register, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    ran: list[threading.Thread] = []

    def local(input: torch.Tensor, *_: Any) -> Any:
        ran.append(threading.current_thread())
        return impls.negated(input) if what == "large" else impls.dropped_otherwise(input, 0, False)

    def make_call() -> None:
        x = torch.ones(4)
        torch.neg(x) if what == "large" else torch.native_dropout(x, 0.5, False)

    if what == "large":
        monkeypatch.setattr("opgraft.ready.here.MAX_BYTES", 15)
    override = register(local, "neg" if what == "large" else "native_dropout")
    make_call()
    (state,) = states(override)
    assert ran == [] and (state.status, state.by) == ("ready", readiness.A_LATER_CALL)
    make_call()
    assert override.hits == 1 and set(ran) == {threading.current_thread()}


def test_explain_says_what_becomes_of_it(register: Register) -> None:
    override = register(impls.hangs_when_dry)
    x = torch.ones(4)
    assert "nobody has asked" in str(opgraft.explain("aten::neg", x))
    torch.neg(x)
    until(lambda: states(override)[0].status == "compiling")
    said = str(opgraft.explain("aten::neg", x))
    assert "natively so far" in said and "being compiled" in said and "by worker" in said


def test_explain_says_why_this_process_compiles(register: Register) -> None:
    goes_on = threading.Event()

    def local(self: torch.Tensor) -> torch.Tensor:
        assert goes_on.wait(LIMIT)
        return 0 - self

    override = register(local)
    call(4)
    until(lambda: states(override)[0].status == "compiling")
    call(5)
    said = [str(opgraft.explain("aten::neg", torch.ones(size))) for size in (4, 5)]
    goes_on.set()
    assert opgraft.wait_until_ready(LIMIT)
    said.append(str(opgraft.explain("aten::neg", torch.ones(4))))
    for each, word in zip(said, ("being compiled", "wait to be", "are ready"), strict=True):
        assert word in each and "by this process, as no worker can: local is defined" in (
            each.replace("test_explain_says_why_this_process_compiles.<locals>.", "")
        )


def test_a_condition_is_asked_before(register: Register) -> None:
    override = register(impls.negated, cond=when.numel("self") > 100)
    call()
    assert states(override) == [] and override.misses == 1


def test_who_wants_every_call_to_run_gets_that(register: Register) -> None:
    override = register(impls.negated)
    assert override.plans is not None
    override.plans.readiness.runs_all = True  # as `opgraft.verify` does
    override.plans.readiness.apply()
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
    done = forked_programs.run(PROGRAM + ending, "hangs_when_dry")
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


#: Three processes that make the same call.
TOGETHER = f"""
import os, sys
children = []
while len(children) < 3 and (child := os.fork()):
    children.append(child)
if len(children) == 3:
    sys.exit(any([os.waitpid(each, 0)[1] for each in children]))
{forked_programs.FORKS_WORKERS}
from opgraft.ready import pool
pool.most_workers = lambda: 4
{PROGRAM[: PROGRAM.index("torch.neg")]}
x = torch.ones(128)
first = -(x.data_ptr() // 4) % 64  # in every process it begins alike
torch.neg(x[first : first + 4])
assert opgraft.wait_until_ready(150)
((state,),) = [each.plans.readiness.states() for each in opgraft.overrides()]
print(state.status, state.by.partition(" ")[0], state.reason)
"""


@pytest.mark.parametrize("kernels", ["", "none"], ids=["with plans", "without plans"])
def test_of_processes_that_need_the_same_one_compiles_at_a_time(
    own_cache: Path, notes: Path, kernels: str
) -> None:
    """Where its plan is kept, the others load it."""
    done = forked_programs.run(
        TOGETHER, "must_be_alone_when_dry", env=os.environ | {"OPGRAFT_KERNELS": kernels}
    )
    assert done.returncode == 0, done.stderr
    said = sorted(line.strip() for line in done.stdout.splitlines())
    assert said == [*["ready worker" if kernels else "ready another"] * 2, "ready worker"]
    compiled_by = {line.split()[0] for line in notes.read_text().splitlines()}
    assert len(compiled_by) == (3 if kernels else 1)
    held = [path for path in (own_cache / "claims").rglob("*") if path.is_file()]
    assert not [path for path in held if Claim(path.name, path.parent).owner() is not None]


def test_an_idle_worker_ends_when_another_process_has_one_in_its_place(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_workers()
    monkeypatch.setattr(pool, "most_workers", lambda: 1)
    monkeypatch.setattr(pool, "IDLE_SECONDS", 2 * LIMIT)
    override = register(impls.negated)
    call(4)
    assert opgraft.wait_until_ready(LIMIT)
    (worker,) = pool.shared().workers()
    theirs = Claim("worker-0")
    assert is_alive(worker) and theirs.take()
    try:
        until(lambda: not is_alive(worker))
        call(5)
        until(lambda: bool(pool.shared()._attendants))
        assert pool.shared().workers() == []  # it waits for its turn
    finally:
        theirs.release()
    assert opgraft.wait_until_ready(LIMIT)
    assert {state.status for state in states(override)} == {"ready"}
    assert pool.shared().workers() not in ([], [worker])


def test_a_worker_whose_next_job_is_another_processs_ends_when_its_place_is_needed(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_workers()
    monkeypatch.setattr(pool, "most_workers", lambda: 1)
    monkeypatch.setattr(pool, "LOOK_SECONDS", LIMIT)
    register(impls.negated)
    call(4)
    assert opgraft.wait_until_ready(LIMIT)
    (worker,) = pool.shared().workers()
    theirs = Claim("worker-0")
    assert theirs.take()
    try:
        call(5)
        until(lambda: not is_alive(worker))
    finally:
        theirs.release()
    assert opgraft.wait_until_ready(LIMIT)


def test_a_worker_that_has_nothing_to_do_ends(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_workers()
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.1)
    override = register(impls.negated)
    for size in (4, 5):
        call(size)
        until(lambda: bool(pool.shared().workers()))
        (worker,) = pool.shared().workers()
        assert opgraft.wait_until_ready(LIMIT)
        until(functools.partial(lambda worker: not is_alive(worker), worker))
        until(lambda: not pool.shared()._attendants)
    assert [state.status for state in states(override)] == ["ready", "ready"]


def test_what_another_process_compiles_for_too_long_is_not_waited_for() -> None:
    overseer = pool._Overseer(pool.Pool(pool._Overseer, lambda: 1))
    theirs, ours = Claim("tests"), Claim("tests")
    assert theirs.take()
    try:
        assert overseer._claim([ours], 0.1) == []
    finally:
        theirs.release()
    assert overseer._claim([ours], 0.1) == [ours]
    ours.release()


def test_states_are_told_to_machines(register: Register) -> None:
    override = register(impls.negated)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    assert override.plans is not None
    json.dumps(override.plans.as_dict())


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_an_impl_raises_it_is_over(
    register: Register, raised: type[BaseException]
) -> None:
    def local(self: torch.Tensor) -> torch.Tensor:
        raise raised("enough")

    override = register(local)
    expect_native_for_good(override, "enough")


def test_what_is_compiled_in_this_process_is_so_one_after_the_other(register: Register) -> None:
    together, most = [], []

    def local(self: torch.Tensor) -> torch.Tensor:
        together.append(1)
        most.append(len(together))
        time.sleep(0.01)
        together.pop()
        return 0 - self

    override = register(local)
    before = threading.active_count()
    for size in range(1, 40):
        call(size)
    assert threading.active_count() <= before + 1
    assert opgraft.wait_until_ready(LIMIT)
    assert len(states(override)) == 39 and max(most) == 1


def test_a_removed_override_is_compiled_for_no_more(register: Register) -> None:
    sizes = []

    def local(self: torch.Tensor) -> torch.Tensor:
        sizes.append(self.numel())
        until(lambda: override.state.removed)
        return 0 - self

    override = register(local)
    for size in range(1, 20):
        call(size)
    until(lambda: bool(sizes))
    override.remove()
    assert opgraft.wait_until_ready(LIMIT)
    until(lambda: all(each.is_idle for each in pool.here()._attendants))
    assert len(sizes) == 1


def test_scopes_in_scopes_end_in_their_order(register: Register) -> None:
    override = register(impls.negated)
    with opgraft.when_not_ready("wait"):
        with opgraft.when_not_ready("native"):
            with opgraft.when_not_ready("wait"):
                pass
            call()
            assert override.hits == 0
        call(5)
        assert override.hits == 1


def hits_in_child(override: opgraft.Override, child: int) -> int:
    """In the child of a fork: makes a call, and ends. In its parent: how many hits the child had.

    Args:
        override: whose hits count.
        child: what `os.fork` returned.
    """
    if child == 0:
        code = 1
        try:
            call()
            code = override.hits
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.usefixtures("nobody_compiles")
@pytest.mark.parametrize("is_own", [True, False], ids=["its own", "another thread's"])
def test_a_child_of_a_fork_has_the_scopes_of_the_thread_that_forked(
    register: Register, is_own: bool
) -> None:
    """Nobody would end another thread's: the child does not have that thread."""
    override = register(impls.hangs_when_dry)
    if is_own:
        with opgraft.when_not_ready("wait"):
            assert hits_in_child(override, os.fork()) == 1
        return
    is_open, may_end = threading.Event(), threading.Event()

    def waiting() -> None:
        with opgraft.when_not_ready("wait"):
            is_open.set()
            may_end.wait(LIMIT)

    thread = threading.Thread(target=waiting)
    thread.start()
    try:
        assert is_open.wait(LIMIT)
        assert hits_in_child(override, os.fork()) == 0
    finally:
        may_end.set()
        thread.join()


@pytest.mark.usefixtures("nobody_compiles")
def test_a_scope_that_a_fork_was_in_ends_in_both_processes(register: Register) -> None:
    override = register(impls.hangs_when_dry)
    scope = opgraft.when_not_ready("wait")
    scope.__enter__()
    child = os.fork()
    scope.__exit__(None, None, None)
    assert hits_in_child(override, child) == 0
    call()
    assert override.hits == 0


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), OSError("no files")])
def test_a_call_gets_its_result_whatever_fails_beside_it(
    register: Register, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(thread: threading.Thread) -> None:
        raise error

    end_workers()
    override = register(impls.negated)
    monkeypatch.setattr(threading.Thread, "start", fails)
    call()
    monkeypatch.undo()
    call()
    (state,) = states(override)
    assert state.status == "failed" and str(error) in state.reason
    assert override.hits == 0 and opgraft.wait_until_ready(LIMIT)


def test_an_interrupt_while_a_thread_is_started_stops_no_later_one(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    end_workers()
    monkeypatch.setattr(pool, "most_workers", lambda: 1)
    override = register(impls.negated)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            torch.neg(torch.ones(4))
    call()
    assert opgraft.wait_until_ready(LIMIT)
    call()
    assert override.hits == 1


def test_no_compiler_outlives_its_worker(register: Register, notes: Path) -> None:
    register(impls.starts_a_process_when_dry)
    call()
    until(lambda: notes.exists() and notes.read_text().endswith("\n"))
    compiler = int(notes.read_text())
    assert is_alive(compiler)
    end_workers()
    until(lambda: not is_alive(compiler))


def test_no_compiler_outlives_a_worker_that_is_killed(register: Register, notes: Path) -> None:
    override = register(impls.starts_a_process_and_is_killed_when_dry)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    compilers = list(map(int, notes.read_text().split()))
    assert len(compilers) == 2 and states(override)[0].status == "failed"
    until(lambda: not any(map(is_alive, compilers)))


def test_no_compiler_outlives_a_program_that_is_killed(notes: Path) -> None:
    program = (
        PROGRAM[: PROGRAM.index("from opgraft.ready")]
        + """
notes = os.environ["OPGRAFT_TEST_NOTES"]
while not (os.path.exists(notes) and open(notes).read().endswith("\\n")):
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    )
    forked_programs.run(program, "starts_a_process_when_dry")
    compiler = int(notes.read_text())
    until(lambda: not is_alive(compiler))


def test_a_worker_that_ends_before_it_is_asked_ends_no_program(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the program lets a write to a closed pipe end it, as filters do."""
    end_workers()
    monkeypatch.setattr(pool, "most_workers", lambda: 1)
    override = register(impls.negated)
    call(4)
    assert opgraft.wait_until_ready(LIMIT)
    asked, ask = [], pool._Overseer._ask

    def ask_late(self: pool._Overseer, process: Any, *arguments: Any) -> Any:
        asked.append(process.pid)
        if len(asked) == 1:
            os.kill(process.pid, signal.SIGKILL)
            until(lambda: pool._has_ended(process))  # with all of its threads
        return ask(self, process, *arguments)

    monkeypatch.setattr(pool._Overseer, "_ask", ask_late)
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        call(5)
        assert opgraft.wait_until_ready(LIMIT)
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert len(set(asked)) == 2
    assert [state.status for state in states(override)] == ["ready", "ready"]


def test_where_memory_runs_out_a_worker_is_killed_and_not_the_program(
    register: Register,
) -> None:
    register(impls.negated)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    for each in pool.shared().workers():
        assert Path(f"/proc/{each}/oom_score_adj").read_text() == "1000\n"
    assert pool.shared().workers()


def test_where_this_process_cannot_compile_either_native_serves(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: object) -> None:
        raise RuntimeError("can't start new thread")

    override = register(impls.needs_memory)
    pool.here().close()
    pool._pools.pop(pool._Runner)
    monkeypatch.setattr(pool._Runner, "start", fails, raising=False)
    expect_native_for_good(override, "can't start new thread")


def test_an_interrupt_while_it_is_asked_for_is_the_callers(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    override = register(impls.negated)
    with monkeypatch.context() as patch:
        patch.setattr("opgraft.ready.request.request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            torch.neg(torch.ones(4))
    assert states(override) == []
    call()
    assert opgraft.wait_until_ready(LIMIT)
    call()
    assert override.hits == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, RecursionError])
@pytest.mark.parametrize("where", ["plan.plans.describe_call", "ready.request.request"])
def test_what_is_raised_before_somebody_is_asked_is_forgotten(
    register: Register, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], where: str
) -> None:
    """An interrupt is the caller's; the rest is nobody's. A later call asks."""

    def raises(*_: object) -> None:
        raise error

    override = register(impls.negated)
    with monkeypatch.context() as patch:
        patch.setattr(f"opgraft.{where}", raises)
        if issubclass(error, Exception):
            call()
        else:
            with pytest.raises(error):
                torch.neg(torch.ones(4))
    call()
    assert opgraft.wait_until_ready(LIMIT)
    (state,) = states(override)
    if error is ValueError and "request" in where:
        assert state.status == "failed"
    else:
        call()
        assert override.hits == 1


def test_a_call_needs_no_more_stack_than_native(
    register: Register, submitted: list[pool.Job]
) -> None:
    override = register(impls.negated)
    call(1000)  # what it imports is imported

    def call_below(frames: int, x: torch.Tensor) -> None:
        if frames == 0:
            torch.neg(x)
        else:
            call_below(frames - 1, x)

    def most_frames(x: torch.Tensor) -> int:
        """How far down a call of native's has stack."""
        for frames in range(1000):
            try:
                call_below(frames, x)
            except RecursionError:
                return frames - 1
        raise AssertionError("the stack has no end")

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 200)
    try:
        with opgraft.disabled():
            most = most_frames(torch.ones(1))
        for up in range(100):
            call_below(most - up, torch.ones(2 + up))
    finally:
        sys.setrecursionlimit(limit)
    assert len(submitted) == len(states(override)) < 101
    for job in submitted:
        job.dropped()


def test_a_kind_of_call_that_the_core_forgot_is_not_compiled_twice(register: Register) -> None:
    override = register(impls.never_works)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    assert override.plans is not None
    (state,) = states(override)
    override.plans.table.forget_asked()
    call()
    assert states(override) == [state]


def test_a_kind_of_call_that_the_core_forgot_to_be_ready_is_ready(register: Register) -> None:
    override = register(impls.negated)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    core = loader.in_use()
    assert core is not None and override.plans is not None
    table = override.plans.table
    (kind,) = override.plans.readiness._states
    size = 5
    while table.is_ready(kind.key):
        other = core.plan_key((torch.empty(size),), "aten::neg", "")
        assert other is not None and size < 100_000
        table.set_ready(other)
        size += 1
    call()
    assert override.hits == 1


def test_what_is_compiled_ahead_is_not_let_go_where_the_core_forgot_it(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    override = register(impls.negated)
    with monkeypatch.context() as patch:
        patch.setattr(pool._Attendant, "start", lambda self: None)
        end_workers()
        with readiness.compiling_ahead():
            call()
    assert override.plans is not None
    override.plans.table.forget_asked()
    (attendant,) = pool.shared()._attendants
    attendant.start()
    assert opgraft.wait_until_ready(LIMIT)
    assert [state.status for state in states(override)] == ["ready"]


def test_threads_that_ask_together_ask_once(
    register: Register, monkeypatch: pytest.MonkeyPatch, submitted: list[pool.Job]
) -> None:
    override = register(impls.negated)
    original = type(override.plans).ask_for_kernels
    inside = threading.Barrier(2, timeout=LIMIT)

    def ask(*arguments: Any) -> bool:
        inside.wait()
        return original(*arguments)

    monkeypatch.setattr(type(override.plans), "ask_for_kernels", ask)
    assert override.plans is not None
    results = []
    first = threading.Thread(target=lambda: results.append(torch.neg(torch.ones(4))))
    first.start()
    until(lambda: inside.n_waiting == 1)
    override.plans.table.forget_asked()  # as if the other one had come before it was noted
    results.append(torch.neg(torch.ones(4)))
    first.join()
    assert len(submitted) == 1 and len(results) == 2
    submitted[0].dropped()


def test_a_closed_pool_leaves_no_worker_that_was_just_being_started(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_workers()
    start, made = subprocess.Popen, []

    def closes_first(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        pool.shared()._closed = True  # and whoever closed it found no process yet
        made.append(start(*arguments, **options))
        return made[0]

    register(impls.hangs_when_dry)
    with monkeypatch.context() as patch:
        patch.setattr("opgraft.ready.pool.subprocess.Popen", closes_first)
        call()
        until(lambda: bool(made) and made[0].returncode is not None)
    end_workers()


def test_the_same_failure_is_said_once(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    register(impls.never_works)
    for size in range(1, 9):
        call(size)
    assert opgraft.wait_until_ready(LIMIT)
    said = [record for record in caplog.records if "native serves it" in record.getMessage()]
    assert len([record for record in said if record.levelname == "WARNING"]) == 1


def test_what_will_have_no_plan_and_runs_natively_is_not_compiled(register: Register) -> None:
    """Shapes that change for ever would keep workers busy for ever."""
    override = register(impls.negated)
    assert override.plans is not None
    table = override.plans.table
    while not table.stopped:
        table.count_recording()
    call()
    assert states(override) == [] and override.misses == 1


def test_a_call_that_cannot_have_a_plan_is_explained_so(register: Register) -> None:
    x = torch.ones(2, 4)
    override = register(impls.negated)
    many = [torch.ones(1)] * 100
    other = register(impls.negated_pairs, "_foreach_neg")
    torch._foreach_neg(many)
    assert (other.hits, states(other)) == (1, [])
    assert "no launch plan can be recorded" in str(opgraft.explain("aten::_foreach_neg", many))
    assert "nobody has asked" in str(opgraft.explain("aten::neg", x)) and override.hits == 0


@pytest.mark.parametrize(
    "op, impl, make",
    [
        ("_foreach_neg", impls.negated_pairs, lambda x: torch._foreach_neg([x, x])[1]),
        ("neg_", impls.negated_in_place, lambda x: x.clone().neg_()),
        ("neg.out", impls.negated_out, lambda x: torch.neg(x, out=torch.empty_like(x))),
        ("neg", impls.negated_by_native, torch.neg),
        ("neg", impls.negated, lambda x: torch.vmap(torch.neg)(x)),
        ("neg", impls.negated, lambda x: torch.neg(x.expand(3, *x.shape))[0]),
        ("neg", impls.negated, lambda x: torch.neg(torch.cat([x, x])[4:])),
    ],
    ids=["list", "in place", "out", "same op", "vmap", "expanded", "offset"],
)
def test_every_kind_of_op_is_right_before_and_after(
    register: Register, op: str, impl: Any, make: Any
) -> None:
    keyed = impl is impls.negated_by_native
    override = register(impl, op, unconditional_override=not keyed)
    x = torch.randn(4, 4)
    expected = 0 - x
    assert torch.equal(make(x), expected)
    assert override.hits == 0
    assert opgraft.wait_until_ready(LIMIT)
    assert all(state.by.startswith("worker") for state in states(override))
    for _ in range(5):
        assert torch.equal(make(x), expected)
    assert override.hits == 5


#: Runs the impl that it is told of before and after it is ready; a program of its own.
WHOLE = """
import os, pathlib, sys, torch, opgraft
sys.path.insert(0, os.environ["TESTS_ROOT"])
from tests.ready import impls
sys.path[:0] = [3, pathlib.Path("/nowhere"), "/od:d'\\udcff"]
override = opgraft.register_op_override(
    "aten", "neg", "CPU", impls.negated, unconditional_override=True,
    launch_plan=True, when_not_ready="native",
)
torch.neg(torch.ones(4))
assert opgraft.wait_until_ready(100)
torch.neg(torch.ones(4))
assert override.hits == 1, override.plans.readiness.states()[0].reason
"""


def test_a_strange_place_to_run_at_stops_nothing(tmp_path: Path) -> None:
    """Modules of the same names in the folder that it is started in, noise, odd paths, no cache."""
    for folder in ("program", "site", "cache"):
        (tmp_path / folder).mkdir()
    program = tmp_path / "program" / "main.py"
    program.write_text(WHOLE)
    for name in ("json", "types", "runpy", "ctypes"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('another module')")
    (tmp_path / "site" / "sitecustomize.py").write_text("print('{}')")
    (tmp_path / "cache" / "claims").touch()  # where a folder would be
    environment = os.environ | {
        "TESTS_ROOT": str(Path(__file__).parents[2]),
        "PYTHONPATH": str(tmp_path / "site"),
        "OPGRAFT_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=3 * LIMIT,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("option", ["-E", "-I"])
def test_what_python_ignores_of_the_environment_a_worker_ignores(
    own_cache: Path, option: str
) -> None:
    program = f"import sys; sys.path[:] = {sys.path!r}\n{WHOLE}"
    environment = os.environ | {
        "TESTS_ROOT": str(Path(__file__).parents[2]),
        "PYTHONHOME": "/no/such/folder",  # with which Python does not start
    }
    done = subprocess.run(
        [sys.executable, option, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3 * LIMIT,
    )
    assert done.returncode == 0, done.stderr


def program_that_ends(folder: Path) -> str:
    """What is called Python, and is another one, or lacks what this one has."""
    path = folder / "python3"
    path.write_text("#!/bin/sh\necho no module named torch >&2\nexit 3\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "executable",
    ["", "/no/such/python", "/bin/true", program_that_ends, None],
    ids=["empty", "missing", "true", "a program that ends", "None"],
)
def test_where_no_worker_can_be_started_this_process_compiles(
    register: Register,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    executable: str | Callable[[Path], str] | None,
) -> None:
    end_workers()
    if executable is None:  # a program that was made of a script and Python, and would run again
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        path = executable if isinstance(executable, str) else executable(tmp_path)
        monkeypatch.setattr(sys, "executable", path)
    override = register(impls.negated)
    call()
    assert opgraft.wait_until_ready(LIMIT)
    (state,) = states(override)
    assert (state.status, state.by) == ("ready", "this process")
    assert "no worker can be started" in state.reason


#: A program that has to compile by itself, and goes on doing so.
COMPILES_FOR_EVER = """
import atexit, torch, opgraft
running = []
def local(self):
    running.append(True)
    while True:
        torch.ones(100_000).exp()
opgraft.register_op_override(
    "aten", "neg", "CPU", local, unconditional_override=True,
    launch_plan=True, when_not_ready="native",
)
def until_it_compiles():
    torch.neg(torch.ones(4))
    while not running:
        pass
    print("done", flush=True)
"""


@pytest.mark.parametrize("when", ["until_it_compiles()", "atexit.register(until_it_compiles)"])
def test_a_process_that_ends_while_it_compiles_ends_as_ever(when: str) -> None:
    """Also where its first call is one of its end: no thread stays behind."""
    done = forked_programs.run(COMPILES_FOR_EVER + when)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_nothing_is_asked_for_once_the_process_ends(
    register: Register, monkeypatch: pytest.MonkeyPatch, submitted: list[pool.Job]
) -> None:
    monkeypatch.setattr(readiness, "_is_ending", True)
    override = register(impls.negated)
    call()
    call()
    assert (override.misses, states(override), submitted) == (2, [], [])


@pytest.mark.usefixtures("a_worker_is_started")
def test_ctrl_c_is_the_parents(register: Register) -> None:
    """It goes to the whole process group: a worker that is just being started is not of it."""
    register(impls.negated)
    call()
    until(lambda: bool(pool.shared().workers()))
    (worker,) = pool.shared().workers()
    assert os.getpgid(worker) != os.getpgid(0)
    assert opgraft.wait_until_ready(LIMIT)


def ahead_of(override: opgraft.Override, *sizes: int, is_over: Callable[[], bool]) -> None:
    compiling = ahead.Ahead(is_over)
    tensors = {size: torch.zeros(size) for size in sizes}
    for size in sizes:
        compiling.submit(size, override, override.operator.bind((tensors[size],), {}))
    for size in sizes:
        compiling.wait(size, lambda done, total: None)


def test_a_pool_that_there_is_starts_more_workers_where_they_are_allowed(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`opgraft tune` runs a script first, whose calls have started workers. In places of this
    process's own."""
    end_workers()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)
    monkeypatch.setattr(pool, "_most", 1)
    monkeypatch.setattr(pool, "_has_own_places", False)
    hanging = register(impls.hangs_when_dry)
    is_over = threading.Event()
    compiling = ahead.Ahead(is_over.is_set)
    for size in (4, 5):
        compiling.submit(size, hanging, hanging.operator.bind((torch.zeros(size),), {}))
    assert len(pool.shared()._attendants) == 1
    pool.allow_workers(3)
    for size in (6, 7, 8):
        compiling.submit(size, hanging, hanging.operator.bind((torch.zeros(size),), {}))
    assert len(pool.shared()._attendants) == 3
    other = pool.shared()._attendants[1]
    assert isinstance(other, pool._Overseer)
    assert all(str(os.getpid()) in each.name for each in other._places())
    is_over.set()
    end_workers()


def test_workers_compile_ahead_for_many_calls(register: Register, notes: Path) -> None:
    """For each kind once, though no call was made, and nothing is taken to be ready by it."""
    override = register(impls.tells_when_dry)
    ahead_of(override, 4, 5, 4, is_over=lambda: False)
    lines = sorted(line.split(" ", 1)[1] for line in notes.read_text().splitlines())
    assert [line.split(")")[0] for line in lines] == ["(4,", "(5,"]
    assert states(override) == []


@pytest.mark.parametrize("impl", [impls.crashes_when_dry, lambda self: 0 - self])
def test_what_no_worker_compiles_ahead_is_left_to_the_call(register: Register, impl: Any) -> None:
    override = register(impl, when_not_ready="wait")
    ahead_of(override, 4, is_over=lambda: False)
    call()
    assert override.hits == 1


def test_compiling_ahead_goes_on_where_nobody_can_compile(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(self: pool.Pool, job: pool.Job) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool.Pool, "submit", no_thread)
    ahead_of(register(impls.tells_when_dry), 4, is_over=lambda: False)


def test_an_error_after_compiling_ahead_ends_no_thread(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_be_imported(override: opgraft.Override) -> None:
        raise SystemExit("this module ends the process")

    monkeypatch.setattr("opgraft.ready.here.import_ahead", cannot_be_imported)
    override = register(impls.tells_when_dry)
    ahead_of(override, 4, is_over=lambda: False)
    workers = pool.shared().workers()
    ahead_of(override, 5, is_over=lambda: False)
    assert workers and pool.shared().workers() == workers


def test_what_is_compiled_ahead_is_let_go_when_it_is_closed(
    register: Register, submitted: list[pool.Job]
) -> None:
    """Whoever wanted it has failed. What a worker has begun, it ends."""
    override = register(impls.tells_when_dry)
    compiling = ahead.Ahead(lambda: False)
    compiling.submit("a", override, override.operator.bind((torch.zeros(4),), {}))
    assert [job.wanted() for job in submitted] == [1]
    compiling.close()
    assert [job.wanted() for job in submitted] == [0]
    compiling.wait("a", lambda done, total: None)


def test_compiling_ahead_ends_when_the_time_is_over(register: Register) -> None:
    override = register(impls.hangs_when_dry)
    deadline = time.monotonic() + 2
    ahead_of(override, 4, is_over=lambda: time.monotonic() > deadline)
    assert time.monotonic() < deadline + LIMIT / 4
