"""Ops of others that are defined anew in one process, as a notebook's cell does that runs twice.

Each definition multiplies by another number, so a result tells whose kernel ran.
"""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import opgraft
from opgraft import registration, when
from opgraft.core import deferred, loader
from opgraft.errors import OverrideWarning, RegistrationError
from opgraft.explanation import neighbours
from opgraft.registry import Chain
from opgraft.router import derivative
from tests.python_router import run_again, where_the_core_routes

pytestmark = pytest.mark.usefixtures("quick_collections")

NAMESPACE = "redefined"
#: An op belongs to one test: what is registered for it stays.
_numbers = itertools.count()
#: Of the last definition of each op. Destroying it is what defining anew does.
_libraries: dict[str, torch.library.Library] = {}
SMALL, LARGE = torch.ones(2), torch.ones(8)

Define = Callable[[str, int], None]


def new_name() -> str:
    return f"op{next(_numbers)}"


def by_custom_op(name: str, factor: int, *, frees: bool = True) -> None:
    @torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=())
    def times(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    @times.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    times.register_autograd(lambda ctx, grad: grad * factor)
    if frees:  # torch makes another object for the op when the former definition is freed
        gc.collect()


def by_library(name: str, factor: int, *, key: str = "CPU", schema: str = "(Tensor x)") -> None:
    if name in _libraries:
        _libraries.pop(name)._destroy()
    library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"{name}{schema} -> Tensor")
    library.impl(name, lambda x, *others: x * factor, key)


def for_all_backends(name: str, factor: int) -> None:
    by_library(name, factor, key="CompositeExplicitAutograd")


def by_composite(name: str, factor: int) -> None:
    by_library(name, factor, key="CompositeImplicitAutograd")


WAYS = [by_custom_op, by_library, for_all_backends, by_composite]
each_way = pytest.mark.parametrize("define", WAYS)


def override(name: str, result: float = 100, **options: object) -> opgraft.Override:
    """Takes large calls, and multiplies them."""
    return opgraft.register_op_override(
        NAMESPACE,
        name,
        "CPU",
        lambda x: x * result,
        cond=when.size("x", 0) >= 8,
        name="ours",
        **options,  # type: ignore[arg-type]
    )


def call(name: str, *arguments: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = getattr(getattr(torch.ops, NAMESPACE), name)(*arguments)
    return result


def told_of_removal(define: Define) -> AbstractContextManager[Any]:
    """Expects the warning that overrides went with the former op."""
    if loader.in_use() is None and define is by_library:
        # The new op's kernel at the router's key is on top, and only the core hears of it.
        return nullcontext()
    return pytest.warns(OverrideWarning, match="defined anew")


def first(result: torch.Tensor) -> float:
    return float(result.detach()[0])


@each_way
def test_calls_run_the_new_op_and_a_warning_names_the_overrides_that_went(define: Define) -> None:
    name = new_name()
    define(name, 2)
    ours = override(name)
    assert (first(call(name, SMALL)), first(call(name, LARGE))) == (2, 100)
    with told_of_removal(define) as warned:
        define(name, 3)
        assert first(call(name, SMALL)) == 3
    assert first(call(name, LARGE)) == 3
    assert (ours.hits, ours.misses) == (1, 1)
    if warned is not None:
        (warning,) = [w for w in warned if w.category is OverrideWarning]
        assert f"{NAMESPACE}::{name}" in str(warning.message) and "'ours'" in str(warning.message)
        assert warning.filename == __file__
        assert ours.why_off() == "removed"
        assert ours not in opgraft.overrides()


@each_way
def test_an_override_of_the_new_op_is_hit_and_misses_run_the_new_op(define: Define) -> None:
    name = new_name()
    define(name, 2)
    override(name)
    with pytest.warns(OverrideWarning, match="defined anew"):
        define(name, 3)
        ours = override(name, 200)
    assert (first(call(name, SMALL)), first(call(name, LARGE))) == (3, 200)
    assert (ours.hits, ours.misses) == (1, 1)


@each_way
def test_after_the_override_was_removed_calls_run_the_new_op_and_nothing_warns(
    define: Define,
) -> None:
    name = new_name()
    define(name, 2)
    override(name).remove()
    define(name, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OverrideWarning)
        assert first(call(name, SMALL)) == 3


@each_way
def test_it_may_be_defined_many_times(define: Define) -> None:
    name = new_name()
    for factor in range(2, 8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OverrideWarning)
            define(name, factor)
            ours = override(name, factor * 100)
        assert (first(call(name, SMALL)), first(call(name, LARGE))) == (factor, factor * 100)
        assert ours.hits == 1


@each_way
def test_autograd_differentiates_the_new_op(define: Define) -> None:
    name = new_name()
    define(name, 2)
    override(name)
    x = torch.ones(2, requires_grad=True)
    with told_of_removal(define):
        define(name, 3)
        call(name, x).sum().backward()
    if define in (by_custom_op, by_composite):  # the others have no derivative
        assert x.grad is not None and first(x.grad) == 3


@pytest.mark.parametrize("define", [by_custom_op, by_composite])
def test_a_derivative_of_an_override_goes_with_the_former_op(define: Define) -> None:
    name = new_name()
    define(name, 2)
    own = (lambda ctx, inputs, output: None, lambda ctx, grad: grad * 100)
    ours = override(name, autograd=own)
    x = torch.ones(8, requires_grad=True)
    call(name, x).sum().backward()
    assert x.grad is not None and first(x.grad) == 100
    assert ours.hits == 1
    x.grad = None
    with told_of_removal(define):
        define(name, 3)
        call(name, x).sum().backward()
    assert x.grad is not None and first(x.grad) == 3
    ours = override(name, autograd=own)
    x.grad = None
    call(name, x).sum().backward()
    assert x.grad is not None and first(x.grad) == 100
    assert ours.hits == 1


def test_with_other_arguments_an_override_has_those() -> None:
    name = new_name()
    by_library(name, 2)
    override(name)
    with told_of_removal(by_library):
        by_library(name, 3, schema="(Tensor x, Tensor y)")
        assert first(call(name, LARGE, LARGE)) == 3
    ours = opgraft.register_op_override(
        NAMESPACE, name, "CPU", lambda x, y: x + y, cond=when.size("y", 0) >= 8
    )
    assert (first(call(name, LARGE, SMALL)), first(call(name, LARGE, LARGE))) == (3, 2)
    assert (ours.hits, ours.misses) == (1, 1)


def test_removing_an_override_that_went_leaves_the_new_ones() -> None:
    name = new_name()
    by_library(name, 2)
    old = override(name)
    with pytest.warns(OverrideWarning, match="defined anew"):
        by_library(name, 3)
        new = override(name, 200)
    old.remove()
    assert first(call(name, LARGE)) == 200
    assert new.hits == 1


@pytest.mark.parametrize("key", ["CompositeExplicitAutograd", "CompositeImplicitAutograd"])
def test_an_opaque_op_has_the_shapes_of_the_new_op(key: str) -> None:
    """Its fake called what torch had freed: the new op, another one, or none, which crashed."""
    name = new_name()

    def define_of(name: str, length: int) -> None:
        library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x.new_empty(length), key)

    def fake_result() -> torch.Tensor:
        with FakeTensorMode():
            result: torch.Tensor = getattr(torch.ops.opgraft, opaque_name)(torch.empty(8))
            return result

    opaque_name = f"{NAMESPACE}__{name}"
    define_of(name, 8)
    assert fake_result().shape == (8,)
    _libraries.pop(name)._destroy()
    for _ in range(8):  # one of them has its memory
        define_of(new_name(), 99)
    define_of(name, 3)
    assert fake_result().shape == (3,)


def test_an_opaque_op_says_that_its_op_is_gone() -> None:
    name = new_name()
    for_all_backends(name, 2)
    opaque = getattr(torch.ops.opgraft, f"{NAMESPACE}__{name}")
    with FakeTensorMode():
        assert opaque(torch.empty(8)).shape == (8,)
    _libraries.pop(name)._destroy()
    # The core's error, or what is raised where there is none.
    gone = pytest.raises((RuntimeError, RegistrationError), match=f"{NAMESPACE}::{name}")
    with FakeTensorMode(), gone:
        opaque(torch.empty(8))


@each_way
def test_a_graph_that_is_compiled_after_it_has_the_new_override(define: Define) -> None:
    name = new_name()
    for factor in (2, 3):
        torch.compiler.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OverrideWarning)
            define(name, factor)
            ours = override(name, factor * 100, compile="opaque")
        if define in (by_library, for_all_backends):
            # Of the library, with which it goes: torch 2.11 refuses a second one.
            torch.library.register_fake(
                f"{NAMESPACE}::{name}", torch.empty_like, lib=_libraries[name]
            )
        compiled = torch.compile(lambda x: call(name, x) + 1, fullgraph=True, backend="aot_eager")
        assert first(compiled(LARGE)) == factor * 100 + 1
        assert first(compiled(SMALL)) == factor + 1
        assert ours.hits == 1


@where_the_core_routes  # torch frees a kernel in Python at once, while another thread calls it
@each_way
def test_threads_that_call_it_meanwhile_get_the_new_op(define: Define) -> None:
    name = new_name()
    define(name, 2)
    override(name)
    results: list[float] = []
    start = threading.Barrier(4)

    def calls() -> None:
        start.wait()
        results.extend(first(call(name, LARGE)) for _ in range(20))

    threads = [threading.Thread(target=calls) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverrideWarning)
        define(name, 3)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [3] * 80


@each_way
def test_an_op_that_is_destroyed_and_not_defined_again_has_no_overrides(define: Define) -> None:
    if define is by_custom_op:
        pytest.skip("torch destroys a custom op only to define it anew")
    name = new_name()
    define(name, 2)
    ours = override(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverrideWarning)
        _libraries.pop(name)._destroy()
        assert ours not in opgraft.overrides()
    assert ours.why_off() == "removed"


@where_the_core_routes  # that in Python goes with a call, which is after torch knows the former op
@pytest.mark.parametrize("has_override", [True, False])
@pytest.mark.parametrize("define", [by_library, for_all_backends, by_composite])
def test_modes_see_the_new_op(define: Define, has_override: bool) -> None:
    name = new_name()
    define(name, 2)
    ours = override(name)
    if not has_override:
        ours.remove()
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for factor in (3, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OverrideWarning)
            define(name, factor)
        with Mode():
            assert first(call(name, SMALL)) == factor
        if define is not by_composite:  # of which a mode sees the pieces
            mine = [func for func in seen if func.namespace == NAMESPACE]
            assert mine[-1] is getattr(getattr(torch.ops, NAMESPACE), name).default


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_graph_of_the_new_composite_op_keeps_its_derivative(is_removed: bool) -> None:
    name = new_name()
    by_composite(name, 2)
    ours = override(name)

    def gradient() -> float:
        torch.compiler.reset()
        x = LARGE.clone().requires_grad_()
        torch.compile(lambda x: call(name, x) + 1, backend="aot_eager")(x).sum().backward()
        assert x.grad is not None
        return first(x.grad)

    assert gradient() == 2
    if is_removed:
        ours.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverrideWarning)
        by_composite(name, 3)
        assert gradient() == 3


@pytest.mark.parametrize("asks", ["compile", "explain"])
def test_what_asks_before_there_is_a_new_override_binds_the_new_ops_arguments(asks: str) -> None:
    name = new_name()
    by_library(name, 2)
    override(name, compile="opaque")
    held = getattr(getattr(torch.ops, NAMESPACE), name).default
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverrideWarning)
        by_library(name, 3, schema="(Tensor x, Tensor y)")
        if asks == "compile":
            torch.library.register_fake(f"{NAMESPACE}::{name}", lambda x, y: torch.empty_like(x))
            compiled = torch.compile(lambda x: call(name, x, x), backend="aot_eager")
            assert first(compiled(LARGE)) == 3
        else:
            opgraft.explain(held, LARGE)
        ours = opgraft.register_op_override(
            NAMESPACE, name, "CPU", lambda x, y: x * 200, cond=when.size("y", 0) >= 8
        )
    assert first(call(name, LARGE, LARGE)) == 200
    assert ours.hits == 1


@where_the_core_routes
@pytest.mark.parametrize("schema", ["(Tensor x)", "(Tensor x, Tensor y)"])
def test_an_opaque_op_calls_the_new_op_or_says_that_it_cannot(schema: str) -> None:
    name = new_name()
    by_library(name, 2)
    opaque = getattr(torch.ops.opgraft, f"{NAMESPACE}__{name}").default
    assert first(opaque(LARGE)) == 2
    by_library(name, 3, schema=schema)
    if schema == "(Tensor x)":
        assert first(opaque(LARGE)) == 3
        _libraries.pop(name)._destroy()
        with pytest.raises(RuntimeError, match=f"{name}, which was destroyed"):
            opaque(LARGE)
    else:
        with pytest.raises(RuntimeError, match=f"{name}, .*anew with another schema: compile"):
            opaque(LARGE)


@where_the_core_routes
def test_a_call_that_is_running_meanwhile_gets_an_error_where_it_needs_the_former_kernel() -> None:
    name = new_name()
    by_library(name, 2)
    inside, go = threading.Event(), threading.Event()

    def impl(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        go.wait()
        raise ValueError

    opgraft.register_op_override(
        NAMESPACE, name, "CPU", impl, unconditional_override=True, on_error="fallback"
    )
    errors = []

    def run() -> None:
        try:
            call(name, LARGE)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverrideWarning)
        by_library(name, 3, schema="(Tensor x, Tensor y)")
    go.set()
    thread.join()
    assert first(call(name, LARGE, LARGE)) == 3
    (error,) = errors
    assert "was destroyed while a call of it ran" in str(error)


@where_the_core_routes
def test_of_many_ops_that_another_thread_defines_anew_all_overrides_are_told_of() -> None:
    names = [new_name() for _ in range(50)]
    for name in names:
        for_all_backends(name, 2)
        override(name)
    thread = threading.Thread(target=lambda: [for_all_backends(name, 3) for name in names])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", OverrideWarning)
        thread.start()
        thread.join()
        assert not opgraft.overrides(name="ours")
    told = "".join(str(each.message) for each in warned)
    assert all(f"{NAMESPACE}::{name} " in told for name in names)
    assert [first(call(name, LARGE)) for name in names] == [3] * len(names)


@where_the_core_routes
@pytest.mark.parametrize("autograd", [None, (lambda *_: None, lambda ctx, grad: grad)])
def test_rules_may_change_while_another_thread_defines_ops_anew(autograd: Any) -> None:
    """Which the main thread is told of at any place."""
    names = [new_name() for _ in range(4)]
    done = threading.Event()
    errors: list[Exception] = []

    def define() -> None:
        try:
            for round, name in itertools.product(range(10), names):
                for_all_backends(name, round)
                override(name, autograd=autograd)
        except Exception as error:
            errors.append(error)
        finally:
            done.set()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverrideWarning)
        thread = threading.Thread(target=define)
        thread.start()
        while not done.is_set():
            opgraft.disable(name="ours")
            opgraft.enable(name="ours")
        thread.join()
    assert not errors
    assert {first(call(name, LARGE)) for name in names} == {100}


@where_the_core_routes
@pytest.mark.parametrize("define", [by_library, for_all_backends, by_composite])
def test_a_router_that_waits_for_a_pack_goes_with_its_op(define: Define) -> None:
    name = new_name()
    define(name, 2)
    waiting_router = loader.in_use().Router(  # type: ignore[union-attr]
        f"{NAMESPACE}::{name}", "", "CPU"
    )
    deferred.add_router(f"{NAMESPACE}::{name}", "CPU", waiting_router)
    define(name, 3)
    ours = override(name)
    assert (first(call(name, SMALL)), first(call(name, LARGE))) == (3, 100)
    assert ours.hits == 1


@where_the_core_routes
def test_an_op_that_goes_while_an_override_is_registered_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = new_name()
    for_all_backends(name, 2)
    add = registration._add

    def add_late(chain: Chain, override: opgraft.Override) -> None:
        thread = threading.Thread(target=lambda: for_all_backends(name, 3))
        thread.start()
        thread.join()
        add(chain, override)

    monkeypatch.setattr(registration, "_add", add_late)
    with pytest.raises(RegistrationError, match="defined it anew meanwhile; register it again"):
        override(name)
    monkeypatch.undo()
    ours = override(name, 200)
    assert (first(call(name, SMALL)), first(call(name, LARGE))) == (3, 200)
    assert ours.hits == 1


@where_the_core_routes
def test_the_former_definition_may_be_freed_later() -> None:
    name = new_name()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverrideWarning)
        for factor in (2, 3):
            by_custom_op(name, factor, frees=False)
            ours = override(name)
    gc.collect()
    assert (first(call(name, SMALL)), first(call(name, LARGE))) == (3, 100)
    again = override(name, 200)
    assert first(call(name, LARGE)) == 200
    assert (ours.hits, again.hits) == (1, 1)


class Weights:
    """What an op's kernel holds."""


@where_the_core_routes
def test_what_the_former_ops_kernel_holds_is_freed() -> None:
    name = new_name()
    weights = Weights()
    library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x, held=weights: x * 2, "CPU")
    override(name)
    assert (first(call(name, SMALL)), first(call(name, LARGE))) == (2, 100)
    held = weakref.ref(weights)
    del library, weights
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverrideWarning)
        by_library(name, 3)
        gc.collect()
    assert held() is None


def test_nothing_is_kept_of_the_chains_of_former_ops() -> None:
    name = new_name()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverrideWarning)
        for factor in range(5):
            by_composite(name, factor)
            override(name, autograd=(lambda *_: None, lambda ctx, grad: grad))
    kept = [chain for chain in derivative._installed if chain.op.name == f"{NAMESPACE}::{name}"]
    assert len(kept) == 1


def test_a_kernel_for_all_backends_may_come_after_the_override() -> None:
    name = new_name()
    library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    ours = override(name)
    with pytest.raises(NotImplementedError, match="no native kernel at CPU"):
        call(name, SMALL)
    library.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
    assert (first(call(name, SMALL)), first(call(name, LARGE))) == (2, 100)
    assert ours.hits == 1
    assert __file__ in opgraft.explain(f"{NAMESPACE}::{name}", SMALL).native


def test_a_second_kernel_for_all_backends_is_told_of() -> None:
    name = new_name()
    for_all_backends(name, 2)
    override(name)
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as library:
        library.impl(name, lambda x: x * 3, "CompositeExplicitAutograd", allow_override=True)
        explained = str(opgraft.explain(f"{NAMESPACE}::{name}", SMALL))
        assert "a kernel for all backends was registered after the overrides" in explained
        (found,) = [each for each in neighbours() if each.op == f"{NAMESPACE}::{name}"]
        assert not found.is_alone
        assert found.as_dict()["later"] is not None


@where_the_core_routes
def test_the_router_in_python_does_the_same() -> None:
    run_again(Path(__file__))
