"""Trainings over several processes: overrides change no loss, and no rank waits for another."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.distributed.conftest import ROOT, Trained
from tests.distributed.scenarios import SCENARIOS

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)

CASES = [(name, world) for name, (_, worlds) in SCENARIOS.items() for world in worlds]


@pytest.mark.parametrize(("name", "world"), CASES)
def test_losses_are_those_without_overrides(trained: Trained, name: str, world: int) -> None:
    for rank in trained(name, world):
        torch.testing.assert_close(torch.tensor(rank["ours"]), torch.tensor(rank["stock"]))


@pytest.mark.parametrize(("name", "world"), CASES)
def test_overrides_are_hit_on_every_rank(trained: Trained, name: str, world: int) -> None:
    """Ranks that run the same, on batches that are as long, hit as often as each other."""
    ranks = trained(name, world)
    assert all(rank["hits"]["aten::gelu_backward"] > 0 for rank in ranks)
    assert ranks[0]["hits"]["aten::native_layer_norm"] > 0
    if name not in ("ddp_with_a_short_batch_on_one_rank", "pipeline_stages"):
        assert all(rank["hits"] == ranks[0]["hits"] for rank in ranks)


def test_a_rank_with_a_short_batch_goes_native_alone(trained: Trained) -> None:
    first, second = trained("ddp_with_a_short_batch_on_one_rank", 2)
    norm = "aten::native_layer_norm"
    assert (first["misses"][norm], second["hits"][norm]) == (0, 0)
    assert second["misses"][norm] == first["hits"][norm]


@pytest.mark.slow
def test_the_example_trains_over_two_processes() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "examples/train_fsdp.py", "--steps", "3"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"rank (\d): loss ([\d.]+) -> ([\d.]+); hits: (.*)", done.stdout)
    assert sorted(rank for rank, *_ in said) == ["0", "1"]
    assert all(float(last) < float(first) for _, first, last, _ in said)
    (hits,) = {hits for *_, hits in said}
    assert "layer_norm.forward 15" in hits and "layer_norm.backward 15" in hits
