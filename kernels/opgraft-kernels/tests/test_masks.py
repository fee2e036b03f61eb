"""Masks of the row kernels are booleans: from Triton 3.9 on its interpreter takes nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from opgraft_kernels.norms import ops
from opgraft_kernels.norms.triton_kernels import backward, forward

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="about the interpreter")


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[np.dtype[Any]]:
    """The dtypes of the masks that the interpreter loads and stores with."""
    from triton.runtime import interpreter

    found: list[np.dtype[Any]] = []

    def watched(original: Any, position: int) -> Any:
        def call(*arguments: Any) -> Any:
            found.append(arguments[position].dtype)
            return original(*arguments)

        return call

    # load(pointers, mask, other, dtype), store(pointers, value, mask)
    for name, position in (("load", 1), ("store", 2)):
        original = getattr(interpreter._interpreter, name)
        monkeypatch.setattr(interpreter._interpreter, name, watched(original, position))
    return found


@pytest.mark.parametrize("has_mean", [False, True], ids=["rms_norm", "layer_norm"])
@pytest.mark.parametrize("hidden", [60, 1024, 20000], ids=["masked", "whole", "in chunks"])
def test_masks_are_booleans(hidden: int, has_mean: bool, masks: list[np.dtype[Any]]) -> None:
    x, weight = torch.randn(5, hidden), torch.randn(hidden)
    y, dx, dw = torch.empty_like(x), torch.empty_like(x), torch.empty_like(weight)
    rstd = torch.empty(5, 1)
    bias, mean, db = (weight, rstd.clone(), dw.clone()) if has_mean else (None, None, None)
    forward(ops.Forward(x, weight, bias, y, mean, rstd, hidden, 1e-6))
    backward(ops.Backward(y, x, weight, mean, rstd, dx, dw, db, hidden))
    assert set(masks) == {np.dtype(bool)}
