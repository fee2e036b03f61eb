"""`explain` and `trace` on a GPU: torch's own choices there, no waiting, the right streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft import when
from tests import ops

pytestmark = pytest.mark.gpu

ATTENTION = ("cudnn", "flash", "efficient")


@pytest.fixture
def attention() -> dict[str, opgraft.Override]:
    """An override of each fused attention op that declines every call."""

    def impl(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it ran")

    return {
        name: opgraft.register_op_override(
            "aten",
            f"_scaled_dot_product_{name}_attention",
            "CUDA",
            impl,
            cond=when.size("query", 0) == 12345,
            name=name,
        )
        for name in ATTENTION
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}])
@pytest.mark.parametrize("head", [64, 128, 80])
def test_attention_reaches_the_backend_that_the_real_call_reaches(
    dtype: torch.dtype,
    requires_grad: bool,
    options: dict[str, Any],
    head: int,
    attention: dict[str, opgraft.Override],
) -> None:
    q, k, v = (
        torch.randn(2, 4, 256, head, device="cuda", dtype=dtype, requires_grad=requires_grad)
        for _ in range(3)
    )
    report = opgraft.explain(F.scaled_dot_product_attention, q, k, v, **options)
    with opgraft.trace() as t:
        F.scaled_dot_product_attention(q, k, v, **options)
    assert {each.op for each in report.reached} == {row.op for row in t}


def test_nothing_waits_for_the_gpu(attention: dict[str, opgraft.Override]) -> None:
    q = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    state = torch.cuda.get_rng_state()
    torch.cuda.set_sync_debug_mode("error")
    try:
        report = opgraft.explain(
            lambda q: F.scaled_dot_product_attention(model(q), q, q, dropout_p=0.1),
            q,
            backward=True,
        )
        assert report.complete
        assert opgraft.explain(lambda q: q.sum().item(), q).complete is False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert model.weight.grad is None
    assert q.grad is None


def test_rms_norm_forward_and_backward() -> None:
    forward = opgraft.register_op_override(
        "aten", "_fused_rms_norm", "CUDA", ops.rms_norm, cond=when.size("input", -1) >= 1024
    )
    backward = opgraft.register_op_override(
        "aten",
        "_fused_rms_norm_backward",
        "CUDA",
        lambda *args: args,
        cond=when.size("input", -1) >= 1024,
    )
    x = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    report = opgraft.explain(F.rms_norm, x, (1024,), weight, backward=True)
    assert report.winners == (forward, backward)
    mixed = opgraft.explain(F.rms_norm, x, (1024,), weight.detach().float())
    assert mixed.winners == ()
    assert "give the weight the input's dtype" in str(mixed)
    with torch.autocast("cuda", torch.bfloat16):
        mixed = opgraft.explain(F.rms_norm, x, (1024,), weight.detach().float())
        assert mixed.winners == ()


def test_a_backward_on_the_engines_threads_is_seen() -> None:
    def impl(
        grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
    ) -> torch.Tensor:
        return (grad_output - (grad_output * output).sum(dim, keepdim=True)) * output

    opgraft.register_op_override(
        "aten", "_softmax_backward_data", "CUDA", impl, unconditional_override=True
    )
    loss = torch.softmax(torch.randn(4, 8, device="cuda", requires_grad=True), -1).square().sum()
    with opgraft.trace() as t:
        loss.backward()
    assert [(row.op, row.hits) for row in t] == [("aten::_softmax_backward_data", 1)]


def test_a_profile_shows_the_override() -> None:
    opgraft.register_op_override(
        "aten", "_softmax", "CUDA", ops.softmax, unconditional_override=True, name="mine"
    )
    x = torch.randn(4, 8, device="cuda")
    with torch.profiler.profile() as profile:
        torch.softmax(x, -1)
    assert "opgraft: mine [aten::_softmax]" in {event.name for event in profile.events()}
