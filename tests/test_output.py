"""No command cuts a name, whatever the terminal's width, and in a pipe each row is a line."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import opgraft
from opgraft import cli

PROGRAM = """
import sys
import opgraft
for op in ("_softmax", "_softmax_backward_data"):
    opgraft.register_op_override(
        "aten", op, "CPU", lambda *args: None, unconditional_override=True, dsl="triton",
        name=f"a_library_with_a_long_name.kernels.of_many_kinds.{op}_of_the_first_kind",
    )
from opgraft import cli
sys.exit(cli.main(sys.argv[1:]))
"""
NAMES = [
    "aten::_softmax",
    "a_library_with_a_long_name.kernels.of_many_kinds._softmax_of_the_first_kind",
]
COMMANDS = {
    "list": [*NAMES, "aten::_softmax_backward_data", "opgraft-kernels", "triton"],
    "list --op aten::_softmax": NAMES,
    "explain aten::_softmax --shape 8x8": NAMES,
    "doctor": [*NAMES, "aten::_softmax_backward_data", "opgraft-kernels"],
    "verify --help": ["--max-samples"],
}


def run_in(words: list[str], width: int, *, terminal: bool) -> str:
    """What a command prints, to a terminal of that width or into a pipe."""
    command = [sys.executable, "-c", PROGRAM, *words]
    variables = os.environ | {"COLUMNS": str(width), "TERM": "xterm"}
    if not terminal:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        return done.stdout
    ours, its = pty.openpty()
    process = subprocess.Popen(command, env=variables, stdin=its, stdout=its, stderr=its)
    os.close(its)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux says so at the end of what a terminal gets
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    process.wait()
    text = b"".join(parts).decode().replace("\r\n", "\n")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("command", ["list", "explain aten::_softmax --shape 8x8"])
def test_no_name_is_cut(command: str, width: int, terminal: bool) -> None:
    printed = run_in(command.split(), width, terminal=terminal)
    assert "…" not in printed
    for name in COMMANDS[command]:
        assert name in printed, f"{name} in\n{printed}"


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("command", ["doctor", "list --op aten::_softmax", "verify --help"])
def test_no_name_is_cut_by_the_other_commands(command: str, width: int, terminal: bool) -> None:
    printed = run_in(command.split(), width, terminal=terminal)
    assert "…" not in printed
    unfolded = re.sub(r"\s*│?\n│?\s*", "", printed)  # what is told in prose may fold
    for name in COMMANDS[command]:
        assert name in printed or name in unfolded or name in re.sub(r"[│\s]", "", printed)


def test_in_a_pipe_each_override_is_a_line_of_cells(capsys: pytest.CaptureFixture[str]) -> None:
    from tests import ops

    opgraft.register_op_override(
        "aten", "_softmax", "CPU", ops.softmax, unconditional_override=True, name="mine"
    )
    assert cli.main(["list"]) == 0
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("aten::_softmax\t")
    ]
    assert line.split("\t")[:3] == ["aten::_softmax", "CPU", "mine"]


def test_list_selects(capsys: pytest.CaptureFixture[str]) -> None:
    from tests import ops

    for name, dsl in (("first", "mine"), ("second", None)):
        opgraft.register_op_override(
            "aten", "_softmax", "CPU", ops.softmax, unconditional_override=True, name=name, dsl=dsl
        )
    assert cli.main(["list", "--dsl", "mine"]) == 0
    printed = capsys.readouterr().out
    assert "first" in printed
    assert "second" not in printed
    assert cli.main(["list", "--op", "aten::_softmax"]) == 0
    printed = capsys.readouterr().out
    assert "first" in printed
    assert "second" in printed
    assert "rms_norm" not in printed
    assert cli.main(["list", "--pack", "opgraft-kernel"]) == 2
    assert "did you mean opgraft-kernels?" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/proc/none", "file/below"])
def test_a_pack_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / path  # an absolute path stays one
    assert cli.main(["new", "a-pack-of-mine", "--into", str(place)]) == 1
    assert "cannot be written" in capsys.readouterr().err
