"""Launch plans at the CPU key: what is recorded, what a key tells apart, when there is a plan."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import when
from opgraft.core import loader
from opgraft.errors import ContractError, RegistrationError
from opgraft.plan import plans, triton_launches
from opgraft.plan.plans import Plans
from tests import probes
from tests.plan.conftest import doubled, replays, warm

Register = Callable[..., opgraft.Override]


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


# ------------------------------------------------------------------ the life of a plan


def test_a_call_is_seen_then_recorded_twice_then_replayed(register: Register) -> None:
    runs: list[int] = []

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        runs.append(1)
        return doubled(self, dim, half_to_float)

    override = register(impl)
    x = torch.randn(4, 8)
    for expected in (1, 2, 3, 3, 3):
        torch.testing.assert_close(softmax(x), 2 * x)
        assert len(runs) == expected
    assert (override.hits, override.misses, override.plans.recordings) == (5, 0, 2)
    (plan,) = override.plans
    assert plan.key == "self float32[4, 8], dim -1, half_to_float False"
    assert plan.hits == override.plans.hits == 2
    assert plan.bytes == override.plans.bytes > 0
    assert plan.steps == "allocate 128 bytes; call scale"


def test_a_replay_works_on_its_own_arguments(register: Register) -> None:
    override = register()
    warm(override, torch.randn(4, 8))
    x = torch.randn(4, 8)
    torch.testing.assert_close(replays(override, lambda: softmax(x)), 2 * x)


def test_results_of_replays_are_separate_tensors(register: Register) -> None:
    override = register()
    x = torch.randn(4, 8)
    warm(override, x)
    one, other = softmax(x), softmax(x)
    assert one.data_ptr() != other.data_ptr()
    assert one.untyped_storage().resizable()


def test_without_launch_plan_there_are_none(register: Register) -> None:
    assert register(launch_plan=False).plans is None


def test_opgraft_plans_0_records_nothing(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPGRAFT_PLANS", "0")
    override = register()
    assert override.plans is None
    for _ in range(4):
        softmax(torch.ones(2, 2))
    assert override.hits == 4


def test_an_impl_that_gets_the_keyset(register: Register) -> None:
    def impl(
        keyset: torch.DispatchKeySet, self: torch.Tensor, dim: int, half_to_float: bool
    ) -> torch.Tensor:
        return doubled(self, dim, half_to_float)

    override = register(impl, unconditional_override=False)
    x = torch.randn(4, 8)
    warm(override, x)
    torch.testing.assert_close(replays(override, lambda: softmax(x)), 2 * x)


def test_a_condition_in_python_with_plans(register: Register) -> None:
    override = register(cond=lambda self, dim, half_to_float: self.ndim == 2)
    x = torch.randn(4, 8)
    warm(override, x)
    torch.testing.assert_close(replays(override, lambda: softmax(x)), 2 * x)
    softmax(torch.randn(4))
    assert override.misses == 1


def at_offset(address: int) -> torch.Tensor:
    """A tensor that begins so many bytes behind a multiple of 64."""
    buffer = torch.randn(64)
    start = -buffer.data_ptr() % 64 + address
    return buffer[start // 4 : start // 4 + 32].view(4, 8)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


#: Where calls go the long way, or are told of.
SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "deterministic": deterministic,
    "trace": opgraft.trace,
}


@pytest.mark.parametrize(
    ("condition", "taken", "declined"),
    [
        (when.aligned("self", 16), lambda: at_offset(16), lambda: at_offset(4)),
        # A plan's key does not know of it.
        (when.aligned("self", 64), lambda: at_offset(0), lambda: at_offset(16)),
        (~when.aligned("self", 32), lambda: at_offset(16), lambda: at_offset(0)),
        (
            when.requires_grad("self"),
            lambda: torch.randn(4, 8, requires_grad=True),
            lambda: torch.randn(4, 8),
        ),
        (
            when.numel("self") % when.size("self", 0) == 0,
            lambda: torch.randn(4, 8),
            lambda: torch.randn(0, 8),
        ),
        (
            (when.ndim("self") == 2) & (when.is_none("dim") | when.dtype("self", torch.float)),
            lambda: torch.randn(4, 8),
            lambda: torch.randn(4, 8, dtype=torch.double),
        ),
    ],
    ids=["alignment", "finer", "not aligned", "requires_grad", "arithmetic", "two parts"],
)
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@torch.no_grad()
def test_what_a_condition_declines_is_declined_where_there_are_plans(
    register: Register,
    condition: when.Condition,
    taken: Callable[[], torch.Tensor],
    declined: Callable[[], torch.Tensor],
    surroundings: str,
) -> None:
    override = register(cond=condition)
    x, other = taken(), declined()
    warm(override, x)
    torch.testing.assert_close(replays(override, lambda: softmax(x)), 2 * x)
    with SURROUNDINGS[surroundings]():
        for misses in (1, 2, 3):
            torch.testing.assert_close(softmax(other).sum(), other.new_tensor(other.shape[0]))
            assert (override.hits, override.misses) == (4, misses)
        torch.testing.assert_close(softmax(x), 2 * x)
    torch.testing.assert_close(replays(override, lambda: softmax(x)), 2 * x)
    assert (override.hits, override.misses) == (6, 3)


# ------------------------------------------------------------------ keys


def wide_softmax(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """Any dtype and strides, by ops in between."""
    x = self.float().contiguous()
    out = torch.empty_like(x)
    probes.scale(x, out, 2.0)
    return out.to(torch.float32 if half_to_float else self.dtype)


def view(x: torch.Tensor, offset: int) -> torch.Tensor:
    return x.flatten()[offset : offset + 32].view(4, 8)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: softmax(x[:2]),
        lambda x: softmax(x[:, :4].contiguous()),
        lambda x: softmax(x.view(1, 8, 8)),
        lambda x: softmax(x.t()),
        lambda x: softmax(x.double()),
        lambda x: softmax(view(x, 1)),
        lambda x: torch.softmax(x, 0),
        lambda x: softmax(x.clone().requires_grad_()),
    ],
    ids=["rows", "columns", "rank", "strides", "dtype", "alignment", "scalar", "requires_grad"],
)
def test_a_key_tells_apart(register: Register, other: Callable[..., torch.Tensor]) -> None:
    override = register(wide_softmax)
    x = torch.randn(8, 8)
    warm(override, x)
    other(x)
    assert (override.plans.hits, override.hits) == (0, 4)


def test_a_key_does_not_tell_apart_what_an_impl_cannot_see(register: Register) -> None:
    override = register()
    x = torch.randn(64)
    warm(override, x[:32].view(4, 8))
    y = x[16:48].view(4, 8)  # another offset of the same alignment
    torch.testing.assert_close(replays(override, lambda: softmax(y)), 2 * y)


def test_autocast_and_inference_mode_are_part_of_the_key(register: Register) -> None:
    override = register()
    x = torch.randn(4, 8)
    warm(override, x)
    with torch.inference_mode():
        softmax(x)
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
        softmax(x)
    assert override.plans.hits in (0, 1)  # whether autocast changes the dispatch is torch's affair
    with torch.inference_mode():
        softmax(x)
        softmax(x)
        assert replays(override, lambda: softmax(x)).is_inference()
    assert not replays(override, lambda: softmax(x)).is_inference()


def add_scaled(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`mul`, wrongly but so that it tells its arguments apart: 2 * self."""
    out = torch.empty_like(self)
    probes.scale(self, out, float(other) if other.ndim == 0 else 2.0)
    return out


def register_mul(impl: Callable[..., Any], **keywords: Any) -> opgraft.Override:
    return opgraft.register_op_override(
        "aten", "mul.Tensor", "CPU", impl, unconditional_override=True, launch_plan=True, **keywords
    )


def test_a_python_number_is_part_of_the_key() -> None:
    override = register_mul(add_scaled)
    x = torch.randn(8)
    for _ in range(3):
        assert torch.equal(x * 2, 2 * x)
    assert torch.equal(replays(override, lambda: x * 2), x + x)
    assert torch.equal(x * 3, x + x + x)
    assert len(override.plans) == 1


def test_an_argument_that_comes_twice() -> None:
    def product(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        first, second = torch.empty_like(self), torch.empty_like(self)
        probes.scale(other, first, 1.0)
        probes.scale(first, second, 1.0)
        return second

    override = register_mul(product)
    x, y = torch.randn(8), torch.randn(8)
    for _ in range(3):
        x.mul(x)
    assert len(override.plans) == 1
    assert torch.equal(x.mul(y), y)  # not replayed: the plan is for one tensor in both places
    assert override.plans.hits == 0
    assert torch.equal(replays(override, lambda: y.mul(y)), y)


# ------------------------------------------------------------------ what can be recorded


def record(register: Register, impl: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    """A replay of an impl, on another tensor than it was recorded with."""
    override = register(impl)
    warm(override, torch.randn_like(x))
    return replays(override, lambda: softmax(x))


def test_temporaries_and_several_launches(register: Register) -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        one, two = torch.empty_like(self), torch.empty(self.shape)
        probes.scale(self, one, 3.0)
        probes.scale(one, two, 5.0)
        out = torch.empty_like(self)
        probes.scale(two, out, 2.0)
        return out

    x = torch.randn(4, 8)
    torch.testing.assert_close(record(register, impl, x), 30 * x)


@pytest.mark.parametrize(
    "allocate",
    [
        lambda x: torch.empty_like(x),
        lambda x: torch.empty(*x.shape),
        lambda x: torch.empty_strided(x.shape, x.stride()),
        lambda x: x.new_empty(x.shape),
        lambda x: x.new_empty_strided(x.shape, x.stride()),
        lambda x: torch.empty(x.numel() + 8)[8:].view(x.shape),
        lambda x: torch.empty(x.shape[::-1]).view(x.shape),
        lambda x: torch.empty_like(x).detach(),
        lambda x: torch.empty_like(x).data,
        lambda x: torch.zeros_like(x),
        lambda x: torch.full_like(x, 7.0),
        lambda x: torch.empty(2, *x.shape).unbind()[1],
    ],
)
def test_outputs_of_every_allocation(register: Register, allocate: Callable[..., Any]) -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        out = allocate(self)
        probes.scale(self, out, 2.0)
        return out

    x = torch.randn(4, 8)
    out = record(register, impl, x)
    torch.testing.assert_close(out, 2 * x)
    assert out.stride() == x.stride()


def test_views_of_arguments(register: Register) -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        out = torch.empty_like(self)
        rows = self.view(-1).split(self.shape[1])
        for row, result in zip(rows, out, strict=True):
            probes.scale(row, result, 2.0)
        return out

    storage = torch.randn(100)
    x = storage[4:36].view(4, 8)  # views of a view: offsets count from the argument
    torch.testing.assert_close(record(register, impl, x), 2 * x)


def test_arguments_on_one_storage_are_told_apart_by_their_views() -> None:
    def second(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(self)
        probes.scale(other.view(2, -1)[1], out.view(2, -1)[1], 1.0)
        probes.scale(self.view(2, -1)[0], out.view(2, -1)[0], 1.0)
        return out

    override = register_mul(second)
    both = torch.randn(2, 8)
    for _ in range(3):
        both[0].mul(both[1])
    assert len(override.plans) == 1, override.plans.refusals
    x, y = torch.randn(2, 8)
    result = replays(override, lambda: x.mul(y))
    assert torch.equal(result, torch.cat([x[:4], y[4:]]))


def test_ops_in_between(register: Register) -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        partial = torch.zeros(3, *self.shape)
        for row in partial:
            probes.scale(self, row, 2.0)
        partial[0].add_(1.0)
        out = partial.sum(0).sub_(1.0) * 0.5 + torch.ones_like(self)
        return torch.cat([out, out])[: len(self)].clone()

    x = torch.randn(4, 8)
    torch.testing.assert_close(record(register, impl, x), 3 * x + 1)


def test_a_copy_of_a_strided_argument(register: Register) -> None:
    x = torch.randn(8, 4).t()
    torch.testing.assert_close(record(register, wide_softmax, x), 2 * x)


def test_a_scalar_of_the_op_as_a_constant() -> None:
    def leaky(self: torch.Tensor, negative_slope: float) -> torch.Tensor:
        out = torch.empty_like(self)
        probes.scale(self, out, negative_slope)
        return out

    override = opgraft.register_op_override(
        "aten", "leaky_relu", "CPU", leaky, unconditional_override=True, launch_plan=True
    )
    x = torch.randn(8)
    leaky_relu = torch.nn.functional.leaky_relu
    for _ in range(3):
        leaky_relu(x, 0.25)
    assert torch.equal(replays(override, lambda: leaky_relu(x, 0.25)), 0.25 * x)
    assert torch.equal(leaky_relu(x, 0.5), 0.5 * x)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True)])
def test_several_outputs_some_of_them_none(weighted: bool, mask: tuple[bool, bool]) -> None:
    def backward(
        grad_out: torch.Tensor,
        input: torch.Tensor,
        normalized_shape: list[int],
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        output_mask: list[bool],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        grads: list[torch.Tensor | None] = []
        for wanted, like in zip(output_mask, (input, weight), strict=True):
            grad = torch.empty_like(like) if wanted and like is not None else None
            if grad is not None:
                probes.scale(grad_out, grad, 3.0 + len(grads))
            grads.append(grad)
        return grads[0], grads[1]

    override = opgraft.register_op_override(
        "aten",
        "_fused_rms_norm_backward",
        "CPU",
        backward,
        unconditional_override=True,
        launch_plan=True,
    )
    x = torch.randn(8)
    weight = torch.ones(8) if weighted else None

    def call() -> Any:
        return torch.ops.aten._fused_rms_norm_backward(x, x, [8], torch.ones(1), weight, list(mask))

    for _ in range(3):
        call()
    dx, dw = replays(override, call)
    assert (dx is not None, dw is not None) == (mask[0], mask[1] and weighted)
    if dx is not None:
        assert torch.equal(dx, 3 * x)
    if dw is not None:
        assert torch.equal(dw, 4 * x)


def test_an_op_that_writes_to_its_argument_and_returns_it() -> None:
    def relu_(self: torch.Tensor) -> torch.Tensor:
        probes.scale(self.clone(), self, 2.0)
        return self

    override = opgraft.register_op_override(
        "aten", "relu_", "CPU", relu_, unconditional_override=True, launch_plan=True
    )
    for _ in range(3):
        torch.relu_(torch.randn(8))
    x = torch.randn(8)
    before, expected = x.clone(), x._version + 1
    assert replays(override, lambda: torch.relu_(x)) is x
    assert torch.equal(x, 2 * before)
    assert x._version == expected


def test_an_out_variant() -> None:
    def mul_out(self: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        probes.scale(other, out, 2.0)
        return out

    override = opgraft.register_op_override(
        "aten", "mul.out", "CPU", mul_out, unconditional_override=True, launch_plan=True
    )
    x, y = torch.randn(8), torch.randn(8)
    for _ in range(3):
        torch.mul(x, y, out=torch.empty(8))
    out = torch.empty(8)
    assert replays(override, lambda: torch.mul(x, y, out=out)) is out
    assert torch.equal(out, 2 * y)


def test_an_op_with_a_list_of_tensors() -> None:
    def cat(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
        out = torch.empty(sum(len(t) for t in tensors))
        start = 0
        for tensor in tensors:
            probes.scale(tensor, out[start : start + len(tensor)], 2.0)
            start += len(tensor)
        return out

    override = opgraft.register_op_override(
        "aten", "cat", "CPU", cat, unconditional_override=True, launch_plan=True
    )
    parts = [torch.randn(4), torch.randn(8), torch.randn(4)]
    for _ in range(3):
        torch.cat([torch.randn_like(part) for part in parts])
    result = replays(override, lambda: torch.cat(parts))
    with opgraft.disabled():
        assert torch.equal(result, 2 * torch.cat(parts))
    torch.cat([parts[1], parts[0], parts[2]])
    assert len(override.plans) == 1


def test_an_empty_tensor(register: Register) -> None:
    x = torch.randn(0, 8)
    assert record(register, doubled, x).shape == (0, 8)


# ------------------------------------------------------------------ what is refused

_cached: dict[tuple[int, ...], torch.Tensor] = {}


def with_item(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    out = torch.empty_like(self)
    probes.scale(self, out, self.view(-1)[0].item())
    return out


def with_random_numbers(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return torch.rand_like(self)


def with_a_cached_buffer(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    buffer = _cached.setdefault(tuple(self.shape), torch.ones_like(self))
    out = torch.empty_like(self)
    probes.scale(buffer, out, 2.0)
    return out


def with_a_shape_that_depends_on_values(
    self: torch.Tensor, dim: int, half_to_float: bool
) -> torch.Tensor:
    self.nonzero()
    return doubled(self, dim, half_to_float)


def with_writing_to_an_argument(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    self.add_(0.0)
    return doubled(self, dim, half_to_float)


def with_a_resized_tensor(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    out = torch.empty(0).resize_(self.shape)
    probes.scale(self, out, 2.0)
    return out


def with_a_launch_nobody_sees(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    out = torch.empty_like(self)
    ctypes.memmove(out.data_ptr(), self.data_ptr(), self.nbytes)
    return out


def with_numpy(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    out = torch.empty_like(self)
    out.numpy()[:] = 2 * self.detach().numpy()
    return out


def with_the_native_kernel(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return torch._softmax(self, dim, half_to_float)


def with_a_temporary(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    half, out = torch.empty_like(self), torch.empty_like(self)
    probes.scale(self, half, 0.5)
    probes.scale(half, out, 4.0)
    return out


_factors = iter(range(1, 1000))


def with_other_things_every_time(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    out = torch.empty_like(self)
    probes.scale(self, out, float(next(_factors)))
    return out


def with_an_op_of_a_library(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return torch.ops.opgraft_plans.twice(self)


@pytest.fixture
def library() -> Any:
    library = torch.library.Library("opgraft_plans", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    yield library
    library._destroy()


@pytest.mark.parametrize(
    ("impl", "reason"),
    [
        (with_item, "aten::item, which depends on values"),
        (with_random_numbers, "which takes random numbers"),
        (with_a_cached_buffer, "neither an argument nor allocated by the impl"),
        (with_a_shape_that_depends_on_values, "whose shape depends on values"),
        (with_writing_to_an_argument, "it writes to an argument"),
        (with_a_resized_tensor, "changes a tensor's shape in place"),
        (with_a_launch_nobody_sees, "is not what Python computed"),
        (with_numpy, "it reads a tensor's values"),
        (with_other_things_every_time, "did different things"),
        (with_an_op_of_a_library, "not one of PyTorch's own ops"),
        (with_the_native_kernel, "aten::_softmax itself"),
    ],
)
def test_a_refusal_runs_in_python_and_says_why(
    register: Register,
    library: Any,
    impl: Callable[..., Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    override = register(impl)
    x = torch.randn(4, 8)
    with caplog.at_level(logging.DEBUG, "opgraft"):
        for _ in range(plans.MAX_ATTEMPTS + 4):
            softmax(x)
    assert len(override.plans) == 0
    assert override.hits == plans.MAX_ATTEMPTS + 4
    (refusal,) = override.plans.refusals.values()
    assert reason in refusal
    assert sum("no launch plan can be recorded" in r.message for r in caplog.records) == 1
    assert reason in override.plans.summary()


def test_returning_the_argument_is_refused_by_the_contract_first(register: Register) -> None:
    register(lambda self, dim, half_to_float: self)
    with pytest.raises(ContractError, match="in the memory of an argument"):
        softmax(torch.ones(2, 2))


def test_the_contract_is_checked_for_each_key_that_is_recorded(register: Register) -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        out = torch.empty(self.shape[0] + (self.shape[1] == 16), self.shape[1])
        probes.scale(self, out, 2.0)
        return out

    register(impl)
    for _ in range(4):
        softmax(torch.randn(4, 8))  # this kind of call was checked
    x = torch.randn(4, 16)
    softmax(x)
    with pytest.raises(ContractError, match="shape"):
        softmax(x)


def test_an_override_that_nothing_is_recorded_of_is_given_up(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    override = register(with_random_numbers)
    with caplog.at_level(logging.INFO, "opgraft"):
        for size in range(2, plans.MAX_REFUSALS + 6):
            x = torch.randn(1, size)
            for _ in range(plans.MAX_ATTEMPTS + 1):
                softmax(x)
    assert override.plans.stopped
    assert len(override.plans.refusals) == plans.MAX_REFUSALS
    assert sum("given up" in record.message for record in caplog.records) == 1
    recordings = override.plans.recordings
    softmax(torch.randn(3, 3))
    softmax(torch.randn(3, 3))
    assert override.plans.recordings == recordings
    assert override.misses == 0


def test_an_impl_that_raises_while_it_is_recorded(register: Register) -> None:
    fails: list[bool] = []

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if fails:
            raise ValueError("not today")
        return doubled(self, dim, half_to_float)

    override = register(impl)
    x = torch.randn(4, 8)
    softmax(x)
    fails.append(True)
    with pytest.raises(ValueError, match="not today"):
        softmax(x)
    fails.clear()
    warm(override, x)
    assert torch.equal(replays(override, lambda: softmax(x)), 2 * x)


def test_a_failing_impl_falls_back_while_it_is_recorded(register: Register) -> None:
    calls: list[int] = []

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("not today")
        return doubled(self, dim, half_to_float)

    override = register(impl, on_error="fallback")
    x = torch.randn(4, 8)
    softmax(x)
    with pytest.warns(opgraft.OverrideWarning, match="not today"):
        torch.testing.assert_close(softmax(x).sum(-1), torch.ones(4))
    assert override.fallbacks == 1
    assert len(override.plans) == 0


def test_recording_inside_a_recording(register: Register) -> None:
    inner = opgraft.register_op_override(
        "aten", "neg", "CPU", lambda self: self * -1, unconditional_override=True, launch_plan=True
    )

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        out = torch.empty_like(self)
        probes.scale(-self, out, -2.0)
        return out

    x = torch.randn(4, 8)
    override = register(impl)
    warm(override, x)
    assert torch.equal(replays(override, lambda: softmax(x)), 2 * x)
    assert inner.hits > 0


# ------------------------------------------------------------------ changing shapes


@pytest.fixture
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", 4)
    monkeypatch.setattr(plans, "FREE_RECORDINGS", 16)
    monkeypatch.setattr(plans, "REPLAYS_PER_RECORDING", 8)


def test_shapes_that_come_once_are_never_recorded(register: Register) -> None:
    override = register()
    for size in range(1, 50):
        softmax(torch.randn(1, size))
    assert override.plans.recordings == 0
    assert override.hits == 49


@pytest.mark.usefixtures("small_tables")
def test_the_table_is_bounded_and_the_least_used_goes(register: Register) -> None:
    override = register()
    tensors = {size: torch.randn(1, size) for size in range(1, 6)}
    for size in range(1, 5):
        for _ in range(3 + size):
            softmax(tensors[size])
    for _ in range(3):
        softmax(tensors[5])
    assert len(override.plans) == 4
    keys = {plan.key.split("]")[0] for plan in override.plans}
    assert keys == {f"self float32[1, {size}" for size in (2, 3, 4, 5)}
    for tensor in tensors.values():
        torch.testing.assert_close(softmax(tensor), 2 * tensor)


@pytest.mark.usefixtures("small_tables")
def test_recording_stops_and_says_so_and_new_keys_run_native(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    override = register()
    with caplog.at_level(logging.INFO, "opgraft"):
        for size in range(1, 12):
            for _ in range(3):
                softmax(torch.randn(1, size))
    assert override.plans.stopped
    assert override.plans.recordings == 16
    assert sum("stopped recording" in record.message for record in caplog.records) == 1
    hits, misses = override.hits, override.misses
    for _ in range(3):
        x = torch.randn(1, 40)
        torch.testing.assert_close(softmax(x).sum(-1), torch.ones(1))  # native
    assert (override.hits, override.misses) == (hits, misses + 3)
    kept = torch.randn(1, 8)
    assert torch.equal(replays(override, lambda: softmax(kept)), 2 * kept)


@pytest.mark.usefixtures("small_tables")
def test_replays_earn_more_recordings(register: Register) -> None:
    override = register()
    for size in range(1, 9):
        for _ in range(3):
            softmax(torch.randn(1, size))
    assert override.plans.stopped
    for _ in range(40):
        softmax(torch.randn(1, 8))
    assert not override.plans.stopped
    x = torch.randn(1, 40)
    for _ in range(3):
        softmax(x)
    assert torch.equal(replays(override, lambda: softmax(x)), 2 * x)


@pytest.mark.usefixtures("small_tables")
def test_switching_off_and_on_gives_free_recordings_back_but_not_all_the_time(
    register: Register,
) -> None:
    override = register()

    def use_up(rows: int) -> None:
        for size in range(1, 12):
            for _ in range(3):
                softmax(torch.randn(rows, size))

    use_up(1)
    assert override.plans.stopped
    opgraft.disable(name=override.name)
    opgraft.enable(name=override.name)
    assert not override.plans.stopped
    use_up(2)
    assert override.plans.stopped
    opgraft.disable(name=override.name)
    opgraft.enable(name=override.name)
    assert override.plans.stopped


# ------------------------------------------------------------------ unplanned


def test_calls_that_are_not_worth_python_run_native_until_they_are_recorded(
    register: Register,
) -> None:
    override = register(unplanned=when.numel("self") >= 100)
    x = torch.randn(4, 8)
    torch.testing.assert_close(softmax(x).sum(-1), torch.ones(4))
    assert (override.hits, override.misses) == (0, 1)
    for _ in range(3):
        assert torch.equal(softmax(x), 2 * x)
    assert (override.hits, override.misses, override.plans.hits) == (3, 1, 1)
    big = torch.randn(10, 10)
    assert torch.equal(softmax(big), 2 * big)


def test_unplanned_calls_that_cannot_be_recorded(register: Register) -> None:
    override = register(with_item, unplanned=when.numel("self") >= 100)
    small, big = torch.ones(4, 8), torch.ones(10, 10)
    for _ in range(plans.MAX_ATTEMPTS + 3):
        softmax(small)
        softmax(big)
    assert override.hits == 2 * plans.MAX_ATTEMPTS + 3
    assert override.misses == 3


@pytest.mark.parametrize("cond", [None, when.ndim("self") == 2, lambda self, dim, _: True])
def test_without_plans_unplanned_is_a_part_of_the_condition(
    register: Register, monkeypatch: pytest.MonkeyPatch, cond: Any
) -> None:
    monkeypatch.setenv("OPGRAFT_PLANS", "0")
    keywords = {} if cond is None else {"cond": cond}
    override = register(unplanned=when.numel("self") >= 100, **keywords)
    softmax(torch.randn(4, 8))
    softmax(torch.randn(10, 10))
    assert (override.hits, override.misses) == (1, 1)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"launch_plan": False, "unplanned": when.ndim("self") == 2}, "launch_plan=True"),
        ({"unplanned": lambda self, dim, _: True}, "an expression of opgraft.when"),
        ({"unplanned": when.ndim("nobody") == 2}, "nobody"),
        ({"unplanned": when.numel("self") < 2**70}, "only Python can evaluate"),
    ],
)
def test_wrong_unplanned(register: Register, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        register(**keywords)


# ------------------------------------------------------------------ switching off


def test_disabling_drops_the_plans(register: Register) -> None:
    override = register(name="planned")
    x = torch.randn(4, 8)
    warm(override, x)
    opgraft.disable(name="planned")
    assert len(override.plans) == 0
    torch.testing.assert_close(softmax(x).sum(-1), torch.ones(4))
    opgraft.enable(name="planned")
    warm(override, x)
    assert torch.equal(replays(override, lambda: softmax(x)), 2 * x)


def test_removing_and_replacing_drop_the_plans(register: Register) -> None:
    override = register(name="planned")
    x = torch.randn(4, 8)
    warm(override, x)
    after = register(with_writing_to_an_argument, name="planned")
    assert len(override.plans) == 0
    softmax(x)
    assert (override.plans.hits, after.hits) == (0, 1)
    after.remove()
    torch.testing.assert_close(softmax(x).sum(-1), torch.ones(4))


def test_a_scope_switches_replays_off_but_keeps_the_plans(register: Register) -> None:
    override = register()
    x = torch.randn(4, 8)
    warm(override, x)
    with opgraft.disabled():
        torch.testing.assert_close(softmax(x).sum(-1), torch.ones(4))
    assert torch.equal(replays(override, lambda: softmax(x)), 2 * x)


def test_a_plan_that_was_being_recorded_while_it_was_dropped_is_not_installed(
    register: Register,
) -> None:
    drops: list[bool] = []

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if drops:
            opgraft.disable(name="planned")
            opgraft.enable(name="planned")
        return doubled(self, dim, half_to_float)

    override = register(impl, name="planned")
    x = torch.randn(4, 8)
    softmax(x)
    softmax(x)
    drops.append(True)
    softmax(x)
    assert len(override.plans) == 0


def test_memory_of_dropped_plans_is_freed(register: Register) -> None:
    override = register(name="planned")
    x = torch.randn(4, 8)

    class Kept:
        alive = 0

        def __init__(self) -> None:
            Kept.alive += 1

        def __del__(self) -> None:
            Kept.alive -= 1

    original = Plans.begin

    def begin(self: Plans, *arguments: Any) -> Any:
        recording = original(self, *arguments)
        recording.keep_alive.append(Kept())
        return recording

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plans, "begin", begin)
        for _ in range(5):
            warm(override, x)
            assert Kept.alive >= 1
            opgraft.disable(name="planned")
            opgraft.enable(name="planned")
    gc.collect()
    assert Kept.alive == 0


# ------------------------------------------------------------------ shadow mode, traces


def test_shadow_mode_compares_replays(register: Register, caplog: pytest.LogCaptureFixture) -> None:
    override = register()  # what it gives is not native's
    x = torch.randn(4, 8)
    warm(override, x)
    with opgraft.shadow(rate=1.0), caplog.at_level(logging.WARNING, "opgraft"):
        out = replays(override, lambda: softmax(x))
    assert torch.equal(out, 2 * x)
    assert (override.shadowed, override.mismatches) == (1, 1)
    assert "differs from native" in caplog.text
    replays(override, lambda: softmax(x))
    assert override.shadowed == 1


def test_shadow_mode_keeps_a_wrong_plan_from_its_calls(register: Register) -> None:
    override = register()
    x = torch.randn(4, 8)
    warm(override, x)
    with opgraft.shadow(rate=1.0, on_mismatch="quarantine"):
        with pytest.warns(opgraft.OverrideWarning, match="differs"):
            out = replays(override, lambda: softmax(x))
        torch.testing.assert_close(out.sum(-1), torch.ones(4))  # native's, in its place
    out = replays(override, lambda: softmax(x), times=0)
    torch.testing.assert_close(out.sum(-1), torch.ones(4))


def test_what_is_recorded_in_shadow_mode_is_replayed_in_it_and_after(register: Register) -> None:
    override = register()
    x = torch.randn(4, 8)
    with opgraft.shadow(rate=1.0):
        warm(override, x)
        replays(override, lambda: softmax(x))
        assert override.shadowed == 4
    assert torch.equal(replays(override, lambda: softmax(x)), 2 * x)


def test_a_trace_sees_replays_and_calls_that_wait_for_a_plan(register: Register) -> None:
    override = register(unplanned=when.numel("self") >= 100)
    x = torch.randn(4, 8)
    with opgraft.trace() as trace:
        softmax(x)  # native, until there is a plan
        warm(override, x, runs=2)
        replays(override, lambda: softmax(x))
        with opgraft.disabled():
            softmax(x)
    (row,) = trace
    (seen,) = row.overrides
    assert (row.calls, row.native_calls, seen.hits) == (5, 2, 3)
    assert any("until its launch plan is recorded" in miss.reason for miss in seen.misses)


# ------------------------------------------------------------------ fill, errors, profiler


def test_no_replay_while_uninitialised_memory_is_to_be_filled(register: Register) -> None:
    override = register(doubled)
    x = torch.randn(4, 8)
    warm(override, x)
    torch.use_deterministic_algorithms(True)
    try:
        softmax(x)
        assert (override.plans.hits, override.hits) == (0, 4)
    finally:
        torch.use_deterministic_algorithms(False)
    replays(override, lambda: softmax(x))


def test_no_replay_while_launch_hooks_of_triton_are_set(register: Register) -> None:
    knobs = pytest.importorskip("triton.knobs")
    core = loader.in_use()
    assert core is not None

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if (recorder := core.current_recorder()) is not None:
            triton_launches.watch_hooks()  # as a Triton launch does
            recorder.watch_hooks()
        return doubled(self, dim, half_to_float)

    def hook(metadata: Any) -> None:
        raise AssertionError("nothing is launched by Triton")

    override = register(impl)
    x = torch.randn(4, 8)
    warm(override, x)
    replays(override, lambda: softmax(x))
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        try:
            assert torch.equal(replays(override, lambda: softmax(x), times=0), 2 * x)
        finally:
            chain.remove(hook)
        replays(override, lambda: softmax(x))
    with knobs.runtime.scope():
        knobs.runtime.launch_exit_hook = hook  # another than the chain of hooks that was there
        replays(override, lambda: softmax(x), times=0)
    assert torch.equal(replays(override, lambda: softmax(x)), 2 * x)


def test_an_op_inside_a_plan_that_raises(register: Register) -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return torch.cat([self, self]).narrow(0, 0, len(self)).clone()

    override = register(impl)
    x = torch.randn(4, 8)
    warm(override, x)

    def failing(tensors: Any, dim: int) -> Any:
        raise RuntimeError("no cat today")

    cat = opgraft.register_op_override("aten", "cat", "CPU", failing, unconditional_override=True)
    with pytest.raises(RuntimeError, match="no cat today"):
        softmax(x)
    cat.remove()
    assert torch.equal(replays(override, lambda: softmax(x)), x)


def test_a_plan_whose_op_changed_its_mind_goes_back_to_python(register: Register) -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        out = torch.empty_like(self)
        probes.scale(self.clone(), out, 2.0)
        return out

    override = register(impl)
    x = torch.randn(4, 8)
    warm(override, x)

    behaves = True

    def clone(self: torch.Tensor, *, memory_format: Any) -> torch.Tensor:
        return torch.empty_like(self).copy_(self) if behaves else torch.ones(4, 7)

    opgraft.register_op_override("aten", "clone", "CPU", clone, unconditional_override=True)
    for _ in range(3):
        replays(override, lambda: softmax(x))
    behaves = False  # the contract is checked no more
    softmax(x)
    assert len(override.plans) == 0
    softmax(x)
    assert (override.plans.recordings, override.hits) == (2, 8)


def test_out_of_memory_is_an_error_and_the_plan_stays() -> None:
    program = """
import resource, torch, opgraft
from tests import probes
def impl(self, dim, half_to_float):
    torch.empty(2**28, dtype=torch.uint8)[:1].zero_()
    out = torch.empty_like(self)
    probes.scale(self, out, 2.0)
    return out
override = opgraft.register_op_override(
    "aten", "_softmax", "CPU", impl, unconditional_override=True, launch_plan=True
)
x = torch.randn(4, 8)
for _ in range(4):
    torch.softmax(x, -1)
assert override.plans.hits == 1, override.plans
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2**27
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
try:
    torch.softmax(x, -1)
except RuntimeError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert torch.equal(torch.softmax(x, -1), 2 * x)
assert (override.plans.hits, override.hits) == (2, 5), override.plans
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "tried to allocate 268435456 bytes" in done.stdout, done.stdout


def test_the_torch_profiler_sees_the_op(register: Register) -> None:
    override = register()
    x = torch.randn(4, 8)
    warm(override, x)
    with torch.profiler.profile() as profile:
        replays(override, lambda: softmax(x))
    assert "aten::_softmax" in {event.name for event in profile.events()}


# ------------------------------------------------------------------ threads, autograd, fork


def test_a_replay_on_a_thread_that_python_never_saw(register: Register) -> None:
    override = register()
    x = torch.randn(4, 8)
    warm(override, x)
    core = loader.in_use()
    assert core is not None
    before = override.plans.hits
    probes.call_on_a_thread("aten::_softmax", [x], (-1, False), 10)
    assert override.plans.hits == before + 10


def test_a_replay_needs_no_gil(register: Register) -> None:
    override = register()
    x = torch.randn(4, 8)
    warm(override, x)
    core = loader.in_use()
    assert core is not None
    assert probes.needs_no_gil("aten::_softmax", [x], (-1, False))
    assert override.plans.hits == 1


def test_a_backward_op_in_the_autograd_engine() -> None:
    threads: set[int] = set()

    def backward(
        grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
    ) -> torch.Tensor:
        threads.add(threading.get_ident())
        out = torch.empty_like(output)
        probes.scale(grad_output.contiguous(), out, 3.0)
        return out

    override = opgraft.register_op_override(
        "aten",
        "_softmax_backward_data",
        "CPU",
        backward,
        unconditional_override=True,
        launch_plan=True,
    )
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(4):
        x.grad = None
        softmax(x).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((4, 8), 3.0))
    assert override.plans.hits == 1
    assert threads


def test_threads_changing_shapes_evictions_and_toggling(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 calls of random shapes: every result is right, and memory stays what it is."""
    monkeypatch.setattr(plans, "MAX_PLANS", 8)
    monkeypatch.setattr(plans, "REPLAYS_PER_RECORDING", 1)
    override = register(with_a_temporary, name="planned")
    threads, calls = 8, 5_000
    errors: list[BaseException] = []
    replayed: list[int] = []
    memory: list[int] = []
    barrier = threading.Barrier(threads + 1)
    halves = 2

    def call(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(calls // threads):
            # A few shapes come often, and the rest seldom.
            x = torch.randn(2, rng.randint(1, 6) if rng.random() < 0.7 else rng.randint(7, 200))
            out = softmax(x)
            mine = torch.equal(out, 2 * x)
            native = torch.allclose(out.sum(-1), torch.ones(2))
            assert mine or native, (x, out)

    def work(seed: int) -> None:
        try:
            for half in range(halves):
                call(seed + half * threads)
                barrier.wait(120)
                barrier.wait(120)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        for _ in range(halves):
            while barrier.n_waiting < threads and not errors:
                time.sleep(0.05)
                replayed.append(override.plans.hits)
                opgraft.disable(name="planned")
                opgraft.enable(name="planned")
            barrier.wait(120)
            gc.collect()
            memory.append(resident_bytes())
            barrier.wait(120)
    for worker in workers:
        worker.join()
    assert not errors, errors
    assert sum(replayed) > 0
    assert override.plans.recordings > 0
    assert len(override.plans) <= 8
    assert memory[1] - memory[0] < 16 * 2**20, memory


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_forked_child_replays_nothing_of_its_parent_and_records_anew(register: Register) -> None:
    override = register()
    x = torch.randn(4, 8)
    warm(override, x)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # OpenMP's pool stayed behind; native kernels wait for it
            assert len(override.plans) == 0
            for _ in range(2):
                assert torch.equal(replays(override, lambda: softmax(x), times=0), 2 * x)
            assert torch.equal(replays(override, lambda: softmax(x)), 2 * x)
            assert len(override.plans) == 1
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(replays(override, lambda: softmax(x)), 2 * x)


def test_the_end_of_the_interpreter_with_replaying_threads() -> None:
    # Threads of C++: stock torch does not survive daemon threads of Python here.
    program = """
import ctypes, threading, time, torch, opgraft
from tests import probes
from tests.plan.conftest import doubled
override = opgraft.register_op_override(
    "aten", "_softmax", "CPU", doubled, unconditional_override=True, launch_plan=True
)
x = torch.randn(4, 8)
def forever():
    probes.call_on_a_thread("aten::_softmax", [x], (-1, False), 10**9)
for _ in range(2):
    threading.Thread(target=forever, daemon=True).start()
while override.plans.hits < 1000:
    time.sleep(0.01)
libc = ctypes.CDLL(None)  # torch's own static destructors are none of ours
libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ warm-up, prediction


def test_warmup_records(register: Register) -> None:
    override = register()
    x = torch.randn(4, 8)
    report = opgraft.warmup("aten::_softmax", x, -1, False)
    assert "1 plan, " in str(report)
    ((_, hits),) = ((each.override, each.hits) for each in report)
    assert hits == override.hits == 5
    opgraft.warmup(torch.softmax, x, 0)
    assert len(override.plans) == 2
    assert torch.equal(replays(override, lambda: softmax(x)), 2 * x)


def test_warmup_of_what_nothing_overrides() -> None:
    assert str(opgraft.warmup("aten::_softmax", torch.ones(2), 0, False)) == "no override ran"


def test_warmup_of_no_op() -> None:
    with pytest.raises(RegistrationError, match="there is no op"):
        opgraft.warmup("aten::no_such_op")


@pytest.mark.usefixtures("small_tables")
def test_explain_tells_of_plans(register: Register) -> None:
    def verdict(x: torch.Tensor) -> str:
        (found,) = opgraft.explain("aten::_softmax", x, -1, False).verdicts
        return ("takes: " if found.takes else "") + (found.plan or found.reason)

    override = register(unplanned=when.numel("self") >= 10)
    small, big = torch.ones(2, 2), torch.ones(4, 4)
    assert verdict(small) == (
        "declines: it would run in Python until its launch plan is recorded, and only "
        "when.numel('self') >= 10 is worth running in Python"
    )
    assert verdict(big) == "takes: in Python until its launch plan is recorded"
    for _ in range(3):
        softmax(big)
    assert verdict(big) == "takes: by a launch plan"
    assert len(override.plans) == 1
    for size in range(20, 40):
        for _ in range(3):
            softmax(torch.ones(1, size))
    assert "recording has stopped" in verdict(small)
    assert verdict(torch.ones(9, 9)).startswith("takes: in Python: it has no launch plan")


def test_explain_tells_why_there_is_no_plan(register: Register) -> None:
    register(with_random_numbers)
    for _ in range(plans.MAX_ATTEMPTS + 1):
        softmax(torch.ones(2, 2))
    report = str(opgraft.explain("aten::_softmax", torch.ones(2, 2), -1, False))
    assert "takes it, in Python: no launch plan can be recorded, it calls aten::rand_like" in report


def test_explain_tells_that_no_key_can_hold_a_call() -> None:
    def cat(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
        return torch.stack(tensors, dim).flatten(dim, dim + 1)

    override = opgraft.register_op_override(
        "aten", "cat", "CPU", cat, unconditional_override=True, launch_plan=True
    )
    tensors = [torch.ones(2)] * 200
    for _ in range(5):
        torch.cat(tensors)
    assert (override.hits, override.plans.recordings) == (5, 0)
    report = str(opgraft.explain("aten::cat", tensors))
    assert "takes it, in Python: no launch plan can be recorded, an argument is of a kind" in report
    assert "until its launch plan is recorded" in str(opgraft.explain("aten::cat", tensors[:3]))
