"""FlashAttention-4's forward by programs that walk over tiles: which, and what they compute."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

from opgraft_kernels.attention import cutedsl_kernels, overrides
from opgraft_kernels.attention.cutedsl_tiles import (
    ForwardTile,
    forward_dim,
    forward_tile,
    forward_tiles,
    product_dim,
    wide_dim,
)

MULTIPROCESSORS = 132
#: What a program of an H100 or H200 may have, in bytes.
SHARED_MEMORY = 227 * 1024
gpu = pytest.mark.gpu
needs_flash_attn_4 = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0))
    or not overrides._has_flash_attn_4(),
    reason="needs flash-attn-4 and a Hopper GPU",
)


def _random_calls() -> list[tuple[int, int, bool, int, int, int]]:
    draw = random.Random(11)
    return [
        (
            draw.choice(range(8, 257, 8)),
            draw.choice((1, 2, 4, 5, 8)),
            draw.random() < 0.5,
            round(2 ** draw.uniform(0, 12)),
            round(2 ** draw.uniform(0, 15)),
            round(2 ** draw.uniform(0, 15)),
        )
        for _ in range(2000)
    ]


def test_every_tile_fits_into_shared_memory_and_a_warp_group() -> None:
    found = [(call, forward_tile(*call, MULTIPROCESSORS)) for call in _random_calls()]
    tiles = {(call[0], tile) for call, tile in found if tile is not None}
    assert len(tiles) > 40
    for head_dim, tile in tiles:
        columns = wide_dim(head_dim) if tile.is_wide else forward_dim(head_dim)
        made = product_dim(head_dim) if tile.is_wide else columns
        # A tile of queries, one of the output, and of keys and values in each stage.
        held = tile.queries * (columns + made) + 2 * tile.stages * tile.keys * columns
        assert 2 * held + 1024 <= SHARED_MEMORY
        assert tile.queries % 64 == 0 and tile.keys % 16 == 0


@pytest.mark.parametrize(
    ("call", "tile"),
    [
        # Wide tiles, but where they cover the queries worse.
        ((64, 1, False, 512, 1024, 1024), (192, 128)),
        ((64, 1, False, 512, 512, 512), (192, 128)),
        ((80, 1, False, 512, 512, 512), (128, 128)),
        ((64, 1, True, 512, 1024, 1024), (128, 128)),
        ((64, 1, True, 128, 4096, 4096), (192, 128)),
        # Keys of which blocks hold a row and little more.
        ((64, 1, False, 1024, 197, 197), (128, 208)),
        ((64, 1, False, 2048, 176, 176), (192, 96)),
        ((64, 1, False, 768, 577, 577), (128, 208)),
        ((40, 1, False, 128, 4096, 77), (192, 80)),
        ((72, 1, False, 128, 1024, 1024), (128, 128)),
        ((72, 1, True, 128, 1024, 1024), (128, 128)),
        ((80, 1, False, 128, 1025, 1025), (192, 96)),
        ((128, 1, False, 512, 160, 160), (128, 160)),
        ((128, 4, True, 64, 2048, 2048), (128, 128)),
        # Two tiles of 128 take longer than the library's one of 192; with twice the heads not.
        ((64, 1, False, 32, 577, 2048), None),
        ((80, 1, False, 16, 1025, 1025), None),
        ((64, 1, True, 1024, 128, 128), (128, 128)),
        # Parts of groups of rows of 72, queries that see no key: the library's.
        ((72, 5, False, 200, 1024, 1024), None),
        ((64, 1, True, 1000, 456, 100), None),
        # Too long, too few, too wide.
        ((128, 1, False, 16, 16384, 16384), None),
        ((128, 1, True, 16, 16384, 16384), None),
        ((64, 1, False, 8, 1024, 1024), None),
        ((64, 1, True, 16, 1024, 1024), None),
        ((256, 1, False, 512, 1024, 1024), None),
    ],
)
def test_tiles_of_a_call(
    call: tuple[int, int, bool, int, int, int], tile: tuple[int, int] | None
) -> None:
    found = forward_tile(*call, MULTIPROCESSORS)
    assert (found and found[:3]) == (tile and (*tile, MULTIPROCESSORS))


@pytest.mark.parametrize(
    ("head_dim", "columns"),
    [(40, 64), (48, 64), (64, 64), (72, 128), (80, 128), (88, 96), (96, 96), (104, 128)],
)
def test_rows_are_as_long_in_shared_memory_as_is_loaded_fast(head_dim: int, columns: int) -> None:
    assert wide_dim(head_dim) == columns
    tile = forward_tile(head_dim, 1, False, 512, 1024, 1024, MULTIPROCESSORS)
    assert tile is not None and tile.is_wide == (columns > forward_dim(head_dim))


@pytest.mark.parametrize(("keys", "is_wide"), [(160, True), (208, False)])
def test_rows_are_no_longer_where_two_blocks_would_not_fit(keys: int, is_wide: bool) -> None:
    (tile,) = (t for t in forward_tiles(80, keys, MULTIPROCESSORS) if t[:2] == (128, keys))
    assert (tile.stages, tile.is_wide) == (2, is_wide)


@pytest.mark.parametrize(
    ("call", "is_shared"),
    [
        ((72, 1, False, 128, 1024, 1024), True),
        ((88, 1, False, 128, 1024, 1024), True),
        # An odd number of tiles, tiles that see other keys, and rows that are loaded as fast.
        ((72, 1, False, 512, 513, 513), False),
        ((72, 1, True, 128, 1024, 1024), False),
        ((72, 2, False, 128, 1024, 1024), False),
        *(((dim, 1, False, 128, 1024, 1024), False) for dim in (40, 56, 64, 80, 96, 104, 128)),
    ],
)
def test_programs_load_for_two_where_loads_are_waited_for(
    call: tuple[int, int, bool, int, int, int], is_shared: bool
) -> None:
    tile = forward_tile(*call, MULTIPROCESSORS)
    assert tile is not None and tile.is_shared == is_shared


@pytest.mark.parametrize(("group", "is_wide"), [(1, True), (4, True), (5, False)])
def test_queries_that_the_copy_engine_does_not_load_have_no_longer_rows(
    group: int, is_wide: bool
) -> None:
    """Threads that load would read beyond the head."""
    tile = forward_tile(80, group, True, 512, 1024, 1024, MULTIPROCESSORS)
    assert tile is not None and tile.is_wide == is_wide


@pytest.mark.parametrize(
    ("head_dim", "low", "high"),
    [
        *((8, 240, 160), (40, 240, 144), (64, 240, 128), (72, 160, 96), (80, 208, 96)),
        *((96, 208, 96), (104, 176, None), (112, 176, None), (128, 160, None)),
    ],
)
def test_the_most_keys_of_blocks_that_are_loaded_ahead(
    head_dim: int, low: int | None, high: int | None
) -> None:
    """Kernels of more keys spill, or take the shared memory of the second stage."""
    tiles = forward_tiles(head_dim, 2**15, MULTIPROCESSORS)
    assert all(tile.stages == 2 for tile in tiles)
    for queries, most in ((128, low), (192, high)):
        assert max((t.keys for t in tiles if t.queries == queries), default=None) == most


@pytest.mark.parametrize(
    ("head_dim", "keys"), [(80, 208), (96, 208), (104, 208), (112, 208), (120, 176), (128, 176)]
)
def test_the_most_keys_of_a_row_of_one_block(head_dim: int, keys: int) -> None:
    tiles = forward_tiles(head_dim, 65, MULTIPROCESSORS)
    assert max(tile.keys for tile in tiles if tile.queries == 128) == keys


@pytest.mark.parametrize("group", [3, 5, 7])
@pytest.mark.parametrize(("head_dim", "keys"), [(64, 225), (96, 208), (112, 208)])
def test_groups_that_the_copy_engine_does_not_load_have_fewer_keys(
    head_dim: int, group: int, keys: int
) -> None:
    """Threads that load have registers, too, so kernels of as many keys as else would spill."""
    call = (head_dim, group, False, 512, keys, keys, MULTIPROCESSORS)
    tile = forward_tile(*call)
    assert tile is not None and tile.keys < keys
    assert tile.keys * 3 // 4 + head_dim // 2 <= 196


def test_causal_rows_of_wide_heads_have_no_tiles_of_192() -> None:
    for queries in (192, 384, 576, 1152):
        tile = forward_tile(80, 1, True, 660, queries, queries, MULTIPROCESSORS)
        assert tile is None or tile.queries == 128


def test_one_block_of_keys_needs_no_second_stage() -> None:
    """Of heads of 128 two blocks of 176 keys would not fit."""
    assert forward_tile(128, 1, False, 744, 176, 176, MULTIPROCESSORS) == ForwardTile(
        128, 176, MULTIPROCESSORS, stages=1
    )
    several = forward_tile(128, 1, False, 372, 176, 352, MULTIPROCESSORS)
    assert several is not None and several.keys < 176 and several.stages == 2


_ANOTHER_LIBRARY = """
import inspect
from opgraft_kernels.attention import cutedsl_walking

cutedsl_walking.walking_forward(132)
inspect.getsource = lambda module: "barrier_id=int(NamedBarrierFwd.PFull)"
try:
    cutedsl_walking.walking_forward(131)
except RuntimeError as error:
    print(error)
"""


def test_a_library_that_takes_the_same_barrier_is_refused(cutedsl: list[str]) -> None:
    environment = {
        **os.environ,
        "CUTE_DSL_ARCH": "sm_90a",
        "PYTHONPATH": os.pathsep.join(filter(None, cutedsl)),
    }
    command = [sys.executable, "-c", _ANOTHER_LIBRARY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("flash-attn-4 "), done.stderr[-4000:]
    assert "install 4.0.0b36" in done.stdout


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the logsumexp, by the formula in float64, a few heads at a time."""
    group = q.shape[1] // k.shape[1]
    outs, sums = [], []
    for head in range(q.shape[1]):
        one, keys, values = (
            t[:, n].double() for t, n in ((q, head), (k, head // group), (v, head // group))
        )
        scores = one @ keys.mT * q.shape[-1] ** -0.5
        if causal:
            keep = torch.ones_like(scores, dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            scores.masked_fill_(~keep, -torch.inf)
        outs.append(scores.softmax(-1) @ values)
        sums.append(scores.logsumexp(-1))
    return torch.stack(outs, 1), torch.stack(sums, 1)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(q, torch.nan)
    logsumexp = torch.full(q.shape[:-1], torch.nan, device=q.device)
    cutedsl_kernels.forward(q, k, v, out, logsumexp, q.shape[-1] ** -0.5, causal)
    return out, logsumexp


def _tensors(
    batch: int, heads: int, heads_k: int, queries: int, keys: int, dim: int, projected: bool
) -> list[torch.Tensor]:
    torch.manual_seed(batch + queries + keys + dim)
    made = []
    for n, length in ((heads, queries), (heads_k, keys), (heads_k, keys)):
        shape = (batch, length, n, dim) if projected else (batch, n, length, dim)
        t = torch.randn(shape, device="cuda").bfloat16()
        made.append(t.transpose(1, 2) if projected else t)
    return made


# Batch, heads, key heads, queries, keys, dimension: of a head one tile, two, three and many, full
# and not; of all heads more than multiprocessors, by a little and by much.
CALLS = [
    (12, 12, 12, 100, 100, 64),
    (12, 12, 12, 128, 300, 128),
    (16, 16, 16, 197, 197, 64),
    (10, 16, 16, 256, 256, 96),
    (10, 16, 16, 176, 176, 128),
    (9, 16, 8, 200, 208, 128),
    (9, 16, 16, 144, 144, 40),
    (9, 16, 16, 300, 144, 48),
    (9, 15, 5, 300, 330, 72),
    (9, 16, 16, 130, 200, 104),
    (20, 16, 16, 225, 225, 64),
    (12, 40, 8, 208, 208, 64),
    (14, 16, 16, 257, 257, 80),
    (9, 15, 15, 300, 300, 128),
    (9, 15, 15, 384, 511, 64),
    (8, 12, 12, 577, 577, 80),
    (5, 13, 13, 640, 640, 40),
    (4, 12, 12, 1000, 1000, 72),
    (4, 12, 12, 1024, 1024, 64),
    (2, 10, 10, 2048, 2048, 64),
    (2, 12, 12, 2048, 2049, 128),
    (2, 20, 20, 4096, 77, 40),
    (3, 32, 8, 1024, 1024, 128),
    (3, 32, 8, 1024, 1024, 64),
    (4, 35, 7, 700, 701, 128),
    (2, 71, 1, 129, 129, 64),
]


@gpu
@needs_flash_attn_4
@pytest.mark.parametrize("projected", [False, True], ids=["", "projected"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_programs_that_walk_match_the_formula(
    call: tuple[int, int, int, int, int, int],
    causal: bool,
    projected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, heads, heads_k, queries, keys, dim = call
    if causal and queries > keys:
        pytest.skip("some queries see no key")
    group = heads // heads_k
    tiles = []
    _remember(monkeypatch, tiles)
    if forward_tile(dim, group, causal, batch * heads_k, queries, keys, 132) is None:
        _as_if(monkeypatch, ForwardTile(128, 128, 132))
    q, k, v = _tensors(*call, projected)
    out, logsumexp = _forward(q, k, v, causal)
    assert tiles and tiles[-1] is not None
    right, right_sum = _reference(q, k, v, causal)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=0.02)
    torch.testing.assert_close(logsumexp.double(), right_sum, rtol=0, atol=1e-4)
    # As near as the library's own program for each tile is.
    _as_if(monkeypatch, None)
    other, _ = _forward(q, k, v, causal)
    assert tiles[-1] is None
    error, others = ((t.double() - right).abs().max() for t in (out, other))
    assert error <= 1.5 * others + 1e-3


def _remember(monkeypatch: pytest.MonkeyPatch, tiles: list[ForwardTile | None]) -> None:
    """Note the tiles of each call from now on."""
    known = cutedsl_kernels._functions

    def note(kind: cutedsl_kernels.Kind, device: torch.device) -> object:
        tiles.append(kind.tile)
        return known(kind, device)

    monkeypatch.setattr(cutedsl_kernels, "_functions", note)


def _as_if(monkeypatch: pytest.MonkeyPatch, tile: ForwardTile | None) -> None:
    monkeypatch.setattr(cutedsl_kernels, "forward_tile", lambda *_: tile)


@gpu
@needs_flash_attn_4
@pytest.mark.parametrize(
    ("size", "causal"),
    [
        *(((height, 128), True) for height in (128, 192)),
        *(((192, width), False) for width in (80, 96, 112, 128)),
        *(((128, width), False) for width in (80, 96, 112, 128, 144, 160, 176, 208, 240)),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", [(3, 10, 10, 700, 700, 64), (2, 12, 4, 500, 500, 40)], ids=str)
def test_tiles_of_any_size_match_the_formula(
    call: tuple[int, int, int, int, int, int],
    size: tuple[int, int],
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _as_if(monkeypatch, ForwardTile(*size, MULTIPROCESSORS))
    q, k, v = (each.half() for each in _tensors(*call, True))
    out, logsumexp = _forward(q, k, v, causal)
    right, right_sum = _reference(q, k, v, causal)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=0.02)
    torch.testing.assert_close(logsumexp.double(), right_sum, rtol=0, atol=1e-4)
    without = torch.full_like(out, torch.nan)
    cutedsl_kernels.forward(q, k, v, without, None, q.shape[-1] ** -0.5, causal)
    assert torch.equal(without, out)


@gpu
@needs_flash_attn_4
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("programs", [1, 2, 3, 7, 131, 1000])
def test_any_number_of_programs_has_the_same_bits(
    causal: bool, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = _tensors(3, 6, 6, 600, 600, 64, True)
    _as_if(monkeypatch, ForwardTile(128, 128, 132))
    expected = _forward(q, k, v, causal)
    _as_if(monkeypatch, ForwardTile(128, 128, programs))
    for _ in range(3):
        for one, other in zip(_forward(q, k, v, causal), expected, strict=True):
            assert torch.equal(one, other)


@gpu
@needs_flash_attn_4
@pytest.mark.parametrize("tile", [(192, 96), (128, 128)], ids=str)
@pytest.mark.parametrize("is_wide", [False, True], ids=["", "wide"])
@pytest.mark.parametrize("programs", [1, 6, MULTIPROCESSORS])
@pytest.mark.parametrize(
    "call",
    # Of a head many tiles, an odd number of them, one.
    [(4, 12, 12, 1000, 1000, 72), (2, 5, 5, 577, 333, 72), (7, 3, 3, 100, 77, 72)],
    ids=str,
)
def test_programs_that_load_for_two_have_the_same_bits(
    call: tuple[int, int, int, int, int, int],
    programs: int,
    is_wide: bool,
    tile: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = _tensors(*call, True)
    alone = ForwardTile(*tile, MULTIPROCESSORS, is_wide=is_wide)
    _as_if(monkeypatch, alone)
    expected = _forward(q, k, v, causal=False)
    _as_if(monkeypatch, alone._replace(programs=programs, is_shared=True))
    for _ in range(5):
        for one, other in zip(_forward(q, k, v, causal=False), expected, strict=True):
            assert torch.equal(one, other)


@gpu
@needs_flash_attn_4
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_no_tile_overtakes_another(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short rows of keys: a program begins a tile while the last one's output is written."""
    _as_if(monkeypatch, ForwardTile(128, 128, MULTIPROCESSORS))
    q, k, v = _tensors(64, 16, 16, 128, 128, 64, True)
    first = _forward(q, k, v, causal)
    for _ in range(200):
        for one, other in zip(_forward(q, k, v, causal), first, strict=True):
            assert torch.equal(one, other)
    right, _ = _reference(q, k, v, causal)
    torch.testing.assert_close(first[0].double(), right, rtol=0, atol=0.02)
