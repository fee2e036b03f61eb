"""FlashAttention-4 with masks that heads share: the lists of tiles, and its kernels with them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from errors import largest_error

from opgraft import when
from opgraft_kernels.attention import cutedsl_kernels, overrides, samples
from opgraft_kernels.attention.cutedsl_tiles import ForwardTile, biased_forward_tile
from opgraft_kernels.attention.triton_lists import plan_lists
from opgraft_kernels.integers import ceil_div

BATCH, HEADS, DIM = 2, 2, 16
# Torch's own for cuDNN, BERT's in bfloat16, and the lowest number.
LOW = (-65504.0, -9984.0, torch.finfo(torch.float32).min)
# Of queries and keys.
TILES = ((128, 128), (192, 128), (128, 64))


def masks(name: str, queries: int, keys: int, lowest: float) -> torch.Tensor:
    """A mask that heads share, ``[batch, 1, queries or 1, keys]``, float32."""
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    key = torch.arange(keys)
    begins = torch.tensor([[0], [keys // 3]])[:, None, None]
    tiles = torch.rand(BATCH, 1, -(-queries // 128), -(-keys // 128)) < 0.5
    seen = {
        "padding": (key < torch.tensor([[keys], [keys // 2]]))[:, None, None],
        "causal": causal[None, None],
        "padding on the left": (key >= begins) & causal,
        "tiles": tiles.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :queries, :keys],
        "numbers": torch.ones(1, 1, queries, keys, dtype=torch.bool),
    }[name]
    mask = torch.zeros(seen.shape).masked_fill(~seen, lowest)
    return mask + torch.randn(mask.shape) if name == "numbers" else mask


MASKS = ("padding", "causal", "padding on the left", "tiles", "numbers")

# ------------------------------------------------------------------ lists


def lists_of(
    bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    tile: tuple[int, int],
    logsumexp: torch.Tensor | None,
    device: torch.device,
) -> Iterator[tuple[int, int, int, list[int], list[int]]]:
    """Batch, head and row of tiles, the tiles with a bias, and those where it is 0."""
    given = (bias.to(device), q.to(device), k.to(device))
    logsumexp = None if logsumexp is None else logsumexp.to(device)
    lists, _, launches, _ = plan_lists(*given, 1.0, *tile, logsumexp)
    for launch in launches:
        launch()
    for place in itertools.product(*map(range, lists.shape[:3])):
        with_bias, without = (each[1 : 1 + each[0]].tolist() for each in lists[place])
        yield (*place, with_bias, without)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_in_no_list_has_no_probability(seed: int, device: torch.device) -> None:
    """By the formula, of scores that are large beside the mask, too."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    heads_k, lowest = rng.choice((1, 2)), (-math.inf, *LOW)[seed % 4]
    queries, keys = rng.choice(((256, 256), (129, 450), (450, 200)))
    size = rng.choice((1.0, 10.0, 40.0))
    q = torch.randn(BATCH, HEADS, queries, DIM) * size
    k = torch.randn(BATCH, heads_k, keys, DIM) * size
    bias = masks(MASKS[seed % 5], queries, keys, lowest).expand(BATCH, HEADS, queries, keys)
    scores = q @ k.repeat_interleave(HEADS // heads_k, 1).mT + bias
    logsumexp = scores.logsumexp(-1)
    of_backward = ((tile, logsumexp) for tile in (TILES[0], TILES[2]))
    for (rows, cols), lse in (*((tile, None) for tile in TILES), *of_backward):
        is_there = (scores - logsumexp[..., None]).exp() > 0
        for batch, head, row, with_bias, without in lists_of(bias, q, k, (rows, cols), lse, device):
            listed = [*with_bias, *without]
            assert with_bias == sorted(with_bias) and without == sorted(without)
            assert len({*listed}) == len(listed)
            count = ceil_div(keys, cols) if lse is None else ceil_div(queries, rows)
            for tile in range(count):
                of_queries, of_keys = (row, tile) if lse is None else (tile, row)
                place = (
                    *(batch, head, slice(of_queries * rows, (of_queries + 1) * rows)),
                    slice(of_keys * cols, (of_keys + 1) * cols),
                )
                assert tile in listed or not is_there[place].any()
                if tile in without:
                    assert bias[place].eq(0).all() and bias[place].shape[-1] == cols


@pytest.mark.parametrize("lowest", [-math.inf, *LOW])
def test_of_padding_whole_tiles_are_computed_without_a_bias(
    lowest: float, device: torch.device
) -> None:
    q = k = torch.randn(BATCH, HEADS, 512, DIM)
    bias = masks("padding", 512, 512, lowest).expand(BATCH, HEADS, 512, 512)
    found = [each[3:] for each in lists_of(bias, q, k, (128, 128), None, device)]
    of_the_first, of_the_second = [([], [0, 1, 2, 3])] * 8, [([], [0, 1])] * 8
    assert found == [*of_the_first, *of_the_second]


@pytest.mark.parametrize("lowest", [-math.inf, *LOW])
def test_of_causal_masks_the_diagonal_has_a_bias(lowest: float, device: torch.device) -> None:
    q = k = torch.randn(BATCH, HEADS, 512, DIM)
    bias = masks("causal", 512, 512, lowest).expand(BATCH, HEADS, 512, 512)
    found = [each[3:] for each in lists_of(bias, q, k, (128, 128), None, device)]
    assert found == [([row], list(range(row))) for row in range(4)] * BATCH * HEADS


def test_queries_that_see_nothing_but_low_numbers_see_all_of_them(device: torch.device) -> None:
    q = k = torch.randn(BATCH, HEADS, 256, DIM)
    bias = torch.zeros(1, 1, 256, 256)
    bias[:, :, :, 128:] = LOW[0]
    bias[:, :, 5] = LOW[0]
    wide = bias.expand(BATCH, HEADS, 256, 256)
    found = [each[3:] for each in lists_of(wide, q, k, (128, 128), None, device)]
    assert found == [([0, 1], []), ([], [0])] * BATCH * HEADS


def test_what_is_no_number_is_in_a_list(device: torch.device) -> None:
    q = k = torch.randn(BATCH, HEADS, 256, DIM)
    k = k.clone()
    k[0, 0, 200] = math.nan
    bias = torch.zeros(1, 1, 1, 256)
    bias[..., 128:] = LOW[0]
    found = [
        each[3:]
        for each in lists_of(bias.expand(BATCH, HEADS, 256, 256), q, k, (128, 128), None, device)
    ]
    assert found == [([1], [0])] * 2 + [([], [0])] * 6


def test_a_backward_is_given_infinity_for_what_attends_to_nothing_and_what_is_no_query(
    device: torch.device,
) -> None:
    q = k = torch.randn(BATCH, HEADS, 300, DIM)
    bias = torch.zeros(1, 1, 1, 300).expand(BATCH, HEADS, 300, 300)
    numbers = torch.tensor([3.0, -65504.0, -1e9, 1e9, -math.inf, math.inf, math.nan, -1e6])
    logsumexp = numbers.repeat(BATCH, HEADS, 300)[..., :300].mT.contiguous().mT
    given = (bias.to(device), q.to(device), k.to(device))
    _, usable, launches, _ = plan_lists(*given, 1.0, 128, 128, logsumexp.to(device))
    for launch in launches:
        launch()
    expected = torch.full((BATCH, HEADS, 384), math.inf)
    expected[..., :300] = logsumexp.abs().where(logsumexp == -math.inf, logsumexp)
    assert usable is not None
    torch.testing.assert_close(usable.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_low_keys_of_a_query_whose_logsumexp_is_no_number_are_in_a_list(
    device: torch.device,
) -> None:
    """Of the tile of queries that has it, not of the other."""
    q = k = torch.randn(BATCH, HEADS, 256, DIM)
    bias = masks("padding", 256, 256, LOW[0]).expand(BATCH, HEADS, 256, 256)
    logsumexp = (q @ k.mT + bias).logsumexp(-1)
    logsumexp[:, :, 5] = math.nan
    found = [each[3:] for each in lists_of(bias, q, k, (128, 128), logsumexp, device)]
    of_the_first = [([], [0, 1]), ([], [0, 1])] * HEADS
    of_the_second = [([], [0, 1]), ([0], [])] * HEADS
    assert found == [*of_the_first, *of_the_second]


# ------------------------------------------------------------------ tiles and conditions


def test_programs_walk_where_each_has_several_units() -> None:
    """Of two tiles where queries see different keys."""
    assert biased_forward_tile(64, True, 512, 512, 132) == ForwardTile(192, 128, 132)
    assert biased_forward_tile(64, True, 8, 512, 132) == ForwardTile(192, 128, 0)
    assert biased_forward_tile(128, True, 512, 512, 132) == ForwardTile(128, 128, 132)
    assert biased_forward_tile(128, False, 512, 512, 132) == ForwardTile(128, 128, 132)
    assert biased_forward_tile(128, True, 66, 384, 132) == ForwardTile(128, 128, 132)
    assert biased_forward_tile(128, False, 66, 384, 132) == ForwardTile(128, 128, 0)
    assert biased_forward_tile(256, True, 512, 512, 132) == ForwardTile(128, 64, 0)


OPS = [op.name for op in overrides._CUTEDSL_MASKED.ops]


def _holds(op: str, *changes: tuple[str, Any]) -> bool:
    """Without what is about the device."""
    given = {"rows": 2**8, "keys": 2**5, "dim": 64, "for_all_queries": 0, "for_all_heads": 1}
    named, *_ = samples.calls(op, torch.device("cpu"), **given)
    named |= dict(changes)
    (found,) = (each for each in overrides._CUTEDSL_MASKED.ops if each.name == op)
    kind = overrides._CUTEDSL_MASKED
    is_tested = (when.value("is_causal") == 0) & overrides._in_tested_range(found)
    condition = overrides._cutedsl_masks(found) & is_tested & overrides._is_right(found, kind)
    return bool(condition.holds(named))


@pytest.mark.parametrize("op", OPS)
def test_masks_that_heads_share_are_taken(op: str) -> None:
    assert _holds(op)


@pytest.mark.parametrize("op", OPS)
def test_more_keys_than_lists_are_made_for_are_not(op: str) -> None:
    given = {"rows": 2**8, "keys": 2**5, "dim": 64, "for_all_queries": 1, "for_all_heads": 1}
    named, *_ = samples.calls(op, torch.device("cpu"), **given)

    def of_so_many(keys: int) -> list[tuple[str, torch.Tensor]]:
        wide = {name: named[name][:, :, :1].expand(-1, -1, keys, -1) for name in ("key", "value")}
        mask = named["attn_bias"]
        bias = torch.zeros(mask.shape[0], 1, 1, keys, dtype=mask.dtype)
        return [*wide.items(), ("attn_bias", bias.expand(*mask.shape[:3], keys))]

    assert _holds(op, *of_so_many(overrides._MOST_LISTED_KEYS))
    assert not _holds(op, *of_so_many(overrides._MOST_LISTED_KEYS + 1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_bias", lambda mask: mask.float().contiguous()),
        ("attn_bias", lambda mask: mask[0, 0]),
        ("attn_bias", lambda mask: mask[:, :, :, :1].expand_as(mask)),
        ("attn_bias", lambda mask: mask[:, :, :, :1].contiguous()[:, :1]),
        ("attn_bias", lambda mask: torch.cat([mask, mask], -1)[..., ::2]),
        ("is_causal", lambda _: True),
        ("scale", lambda _: 1e-9),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_others_are_not(op: str, name: str, value: Any) -> None:
    """They are Triton's, or native's."""
    given = {"rows": 2**8, "keys": 2**5, "dim": 64, "for_all_queries": 0, "for_all_heads": 1}
    named, *_ = samples.calls(op, torch.device("cpu"), **given)
    assert not _holds(op, (name, value(named["attn_bias"])))


OPS_OF_BATCHES = [
    (op, kind)
    for kind in (overrides._CUTEDSL, overrides._CUTEDSL_MASKED)
    for op in kind.ops
    if op not in overrides._MEASURED_AS
]


@pytest.mark.parametrize(("op", "kind"), OPS_OF_BATCHES, ids=lambda each: each.name)
def test_more_batches_than_a_grid_has_are_not(op: overrides._Op, kind: overrides._Kind) -> None:
    given: dict[str, Any] = {"rows": 2**10, "keys": 32, "dim": 64}
    if kind.is_masked:
        given |= {"for_all_queries": 0, "for_all_heads": 1}
    named, *_ = samples.calls(op.name, torch.device("meta"), **given)
    condition = overrides._is_right(op, kind)
    assert condition.holds(named)
    wide = {
        name: each[:1].expand(2**16, -1, -1, -1)
        for name, each in named.items()
        if isinstance(each, torch.Tensor) and each.ndim == 4
    }
    assert not condition.holds({**named, **wide})


# ------------------------------------------------------------------ kernels


def _by_formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    grad: torch.Tensor,
    scale: float | None = None,
) -> list[torch.Tensor]:
    """In float64; 0 for queries that no key is left for."""
    leaves = [each.double().requires_grad_() for each in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    wide = [each.repeat_interleave(group, 1) for each in leaves[1:]]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = leaves[0] @ wide[0].mT * scale + bias.double()
    is_left_alone = (bias == -math.inf).all(-1, keepdim=True)
    p = scores.masked_fill(is_left_alone, 0.0).softmax(-1).masked_fill(is_left_alone, 0.0)
    out = p @ wide[1]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    grad: torch.Tensor,
    scale: float | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The output and the gradients, and the logsumexp."""
    out = torch.full_like(q, math.nan)
    logsumexp = torch.full(q.shape[:3], math.nan, device=q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    cutedsl_kernels.forward(q, k, v, out, logsumexp, scale, False, bias)
    dq, dk, dv = (torch.full_like(each, math.nan) for each in (q, k, v))
    cutedsl_kernels.backward(grad, q, k, v, out, logsumexp, dq, dk, dv, scale, False, bias)
    return [out, dq, dk, dv], logsumexp


@pytest.fixture
def on_hopper() -> torch.device:
    if torch.cuda.get_device_capability() != (9, 0) or not overrides._has_flash_attn_4():
        pytest.skip("needs Hopper and FlashAttention-4")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lowest", [-math.inf, *LOW])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("dim", "heads_k", "queries", "keys"),
    [(64, 4, 300, 333), (128, 1, 257, 512), (72, 4, 640, 640), (256, 1, 384, 500)],
)
def test_attention_is_right(
    dim: int,
    heads_k: int,
    queries: int,
    keys: int,
    name: str,
    lowest: float,
    dtype: torch.dtype,
    on_hopper: torch.device,
) -> None:
    """Of queries with nothing but low numbers the gradients in float32 are too coarse for any
    backward that keeps the logsumexp alone."""
    shapes = ((4, queries), (heads_k, keys), (heads_k, keys), (4, queries))
    q, k, v, grad = (
        torch.randn(2, length, heads, dim, device=on_hopper).bfloat16().transpose(1, 2)
        for heads, length in shapes
    )
    mask = masks(name, queries, keys, lowest).to(on_hopper).to(dtype)
    bias = mask.expand(2, 4, queries, keys)
    is_low = (bias < -9000).all(-1) & ~(bias == -math.inf).all(-1)
    grad = grad.masked_fill(is_low[..., None], 0.0)
    right = _by_formula(q, k, v, bias, grad)
    ours, logsumexp = _attend(q, k, v, bias, grad)
    for one, expected in zip(ours, right, strict=True):
        assert largest_error(one, expected) <= 2e-2
    is_left_alone = (bias == -math.inf).all(-1)
    assert logsumexp.isinf().equal(is_left_alone)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("low", [-1e5, -1e6, -1e9, -1e10, 1e9, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
def test_queries_with_nothing_but_large_numbers_reach_no_others(
    dim: int, low: float, dtype: torch.dtype, on_hopper: torch.device
) -> None:
    """Their own gradients are rounding, as natively, but finite."""
    q, k, v, grad = (torch.randn(2, 4, 384, dim, device=on_hopper).bfloat16() for _ in range(4))
    bias = torch.zeros(2, 1, 384, 384, device=on_hopper)
    bias[0, :, 100:] = low
    bias[1, :, :, 200:] = min(low, -low)
    bias[1, :, 300] = low
    bias = bias.clamp(*(torch.finfo(dtype).min, torch.finfo(dtype).max)).to(dtype)
    bias = bias.expand(2, 4, 384, 384)
    is_large = (bias.abs() >= abs(low) / 2).all(-1)[..., None]
    ours, _ = _attend(q, k, v, bias, grad)
    assert all(each.isfinite().all() for each in ours)
    given = grad.masked_fill(is_large, 0.0)
    (_, *gradients), _ = _attend(q, k, v, bias, given)
    for one, expected in zip(gradients, _by_formula(q, k, v, bias, given)[1:], strict=True):
        assert largest_error(one, expected) <= 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("large", [1e5, 4e6, 1e9, 1e30])
@pytest.mark.parametrize("others", [0.0, -1.0])
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
def test_the_key_with_the_largest_number_gets_all(
    dim: int, others: float, large: float, dtype: torch.dtype, on_hopper: torch.device
) -> None:
    """A number at one key that is larger than others by far, which may be as large below 0."""
    q, k, v, grad = (torch.randn(2, 4, 256, dim, device=on_hopper).bfloat16() for _ in range(4))
    bias = torch.full((2, 1, 256, 256), others * large, device=on_hopper)
    bias.scatter_(3, torch.randint(256, (2, 1, 256, 1), device=on_hopper), large * (1 + others))
    bias = bias.to(dtype).expand(2, 4, 256, 256)
    (_, dq, dk, dv), logsumexp = _attend(q, k, v, bias, grad)
    assert dq.abs().max() <= 1e-2 and dk.abs().max() <= 1e-2
    expected = _by_formula(q, k, v, bias, grad)[3]
    assert (dv.double() - expected).abs().max() <= 2e-2 * expected.abs().max()
    # A backward finds 1 for that key if it is its score, in float32.
    scores = q.double() @ k.double().mT * dim**-0.5 + bias.double()
    torch.testing.assert_close(logsumexp.double(), scores.logsumexp(-1), rtol=2**-23, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 0.5, 1e-3])
@pytest.mark.parametrize(
    ("dim", "heads_k", "dtype"),
    [
        (64, 2, torch.float16),
        (80, 1, torch.bfloat16),
        (96, 2, torch.bfloat16),
        (104, 4, torch.float16),
        (256, 4, torch.float16),
    ],
    ids=str,
)
def test_groups_and_scales_are_right(
    dim: int, heads_k: int, dtype: torch.dtype, scale: float | None, on_hopper: torch.device
) -> None:
    q, k, v, grad = (
        torch.randn(2, heads, length, dim, device=on_hopper).to(dtype)
        for heads, length in ((4, 300), (heads_k, 333), (heads_k, 333), (4, 300))
    )
    bias = masks("padding on the left", 300, 333, -math.inf).to(on_hopper).to(dtype)
    bias = bias.expand(2, 4, 300, 333)
    right = _by_formula(q, k, v, bias, grad, scale)
    ours, _ = _attend(q, k, v, bias, grad, scale)
    for one, expected in zip(ours, right, strict=True):
        assert largest_error(one, expected) <= 2e-2


@pytest.mark.gpu
def test_a_mask_that_leaves_nothing_has_no_gradient(on_hopper: torch.device) -> None:
    """No program of the backward waits for a tile: the accumulator of dq must be zero by then."""
    q, k, v, grad = (torch.randn(1, 4, 512, 64, device=on_hopper).bfloat16() for _ in range(4))
    bias = torch.full((1, 1, 1, 512), -math.inf, device=on_hopper).bfloat16()
    for _ in range(8):
        poison = [torch.full((2**20,), math.nan, device=on_hopper) for _ in range(8)]
        del poison
        ours, _ = _attend(q, k, v, bias.expand(1, 4, 512, 512), grad)
        assert all(each.eq(0).all() for each in ours)


@pytest.mark.gpu
def test_what_a_mask_removes_reaches_nothing(on_hopper: torch.device) -> None:
    q, k, v, grad = (torch.randn(2, 4, 512, 64, device=on_hopper).bfloat16() for _ in range(4))
    bias = torch.zeros(2, 1, 1, 512, device=on_hopper)
    bias[..., 256:] = -math.inf
    k[:, :, 256:] = v[:, :, 256:] = math.nan
    ours, _ = _attend(q, k, v, bias.bfloat16().expand(2, 4, 512, 512), grad)
    assert all(each.isfinite().all() for each in ours)
    assert ours[2][:, :, 256:].eq(0).all() and ours[3][:, :, 256:].eq(0).all()
