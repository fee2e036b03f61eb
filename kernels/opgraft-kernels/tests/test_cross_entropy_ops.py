"""The native kernels of the two ops that cross-entropy is made of: they serve until others can."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import opgraft
from opgraft_kernels.cross_entropy import ops, triton_kernels
from opgraft_kernels.cross_entropy.overrides import backward_condition, register
from opgraft_kernels.cross_entropy.samples import backward_samples, forward_samples

REDUCTIONS = ("none", "mean", "sum")
TRITON = (triton_kernels.forward, triton_kernels.backward)
OPTIONS = list(itertools.product(REDUCTIONS, (0.0, 0.3, 1.0), (False, True), (-100, 2)))


@pytest.fixture(params=[2**24, 20], ids=["at once", "some rows at a time"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_CHUNK", request.param)


def _loss_and_gradient(x: torch.Tensor, target: torch.Tensor, **options: Any) -> Any:
    x = x.detach().requires_grad_()
    loss = F.cross_entropy(x, target, **options)
    weights = 1 / (1 + torch.arange(loss.numel()).view_as(loss))
    (dx,) = torch.autograd.grad(loss, x, weights.to(loss.dtype))
    return loss.detach(), dx


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("shape", [(7, 9), (9,)], ids=["a matrix", "a row"])
@pytest.mark.parametrize(("reduction", "smoothing", "weighted", "ignored"), OPTIONS)
def test_native_kernels_are_right(
    reduction: str, smoothing: float, weighted: bool, ignored: int, shape: tuple[int, ...]
) -> None:
    """The loss and the gradient of ATen's op, through the override alone."""
    override, *parts = register("CPU")
    for part in parts:
        part.remove()
    x = 4 * torch.randn(shape, dtype=torch.float32)
    target = torch.randint(0, 9, shape[:-1])
    if shape[:-1]:
        target[1] = ignored
    options: dict[str, Any] = {
        "reduction": reduction,
        "label_smoothing": smoothing,
        "ignore_index": ignored,
        "weight": torch.linspace(0.5, 2, 9) if weighted else None,
    }
    ours, hits = _loss_and_gradient(x, target, **options), override.hits
    with opgraft.disabled():
        expected = _loss_and_gradient(x, target, **options)
    # The mean of a single row is native's.
    assert hits == (len(shape) == 2 or reduction != "mean")
    torch.testing.assert_close(ours, expected, equal_nan=True)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_they_return_what_their_metadata_says(dtype: torch.dtype) -> None:
    x, target = torch.randn(5, 9, dtype=dtype), torch.arange(5)
    for reduction in range(3):
        found = ops.cross_entropy(x, target, None, reduction, -100, 0.1, dtype=dtype)
        on_meta = torch.ops.opgraft_kernels._cross_entropy(
            x.to("meta"), target.to("meta"), None, reduction, -100, 0.1, dtype=dtype
        )
        loss, lse, total = found
        dx = ops.cross_entropy_backward(loss, x, target, None, lse, total, reduction, -100, 0.1)
        assert (dx.shape, dx.dtype, dx.stride()) == (x.shape, x.dtype, x.stride())
        assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in on_meta]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_kernels_agree_with_them(direction: str) -> None:
    """With the statistics, too: plans of workers are compared with these before they serve.

    Rows that are read in blocks are among the samples.
    """
    samples = {"forward": forward_samples, "backward": backward_samples}[direction]
    native = {"forward": ops.cross_entropy, "backward": ops.cross_entropy_backward}[direction]
    compared = 0
    for sample in samples(torch.device("cpu")):
        x = sample["self"]
        is_slow = x.numel() > 2**14 and x.dtype == torch.float16
        if is_slow or x.stride(-1) != 1:
            continue
        ours = getattr(triton_kernels, direction)(**sample)
        expected = native(**sample)
        is_half = sample["self"].dtype == torch.float16
        rtol, atol = (2e-3, 1e-4) if is_half else (1e-5, 1e-5)
        torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol, equal_nan=True)
        compared += 1
    assert compared > 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("kernels", [(ops.cross_entropy, ops.cross_entropy_backward), TRITON])
@pytest.mark.parametrize("ignored", [1, 6])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", range(3))
def test_rows_whose_classes_have_no_weight_are_as_natively(
    reduction: int, smoothing: float, ignored: int, kernels: Any
) -> None:
    """Their mean is 0 / 0, whatever smoothing adds of the other classes."""
    forward, backward = kernels
    x = torch.randn(6, 7, requires_grad=True)
    target = torch.tensor([0, 1, 2, 0, 1, 2])
    target[:ignored] = -100
    weight = torch.tensor([0.0, 0, 0, 1, 2, 3, 4])
    options = (reduction, -100, smoothing)
    expected = torch.ops.aten.cross_entropy_loss(x, target, weight, *options)
    grad = torch.rand_like(expected)
    (expected_dx,) = torch.autograd.grad(expected, x, grad)
    x = x.detach()
    loss, *kept = forward(x, target, weight, *options, dtype=x.dtype)
    dx = backward(grad, x, target, weight, *kept, *options)
    torch.testing.assert_close((loss, dx), (expected.detach(), expected_dx), equal_nan=True)


def test_a_scaled_gradient_does_not_overflow() -> None:
    """Autocast's loss is of float32, and so is the gradient that a scaler makes larger."""
    x, target = torch.randn(4, 8).half().requires_grad_(), torch.tensor([0, 1, 2, -100])
    weight = torch.linspace(0.5, 2, 8).half()
    forward = getattr(torch.ops, ops.NAMESPACE)._cross_entropy
    forward(x, target, weight, 1, -100, 0.1, dtype=torch.float32)[0].mul(2.0**17).backward()
    y = x.detach().float().requires_grad_()
    F.cross_entropy(y, target, weight.float(), label_smoothing=0.1).mul(2.0**17).backward()
    assert x.grad is not None and y.grad is not None
    assert x.grad.dtype == torch.float16
    torch.testing.assert_close(x.grad, y.grad.half())


@pytest.mark.parametrize("reduction", [ops.MEAN, 2])
def test_a_gradient_of_a_sum_is_one_number(reduction: int) -> None:
    """The kernel reads a gradient for each row, of which there would be too few."""
    x, target = torch.randn(4, 8), torch.arange(4)
    _, *kept = ops.cross_entropy(x, target, None, reduction, -100, 0.0, dtype=x.dtype)
    arguments = dict(zip(("statistics", "mass"), kept, strict=True)) | {
        **{"self": x, "target": target, "weight": None, "reduction": reduction},
        **{"ignore_index": -100, "label_smoothing": 0.0},
    }
    condition = backward_condition("CPU")
    assert condition.holds({"grad_loss": torch.ones(()), **arguments})
    assert not condition.holds({"grad_loss": torch.ones(2), **arguments})


HIT = """
import sys, torch, torch.nn.functional as F
from opgraft_kernels.cross_entropy.overrides import register
override, *parts = register("CPU")
for part in parts:
    part.remove()
x = torch.randn(4, 8, requires_grad=True)
F.cross_entropy(x, torch.tensor([0, 1, 2, 3])).backward()
print(override.hits, x.grad is not None, "triton" in sys.modules)
"""


def test_a_hit_imports_no_triton() -> None:
    """The ops that compute do, where they have no launch plan."""
    done = subprocess.run([sys.executable, "-c", HIT], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "True", "False"], done.stderr[-2000:]
