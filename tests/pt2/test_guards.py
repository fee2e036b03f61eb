"""An own derivative is switched on and off in graphs that are compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import opgraft
from opgraft import Override, when
from tests.pt2 import models

BACKENDS = ["eager", "aot_eager", "inductor"]


class Formula:
    """A derivative of exp that can be told from others: it is `factor` times the right one."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def register(self, **options: Any) -> Override:
        options = {"compile": "opaque", "name": "exp"} | options
        return opgraft.register_op_override(
            "aten",
            "exp",
            "CPU",
            lambda self: torch.pow(torch.e, self),
            cond=when.dtype("self", torch.float64),
            autograd=(self.setup_context, self.backward),
            **options,
        )

    def setup_context(self, ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    def backward(self, ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (output,) = ctx.saved_tensors
        return grad * output * self.factor


@pytest.fixture
def override() -> Override:
    return Formula(2).register()


class Compiled:
    """A graph that is compiled, and its gradient at zero, where the right one is 1."""

    def __init__(self, backend: str, **options: Any) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.exp(x.sin())

        self._run = torch.compile(function, backend=backend, fullgraph=True, **options)

    def slope(self) -> float:
        x = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(self._run(x).sum(), x)
        return float(grad[0])


def frames() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(params=BACKENDS)
def compiled(request: pytest.FixtureRequest, override: Override) -> Compiled:
    graph = Compiled(request.param)
    assert graph.slope() == 2
    assert override.hits == 1
    return graph


def test_a_scope_switches_it_off_and_its_end_on(compiled: Compiled, override: Override) -> None:
    with opgraft.disabled():
        assert compiled.slope() == 1
    assert compiled.slope() == 2
    with opgraft.disabled(name="exp"):
        assert compiled.slope() == 1
    assert (override.hits, frames()) == (2, 2), "each state has its graph, and keeps it"


def test_disable_and_enable(compiled: Compiled, override: Override) -> None:
    opgraft.disable(op="aten::exp")
    assert compiled.slope() == 1
    opgraft.enable(op="aten::exp")
    assert compiled.slope() == 2
    assert (override.hits, frames()) == (2, 2)


def test_remove(compiled: Compiled, override: Override) -> None:
    override.remove()
    assert compiled.slope() == 1
    assert override.hits == 1


def test_replace(compiled: Compiled, override: Override) -> None:
    replacement = Formula(3).register()
    assert compiled.slope() == 3
    assert (override.hits, replacement.hits) == (1, 1)
    assert override.state.removed


def test_an_override_that_comes_before_it(compiled: Compiled, override: Override) -> None:
    Formula(5).register(name="another")
    assert compiled.slope() == 5
    with opgraft.disabled(name="another"):
        assert compiled.slope() == 2
    assert override.hits == 2


def test_a_scope_counts_on_its_own_thread_only(compiled: Compiled) -> None:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(compiled.slope()))
    with opgraft.disabled():
        thread.start()
        thread.join()
        assert compiled.slope() == 1
    assert seen == [2]


def test_a_graph_that_was_made_while_it_was_off(override: Override) -> None:
    graph = Compiled("aot_eager")
    with opgraft.disabled():
        assert graph.slope() == 1
    assert graph.slope() == 2
    assert override.hits == 1


def test_a_graph_without_an_own_derivative_is_compiled_once() -> None:
    override = models.override("exp", torch.exp)
    graph = Compiled("aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert graph.slope() == 1
        with opgraft.disabled():
            assert graph.slope() == 1
        opgraft.disable(name="exp")
        assert graph.slope() == 1
    assert override.hits == 1


def test_other_overrides_compile_nothing_again(compiled: Compiled, override: Override) -> None:
    with torch._dynamo.config.patch(error_on_recompile=True):
        other = models.override("sin", torch.sin)
        assert compiled.slope() == 2
        with opgraft.disabled(name="sin"):
            assert compiled.slope() == 2
        other.remove()
        assert compiled.slope() == 2
    assert override.hits == 4


@pytest.mark.parametrize(
    "switch",
    [opgraft.disabled, lambda: opgraft.disabled(dsl="triton"), lambda: opgraft.disabled(name="x")],
    ids=["all", "another DSL", "another name"],
)
def test_a_scope_of_others_leaves_it(switch: Callable[[], Any], override: Override) -> None:
    graph = Compiled("aot_eager", dynamic=True)
    assert graph.slope() == 2
    with switch():
        assert graph.slope() == (1 if switch is opgraft.disabled else 2)
    assert override.enabled
