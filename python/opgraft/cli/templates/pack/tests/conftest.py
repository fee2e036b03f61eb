"""Shared by all tests: the pack's override, registered for one test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before torch is imported: the pack, if it is installed, would be active beside the one under test.
os.environ["OPGRAFT_PACKS"] = "none"

import opgraft
import torch
from opgraft import triton_utils

# Before Triton is imported: without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from my_pack import overrides


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and triton_utils.interpreted():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> str:
    """Where the pack registers: see `my_pack.register`."""
    return "cpu" if triton_utils.interpreted() else "cuda"


@pytest.fixture
def override(device: str) -> Iterator[opgraft.Override]:
    """The override of softmax. Registered by us, not by the pack, its errors are raised.

    Without a crossover: it takes every call that it is right for, faster or not.
    """
    override = overrides.register_softmax(device.upper(), crossover=None)
    yield override
    override.remove()
