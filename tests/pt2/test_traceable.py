"""Impls that are traced into the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs

import opgraft
from opgraft import ContractError, Override, when
from opgraft.pt2 import impl_tracing
from opgraft.when import Condition
from tests import ops
from tests.pt2 import models

pytestmark = pytest.mark.filterwarnings("ignore")


def traceable(
    impl: Any = ops.softmax, cond: Condition | Any | None = None, **options: Any
) -> Override:
    return models.override("_softmax", impl, cond, compile="traceable", **options)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2, -1)


def check(compiled: Any, x: torch.Tensor) -> None:
    got = compiled(x)
    with opgraft.disabled():
        torch.testing.assert_close(got, softmax(x))


class Graphs:
    """A compiler that keeps the graphs it is given."""

    def __init__(self) -> None:
        self._backend = AotEagerAndRecordGraphs()

    def compile(self, function: Any, **options: Any) -> Any:
        return torch.compile(function, backend=self._backend, fullgraph=True, **options)

    def ops(self) -> list[set[str]]:
        """The names of the ops in each graph."""
        return [
            {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
            for graph in (*self._backend.fw_graphs, *self._backend.bw_graphs)
        ]


@pytest.fixture
def graphs() -> Graphs:
    return Graphs()


def test_an_impl_can_ask_whether_it_is_traced(graphs: Graphs) -> None:
    seen = []

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        seen.append(opgraft.triton_utils.is_traced())
        return ops.softmax(self, dim, half_to_float)

    traceable(impl)
    softmax(torch.randn(3, 4))
    assert set(seen) == {False}
    seen.clear()
    check(graphs.compile(softmax), torch.randn(3, 4))
    assert set(seen) == {True}
    assert not opgraft.triton_utils.is_traced()


def test_the_graph_holds_what_the_impl_is_made_of(graphs: Graphs) -> None:
    override = traceable()
    check(graphs.compile(softmax), torch.randn(4, 8))
    (found,) = graphs.ops()
    assert {"aten.amax.default", "aten.exp.default", "aten.sum.dim_IntList"} <= found
    assert not any("softmax" in op for op in found)
    assert override.hits == 0, "the router never sees it"


def test_inductor_compiles_what_the_impl_is_made_of() -> None:
    marked = traceable(lambda self, dim, half: ops.softmax(self, dim, half) + 1)
    result = torch.compile(softmax, fullgraph=True)(torch.zeros(2, 8))
    torch.testing.assert_close(result, torch.full((2, 8), 1.125))
    marked.remove()


def test_training_keeps_the_derivative_of_the_op(graphs: Graphs) -> None:
    traceable()
    x = torch.randn(4, 8, requires_grad=True)
    graphs.compile(softmax)(x).pow(2).sum().backward()
    with opgraft.disabled():
        (expected,) = torch.autograd.grad(softmax(x).pow(2).sum(), x)
    torch.testing.assert_close(x.grad, expected)
    forward, backward = graphs.ops()
    assert not any("softmax" in op for op in forward)
    assert "aten._softmax_backward_data.default" in backward


def test_the_condition_guards_the_graph(graphs: Graphs) -> None:
    traceable(cond=when.size("self", 0) >= 8)
    compiled = graphs.compile(softmax, dynamic=True)
    for rows in (9, 16, 4, 32, 5):
        check(compiled, torch.randn(rows, 8))
    with_impl, without = graphs.ops()
    assert "aten.amax.default" in with_impl
    assert "aten._softmax.default" in without


def test_a_condition_without_symbols_guards_nothing(graphs: Graphs) -> None:
    traceable(cond=when.dtype("self", torch.float32) & (when.ndim("self") == 2))
    compiled = graphs.compile(softmax, dynamic=True)
    for rows in (9, 16, 4):
        check(compiled, torch.randn(rows, 8))
    assert len(graphs.ops()) == 1


def test_a_condition_in_python_guards_the_graph(graphs: Graphs) -> None:
    traceable(cond=lambda self, dim, half_to_float: self.shape[0] >= 8)
    compiled = graphs.compile(softmax, dynamic=True)
    for rows in (9, 4, 16, 5):
        check(compiled, torch.randn(rows, 8))
    assert [("aten.amax.default" in found) for found in graphs.ops()] == [True, False]


def test_a_condition_on_an_address_is_not_guarded_on(
    graphs: Graphs, decisions: pytest.LogCaptureFixture
) -> None:
    traceable(cond=when.aligned("self", 16))
    check(graphs.compile(softmax), torch.randn(4, 8))
    assert "depends on an address" in decisions.text
    assert "aten._softmax.default" in graphs.ops()[0]


def test_sizes_that_depend_on_data_are_not_guarded_on(
    graphs: Graphs, decisions: pytest.LogCaptureFixture
) -> None:
    traceable(cond=when.size("self", 0) >= 8)

    def chosen(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x[x[:, 0] > 0], -1)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = graphs.compile(chosen)
        x = torch.randn(40, 8)
        torch.testing.assert_close(compiled(x), chosen(x))
    assert "cannot be traced" in decisions.text


def test_a_composite_op_of_as_many_rows_as_data_say_is_traced(
    graphs: Graphs, decisions: pytest.LogCaptureFixture
) -> None:
    """Its result is compared with native's, and torch's reference of it asks if it has rows."""

    def impl(x: torch.Tensor, target: torch.Tensor, *_: object) -> torch.Tensor:
        return -x.gather(1, target[:, None]).mean()

    def loss_of_chosen(x: torch.Tensor) -> torch.Tensor:
        rows = x[x[:, 0] < 0]
        return torch.nn.functional.nll_loss(rows, rows.argmin(1))

    models.override("nll_loss", impl, compile="traceable")
    check_is_traced(loss_of_chosen, graphs, decisions)


def test_an_op_of_sizes_that_are_computed_from_others_is_traced(
    graphs: Graphs, decisions: pytest.LogCaptureFixture
) -> None:
    """They are compared with native's where no graph sees it."""

    def stacked(x: torch.Tensor) -> torch.Tensor:
        return torch.vstack([x[x[:, 0] > 0], x]) * 2

    models.override("vstack", torch.ops.aten.vstack.default, compile="traceable")
    with torch.no_grad():
        check_is_traced(stacked, graphs, decisions)


def check_is_traced(
    of_data: Callable[[torch.Tensor], torch.Tensor],
    graphs: Graphs,
    decisions: pytest.LogCaptureFixture,
) -> None:
    """A function with sizes that depend on data is right in a graph, and its impl traced."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = graphs.compile(of_data)
        x = torch.randn(40, 8)
        torch.testing.assert_close(compiled(x), of_data(x))
    assert "is traced" in decisions.text
    assert "cannot be traced" not in decisions.text


def test_an_impl_that_reads_values_is_opaque_instead(
    graphs: Graphs, decisions: pytest.LogCaptureFixture
) -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        assert self.numpy().ndim == 2
        return ops.softmax(self, dim, half_to_float)

    override = traceable(impl)
    check(graphs.compile(softmax), torch.randn(4, 8))
    assert override.hits == 1
    assert "opgraft.aten___softmax.default" in graphs.ops()[0]
    assert "cannot be traced" in decisions.text


def test_the_op_inside_its_impl_is_the_native_one(graphs: Graphs) -> None:
    models.override(
        "_softmax", ops.softmax_by_itself, compile="traceable", unconditional_override=False
    )
    check(graphs.compile(softmax), torch.randn(4, 8))
    assert "aten._softmax.default" in graphs.ops()[0]


@pytest.mark.parametrize(
    ("impl", "message"),
    [
        (lambda self, dim, half: self.double(), "dtype torch.float64"),
        (lambda self, dim, half: self[:1].clone(), "shape"),
        (lambda self, dim, half: self, "memory of an argument"),
        (lambda self, dim, half: self.flatten().clone(), "ndim 1"),
        (lambda self, dim, half: (self, self), "instead of a tensor"),
        (lambda self, dim, half: self.t().contiguous().t(), r"strides \(1, 4\)"),
        (lambda self, dim, half: ops.softmax(self.mul_(2), dim, half), "wrote to an argument"),
        (lambda self, dim, half: self.mul_(2).item(), "wrote to an argument"),
    ],
)
def test_a_result_that_the_op_would_not_return_is_an_error(impl: Any, message: str) -> None:
    traceable(impl)
    with pytest.raises(Exception, match=message) as raised:
        torch.compile(softmax, backend="aot_eager")(torch.randn(4, 8))
    assert isinstance(raised.value, ContractError) or ContractError.__name__ in str(raised.value)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_whose_base_was_written_to_is_no_write_of_the_impl(dynamic: bool) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        base = x * 1
        view = base.view(4, 8)
        base.mul_(2)
        return softmax(view)

    x = torch.randn(4, 8)
    expected = softmax(x * 2)
    override = traceable()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(x), expected)
    assert override.hits == 0  # traced: the graph holds what it does


def test_exported_programs_hold_it_by_its_opaque_name() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return softmax(x)

    override = traceable()
    with opgraft.pt2.export_overrides():
        program = torch.export.export(Model(), (torch.ones(4, 8),)).run_decompositions()
    check(program.module(), torch.ones(4, 8))
    assert override.hits == 1


@pytest.mark.parametrize(
    ("options", "unlike"),
    [
        ({}, set()),
        ({"enable_fp_fusion": True, "launch_cooperative_grid": False, "maxnreg": None}, set()),
        ({"launch_cooperative_grid": True, "maxnreg": None}, {"launch_cooperative_grid"}),
        ({"maxnreg": 128, "nonsense": 1}, {"maxnreg", "nonsense"}),
    ],
)
def test_only_options_that_change_something_keep_a_launch_out_of_a_graph(
    options: dict[str, Any], unlike: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    defaults = compiler.make_backend(target).parse_options({})
    monkeypatch.setattr(impl_tracing, "_default_options", lambda: defaults)
    assert impl_tracing._unlike_defaults(options) == unlike
