"""What `opgraft list` and `opgraft doctor` say of calls whose kernels are not compiled."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import cli
from opgraft.cli import doctor
from opgraft.core import loader
from opgraft.ready import pool

pytestmark = pytest.mark.skipif(
    loader.in_use() is None, reason="plans, which say what is ready, need the compiled core"
)

LIMIT = 200
Capture = pytest.CaptureFixture[str]


class Asked:
    """An override for two kinds of calls: one fails, and one is ready or being compiled."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.began = threading.Event()
        self.override = opgraft.register_op_override(
            "aten",
            "neg",
            "CPU",
            self._impl,
            unconditional_override=True,
            launch_plan=True,
            when_not_ready="native",
            name="asked",
        )

    def _impl(self, input: torch.Tensor) -> torch.Tensor:
        if input.numel() == 4:
            raise RuntimeError("no compiler found")
        self.began.set()
        assert self.goes_on.wait(LIMIT)
        return 0 - input

    def ask(self) -> None:
        torch.neg(torch.ones(4))
        torch.neg(torch.ones(5))
        assert self.began.wait(LIMIT)

    def finish(self) -> None:
        self.goes_on.set()
        assert opgraft.wait_until_ready(LIMIT)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path))
    asked = Asked()
    yield asked
    asked.finish()
    asked.override.remove()


def listed(capsys: Capture) -> tuple[dict[str, Any], str]:
    """The override in `opgraft list --json`, and its line in `opgraft list`."""
    assert cli.main(["list", "--json"]) == 0
    (row,) = [
        each for each in json.loads(capsys.readouterr().out)["overrides"] if each["name"] == "asked"
    ]
    assert cli.main(["list"]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "\tasked\t" in each]
    return row, line


def said(topic: str) -> list[tuple[str, str]]:
    return [(check.level, check.text) for check in doctor._readiness() if check.topic == topic]


def test_list_says_what_is_not_asked_for(asked: Asked, capsys: Capture) -> None:
    row, line = listed(capsys)
    assert (row["when_not_ready"], row["readiness"]) == ("native", [])
    assert "\tnot asked for\t" in line


def test_list_counts_what_is_ready_being_compiled_and_failed(asked: Asked, capsys: Capture) -> None:
    asked.ask()
    _, line = listed(capsys)
    assert "\t1 being compiled, 1 failed\t" in line
    asked.finish()
    row, line = listed(capsys)
    assert "\t1 ready, 1 failed\t" in line
    found = {each["status"]: each for each in row["readiness"]}
    assert found["ready"]["by"] == "this process"
    assert "no compiler found" in found["failed"]["reason"]
    assert "float32[4]" in found["failed"]["call"]


def test_the_dict_of_plans_has_what_became_of_each_kind_of_call(asked: Asked) -> None:
    asked.ask()
    asked.finish()
    assert asked.override.plans is not None
    states = json.loads(json.dumps(asked.override.plans.as_dict()))["readiness"]
    assert {each["status"] for each in states} == {"ready", "failed"}
    assert all(set(each) == {"call", "status", "since", "by", "reason"} for each in states)


def test_list_says_nothing_of_overrides_whose_calls_wait(capsys: Capture) -> None:
    override = opgraft.register_op_override(
        "aten", "neg", "CPU", lambda self: 0 - self, unconditional_override=True, name="asked"
    )
    try:
        row, line = listed(capsys)
    finally:
        override.remove()
    assert (row["when_not_ready"], row["kernels"]) == ("wait", "")
    assert "\ton\t\t" in line


def test_doctor_tells_what_failed_and_what_is_being_compiled(asked: Asked) -> None:
    asked.ask()
    (failed, pending, policy) = said("kernels")
    assert failed[0] == "problem" and "asked (aten::neg)" in failed[1]
    assert "no compiler found" in failed[1]
    assert pending == ("note", "asked (aten::neg): 1 being compiled, 1 failed")
    assert policy[0] == "ok" and "native serves" in policy[1]


@pytest.mark.parametrize("policy", ["native", "wait"])
def test_doctor_tells_what_the_environment_says(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv("OPGRAFT_WHEN_NOT_READY", policy)
    ((level, text),) = said("kernels")
    assert level == "note" and text.startswith(f"OPGRAFT_WHEN_NOT_READY={policy}: ")
    assert bool(said("workers")) == (policy == "native")


def test_doctor_tells_that_workers_can_be_started(asked: Asked, tmp_path: Path) -> None:
    ((level, text),) = said("workers")
    assert level == "ok" and str(tmp_path) in text
    assert not list(tmp_path.iterdir())  # to look changes nothing


@pytest.mark.parametrize("executable", ["", "/no/such/python"])
def test_doctor_tells_that_no_worker_can_be_started(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    ((level, text),) = said("workers")
    assert level == "problem" and "no worker can be started" in text


def test_doctor_tells_that_claims_cannot_be_written(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "file"))
    ((level, text),) = said("workers")
    assert level == "note" and "cannot be written" in text


def test_doctor_says_nothing_of_kernels_where_all_calls_wait() -> None:
    assert [check for check in doctor._readiness() if check.topic == "workers"] == []
    assert pool.why_no_worker() == ""
