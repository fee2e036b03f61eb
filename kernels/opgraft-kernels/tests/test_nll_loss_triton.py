"""The negative log-likelihood's Triton kernels against float64, by native's own error.

On a machine without a GPU they run in Triton's interpreter (tests/conftest.py).
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import special_inputs
from errors import relative_error

import opgraft
from opgraft import Override
from opgraft_kernels.nll_loss import triton_kernels
from opgraft_kernels.nll_loss.overrides import condition, register

REDUCTIONS = ("none", "mean", "sum")


class Overrides(NamedTuple):
    forward: Override
    backward: Override

    @property
    def hits(self) -> tuple[int, int]:
        return self.forward.hits, self.backward.hits


@pytest.fixture
def overrides(dispatch_key: str) -> Overrides:
    return Overrides(*register(dispatch_key))


def _log_probabilities(
    rows: int, classes: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.log_softmax(4 * torch.randn(rows, classes, device=device), -1).to(dtype)


def _targets(x: torch.Tensor, ignored: int | None = None) -> torch.Tensor:
    target = torch.randint(x.shape[1], (x.shape[0],), device=x.device)
    if ignored is not None:
        target[::3] = ignored
    return target


def _weight(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 2, x.shape[1], device=x.device).to(x.dtype)


def _both(x: torch.Tensor, target: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """The loss, and the gradient of the log-probabilities."""
    x = x.detach().requires_grad_()
    loss = F.nll_loss(x, target, **options)
    grad = 1 / (1 + torch.arange(loss.numel(), device=loss.device).view_as(loss))
    return loss.detach(), *torch.autograd.grad(loss, x, grad.to(loss.dtype))


def _natively(x: torch.Tensor, target: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    with opgraft.disabled():
        return _both(x, target, **options)


def _check(overrides: Overrides, x: torch.Tensor, target: torch.Tensor, **options: Any) -> None:
    """What native promises, and at most twice its error."""
    before = overrides.hits
    ours = _both(x, target, **options)
    assert overrides.hits == (before[0] + 1, before[1] + 1)
    natives = _natively(x, target, **options)
    if options.get("weight") is not None:
        options["weight"] = options["weight"].double()
    rights = _natively(x.double(), target, **options)
    for one, native, right in zip(ours, natives, rights, strict=True):
        assert one.shape == native.shape and one.dtype == native.dtype
        assert one.stride() == native.stride()
        assert (
            relative_error(one, right)
            <= 2 * relative_error(native, right) + torch.finfo(x.dtype).eps
        )


def _check_equal(
    overrides: Overrides, x: torch.Tensor, target: torch.Tensor, **options: Any
) -> None:
    """The values that native returns, those included that are no numbers."""
    before = overrides.hits
    ours = _both(x, target, **options)
    assert overrides.hits == (before[0] + 1, before[1] + 1)
    torch.testing.assert_close(ours, _natively(x, target, **options), equal_nan=True)


# ---------------------------------------------------------------------------- what is computed


# One block of the gradient holds all, some rows, one, or a part of one, at any place; and the sum
# takes one program, or more.
@pytest.mark.parametrize("shape", [(1, 1), (15, 100), (3, 9000), (1, 8193), (5000, 7)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_losses_and_gradients(
    overrides: Overrides,
    reduction: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    x = _log_probabilities(*shape, dtype, device)
    _check(overrides, x, _targets(x), reduction=reduction)


@pytest.mark.parametrize("rows", [40, 2500])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ignored_rows_and_weights(
    overrides: Overrides, reduction: str, weighted: bool, rows: int, device: torch.device
) -> None:
    x = _log_probabilities(rows, 11, torch.float32, device)
    weight = _weight(x) if weighted else None
    for ignored in (-100, 4, 2**40):
        target = _targets(x, ignored)
        _check(overrides, x, target, weight=weight, reduction=reduction, ignore_index=ignored)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_ignored(overrides: Overrides, reduction: str, device: torch.device) -> None:
    x = _log_probabilities(5, 20, torch.float32, device)
    target = torch.full((5,), -100, device=device)
    _check_equal(overrides, x, target, reduction=reduction)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_at_the_ends_of_the_range(
    overrides: Overrides, reduction: str, weighted: bool, device: torch.device
) -> None:
    x = special_inputs.special_rows(40).to(device)
    weight = None
    if weighted:
        weight = _weight(x)
        weight[:3] = torch.tensor([0.0, math.inf, math.nan])
    for column in (0, 1, 2, 20, 39):
        target = torch.full((10,), column, device=device)
        _check_equal(overrides, x, target, weight=weight, reduction=reduction)


@pytest.mark.parametrize("layout", ["sliced rows", "misaligned", "one row"])
def test_layouts(overrides: Overrides, layout: str, device: torch.device) -> None:
    x = special_inputs.LAYOUTS[layout](_log_probabilities(12, 33, torch.float32, device))
    _check(overrides, x, _targets(x).repeat_interleave(2)[::2])


def test_a_gradient_that_is_expanded(overrides: Overrides, device: torch.device) -> None:
    x = _log_probabilities(12, 33, torch.float32, device).requires_grad_()
    target = _targets(x)
    grads = []
    for scope in (opgraft.disabled(), opgraft.when_not_ready("wait")):
        with scope:
            loss = F.nll_loss(x, target, reduction="none").sum()
            grads += torch.autograd.grad(loss, x)
    assert overrides.hits == (1, 1)
    assert torch.equal(*grads)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    overrides = Overrides(*register("CUDA"))
    x = torch.zeros(2**15 + 8, 2**16 + 3, dtype=torch.bfloat16, device="cuda").requires_grad_()
    target = _targets(x)
    (dx,) = torch.autograd.grad(F.nll_loss(x, target, reduction="sum"), x)
    assert overrides.hits == (1, 1)
    assert int(dx.count_nonzero()) == x.shape[0]
    assert bool((dx.gather(1, target[:, None]) == -1).all())


# ---------------------------------------------------------------------------- what is declined


DECLINED: dict[str, Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]] = {
    "float64": lambda x, t: {"self": x.double()},
    "one row": lambda x, t: {"self": x[0], "target": t[0]},
    "no row": lambda x, t: {"self": x[:0], "target": t[:0]},
    "strided classes": lambda x, t: {"self": x.t().contiguous().t()},
    "weights that are spread": lambda x, t: {"weight": torch.ones(2 * x.shape[1])[::2]},
    "a dtype of weights": lambda x, t: {"weight": torch.ones(x.shape[1]).double()},
    "classes of bytes": lambda x, t: {"target": t.to(torch.uint8)},
    "more classes than rows": lambda x, t: {"self": x[1:]},
    "a reduction that is none": lambda x, t: {"reduction": 3},
}


@pytest.mark.parametrize("what", DECLINED)
def test_declined(what: str) -> None:
    x = torch.randn(12, 33)
    call = {"self": x, "target": _targets(x), "weight": None, "reduction": 1, "ignore_index": 0}
    assert condition("forward", "CPU").holds(call)
    assert not condition("forward", "CPU").holds({**call, **DECLINED[what](x, call["target"])})


@pytest.mark.parametrize(
    "changed",
    [
        {"grad_output": torch.ones(12)},
        {"grad_output": torch.ones(1, 1)},
        {"grad_output": torch.ones(()).double()},
        {"reduction": 0},
        {"total_weight": torch.ones(2)},
        {"total_weight": torch.ones(()).double()},
    ],
    ids=str,
)
def test_a_backward_that_is_declined(changed: dict[str, Any]) -> None:
    x = torch.randn(12, 33)
    call = {"self": x, "target": _targets(x), "weight": None, "reduction": 1, "ignore_index": 0}
    call |= {"grad_output": torch.ones(()), "total_weight": torch.ones(())}
    assert condition("backward", "CPU").holds(call)
    assert not condition("backward", "CPU").holds({**call, **changed})


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("reduction", range(3))
def test_the_gradient_of_one_row_has_its_dimension(reduction: int, shape: tuple[int, ...]) -> None:
    call = {"self": torch.randn(1, 33), "target": torch.zeros(1, dtype=torch.int64)}
    call |= {"weight": None, "reduction": reduction, "ignore_index": 0}
    call |= {"grad_output": torch.ones(shape), "total_weight": torch.ones(())}
    is_natives = reduction == 0 and shape == ()
    assert condition("backward", "CPU").holds(call) is not is_natives


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_zeros_have_the_signs_of_natives(
    overrides: Overrides, reduction: str, device: torch.device
) -> None:
    x = torch.tensor([[1.0], [-1.0], [0.0], [-0.0]], device=device).expand(4, 2).contiguous()
    x.requires_grad_()
    target = torch.zeros(4, dtype=torch.int64, device=device)
    weight = torch.tensor([0.0, 1.0], device=device)

    def signs() -> list[torch.Tensor]:
        loss = F.nll_loss(x, target, weight, reduction=reduction)
        grad = torch.tensor([1.0, -1.0, 0.0, -0.0], device=device)[: loss.numel()].view_as(loss)
        return [each.signbit() for each in (loss, *torch.autograd.grad(loss, x, grad))]

    ours = signs()
    assert overrides.hits == (1, 1)
    with opgraft.disabled():
        for mine, native in zip(ours, signs(), strict=True):
            assert torch.equal(mine, native)


# ---------------------------------------------------------------------------- classes that are not


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("wrong", [8, -1, 2**40, -(2**33)])
def test_a_class_out_of_range_is_natives_error(
    overrides: Overrides, wrong: int, device: torch.device
) -> None:
    x = _log_probabilities(4, 8, torch.float32, device)
    target = torch.tensor([0, 1, 2, wrong])
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        F.nll_loss(x, target)
    one = torch.ones(())
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        torch.ops.aten.nll_loss_backward(one, x, target, None, 1, -100, one)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_nothing_is_read_or_written_out_of_bounds(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """On a GPU an assertion fails asynchronously: what the program goes on with is masked."""
    monkeypatch.setattr(triton_kernels, "check_targets", lambda *_: None)
    x = _log_probabilities(4, 8, torch.float32, device)
    target = torch.tensor([3, 2**31, -5, 2**40])
    loss, _ = triton_kernels.forward(x, target, _weight(x), 0, -100)
    assert loss[1:].eq(0).all() and loss[0] > 0
    dx = triton_kernels.backward(torch.ones(4), x, target, _weight(x), 0, -100, torch.ones(()))
    assert dx.nonzero().tolist() == [[0, 3]]


ASSERTS = """
import torch, opgraft
from opgraft_kernels.nll_loss import overrides
overrides._crossover = lambda direction: None
forward, backward = overrides.register("CUDA")
x, target = torch.randn(4, 8, device="cuda"), torch.tensor([0, 1, 2, 3], device="cuda")
one = torch.ones((), device="cuda")
calls = {
    "forward": lambda: torch.ops.aten.nll_loss_forward(x, target, None, 1, -100),
    "backward": lambda: torch.ops.aten.nll_loss_backward(one, x, target, None, 1, -100, one),
}
with opgraft.when_not_ready("wait"):
    for _ in range(3):
        for call in calls.values():
            call()
assert forward.hits == backward.hits == 3
target[2] = 8
calls[DIRECTION]()
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    assert "device-side assert" in str(error), error
    print("asserted")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_class_out_of_range_fails_an_assertion_on_the_gpu(direction: str) -> None:
    program = ASSERTS.replace("DIRECTION", repr(direction))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "asserted" in done.stdout, done.stderr[-2000:]
