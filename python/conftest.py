"""Doctests leave the registry and the environment as they find them: tests share their process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

# Before torch is imported: packs that are installed here would be active in every example.
os.environ["OPGRAFT_PACKS"] = "none"

from opgraft.registry import registry


@pytest.fixture(autouse=True)
def nothing_outlives_its_example() -> Iterator[None]:
    registry.reset()
    with mock.patch.dict(os.environ):
        yield
    registry.reset()
