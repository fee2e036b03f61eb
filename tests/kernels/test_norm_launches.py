"""How many launches the norms' Triton backwards take: the host pays for each."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from opgraft_kernels import rows as shared

MULTIPROCESSORS = 132  # an H200's


def backward_launches(norm: str, rows: int, hidden: int) -> list[Any]:
    kernels = importlib.import_module(f"opgraft_kernels.{norm}.triton_kernels")
    _, *launches = kernels._configuration(torch.bfloat16, hidden, MULTIPROCESSORS, rows=rows)
    return launches


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("rows", "hidden", "launches"),
    [
        (64, 1024, 1),
        (512, 4096, 1),
        (1024, 4096, 1),  # the most elements that are added up in the same launch
        (1025, 4096, 2),
        (64, 8192, 2),  # longer rows take a program too long to add up
    ],
)
def test_launches_of_a_backward(norm: str, rows: int, hidden: int, launches: int) -> None:
    found = backward_launches(norm, rows, hidden)
    assert len(found) == launches
    together = found[0].options["launch_cooperative_grid"]
    assert together == (launches == 1)  # programs that wait for one another must all run at once
    assert found[0].grid <= MULTIPROCESSORS


def test_one_program_makes_all_of_the_smallest() -> None:
    (launch,) = backward_launches("rms_norm", 16, 1024)
    assert launch.grid == 1
    assert not launch.options["launch_cooperative_grid"]


@pytest.mark.parametrize("sums", [1, 2])
@pytest.mark.parametrize("programs", [2, 7, 64, 132])
@pytest.mark.parametrize("hidden", [1, 128, 4096])
def test_sums_are_added_up_in_few_steps_from_registers(
    hidden: int, programs: int, sums: int
) -> None:
    tile = shared.together_constexprs(hidden, programs, sums)
    assert tile["SUM_ROWS"] * tile["SUM_BLOCK"] <= 4096
    blocks = sums * shared.ceil_div(hidden, tile["SUM_BLOCK"])
    assert shared.ceil_div(blocks, programs) <= 2 * sums
