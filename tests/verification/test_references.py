"""The references of attention, against PyTorch's own attention in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from opgraft.ops.schema import Call, resolve
from opgraft.verification.reference import differentiable, errors, reference

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend(causal: str) -> Attend:
    """Of `[batch, heads, length, dim]`, causal aligned at the `"top left"`, `"bottom right"`."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        diagonal = {"": q.size(-2) + k.size(-2), "top left": 0}.get(causal, k.size(-2) - q.size(-2))
        seen = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(diagonal)
        mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return function


def lengths_first(function: Attend) -> Attend:
    return lambda q, k, v: function(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def inputs(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes]


def check(forward: Call, backward: Call, function: Attend) -> None:
    """Both are what `function` and its derivative are in float64."""
    wide = [forward.named[name].double().requires_grad_() for name in ("query", "key", "value")]
    out = function(*wide)
    grad = backward.named.get("grad_out", backward.named.get("grad_out_"))
    assert grad is not None
    gradients = torch.autograd.grad(out, wide, grad.double())
    found = reference(forward)
    assert found.what == "attention by its formula in float64"
    torch.testing.assert_close(found.outputs[0], out)
    for mine, theirs in zip(reference(backward).outputs[:3], gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [0, 2])
def test_cudnn_attention(batch: int, causal: bool) -> None:
    q, k, v = inputs((batch, 4, 5, 8), (batch, 2, 7, 8), (batch, 2, 7, 8))
    forward = resolve("aten::_scaled_dot_product_cudnn_attention")
    backward = resolve("aten::_scaled_dot_product_cudnn_attention_backward")
    state = (q, q, q, None, None, None, None, None, 5, 7, 0.0, causal)
    check(
        forward.bind((q, k, v, None, True, 0.0, causal), {}),
        backward.bind((torch.randn_like(q), q, k, v, *state[1:]), {}),
        attend("top left" if causal else ""),
    )


def test_a_bias_goes_with_its_batch() -> None:
    q, k, v = inputs(*[(2, 3, 5, 8)] * 3)
    bias = torch.randn(2, 3, 5, 5)
    forward = resolve("aten::_scaled_dot_product_efficient_attention")
    found = reference(forward.bind((q, k, v, bias, True), {})).outputs[0]
    wide = (t.double() for t in (q, k, v))
    torch.testing.assert_close(
        found, F.scaled_dot_product_attention(*wide, attn_mask=bias.double())
    )


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_aligns_causal_at_the_bottom_right(causal: bool) -> None:
    q, k, v = inputs((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    grad = torch.randn_like(q)
    forward = resolve("aten::_flash_attention_forward")
    backward = resolve("aten::_flash_attention_backward")
    check(
        forward.bind((q, k, v, None, None, 5, 7, 0.0, causal, False), {}),
        backward.bind((grad, q, k, v, q, q, None, None, 5, 7, 0.0, causal, q, q), {}),
        lengths_first(attend("bottom right" if causal else "")),
    )


def test_sequences_laid_end_to_end() -> None:
    q, k, v, grad = inputs(*[(8, 2, 8)] * 4)
    ends = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    one = lengths_first(attend("bottom right"))

    def each(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = [slice(0, 3), slice(3, 4), slice(4, 8)]
        return torch.cat([one(*(t[part][None] for t in (q, k, v)))[0] for part in parts])

    forward = resolve("aten::_flash_attention_forward")
    backward = resolve("aten::_flash_attention_backward")
    check(
        forward.bind((q, k, v, ends, ends, 4, 4, 0.0, True, False), {}),
        backward.bind((grad, q, k, v, q, q, ends, ends, 4, 4, 0.0, True, q, q), {}),
        each,
    )


@pytest.mark.parametrize("op", ["cudnn", "flash", "efficient"])
def test_what_is_differentiated_is_the_formula(op: str) -> None:
    """None of these ops has a kernel for float64, so native's gradients were their own measure."""
    q, k, v = (each.double().requires_grad_() for each in inputs(*[(2, 4, 5, 8)] * 3))
    forward = resolve(f"aten::_scaled_dot_product_{op}_attention")
    arguments = {"query": q, "key": k, "value": v, "attn_bias": None, "compute_log_sumexp": True}
    call = forward.bind(
        (), {a.name: arguments[a.name] for a in forward.arguments if a.name in arguments}
    )
    out = F.scaled_dot_product_attention(q, k, v)
    found = differentiable(call)
    torch.testing.assert_close(found, out)
    grads = (torch.autograd.grad(each.sum(), (q, k, v)) for each in (found, out))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_subnormal_numbers_keep_their_first_bits_alone(dtype: torch.dtype) -> None:
    exact = torch.full((4,), torch.finfo(dtype).smallest_normal / 2, dtype=dtype)
    kept, _ = errors(exact * 0.997, exact, exact)
    flushed, _ = errors(exact * 0, exact, exact)
    assert kept.within(2.0) and not flushed.within(2.0)
