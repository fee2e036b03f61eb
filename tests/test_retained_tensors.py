"""What routing makes of a call lives no longer than the call: garbage collections may be far apart.

Tensors that a reference cycle holds stay until then, and those of a GPU are gigabytes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

import opgraft
from opgraft.ops.schema import Call, resolve
from opgraft.plan import proof
from opgraft.plan.trial import substitutes

CALLS = 8


@pytest.fixture(autouse=True)
def without_collections(quick_collections: None) -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tensors() -> dict[int, torch.Tensor]:
    return {id(each): each for each in gc.get_objects() if type(each) is torch.Tensor}


def retained(step: Callable[[], object], times: int = CALLS) -> list[torch.Tensor]:
    """The tensors that steps leave alive."""
    step()  # what is made once
    gc.collect()
    before = tensors()
    for _ in range(times):
        step()
    return [each for key, each in tensors().items() if key not in before]


def negative(self: torch.Tensor) -> torch.Tensor:
    return torch.sub(torch.zeros_like(self), self)


def written(self: torch.Tensor) -> torch.Tensor:
    return self.mul_(-1)


def raises(self: torch.Tensor) -> torch.Tensor:
    rest = self + 1
    raise ValueError(f"no kernel for {rest.shape}")


def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return -grad + 0 * ctx.saved_tensors[0]


def calls_of(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    """Calls of new kinds, each several times: the first ones are compared, recorded, tried out."""
    sizes = iter(range(2, 1000))

    def step() -> None:
        size = next(sizes)
        for _ in range(5):
            function(torch.ones(size))

    return step


def differentiated(values: torch.Tensor) -> torch.Tensor:
    result = torch.neg(values.requires_grad_())
    result.sum().backward()
    return result


Scenario = tuple[
    dict[str, Any],
    Callable[[torch.Tensor], torch.Tensor],
    Callable[[], AbstractContextManager[object]],
]
SCENARIOS: dict[str, Scenario] = {
    "first hits": ({"impl": negative}, torch.neg, nullcontext),
    "launch plans": ({"impl": negative, "launch_plan": True}, torch.neg, nullcontext),
    "an op that writes": (
        {"op": "neg_", "impl": written, "launch_plan": True},
        torch.Tensor.neg_,
        nullcontext,
    ),
    "an impl that raises": (
        {"impl": raises, "on_error": "fallback"},
        torch.neg,
        lambda: pytest.warns(opgraft.OverrideWarning),
    ),
    "shadow mode": ({"impl": negative}, torch.neg, lambda: opgraft.shadow(1.0)),
    "shadow mode of an op that writes": (
        {"op": "neg_", "impl": written},
        torch.Tensor.neg_,
        lambda: opgraft.shadow(1.0),
    ),
    "a derivative of its own": (
        {"impl": negative, "autograd": (setup_context, backward)},
        differentiated,
        nullcontext,
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_calls_leave_no_tensors(scenario: Scenario) -> None:
    keywords, function, scope = scenario
    keywords = {"op": "neg", **keywords}
    override = opgraft.register_op_override(
        "aten",
        keywords.pop("op"),
        "CPU",
        keywords.pop("impl"),
        unconditional_override=True,
        **keywords,
    )
    try:
        with scope():
            assert retained(calls_of(function)) == []
        assert override.hits
    finally:
        override.remove()


def test_substitutes_go_with_the_trial() -> None:
    values = torch.ones(3), torch.ones(4)
    call = Call(resolve("aten::cat"), (list(values), 0))
    assert retained(lambda: substitutes(call)) == []


def test_a_proof_keeps_no_results() -> None:
    call = Call(resolve("aten::neg"), (torch.ones(4),))
    router = mock.Mock(spec=["replay"], replay=lambda plan, values, poison: -values[0])

    def step() -> None:
        one = proof.Proof(mock.sentinel.plan)
        for _ in range(2 * proof.REPLAYS):
            one.run(router, call, lambda each: -each.values[0])
        assert one.is_done

    assert retained(step) == []
