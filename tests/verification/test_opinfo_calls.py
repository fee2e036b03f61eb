"""What OpInfo's samples call, and the random numbers that they are made of."""

from __future__ import annotations

import traceback

import pytest
import torch

from opgraft.verification import opinfo


@pytest.mark.skipif(torch.accelerator.is_available(), reason="its generators are seeded, too")
def test_no_stack_is_written_down_to_seed_devices_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = torch.rand(4)
    monkeypatch.setattr(traceback, "format_stack", lambda: pytest.fail("it takes a millisecond"))
    with opinfo.seeded(3):
        assert torch.equal(torch.rand(4), expected)
