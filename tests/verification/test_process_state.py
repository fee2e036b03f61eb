"""What a verification sees of a process's settings, and puts back."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest
import torch

from opgraft.verification.process_state import ProcessState, keeping_settings

CPU = torch.device("cpu")
NAME = "OF_A_DSL"


def test_a_variable_is_seen_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    before = ProcessState.now(CPU)
    assert before.changed(ProcessState.now(CPU)) == []
    os.environ[NAME] = "1"
    assert before.changed(ProcessState.now(CPU)) == ["os.environ"]
    before.restore()
    assert NAME not in os.environ


def test_a_variable_that_was_there_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "1")
    with keeping_settings():
        del os.environ[NAME]
    assert os.environ[NAME] == "1"


def test_a_variable_that_comes_with_an_import_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the DSL's own: nothing that an impl does."""
    monkeypatch.delenv(NAME, raising=False)
    before = ProcessState.now(CPU)
    with keeping_settings():
        monkeypatch.setitem(sys.modules, "a_dsl", ModuleType("a_dsl"))
        monkeypatch.setenv(NAME, "1")
    assert before.changed(ProcessState.now(CPU)) == []
    before.restore()
    assert os.environ[NAME] == "1"
