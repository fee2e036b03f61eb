"""What is told of overrides in compiled graphs."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import when
from opgraft.pt2 import compile_log
from tests import ops
from tests.pt2 import models

pytestmark = pytest.mark.filterwarnings("ignore")


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def run(x: torch.Tensor | None = None, **options: Any) -> None:
    torch.compile(softmax, backend="aot_eager", **options)(torch.ones(4, 8) if x is None else x)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cond": None}, "aten::_softmax at CPU is opaque: _softmax takes every call"),
        (
            {"cond": when.aligned("self", 16)},
            "aten::_softmax at CPU is opaque: _softmax is asked at run time: compile='opaque'",
        ),
        (
            {"cond": when.dtype("self", torch.float64) & (when.ndim("self") == 2)},
            "is left: _softmax never takes it: when.dtype('self', torch.float64)",
        ),
        (
            {"cond": lambda self, dim, half_to_float: self.ndim == 3},
            "<lambda> is false whatever the sizes",
        ),
        ({"cond": None, "compile": "inductor"}, "left to the compiler: compile='inductor'"),
        ({"cond": None, "compile": "auto"}, "_softmax is left to the compiler"),
        (
            {"cond": None, "compile": when.size("self", 0) >= 4},
            "_softmax takes every call: compile=when.size('self', 0) >= 4",
        ),
        (
            {"cond": None, "compile": when.size("self", 0) >= 8},
            "left to the compiler: compile=when.size('self', 0) >= 8 never holds for it",
        ),
        (
            {"cond": None, "compile": when.aligned("self", 16)},
            "left to the compiler: compile=when.aligned('self', 16) is not sure to hold for it",
        ),
        ({"cond": None, "compile": "traceable"}, "is traced: _softmax takes every call"),
    ],
)
def test_the_log_says_what_became_of_an_op_and_why(
    options: dict[str, Any], told: str, decisions: pytest.LogCaptureFixture
) -> None:
    models.override("_softmax", ops.softmax, **options)
    run()
    assert told in decisions.text
    assert decisions.text.count("_softmax at CPU is") == 1, "once for each graph"


def test_each_graph_is_told_of(decisions: pytest.LogCaptureFixture) -> None:
    models.override("_softmax", ops.softmax)
    run(torch.ones(4, 8))
    run(torch.ones(4, 4, 8))
    assert "graph 0/0: aten::_softmax" in decisions.text
    assert "graph 0/1: aten::_softmax" in decisions.text


def test_torch_s_own_logs_and_trace_tell_it(tmp_path: Path) -> None:
    code = """
import torch, opgraft
from tests import ops
from tests.pt2 import models
models.override("_softmax", ops.softmax)
models.override("exp", lambda self: self, opgraft.when.ndim("self") == 3)
torch.compile(lambda x: torch.softmax(x.exp(), -1), backend="aot_eager")(torch.ones(4, 8))
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "TORCH_LOGS": "+opgraft", "TORCH_TRACE": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "[0/0] graph 0/0: aten::_softmax at CPU is opaque" in ran.stderr
    (trace,) = tmp_path.iterdir()
    entries = {}
    # A payload's lines are indented by a tab.
    for metadata, payload in re.findall(r"^V[^{]*(\{.*)\n((?:\t.*\n)*)", trace.read_text(), re.M):
        artifact = json.loads(metadata).get("artifact", {})
        if artifact.get("name", "").startswith("opgraft_aten"):
            assert json.loads(metadata)["frame_id"] == 0
            entries[artifact["name"]] = json.loads(payload)
    assert entries["opgraft_aten::_softmax"]["action"] == "opaque"
    assert entries["opgraft_aten::_softmax"]["override"] == "_softmax"
    assert entries["opgraft_aten::exp"]["action"] == "left"
    assert "when.ndim('self') == 3" in entries["opgraft_aten::exp"]["reason"]


@pytest.fixture
def reminders(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="opgraft.pt2")
    monkeypatch.setattr(compile_log, "_has_warned", False)
    return caplog


def test_an_override_that_comes_after_a_compile_is_told_of(
    reminders: pytest.LogCaptureFixture,
) -> None:
    compiled = torch.compile(softmax, backend="inductor")
    compiled(torch.ones(4, 8))
    override = models.override("_softmax", ops.softmax)
    assert "torch._dynamo.reset()" in reminders.text
    compiled(torch.ones(4, 8))
    assert override.hits == 0
    torch._dynamo.reset()
    compiled(torch.ones(4, 8))
    assert override.hits == 1


@pytest.mark.parametrize("change", ["disable", "remove", "inductor"])
def test_changes_that_compiled_graphs_follow_are_not_told_of(
    change: str, reminders: pytest.LogCaptureFixture
) -> None:
    models.override("_softmax", ops.softmax)
    second = models.override("_softmax", ops.softmax, when.ndim("self") == 7, priority=1)
    run()
    if change == "disable":
        opgraft.disable(name="_softmax")
    elif change == "remove":
        second.remove()
    else:
        models.override("exp", torch.exp, compile="inductor")
    assert "reset" not in reminders.text
