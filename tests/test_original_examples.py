"""The two examples that opgraft was designed for, unchanged but for an import."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft import triton_utils


def triton_rms_norm_forward(
    input: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel of the library's own that the snippets stand in front of."""
    from tests.plain_triton_kernel import rms_norm_forward

    return rms_norm_forward(input, weight, eps)


def _triton_fused_rms_norm(dispatch_keys, input, normalized_shape, weight, eps):  # type: ignore[no-untyped-def]
    if eps is None:
        eps = torch.finfo(input.dtype).eps
    return triton_rms_norm_forward(input, weight, eps)


def _smart_rms_norm(dispatch_keys, input, normalized_shape, weight, eps):  # type: ignore[no-untyped-def]
    rows = input.numel() // input.shape[-1]
    if rows < 4096:
        return torch.ops.aten._fused_rms_norm.default(input, normalized_shape, weight, eps)
    return _triton_fused_rms_norm(dispatch_keys, input, normalized_shape, weight, eps)


def reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and gradients in float64."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    out.sin().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return out.detach(), x.grad, weight.grad


def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    """Output and gradients by `F.rms_norm`."""
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    out = F.rms_norm(x, (x.shape[-1],), weight, eps)
    out.sin().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return out.detach(), x.grad, weight.grad


def test_the_first_snippet_takes_every_call(device: torch.device, dispatch_key: str) -> None:
    override = triton_utils.register_op_override(
        "aten",
        "_fused_rms_norm",
        dispatch_key,
        _triton_fused_rms_norm,
        unconditional_override=False,
    )
    x, weight = torch.randn(8, 64, device=device), torch.randn(64, device=device)
    with torch.no_grad():
        out = F.rms_norm(x, (64,), weight, 1e-6)
    assert override.hits == 1
    torch.testing.assert_close(out.double(), reference(x, weight, 1e-6)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [8, 4096])
def test_the_second_snippet_falls_back_by_calling_the_same_op(
    rows: int, device: torch.device, dispatch_key: str
) -> None:
    override = triton_utils.register_op_override(
        "aten", "_fused_rms_norm", dispatch_key, _smart_rms_norm, unconditional_override=False
    )
    x, weight = torch.randn(rows, 16, device=device), torch.randn(16, device=device)
    with torch.no_grad():
        out = F.rms_norm(x, (16,), weight, 1e-6)
    assert override.hits == 1
    assert override.fallbacks == (1 if rows < 4096 else 0)
    torch.testing.assert_close(out.double(), reference(x, weight, 1e-6)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [8, 4096])
def test_the_second_snippet_trains(rows: int, device: torch.device, dispatch_key: str) -> None:
    override = triton_utils.register_op_override(
        "aten", "_fused_rms_norm", dispatch_key, _smart_rms_norm, unconditional_override=False
    )
    x, weight = torch.randn(rows, 16, device=device), torch.randn(16, device=device)
    expected = reference(x, weight, 1e-6)
    for got, wanted in zip(run(x, weight, 1e-6), expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-5)
    # On CPU the op is composite: what is differentiated keeps the composite derivative.
    assert override.hits == (1 if dispatch_key == "CUDA" else 0)
    if dispatch_key == "CPU":
        assert "composite" in str(
            opgraft.explain("aten::_fused_rms_norm", x.requires_grad_(), [16], weight, 1e-6)
        )
