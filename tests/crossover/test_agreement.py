"""`opgraft.tuning.require_same`: processes over gloo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import tuning
from tests import forked_programs
from tests.crossover.tables import cell, entry, table, write

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)


def compared(
    folder: Path, tables: list[dict[str, Any] | None], members: str = "", failing: str = ""
) -> list[str]:
    """What each rank says of its tables."""
    for rank, content in enumerate(tables):
        (folder / str(rank)).mkdir()
        if content is not None:
            write(folder / str(rank) / "user", content)
    done = forked_programs.run_module(
        *("tests.crossover.rank", folder, len(tables), members, failing),
        env=os.environ | {"OPGRAFT_PACKS": ""},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return [(folder / str(rank) / "said").read_text() for rank in range(len(tables))]


ONE, OTHER = (table({"fast": entry(cell(4, native=native))}) for native in (10.0, 11.0))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_with_the_same_tables_agree(world: int, tmp_path: Path) -> None:
    assert compared(tmp_path, [ONE] * world) == ["the same"] * world


@pytest.mark.parametrize("other", [OTHER, None], ids=["other table", "no table"])
@pytest.mark.parametrize(("world", "odd"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_every_rank_names_the_files_that_differ(
    world: int, odd: int, other: dict[str, Any] | None, tmp_path: Path
) -> None:
    tables: list[dict[str, Any] | None] = [ONE] * world
    tables[odd] = other
    said = compared(tmp_path, tables)
    assert said == said[:1] * world
    agreeing = ", ".join(str(rank) for rank in range(world) if rank != odd)
    assert f"rank {agreeing} {tmp_path / '0' / 'user'}" in said[0]
    of_the_odd = f"{tmp_path / str(odd) / 'user'}" if other else "no table"
    assert f"rank {odd} {of_the_odd}" in said[0]
    assert "fast (user's, aten::_softmax at CPU)" in said[0]


@pytest.mark.parametrize("failing", [[0], [1], [0, 1]], ids=str)
def test_every_rank_is_told_of_one_whose_tables_cannot_be_told(
    failing: list[int], tmp_path: Path
) -> None:
    said = compared(tmp_path, [ONE, ONE], failing=",".join(map(str, failing)))
    assert said == said[:1] * 2
    faults = [f"rank {rank}: RuntimeError: no driver" for rank in failing]
    assert said[0].endswith(f"cannot be compared: {'; '.join(faults)}")


def test_a_rank_outside_of_the_group_is_told_so_and_others_by_their_numbers(tmp_path: Path) -> None:
    outside, *inside = compared(tmp_path, [ONE, ONE, OTHER], members="1,2")
    assert outside.startswith("rank 0 is outside of the group that require_same was given")
    assert inside == inside[:1] * 2
    assert all(f"rank {rank} {tmp_path / str(rank) / 'user'}" in inside[0] for rank in (1, 2))


def test_without_a_process_group_it_is_an_error() -> None:
    with pytest.raises(opgraft.OpgraftError, match="init_process_group"):
        tuning.require_same()
