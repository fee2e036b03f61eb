"""Shared by all tests: a clean registry around each, and what GPU tests need."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Before Triton is first imported: without a GPU its kernels run in its interpreter, at the CPU key.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
for variable in ("OPGRAFT_DISABLE", "OPGRAFT_STRICT", "OPGRAFT_LOG"):
    os.environ.pop(variable, None)

from opgraft.registry import registry


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """No override and no rule of one test reaches the next."""
    registry.reset()
    yield
    registry.reset()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that is there: one test body for all."""
    return torch.device(request.param)


@pytest.fixture
def dispatch_key(device: torch.device) -> str:
    return device.type.upper()
