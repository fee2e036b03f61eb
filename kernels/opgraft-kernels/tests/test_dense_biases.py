"""FlashAttention-4 with a bias of each head's own, which the copy engine loads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("triton")

from errors import largest_error

import opgraft
from opgraft import when
from opgraft_kernels.attention import cutedsl_kernels, overrides, samples
from opgraft_kernels.attention.cutedsl_tiles import ForwardTile
from opgraft_kernels.attention.cutedsl_tiles import dense_forward_tile as tile_of
from opgraft_kernels.attention.cutedsl_tiles import dense_forward_tiles as tiles_of

HEADS = 4

# ------------------------------------------------------------------ tiles and conditions


def test_programs_walk_where_each_has_several_tiles() -> None:
    """Two stages of everything fit into shared memory, and an output of its own where they walk."""
    assert tile_of(64, 128, 1024, 132) == ForwardTile(192, 128, 132)
    assert tile_of(64, 8, 1024, 132) == ForwardTile(192, 128, 0)
    assert tile_of(80, 128, 1024, 132) == ForwardTile(128, 128, 132)
    assert tile_of(96, 128, 1024, 132) == ForwardTile(128, 128, 132)
    assert tile_of(128, 128, 1024, 132) == ForwardTile(128, 96, 132)
    assert tile_of(128, 16, 1024, 132) == ForwardTile(128, 128, 0)
    assert tiles_of(136, 132) == []


def _named(op: str, *changes: tuple[str, Any], **features: int) -> dict[str, Any]:
    given = {"rows": 2**9, "keys": 2**5, "dim": 64, "for_all_queries": 0, "for_all_heads": 0}
    named, *_ = samples.calls(op, torch.device("cpu"), **{**given, **features})
    return {**named, **dict(changes)}


def _holds(op: str, named: dict[str, Any]) -> bool:
    """Without what is about the device."""
    kind = overrides._CUTEDSL_MASKED
    (found,) = (each for each in kind.ops if each.name == op)
    is_tested = (when.value("is_causal") == 0) & overrides._in_tested_range(found)
    condition = overrides._cutedsl_masks(found) & is_tested & overrides._is_right(found, kind)
    return bool(condition.holds(named))


FORWARD, BACKWARD = (op.name for op in overrides._CUTEDSL_MASKED.ops)


def _of_batches(mask: torch.Tensor) -> torch.Tensor:
    return mask[:1].expand_as(mask)


def _padded(mask: torch.Tensor, elements: int) -> torch.Tensor:
    """The same numbers in rows that are so much longer."""
    return F.pad(mask, (0, elements))[..., : mask.shape[-1]]


@pytest.mark.parametrize("change", [lambda mask: mask, _of_batches, lambda mask: _padded(mask, 8)])
def test_biases_of_each_head_are_taken(change: Any) -> None:
    for op in (FORWARD, BACKWARD):
        named = _named(op)
        assert _holds(op, {**named, "attn_bias": change(named["attn_bias"])})


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: _padded(mask, 1),
        lambda mask: _padded(mask, 4),
        lambda mask: F.pad(mask, (1, 7))[..., 1:-7],
        lambda mask: mask.float(),
        lambda mask: mask[:, :, :1].expand_as(mask),
        lambda mask: torch.cat([mask, mask], -1)[..., ::2],
    ],
)
def test_those_that_the_copy_engine_cannot_read_are_not(change: Any) -> None:
    """Nor those that queries share: they are Triton's."""
    for op in (FORWARD, BACKWARD):
        named = _named(op)
        assert not _holds(op, {**named, "attn_bias": change(named["attn_bias"])})


def test_of_wide_heads_they_are_not() -> None:
    assert not _holds(FORWARD, _named(FORWARD, dim=256))
    assert _holds(FORWARD, _named(FORWARD, dim=256, for_all_heads=1))


@pytest.mark.parametrize("change", [lambda mask: _padded(mask, 1), lambda mask: mask.float()])
def test_kernels_are_not_given_what_they_cannot_read(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutedsl_kernels, "multiprocessors", lambda _: 132)
    q = torch.zeros(1, HEADS, 128, 64).bfloat16()
    bias = change(torch.zeros(1, HEADS, 128, 128).bfloat16())
    with pytest.raises(ValueError, match="copy engine"):
        cutedsl_kernels.forward(q, q, q, q, None, 0.1, False, bias)


# ------------------------------------------------------------------ kernels


@pytest.fixture
def on_hopper() -> torch.device:
    if torch.cuda.get_device_capability() != (9, 0) or not overrides._has_flash_attn_4():
        pytest.skip("needs Hopper and FlashAttention-4")
    return torch.device("cuda")


def _inputs(
    batch: int,
    heads_k: int,
    queries: int,
    keys: int,
    dim: int,
    dtype: torch.dtype,
    heads: int = HEADS,
) -> list[torch.Tensor]:
    """As projections leave them."""
    torch.manual_seed(0)
    return [
        torch.randn(batch, length, count, dim, device="cuda").to(dtype).transpose(1, 2)
        for count, length in ((heads, queries), (heads_k, keys), (heads_k, keys))
    ]


def _assert_as_good(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
) -> None:
    """At most twice native's error, and what a rounding more or less may come to."""
    out = torch.full_like(q, math.nan)
    logsumexp = torch.full(q.shape[:3], math.nan, device=q.device)
    cutedsl_kernels.forward(q, k, v, out, logsumexp, scale, False, bias)
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    scores = q.double() @ k.double().mT * scale + bias.double()
    is_left_alone = (bias == -math.inf).all(-1)
    expected = scores.masked_fill(is_left_alone[..., None], 0.0).softmax(-1) @ v.double()
    expected = expected.masked_fill(is_left_alone[..., None], 0.0)
    backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with opgraft.disabled(), sdpa_kernel(backends):
        native = F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
    native = native.masked_fill(is_left_alone[..., None], 0.0)
    floor = 4 * torch.finfo(q.dtype).eps
    assert largest_error(out, expected) <= 2 * largest_error(native, expected) + floor
    assert logsumexp.isinf().equal(is_left_alone)
    right = scores.logsumexp(-1).masked_fill(is_left_alone, 0.0)
    assert largest_error(logsumexp.masked_fill(is_left_alone, 0.0), right) <= 1e-3


def _bias(name: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Of each batch's own, or one that batches share, or in rows that are longer than the keys."""
    batch, *others, keys = shape
    if name == "of all batches":
        return torch.randn(1, *others, keys, device="cuda").to(dtype).expand(shape)
    wide = keys + (24 if name == "in long rows" else 0)
    # What is behind a row is no part of it.
    bias = torch.full((batch, *others, wide), math.nan, device="cuda", dtype=dtype)
    bias[..., :keys] = torch.randn(shape, device="cuda")
    return bias[..., :keys]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads_k", [HEADS, 1])
@pytest.mark.parametrize("name", ["of each batch", "of all batches", "in long rows"])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [(1, 1000), (1, 72), (100, 200), (100, 72), (1024, 1000), (1024, 200), (1024, 1024)],
)
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_attention_is_right(
    dim: int,
    queries: int,
    keys: int,
    name: str,
    heads_k: int,
    dtype: torch.dtype,
    on_hopper: torch.device,
) -> None:
    q, k, v = _inputs(2, heads_k, queries, keys, dim, dtype)
    bias = _bias(name, (2, HEADS, queries, keys), dtype)
    _assert_as_good(q, k, v, bias, dim**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["of each batch", "of all batches"])
@pytest.mark.parametrize(("queries", "keys"), [(1024, 1024), (700, 1000), (700, 72), (130, 264)])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_programs_that_walk_are_right(
    dim: int, queries: int, keys: int, name: str, on_hopper: torch.device
) -> None:
    """Each has several tiles, of an even and of an odd number of blocks: so stages come in every
    order. Several times, as a race would not be lost each time."""
    q, k, v = _inputs(12, 16, queries, keys, dim, torch.bfloat16, heads=16)
    bias = _bias(name, (12, 16, queries, keys), torch.bfloat16)
    first = None
    for _ in range(5):
        out = torch.full_like(q, math.nan)
        cutedsl_kernels.forward(q, k, v, out, None, dim**-0.5, False, bias)
        first = out if first is None else first
        assert out.equal(first)
    _assert_as_good(q, k, v, bias, dim**-0.5)


TILES = [(dim, tile) for dim in (64, 96, 128) for n in (0, 132) for tile in tiles_of(dim, n)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "tile"), TILES, ids=str)
def test_every_tile_is_right(
    dim: int, tile: ForwardTile, on_hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutedsl_kernels, "dense_forward_tile", lambda *_: tile)
    q, k, v = _inputs(4, 16, 1000, 520, dim, torch.bfloat16, heads=16)
    bias = _bias("of each batch", (4, 16, 1000, 520), torch.bfloat16)
    _assert_as_good(q, k, v, bias, dim**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", ["rows", "keys", "the last keys", "the first keys", "large", "low", "far", "one key"]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_special_biases_are_right(
    dim: int, name: str, dtype: torch.dtype, on_hopper: torch.device
) -> None:
    """Those that leave some queries nothing, those that leave blocks nothing, and large ones."""
    queries, keys = 300, 520
    q, k, v = _inputs(2, HEADS, queries, keys, dim, dtype)
    bias = _bias("of each batch", (2, HEADS, queries, keys), dtype).contiguous()
    if name == "rows":
        bias[0, 1, 50:200] = bias[1, 2, ::3] = -math.inf
    elif name == "keys":
        bias[0, 1, :, 50:200] = bias[1, 2, :, ::3] = -math.inf
    elif name == "the last keys":  # which are computed first
        bias[:, 1:, :, 200:] = -math.inf
    elif name == "the first keys":
        bias[:, 1:, :, :400] = -math.inf
    elif name == "large":
        bias += 300 * torch.randn(2, HEADS, queries, 1, device=bias.device).to(dtype)
    elif name == "low":
        bias[:, 1:, :, 100:] = torch.finfo(dtype).min
        bias[0, 1, 7] = torch.finfo(dtype).min
    elif name == "far":  # all scores of every other query are one number
        q[:, :, ::2] = 0
        wide = [1e6, -3e7, 2.6e8, -2.6e8, 2.8e8, -3e8, 1e30, -1e38]
        numbers = [6e4, -6e4, *(wide if dtype == torch.bfloat16 else ())]
        repeated = torch.tensor(numbers, device=bias.device).repeat(queries)[: queries // 2]
        bias[:, :, ::2] = repeated[:, None].to(dtype)
    else:
        bias[:] = -math.inf
        bias.scatter_(3, torch.randint(keys, (2, HEADS, queries, 1), device=bias.device), 100.0)
    _assert_as_good(q, k, v, bias, dim**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_scales_are_right(scale: float, on_hopper: torch.device) -> None:
    """T5 has none."""
    q, k, v = _inputs(2, HEADS, 300, 520, 64, torch.bfloat16)
    bias = _bias("of all batches", (2, HEADS, 300, 520), torch.bfloat16)
    _assert_as_good(q, k, v, bias, scale)


@pytest.mark.gpu
def test_what_a_bias_removes_reaches_nothing(on_hopper: torch.device) -> None:
    """Nor does what is behind the last key."""
    q, k, v = _inputs(2, HEADS, 512, 512, 64, torch.bfloat16)
    k[:, :, 200:] = v[:, :, 200:] = math.nan
    bias = torch.randn(2, HEADS, 512, 256, device="cuda").bfloat16()
    bias[..., 200:] = math.nan
    k, v = k[:, :, :200], v[:, :, :200]
    out = torch.full_like(q, math.nan)
    cutedsl_kernels.forward(q, k, v, out, None, 0.125, False, bias[..., :200])
    assert out.isfinite().all()


# ------------------------------------------------------------------ kernels of the backward


def _gradients_by(
    tensors: list[torch.Tensor], bias: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """By the formula in `dtype`, or natively; 0 for queries that no key is left for."""
    is_left_alone = (bias == -math.inf).all(-1, keepdim=True)
    leaves = [each.detach().to(dtype or each.dtype).requires_grad_() for each in tensors]
    group = leaves[0].shape[1] // leaves[1].shape[1]
    q, k, v = leaves[0], *(each.repeat_interleave(group, 1) for each in leaves[1:])
    bias = bias.masked_fill(is_left_alone, 0.0)
    grad = grad.masked_fill(is_left_alone, 0.0)
    if dtype is None:
        with opgraft.disabled(), sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            out = F.scaled_dot_product_attention(q, k, v, bias)
    else:
        scores = q @ k.mT * q.shape[-1] ** -0.5 + bias.to(dtype)
        out = scores.softmax(-1) @ v
    return list(torch.autograd.grad(out, leaves, grad.to(out.dtype)))


def _assert_gradients_as_good(tensors: list[torch.Tensor], bias: torch.Tensor) -> None:
    q, k, v = tensors
    out, grad = torch.full_like(q, math.nan), torch.randn_like(q)
    logsumexp = torch.full(q.shape[:3], math.nan, device=q.device)
    scale = q.shape[-1] ** -0.5
    cutedsl_kernels.forward(q, k, v, out, logsumexp, scale, False, bias)
    for _ in range(3):  # a race would not be lost each time
        dq, dk, dv = (torch.full_like(each, math.nan) for each in tensors)
        cutedsl_kernels.backward(grad, q, k, v, out, logsumexp, dq, dk, dv, scale, False, bias)
        right = _gradients_by(tensors, bias, grad, torch.float64)
        native = _gradients_by(tensors, bias, grad, None)
        floor = 4 * torch.finfo(q.dtype).eps
        for one, other, expected in zip((dq, dk, dv), native, right, strict=True):
            assert largest_error(one, expected) <= 2 * largest_error(other, expected) + floor


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads_k", [HEADS, 1])
@pytest.mark.parametrize("name", ["of each batch", "of all batches", "in long rows"])
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1000), (100, 72), (300, 200), (1024, 1000), (1024, 1024)]
)
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_gradients_are_right(
    dim: int,
    queries: int,
    keys: int,
    name: str,
    heads_k: int,
    dtype: torch.dtype,
    on_hopper: torch.device,
) -> None:
    tensors = _inputs(2, heads_k, queries, keys, dim, dtype)
    _assert_gradients_as_good(tensors, _bias(name, (2, HEADS, queries, keys), dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rows", "keys", "large"])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_gradients_of_special_biases_are_right(
    dim: int, name: str, on_hopper: torch.device
) -> None:
    tensors = _inputs(2, HEADS, 300, 520, dim, torch.bfloat16)
    bias = _bias("of each batch", (2, HEADS, 300, 520), torch.bfloat16).contiguous()
    if name == "rows":
        bias[0, 1, 50:200] = bias[1, 2, ::3] = -math.inf
    elif name == "keys":
        bias[0, 1, :, 50:200] = bias[1, 2, :, ::3] = -math.inf
    else:
        bias += 300 * torch.randn(2, HEADS, 300, 1, device=bias.device).bfloat16()
    _assert_gradients_as_good(tensors, bias)
