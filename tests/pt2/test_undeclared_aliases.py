"""Ops that return an argument's memory, which their schema does not say, in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import opgraft
from opgraft.ops.schema import Call, resolve
from opgraft.pt2 import opaque
from opgraft.router import outputs
from tests import opinfo_calls
from tests.pt2 import models

VIEWS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "a view": ("atleast_3d", torch.atleast_3d),
    "the argument": ("type_as", lambda x: x.type_as(x)),
    "items that are views": ("broadcast_tensors", lambda x: torch.broadcast_tensors(x, x[:1])[0]),
    "of a list": ("meshgrid.indexing", lambda x: torch.meshgrid(x, indexing="ij")[0]),
    "a view of many": ("einsum", lambda x: torch.einsum("i->i", x)),
}

each_view = pytest.mark.parametrize(("op", "view"), VIEWS.values(), ids=VIEWS)
by_all = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


@each_view
@by_all
def test_a_write_to_the_result_is_one_to_the_argument(
    op: str, view: Callable[[torch.Tensor], torch.Tensor], backend: str
) -> None:
    native = resolve(f"aten::{op}").overload
    override = models.override(op, lambda *args, **named: native(*args, **named))

    def write(x: torch.Tensor) -> torch.Tensor:
        view(x).add_(1)
        return x + 0

    eager, compiled = torch.arange(3.0), torch.arange(3.0)
    expected = write(eager)
    assert override.hits == 1
    result = torch.compile(write, fullgraph=True, backend=backend)(compiled)
    assert torch.equal(result, expected) and torch.equal(compiled, eager)


def test_an_argument_that_items_alias_is_not_used_again() -> None:
    override = models.override("broadcast_tensors", models.itself("broadcast_tensors"))
    b = torch.randn(4, 4)

    def function(a: torch.Tensor) -> torch.Tensor:
        x, _ = torch.broadcast_tensors(a * 2, b)
        return x + torch.mm(torch.mm(b.cos(), b).sin(), b)

    a = torch.randn(4, 4)
    with opgraft.disabled():
        expected = function(a)
    torch.testing.assert_close(torch.compile(function, fullgraph=True)(a), expected)
    assert function(a).equal(expected) and override.hits == 1


def test_a_composite_op_whose_result_is_its_own_stays_opaque() -> None:
    override = models.override("type_as", models.itself("type_as"))
    other = torch.zeros(3, dtype=torch.float64)
    run = torch.compile(lambda x: x.type_as(other) + 1, fullgraph=True)
    assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0, dtype=torch.float64))
    assert override.hits == 1


def test_an_opaque_op_copies_items_that_alias() -> None:
    """A graph that was compiled elsewhere may call it for any argument."""
    models.override("broadcast_tensors", models.itself("broadcast_tensors"))
    opaque.define(resolve("aten::broadcast_tensors"))
    x = torch.ones(3)
    for each in torch.ops.opgraft.aten__broadcast_tensors([x, x]):
        assert each.equal(x) and each.data_ptr() != x.data_ptr()


# ------------------------------------------------------------------ ops that are not composite

UNSAFE: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "a split": ("unsafe_split.Tensor", lambda x: torch.unsafe_split(x, 4)[0]),
    "a split by sizes": (
        "unsafe_split_with_sizes",
        lambda x: torch.unsafe_split_with_sizes(x, [4])[0],
    ),
    "a view": ("_unsafe_view", lambda x: torch.ops.aten._unsafe_view(x, [4, 4])),
    "the argument": ("lift", torch.ops.aten.lift),
    "what is no quantized tensor": ("dequantize.self", torch.dequantize),
}
each_unsafe = pytest.mark.parametrize(("op", "view"), UNSAFE.values(), ids=UNSAFE)


@pytest.mark.slow
def test_every_op_whose_result_aliases_says_so_or_is_composite_or_is_known() -> None:
    """Everything that PyTorch's samples reach: a new torch may bring new ones."""
    seen, undeclared = set(), set()

    def watch(call: Call) -> Callable[[Any], None] | None:
        op = call.op
        if opaque.obstacle(op) is not None or opaque.is_composite(op):
            return None
        seen.add(op.name)
        given = list(call.tensors())

        def after(result: Any) -> None:
            tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            if any(outputs.shares_memory(each, given) for each in tensors):
                undeclared.add(op.name)

        return after

    opinfo_calls.watch_all(watch, samples=1)
    assert len(seen) > 300
    assert undeclared == set()


@each_unsafe
def test_an_op_that_aliases_by_name_is_left_to_the_compiler(
    op: str, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.ones(4, 4)
    assert outputs.shares_memory(view(x), [x])
    assert "shares memory" in str(opaque.obstacle(resolve(f"aten::{op}")))


@each_unsafe
@pytest.mark.parametrize(("writes", "backend"), [(False, "inductor"), (True, "aot_eager")])
def test_its_graph_is_the_one_without_an_override(
    op: str, view: Callable[[torch.Tensor], torch.Tensor], writes: bool, backend: str
) -> None:
    b = torch.randn(4, 4)

    def function(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if writes:
            view(a).add_(1)
            return a + 0, a
        # The memory of `a * 2` would be used again, were the result not known to be in it.
        return view(a * 2) + torch.mm(torch.mm(b.cos(), b).sin(), b), a

    def compiled(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, backend=backend)(a)

    a = torch.randn(4, 4)
    expected = compiled(a.clone())
    override = models.override(op, resolve(f"aten::{op}").overload)
    torch.testing.assert_close(compiled(a.clone()), expected, rtol=0, atol=0)
    with torch.no_grad():
        view(a)
    assert override.hits > 0


@by_all
@pytest.mark.parametrize("policy", ["opaque", "traceable"])
@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("repeat_interleave.self_Tensor", lambda x: x.repeat_interleave(x.long()) + 1),
        ("masked_select", lambda x: torch.masked_select(x, x > 0) + 1),
    ],
)
def test_sizes_that_depend_on_data_are_bound_in_graphs_alone(
    op: str, function: Callable[[torch.Tensor], torch.Tensor], policy: str, backend: str
) -> None:
    """Trials make such sizes, too: of a composite op, and of native beside an impl."""
    native = resolve(f"aten::{op}").overload
    override = models.override(op, lambda *args, **named: native(*args, **named), compile=policy)
    x = torch.tensor([0.0, 1.0, 2.0, 0.0, 3.0])
    with opgraft.disabled():
        expected = function(x)
    run = torch.compile(function, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.equal(run(x), expected)
    assert function(x).equal(expected) and override.hits > 0
