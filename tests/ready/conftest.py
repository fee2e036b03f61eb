"""Workers of these tests are forked, but for those that are about how one is started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.forked_workers import forked_workers


@pytest.fixture(scope="module", autouse=True)
def workers_are_forked() -> Iterator[None]:
    """Not where there is a GPU, whose driver no process shares with a forked one."""
    if torch.cuda.is_available():
        yield
        return
    with forked_workers():
        yield
