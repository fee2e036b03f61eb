"""What programs do beside calling ops: fork, spawn, pickle, hook, script; and for how long.

Overrides that are registered must outlive it, and be hit where one would expect it.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import when
from opgraft.base import locks
from opgraft.core import loader
from tests import forked_programs, ops, probes

ROOT = Path(__file__).parent.parent


def on_softmax(impl: Callable[..., Any] = ops.softmax, **keywords: Any) -> opgraft.Override:
    keywords.setdefault("unconditional_override", "cond" not in keywords)
    return opgraft.register_op_override("aten", "_softmax", "CPU", impl, **keywords)


def on_softmax_backward(impl: Callable[..., Any]) -> opgraft.Override:
    return opgraft.register_op_override(
        "aten", "_softmax_backward_data", "CPU", impl, unconditional_override=True
    )


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("this impl must not run")


def run(program: str, **environment: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = forked_programs.run(textwrap.dedent(program), env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ------------------------------------------------------------------ other processes


def test_a_fork_releases_no_lock_that_was_made_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a module that another thread imports."""
    monkeypatch.setattr(locks, "_locks", list(locks._locks))
    locks._acquire_all()
    other = locks.fork_safe_lock()
    locks._release_all()
    with pytest.raises(RuntimeError, match="un-acquired"):
        other.release()


def test_workers_of_a_data_loader_that_were_forked_route() -> None:
    run(
        """
        import torch
        from torch.utils.data import DataLoader, Dataset
        import opgraft

        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        override = opgraft.register_op_override(
            "aten", "_softmax", "CPU",
            lambda self, dim, half: torch.full_like(self, 9.0), unconditional_override=True,
        )

        class Rows(Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                return torch.softmax(torch.zeros(4), -1), override.hits

        torch.softmax(torch.zeros(4), -1)
        for _ in range(2):
            loader = DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork")
            for rows, hits in loader:
                assert bool((rows == 9).all()) and bool((hits > 1).all())
        assert override.hits == 1
        """
    )


SPAWNED = """
import sys
import torch
import torch.multiprocessing as multiprocessing

def work(expected):
    value = float(torch.softmax(torch.zeros(2, 4), -1)[0, 0])
    assert value == expected, (value, expected)

def register():
    import opgraft
    opgraft.register_op_override(
        "aten", "_softmax", "CPU",
        lambda self, dim, half: torch.full_like(self, 9.0), unconditional_override=True,
    )

def work_with_an_override(expected):
    register()
    work(expected)

if __name__ == "__main__":
    register()
    work(9.0)
    # A process that is spawned knows what it registers itself, and nothing of this one.
    context = multiprocessing.get_context("spawn")
    for target, expected in ((work, 0.25), (work_with_an_override, 9.0)):
        process = context.Process(target=target, args=(expected,))
        process.start()
        process.join()
        assert process.exitcode == 0
"""


def test_a_process_that_is_spawned_routes_what_it_registers(tmp_path: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_subprocess_without_overrides() -> None:
    program = """
        import torch
        import opgraft
        opgraft.register_op_override(
            "aten", "_softmax", "CPU", lambda *args: 1 / 0, unconditional_override=True
        )
        print(torch.softmax(torch.zeros(2), -1).tolist())
    """
    assert run(program, OPGRAFT_DISABLE="1") == "[0.5, 0.5]\n"


# ------------------------------------------------------------------ errors and interrupts


class OwnError(Exception):
    """An error of a kernel's own."""


def raises(*args: Any) -> Any:
    raise OwnError("deep in the kernel")


@pytest.mark.parametrize("create_graph", [False, True])
def test_an_error_of_a_backward_goes_through_the_autograd_engine(create_graph: bool) -> None:
    override = on_softmax_backward(raises)
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.softmax(x, -1).pow(2).sum()
    with pytest.raises(OwnError, match="deep in the kernel") as caught:
        y.backward(create_graph=create_graph)
    assert "raises" in [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    override.remove()
    torch.softmax(x, -1).pow(2).sum().backward()  # the engine is as it was
    assert x.grad is not None and override.hits == 1


def test_an_interrupt_in_a_backward_gets_through() -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    override = on_softmax_backward(interrupted)
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(KeyboardInterrupt):
        torch.softmax(x, -1).sum().backward()
    override.remove()
    torch.softmax(x, -1).sum().backward()
    assert override.hits == 1


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_ctrl_c_while_an_impl_runs() -> None:
    printed = run(
        """
        import os, signal, time
        import torch
        import opgraft

        # What is started in the background of a shell ignores the signal.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def impl(self, dim, half_to_float):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
            return self

        override = opgraft.register_op_override(
            "aten", "_softmax", "CPU", impl, unconditional_override=True, on_error="fallback"
        )
        try:
            torch.softmax(torch.ones(2), -1)
        except KeyboardInterrupt:
            print("interrupted", override.hits, override.fallbacks, len(override.state.quarantined))
        """
    )
    assert printed == "interrupted 1 0 0\n"


# ------------------------------------------------------------------ how much and how deep

LEVELS = 50


class Tower:
    """Fifty ops, each overridden by an impl that calls the next."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.overrides: list[opgraft.Override] = []

    def call(self, level: int = 0, x: torch.Tensor | None = None) -> torch.Tensor:
        op = getattr(getattr(torch.ops, self.namespace), f"op{level}")
        result: torch.Tensor = op(torch.zeros(2) if x is None else x)
        return result


@pytest.fixture
def tower(request: pytest.FixtureRequest) -> Iterator[Tower]:
    # A name of its own for each: where a library is defined again, its kernels are above ours.
    tower = Tower(f"tower_{request.node.name}")
    library = torch.library.Library(tower.namespace, "DEF")
    for level in range(LEVELS + 1):
        library.define(f"op{level}(Tensor x) -> Tensor")
        library.impl(f"op{level}", lambda x: x + 100, "CPU")
    for level in range(LEVELS):

        def impl(x: torch.Tensor, next_level: int = level + 1) -> torch.Tensor:
            return tower.call(next_level, x) + 1

        tower.overrides.append(
            opgraft.register_op_override(
                tower.namespace, f"op{level}", "CPU", impl, unconditional_override=True
            )
        )
    yield tower
    library._destroy()


def test_fifty_impls_inside_each_other(tower: Tower) -> None:
    for _ in range(4):
        assert tower.call().tolist() == [LEVELS + 100] * 2
    assert {override.hits for override in tower.overrides} == {4}


def test_an_error_at_the_bottom_of_fifty_impls(tower: Tower) -> None:
    for _ in range(3):
        tower.call()
    bottom = opgraft.register_op_override(
        tower.namespace, f"op{LEVELS}", "CPU", raises, unconditional_override=True
    )
    with pytest.raises(OwnError, match="deep in the kernel"):
        tower.call()
    bottom.remove()
    assert tower.call().tolist() == [LEVELS + 100] * 2


def test_fifty_overrides_of_one_op() -> None:
    overrides = [on_softmax(never, cond=when.size("self", -1) == 1000 + i) for i in range(LEVELS)]
    taker = on_softmax(cond=when.size("self", -1) == 4, priority=-1)
    torch.softmax(torch.randn(3, 4), -1)
    assert [override.misses for override in overrides] == [1] * LEVELS
    assert taker.hits == 1


def test_an_impl_that_calls_itself_through_another_op_without_end_is_a_recursion_error() -> None:
    library = torch.library.Library("circle", "DEF")
    try:
        for name in ("one", "two"):
            library.define(f"{name}(Tensor x, int depth) -> Tensor")
            library.impl(name, lambda x, depth: x + depth, "CPU")
        override = opgraft.register_op_override(
            "circle", "one", "CPU", lambda x, depth: torch.ops.circle.two(x, depth + 1),
            unconditional_override=True,
        )  # fmt: skip
        opgraft.register_op_override(
            "circle", "two", "CPU", lambda x, depth: torch.ops.circle.one(x, depth + 1),
            unconditional_override=True,
        )  # fmt: skip
        # On one thread an op inside its own impl is native: the circle is closed after one round.
        assert torch.ops.circle.one(torch.zeros(1), 0).item() == 2
        assert override.hits == 1
    finally:
        library._destroy()


def resident() -> int:
    """This process's memory in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read from /proc")
@pytest.mark.skipif(loader.in_use() is None, reason="a million calls through Python take minutes")
@pytest.mark.parametrize("kind", ["miss", "hit"])
def test_memory_after_a_million_calls(kind: str) -> None:
    constant = torch.zeros(4)
    override = opgraft.register_op_override(
        "aten", "relu", "CPU", lambda self: constant.clone(),
        cond=when.size("self", -1) == (4 if kind == "hit" else 5),
    )  # fmt: skip

    def call(times: int) -> None:
        probes.call_on_a_thread("aten::relu", [torch.zeros(4)], (), times)

    call(20_000)
    gc.collect()
    before = resident()
    call(1_000_000)
    gc.collect()
    assert resident() - before < 2 * 2**20  # two bytes a call; one leaked object would be fifty
    assert (override.hits if kind == "hit" else override.misses) == 1_020_000


# ------------------------------------------------------------------ modes and hooks


def test_a_copy_on_write_tensor_is_not_copied_on_a_miss() -> None:
    override = on_softmax(never, cond=when.aligned("self", 2**20) & (when.size("self", -1) == 3))
    x = torch._lazy_clone(torch.randn(3, 4))
    torch.softmax(x, -1)
    assert torch._C._is_cow_tensor(x)  # type: ignore[attr-defined]
    assert override.misses == 1


def test_deterministic_algorithms() -> None:
    override = on_softmax(cond=when.size("self", -1) == 4)
    stated = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        x = torch.randn(3, 4)
        torch.testing.assert_close(torch.softmax(x, -1), ops.softmax(x, -1, False))
        # Natively an error in this mode: a miss must be one too.
        index = opgraft.register_op_override(
            "aten", "put_", "CPU", never, cond=when.ndim("self") == 9
        )
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    finally:
        torch.use_deterministic_algorithms(stated)
    assert (override.hits, index.misses) == (1, 1)


def test_hooks_on_tensors_and_modules() -> None:
    forward = on_softmax()
    backward = on_softmax_backward(
        lambda *args: opgraft.native("aten::_softmax_backward_data")(*args).clone()
    )
    seen: list[str] = []
    x = torch.randn(3, 4, requires_grad=True)
    module = torch.nn.Softmax(-1)
    module.register_forward_hook(lambda *_: seen.append("forward"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    y = module(x)
    y.register_hook(lambda grad: seen.append("tensor") or grad * 2)
    y.pow(2).sum().backward()
    stock = x.detach().clone().requires_grad_()
    with opgraft.disabled():
        torch.softmax(stock, -1).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, stock.grad * 2)
    assert set(seen) == {"forward", "backward", "tensor"}
    assert (forward.hits, backward.hits) == (1, 1)


def test_saved_tensor_hooks_and_anomaly_mode() -> None:
    override = on_softmax()
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    x = torch.randn(3, 4, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__),
        torch.autograd.detect_anomaly(check_nan=True),
    ):
        torch.softmax(x, -1).pow(2).sum().backward()
    assert x.grad is not None and packed
    assert override.hits == 1


# ------------------------------------------------------------------ graphs and models that hold ops


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["script", "trace", "frozen", "loaded"])
def test_a_torchscript_graph_that_holds_the_op(kind: str, tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x, -1) + 1

    x = torch.randn(3, 4)
    graph = torch.jit.trace(Model(), x) if kind == "trace" else torch.jit.script(Model().eval())
    if kind == "frozen":
        graph = torch.jit.freeze(graph)
    if kind == "loaded":
        torch.jit.save(graph, tmp_path / "model.pt")
        graph = torch.jit.load(tmp_path / "model.pt")
    expected = graph(x)
    override = on_softmax()  # after the graph was made
    for _ in range(4):  # the profiling executor optimises after some runs
        torch.testing.assert_close(graph(x), expected)
    assert override.hits == 4
    override.remove()
    assert torch.equal(graph(x), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["conv2d", "convolution"])
def test_a_trace_in_training_sees_the_native_pieces_in_place_of_a_derivative(name: str) -> None:
    def forward(*args: Any) -> torch.Tensor:
        return torch.zeros(1, 3, 3, 3)

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        return ()

    model, x = torch.nn.Conv2d(2, 3, 2, bias=False), torch.randn(1, 2, 4, 4)
    override = opgraft.register_op_override(
        *("aten", name, "CPU", forward),
        unconditional_override=True,
        autograd=(lambda ctx, inputs, output: None, backward),
    )
    model(x)
    assert override.hits == 1
    traced = torch.jit.trace(model, (x,), check_trace=False)
    assert override.hits == 1
    override.remove()
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["conv2d", "convolution"])
@pytest.mark.parametrize("earlier_calls", [0, 3])
def test_a_trace_of_what_an_op_calls_sees_the_native_pieces(name: str, earlier_calls: int) -> None:
    """The tracer does not record convolutions but what they call; a kernel calls nothing."""

    def kernel(input: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        with opgraft.disabled():
            result = torch.conv2d(input.detach(), weight.detach())
        output = torch.empty_like(result)
        output.numpy()[...] = result.numpy()
        return output

    model, x = torch.nn.Conv2d(2, 3, 2, bias=False), torch.randn(1, 2, 4, 4)
    with torch.no_grad():
        expected = model(x)
        override = opgraft.register_op_override(
            "aten", name, "CPU", kernel, unconditional_override=True
        )
        for _ in range(earlier_calls):
            model(x)
        assert override.hits == earlier_calls
        with opgraft.trace() as trace:
            traced = torch.jit.trace(model, (x,), check_trace=False)
        assert override.hits == earlier_calls
        assert trace.as_dict()["ops"]
        assert "aten::_convolution" in [node.kind() for node in traced.graph.nodes()]
        override.remove()
        torch.testing.assert_close(traced(x), expected)


def test_models_are_pickled_copied_and_saved_as_without_overrides(tmp_path: Path) -> None:
    override = on_softmax()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
    x = torch.randn(3, 4)
    expected = model(x)
    torch.save(model, tmp_path / "model.pt")
    again = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ]
    for each in again:
        assert torch.equal(each(x), expected)
    assert override.hits == 4
    data = pickle.dumps(model)
    override.remove()
    assert pickle.dumps(model) == data
    assert b"opgraft" not in data


def test_results_of_an_override_are_pickled_like_any_tensor() -> None:
    override = on_softmax()
    result = torch.softmax(torch.randn(3, 4, requires_grad=True), -1)
    again = pickle.loads(pickle.dumps(result.detach()))
    assert torch.equal(again, result) and override.hits == 1


# ------------------------------------------------------------------ threads that end


def test_threads_that_end_with_the_process_leave_nothing_to_free() -> None:
    """What stays in torch's thread-local state is freed with the GIL, once the thread has ended."""
    program = """
        import threading, opgraft, torch
        from tests import ops
        override = opgraft.register_op_override(
            "aten", "_softmax", "CPU", ops.softmax, unconditional_override=True)
        kept = []
        def call():
            torch.softmax(torch.randn(4, 8), -1)  # a first hit, which is compared with native
            with opgraft.disabled(dsl="triton"), opgraft.trace():
                assert torch._C._is_key_in_tls("opgraft.scopes")
                torch.softmax(torch.randn(4, 8), -1)
            with opgraft.disabled(), opgraft.disabled(dsl="triton"):
                pass
            keys = ("opgraft.scopes", "opgraft.probe")
            kept.append([key for key in keys if torch._C._is_key_in_tls(key)])
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(kept, override.hits)
    """
    if loader.in_use() is None:
        pytest.skip("only the core can take something out of torch's thread-local state")
    for _ in range(3):
        assert run(program) == f"{[[]] * 8} 16\n"
