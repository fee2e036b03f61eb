"""What is misspelt where something is switched off is told, with the nearest name, and once."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import opgraft
from opgraft import spelling
from opgraft.base import env
from opgraft.cli import doctor
from tests import forked_programs, ops

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _anew() -> None:
    env.warn_once.cache_clear()


def register(**keywords: Any) -> opgraft.Override:
    return opgraft.register_op_override(
        "aten", "_softmax", "CPU", ops.softmax, unconditional_override=True, **keywords
    )


def run_python(program: str, **variables: str) -> list[str]:
    """What a process with these variables says of them on stderr."""
    done = forked_programs.run(program, env=os.environ | variables)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "OPGRAFT_" in line]


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("OPGRAFT_DISABLE", "tirton", "did you mean triton?"),
        ("OPGRAFT_DISABLE", "Triton", "did you mean triton?"),
        ("OPGRAFT_DISABLE", "cutdsl", "did you mean cutedsl?"),
        ("OPGRAFT_DISABLE", "_fused_rms_norm", "did you mean aten::_fused_rms_norm?"),
        ("OPGRAFT_DISABLE", "aten::_fused_rms_nrom", "did you mean aten::_fused_rms_norm"),
        (
            "OPGRAFT_DISABLE",
            "aten::mul",
            "aten::mul.Scalar, aten::mul.Scalar_out, aten::mul.Tensor",
        ),
        ("OPGRAFT_DISABLE", "pack:opgraft-kernel", "did you mean opgraft-kernels?"),
        ("OPGRAFT_DISABLE", "opgraft-kernels", "did you mean pack:opgraft-kernels?"),
        ("OPGRAFT_DISABLE", "pack:nosuch", "no pack of that name is installed"),
        ("OPGRAFT_DISABLED", "1", "did you mean OPGRAFT_DISABLE?"),
        ("OPGRAFT_STRCIT", "1", "did you mean OPGRAFT_STRICT?"),
        ("OPGRAFT_ROUTER", "pyhton", "give python"),
        ("OPGRAFT_STRICT", "always", "give 1 or 0"),
        ("OPGRAFT_PLANS", "none", "give 0 or 1"),
        ("OPGRAFT_BUILD_CORE", "yes", "give 0 or 1"),
        ("OPGRAFT_WHEN_NOT_READY", "nativ", "give native or wait"),
        ("OPGRAFT_READY", "bundles", "give bundle"),
        ("OPGRAFT_COMPILE_TIMEOUT", "30s", "give a number of seconds"),
        ("OPGRAFT_COMPILE_TIMEOUT", "-1", "give a number of seconds"),
        ("OPGRAFT_SHADOW", "often", "give a share of hits"),
        ("OPGRAFT_SHADOW", "2", "give a share of hits"),
        ("OPGRAFT_SHADOW", "0.1:explode", "give a share of hits"),
        ("OPGRAFT_LOG", "verbose", "give debug"),
        ("OPGRAFT_TABLES", __file__, "give a folder"),
        ("OPGRAFT_CACHE", __file__, "give a folder"),
    ],
)
def test_a_misspelt_variable_is_told(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, hint: str
) -> None:
    monkeypatch.delenv("OPGRAFT_ROUTER", raising=False)
    monkeypatch.setenv(variable, value)
    (text,) = spelling.environment()
    assert variable in text
    assert hint in text


@pytest.mark.parametrize(
    "value",
    [
        *("1", "0", "true", "", "triton", "cutedsl,triton", "aten::_softmax", "aten::mul.Tensor"),
        *("pack:opgraft-kernels", "mylib::op", "a-label-of-somebodys", "name:registered-later"),
        "aten::_softmax.default",
    ],
)
def test_what_may_be_right_is_not_told(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OPGRAFT_DISABLE", value)
    assert spelling.environment() == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("OPGRAFT_STRICT", value) for value in ("1", "0", "ON", "no", "")),
        *(("OPGRAFT_PLANS", value) for value in ("0", "1", "False")),
        *(("OPGRAFT_WHEN_NOT_READY", value) for value in ("native", "WAIT")),
        *(("OPGRAFT_READY", value) for value in ("bundle", "Bundle")),
        *(("OPGRAFT_ROUTER", value) for value in ("python", "Python")),
        *(("OPGRAFT_COMPILE_TIMEOUT", value) for value in ("0", "2.5", "1e3")),
        *(("OPGRAFT_SHADOW", value) for value in ("0", "1", "0.01:quarantine", "1:raise", "1:LOG")),
        *(("OPGRAFT_LOG", value) for value in ("debug", "Critical")),
        *(("OPGRAFT_TABLES", value) for value in ("~", "/no/such/folder")),
        *(("OPGRAFT_DISABLE", value) for value in ("no", "off", "False")),
    ],
)
def test_a_value_that_means_something_is_not_told(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.delenv("OPGRAFT_ROUTER", raising=False)
    monkeypatch.setenv(variable, value)
    assert spelling.environment() == []
    assert env.initially_disabled() == []


def test_doctor_tells_of_a_value_that_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPGRAFT_STRICT", "always")
    (check,) = [each for each in doctor._environment() if each.level == "problem"]
    assert "OPGRAFT_STRICT=always is ignored" in check.text


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OPGRAFT_LOG", "verbose"), ("OPGRAFT_SHADOW", "often"), ("OPGRAFT_WHEN_NOT_READY", "nativ")],
)
def test_a_value_that_means_nothing_is_told_once(variable: str, value: str) -> None:
    (line,) = run_python(REGISTERING, **{variable: value})
    assert f"{variable}={value} is ignored" in line


def test_an_overrides_name_is_told_from_a_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    register(name="mine")
    monkeypatch.setenv("OPGRAFT_DISABLE", "mine")
    (text,) = spelling.environment()
    assert "did you mean name:mine?" in text


def test_a_process_says_it_once_and_goes_on() -> None:
    said = run_python(
        "import torch, opgraft; opgraft.overrides(); import opgraft.control; print('done')",
        OPGRAFT_DISABLE="tirton,triton",
        OPGRAFT_DISABLED="1",
    )
    assert len(said) == 2
    assert "opgraft has no variable OPGRAFT_DISABLED" in said[0]
    assert "OPGRAFT_DISABLE=tirton switches nothing off" in said[1]


REGISTERING = """
import opgraft
opgraft.register_op_override(
    "aten", "_softmax", "CPU", lambda self, dim, half_to_float: self.clone(),
    unconditional_override=True, dsl="mine", name="later",
)
"""


@pytest.mark.parametrize("value", ["mine", "name:later", "mylib::op", "triton"])
def test_a_word_that_is_registered_later_is_right(value: str) -> None:
    assert run_python(REGISTERING, OPGRAFT_DISABLE=value) == []


@pytest.mark.parametrize("value", ["other", "name:other"])
def test_a_word_that_nothing_ever_had_is_told_at_the_end(value: str) -> None:
    (line,) = run_python(REGISTERING, OPGRAFT_DISABLE=value)
    assert f"OPGRAFT_DISABLE={value} switched nothing off" in line


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("name:latre", "did you mean later?"),
        ("mien", "mine"),
        ("later", "did you mean name:later?"),
    ],
)
def test_a_word_that_is_nearly_what_was_registered_later_is_told_at_the_end(
    value: str, hint: str
) -> None:
    (line,) = run_python(REGISTERING, OPGRAFT_DISABLE=value)
    assert f"OPGRAFT_DISABLE={value} switches nothing off" in line
    assert hint in line


def test_a_word_that_was_told_at_first_is_not_told_again() -> None:
    (line,) = run_python(REGISTERING, OPGRAFT_DISABLE="tirton")
    assert "did you mean triton?" in line


def test_a_name_in_the_environment_switches_off() -> None:
    program = REGISTERING + "assert not opgraft.overrides(name='later')[0].enabled"
    assert run_python(program, OPGRAFT_DISABLE="name:later") == []


@pytest.mark.parametrize("switch", ["disable", "enable", "disabled"])
@pytest.mark.parametrize(
    ("keyword", "word", "hint"),
    [
        ("dsl", "tirton", "did you mean triton?"),
        ("pack", "opgraft_kernels", "did you mean opgraft-kernels?"),
        ("pack", "nosuch", "no pack of that name"),
        ("dispatch_key", "cpu", "did you mean CPU?"),
        ("dispatch_key", "GPU", "no backend's key"),
        ("name", "Mine", "did you mean mine?"),
    ],
)
def test_a_misspelt_keyword_is_told_at_the_callers_line(
    switch: str, keyword: str, word: str, hint: str
) -> None:
    register(name="mine")
    with pytest.warns(opgraft.OverrideWarning) as caught:
        result = getattr(opgraft, switch)(**{keyword: word})
        if switch == "disabled":
            with result:
                pass
    (warning,) = caught
    assert hint in str(warning.message)
    assert warning.filename == __file__


def test_what_matches_or_may_match_is_not_warned_of() -> None:
    register(name="mine", dsl="a-label")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opgraft.disable(name="mine")
        opgraft.disable(dsl="a-label")
        opgraft.disable(dsl="triton", op="aten::bmm", dispatch_key="CUDA")
        opgraft.disable(name="of a library that is not imported")
        opgraft.enable()


def test_an_unusable_timeout_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPGRAFT_COMPILE_TIMEOUT", "abc")
    with caplog.at_level("WARNING", logger="opgraft"):
        assert [env.compile_timeout() for _ in range(6)] == [None] * 6
    assert len(caplog.records) == 1


def test_a_dsl_that_is_nearly_known_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="opgraft"):
        register(dsl="tritn")
        register(dsl="something-else")
    (record,) = caplog.records
    assert "did you mean triton?" in record.getMessage()


def test_every_variable_that_is_read_is_known() -> None:
    files = [*(ROOT / "python").rglob("*.py"), ROOT / "setup.py"]
    read = {
        name
        for file in files
        for name in re.findall(r"\"(OPGRAFT_[A-Z_]*[A-Z])\"", file.read_text())
    }
    assert {name for name in read if not name.startswith(spelling._FOREIGN_PREFIXES)} == {
        name for name in read if name in spelling.VARIABLES
    }
