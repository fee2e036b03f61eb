"""The trainings of test_gloo on two GPUs, over NCCL."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.conftest import Trained
from tests.distributed.scenarios import ON_GPUS

pytestmark = pytest.mark.multigpu

WORLD = 2


@pytest.mark.parametrize("name", ON_GPUS)
def test_losses_are_those_without_overrides(trained: Trained, name: str) -> None:
    for rank in trained(name, WORLD, "nccl"):
        ours, stock = torch.tensor(rank["ours"]), torch.tensor(rank["stock"])
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ON_GPUS)
def test_both_ranks_are_hit_as_often(trained: Trained, name: str) -> None:
    first, second = trained(name, WORLD, "nccl")
    assert first["hits"] == second["hits"]
    assert all(hits > 0 for hits in first["hits"].values())
