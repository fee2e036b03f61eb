"""Trainings over several processes: overrides change no loss, and no rank waits for another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

from tests.distributed.scenarios import SCENARIOS

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)

ROOT = Path(__file__).parents[2]
CASES = [(name, world) for name, (_, worlds) in SCENARIOS.items() for world in worlds]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every scenario computed, by how many processes: each number of them is started once."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one of several, whose folder is in the shared one
        shared = shared.parent

    def of(world: int) -> list[dict[str, Any]]:
        folder = shared / f"world{world}"
        with filelock.FileLock(f"{folder}.lock"):
            if not folder.exists():
                folder.mkdir()
                start(world, folder)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]

    return of


def start(world: int, folder: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.scenarios", str(rank), str(world), folder],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    (folder / "log").write_text("\n".join(outputs))


def found(trained: Any, name: str, world: int) -> list[dict[str, Any]]:
    try:
        return [rank[name] for rank in trained(world)]
    except FileNotFoundError:
        raise AssertionError("a rank did not end") from None


@pytest.mark.parametrize(("name", "world"), CASES)
def test_losses_are_those_without_overrides(trained: Any, name: str, world: int) -> None:
    for rank in found(trained, name, world):
        torch.testing.assert_close(torch.tensor(rank["ours"]), torch.tensor(rank["stock"]))


@pytest.mark.parametrize(("name", "world"), CASES)
def test_overrides_are_hit_on_every_rank(trained: Any, name: str, world: int) -> None:
    """Ranks that run the same, on batches that are as long, hit as often as each other."""
    ranks = found(trained, name, world)
    assert all(rank["hits"]["aten::gelu_backward"] > 0 for rank in ranks)
    assert ranks[0]["hits"]["aten::native_layer_norm"] > 0
    if name not in ("ddp_with_a_short_batch_on_one_rank", "pipeline_stages"):
        assert all(rank["hits"] == ranks[0]["hits"] for rank in ranks)


def test_a_rank_with_a_short_batch_goes_native_alone(trained: Any) -> None:
    first, second = found(trained, "ddp_with_a_short_batch_on_one_rank", 2)
    norm = "aten::native_layer_norm"
    assert (first["misses"][norm], second["hits"][norm]) == (0, 0)
    assert second["misses"][norm] == first["hits"][norm]
