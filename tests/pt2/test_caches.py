"""The compiler's caches on disk never bring an override back, nor lose one, in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import opgraft
from opgraft.pt2 import caches

HERE = Path(__file__).parent
SOFTMAX = 0.125  # of eight equal values

#: In this order, with one cache: what each process registers, and what is expected of it.
STEPS: dict[str, dict[str, Any]] = {
    "stock, cold": {},
    "opaque, after stock": {"opgraft": True},
    "stock, after opaque": {},
    "opaque, warm": {"opgraft": True},
    "its condition changed": {"opgraft": True, "least": 2},
    "its condition never holds": {"opgraft": True, "least": 100},
    "its pack upgraded": {"opgraft": True, "factor": 2},
    "disabled": {"opgraft": True, "disable": True},
    "removed": {"opgraft": True, "remove": True},
    "OPGRAFT_DISABLE": {"opgraft": True, "environment": {"OPGRAFT_DISABLE": "1"}},
    "OPGRAFT_DISABLE by name": {
        "opgraft": True,
        "environment": {"OPGRAFT_DISABLE": "aten::_softmax"},
    },
    "traced": {"opgraft": True, "compile": "traceable"},
    "traced, warm": {"opgraft": True, "compile": "traceable"},
    "traced, its pack upgraded": {"opgraft": True, "compile": "traceable", "factor": 2},
    "stock, at the end": {},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("caches")
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    environment.pop("OPGRAFT_DISABLE", None)
    command = [sys.executable, str(HERE / "cache_steps.py"), str(folder)]
    command += [json.dumps(step) for step in STEPS.values()]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(STEPS), ran.stderr[-2000:]
    return dict(zip(STEPS, lines, strict=True))


def is_warm(result: dict[str, Any]) -> bool:
    return result["aot"].get("autograd_cache_hit", 0) == 1


@pytest.mark.parametrize("step", STEPS)
def test_no_process_crashes(step: str, results: dict[str, dict[str, Any]]) -> None:
    assert "error" not in results[step], results[step]


@pytest.mark.parametrize(
    ("step", "value", "hits"),
    [
        ("stock, cold", SOFTMAX, 0),
        ("opaque, after stock", 1, 1),
        ("stock, after opaque", SOFTMAX, 0),
        ("opaque, warm", 1, 1),
        ("its condition changed", 1, 1),
        ("its condition never holds", SOFTMAX, 0),
        ("its pack upgraded", 2, 1),
        ("disabled", SOFTMAX, 0),
        ("removed", SOFTMAX, 0),
        ("OPGRAFT_DISABLE", SOFTMAX, 0),
        ("OPGRAFT_DISABLE by name", SOFTMAX, 0),
        # What is traced is part of the graph, and no hit is counted.
        ("traced", 1, 0),
        ("traced, warm", 1, 0),
        ("traced, its pack upgraded", 2, 0),
        ("stock, at the end", SOFTMAX, 0),
    ],
)
def test_every_process_runs_what_it_has_registered(
    step: str, value: float, hits: int, results: dict[str, dict[str, Any]]
) -> None:
    assert (results[step]["first"], results[step]["hits"]) == (value, hits)


@pytest.mark.parametrize(
    "step",
    [
        "stock, after opaque",
        "opaque, warm",
        "disabled",
        "removed",
        "OPGRAFT_DISABLE",
        "OPGRAFT_DISABLE by name",
        "traced, warm",
        "stock, at the end",
    ],
)
def test_a_process_with_the_same_overrides_on_finds_what_was_compiled(
    step: str, results: dict[str, dict[str, Any]]
) -> None:
    assert is_warm(results[step]), results[step]


@pytest.mark.parametrize(
    "step",
    [
        "stock, cold",
        "opaque, after stock",
        "its condition changed",
        "its condition never holds",
        "its pack upgraded",
        "traced",
        "traced, its pack upgraded",
    ],
)
def test_a_process_with_others_compiles_anew(step: str, results: dict[str, dict[str, Any]]) -> None:
    assert not is_warm(results[step]), results[step]


def test_a_policy_that_is_assigned_later_counts() -> None:
    override = opgraft.register_op_override("aten", "_softmax", "CPU", lambda *args: args[0])
    before = caches.registry_state()
    override.declaration = override.declaration.replaced(compile="opaque")
    assert caches.registry_state() != before
    override.declaration = override.declaration.replaced(compile="auto")
    assert caches.registry_state() == before
