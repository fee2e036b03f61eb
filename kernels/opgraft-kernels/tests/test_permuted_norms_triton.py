"""Norms of permuted inputs in Triton against float64, by native's own error.

On a machine without a GPU the kernels run in Triton's interpreter (tests/conftest.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from errors import relative_error

import opgraft
from opgraft import Override
from opgraft_kernels.norms import overrides, triton_permuted
from opgraft_kernels.norms.triton_permuted import rows_of, split_of

layer_norm = torch.ops.aten.native_layer_norm.default
layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
rms_norm = torch.ops.aten._fused_rms_norm.default


@pytest.fixture
def hits(dispatch_key: str) -> Callable[[], int]:
    """Hits of the overrides for permuted inputs, of LayerNorm's two and RMSNorm's two."""
    registered: list[Override] = [
        override
        for norm in (overrides.LAYER_NORM, overrides.RMS_NORM)
        for override in overrides.register(norm, dispatch_key)
        if "permuted" in override.name
    ]
    assert len(registered) == 4
    return lambda: sum(override.hits for override in registered)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape, device=device).to(dtype)


def _worst(ours: torch.Tensor, natives: torch.Tensor, right: torch.Tensor) -> None:
    """Of native's shape, strides and dtype, and at most twice its error."""
    assert ours.shape == natives.shape and ours.dtype == natives.dtype
    assert ours.stride() == natives.stride()
    error, native = (relative_error(each, right) for each in (ours, natives))
    assert error <= 2 * native + 4 * torch.finfo(ours.dtype).eps


def _check(
    hits: Callable[[], int],
    x: torch.Tensor,
    g: torch.Tensor | None = None,
    affine: bool = True,
    mask: tuple[bool, bool, bool] = (True, True, True),
) -> None:
    """LayerNorm, forward and backward."""
    hidden = x.shape[-1]
    w, b = (_random((hidden,), x.dtype, x.device) + n for n in (1, 0)) if affine else (None, None)
    g = torch.randn_like(x) if g is None else g
    before = hits()
    forward = layer_norm(x, [hidden], w, b, 1e-5)
    assert hits() == before + 1
    backward = layer_norm_backward(g, x, [hidden], *forward[1:], w, b, mask)
    assert hits() == before + 2
    with opgraft.disabled():
        natives = layer_norm(x, [hidden], w, b, 1e-5)
        natives_backward = layer_norm_backward(g, x, [hidden], *natives[1:], w, b, mask)
        g64, x64, w64, b64 = (None if each is None else each.double() for each in (g, x, w, b))
        right = layer_norm(x64, [hidden], w64, b64, 1e-5)
        right_backward = layer_norm_backward(g64, x64, [hidden], *right[1:], w64, b64, mask)
    _worst(forward[0], natives[0], right[0])
    assert forward[1].shape == natives[1].shape
    for ours, native, exact in zip(backward, natives_backward, right_backward, strict=True):
        assert (ours is None) == (native is None)
        if native is not None:
            _worst(ours, native, exact)


IMAGES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "images": lambda d, e: _random((2, 96, 7, 8), d, e).permute(0, 2, 3, 1),
    "odd images": lambda d, e: _random((3, 33, 5, 7), d, e).permute(0, 2, 3, 1),
    "a matrix": lambda d, e: _random((64, 100), d, e).t(),
    "sequences": lambda d, e: _random((3, 20, 40), d, e).mT,
    "slices": lambda d, e: _random((2, 96, 8, 9), d, e)[:, :64, :, :8].permute(0, 2, 3, 1),
    "spread images": lambda d, e: _random((2, 32, 8, 18), d, e)[..., ::2].permute(0, 2, 3, 1),
    "every second column": lambda d, e: _random((70, 64), d, e)[:, ::2],
    "expanded": lambda d, e: _random((1, 32, 72), d, e).expand(2, -1, -1).mT,
    "narrow": lambda d, e: _random((2, 16, 6, 8), d, e).permute(0, 2, 3, 1),
    "wide": lambda d, e: _random((2, 1024, 5, 8), d, e).permute(0, 2, 3, 1),
    "videos": lambda d, e: _random((2, 24, 3, 4, 5), d, e).permute(0, 2, 3, 4, 1),
    "swapped images": lambda d, e: _random((2, 32, 8, 9), d, e).permute(0, 3, 2, 1),
}  # fmt: skip


@pytest.fixture
def dtype_of_norms(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if device.type == "cpu" and dtype != torch.float32:
        pytest.skip("on the CPU native keeps statistics of 16-bit inputs in 16 bits")
    return dtype


@pytest.mark.parametrize("layout", IMAGES.values(), ids=IMAGES)
def test_layouts(
    hits: Callable[[], int],
    layout: Callable[[Any, Any], torch.Tensor],
    dtype_of_norms: torch.dtype,
    device: torch.device,
) -> None:
    x = layout(dtype_of_norms, device)
    _check(hits, x)  # `randn_like` lays the gradient out as `x` is
    _check(hits, x, _random(tuple(x.shape), x.dtype, device))


@pytest.mark.parametrize("layout", ["images", "odd images", "narrow", "wide"])
@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize(("is_ahead", "stages"), [(False, 1), (True, 1), (False, 3)])
def test_programs_walk_over_all_tiles(
    hits: Callable[[], int],
    layout: str,
    programs: int,
    is_ahead: bool,
    stages: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the last tile has fewer rows, and where some programs have a tile more."""
    # Three stages of more of the wide rows would not fit into shared memory.
    walk = triton_permuted.Walk(8, 32, programs, True, is_ahead, stages)
    monkeypatch.setattr(triton_permuted, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(triton_permuted, "forward_walk", lambda block: walk)
    monkeypatch.setattr(triton_permuted, "backward_walk", lambda block: walk)
    x = IMAGES[layout](torch.float32, device)
    _check(hits, x, _random(tuple(x.shape), x.dtype, device))


@pytest.mark.parametrize(
    "gradient",
    [
        lambda g: g.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        lambda g: g.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
        lambda g: g[:1, :1, :1].expand(g.shape),
        lambda g: g[..., :1].expand(g.shape),
    ],
    ids=["permuted", "permuted otherwise", "one row", "one column"],
)
def test_gradients_of_other_layouts(
    hits: Callable[[], int],
    gradient: Callable[[torch.Tensor], torch.Tensor],
    dtype_of_norms: torch.dtype,
    device: torch.device,
) -> None:
    x = IMAGES["images"](dtype_of_norms, device)
    _check(hits, x, gradient(_random(tuple(x.shape), x.dtype, device)))


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, True, True)])
def test_some_of_the_gradients(
    hits: Callable[[], int], mask: tuple[bool, bool, bool], device: torch.device
) -> None:
    _check(hits, IMAGES["images"](torch.float32, device), mask=mask)


def test_without_weight_and_bias(hits: Callable[[], int], device: torch.device) -> None:
    x = IMAGES["odd images"](torch.float32, device)
    _check(hits, x, affine=False, mask=(True, False, False))


def test_a_large_mean_keeps_its_digits(hits: Callable[[], int], device: torch.device) -> None:
    _check(hits, IMAGES["odd images"](torch.float32, device) + 1000)


@pytest.mark.parametrize("layout", ["odd images", "images", "wide"])
def test_a_large_mean_costs_the_output_no_digits(
    hits: Callable[[], int], layout: str, device: torch.device
) -> None:
    """A mean that is a unit in its last place off would move the output by a thousandth."""
    x = IMAGES[layout](torch.float32, device) + 30000
    unit = 2.0**-9  # of the last place of numbers of that size
    y, mean, _ = layer_norm(x, [x.shape[-1]], None, None, 1e-5)
    assert hits() == 1
    with opgraft.disabled():
        right, right_mean, _ = layer_norm(x.double(), [x.shape[-1]], None, None, 1e-5)
    assert (mean - right_mean).abs().max() <= 0.6 * unit
    assert (y - right).abs().max() <= 1e-5


def test_not_a_number_stays_in_its_row(hits: Callable[[], int], device: torch.device) -> None:
    x = IMAGES["images"](torch.float32, device).clone(memory_format=torch.preserve_format)
    x[0, 0, 1] = math.nan
    x[1, 2, 3, 5] = math.inf
    y, *_ = layer_norm(x, [x.shape[-1]], None, None, 1e-5)
    assert hits() == 1
    is_bad = torch.zeros(x.shape[:-1], dtype=torch.bool, device=device)
    is_bad[0, 0, 1] = is_bad[1, 2, 3] = True
    assert torch.equal(y.isnan().any(-1), is_bad)


def test_rms_norm(hits: Callable[[], int], device: torch.device) -> None:
    x = IMAGES["images"](torch.float32, device)
    w = _random((96,), x.dtype, device)
    y, rstd = rms_norm(x, [96], w, 1e-5)
    g = torch.randn_like(x)
    dx, dw = torch.ops.aten._fused_rms_norm_backward(g, x, [96], rstd, w, [True, True])
    assert hits() == 2
    x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
    with opgraft.disabled():
        right = torch.nn.functional.rms_norm(x64, [96], w64, 1e-5)
        right.backward(g.double())
    for ours, exact in ((y, right), (dx, x64.grad), (dw, w64.grad)):
        assert exact is not None
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_same_bits_every_time(hits: Callable[[], int], device: torch.device) -> None:
    side = 56 if device.type == "cuda" else 12
    x = _random((8, 96, side, side), torch.float32, device).permute(0, 2, 3, 1)
    w = b = torch.ones(96, dtype=x.dtype, device=device)
    g = torch.randn_like(x)
    _, *statistics = layer_norm(x, [96], w, b, 1e-5)
    first, *others = (
        layer_norm_backward(g, x, [96], *statistics, w, b, [True] * 3) for _ in range(5)
    )
    assert hits() == 6
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    "x",
    [torch.randn(70, 64), torch.randn(70, 8).t().contiguous().t(), torch.randn(2056, 70).t()],
    ids=["contiguous", "too narrow", "too wide"],
)
def test_what_is_not_taken(hits: Callable[[], int], x: torch.Tensor, device: torch.device) -> None:
    layer_norm(x.to(device), [x.shape[-1]], None, None, 1e-5)
    assert hits() == 0


@pytest.mark.parametrize(
    ("direction", "widest"),
    [
        ("forward", triton_permuted.MAX_HIDDEN),
        ("backward", triton_permuted.MAX_HIDDEN_BACKWARD),
    ],
)
def test_conditions_bound_what_the_kernels_take(
    direction: overrides.Direction, widest: int
) -> None:
    bounds = overrides._PERMUTED_HIDDEN[direction]
    assert bounds == (triton_permuted.MIN_HIDDEN, widest)


def test_where_rows_are() -> None:
    images = torch.empty(2, 96, 7, 8, device="meta").permute(0, 2, 3, 1)
    assert split_of(images) == 1
    rows = rows_of(images, 1)
    assert rows is not None
    assert (rows.inner, *rows.strides) == (56, 96 * 56, 1, 56)
    assert rows.unit(2) == 8
    assert split_of(torch.empty(70, 64, device="meta").t()) == 0
    assert split_of(torch.empty(70, 64, device="meta")[:, ::2]) is None
    expanded = torch.empty(1, 32, 72, device="meta").expand(5, -1, -1).mT
    assert split_of(expanded) == 1
