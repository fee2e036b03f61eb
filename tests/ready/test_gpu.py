"""On a GPU: the pack's calls before their kernels are compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import sys, torch, torch.nn.functional as F, opgraft
x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

def step():
    out = F.rms_norm(x, [4096], weight, 1e-6)
    out.sum().backward()
    return out

first = step()
assert "triton" not in sys.modules, "a call imported the DSL"
(forward,) = opgraft.overrides(name="opgraft_kernels.rms_norm.forward")
(backward,) = opgraft.overrides(name="opgraft_kernels.rms_norm.backward")
assert (forward.hits, backward.hits) == (0, 0)
assert opgraft.wait_until_ready(200)
states = forward.plans.readiness.states() + backward.plans.readiness.states()
assert states and all(state.status == "ready" for state in states), states
assert all(state.by.startswith("worker") for state in states), [str(state) for state in states]
for _ in range(5):
    out = step()
assert forward.hits >= 5 and backward.hits >= 5, (forward, backward)
torch.testing.assert_close(out, first, rtol=2e-2, atol=2e-2)
"""


def test_the_packs_norms_become_ready_in_workers(tmp_path: Path) -> None:
    environment = os.environ | {
        **{"OPGRAFT_WHEN_NOT_READY": "native", "OPGRAFT_PACKS": "opgraft-kernels"},
        **{"TRITON_CACHE_DIR": str(tmp_path / "triton"), "OPGRAFT_CACHE": str(tmp_path)},
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
