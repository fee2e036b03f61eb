"""Attention with an additive mask, or with low scores: Triton's kernels and the ops around."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("triton")

from errors import largest_error

import opgraft
from opgraft_kernels.attention import (
    aten,
    boolean,
    overrides,
    samples,
    triton_kernels,
    triton_sizes,
)

# In tiles of 32, the interpreter's, and a part of one.
BATCH, HEADS, QUERIES, KEYS, DIM = 2, 2, 40, 70, 16
SCALE = DIM**-0.5
# As a mask is broadcast; by heads and queries that share it, kernels read it otherwise.
SHAPES = {
    "for each score": (BATCH, HEADS, QUERIES, KEYS),
    "for all heads": (BATCH, 1, QUERIES, KEYS),
    "for all heads and batches": (1, 1, QUERIES, KEYS),
    "for all queries": (BATCH, HEADS, 1, KEYS),
    "for all queries and heads": (BATCH, 1, 1, KEYS),
    "for all keys": (BATCH, 1, QUERIES, 1),
}
NAMES = ("out", "logsumexp", "dq", "dk", "dv", "dbias")


def inputs(
    dtype: torch.dtype, device: torch.device, *, heads: int = HEADS, heads_k: int = HEADS
) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient."""
    torch.manual_seed(1)
    shapes = [(heads, QUERIES), (heads_k, KEYS), (heads_k, KEYS), (heads, QUERIES)]
    return [torch.randn(BATCH, *each, DIM, device=device).to(dtype) for each in shapes]


@pytest.fixture(autouse=True)
def tiles_are_listed_for_these_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels do not depend on how many heads share a list, and the interpreter's time does."""
    monkeypatch.setattr(triton_kernels, "_LIST_FROM_HEADS", HEADS)


def bias_of(shape: tuple[int, ...], lowest: float, device: torch.device) -> torch.Tensor:
    """Random numbers; with `lowest`, a mask with tiles that are that, or 0, throughout."""
    torch.manual_seed(2)
    bias = torch.randn(shape, device=device)
    if lowest:
        bias = torch.where(bias < -0.5, lowest, 0.0)
        bias[..., :32] = 0.0
        bias[..., 64:] = lowest
    return bias


def by_formula(
    tensors: list[torch.Tensor],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    causal: bool = False,
    scale: float = SCALE,
) -> list[torch.Tensor]:
    """With autograd; 0 for queries that no key is left for."""
    given = [*tensors[:3], *([] if bias is None else [bias])]
    leaves = [each.detach().to(dtype).requires_grad_() for each in given]
    q, k, v = leaves[:3]
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if bias is not None:
        scores = scores + leaves[3]
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~keep.tril(scores.shape[-1] - scores.shape[-2]), -math.inf)
    is_left_alone = (scores == -math.inf).all(-1, keepdim=True)
    p = scores.masked_fill(is_left_alone, 0.0).softmax(-1).masked_fill(is_left_alone, 0.0)
    out = p @ v.repeat_interleave(group, 1)
    gradients = torch.autograd.grad(out, leaves, tensors[3].to(dtype))
    return [out.detach(), scores.logsumexp(-1).detach(), *gradients]


def by_triton(
    tensors: list[torch.Tensor],
    bias: torch.Tensor | None,
    *,
    causal: bool = False,
    with_dbias: bool = True,
    scale: float = SCALE,
) -> list[torch.Tensor | None]:
    q, k, v, grad = tensors
    out, logsumexp = torch.full_like(q, math.nan), q.new_full(q.shape[:3], math.nan).float()
    triton_kernels.forward(q, k, v, out, logsumexp, scale, causal, bias)
    dq, dk, dv = (torch.full_like(each, math.nan) for each in (q, k, v))
    dbias = None
    if bias is not None and with_dbias:
        dbias = torch.full(bias.shape, 0.0 if causal else math.nan, dtype=q.dtype, device=q.device)
    triton_kernels.backward(grad, q, k, v, out, logsumexp, dq, dk, dv, scale, causal, bias, dbias)
    return [out, logsumexp, dq, dk, dv, dbias]


def assert_right(
    ours: list[torch.Tensor | None], native: list[torch.Tensor], right: list[torch.Tensor]
) -> None:
    """At most twice the error that the formula has in the same dtype, and some roundings."""
    for name, one, other, expected in zip(NAMES, ours, native, right, strict=True):
        there = expected.isfinite()  # a logsumexp of -inf is inf with us
        if one is None or not there.any():
            continue
        worst, yardstick = (largest_error(x[there], expected[there]) for x in (one, other))
        assert worst <= 2 * yardstick + 4 * torch.finfo(one.dtype).eps, name


def expanded(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bias.to(dtype).expand(BATCH, HEADS, QUERIES, KEYS)


@pytest.mark.parametrize("lowest", [0.0, -math.inf], ids=["numbers", "mask"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_a_bias_is_added(
    shape: tuple[int, ...], lowest: float, dtype: torch.dtype, device: torch.device
) -> None:
    tensors, bias = inputs(dtype, device), expanded(bias_of(shape, lowest, device), dtype)
    native, right = (by_formula(tensors, bias, each) for each in (dtype, torch.float64))
    with_dbias = shape[1] == HEADS
    assert_right(by_triton(tensors, bias, with_dbias=with_dbias), native, right)


@pytest.mark.parametrize("heads_k", [1, 2])
def test_query_heads_that_share_keys_have_their_own_bias(
    heads_k: int, device: torch.device
) -> None:
    tensors = inputs(torch.float16, device, heads=4, heads_k=heads_k)
    bias = bias_of((BATCH, 4, QUERIES, KEYS), 0.0, device).half()
    native, right = (by_formula(tensors, bias, each) for each in (torch.float16, torch.float64))
    assert_right(by_triton(tensors, bias), native, right)


@pytest.mark.parametrize("shape", ["for each score", "for all queries and heads"])
def test_causal_with_a_bias(shape: str, device: torch.device) -> None:
    tensors = inputs(torch.float16, device)
    bias = expanded(bias_of(SHAPES[shape], 0.0, device), torch.float16)
    native, right = (
        by_formula(tensors, bias, each, causal=True) for each in (torch.float16, torch.float64)
    )
    assert_right(by_triton(tensors, bias, causal=True), native, right)


def _random_call(
    seed: int, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor, bool, bool]:
    """Query, key, value, the output's gradient, a bias of tiles: -inf, 0, low and other
    numbers; whether it is causal, and whether its gradient is wanted."""
    torch.manual_seed(seed)
    choose = random.Random(seed).choice
    batch, (heads_k, group) = 2, choose(((1, 4), (2, 2), (4, 1), (1, 3)))
    # Of one key the gradients of queries are 0, and what is compared would be roundings.
    queries, keys = choose((1, 33, 64, 75)), choose((31, 64, 75))
    dtype = choose((torch.float16, torch.float32))
    made = [
        torch.randn(batch, heads, length, DIM, device=device).to(dtype)
        for heads, length in (
            (heads_k * group, queries), (heads_k, keys), (heads_k, keys), (heads_k * group, queries)
        )
    ]  # fmt: skip
    sizes = (batch, heads_k * group, queries, keys)
    # Mostly heads share it: tiles are listed.
    of_heads = choose((1, 1, 1, heads_k * group))
    shape = (choose((1, batch)), of_heads, choose((1, queries, queries)), keys)
    bias = torch.randn(shape, device=device)
    kinds = torch.randint(0, 4, (*shape[:2], 3, 3), device=device)
    # Of low numbers alone the logsumexp in float32 is too coarse for any backward.
    kinds[..., 0] = torch.where((kinds == 2).any(-1), 1, kinds[..., 0])
    tiles = kinds.repeat_interleave(32, 2).repeat_interleave(32, 3)[..., : shape[2], :keys]
    bias = bias.masked_fill(tiles == 0, -math.inf).masked_fill(tiles == 1, 0.0)
    bias = bias.masked_fill(tiles == 2, choose((-9984.0, -65504.0)))
    bias = bias.to(choose((dtype, torch.float32)))
    if choose((True, False)):
        bias = bias.mT.contiguous().mT
    return (
        made,
        bias.expand(sizes),
        queries <= keys and choose((True, False, False)),
        choose((True, False, False)),
    )


# Of queries and keys.
TILES = [(32, 32), (64, 16), (16, 64), (64, 32)]


@pytest.mark.parametrize("seed", range(10))
def test_random_calls(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of three heads and of four
    # Two kernels of different tiles have their lists of the same marks.
    sizes = random.Random(seed).choices(TILES, k=2)
    for name, size in zip(("backward_queries_tile", "backward_keys_tile"), sizes, strict=True):
        tile = triton_sizes.Tile(*size, 4, 1)
        monkeypatch.setattr(triton_kernels, name, lambda *_, tile=tile: tile)
    tensors, bias, causal, with_dbias = _random_call(seed, device)
    dtype = tensors[0].dtype
    native, right = (
        by_formula(tensors, bias, each, causal=causal) for each in (dtype, torch.float64)
    )
    ours = by_triton(tensors, bias, causal=causal, with_dbias=with_dbias)
    assert ours[1] is not None and ours[1].isinf().equal(right[1].isinf())
    assert all(each is None or not each.isnan().any() for each in ours)
    assert_right(ours, native, right)


@pytest.mark.parametrize("strides", ["transposed", "every second key", "unaligned"])
def test_a_bias_has_any_strides(strides: str, device: torch.device) -> None:
    tensors = inputs(torch.float16, device)
    bias = bias_of(SHAPES["for each score"], 0.0, device).half()
    bias = {
        "transposed": lambda: bias.mT.contiguous().mT,
        "every second key": lambda: torch.stack([bias, bias], -1).flatten(-2)[..., ::2],
        "unaligned": lambda: F.pad(bias, (3, 0))[..., 3:],
    }[strides]()
    native, right = (by_formula(tensors, bias, each) for each in (torch.float16, torch.float64))
    assert_right(by_triton(tensors, bias), native, right)


def test_a_bias_lies_more_than_2_to_the_31_elements_apart(tmp_path: Path) -> None:
    """Where offsets of 32 bits would wrap around, there is -inf."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    apart, start = 2**26, 2**31
    # Of the file only what is written takes space.
    size = start + KEYS * apart
    far = torch.from_file(str(tmp_path / "far"), shared=True, size=size, dtype=torch.float16)
    far[:start:apart] = -math.inf
    bias = far[start::apart].expand(BATCH, HEADS, QUERIES, KEYS)
    tensors = inputs(torch.float16, torch.device("cpu"))
    near = bias[:1, :1, :1].contiguous().expand_as(bias)
    for one, other in zip(
        by_triton(tensors, bias, with_dbias=False)[:5],
        by_triton(tensors, near, with_dbias=False)[:5],
        strict=True,
    ):
        assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("shape", ["for all heads", "for each score", "for all queries and heads"])
def test_queries_without_a_key_are_0_and_have_no_gradient(shape: str, device: torch.device) -> None:
    tensors = inputs(torch.float16, device)
    bias = bias_of(SHAPES[shape], 0.0, device)
    bias[1, :, -1:] = -math.inf
    out, logsumexp, dq, dk, dv, _ = by_triton(tensors, expanded(bias, torch.float16))
    alone = bias.isneginf().all(-1).expand(BATCH, HEADS, QUERIES)
    assert alone.any() and logsumexp[alone].eq(math.inf).all()
    assert out[alone].eq(0).all() and dq[alone].eq(0).all()
    assert all(each.isfinite().all() for each in (out, dq, dk, dv))


@pytest.mark.parametrize("shape", ["for all heads", "for each score", "for all queries and heads"])
def test_a_mask_of_the_lowest_number_is_one_of_numbers(shape: str, device: torch.device) -> None:
    """Of queries that have nothing else, the output is the mean of all values, as natively."""
    tensors = inputs(torch.float16, device)
    bias = torch.where(bias_of(SHAPES[shape], 0.0, device) < 0, torch.finfo(torch.float32).min, 0)
    bias[0, :, :1] = torch.finfo(torch.float32).min
    out = by_triton(tensors, bias.expand(BATCH, HEADS, QUERIES, KEYS))[0]
    right = by_formula(tensors, bias, torch.float64)[0]
    torch.testing.assert_close(out.double(), right, rtol=2e-3, atol=2e-3)


# What stands for -inf in masks: torch's own for cuDNN, BERT's in bfloat16, and the lowest number.
LOW = [-65504.0, -9984.0, torch.finfo(torch.float32).min]


@pytest.mark.parametrize("lowest", [-math.inf, *LOW])
@pytest.mark.parametrize("shape", ["for all heads", "for all queries and heads"])
def test_tiles_that_a_mask_removes_are_not_computed(
    shape: str, lowest: float, device: torch.device
) -> None:
    """What is not a number there reaches nothing."""
    tensors = inputs(torch.float16, device)
    bias = bias_of(SHAPES[shape], lowest, device)
    for each in tensors[2 if lowest in LOW else 1 : 3]:  # the norm of a key bounds its scores
        each[:, :, 64:] = math.nan
    wide = bias.expand(BATCH, HEADS, QUERIES, KEYS)
    out, _, dq, dk, dv, _ = by_triton(tensors, wide, with_dbias=False)
    assert out.isfinite().all() and dq.isfinite().all()
    assert dk[:, :, 64:].eq(0).all() and dv[:, :, 64:].eq(0).all()


@pytest.mark.parametrize("shape", ["for all heads", "for all queries and heads"])
@pytest.mark.parametrize("causes", ["a large score", "no other key", "not a number"])
def test_low_tiles_are_computed_where_they_count(
    causes: str, shape: str, device: torch.device
) -> None:
    """A score of 10,000 makes up for the mask; of queries that see nothing else, all is theirs."""
    tensors = inputs(torch.float16, device)
    bias = bias_of(SHAPES[shape], LOW[1], device)
    if causes == "a large score":
        tensors[0][:, :, 5] = 200.0
        tensors[1][:, :, 66] = 20.0
    elif causes == "no other key":
        bias[1, :, -1:] = LOW[1]
    else:
        tensors[1][:, :, 66] = math.nan
    wide = bias.expand(BATCH, HEADS, QUERIES, KEYS)
    ours = by_triton(tensors, wide, with_dbias=False)
    right, native = (by_formula(tensors, wide, each) for each in (torch.float64, torch.float32))
    if causes == "not a number":
        assert ours[0] is not None and ours[0].isnan().equal(native[0].isnan())
    else:
        assert_right([*ours[:5], None], [each.half() for each in native], right)


@pytest.mark.parametrize("shape", ["for all heads", "for all queries and heads"])
def test_low_tiles_count_though_squares_of_queries_are_0_in_float32(
    shape: str, device: torch.device
) -> None:
    """A scale may make up for numbers so small: of 10,737, where the mask is -9984."""
    q, k, v, grad = inputs(torch.float32, device)
    q, k = torch.full_like(q, 1e-23), torch.zeros_like(k)
    k[:, :, 64:], scale = 4e18, 2.0**24
    bias = bias_of(SHAPES[shape], LOW[1], device).expand(BATCH, HEADS, QUERIES, KEYS)
    out, logsumexp = torch.empty_like(q), q.new_empty(q.shape[:3])
    triton_kernels.forward(q, k, v, out, logsumexp, scale, False, bias)
    torch.testing.assert_close(out, v[:, :, 64:].mean(2, keepdim=True).expand_as(out))
    dq, dk, dv = (torch.empty_like(each) for each in (q, k, v))
    triton_kernels.backward(grad, q, k, v, out, logsumexp, dq, dk, dv, scale, False, bias)
    right = grad.sum(2, keepdim=True) / (KEYS - 64)
    torch.testing.assert_close(
        dv[:, :, 64:], right.expand(-1, -1, KEYS - 64, -1), rtol=1e-2, atol=1e-2
    )


def test_a_mask_that_is_not_a_number_is_not_taken_for_one(device: torch.device) -> None:
    tensors = inputs(torch.float16, device)
    bias = torch.full(SHAPES["for all heads"], -math.inf, device=device)
    bias[..., 3], bias[0, 0, 5, 65] = 0.0, math.nan
    out = by_triton(tensors, expanded(bias, torch.float16))[0]
    assert out[0, :, 5].isnan().all() and out[1].isfinite().all()


def _gradients(
    tensors: list[torch.Tensor],
    bias: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
) -> list[torch.Tensor]:
    q, k, v, grad = tensors
    dq, dk, dv = (torch.full_like(each, math.nan) for each in (q, k, v))
    triton_kernels.backward(grad, q, k, v, out, logsumexp, dq, dk, dv, SCALE, False, bias)
    return [dq, dk, dv]


@pytest.mark.parametrize("others", [0.0, LOW[1]], ids=["beside numbers", "beside low numbers"])
@pytest.mark.parametrize("shape", ["for all heads", "for each score", "for all queries and heads"])
def test_native_s_logsumexp_of_minus_infinity_is_that_of_a_query_without_a_key(
    shape: str, others: float, device: torch.device
) -> None:
    """-inf - -inf would be NaN."""
    tensors = inputs(torch.float16, device)
    bias = bias_of(SHAPES[shape], others, device)
    bias[1, :, -1:] = -math.inf
    wide = bias.expand(BATCH, HEADS, QUERIES, KEYS)
    out, logsumexp, *ours = by_triton(tensors, wide, with_dbias=False)[:5]
    assert out is not None and logsumexp is not None
    alone = wide.isneginf().all(-1)
    assert alone.any() and logsumexp[alone].eq(math.inf).all()
    found = _gradients(tensors, wide, out, logsumexp.masked_fill(alone, -math.inf))
    for one, other in zip(found, ours, strict=True):
        assert other is not None and torch.equal(one, other)


@pytest.mark.parametrize("lowest", [-math.inf, LOW[1]])
@pytest.mark.parametrize("shape", ["for all heads", "for each score", "for all queries and heads"])
def test_a_logsumexp_that_is_not_a_number_reaches_all_keys_that_are_computed(
    shape: str, lowest: float, device: torch.device
) -> None:
    """As by the formula. Where the mask is low, that tile is one: its bound is not a number."""
    tensors = inputs(torch.float16, device)
    bias = bias_of(SHAPES[shape], lowest, device).expand(BATCH, HEADS, QUERIES, KEYS)
    out, logsumexp, *_ = by_triton(tensors, bias, with_dbias=False)
    assert out is not None and logsumexp is not None
    logsumexp[:, :, 5] = math.nan
    dq, dk, dv = _gradients(tensors, bias, out, logsumexp)
    assert dq[:, :, 5].isnan().all() and dq[:, :, 6:].isfinite().all()
    keys = 64 if lowest == -math.inf else KEYS
    assert all(each[:, :, :keys].isnan().all() for each in (dk, dv))


def test_the_same_bits_on_every_run(device: torch.device) -> None:
    tensors = inputs(torch.float16, device)
    bias = expanded(bias_of(SHAPES["for all heads"], -math.inf, device), torch.float16)
    first, second = (by_triton(tensors, bias, with_dbias=False)[:5] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_low_scores_beside_keys_that_are_not_there(
    has_bias: bool, causal: bool, device: torch.device
) -> None:
    """exp(0 - L) is infinite where all of a query's scores are under -89."""
    tensors = inputs(torch.float32 if device.type == "cpu" else torch.float16, device)
    tensors[0], tensors[1] = tensors[0] * 0.1 + 8, tensors[1] * 0.1 - 8
    bias = torch.zeros(BATCH, HEADS, QUERIES, KEYS, device=device, dtype=tensors[0].dtype)
    right = by_formula(tensors, bias, torch.float64, causal=causal)
    native = by_formula(tensors, bias, tensors[0].dtype, causal=causal)
    assert right[1].max() < -200
    assert_right(by_triton(tensors, bias if has_bias else None, causal=causal), native, right)


def test_tiles_are_listed_where_several_heads_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    shared = torch.zeros(1, 1, 8, 8).expand(1, 4, 8, 8)
    assert triton_kernels._is_listed(shared, causal=False)
    assert not triton_kernels._is_listed(shared[:, :3], causal=False)
    assert not triton_kernels._is_listed(shared.contiguous(), causal=False)
    assert not triton_kernels._is_listed(shared, causal=True)


def _list_by_formula(bias: torch.Tensor, rows: int, cols: int) -> list[tuple[int, int, Any, Any]]:
    """Of each row of tiles the first run of zeros, from and to; other tiles; low ones."""
    found = []
    for one, start in itertools.product(bias, range(0, bias.shape[1], rows)):
        tiles = [
            F.pad(tile, (0, cols - tile.shape[1], 0, rows - tile.shape[0]), value=-math.inf)
            for tile in one[start : start + rows].split(cols, 1)
        ]
        zero = [(tile == 0).all().item() for tile in tiles]
        begin = zero.index(True) if True in zero else len(tiles)
        end = zero.index(False, begin) if False in zero[begin:] else len(tiles)
        low = [(tile <= -9000).all().item() for tile in tiles]
        nothing = [(tile == -math.inf).all().item() for tile in tiles]
        others = [i for i in range(len(tiles)) if not low[i] and not begin <= i < end]
        found.append(
            (begin, end, others, [i for i in range(len(tiles)) if low[i] and not nothing[i]])
        )
    return found


@pytest.mark.parametrize("of_queries", TILES, ids=str)
@pytest.mark.parametrize("of_keys", TILES, ids=str)
def test_both_lists_of_a_backward_say_what_its_tiles_hold(
    of_queries: tuple[int, int], of_keys: tuple[int, int], device: torch.device
) -> None:
    batch, queries, keys = 2, 100, 170
    kinds = torch.tensor([0.0, 0.0, -math.inf, -math.inf, -1e4, -1e4, 1.0, math.nan], device=device)
    chosen = kinds[torch.randint(0, len(kinds), (batch, 7, 6), device=device)]
    bias = chosen.repeat_interleave(32, 1).repeat_interleave(64, 2)[:, :queries, :keys]
    tiles = [triton_sizes.Tile(*each, 4, 1) for each in (of_queries, of_keys)]
    shared = bias.unsqueeze(1).expand(batch, 8, queries, keys)
    *planned, launches = triton_kernels._plan_bias(shared, False, *tiles)
    triton_kernels._launch(launches)
    assert len(launches) == 3
    sides = ((bias, of_queries), (bias.mT, of_keys[::-1]))
    for listed, (side, (rows, cols)) in zip(planned, sides, strict=True):
        lists = listed.tiles.flatten(0, 1).tolist()
        found = [
            (row[0], row[1], row[5 : 5 + row[2]], row[5 + row[2] : 5 + row[3]]) for row in lists
        ]
        assert found == _list_by_formula(side, rows, cols)
    best = planned[0].tiles[..., 4].contiguous().view(torch.float32)
    assert (best > -math.inf).any()
    # A row with a NaN is one, whatever is left out of it.
    of_rows = bias.nan_to_num(math.inf, neginf=-math.inf).amax(-1).split(of_queries[0], 1)
    for row, largest in zip(best.unbind(1), of_rows, strict=True):
        assert (row <= largest.amin(1)).all()


def test_the_largest_head_dimension_is_the_kernels() -> None:
    assert overrides.MAX_DIM == triton_sizes.MAX_DIM


# ------------------------------------------------------------------ through the ops


@pytest.fixture
def on_cpu() -> Iterator[list[opgraft.Override]]:
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    yield overrides.register("CPU")


MASKS = {
    "boolean": lambda: torch.rand(BATCH, 1, QUERIES, KEYS) > 0.3,
    "padding": lambda: (torch.arange(KEYS) < torch.tensor([[KEYS], [41]]))[:, None, None],
    "of two dimensions": lambda: torch.randn(QUERIES, KEYS).half(),
    "float32": lambda: torch.randn(BATCH, HEADS, QUERIES, KEYS),
    "of one batch": lambda: torch.randn(1, HEADS, QUERIES, KEYS).half(),
}


@pytest.mark.parametrize("name", MASKS)
def test_sdpa_with_a_mask_hits_on_cpu(name: str, on_cpu: list[opgraft.Override]) -> None:
    *leaves, grad = inputs(torch.float16, torch.device("cpu"))
    mask = MASKS[name]()

    def run() -> tuple[torch.Tensor, ...]:
        q, k, v = (each.detach().requires_grad_() for each in leaves)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out, *torch.autograd.grad(out, (q, k, v), grad)

    ours = run()
    assert [override.hits for override in on_cpu] == [1, 1]
    with opgraft.disabled():
        native = run()
    for one, other in zip(ours, native, strict=True):
        torch.testing.assert_close(one, other, rtol=4e-3, atol=4e-3)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("by", ["ours", "native"])
@pytest.mark.parametrize("backward_by", ["ours", "native"])
@pytest.mark.parametrize("shape", ["for all heads", "for each score", "for all queries and heads"])
def test_queries_without_a_key_and_with_large_scores_agree_with_native_on_cpu(
    shape: str, by: str, backward_by: str, on_cpu: list[opgraft.Override]
) -> None:
    """exp of their scores is infinite. The logsumexp is native's, too."""
    *leaves, grad = inputs(torch.float16, torch.device("cpu"))
    bias = torch.where(bias_of(SHAPES[shape], 0.0, torch.device("cpu")) < -0.5, -math.inf, 0.0)
    bias[..., 0], bias[1, :, -1:] = 0.0, -math.inf
    bias = expanded(bias, torch.float16)
    is_empty = bias.isneginf().all(-1, keepdim=True)
    leaves[0] = torch.where(is_empty, torch.full_like(leaves[0], 20.0), leaves[0])
    leaves[1][:, :, ::2], leaves[1][:, :, 1::2] = 20.0, -20.0
    right = by_formula([*leaves, grad], bias, torch.float64)

    def run(forward: Any, backward: Any) -> list[torch.Tensor]:
        with forward():
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *leaves, attn_mask=bias
            )
        with backward():
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, *leaves, out, lse, 0.0, False, attn_mask=bias
            )
        return [out, lse, *gradients]

    native = run(opgraft.disabled, opgraft.disabled)
    scopes = {"ours": nullcontext, "native": opgraft.disabled}
    ours = run(scopes[by], scopes[backward_by])
    assert [each.hits for each in on_cpu] == [by == "ours", backward_by == "ours"]
    assert_right([*ours, None], [*native, native[0]], right)
    torch.testing.assert_close(ours[1], native[1], rtol=1e-4, atol=1e-4)
    assert is_empty.any() and ours[2].masked_select(is_empty).eq(0).all()


def _layout(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.shape, value.stride()


def _on_meta(named: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        if isinstance(each, torch.Tensor)
        else each
        for name, each in named.items()
    }


def _call(op: Any, named: dict[str, Any]) -> Any:
    arguments = op._schema.arguments
    positional = [named[each.name] for each in arguments if not each.kwarg_only]
    return op(*positional, **{each.name: named[each.name] for each in arguments if each.kwarg_only})


# A bias that is learnt, of as many keys as queries.
LEARNT = {
    "for each score": (BATCH, HEADS, QUERIES, QUERIES),
    "for all batches": (1, HEADS, QUERIES, QUERIES),
    "for all heads": (BATCH, 1, QUERIES, QUERIES),
}


@pytest.mark.parametrize("shape", LEARNT)
@pytest.mark.parametrize("wants_dbias", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_bias_has_the_gradient_that_the_efficient_op_promises(
    is_causal: bool, wants_dbias: bool, shape: str
) -> None:
    """Of each score, where the bias is broadcast, too: adding up is autograd's."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    op = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    q, k, v, grad = inputs(torch.float16, torch.device("cpu"))
    k, v = k[:, :, :QUERIES].contiguous(), v[:, :, :QUERIES].contiguous()
    bias = torch.randn(LEARNT[shape]).half().expand(BATCH, HEADS, QUERIES, QUERIES)
    out, logsumexp, *seeds = aten.efficient_forward(
        "triton_kernels", q, k, v, bias, True, 0.0, is_causal
    )
    values = (grad, q, k, v, bias, out, logsumexp, *seeds, 0.0)
    values = (*values, [True, True, True, wants_dbias], is_causal)
    ours = aten.efficient_backward("triton_kernels", *values)
    names = [each.name for each in op._schema.arguments]
    named = {**dict(zip(names, values, strict=False)), "scale": None}
    promised = _call(op, _on_meta(named))
    assert [_layout(each) for each in ours] == [_layout(each) for each in promised]
    right = by_formula([q, k, v, grad], bias, torch.float64, causal=is_causal)
    expected = right[2:] if wants_dbias else right[2:5]
    for one, other in zip(ours, expected, strict=False):
        torch.testing.assert_close(one.double(), other, rtol=4e-3, atol=4e-3)


# What models mask with, and what they do not: ``[batch, heads or 1, queries or 1, keys]``.


def _padding(batch: int, keys: int) -> torch.Tensor:
    """Which keys there are: of the sequences of a batch ever fewer, in the last one a half."""
    lengths = torch.linspace(keys, keys // 2, batch, dtype=torch.int64)
    return (torch.arange(keys) < lengths[:, None])[:, None, None]


def _of_tiles(shape: tuple[int, ...], *kinds: float) -> torch.Tensor:
    """Tiles of 32 by 32, each of which is 0, a number of `kinds`, or random numbers throughout."""
    *others, queries, keys = shape
    tiles = torch.randint(0, len(kinds) + 2, (*others, queries // 32 + 1, keys // 32 + 1))
    tiles[..., 0] = 0  # a key for each query
    tiles = tiles.repeat_interleave(32, -2).repeat_interleave(32, -1)[..., :queries, :keys]
    bias = torch.randn(shape).masked_fill(tiles == 0, 0.0)
    for number, kind in enumerate(kinds):
        bias = bias.masked_fill(tiles == number + 2, kind)
    return bias


GPU_MASKS = {
    "numbers": lambda b, h, q, k: torch.randn(b, h, q, k),
    "of one batch": lambda b, h, q, k: torch.randn(1, h, q, k),
    "for all queries": lambda b, h, q, k: torch.randn(b, h, 1, k),
    "padding": lambda b, h, q, k: torch.where(_padding(b, k), 0.0, -math.inf),
    "boolean padding": lambda b, h, q, k: _padding(b, k).expand(b, 1, q, k),
    "causal and padding": lambda b, h, q, k: torch.where(
        _padding(b, k) & torch.ones(q, k, dtype=torch.bool).tril(max(k - q, 0)), 0.0, -math.inf
    ),
    "boolean causal and padding": lambda b, h, q, k: (
        _padding(b, k) & torch.ones(q, k, dtype=torch.bool).tril(max(k - q, 0))
    ),
    "boolean causal and padding on the left": lambda b, h, q, k: (
        _padding(b, k).flip(-1) & torch.ones(q, k, dtype=torch.bool).tril(max(k - q, 0))
    ),
    "documents": lambda b, h, q, k: torch.where(
        (torch.arange(q)[:, None] * 5 // q == torch.arange(k) * 5 // k)[None, None], 0.0, -math.inf
    ),
    "tiles": lambda b, h, q, k: _of_tiles((b, 1, q, k), -math.inf),
    "tiles of each head": lambda b, h, q, k: _of_tiles((b, h, q, k), -math.inf),
    "tiles of low numbers": lambda b, h, q, k: _of_tiles((1, 1, q, k), -65504.0, -math.inf),
}
BY_TRITON, BY_CUTEDSL = (32, 40, 64, 72, 128), (64, 80, 96, 128)
# Batch, heads, queries, keys.
GPU_SIZES = [(2, 4, 200, 200), (3, 8, 1000, 1000), (2, 4, 513, 4000)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernels", "backend", "dtype", "dim"),
    [
        *(("triton", SDPBackend.CUDNN_ATTENTION, torch.bfloat16, dim) for dim in BY_TRITON),
        *(("cutedsl", SDPBackend.CUDNN_ATTENTION, torch.bfloat16, dim) for dim in BY_CUTEDSL),
        ("triton", SDPBackend.CUDNN_ATTENTION, torch.float16, 64),
        ("cutedsl", SDPBackend.CUDNN_ATTENTION, torch.float16, 64),
        *(("triton", SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16, dim) for dim in (64, 256)),
        *(("triton", SDPBackend.EFFICIENT_ATTENTION, torch.float32, dim) for dim in (64, 80, 128)),
    ],
    ids=lambda each: str(each).split(".")[-1],
)
@pytest.mark.parametrize("sizes", GPU_SIZES, ids=str)
@pytest.mark.parametrize("name", GPU_MASKS)
def test_sdpa_with_a_mask_hits_on_a_gpu(
    name: str,
    sizes: tuple[int, int, int, int],
    kernels: str,
    backend: SDPBackend,
    dtype: torch.dtype,
    dim: int,
) -> None:
    """A forward by one kernel and a backward by another agree."""
    is_cudnn = backend == SDPBackend.CUDNN_ATTENTION
    if "on the left" in name and is_cudnn and boolean._lowest(dtype, "cuda") != -math.inf:
        pytest.skip("what is False is a number for cuDNN in this torch: no query is left alone")
    kind = _register_masked(kernels, GPU_MASKS[name](*sizes))
    device = torch.device("cuda")
    torch.manual_seed(3)
    batch, heads, queries, keys = sizes
    q, grad = (torch.randn(batch, heads, queries, dim, device=device).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, heads, keys, dim, device=device).to(dtype) for _ in range(2))
    mask = GPU_MASKS[name](*sizes).to(device)
    mask = mask if mask.dtype is torch.bool else mask.to(dtype)

    def run(forward: Any, backward: Any) -> tuple[torch.Tensor, ...]:
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        with sdpa_kernel(backend), forward():
            out = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
        with backward():
            return out, *torch.autograd.grad(out, leaves, grad)

    native = run(opgraft.disabled, opgraft.disabled)
    assert not any(each.hits for each in opgraft.overrides())
    right = _sdpa_by_formula(q, k, v, mask, grad)
    by_us, by_native = nullcontext, opgraft.disabled
    for number, scopes in enumerate(((by_us, by_us), (by_us, by_native), (by_native, by_us))):
        ours = run(*scopes)
        hits = {each.name: each.hits for each in opgraft.overrides() if each.hits}
        assert all(f".{kind}." in name for name in hits)
        assert sorted(hits.values()) == [[1, 1], [1, 2], [2, 2]][number]
        for what, one, other, each in zip(NAMES_OF_SDPA, ours, native, right, strict=True):
            assert one.stride() == other.stride()
            error, yardstick = (largest_error(x, each) for x in (one, other))
            assert error <= 2 * yardstick + 4 * torch.finfo(dtype).eps, (what, number)


NAMES_OF_SDPA = ("out", "dq", "dk", "dv")

LEARNT_ON_A_GPU = {
    "for each score": lambda b, h, q, k: (b, h, q, k),
    "for all batches": lambda b, h, q, k: (1, h, q, k),
    "for all heads": lambda b, h, q, k: (b, 1, q, k),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", GPU_SIZES, ids=str)
@pytest.mark.parametrize("shape", LEARNT_ON_A_GPU)
def test_sdpa_with_a_learnt_bias_hits_on_a_gpu(
    shape: str, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Its gradient is as exact as natively, where autograd adds up that of a broadcast one, too."""
    device = torch.device("cuda")
    batch, heads, queries, keys = sizes
    lengths = (queries, keys, keys, queries)
    *inputs_, grad = (
        torch.randn(batch, heads, length, 64, device=device).to(dtype) for length in lengths
    )
    bias = torch.randn(LEARNT_ON_A_GPU[shape](*sizes), device=device).to(dtype)

    def run() -> list[torch.Tensor]:
        leaves = [each.detach().requires_grad_() for each in (*inputs_, bias)]
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            out = F.scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3])
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    native = run()
    registered = overrides.register("CUDA")
    ours = run()
    hits = {each.name: each.hits for each in registered if each.hits}
    assert all(".masked." in name for name in hits) and list(hits.values()) == [1, 1]
    right = by_formula([*inputs_, grad], bias, torch.float64, scale=64**-0.5)
    del right[1]  # the logsumexp
    for what, one, other, each in zip((*NAMES_OF_SDPA, "dbias"), ours, native, right, strict=True):
        error, yardstick = (largest_error(x, each) for x in (one, other))
        assert error <= 2 * yardstick + 4 * torch.finfo(dtype).eps, what


def _register_masked(kernels: str, mask: torch.Tensor) -> str:
    """Register the overrides, for a mask without those of other kernels; the kind that takes it.

    A boolean mask becomes an additive one, as native makes it.
    """
    others = [".boolean_mask", ".cutedsl_boolean."]
    others += [".cutedsl_masked."] if kernels == "triton" else []
    for each in overrides.register("CUDA"):
        if any(other in each.name for other in others):
            each.remove()
    if kernels == "triton":
        return "masked"
    if not overrides._has_flash_attn_4():
        pytest.skip("needs FlashAttention-4")
    if mask.shape[1] != 1:
        pytest.skip("a mask that heads do not share is Triton's")
    return "cutedsl_masked"


def _sdpa_by_formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """In float64; 0 for queries that no key is left for."""
    bias = torch.where(mask, 0.0, -math.inf) if mask.dtype is torch.bool else mask
    out, _, *gradients = by_formula(
        [q, k, v, grad], bias.double(), torch.float64, scale=q.shape[-1] ** -0.5
    )
    return out, *gradients[:3]


# ------------------------------------------------------------------ conditions and crossovers

MASKED = [op.name for op in overrides._MASKED.ops]


def _named(op: str, *changes: tuple[str, Any], **features: Any) -> dict[str, Any]:
    """A call that the crossover's samples make, with some of the arguments changed."""
    given = {"rows": 2**8, "keys": 2**5, "dim": 64, "itemsize": 2, **features}
    named, *_ = samples.calls(op, torch.device("cpu"), **given)
    return {**named, **dict(changes)}


def _holds(op: str, named: dict[str, Any]) -> bool:
    """Without what is about the device."""
    found = next(each for each in overrides._TRITON.ops if each.name == op)
    return overrides._dense(found, with_bias=True).holds(named)


@pytest.mark.parametrize("for_all_heads", [0, 1])
@pytest.mark.parametrize("for_all_queries", [0, 1])
@pytest.mark.parametrize("op", MASKED)
def test_masks_are_taken(op: str, for_all_queries: int, for_all_heads: int) -> None:
    named = _named(op, for_all_queries=for_all_queries, for_all_heads=for_all_heads)
    assert _holds(op, named)
    assert not _holds(op, {**named, "attn_bias": None})


@pytest.mark.parametrize(
    "change",
    [
        lambda bias: bias.double(),
        lambda bias: bias.to("meta"),
        lambda bias: bias > 0,
        lambda bias: bias[..., 1:],
        lambda bias: bias[..., 1:, :],
        lambda bias: bias[0],
        lambda bias: bias[None],
        lambda bias: torch.cat([bias, bias], 1),
        lambda bias: torch.cat([bias, bias], 0),
    ],
)
@pytest.mark.parametrize("op", MASKED)
def test_masks_of_other_kinds_are_native_s(op: str, change: Any) -> None:
    named = _named(op, for_all_queries=0, for_all_heads=0)
    assert not _holds(op, {**named, "attn_bias": change(named["attn_bias"])})


@pytest.mark.parametrize("op", MASKED)
def test_a_mask_of_one_head_is_the_efficient_op_s_if_it_is_expanded(op: str) -> None:
    """Its backward returns a gradient of the mask's size."""
    named = _named(op, for_all_queries=0, for_all_heads=0)
    one = named["attn_bias"][:, :1]
    assert _holds(op, {**named, "attn_bias": one}) == ("efficient" not in op)
    assert _holds(op, {**named, "attn_bias": one.expand_as(named["attn_bias"])})


@pytest.mark.parametrize(("dim", "has_backward"), [(32, False), (64, False), (64, True)])
def test_float32_is_taken_where_native_s_backward_is_right_after_it(
    dim: int, has_backward: bool
) -> None:
    condition = overrides._agrees_with_native_backward()
    named = {"query": torch.empty(1, 4, 40, dim), "compute_log_sumexp": has_backward}
    assert condition.holds(named)
    assert condition.holds({**named, "query": torch.empty(1, 4, 40, 32)}) != has_backward


BY_TABLE = [
    (op, kind)
    for kind in (
        overrides._CUTEDSL,
        overrides._CUTEDSL_MASKED,
        overrides._TRITON,
        overrides._MASKED,
    )
    for op in kind.ops
    if op not in overrides._MEASURED_AS
]


META = torch.device("meta")


def _lengths(**features: Any) -> list[tuple[int, int]]:
    """Of the queries and keys that the samples have."""
    calls = samples.calls(MASKED[0], META, dim=64, **features)
    return [(named["query"].shape[2], named["key"].shape[2]) for named in calls]


@pytest.mark.parametrize(
    ("keys", "lengths"), [(64, []), (128, [128]), (256, [256, 384]), (4096, [4096, 6144])]
)
def test_of_lengths_that_fill_tiles_the_smallest_and_one_from_the_middle_are_measured(
    keys: int, lengths: list[int]
) -> None:
    found = _lengths(rows=2**14, keys=keys, fills_tiles=1)
    assert found == [(length, length) for length in lengths]


@pytest.mark.parametrize("keys", [32, 64, 128, 256, 4096])
def test_of_lengths_that_fill_no_tile_one_from_the_middle_is_measured(keys: int) -> None:
    length = keys + keys // 2 + 8
    assert _lengths(rows=2**14, keys=keys, fills_tiles=0) == [(length, length)]


@pytest.mark.parametrize("is_causal", [0, 1])
@pytest.mark.parametrize("fills_tiles", [0, 1])
def test_each_cell_that_a_call_can_be_of_has_a_sample(fills_tiles: int, is_causal: int) -> None:
    """Of as many rows as two sequences have, or one, too."""
    powers = itertools.product(range(10, 19), range(5, 13))
    for rows, keys in ((2**row, 2**key) for row, key in powers):
        can_be = keys >= 128 * fills_tiles and (rows >= keys or not is_causal)
        features = {"rows": rows, "keys": keys, "is_causal": is_causal}
        assert bool(_lengths(**features, fills_tiles=fills_tiles)) == can_be, features


@pytest.mark.parametrize("fills_tiles", [0, 1])
def test_random_numbers_have_samples_of_many_lengths(fills_tiles: int) -> None:
    rng = random.Random(0)
    lengths = set()
    for _ in range(200):
        rows, keys = (round(2 ** rng.uniform(*ends)) for ends in ((10, 18), (7, 12)))
        for found in _lengths(rows=rows, keys=keys, fills_tiles=fills_tiles):
            assert (found[0] % 128 == found[1] % 128 == 0) == fills_tiles
            assert keys <= found[1] < 2 * keys
            lengths.add(found[1])
    assert len(lengths) > 25
    assert not fills_tiles or {384, 640, 896, 1152} <= lengths


@pytest.mark.parametrize(
    ("rows", "keys", "lengths"),
    [
        (2**14, 64, [(1024, 104)]),
        (2**10, 32, [(1024, 56)]),
        (2**14, 128, [(1088, 128)]),
        (2**14, 256, []),
        (2**9, 64, []),
    ],
)
def test_many_queries_of_few_keys_are_measured_apart(
    rows: int, keys: int, lengths: list[tuple[int, int]]
) -> None:
    assert _lengths(rows=rows, keys=keys, holds_keys=1) == lengths
    assert _lengths(rows=rows, keys=keys, holds_keys=1, is_causal=True) == []


@pytest.mark.parametrize(("keys", "lengths"), [(64, []), (128, [(1024, 128)]), (256, [])])
def test_many_queries_of_a_tile_of_keys_fill_theirs(
    keys: int, lengths: list[tuple[int, int]]
) -> None:
    assert _lengths(rows=2**14, keys=keys, holds_keys=1, fills_tiles=1) == lengths


def _feature(op: overrides._Op, name: str, queries: int, keys: int) -> Any:
    shapes = {"query": queries, "key": keys}
    named: dict[str, Any] = {
        name: torch.empty(
            [1, 2, length, 64] if op.heads == 1 else [1, length, 2, 64], device="meta"
        )
        for name, length in shapes.items()
    }
    named |= {"max_q": queries, "max_k": keys}
    return overrides._crossover(op, overrides._TRITON).features[name].evaluate(named)


@pytest.mark.crossovers
@pytest.mark.parametrize("op", overrides._TRITON.ops, ids=lambda op: op.name)
@pytest.mark.parametrize(
    ("queries", "keys", "fills"),
    [(128, 128, 1), (256, 384, 1), (256, 200, 0), (200, 256, 0), (77, 77, 0)],
)
def test_both_lengths_have_to_fill_tiles(
    op: overrides._Op, queries: int, keys: int, fills: int
) -> None:
    assert _feature(op, "fills_tiles", queries, keys) == fills


@pytest.mark.crossovers
@pytest.mark.parametrize("op", overrides._TRITON.ops, ids=lambda op: op.name)
@pytest.mark.parametrize("keys", [1, 77, 128, 129, 4096])
@pytest.mark.parametrize("queries", [1, 1023, 1024, 4096])
def test_tables_know_where_a_forward_holds_all_keys(
    op: overrides._Op, queries: int, keys: int
) -> None:
    holds = triton_sizes.forward_holds_keys(
        triton_sizes.Device(9), triton_sizes.Kind(64), False, queries, keys
    )
    assert _feature(op, "holds_keys", queries, keys) == holds


@pytest.mark.crossovers
@pytest.mark.parametrize(("op", "kind"), BY_TABLE, ids=lambda each: each.name)
def test_samples_fall_into_their_cells(op: overrides._Op, kind: overrides._Kind) -> None:
    crossover = overrides._crossover(op, kind)
    made = 0
    for rows, keys, dim in (
        (2**8, 2**5, 32),
        (2**10, 2**5, 72),
        (2**9, 2**8, 128),
        (2**8, 2**9, 64),
        (2**8, 2**5, 192),
        (2**10, 2**6, 64),
        (2**10, 2**7, 64),
    ):
        for first, second, fills in itertools.product((0, 1), repeat=3):
            features: dict[str, Any] = {"rows": rows, "keys": keys, "dim": dim}
            features["fills_tiles"] = fills
            if "itemsize" in crossover.features:
                features["itemsize"] = 2
            if kind.is_masked:
                features |= {"for_all_queries": first, "for_all_heads": second}
            else:
                features["is_causal"] = bool(first)
            if kind is overrides._CUTEDSL:
                features["is_grouped"] = second
            if kind is overrides._TRITON:
                features["holds_keys"] = second
            for named in samples.calls(op.name, torch.device("cpu"), **features):
                made += 1
                found = {key: each.evaluate(named) for key, each in crossover.features.items()}
                for key in ("rows", "keys"):
                    assert features[key] <= found.pop(key) < 2 * features[key], key
                assert found == {key: features[key] for key in found}
                assert overrides._dense(op, with_bias=kind.is_masked).holds(named)
    assert made > 8
