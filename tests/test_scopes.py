"""Scopes end in any order, on any thread, beside anything of torch's: in both routers."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

import opgraft
from opgraft import Override
from opgraft.core import loader
from opgraft.ops.schema import Call
from opgraft.registry import Chain
from opgraft.router import observers, threads
from tests import ops
from tests.python_router import run_again, where_the_core_routes

Names = frozenset[str]


@pytest.fixture(autouse=True)
def nothing_is_left(quick_collections: None) -> Iterator[None]:
    yield
    gc.collect()
    assert threads.scopes() == () == threads.observers()
    assert not torch._C._is_key_in_tls("opgraft.scopes") or loader.in_use() is None


@pytest.fixture
def overrides() -> dict[str, Override]:
    """Three, at ops of their own."""

    def bmm(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
        return (self.unsqueeze(-1) * mat2.unsqueeze(-3)).sum(-2)

    def relu(self: torch.Tensor) -> torch.Tensor:
        return self.clamp(min=0)

    impls: dict[str, Callable[..., torch.Tensor]] = {
        "_softmax": ops.softmax,
        "bmm": bmm,
        "relu": relu,
    }
    return {
        op: opgraft.register_op_override(
            "aten", op, "CPU", impl, unconditional_override=True, name=op
        )
        for op, impl in impls.items()
    }


def who_runs(overrides: dict[str, Override]) -> Names:
    """The overrides that take a call here and now."""
    before = {name: override.hits for name, override in overrides.items()}
    torch.softmax(torch.ones(2, 3), -1)
    torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
    torch.relu(torch.ones(3))
    return frozenset(name for name, override in overrides.items() if override.hits > before[name])


def off(*names: str) -> AbstractContextManager[object]:
    return opgraft.disabled(name=names[0]) if names else opgraft.disabled()


# ------------------------------------------------------------------ in any order


@pytest.mark.parametrize("seed", range(8))
def test_scopes_end_in_any_order(seed: int, overrides: dict[str, Override]) -> None:
    """What is off is what an open scope says, whenever each was entered."""
    generator = random.Random(seed)
    everything = frozenset(overrides)
    entered: list[tuple[AbstractContextManager[object], Names]] = []
    for _ in range(60):
        if entered and generator.random() < 0.5:
            scope, _names = entered.pop(generator.randrange(len(entered)))
            scope.__exit__(None, None, None)
        else:
            names = generator.choice([(), *((name,) for name in overrides)])
            scope = off(*names)
            scope.__enter__()
            entered.append((scope, frozenset(names) or everything))
        closed = frozenset().union(*(names for _, names in entered))
        assert who_runs(overrides) == everything - closed
    for scope, _names in entered:
        scope.__exit__(None, None, None)
    assert who_runs(overrides) == everything


def test_asyncios_tasks_take_turns(overrides: dict[str, Override]) -> None:
    seen: list[Names] = []

    async def task(name: str, turns: int) -> None:
        with off(name):
            for _ in range(turns):
                await asyncio.sleep(0)
            assert name not in who_runs(overrides)
        seen.append(who_runs(overrides))

    async def main() -> None:
        await asyncio.gather(*(task(name, turns) for turns, name in enumerate(overrides, 1)))

    asyncio.run(main())
    # The first to end leaves the others' scopes, which are this thread's, too; the last, none.
    assert [len(each) for each in seen] == [1, 2, 3]


def test_a_cancelled_task_leaves_nothing(overrides: dict[str, Override]) -> None:
    async def forever() -> None:
        with off():
            await asyncio.sleep(1000)

    async def main() -> None:
        tasks = [asyncio.create_task(forever()) for _ in range(3)]
        await asyncio.sleep(0)
        assert who_runs(overrides) == frozenset()
        tasks[0].cancel()
        await asyncio.sleep(0)
        assert who_runs(overrides) == frozenset()
        for each in tasks[1:]:
            each.cancel()

    asyncio.run(main())
    assert who_runs(overrides) == frozenset(overrides)


def generator_in(*names: str) -> Iterator[int]:
    with off(*names):
        yield from range(10)


@pytest.mark.parametrize("end", ["exhausted", "closed", "dropped"])
def test_generators_take_turns(end: str, overrides: dict[str, Override]) -> None:
    first, second = generator_in("bmm"), generator_in("relu")
    next(first), next(second)
    assert who_runs(overrides) == {"_softmax"}
    if end == "exhausted":
        assert list(first)
    elif end == "closed":
        first.close()  # type: ignore[attr-defined]
    else:
        del first
        gc.collect()
    assert who_runs(overrides) == {"_softmax", "bmm"}
    del second
    gc.collect()
    assert who_runs(overrides) == frozenset(overrides)


def test_observers_end_in_any_order(overrides: dict[str, Override]) -> None:
    told: list[str] = []

    def observing(who: str, *, exclusive: bool = False) -> AbstractContextManager[None]:
        def observe(chain: Chain, call: Call, keeps_derivative: bool) -> Callable[[object], None]:
            told.append(who)
            return lambda outcome: None

        return observers.observing(observe, exclusive=exclusive)

    def now() -> list[str]:
        told.clear()
        torch.relu(torch.ones(3))
        return sorted(told)

    a, b, c = observing("a"), observing("b"), observing("c", exclusive=True)
    a.__enter__(), b.__enter__()
    assert now() == ["a", "b"]
    a.__exit__(None, None, None)
    assert now() == ["b"]
    c.__enter__()
    assert now() == ["c"]
    b.__exit__(None, None, None)
    assert now() == ["c"]
    c.__exit__(None, None, None)
    assert now() == []


# ------------------------------------------------------------------ on any thread


def test_a_scope_may_end_on_another_thread(overrides: dict[str, Override]) -> None:
    """A generator is closed by whoever has it."""
    with ThreadPoolExecutor(1) as other:
        generator = generator_in("bmm")
        other.submit(next, generator).result()
        assert other.submit(who_runs, overrides).result() == {"_softmax", "relu"}
        assert who_runs(overrides) == frozenset(overrides)
        generator.close()  # type: ignore[attr-defined]
        assert other.submit(who_runs, overrides).result() == frozenset(overrides)
        with off("relu"):  # and what is entered next finds nothing of it
            assert [scope.name for scope in threads.scopes()] == ["relu"]


def test_a_scope_that_is_entered_twice_is_refused() -> None:
    scope = threads.scope(threads.EVERYTHING)
    with scope, pytest.raises(RuntimeError, match="this scope was entered already"):
        scope.__enter__()


def test_a_scope_that_is_left_twice_is_left() -> None:
    scope = threads.scope(threads.EVERYTHING)
    with scope:
        scope.__exit__(None, None, None)
        assert threads.scopes() == ()
    with scope:
        assert threads.scopes() == (threads.EVERYTHING,)


def test_a_thread_that_ends_inside_a_scope_leaves_nothing(overrides: dict[str, Override]) -> None:
    entered: list[AbstractContextManager[object]] = []

    def enter() -> None:
        entered.append(off())
        entered[0].__enter__()
        assert who_runs(overrides) == frozenset()

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert who_runs(overrides) == frozenset(overrides)
    entered[0].__exit__(None, None, None)


# ------------------------------------------------------------------ the autograd engine


class Nested(torch.autograd.Function):
    """Its backward runs another one inside it, as deep as asked, and then calls `innermost`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, innermost: Callable[[], None]) -> Any:
        ctx.depth, ctx.innermost = depth, innermost
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.depth == 0:
            ctx.innermost()
        else:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Nested.apply(x, ctx.depth - 1, ctx.innermost).sum().backward()
        return grad, None, None


def test_a_backward_takes_its_scope_to_the_engines_threads(
    overrides: dict[str, Override],
) -> None:
    """On the CPU it has some for backwards inside backwards, from the sixtieth on."""
    seen: list[tuple[int, Names]] = []

    def innermost() -> None:
        seen.append((threading.get_ident(), who_runs(overrides)))

    def backward() -> None:
        x = torch.ones(1, requires_grad=True)
        Nested.apply(x, 70, innermost).sum().backward()

    with off("bmm"):
        backward()
    backward()
    assert all(ident != threading.get_ident() for ident, _ in seen)
    assert [names for _, names in seen] == [{"_softmax", "relu"}, frozenset(overrides)]


def test_a_scope_that_ends_in_a_hook_stays_ended(overrides: dict[str, Override]) -> None:
    """The engine puts back the state that the thread had before: the scope with it."""
    scope = off()
    x = torch.ones(3, requires_grad=True)
    y = (x * 2).sum()
    x.register_hook(lambda grad: (scope.__exit__(None, None, None), None)[1])
    scope.__enter__()
    y.backward()
    assert who_runs(overrides) == frozenset(overrides)


def test_a_scope_that_begins_in_a_hook_ends_outside(overrides: dict[str, Override]) -> None:
    scope = off()
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: (scope.__enter__(), None)[1])
    (x * 2).sum().backward()
    scope.__exit__(None, None, None)
    assert who_runs(overrides) == frozenset(overrides)


@pytest.mark.gpu
def test_a_scope_holds_for_a_backward_on_cuda() -> None:
    """Its engine has a thread for each device."""
    idents: set[int] = set()

    def backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
        idents.add(threading.get_ident())
        return output * (grad - (grad * output).sum(dim, keepdim=True))

    override = opgraft.register_op_override(
        "aten", "_softmax_backward_data", "CUDA", backward, unconditional_override=True
    )
    x = torch.randn(4, 64, device="cuda", requires_grad=True)
    for _ in range(5):
        with opgraft.disabled():
            torch.softmax(x, -1).square().sum().backward()
    assert override.hits == 0
    torch.softmax(x, -1).square().sum().backward()
    assert override.hits == 1
    assert idents and threading.get_ident() not in idents


# ------------------------------------------------------------------ profilers


def _profiler() -> Any:
    return torch.profiler.profile(activities=[ProfilerActivity.CPU])


ORDERS = {
    "started inside, stopped outside": ("scope", "profiler", "call", "-scope", "call", "-profiler"),
    "started outside, stopped inside": ("profiler", "call", "scope", "call", "-profiler", "-scope"),
    "inside": ("scope", "profiler", "call", "-profiler", "-scope"),
    "around": ("profiler", "scope", "call", "-scope", "call", "-profiler"),
    "two scopes across": (
        *("scope", "profiler", "scope2", "call", "-scope", "call", "-scope2", "call", "-profiler"),
    ),
    "two across": ("scope", "profiler", "-scope", "scope2", "call", "-profiler", "-scope2"),
}


@pytest.mark.parametrize("make", [_profiler, torch.autograd.profiler.profile])
@pytest.mark.parametrize("order", list(ORDERS))
def test_profilers_and_scopes_begin_and_end_in_any_order(
    order: str, make: Callable[[], Any], overrides: dict[str, Override]
) -> None:
    profiler = make()
    contexts = {"scope": off("relu"), "scope2": off("relu"), "profiler": profiler}
    entered: set[str] = set()
    wanted = 0
    for step in ORDERS[order]:
        if step == "call":
            wanted += "profiler" in entered
            hit = not entered & {"scope", "scope2"}
            before = overrides["relu"].hits
            torch.relu(torch.ones(3))
            assert overrides["relu"].hits == before + hit
        elif step.startswith("-"):
            entered.remove(step[1:])
            contexts[step[1:]].__exit__(None, None, None)
        else:
            entered.add(step)
            contexts[step].__enter__()
    events = profiler.events() if make is _profiler else profiler.function_events
    assert sum(event.name == "aten::relu" for event in events) == wanted > 0


# ------------------------------------------------------------------ the other router


@where_the_core_routes
def test_all_of_this_with_the_python_router() -> None:
    run_again(__file__)
