"""The benchmarks' scripts run without a GPU, where they measure nothing: those that take seconds.

`make bench BENCH_ARGS=--smoke` runs them all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
# With one, Triton is not interpreted, and the CPU key has no kernel.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize(
    "name",
    [
        *("attention", "compiled_norms", "crossovers", "layer_norm", "llama", "models"),
        *("profile_shares", "rms_norm", "rows"),
    ],
)
def test_smoke(name: str) -> None:
    """Each asserts that its overrides were hit."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
