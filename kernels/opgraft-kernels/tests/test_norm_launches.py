"""How many launches the norms' Triton backwards take: the host pays for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from configurations import MULTIPROCESSORS, norm_launches
from opgraft_kernels import launches as shared
from opgraft_kernels.integers import ceil_div, power_of_2
from opgraft_kernels.norms import ops, triton_kernels
from opgraft_kernels.rows import STRIP


def backward_launches(norm: str, rows: int, hidden: int) -> list[Any]:
    _, *launches = norm_launches(norm, torch.bfloat16, hidden, rows)
    return launches


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("rows", "hidden", "launches"),
    [
        (64, 1024, 1),
        (512, 4096, 1),
        (4096, 4096, 1),
        (40_000, 4096, 1),
        (16384, 1024, 1),  # the most elements of narrow rows
        (16400, 1024, 2),
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
    assert launch.grid == 128  # one a multiprocessor, and as many steps as with all 132


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
    for size, kernel in ((kib, "backward_pieces_kernel"), (kib - 64, "backward_split_kernel")):
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
        (520, 1, 128, 5, 1, True),
        (1152, 1, 128, 9, 1, True),
        (1536, 1, 128, 12, 1, True),
        (2560, 1, 256, 10, 2, True),
        (3072, 1, 1024, 3, 4, True),
        (3584, 1, 1024, 4, 4, True),
        (5120, 1, 1024, 5, 4, True),
        (6144, 1, 1024, 6, 8, True),
        (8064, 1, 1024, 8, 8, True),
        (8192, 1, 2048, 4, 8, True),
        (9216, 1, 4096, 3, 8, False),
        (11004, 1, 2048, 6, 8, True),  # no multiple of 16 bytes
        (11008, 1, 4096, 3, 8, False),
        (12288, 1, 4096, 3, 8, False),
        (13824, 1, 2048, 7, 8, True),
        (16384, 1, 8192, 2, 16, False),
        (96, 32, 32, 3, 4, True),
        (192, 16, 64, 3, 4, True),
        (320, 8, 64, 5, 4, True),
        (448, 8, 64, 7, 4, True),
    ],
)
def test_pieces_of_a_forward_of_layer_norm(
    hidden: int, rows: int, block: int, blocks: int, num_warps: int, has_parameters_first: bool
) -> None:
    launch, *_ = norm_launches("layer_norm", torch.bfloat16, hidden)
    found = [launch.constexprs[name] for name in ("ROWS", "BLOCK", "BLOCKS", "PARAMETERS_FIRST")]
    assert [*found, launch.num_warps] == [rows, block, blocks, has_parameters_first, num_warps]


@pytest.mark.parametrize(
    ("norm", "row", "block", "num_warps", "registers"),
    [
        ("rms_norm", 1040, 256, 1, None),
        ("rms_norm", 1536, 256, 1, None),
        ("rms_norm", 1552, 512, 2, None),
        ("rms_norm", 5120, 512, 2, None),
        ("rms_norm", 5136, 1024, 4, None),
        ("rms_norm", 12272, 1024, 4, None),
        ("layer_norm", 3072, 256, 1, None),
        ("layer_norm", 3088, 512, 2, None),
        ("layer_norm", 5120, 512, 2, None),
        ("layer_norm", 5136, 2048, 4, None),
        ("layer_norm", 12272, 2048, 4, None),
        ("layer_norm", 12288, 2048, 8, None),
        ("layer_norm", 24576, 8192, 8, 80),
        ("layer_norm", 28672, 4096, 8, 128),
        ("layer_norm", 28688, 16384, 16, 64),
    ],
)
def test_bytes_of_the_pieces_of_a_forward(
    norm: str, row: int, block: int, num_warps: int, registers: int | None
) -> None:
    launch, *_ = norm_launches(norm, torch.bfloat16, row // 2)
    assert launch.constexprs["BLOCKS"] > 1 and launch.constexprs["ROWS"] == 1
    assert [launch.constexprs["BLOCK"] * 2, launch.num_warps] == [block, num_warps]
    # Of long rows as many programs are to fit as have the registers.
    assert launch.options.get("maxnreg") == registers


@pytest.mark.parametrize(("row", "block", "num_warps"), [(4096, 512, 2), (12288, 2048, 4)])
def test_bytes_of_the_pieces_of_float32_in_a_forward(row: int, block: int, num_warps: int) -> None:
    launch, *_ = norm_launches("layer_norm", torch.float32, row // 4)
    assert [launch.constexprs["BLOCK"] * 4, launch.num_warps] == [block, num_warps]


@pytest.mark.parametrize("hidden", [192, 512, 6144, 8192])
def test_narrow_and_long_rows_of_rms_norm_are_not_pieces_in_a_forward(hidden: int) -> None:
    launch, *_ = norm_launches("rms_norm", torch.bfloat16, hidden)
    assert launch.constexprs.get("BLOCKS", 1) == 1


@pytest.mark.parametrize("hidden", [24, 40, 352, 512, 16400])
def test_other_narrow_and_very_long_rows_are_not_pieces_in_a_forward(hidden: int) -> None:
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


_TILES = [
    shared.Tile(1, 1024, 4, stages=6, blocks=3),
    shared.Tile(1, 1024, 4, per_sm=2, stages=4, blocks=3),
    shared.Tile(2, 2048, 8, stages=3),
]


@pytest.mark.parametrize("tile", _TILES, ids=str)
@pytest.mark.parametrize("hidden", [1, 128, 1024, 2050, 4096, 16384])
@pytest.mark.parametrize("sums", [1, 2])
def test_sums_fit_into_registers_and_few_kinds_of_them_are_compiled(
    sums: int, hidden: int, tile: shared.Tile
) -> None:
    numbers = range(2, 300)
    kinds = [shared.sum_constexprs(hidden, sums, each, tile, True) for each in numbers]
    for kind in kinds:
        held = kind["SUM_ROWS"] * kind["SUM_BLOCK"] // (32 * tile.num_warps)
        assert held <= (tile.registers + 1) // 2 if kind["SUM_ONCE"] else held <= 32
    assert len({tuple(kind.values()) for kind in kinds}) <= 9
    for programs, kind in zip(numbers, kinds, strict=True):
        blocks = ceil_div(hidden, kind["SUM_BLOCK"])
        if kind["SUM_ONCE"]:
            assert kind["SUM_ROWS"] >= programs
            assert kind["SUM_MASKED"] == (kind["SUM_ROWS"] > programs)
            strips = sums * ceil_div(hidden, STRIP.value)
            assert programs * kind["SUM_BLOCK"] >= strips * STRIP.value
        elif hidden <= shared.ONE_LAUNCH_HIDDEN and programs in (4, 8, 16, 28, 31, 46, 58, 60, 64):
            assert ceil_div(blocks, programs) <= 2  # each adds up one or two


@pytest.mark.parametrize("most", [1, 3, 58, 108, 128, 132, 264, 792])
def test_programs_of_a_power_of_two_take_no_step_more(most: int) -> None:
    for steps in (most, 2 * most - 1, 4096, 8192, 10_000):
        programs = shared.even_programs(most, steps)
        assert ceil_div(steps, programs) == ceil_div(steps, most)
        assert programs in (most, power_of_2(most + 1) // 2)


@pytest.mark.parametrize("multiprocessors", [58, 60, 108, 132])
def test_more_elements_take_one_launch_only_where_all_sums_are_read_at_once(
    multiprocessors: int,
) -> None:
    large = shared.sums_in_one_launch(4096, 3072, 2, multiprocessors, _TILES[0], False)
    kind = shared.sum_constexprs(3072, 2, multiprocessors, _TILES[0], True)
    assert large == kind["SUM_ONCE"]


def test_narrow_rows_take_one_launch_up_to_so_many_elements() -> None:
    rows = shared.AT_ONCE_NARROW_ELEMENTS // 1024
    taken = [shared.sums_in_one_launch(n, 1024, 2, 128, _TILES[2], False) for n in (rows, rows + 1)]
    assert taken == [True, False]


@pytest.mark.parametrize("hidden", [128, 1024, 3072, 4096])
def test_where_a_launch_is_early_few_elements_take_one(hidden: int) -> None:
    rows = shared.ONE_LAUNCH_ELEMENTS_BEFORE_EARLY // hidden
    taken = [
        shared.sums_in_one_launch(n, hidden, 2, 128, _TILES[2], True) for n in (rows, rows + 1)
    ]
    assert taken == [True, False]


def test_all_partial_sums_of_long_rows_are_read_at_once() -> None:
    (launch,) = backward_launches("rms_norm", 4096, 3072)
    assert launch.grid == 128
    assert launch.constexprs["SUM_ONCE"]
    assert not launch.constexprs["SUM_MASKED"]


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_backwards_of_two_launches_differ_in_nothing_that_is_compiled(norm: str) -> None:
    first, second = (backward_launches(norm, rows, 1024)[0] for rows in (20_000, 40_000))
    assert first.constexprs == second.constexprs
