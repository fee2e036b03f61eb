"""FlashAttention-4's backward of short sequences, of which a program computes whole heads."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from errors import relative_error

import opgraft
from opgraft_kernels.attention import cutedsl_kernels, overrides
from opgraft_kernels.attention.cutedsl_tiles import (
    SHORT_KEYS,
    short_backward_fits,
    short_backward_tile,
)
from opgraft_kernels.integers import ceil_div

# ------------------------------------------------------------------ tiles


@pytest.mark.parametrize("dim", [8, 64, 72, 128])
def test_tiles_hold_a_head(dim: int) -> None:
    for queries in range(1, 257):
        keys = SHORT_KEYS if dim > 64 else 2 * SHORT_KEYS
        assert short_backward_fits(dim, 1, False, queries, keys)
        tile = short_backward_tile(dim, queries, keys)
        tiles = ceil_div(queries, tile.queries)
        assert tile.key_blocks * SHORT_KEYS == keys
        # All of a head's queries are in shared memory where keys have several blocks.
        assert tile.key_blocks == 1 or tiles <= 2
        assert tiles * tile.queries >= queries


def test_few_rows_are_computed_in_vain() -> None:
    for dim, length, queries, blocks in (
        (64, 197, 112, 2),
        (64, 256, 128, 2),
        (64, 77, 80, 1),
        (128, 77, 64, 1),
    ):
        tile = short_backward_tile(dim, length, length)
        assert (tile.queries, tile.key_blocks) == (queries, blocks)


def test_what_does_not_fit_is_left_to_others() -> None:
    assert not short_backward_fits(64, 1, False, 257, 77)
    assert not short_backward_fits(64, 1, False, 77, 257)
    assert not short_backward_fits(72, 1, False, 77, 129)
    assert not short_backward_fits(136, 1, False, 77, 77)
    assert not short_backward_fits(64, 2, False, 77, 77)
    assert not short_backward_fits(64, 1, True, 77, 77)
    assert not short_backward_fits(64, 1, False, 77, 0)


# ------------------------------------------------------------------ kernels

HEADS = 4
LENGTHS = (1, 17, 49, 64, 77, 128, 129, 197, 255, 256)
UNEQUAL = ((1, 256), (256, 1), (100, 200), (200, 100), (197, 77), (77, 197), (130, 129), (160, 65))


@pytest.fixture
def on_hopper() -> torch.device:
    if torch.cuda.get_device_capability() != (9, 0) or not overrides._has_flash_attn_4():
        pytest.skip("needs Hopper and FlashAttention-4")
    return torch.device("cuda")


def _tensors(
    batch: int, heads: int, queries: int, keys: int, dim: int, dtype: torch.dtype, is_strided: bool
) -> list[torch.Tensor]:
    """The output's gradient, query, key and value: as projections leave them, or contiguous."""
    torch.manual_seed(0)
    made = (
        torch.randn(batch, length, heads, dim, device="cuda").to(dtype).transpose(1, 2)
        for length in (queries, queries, keys, keys)
    )
    return [each if is_strided else each.contiguous() for each in made]


def _right(
    tensors: list[torch.Tensor], scale: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Gradients by the formula in `dtype`, or natively."""
    grad, *inputs = (each.detach().to(dtype or each.dtype) for each in tensors)
    q, k, v = (each.requires_grad_() for each in inputs)
    if dtype is None:
        with opgraft.disabled():
            out = F.scaled_dot_product_attention(q, k, v, scale=scale)
            return list(torch.autograd.grad(out, (q, k, v), grad))
    out = (q @ k.mT * scale).softmax(-1) @ v
    return list(torch.autograd.grad(out, (q, k, v), grad))


def _ours(tensors: list[torch.Tensor], scale: float, times: int = 1) -> list[list[torch.Tensor]]:
    grad, q, k, v = tensors
    out = torch.full_like(q, math.nan)
    logsumexp = torch.full(q.shape[:3], math.nan, device=q.device)
    cutedsl_kernels.forward(q, k, v, out, logsumexp, scale, False)
    found = []
    for _ in range(times):
        dq, dk, dv = (torch.full_like(each, math.nan) for each in (q, k, v))
        cutedsl_kernels.backward(grad, q, k, v, out, logsumexp, dq, dk, dv, scale, False)
        found.append([dq, dk, dv])
    return found


def _assert_as_good(tensors: list[torch.Tensor], scale: float, times: int = 1) -> None:
    """At most twice native's error, and what a rounding more or less may come to; and always the
    same, as a race would not be lost each time."""
    _, q, k, _ = tensors
    assert short_backward_fits(q.shape[3], 1, False, q.shape[2], k.shape[2])
    first, *others = _ours(tensors, scale, times)
    right, native = _right(tensors, scale, torch.float64), _right(tensors, scale, None)
    # Of one key, dq and dk are 0 but for what is rounded.
    largest = max(float(each.abs().max()) for each in right)
    floor = 4 * torch.finfo(q.dtype).eps
    for one, other, expected in zip(first, native, right, strict=True):
        assert not one.isnan().any()
        bound = 2 * (other.double() - expected).abs().max() + floor * largest
        assert (one.double() - expected).abs().max() <= bound
    for again in others:
        for one, other in zip(first, again, strict=True):
            assert one.equal(other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_strided", [True, False])
@pytest.mark.parametrize(
    ("queries", "keys"), [*((length, length) for length in LENGTHS), *UNEQUAL], ids=str
)
@pytest.mark.parametrize("dim", [32, 40, 64, 96, 128])
def test_gradients_are_right(
    dim: int,
    queries: int,
    keys: int,
    is_strided: bool,
    dtype: torch.dtype,
    on_hopper: torch.device,
) -> None:
    if not short_backward_fits(dim, 1, False, queries, keys):
        pytest.skip("shared memory has no room for a head")
    tensors = _tensors(2, HEADS, queries, keys, dim, dtype, is_strided)
    _assert_as_good(tensors, dim**-0.5, times=2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "queries", "keys"),
    [
        *((64, length, length) for length in (50, 77, 128, 160, 197, 256)),
        *((64, 256, 77), (64, 60, 197)),
        *((128, 50, 50), (128, 128, 128), (128, 256, 100)),
    ],
    ids=str,
)
def test_programs_that_walk_over_heads_are_right(
    dim: int, queries: int, keys: int, on_hopper: torch.device
) -> None:
    """Each has seven heads or eight, so that buffers are used again and again."""
    tensors = _tensors(64, 16, queries, keys, dim, torch.bfloat16, is_strided=True)
    _assert_as_good(tensors, dim**-0.5, times=5)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_scales_are_right(scale: float, on_hopper: torch.device) -> None:
    tensors = _tensors(2, HEADS, 197, 197, 64, torch.bfloat16, is_strided=True)
    _assert_as_good(tensors, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("sign", [1, -1])
def test_of_large_scores_keys_that_are_not_there_get_nothing(
    sign: int, on_hopper: torch.device
) -> None:
    """All scores are far from 0, the score of a key that is not there."""
    grad, q, k, v = _tensors(2, HEADS, 197, 197, 64, torch.bfloat16, is_strided=True)
    q, k = q.abs() + 4, sign * (k.abs() + 4)
    _assert_as_good([grad, q, k, v], 0.125)


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "keys"), [(197, 197), (77, 50), (130, 129)])
def test_nothing_behind_a_head_is_read_or_written(
    queries: int, keys: int, on_hopper: torch.device
) -> None:
    grad, q, k, v = _tensors(2, HEADS, 256, 256, 64, torch.bfloat16, is_strided=True)
    for each, length in ((grad, queries), (q, queries), (k, keys), (v, keys)):
        each[:, :, length:] = math.nan
    grad, q = (each[:, :, :queries] for each in (grad, q))
    k, v = (each[:, :, :keys] for each in (k, v))
    out, logsumexp = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    cutedsl_kernels.forward(q, k, v, out, logsumexp, 0.125, False)
    wide = [torch.full((2, HEADS, 256, 64), 7.0, device="cuda").bfloat16() for _ in range(3)]
    dq, dk, dv = (each[:, :, : of.shape[2]] for each, of in zip(wide, (q, k, v), strict=True))
    cutedsl_kernels.backward(grad, q, k, v, out, logsumexp, dq, dk, dv, 0.125, False)
    right = _right([grad, q, k, v], 0.125, torch.float64)
    for each, one, expected in zip(wide, (dq, dk, dv), right, strict=True):
        assert relative_error(one, expected) <= 0.02
        assert (each[:, :, one.shape[2] :] == 7.0).all()
