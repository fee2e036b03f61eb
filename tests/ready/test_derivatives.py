"""An override with a derivative of its own is ready when its forward and its backward are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft.packs import owning
from opgraft.ready import readiness
from tests.ready import derivatives as impls
from tests.ready.impls import hangs_when_dry
from tests.ready.test_ready import LIMIT, notes, own_cache, pytestmark, states

__all__ = ["notes", "own_cache", "pytestmark"]

OWN = (impls.setup_context, impls.backward)
Register = Callable[..., opgraft.Override]


@pytest.fixture
def register() -> Iterator[Register]:
    made: list[opgraft.Override] = []

    def register(**options: Any) -> opgraft.Override:
        given = {"autograd": OWN, "when_not_ready": "native", "name": "own derivative"} | options
        override = opgraft.register_op_override(
            "aten", "silu", "CPU", impls.silu, unconditional_override=True, **given
        )
        made.append(override)
        return override

    impls.ran.clear()
    yield register
    for each in made:
        each.remove()


def train(size: int = 4) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """What ran of the override's in a step, what it returned, and the gradient."""
    impls.ran.clear()
    x = torch.linspace(-2, 2, size, requires_grad=True)
    y = F.silu(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return list(impls.ran), y.detach(), gradient


def infer(size: int = 4) -> list[str]:
    impls.ran.clear()
    with torch.no_grad():
        F.silu(torch.linspace(-2, 2, size))
    return list(impls.ran)


BOTH = ["forward, requires_grad True", "backward (True,)"]


def test_native_serves_both_until_both_are_ready(register: Register, notes: Path) -> None:
    with opgraft.disabled():
        _, *native = train()
    override = register()
    ran, *before = train()
    assert ran == [] and override.hits == 0 and override.misses == 1
    assert opgraft.wait_until_ready(LIMIT)
    assert sorted(notes.read_text().splitlines()) == sorted(BOTH)
    ran, *after = train()
    assert ran == BOTH and override.hits == 1
    for expected, first, second in zip(native, before, after, strict=True):
        assert torch.equal(expected, first)
        torch.testing.assert_close(expected, second)
    (state,) = states(override)
    assert state.status == "ready" and state.by.startswith("worker ")
    assert state.call.endswith("with its derivative")


def test_without_a_gradient_the_forward_is_enough(register: Register, notes: Path) -> None:
    override = register()
    assert infer() == []
    assert opgraft.wait_until_ready(LIMIT)
    assert notes.read_text() == "forward, requires_grad False\n"
    assert infer() == ["forward, requires_grad False"]
    assert override.hits == 1


def test_a_forward_that_is_ready_has_no_native_backward(register: Register) -> None:
    override = register()
    infer()
    assert opgraft.wait_until_ready(LIMIT)
    assert train()[0] == []  # its backward is not ready: native makes both
    assert override.hits == 0
    assert opgraft.wait_until_ready(LIMIT)
    assert train()[0] == BOTH


@pytest.mark.parametrize("policy", ["wait", None])
def test_a_call_waits_otherwise(register: Register, policy: Any) -> None:
    register(when_not_ready=policy)
    assert train()[0] == BOTH


@pytest.mark.parametrize("launch_plan", [True, False])
def test_native_is_the_default_of_packs_with_plans(register: Register, launch_plan: bool) -> None:
    with owning("norms"):
        override = register(when_not_ready=None, launch_plan=launch_plan)
    assert override.when_not_ready == ("native" if launch_plan else "wait")
    assert train()[0] == ([] if launch_plan else BOTH)


def test_with_a_launch_plan_both_become_ready(register: Register) -> None:
    override = register(launch_plan=True)
    train()
    assert opgraft.wait_until_ready(LIMIT)
    ran = [train()[0] for _ in range(5)]
    assert ran[0] == BOTH and ran[-1] == BOTH[1:]  # the forward is replayed
    assert override.hits == 5


def test_deterministic_programs_wait(register: Register) -> None:
    register()
    torch.use_deterministic_algorithms(True)
    try:
        assert train()[0] == BOTH
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_backward_that_reads_values_is_compiled_here(register: Register) -> None:
    override = register(autograd=(impls.setup_context, impls.backward_that_needs_values))
    assert train()[0] == []
    assert opgraft.wait_until_ready(LIMIT)
    (state,) = states(override)
    assert (state.status, state.by) == ("ready", "this process")
    assert train()[0] == BOTH


def test_functions_of_this_program_alone_are_run_here(register: Register) -> None:
    override = register(autograd=(impls.setup_context, lambda ctx, grad: impls.backward(ctx, grad)))
    train()
    assert opgraft.wait_until_ready(LIMIT)
    (state,) = states(override)
    assert state.by == "this process" and "autograd=" in state.reason
    assert train()[0] == BOTH


def test_a_backward_that_cannot_be_compiled_leaves_both_to_native(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    override = register(autograd=(impls.setup_context, impls.backward_that_never_works))
    for _ in range(2):
        assert train()[0] == []
        assert opgraft.wait_until_ready(LIMIT)
    (state,) = states(override)
    assert state.status == "failed" and "no compiler found for the backward" in state.reason
    assert "no compiler found for the backward" in caplog.text
    said = str(opgraft.explain(F.silu, torch.ones(4, requires_grad=True)))
    assert "no compiler found for the backward" in said
    infer()
    assert opgraft.wait_until_ready(LIMIT)
    assert infer() == ["forward, requires_grad False"]  # which needs no backward


def test_nothing_is_replayed_of_an_impl_that_is_no_function_of_metadata(
    register: Register,
) -> None:
    override = register()
    for step in (train, infer):
        step()
        assert opgraft.wait_until_ready(LIMIT)
    for _ in range(6):
        assert train()[0] == BOTH
        assert infer() == ["forward, requires_grad False"]
    assert override.plans is not None and len(override.plans) == 0


def test_other_sizes_are_other_kinds(register: Register) -> None:
    register()
    train(4)
    assert opgraft.wait_until_ready(LIMIT)
    assert train(5)[0] == [] and train(4)[0] == BOTH


def test_a_kind_that_is_ready_stays_so_however_many_there_are(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What people are told of is bounded."""
    monkeypatch.setattr(readiness, "MAX_STATES", 4)
    register(launch_plan=False)
    for _ in range(2):
        ran = [train(size)[0] for size in range(1, 11)]
        assert opgraft.wait_until_ready(LIMIT)
    assert ran == [BOTH] * 10


def test_threads_get_native_or_ours(register: Register) -> None:
    register()
    wrong: list[object] = []
    with opgraft.disabled():
        _, y, gradient = train(100)

    def steps() -> None:
        for _ in range(50):
            x = torch.linspace(-2, 2, 100, requires_grad=True)
            out = F.silu(x)
            (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
            if not (torch.allclose(out, y) and torch.allclose(grad, gradient)):
                wrong.append(grad)

    threads = [threading.Thread(target=steps) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert opgraft.wait_until_ready(LIMIT)


def test_a_composite_op_is_natives_until_both_are_ready() -> None:
    """Its router is at the autograd key already."""
    override = opgraft.register_op_override(
        "aten",
        "linalg_vecdot",
        "CPU",
        lambda x, y, *, dim: impls.linear_sum(x, y),
        unconditional_override=True,
        name="composite",
        autograd=(
            impls.setup_linear_sum,
            lambda ctx, grad: (*impls.backward_linear_sum(ctx, grad), None),
        ),
        when_not_ready="native",
    )
    impls.ran.clear()
    try:
        x, y = (torch.ones(3, 4, requires_grad=True) for _ in range(2))
        gradients = []
        for _ in range(2):
            out = torch.linalg.vecdot(x, y)
            gradients.append(torch.autograd.grad(out.sum(), (x, y)))
            assert opgraft.wait_until_ready(LIMIT)
            if len(gradients) == 1:
                impls.ran.clear()
        assert impls.ran == ["composite forward", "composite backward"] and override.hits == 1
        for first, second in zip(*gradients, strict=True):
            assert torch.equal(first, second)
    finally:
        override.remove()


def test_explain_says_that_the_pair_behind_runs_until_the_first_one_is_ready() -> None:
    terms: dict[str, Any] = {
        "unconditional_override": True,
        "autograd": (
            impls.setup_linear_sum,
            lambda ctx, grad: (*impls.backward_linear_sum(ctx, grad), None),
        ),
    }

    def composite(**more: Any) -> opgraft.Override:
        return opgraft.register_op_override(
            *("aten", "linalg_vecdot", "CPU", lambda x, y, *, dim: impls.linear_sum(x, y)),
            **terms,
            **more,
        )

    made = [composite(name="first", priority=1, when_not_ready="native"), composite(name="behind")]
    try:
        x, y = (torch.ones(3, 4, requires_grad=True) for _ in range(2))
        for is_ready in (False, True):
            explained = opgraft.explain("aten::linalg_vecdot", x, y)
            hits = [each.hits for each in made]
            torch.autograd.grad(torch.linalg.vecdot(x, y).sum(), (x, y))
            ran = [each.hits - before for each, before in zip(made, hits, strict=True)]
            assert ran == [int(is_ready), int(not is_ready)]
            assert explained.winner is made[ran.index(1)]
            statuses = ["takes", "behind"] if is_ready else ["declines", "takes"]
            assert [each.status for each in explained.verdicts] == statuses
            if is_ready:
                continue
            assert "nobody has asked for its kernels" in explained.verdicts[0].reason
            # Nothing waits where hooks get what is saved.
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                assert opgraft.explain("aten::linalg_vecdot", x, y).winner is made[0]
            assert opgraft.wait_until_ready(LIMIT)
    finally:
        for each in made:
            each.remove()


def test_ops_that_the_forward_calls_wait_for_nothing(register: Register) -> None:
    """Its own kernels are ready: theirs may not be."""
    register()
    train()
    assert opgraft.wait_until_ready(LIMIT)
    with opgraft.disabled():
        native = train()[1:]
    inner = opgraft.register_op_override(
        "aten",
        "sigmoid",
        "CPU",
        hangs_when_dry,
        unconditional_override=True,
        launch_plan=True,
        when_not_ready="native",
    )
    try:
        ran, *ours = train()
        assert ran == BOTH and inner.hits == 0 and inner.misses == 2
        torch.testing.assert_close(ours, native)
    finally:
        inner.remove()


def test_func_transforms_have_ours(register: Register) -> None:
    """Their tensors have no key: nothing says what is ready, and they wait."""
    register()
    gradient = torch.func.grad(lambda x: F.silu(x).sum())(torch.linspace(-2, 2, 4))
    assert impls.ran == ["forward, requires_grad False", "backward (True,)"]
    torch.testing.assert_close(gradient, train()[2])
