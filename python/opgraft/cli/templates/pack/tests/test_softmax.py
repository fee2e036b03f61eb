"""The softmax kernel under `torch.softmax`: right where it runs, and out of the way elsewhere.

Each test that wants the kernel asserts that it was hit: else it would test PyTorch's own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import opgraft
import pytest
import torch

from my_pack import overrides

# Numbers of columns that are a power of two, and that are not.
SHAPES = [(64, 32), (3, 5, 128), (32, 100), (1, 2048), (33, 257)]


def check(x: torch.Tensor, override: opgraft.Override) -> None:
    """The kernel runs, and each element is as close as arithmetic in float32 can make it."""
    result = torch.softmax(x, -1)
    assert override.hits == 1
    assert result.dtype == x.dtype
    exact = torch.softmax(x.double(), -1)
    assert ((result.double() - exact).abs() <= allowed_error(x.double(), exact, x.dtype)).all()


def allowed_error(x: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rounding may do to each element of a softmax. No luck is in it, as there would be in a
    comparison with the error of another kernel on the same few numbers."""
    # `exp` makes a relative error of the absolute one of its argument, which grows with it. All
    # elements have a share in the sum, by their size. 8: exp, the sum and the division themselves.
    distance = x.max(-1, keepdim=True).values - x
    steps = distance + (exact * distance).sum(-1, keepdim=True) + 8
    of_result = torch.finfo(dtype)
    relative = steps * torch.finfo(torch.float32).eps + of_result.eps
    return exact * relative + of_result.tiny * of_result.eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_right(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, override: opgraft.Override
) -> None:
    torch.manual_seed(0)
    check(torch.randn(shape, device=device).to(dtype) * 4, override)


@pytest.mark.gpu
def test_right_in_bfloat16(override: opgraft.Override) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 1000, device="cuda", dtype=torch.bfloat16)
    check(x, override)


def test_values_that_softmax_must_handle(device: str, override: opgraft.Override) -> None:
    x = torch.zeros(32, 64, device=device)
    x[0, 0], x[1, :], x[2, 3] = 1e4, -float("inf"), float("nan")
    result = torch.softmax(x, -1)
    assert override.hits == 1
    native = opgraft.native("aten::_softmax")(x, -1, False)
    torch.testing.assert_close(result, native, equal_nan=True)


@pytest.mark.parametrize(
    ("x", "dim"),
    [
        (torch.randn(64, 64), 0),
        (torch.randn(64, 64).t(), -1),
        (torch.randn(64, 64, dtype=torch.float64), -1),
        (torch.randn(2, overrides.MAX_COLUMNS + 1), -1),
        (torch.randn(0, 64), -1),
        (torch.randn(()), 0),
    ],
)
def test_other_calls_run_the_native_kernel(
    x: torch.Tensor, dim: int, device: str, override: opgraft.Override
) -> None:
    x = x.to(device)
    torch.testing.assert_close(
        torch.softmax(x, dim), opgraft.native("aten::_softmax")(x, dim, False)
    )
    assert override.hits == 0


def test_training_keeps_the_derivative(device: str, override: opgraft.Override) -> None:
    x = torch.randn(32, 64, device=device, requires_grad=True)
    torch.softmax(x, -1).square().sum().backward()
    assert override.hits == 1
    mine = x.grad
    x.grad = None
    with opgraft.disabled():
        torch.softmax(x, -1).square().sum().backward()
    torch.testing.assert_close(mine, x.grad)


def test_registering_imports_no_triton() -> None:
    program = "import sys, my_pack; my_pack.register(); sys.exit('triton' in sys.modules)"
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0


def test_pyproject_declares_the_ops(override: opgraft.Override) -> None:
    """Or a call of one that it does not declare would not activate the pack."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    file = Path(__file__).resolve().parents[1] / "pyproject.toml"
    groups = tomllib.loads(file.read_text())["project"]["entry-points"]
    declared = groups["opgraft.ops.CUDA"].values()
    assert override.op.replace("::", ":", 1) in declared
    assert override.autograd is None, "with autograd= a pack must declare nothing: docs/packs.md"
