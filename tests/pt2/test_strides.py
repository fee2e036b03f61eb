"""Opaque ops on tensors of all layouts: what the graph expects of them is what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft.ops.schema import resolve
from tests.pt2 import models

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "permuted": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
}

OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "isin.Tensor_Tensor": lambda x: torch.isin(x, torch.tensor([0.0, 1.0])),
    "_softmax": lambda x: torch.softmax(x, 1),
    "exp": torch.exp,
    "add.Tensor": lambda x: x + x.flip(0),
    "mul.Tensor": lambda x: x * x.sum(0),
    "where.self": lambda x: torch.where(x > 0, x, -x),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(2),
    "topk": lambda x: x.topk(2, 1),
    "sum.dim_IntList": lambda x: x.sum(1),
    "cat": lambda x: torch.cat([x, x], 1),
    "bmm": lambda x: x[:, 0] @ x[:, 1].mT,
    "convolution": lambda x: F.conv2d(x, torch.ones(2, 4, 1, 1)),
    "max_pool2d_with_indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "constant_pad_nd": lambda x: F.pad(x, (1, 1)),
    "bernoulli": lambda x: torch.bernoulli((x > 0).float()),
}


def an_input(layout: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return LAYOUTS[layout](torch.randn(2, 4, 4, 6, generator=generator).round())


@pytest.mark.parametrize("op", OPS)
def test_a_graph_gets_the_strides_that_it_expects(op: str) -> None:
    target = resolve(f"aten::{op}").overload
    override = models.override(op, lambda *args, **kwargs: target(*args, **kwargs))
    inputs = [an_input(layout) for layout in LAYOUTS]

    def function(*inputs: torch.Tensor) -> list[Any]:
        return [OPS[op](x) for x in inputs]

    with opgraft.disabled():
        expected = function(*inputs)
    before = override.hits
    result = torch.compile(function, fullgraph=True, dynamic=False)(*inputs)
    assert override.hits - before >= len(LAYOUTS)
    torch.testing.assert_close(result, expected)


def _unpooled(x: torch.Tensor) -> torch.Tensor:
    indices = (
        torch.arange(24).view(4, 6).expand(x.shape).contiguous(memory_format=torch.channels_last)
    )
    return torch.ops.aten.max_unpool2d(x, indices, [8, 12])


@pytest.mark.parametrize(
    ("op", "function"), [("roll", lambda x: x.roll(1, 1)), ("max_unpool2d", _unpooled)]
)
def test_an_op_whose_strides_torch_does_not_know_stays_the_compilers(
    op: str, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Its kernel at CPU keeps channels last, and torch's meta of it does not."""
    override = models.override(op, models.itself(op))
    x = an_input("channels last")
    run = torch.compile(function, fullgraph=True)
    assert torch.equal(run(x), function(x))
    assert override.hits == 1, "the eager one"
