"""The compiled router under load: threads that call while others change the chain, threads that
Python never saw, the autograd engine's, and the end of the interpreter.

`OPGRAFT_STRESS=1` runs the long version of what is bounded by default.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import opgraft
from opgraft import when
from opgraft.core import loader
from opgraft.ops.schema import resolve
from opgraft.registry import Override, registry
from opgraft.router.compiled import CompiledRouter
from tests import ops, probes

core: Any = loader.in_use()
if core is None:
    pytest.skip(f"Python routes here: {loader.status()}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("quick_collections")

LONG = os.environ.get("OPGRAFT_STRESS") == "1"
CHANGES = 100_000 if LONG else 5_000


@pytest.fixture(autouse=True)
def one_thread_inside_an_op() -> Iterator[None]:
    """OpenMP's threads, which wait by spinning, would cost more than all that is tested here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def resident() -> int:
    """This process's memory in bytes."""
    if os.environ.get("OPGRAFT_SANITIZED") == "1":
        return 0  # the address sanitizer keeps what was freed for a while
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="memory is read from /proc"
)


def on_softmax(impl: Callable[..., Any] = ops.softmax, **keywords: Any) -> Override:
    keywords.setdefault("unconditional_override", "cond" not in keywords)
    return opgraft.register_op_override("aten", "_softmax", "CPU", impl, **keywords)


# ------------------------------------------------------------------ changes while threads call


class Callers:
    """Threads that call softmax and check what they get, until they are told to stop."""

    def __init__(self, count: int) -> None:
        self._stop = threading.Event()
        self.calls = [0] * count
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(count)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(index))
        wanted = ops.softmax(x.double(), -1, False).float()
        try:
            while not self._stop.is_set() and not self.errors:
                got = torch.softmax(x, -1)
                if not torch.allclose(got, wanted, atol=1e-6):
                    self.errors.append(f"thread {index} got {got}")
                self.calls[index] += 1
        except Exception as error:
            self.errors.append(f"thread {index}: {type(error).__name__}: {error}")


def test_calls_while_overrides_come_go_and_change_places() -> None:
    random.seed(0)
    overrides: list[Override] = []

    def register(index: int) -> Override:
        conds: list[dict[str, Any]] = [
            {"unconditional_override": True},
            {"cond": when.size("self", -1) == 64},
            {"cond": when.size("self", -1) == 63},
            {"cond": lambda self, *_: self.ndim == 2},
        ]
        return on_softmax(
            name=f"o{index}",
            dsl=f"dsl{index % 2}",
            priority=random.randrange(3),
            **conds[index % 4],
        )

    def change() -> None:
        kind = random.randrange(5)
        if kind == 0 and len(overrides) > 4:
            overrides.pop(random.randrange(len(overrides))).remove()
        elif kind <= 1:
            # A name that is there already replaces its owner: another priority, another place.
            index = random.randrange(8)
            added = register(index)
            overrides[:] = [o for o in overrides if not o.state.removed] + [added]
        elif kind == 2:
            opgraft.disable(dsl=f"dsl{random.randrange(2)}")
        elif kind == 3:
            opgraft.enable(dsl=f"dsl{random.randrange(2)}")
        else:
            opgraft.enable()

    def changes(count: int) -> None:
        for _ in range(count):
            change()

    overrides += [register(i) for i in range(4)]
    with Callers(4) as callers:
        changes(CHANGES // 5)  # what is allocated once has been
        before = resident()
        start = time.perf_counter()
        changes(CHANGES)
        seconds = time.perf_counter() - start
        gc.collect()
        grown = resident() - before
    print(
        f"{CHANGES} changes in {seconds:.1f} s beside {sum(callers.calls)} calls, "
        f"{grown / CHANGES:.0f} bytes a change"
    )
    assert not callers.errors, callers.errors[0]
    assert min(callers.calls) > 0
    # Noise of the allocator is a few MB; the short version has more of it for each change.
    assert grown < (CHANGES * 500 if LONG else 4 * 2**20)


@needs_proc
def test_a_toggle_leaks_nothing() -> None:
    """Without other threads, so that a leak of 1 KB a toggle cannot hide."""
    on_softmax(name="toggled")

    def toggle(times: int) -> None:
        for _ in range(times):
            opgraft.disable(name="toggled")
            torch.softmax(torch.ones(4, 64), -1)
            opgraft.enable(name="toggled")
            torch.softmax(torch.ones(4, 64), -1)

    times = 3_000
    toggle(times // 5)
    gc.collect()
    before = resident()
    toggle(times)
    gc.collect()
    assert resident() - before < times * 512


@needs_proc
def test_registering_again_leaks_nothing() -> None:
    """Each registration makes a condition, two tables of keys and a reference to the impl."""

    def register(times: int) -> None:
        for _ in range(times):
            on_softmax(name="again", cond=when.size("self", -1) == 64)
            torch.softmax(torch.ones(4, 64), -1)

    times = 2_000
    register(times // 2)
    gc.collect()
    before = resident()
    register(times)
    gc.collect()
    assert resident() - before < times * 512


@needs_proc
@pytest.mark.parametrize("kind", ["hit", "miss", "asks Python", "fails"])
def test_calls_leak_nothing(kind: str) -> None:
    constant = torch.full((4, 64), 1 / 64)
    x = torch.ones(4, 64)
    if kind == "asks Python":
        on_softmax(lambda *_: constant.clone(), cond=lambda *_: True)
    elif kind == "fails":

        def fails(*_: Any) -> Any:
            raise ValueError("no")

        on_softmax(fails)
    else:
        wanted = 64 if kind == "hit" else 63
        on_softmax(lambda *_: constant.clone(), cond=when.size("self", -1) == wanted)

    def call(times: int) -> None:
        for _ in range(times):
            try:
                torch.softmax(x, -1)
            except ValueError:
                assert kind == "fails"

    times = 100_000 if kind in ("hit", "miss") else 20_000
    call(times // 10)
    gc.collect()
    before = resident()
    call(times)
    gc.collect()
    assert resident() - before < times * 16 + 2**20


# ------------------------------------------------------------------ threads of others


def test_a_thread_that_python_never_saw_reaches_a_python_impl() -> None:
    idents: set[int] = set()

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        idents.add(threading.get_ident())
        return ops.softmax(self, dim, half_to_float)

    override = on_softmax(impl)
    probes.call_on_a_thread("aten::_softmax", [torch.randn(4, 64)], (-1, False), 5_000)
    assert override.hits == 5_000
    assert idents and threading.get_ident() not in idents


def test_many_such_threads_one_after_another() -> None:
    override = on_softmax()
    for _ in range(200):
        probes.call_on_a_thread("aten::_softmax", [torch.randn(4, 64)], (-1, False), 3)
    assert override.hits == 600


def test_such_threads_and_pythons_own_at_once() -> None:
    override = on_softmax(cond=when.ndim("self") == 2)

    def run() -> None:
        probes.call_on_a_thread("aten::_softmax", [torch.randn(4, 64)], (-1, False), 1_000)

    threads = [threading.Thread(target=run) for _ in range(4)]
    with Callers(2) as callers:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not callers.errors
    assert override.hits == 4_000 + sum(callers.calls)


def test_a_thread_that_called_python_ends_while_another_holds_the_gil() -> None:
    """Whoever joins a thread of C++ need not know that Python ran there."""
    override = on_softmax(cond=lambda *_: True)
    for _ in range(20):
        assert probes.ends_without_gil("aten::_softmax", [torch.randn(4, 64)], (-1, False))
    assert override.hits == 20


def test_what_such_a_thread_kept_in_python_is_freed_when_python_is_next_called() -> None:
    local = threading.local()

    class Kept:
        pass

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            kept.append(weakref.ref(mine := Kept()))
            local.mine = mine
        return ops.softmax(self, dim, half_to_float)

    kept: list[weakref.ref[Kept]] = []
    on_softmax(impl)
    for _ in range(5):
        probes.call_on_a_thread("aten::_softmax", [torch.randn(4, 64)], (-1, False), 1)
    torch.softmax(torch.randn(4, 64), -1)
    assert len(kept) == 5
    assert [each() for each in kept] == [None] * 5
    # And the thread that freed it knows its own state as before.
    gil_state = ctypes.pythonapi.PyGILState_GetThisThreadState
    gil_state.restype = ctypes.c_void_p
    assert gil_state()


class OwnError(Exception):
    pass


@pytest.mark.parametrize("error", [OwnError("mine"), KeyError("k"), ZeroDivisionError("z")])
def test_an_exception_keeps_its_type_across_such_a_thread(error: Exception) -> None:
    def impl(*_: Any) -> Any:
        raise error

    override = on_softmax(impl)
    for times in (1, 100):
        with pytest.raises(type(error)) as raised:
            probes.call_on_a_thread("aten::_softmax", [torch.randn(2, 4)], (-1, False), times)
        assert raised.value is error
    assert override.hits == 2


def test_an_exception_of_a_condition_keeps_its_type_too() -> None:
    def cond(*_: Any) -> bool:
        raise OwnError("cond")

    on_softmax(cond=cond)
    with pytest.raises(OwnError, match="cond"):
        probes.call_on_a_thread("aten::_softmax", [torch.randn(2, 4)], (-1, False), 1)


def test_fallback_works_on_such_a_thread() -> None:
    def impl(*_: Any) -> Any:
        raise OwnError("no")

    override = on_softmax(impl, on_error="fallback")
    with pytest.warns(opgraft.OverrideWarning):
        probes.call_on_a_thread("aten::_softmax", [torch.randn(2, 4)], (-1, False), 1_000)
    assert (override.hits, override.fallbacks) == (1, 1)


def test_the_autograd_engine_hits_an_override_of_the_backward_op() -> None:
    threads: set[int] = set()

    def backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
        threads.add(threading.get_ident())
        return output * (grad - (grad * output).sum(dim, keepdim=True))

    override = opgraft.register_op_override(
        "aten", "_softmax_backward_data", "CPU", backward, cond=when.ndim("output") == 2
    )
    x = torch.randn(4, 64, requires_grad=True)
    weights = torch.randn(4, 64)

    def gradient() -> torch.Tensor:
        (grad,) = torch.autograd.grad((torch.softmax(x, -1) * weights).sum(), x)
        return grad

    with opgraft.disabled():
        wanted = gradient()
    for _ in range(100):
        torch.testing.assert_close(gradient(), wanted)
    assert (override.hits, override.misses) == (100, 0)


# ------------------------------------------------------------------ counters


def test_more_threads_than_cores_lose_no_count() -> None:
    override = on_softmax(cond=when.size("self", -1) == 64, name="hit")
    missing = on_softmax(cond=when.size("self", -1) == 63, name="miss")
    counter = core.Counter()
    count, times = 40, 200
    together = threading.Barrier(count)

    def run() -> None:
        together.wait()
        probes.call_on_a_thread("aten::_softmax", [torch.randn(4, 64)], (-1, False), times)
        for _ in range(times):
            counter.add()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (override.hits, missing.misses) == (count * times, count * times)
    assert counter.total() == count * times


def test_a_counter_starts_at_zero_whoever_had_its_place() -> None:
    """More of them than a chunk of a thread's shard holds, several times over."""
    for _ in range(3):
        counters = [core.Counter() for _ in range(2_000)]
        assert {counter.total() for counter in counters} == {0}
        for counter in counters:
            counter.add()
        thread = threading.Thread(target=lambda all=counters: [each.add() for each in all])
        thread.start()
        thread.join()
        assert {counter.total() for counter in counters} == {2}


@needs_proc
def test_threads_that_come_and_go_take_over_what_counters_have() -> None:
    counter = core.Counter()

    def come_and_go(times: int) -> None:
        for _ in range(times):
            thread = threading.Thread(target=counter.add)
            thread.start()
            thread.join()

    come_and_go(100)
    before = resident()
    come_and_go(1_000)
    assert counter.total() == 1_100
    assert resident() - before < 2**20  # a shard is 8 KB


# ------------------------------------------------------------------ reclamation


def test_what_a_slow_reader_kept_is_freed_when_python_is_next_called() -> None:
    class Impl:
        def __call__(self, *arguments: Any) -> torch.Tensor:
            return ops.softmax(*arguments)

    impl = Impl()
    freed = weakref.ref(impl)
    slow = on_softmax(impl, name="slow", cond=when.size("self", -1) == 63)
    on_softmax(name="other", cond=when.size("self", -1) == 64)
    reading, may_end = threading.Event(), threading.Event()

    def read() -> None:
        with core.Reading():
            reading.set()
            may_end.wait(60)

    thread = threading.Thread(target=read)
    thread.start()
    reading.wait(60)
    slow.remove()
    del impl, slow
    gc.collect()
    assert freed() is not None  # the thread may be asking its condition
    may_end.set()
    thread.join()
    torch.softmax(torch.randn(4, 64), -1)
    assert freed() is None


def test_what_nobody_reads_is_freed_at_once() -> None:
    class Impl:
        def __call__(self, *arguments: Any) -> torch.Tensor:
            return ops.softmax(*arguments)

    with Callers(2):
        for _ in range(20):
            impl = Impl()
            freed = weakref.ref(impl)
            override = on_softmax(impl, name="one", cond=when.size("self", -1) == 63)
            override.remove()
            del impl, override
            torch.softmax(torch.randn(4, 63), -1)
    gc.collect()
    assert freed() is None


# ------------------------------------------------------------------ forks

FORKING = """
    import os, signal, sys, threading, torch, opgraft
    from opgraft.core import loader
    from opgraft import when

    # Operators that run on several threads are no part of this: OpenMP's do not survive a fork.
    torch.set_num_threads(1)
    x = torch.ones(4, 64)

    def register(index):
        return opgraft.register_op_override(
            "aten", "_softmax", "CPU", lambda self, *_: self + index, name=f"o{index % 4}",
            cond=when.size("self", -1) == 64)

    def toggle():
        index = 0
        while True:
            index += 1
            register(index)
            opgraft.disable(name="o1")
            opgraft.enable(name="o1")

    def cpp():  # threads that come and go, each with a slot among the router's readers
        core = loader.in_use()
        while True:
            probes.call_on_a_thread("aten::_softmax", [x], (-1, False), 1)

    def python():  # a thread that is in an impl most of the time
        while True:
            torch.softmax(x, -1)

    def child():
        for index in range(20):
            mine = register(1000 + index)
            assert torch.softmax(x, -1)[0, 0] == 1001 + index
            opgraft.disable()
            assert torch.softmax(x, -1)[0, 0] == 1 / 64
            opgraft.enable()
            assert mine.hits == 1, mine.hits

    register(0)
    # What Python imports, or torch sets up, at a first call can hang the child of a fork meanwhile,
    # whatever we do.
    opgraft.enable(name="o1")
    torch.softmax(x, -1)
    for target in (toggle, cpp, python):
        threading.Thread(target=target, daemon=True).start()
    for _ in range(int(sys.argv[1])):
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)  # a deadlock ends the child by a signal
            try:
                child()
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status != 0:
            print(f"a child ended with {status}", flush=True)
            os._exit(1)
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_while_others_toggle_and_call_leaves_a_child_that_works() -> None:
    program = [sys.executable, "-c", textwrap.dedent(FORKING), "200" if LONG else "30"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout, done.stderr[-2000:])


def test_a_forked_child_ends_at_once_though_its_parent_was_in_python() -> None:
    """What the parent's threads were in the middle of is nothing that the child waits for."""
    program = """
        import os, threading, time, torch, opgraft

        inside = threading.Event()

        def impl(self, *_):
            inside.set()
            time.sleep(60)

        opgraft.register_op_override("aten", "_softmax", "CPU", impl, unconditional_override=True)
        thread = threading.Thread(target=torch.softmax, args=(torch.ones(2), -1), daemon=True)
        thread.start()
        inside.wait()
        pid = os.fork()
        if pid == 0:
            start = time.monotonic()
            opgraft.core.loader.in_use().shut_down()
            os._exit(0 if time.monotonic() - start < 1 else 1)  # it gives up after two seconds
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


# ------------------------------------------------------------------ impls in C++


def _publish(router: CompiledRouter, halves: list[Any]) -> None:
    router._router.publish(halves)


@pytest.fixture
def softmax_router() -> Iterator[CompiledRouter]:
    """The core's router of softmax, with nothing of Python's in its chain."""
    from opgraft import router

    chain = registry.chain(resolve("aten::_softmax"), "CPU")
    installed = router.install(chain)
    assert isinstance(installed, CompiledRouter)
    yield installed
    installed.publish(chain)


def test_an_impl_in_cpp_is_hit_without_python(softmax_router: CompiledRouter) -> None:
    from opgraft.when.compilation import compile_condition

    hits, misses, fallbacks = (core.Counter() for _ in range(3))
    identity = {"op": "aten::_softmax", "dispatch_key": "CPU", "dsl": None, "pack": None}
    half = core.Override({**identity, "name": "plus one"}, hits, misses, fallbacks)
    nodes = compile_condition(when.size("self", -1) == 64, resolve("aten::_softmax"))
    half.set_condition(nodes)
    half.set_boxed_impl(probes.load().plus_one)
    _publish(softmax_router, [half])
    x = torch.randn(4, 64)
    assert torch.equal(torch.softmax(x, -1), x + 1)
    assert torch.softmax(torch.ones(1, 2), -1).tolist() == [[0.5, 0.5]]
    probes.call_on_a_thread("aten::_softmax", [x], (-1, False), 1_000)
    assert (hits.total(), misses.total(), fallbacks.total()) == (1_001, 1, 0)
    with opgraft.disabled(name="plus one"):
        assert not torch.equal(torch.softmax(x, -1), x + 1)
    assert torch.equal(torch.softmax(x, -1), x + 1)
    _publish(softmax_router, [])
    assert not torch.equal(torch.softmax(x, -1), x + 1)


# ------------------------------------------------------------------ the end of the interpreter

ENDING = """
    import ctypes, sys, threading, time, torch, opgraft
    from opgraft import when
    from tests import probes

    threads, overridden = sys.argv[1], sys.argv[2] == "overridden"
    calls = [0]

    def impl(self, dim, half_to_float):
        calls[0] += 1
        weights = (self - self.amax(dim, keepdim=True)).exp()
        return weights / weights.sum(dim, keepdim=True)

    def wants(self, *_):
        calls[0] += 1
        return self.size(-1) == 3

    if overridden:
        register = lambda **keywords: opgraft.register_op_override(
            "aten", "_softmax", "CPU", impl, **keywords)
        register(cond=when.size("self", -1) == 64)
        register(cond=wants)
    x = torch.ones(4, 64)

    def python():
        while True:
            torch.softmax(x, -1)

    def cpp():
        probes.call_on_a_thread("aten::_softmax", [x], (-1, False), 10**9)

    targets = {"python": [python] * 2, "c++": [cpp] * 2, "both": [python, cpp]}[threads]
    for target in targets:
        threading.Thread(target=target, daemon=True).start()
    time.sleep(0.3)
    while overridden and calls[0] < 500:
        time.sleep(0.01)
    # What torch's own static destructors do to a thread that calls is none of ours: the process
    # ends after Python, before they come.
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    print("ends", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ends the process by on_exit, of glibc")
@pytest.mark.parametrize("threads", ["c++", "python", "both"])
def test_the_interpreter_ends_while_threads_call(threads: str) -> None:
    def end(what: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", textwrap.dedent(ENDING), threads, what]
        return subprocess.run(program, capture_output=True, text=True, timeout=120)

    if (stock := end("stock")).returncode != 0:
        # Up to Python 3.13 a daemon thread that wants the GIL back is unwound, and that ends in a
        # destructor of torch's: with no override at all.
        pytest.skip(f"stock torch does not survive this here: {stock.stderr.strip()[:80]}")
    for _ in range(10 if LONG else 2):
        result = end("overridden")
        assert result.returncode == 0, (result.returncode, result.stderr[-2000:])
        assert result.stdout == "ends\n"
        assert "FATAL" not in result.stderr.upper()
