"""What programs ask the L2 cache to load for others: how much, and that results are the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from configurations import MULTIPROCESSORS, norm_launches, softmax_launches
from opgraft.base import traced
from opgraft_kernels import launches as shared
from opgraft_kernels.norms import ops
from opgraft_kernels.norms import triton_kernels as norms
from opgraft_kernels.softmax import triton_kernels as softmax

HOPPER = shared.Device(MULTIPROCESSORS, 228 * 1024, can_wait=True, can_prefetch=True)
#: More than the cache holds.
ELEMENTS = 2**27
NORMS = ("rms_norm", "layer_norm")


def ahead_of(launch: Any) -> int:
    *_, ahead = launch.arguments
    return ahead if launch.constexprs["PREFETCH"] else 0


# ------------------------------------------------------------------ how much


@pytest.mark.parametrize(
    ("norm", "hidden"),
    [*itertools.product(NORMS, (128, 768, 5120, 16384)), ("layer_norm", 13000)],
)
def test_norms_ask_for_about_as_many_bytes_as_programs_hold(norm: str, hidden: int) -> None:
    launch, *_ = norm_launches(norm, torch.bfloat16, hidden, ELEMENTS // hidden)
    tile_bytes = launch.constexprs["ROWS"] * hidden * 2
    assert 32 * 1024 <= ahead_of(launch) / MULTIPROCESSORS * tile_bytes <= 64 * 1024


@pytest.mark.parametrize("size", [64, 1000, 8192])
def test_softmax_asks_for_about_as_many_bytes_as_programs_hold(size: int) -> None:
    launch, _ = softmax_launches(torch.bfloat16, (ELEMENTS // size, size), log=False)
    tile_bytes = launch.constexprs["LINES"] * size * 2
    assert 32 * 1024 <= ahead_of(launch) / MULTIPROCESSORS * tile_bytes <= 64 * 1024


def test_nothing_is_asked_for_that_the_cache_may_hold() -> None:
    norm, *_ = norm_launches("rms_norm", torch.bfloat16, 4096, 1024)
    line, _ = softmax_launches(torch.bfloat16, (1024, 4096), log=True)
    for launch in (norm, line):
        assert ahead_of(launch) >= launch.grid  # beyond the last


@pytest.mark.parametrize("rows", [1024, 2**15])
def test_small_and_large_calls_share_a_kernel(rows: int) -> None:
    launch, *_ = norm_launches("layer_norm", torch.bfloat16, 4096, rows)
    assert launch.constexprs["PREFETCH"]


def test_nothing_is_asked_for_where_the_device_cannot() -> None:
    norm, *_ = norm_launches("rms_norm", torch.bfloat16, 4096, 2**15, can_prefetch=False)
    line, _ = softmax_launches(torch.bfloat16, (2**15, 4096), False, can_prefetch=False)
    assert ahead_of(norm) == ahead_of(line) == 0


def test_half_as_much_is_asked_of_a_small_cache() -> None:
    small, large = (HOPPER._replace(l2_cache=each * 2**20) for each in (50, 60))
    assert shared.tiles_ahead(8192, 2**16, large) == 2 * shared.tiles_ahead(8192, 2**16, small)


def test_a_launch_that_is_traced_into_a_graph_asks_for_nothing() -> None:
    """Nor is there the instruction, which torch takes for a write to each argument."""
    x = torch.empty(2**15, 4096, dtype=torch.bfloat16, device="meta")
    rstd = torch.empty(2**15, device="meta")
    norm = ops.Forward(x, None, None, torch.empty_like(x), None, rstd, 4096, 1e-6)
    with traced.tracing(torch.ops.aten._fused_rms_norm.default):
        launches = [
            norms.plan_forward(norm, HOPPER),
            softmax.plan_forward(x, torch.empty_like(x), 1, False, HOPPER),
        ]
    assert [each.constexprs["PREFETCH"] for each in launches] == [False, False]
    assert norms.plan_forward(norm, HOPPER).constexprs["PREFETCH"]


def test_nothing_is_asked_for_where_a_tiles_rows_are_apart() -> None:
    x = torch.empty(2**20, 260, dtype=torch.bfloat16, device="meta")[:, :256]
    rstd = torch.empty(2**20, device="meta")
    call = ops.Forward(x, None, None, torch.empty_like(x), None, rstd, 256, 1e-6)
    launch = norms.plan_forward(call, HOPPER)
    assert launch.constexprs["ROWS"] > 1 and ahead_of(launch) == 0
    launch = softmax.plan_forward(x, torch.empty(x.shape, device="meta"), 1, False, HOPPER)
    assert launch.constexprs["LINES"] > 1 and ahead_of(launch) == 0


def test_strided_lines_are_not_asked_for() -> None:
    launch, _ = softmax_launches(torch.bfloat16, (8, 21, 65536), log=False)
    assert ahead_of(launch) == 0


# ------------------------------------------------------------------ that it changes nothing

SHAPES = [(16411, 1536), (8209, 5120), (300_001, 100), (2049, 16384), (4099, 11000), (30_011, 1023)]
#: Elements before the tensor's first: it begins at a multiple of 16 bytes, of 2, or of 4.
OFFSETS = (0, 1, 2)


def matrix(shape: tuple[int, int], offset: int, stride: int) -> torch.Tensor:
    """Its last element is the last of its memory."""
    rows, columns = shape
    count = (rows - 1) * stride + columns
    memory = torch.randn(offset + count, device="cuda", dtype=torch.bfloat16)
    return memory[offset:].as_strided(shape, (stride, 1), offset)


def with_and_without(launch: Any, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for prefetch in (True, False):
        output.fill_(float("nan"))
        launch._replace(constexprs={**launch.constexprs, "PREFETCH": prefetch})()
        found.append(output.clone())
    return found[0], found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("between", [0, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_compute_the_same(
    norm: str, shape: tuple[int, int], offset: int, between: int
) -> None:
    rows, hidden = shape
    x = matrix(shape, offset, hidden + between)
    y = torch.empty(shape, device="cuda", dtype=x.dtype)
    w = torch.randn(hidden, device="cuda", dtype=x.dtype)
    mean, rstd = (torch.empty(rows, device="cuda") for _ in range(2))
    is_layer_norm = norm == "layer_norm"
    bias, mean_or_none = (w, mean) if is_layer_norm else (None, None)
    call = ops.Forward(x, w, bias, y, mean_or_none, rstd, hidden, 1e-6)
    launch = norms.plan_forward(call, shared.device_of(x.device))
    if "PREFETCH" not in launch.constexprs:
        pytest.skip("its rows are read twice")
    assert ahead_of(launch) > 0 or (between and launch.constexprs["ROWS"] > 1)
    asked, alone = with_and_without(launch, y)
    assert torch.equal(asked, alone)


@pytest.mark.gpu
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("between", [0, 8])
@pytest.mark.parametrize("shape", [*SHAPES, (1031, 50257), (515, 65536)], ids=str)
def test_softmax_computes_the_same(
    log: bool, shape: tuple[int, int], offset: int, between: int
) -> None:
    x = matrix(shape, offset, shape[1] + between)
    y = torch.empty(shape, device="cuda", dtype=x.dtype)
    launch = softmax.plan_forward(x, y, 1, log)
    assert ahead_of(launch) > 0 or (between and launch.constexprs["LINES"] > 1)
    asked, alone = with_and_without(launch, y)
    assert torch.equal(asked, alone)
