"""Overrides in graphs of torch.compile: one graph for all sizes, each call decided at run time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft import when
from tests import ops
from tests.pt2 import models

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

BACKENDS = ["eager", "aot_eager", "inductor"]


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, **({"backend": "aot_eager"} | options))


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_step_is_one_graph_and_hits_where_the_conditions_hold(backend: str) -> None:
    overrides = models.override_all()
    model = models.transformer()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    twice = dict.fromkeys(overrides, 2)  # two layers
    twice["mm"] = 8  # forward and backward of two projections; a weight's gradient has few rows
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (4, 9, 2, 8, 16, 7):
            before = models.hits(overrides)
            got = models.training_step(compiled, models.an_input(batch))
            hit = {name: count - before[name] for name, count in models.hits(overrides).items()}
            none = dict.fromkeys(overrides, 0) | {"_fused_rms_norm": 2}
            assert hit == (twice if batch >= models.BATCH else none), batch
            torch.testing.assert_close(
                got, models.stock_step(model, models.an_input(batch)), rtol=1e-5, atol=1e-5
            )
    assert graphs() == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_number_in_the_place_of_a_tensor_stays_with_the_compiler(
    decisions: pytest.LogCaptureFixture,
) -> None:
    override = models.override("mul.Tensor", torch.mul, when.ndim("self") == 3)

    def double_and_square(x: torch.Tensor) -> torch.Tensor:
        return x * 2 * x

    x = torch.randn(2, 2, 2)
    run = compiled(double_and_square, backend="inductor")
    for function, hits in ((double_and_square, 2), (run, 1)):
        before = override.hits
        result = function(x)
        assert override.hits - before == hits
        torch.testing.assert_close(result, x * x + x * x)
    assert "a number stands for the tensor 'other'" in decisions.text


@pytest.mark.parametrize(
    ("policy", "dynamic", "hits"),
    [
        (when.size("self", 0) >= 8, False, {4: 0, 8: 1}),
        (when.size("self", 0) >= 8, True, {4: 0, 8: 0}),
        (when.size("self", 0) >= 2, True, {4: 1, 8: 1}),  # a size that varies is 2 at least
        (when.dtype("self", torch.float32), True, {4: 1, 8: 1}),
    ],
)
def test_a_policy_may_depend_on_sizes_and_must_hold_for_all_that_vary(
    policy: when.Condition, dynamic: bool, hits: dict[int, int]
) -> None:
    override = models.override("_softmax", ops.softmax, compile=policy)
    run = compiled(lambda x: torch.softmax(x, -1), backend="inductor", dynamic=dynamic)
    for rows, expected in hits.items():
        before = override.hits
        x = torch.randn(rows, 8)
        torch.testing.assert_close(run(x), opgraft.native("aten::_softmax")(x, -1, False))
        assert override.hits - before == expected, rows


def test_an_op_that_was_compiled_before_its_first_override(
    decisions: pytest.LogCaptureFixture,
) -> None:
    """torch's dispatcher in Python remembers which kernel serves an op."""

    def normalise(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._fused_rms_norm(x, [8], None, 1e-6)[0]

    with torch.no_grad():
        compiled(normalise, dynamic=True)(torch.randn(4, 8))
        torch._dynamo.reset()
        override = models.override("_fused_rms_norm", ops.rms_norm)
        x = torch.randn(4, 8)
        result = compiled(normalise, dynamic=True)(x)
    assert override.hits == 1
    torch.testing.assert_close(result, F.rms_norm(x, (8,), None, 1e-6))
