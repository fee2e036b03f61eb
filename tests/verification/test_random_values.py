"""What is drawn, and what several draws say together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opgraft.ops.schema import resolve
from opgraft.verification.checks import CHECKS, derivatives
from opgraft.verification.checks.derivatives import Gradients
from opgraft.verification.observation import Failed
from opgraft.verification.random_values import RandomValues

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
def test_a_seed_draws_the_same_again(dtype: torch.dtype) -> None:
    like = torch.empty(3, 5, dtype=dtype)
    one, again, other = (RandomValues(seed).normal(like) for seed in (1, 1, 2))
    assert (one.dtype, one.shape) == (dtype, like.shape)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_draws_go_on() -> None:
    rng = RandomValues(0)
    assert not torch.equal(rng.uniform([8], CPU), rng.uniform([8], CPU))
    assert int(rng.integers(3, 100, CPU).max()) == 2


def _seen(monkeypatch: pytest.MonkeyPatch, native_errors: list[float], mine: float) -> Any:
    """A sample whose gradient is off by `mine`, and natively by other amounts draw by draw."""

    def three_gradients(seen: Any) -> Gradients:
        exact = torch.ones(4)
        off = native_errors[min(seen.sample.draw, len(native_errors) - 1)]
        return Gradients(["x"], [exact + mine], [exact + off], [exact])

    def sample(draw: int) -> Any:
        return SimpleNamespace(draw=draw, layouts={}, with_new_values=sample)

    monkeypatch.setattr(derivatives, "_three_gradients", three_gradients)
    subject = SimpleNamespace(op=SimpleNamespace(mutates=False), k=2.0)
    return SimpleNamespace(subject=subject, sample=sample(0), is_random=False, is_special=False)


def test_a_native_gradient_that_was_right_by_chance_is_no_measure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    derivatives.check_gradients(_seen(monkeypatch, [0.0, 0.01], mine=0.02))


def test_a_gradient_that_is_wrong_in_every_draw_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failed, match="the gradient of x has error"):
        derivatives.check_gradients(_seen(monkeypatch, [0.0, 0.01], mine=0.1))


def test_a_gradient_that_is_nan_in_another_draw_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _seen(monkeypatch, [0.0, 0.01], mine=0.02)
    honest = derivatives._three_gradients

    def with_nan(seen: Any) -> Gradients:
        found = honest(seen)
        return (
            found if seen.sample.draw == 0 else found._replace(mine=[torch.full((4,), torch.nan)])
        )

    monkeypatch.setattr(derivatives, "_three_gradients", with_nan)
    with pytest.raises(Failed, match="inf"):
        derivatives.check_gradients(seen)


@pytest.mark.parametrize(
    ("tensor", "suits"),
    [
        (torch.ones(2, 3, dtype=torch.float64), True),
        (torch.ones(2, 1, dtype=torch.float64).expand(2, 3), False),
        (torch.ones(2, 1, dtype=torch.float64).expand(2, 1), True),
        (torch.ones(2, 3), False),
        (torch.ones(2, 300, dtype=torch.float64), False),
    ],
    ids=["plain", "expanded", "expanded by nothing", "float32", "large"],
)
def test_numerical_derivatives_are_asked_of_what_has_them(
    tensor: torch.Tensor, suits: bool
) -> None:
    call = resolve("aten::relu").bind((tensor,), {})
    has_something_to_say = CHECKS["gradcheck"].suits
    assert has_something_to_say is not None
    seen: Any = SimpleNamespace(override_run=SimpleNamespace(call=call))
    assert has_something_to_say(seen) is suits
