"""How many launches the norms' Triton backwards take: the host pays for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from configurations import MULTIPROCESSORS, norm_launches
from opgraft_kernels import rows as shared
from opgraft_kernels.norms import ops, triton_kernels


def backward_launches(norm: str, rows: int, hidden: int) -> list[Any]:
    _, *launches = norm_launches(norm, torch.bfloat16, hidden, rows)
    return launches


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("rows", "hidden", "launches"),
    [
        (64, 1024, 1),
        (512, 4096, 1),
        (2048, 2048, 1),  # the most elements that are added up in the same launch
        (2049, 2048, 2),
        (4096, 4096, 1),  # and of longer rows
        (4097, 4096, 2),
        (64, 8192, 2),  # longer rows take a program too long to add up
    ],
)
def test_launches_of_a_backward(norm: str, rows: int, hidden: int, launches: int) -> None:
    found = backward_launches(norm, rows, hidden)
    assert len(found) == launches
    cooperative = found[0].options["launch_cooperative_grid"]
    assert cooperative == (launches == 1)  # programs that wait for one another must all run at once
    assert found[0].grid <= MULTIPROCESSORS


@pytest.mark.parametrize(
    ("norm", "dtype", "hidden"),
    [("layer_norm", torch.bfloat16, 2560), ("rms_norm", torch.float32, 2112)],
)
def test_programs_that_wait_for_one_another_fit_at_once(
    norm: str, dtype: torch.dtype, hidden: int
) -> None:
    """Each takes a little more than half of the 100 KB, with the weight and what is the system's:
    two a multiprocessor would be a cooperative launch that fails."""
    _, launch = norm_launches(norm, dtype, hidden, shared_memory=100 * 1024)
    assert launch.options["launch_cooperative_grid"]
    assert launch.grid == MULTIPROCESSORS


def test_a_program_that_loads_ahead_fits() -> None:
    """Of 100 KB the system takes one, and three times two rows take 99: none are left for sums."""
    _, launch, *_ = norm_launches("rms_norm", torch.bfloat16, 8448, shared_memory=100 * 1024)
    assert launch.constexprs["STAGES"] == 1


@pytest.mark.parametrize(
    ("hidden", "kib"),  # which are enough, and 64 less are not
    [(8320, 164), (8448, 164), (10240, 164), (10248, 228), (12288, 228), (14336, 228)],
)
def test_long_rows_of_layer_norm_are_split_where_pieces_would_not_load_ahead(
    hidden: int, kib: int
) -> None:
    for size, kernel in ((kib, "_backward_pieces_kernel"), (kib - 64, "_backward_split_kernel")):
        (_, launch, *_) = norm_launches(
            "layer_norm", torch.bfloat16, hidden, shared_memory=size * 1024
        )
        assert launch.kernel.__name__ == kernel
        assert launch.constexprs["STAGES"] == 3


@pytest.mark.parametrize(
    ("norm", "hidden", "blocks"),
    [
        ("layer_norm", 1152, 3),
        ("layer_norm", 1280, 3),
        ("layer_norm", 1288, 1),
        ("layer_norm", 2048, 1),
        ("layer_norm", 2304, 3),
        ("layer_norm", 3072, 3),
        ("layer_norm", 3584, 4),
        ("layer_norm", 4096, 1),
        ("layer_norm", 4480, 5),
        ("layer_norm", 5120, 5),
        ("layer_norm", 5248, 1),
        ("layer_norm", 8192, 1),
        ("layer_norm", 8320, 5),
        ("layer_norm", 12288, 6),
        ("layer_norm", 14336, 7),
        ("layer_norm", 14464, 1),  # too many to load ahead
        ("layer_norm", 13825, 1),  # odd
        ("layer_norm", 9220, 5),
        ("layer_norm", 13828, 1),  # no multiple of 16 bytes
        ("rms_norm", 1152, 3),
        ("rms_norm", 1280, 1),
        ("rms_norm", 2560, 3),
        ("rms_norm", 3072, 3),
        ("rms_norm", 3584, 4),
        ("rms_norm", 5120, 1),
        ("rms_norm", 12288, 1),
        ("rms_norm", 13824, 7),
        ("rms_norm", 14464, 1),
    ],
)
def test_blocks_of_a_row_in_a_backward(norm: str, hidden: int, blocks: int) -> None:
    _, launch, *_ = norm_launches(norm, torch.bfloat16, hidden)
    assert launch.constexprs.get("BLOCKS", 1) == blocks
    if blocks > 1:
        assert launch.constexprs["SPARING"] == (blocks > 5)


@pytest.mark.parametrize(
    ("hidden", "rows", "block", "blocks", "num_warps", "has_parameters_first"),
    [
        (520, 2, 256, 3, 2, True),
        (1152, 2, 256, 5, 2, True),
        (1536, 1, 512, 3, 2, True),
        (2560, 1, 512, 5, 2, True),
        (3072, 1, 1024, 3, 4, True),
        (5120, 1, 1024, 5, 4, True),
        (8064, 1, 1024, 8, 4, True),
        (8192, 1, 2048, 4, 8, True),
        (9216, 1, 2048, 5, 8, False),
        (10240, 1, 2048, 5, 8, False),
        (10248, 1, 1024, 11, 8, True),  # six pieces would leave much unused
        (11008, 1, 1024, 11, 8, True),
        (11264, 1, 1024, 11, 8, True),
        (11392, 1, 4096, 3, 8, False),  # so would six here, and eleven are too few
        (12288, 1, 2048, 6, 8, True),
        (13824, 1, 2048, 7, 8, True),
        (15360, 1, 4096, 4, 8, False),
        (16384, 1, 8192, 2, 16, False),
    ],
)
def test_pieces_of_a_forward_of_layer_norm(
    hidden: int, rows: int, block: int, blocks: int, num_warps: int, has_parameters_first: bool
) -> None:
    launch, *_ = norm_launches("layer_norm", torch.bfloat16, hidden)
    found = [launch.constexprs[name] for name in ("ROWS", "BLOCK", "BLOCKS", "PARAMETERS_FIRST")]
    assert [*found, launch.num_warps] == [rows, block, blocks, has_parameters_first, num_warps]


@pytest.mark.parametrize("hidden", [512, 16400])
def test_narrow_and_very_long_rows_are_not_pieces_in_a_forward(hidden: int) -> None:
    launch, *_ = norm_launches("layer_norm", torch.bfloat16, hidden)
    assert launch.constexprs.get("BLOCKS", 1) == 1


@pytest.mark.parametrize("hidden", [1152, 3584, 5120, 10240, 13824])
def test_rows_of_pieces_that_are_an_odd_distance_apart_are_none(hidden: int) -> None:
    """Single elements take more addresses and masks than there are registers."""
    x = torch.empty(1024, hidden + 1, dtype=torch.bfloat16, device="meta")[:, :hidden]
    w, rstd = torch.empty(hidden, dtype=x.dtype, device="meta"), torch.empty(1024, device="meta")
    call = ops.Backward(x, x, w, rstd, rstd, torch.empty_like(x), w, w, hidden)
    launch, *_ = triton_kernels.plan_backward(call, shared.Device(132, 228 * 1024, True))
    assert "BLOCKS" not in launch.constexprs


def test_one_program_makes_all_of_the_smallest() -> None:
    (launch,) = backward_launches("rms_norm", 16, 1024)
    assert launch.grid == 1
    assert not launch.options["launch_cooperative_grid"]


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("hidden", [1, 128, 1024, 2050, 4096])
def test_sums_fit_into_registers_and_few_kinds_of_them_are_compiled(
    hidden: int, is_alone: bool
) -> None:
    tiles = [shared.sum_constexprs(hidden, each, True, is_alone) for each in range(2, 200)]
    # A program that is alone on a multiprocessor has at least 128 threads of 255 registers.
    assert max(tile["SUM_ROWS"] * tile["SUM_BLOCK"] for tile in tiles[:126]) <= 4096
    assert max(tile["SUM_ROWS"] * tile["SUM_BLOCK"] for tile in tiles) <= 4096 * (1 + 3 * is_alone)
    assert len({tuple(tile.values()) for tile in tiles}) <= 5 + is_alone
    for programs in (4, 8, 16, 28, 31, 46, 58, 60, 64, 108, 132):
        blocks = shared.ceil_div(hidden, tiles[programs - 2]["SUM_BLOCK"])
        assert shared.ceil_div(blocks, programs) <= 2  # each adds up one or two


@pytest.mark.parametrize(("hidden", "sums"), [(2050, 2048), (3072, 16384)])
def test_only_programs_that_are_meant_to_be_alone_add_up_more_at_a_time(
    hidden: int, sums: int
) -> None:
    """Those that were to share a multiprocessor have no more registers where its shared memory
    holds one alone."""
    _, launch, *_ = norm_launches("layer_norm", torch.bfloat16, hidden, shared_memory=100 * 1024)
    assert launch.constexprs["SUM_ROWS"] * launch.constexprs["SUM_BLOCK"] == sums


@pytest.mark.parametrize("multiprocessors", [58, 60, 108, 132])
def test_more_elements_take_one_launch_only_where_all_sums_are_read_at_once(
    multiprocessors: int,
) -> None:
    large = shared.sums_in_one_launch(4096, 3072, multiprocessors, is_alone=True)
    tile = shared.sum_constexprs(3072, multiprocessors, True, is_alone=True)
    rounds = shared.ceil_div(2 * 3072, tile["SUM_BLOCK"]) / multiprocessors
    assert large == (tile["SUM_ROWS"] >= multiprocessors and rounds <= 1)


def test_all_partial_sums_of_long_rows_are_read_at_once() -> None:
    (launch,) = backward_launches("layer_norm", 4096, 3072)
    assert launch.constexprs["SUM_ROWS"] >= launch.grid
    assert shared.ceil_div(2 * 3072, launch.constexprs["SUM_BLOCK"]) <= launch.grid


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_backwards_of_two_launches_differ_in_nothing_that_is_compiled(norm: str) -> None:
    first, second = (backward_launches(norm, rows, 8192)[0] for rows in (100, 10_000))
    assert first.constexprs == second.constexprs
