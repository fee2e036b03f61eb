"""What the tests of launch plans share: an op at the CPU key whose kernel is a C function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft.core import loader
from tests import probes

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if loader.in_use() is not None:
        return
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.skip(reason="launch plans need the compiled core"))


def doubled(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """An impl of `aten::_softmax` that gives twice its input, by one launch."""
    out = torch.empty_like(self)
    probes.scale(self, out, 2.0)
    return out


@pytest.fixture
def register() -> Callable[..., opgraft.Override]:
    """Register an impl of `aten::_softmax` at the CPU key, with launch plans."""

    def register(impl: Callable[..., Any] = doubled, **keywords: Any) -> opgraft.Override:
        keywords.setdefault("unconditional_override", "cond" not in keywords)
        keywords.setdefault("launch_plan", True)
        return opgraft.register_op_override("aten", "_softmax", "CPU", impl, **keywords)

    return register


def warm(override: opgraft.Override, x: torch.Tensor, runs: int = 3) -> None:
    """Call softmax until its call is replayed: it is seen, and recorded twice."""
    for _ in range(runs):
        torch.softmax(x, -1)
    assert len(override.plans) == 1, override.plans.refusals


def replays(override: opgraft.Override, call: Callable[[], Any], times: int = 1) -> Any:
    """What a call returns, which must be replayed so many times, with no Python."""
    before = override.plans.hits
    result = call()
    assert override.plans.hits == before + times, override.plans
    return result
