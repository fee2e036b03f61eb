"""A call that is run again takes the route of the first time where another would be wrong.

Checkpointing runs a forward again in the backward. What has become ready since must not decide
which random numbers it draws, nor what it saves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import opgraft
from opgraft import when
from opgraft.ops.schema import resolve
from opgraft.router.randomness import depends_on_random_numbers
from tests.ready import derivatives, impls
from tests.ready.test_ready import LIMIT, Register, notes, own_cache, pytestmark, register, states

__all__ = ["notes", "own_cache", "pytestmark", "register"]

_NEVER = when.numel("input") > 10**9


def dropout(x: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(x, 0.5, True)[0]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"when_not_ready": "wait"}, {"when_not_ready": "wait", "unplanned": _NEVER}],
    ids=["native", "wait", "wait, only by plans"],
)
def test_a_recomputed_call_draws_the_same_numbers(
    register: Register, options: dict[str, Any], use_reentrant: bool
) -> None:
    override = register(impls.dropped_otherwise, "native_dropout", **options)
    x = torch.ones(1000, requires_grad=True)
    for _ in range(4):
        y = checkpoint(lambda x: dropout(x).relu(), x, use_reentrant=use_reentrant)
        assert opgraft.wait_until_ready(LIMIT)
        x.grad = None
        y.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, y)
    assert override.hits == (0 if "unplanned" in options else 8)


def test_a_random_call_waits_and_has_no_plan(register: Register) -> None:
    override = register(impls.dropped_otherwise, "native_dropout")
    assert override.plans is not None
    x = torch.ones(8)
    for _ in range(5):
        dropout(x)
    assert (override.hits, override.misses, len(override.plans)) == (5, 0, 0)
    assert states(override) == []
    explained = opgraft.explain("aten::native_dropout", x, 0.5, True)
    assert explained.winner is override and "it depends on random numbers" in str(explained)


def test_random_ops_that_draw_nothing_do_not_wait(register: Register) -> None:
    dropping = register(impls.dropped_otherwise, "native_dropout")
    attending = register(impls.attention, "_scaled_dot_product_flash_attention_for_cpu")
    x = torch.randn(1, 2, 8, 16)
    for hits in (0, 1):
        torch.native_dropout(x, 0.5, False)
        F.scaled_dot_product_attention(x, x, x)
        assert opgraft.wait_until_ready(LIMIT)
        assert (dropping.hits, attending.hits) == (hits, hits)


def test_a_random_call_is_waited_for_though_compiling_takes_longer(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPGRAFT_COMPILE_TIMEOUT", "0")
    override = register(impls.dropped_otherwise, "native_dropout")
    dropout(torch.ones(8))
    assert (override.hits, override.fallbacks) == (1, 0)


@pytest.mark.parametrize(
    "op, arguments, depends",
    [
        ("native_dropout", {"p": 0.5, "train": None}, True),
        ("native_dropout", {"p": 0.0, "train": True}, True),  # it moves the generator on
        ("native_dropout", {"p": 0.5, "train": False}, False),
        ("bernoulli.p", {"p": 0.0}, True),
        ("_scaled_dot_product_flash_attention", {"dropout_p": 0.1}, True),
        ("_scaled_dot_product_flash_attention", {"dropout_p": 0.0}, False),
        ("_scaled_dot_product_flash_attention_backward", {"dropout_p": 0.1}, True),
        ("_scaled_dot_product_flash_attention_backward", {"dropout_p": 0.0}, False),
        ("native_batch_norm", {"training": True}, False),
        ("mul.Tensor", {}, False),
    ],
)
def test_which_calls_depend_on_random_numbers(
    op: str, arguments: dict[str, Any], depends: bool
) -> None:
    resolved = resolve(f"aten::{op}")
    kwargs = {each.name: arguments.get(each.name) for each in resolved.arguments}
    assert depends_on_random_numbers(resolved.bind((), kwargs)) == depends


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_call_saves_as_many_tensors(register: Register, use_reentrant: bool) -> None:
    """With a derivative of its own it saves others than native does."""
    own = (derivatives.setup_context, derivatives.backward)
    override = register(derivatives.silu, "silu", launch_plan=False, autograd=own)
    x = torch.linspace(-2, 2, 64, requires_grad=True)
    y = checkpoint(F.silu, x, use_reentrant=use_reentrant)
    assert opgraft.wait_until_ready(LIMIT)
    y.sum().backward()
    # Reentrant checkpointing does not differentiate the first run: what it saves does not matter.
    assert override.hits == (0 if use_reentrant else 2)
    with opgraft.disabled():
        (expected,) = torch.autograd.grad(F.silu(x).sum(), x)
    torch.testing.assert_close(x.grad, expected)
