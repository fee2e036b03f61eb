"""`trace`: what went where while it was open, and nothing outside it."""

from __future__ import annotations

import torch

import opgraft
from opgraft import when
from tests import ops

X = torch.randn(4, 8)


def test_hits_misses_and_their_reasons() -> None:
    opgraft.register_op_override(
        "aten", "_softmax", "CPU", ops.softmax, cond=when.size("self", -1) >= 8, name="wide"
    )
    with opgraft.trace() as t:
        for width in (8, 4, 2, 8):
            torch.softmax(X[:, :width], -1)
    torch.softmax(X, -1)
    (row,) = t.rows
    assert (row.op, row.dispatch_key, row.calls, row.hits) == ("aten::_softmax", "CPU", 4, 2)
    assert row.native_calls == 2
    (override,) = row.overrides
    (miss,) = override.misses
    assert (override.hits, miss.count) == (2, 2)
    assert str(miss) == "when.size('self', -1) >= 8 (when.size('self', -1) is 4, 2)"
    assert "aten::_softmax at CPU" in str(t)
