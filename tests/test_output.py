"""No command cuts a name, whatever the terminal's width, and in a pipe each row is a line."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import opgraft
from opgraft import cli

#: Before the output of each command.
MARK = "-- the next command --"
PROGRAM = f"""
import fcntl, os, shlex, struct, sys, termios
import opgraft
def softmax(self, dim, half_to_float):
    weights = (self - self.amax(dim, keepdim=True)).exp()
    return (weights / weights.sum(dim, keepdim=True)).contiguous()
def calls(device, rows):
    yield sys.modules["torch"].ones(rows, 4), -1, False
options = {{"crossover": opgraft.Crossover(
    rows=opgraft.when.size("self", 0), calls=calls, ranges={{"rows": (4, 4)}})}}
opgraft.register_op_override(
    "aten", "_softmax", "CPU", softmax, cond=opgraft.when.ndim("self") == 2, **options,
    name="a_library_with_a_long_name.kernels.of_many_kinds._softmax_that_is_tuned")
for op, first, impl in (
    ("_softmax", "self", softmax),
    ("_softmax_backward_data", "output", lambda *arguments: None),
):
    opgraft.register_op_override(
        "aten", op, "CPU", impl, cond=opgraft.when.ndim(first) == 2, dsl="triton",
        name=f"a_library_with_a_long_name.kernels.of_many_kinds.{{op}}_of_the_first_kind",
    )
from opgraft import cli
for argument in sys.argv[1:]:
    width, _, line = argument.partition(" ")
    if sys.stdout.isatty():
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, int(width), 0, 0))
    else:
        os.environ["COLUMNS"] = width
    print("{MARK}", flush=True)
    cli.main(shlex.split(line))
    sys.stdout.flush()
"""
SCRIPT = "import torch; torch.softmax(torch.ones(2, 3), -1)"
NAMES = [
    "aten::_softmax",
    "a_library_with_a_long_name.kernels.of_many_kinds._softmax_of_the_first_kind",
]
PACK = "a-pack-whose-name-is-longer-than-most-of-them-are"
#: What each has to print whole; {folder} is a folder of its own.
COMMANDS = {
    "list": [*NAMES, "aten::_softmax_backward_data", "opgraft-kernels", "triton"],
    "list --op aten::_softmax": NAMES,
    "explain aten::_softmax --shape 8x8": NAMES,
    "explain aten::softmax.int --shape 8x8 --requires-grad": NAMES,
    "doctor": [*NAMES, "aten::_softmax_backward_data", "opgraft-kernels"],
    "verify aten::_softmax --check hit --check strides --max-samples 6 --no-opinfo": [
        *NAMES,
        "passed",
    ],
    "tune --output {folder}/tables": [
        "a_library_with_a_long_name.kernels.of_many_kinds._softmax_that_is_tuned",
        "/tables/",
    ],
    "run {folder}/script.py": NAMES,
    "warmup {folder}/script.py": NAMES[1:],
    "profile {folder}/script.py": NAMES,
    f"new {PACK} --into {{folder}}": [f"/{PACK}"],
    "build": ["nothing to do"],
    "--version": ["opgraft"],
    "--help": [f"  {name}  " for name in cli.opgraft.commands],
    "verify --help": ["--max-samples", "--dispatch-key"],
    **{f"{name} --help": ["--json", "--help"] for name in cli.opgraft.commands if name != "verify"},
}


def on_a_terminal(
    command: list[str],
    variables: dict[str, str],
    width: int,
    *,
    folder: Path | None = None,
    only_errors: bool = False,
) -> tuple[int, str]:
    """The status of a process, and what it printed to a terminal of that width.

    Args:
        command: the process.
        variables: its environment.
        width: in columns.
        folder: where it works.
        only_errors: whether only standard error is the terminal, and standard output nothing.
    """
    variables = {name: value for name, value in variables.items() if name != "COLUMNS"}
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    stdin, stdout = (None, subprocess.DEVNULL) if only_errors else (its, its)
    process = subprocess.Popen(
        command, cwd=folder, env=variables, stdin=stdin, stdout=stdout, stderr=its
    )
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
    return process.wait(), b"".join(parts).decode().replace("\r\n", "\n")


def run_in(lines: list[tuple[int, str]], *, terminal: bool) -> list[str]:
    """What each command prints, to a terminal of a width or into a pipe.

    All run in one process, which takes seconds to begin.
    """
    command = [sys.executable, "-c", PROGRAM, *(f"{width} {line}" for width, line in lines)]
    variables = os.environ | {"TERM": "xterm", "PYTHONUNBUFFERED": "1"}
    if terminal:
        _, text = on_a_terminal(command, variables, lines[0][0])
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    else:
        text = subprocess.run(
            command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        ).stdout
    _, *printed = text.split(MARK)
    assert len(printed) == len(lines), printed[-1]
    return printed


def test_each_command_is_among_those_that_are_looked_at() -> None:
    called = {line.split()[0] for line in COMMANDS if not line.endswith("--help")}
    assert called - {"--version"} == set(cli.opgraft.commands)
    assert {f"{name} --help" for name in cli.opgraft.commands} <= set(COMMANDS)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_no_command_cuts_a_name(terminal: bool, tmp_path: Path) -> None:
    lines, expected = [], []
    for width in (60, 80, 200):
        folder = tmp_path / str(width)
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        lines += [(width, line.format(folder=folder)) for line in COMMANDS]
        expected += COMMANDS.values()
    printed = run_in(lines, terminal=terminal)
    for (width, line), names, text in zip(lines, expected, printed, strict=True):
        assert "…" not in text and "Traceback" not in text, f"{line} at {width}:\n{text}"
        # What is told in prose may go on in the next line, in its column too; a name may not lose
        # a part.
        unfolded = re.sub(r"\s*│?\n│?\s*", "", text)
        without_frame = re.sub(r"[│\s]", "", text)
        for name in names:
            whole = name in text or name in unfolded or name in without_frame
            assert whole, f"{line} at {width} does not print {name}:\n{text}"
        if not terminal and NAMES[1] in names and line.startswith(("list", "explain")):
            rows = [row.split("\t") for row in text.splitlines()]
            assert any(NAMES[1] in cells for cells in rows), f"{line} at {width}:\n{text}"


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
