"""Ops of others that are defined anew in one process, as a notebook's cell does that runs twice.

Each definition multiplies by another number, so a result tells whose kernel ran.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

import opgraft
from opgraft import when
from opgraft.core import loader
from opgraft.errors import OverrideWarning
from opgraft.explanation import neighbours
from tests.python_router import run_again, where_the_core_routes

NAMESPACE = "redefined"
#: An op belongs to one test: what is registered for it stays.
_numbers = itertools.count()
#: Of the last definition of each op. Destroying it is what defining anew does.
_libraries: dict[str, torch.library.Library] = {}
SMALL, LARGE = torch.ones(2), torch.ones(8)

Define = Callable[[str, int], None]


def new_name() -> str:
    return f"op{next(_numbers)}"


def by_custom_op(name: str, factor: int) -> None:
    @torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=())
    def times(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    @times.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    times.register_autograd(lambda ctx, grad: grad * factor)


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


def told_of_removal(define: Define) -> AbstractContextManager[object]:
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
            torch.library.register_fake(f"{NAMESPACE}::{name}", torch.empty_like)
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
