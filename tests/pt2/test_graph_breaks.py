"""Where a graph breaks, ops run eagerly with Dynamo on: it must not trace overrides."""

from __future__ import annotations

import pytest
import torch

import opgraft
from tests.python_router import run_again, where_the_core_routes


def record_whether_traced(seen: list[bool]) -> None:
    seen.append(torch.compiler.is_compiling())


@pytest.fixture
def broken_at_relu() -> object:
    """A compiled function whose graph breaks at relu, which then runs eagerly."""

    @torch.compiler.disable(recursive=False)
    def relu(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    return torch.compile(lambda x: relu(x + 1) * 2, backend="eager")


@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace")
def test_dynamo_does_not_trace_an_impl(broken_at_relu) -> None:
    seen: list[bool] = []

    def relu(self: torch.Tensor) -> torch.Tensor:
        record_whether_traced(seen)
        return self.clamp(min=0)

    override = opgraft.register_op_override(
        "aten", "relu", "CPU", relu, unconditional_override=True
    )
    for _ in range(4):  # the first hits are checked in Python, later ones are not
        broken_at_relu(torch.randn(4))
    assert (override.hits, seen) == (4, [False] * 4)


@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace")
def test_dynamo_does_not_trace_a_condition(broken_at_relu) -> None:
    seen: list[bool] = []

    def cond(self: torch.Tensor) -> bool:
        record_whether_traced(seen)
        return True

    override = opgraft.register_op_override(
        "aten", "relu", "CPU", lambda self: self.clamp(min=0), cond=cond
    )
    for _ in range(4):
        broken_at_relu(torch.randn(4))
    assert (override.hits, set(seen)) == (4, {False})


@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace")
def test_dynamo_goes_on_after_a_hit(broken_at_relu) -> None:
    """What follows the break is compiled, also where the impl raised."""

    def relu(self: torch.Tensor) -> torch.Tensor:
        if self.shape[0] == 3:
            raise ValueError("not three")
        return self.clamp(min=0)

    opgraft.register_op_override("aten", "relu", "CPU", relu, unconditional_override=True)
    seen: list[bool] = []

    @torch.compile(backend="eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            y = broken_at_relu(x)
        except ValueError:
            y = x
        record_whether_traced(seen)
        return y

    for size in (4, 3, 4):
        function(torch.randn(size))
    assert seen == [True] * 3


@where_the_core_routes
def test_the_same_with_the_router_in_python() -> None:
    run_again(__file__)
