"""Composite ops that return an argument's memory, which their schema does not say, in graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import opgraft
from opgraft.ops.schema import resolve
from opgraft.pt2 import opaque
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
