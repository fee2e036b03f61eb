"""The benchmarks' scripts run without a GPU, where they measure nothing: those that take seconds.

`make bench BENCH_ARGS=--smoke` runs them all.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests import forked_programs

pytest.importorskip("triton")
# With one, Triton is not interpreted, and the CPU key has no kernel.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return forked_programs.run_file(BENCHMARKS / f"{name}.py", *arguments)


@pytest.mark.parametrize(
    "name",
    [
        *("attention", "attention_tiles", "compiled_norms", "crossovers", "layer_norm", "llama"),
        *("models", "permuted_tiles", "profile_shares", "rms_norm", "rows", "softmax_tiles"),
    ],
)
def test_smoke(name: str) -> None:
    """Each asserts that its overrides were hit, if it can run them without a GPU."""
    done = run(name, "--smoke")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


def test_recorded_times_of_graphs_are_put_into_tables(tmp_path: Path) -> None:
    tables = BENCHMARKS.parent / "kernels/opgraft-kernels/src/opgraft_kernels/tables"
    table = json.loads((tables / "nvidia_h200.json").read_text())
    parts = {
        name: part for name, part in table["overrides"].items() if "graphs" in part["measured"]
    }
    assert parts
    for part in parts.values():
        part["cells"] = [" ".join([*cell.split()[:-2], "-", "-"]) for cell in part["cells"]]
    path = tmp_path / "nvidia_h200.json"
    path.write_text(json.dumps(table))
    texts = []
    for _ in range(2):
        done = run("recorded_tables", "--output", tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        texts.append(path.read_text())
    assert texts[0] == texts[1], "what a table has stays"
    for name in parts:
        part = json.loads(texts[0])["overrides"][name]
        assert "compiled_" in part["measured"]["graphs"]
        assert any(not cell.endswith(" -") for cell in part["cells"]), name
