"""`opgraft tune` as a user calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import opgraft
from opgraft import cli, when
from opgraft.cli import tune
from opgraft.core import store
from opgraft.crossover import models, sources
from opgraft.ready import claims
from opgraft.registry import registry
from opgraft.tuning import busy, heat, tuner
from tests import forked_programs
from tests.crossover.test_sources import UNREADABLE
from tests.tuning.conftest import Clock
from tests.tuning.test_tuner import register

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]

MODULE = """
import opgraft, torch
from opgraft import when

def calls(device, rows, dtype):
    yield (torch.zeros(rows, 4, device=device, dtype=dtype), -1, False)

def impl(self, dim, half_to_float):
    return torch.full_like(self, 1 / self.shape[-1])

def register(name, **keywords):
    opgraft.register_op_override(
        "aten", "_softmax", "CPU", impl, name=name, cond=when.size("self", -1) == 4, **keywords)

register("tuned", crossover=opgraft.Crossover(
    calls=calls, ranges={"rows": (16, 64), "dtype": [torch.float32]},
    rows=when.size("self", 0), dtype=when.dtype_of("self")))
register("plain", priority=-1)
register("shared", priority=-2, crossover=opgraft.Crossover(
    measured_as="tuned", rows=when.size("self", 0), dtype=when.dtype_of("self")))
"""

INTERPRETED = """
from opgraft import Crossover, triton_utils, when
from mine import calls, impl

triton_utils.register_op_override(
    "aten", "_softmax", "CPU", impl, name="interpreted", cond=when.size("self", -1) == 4,
    crossover=Crossover(calls=calls, ranges={"rows": (16, 64)}, rows=when.size("self", 0)))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    return tmp_path


def run_in_a_process(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {"OPGRAFT_PACKS": "none", "OPGRAFT_TABLES": str(folder / "tables")}
    env = os.environ | variables | {"PYTHONPATH": f"{ROOT}:{folder}"}
    words = "tune", "--import", "mine", *arguments
    return forked_programs.run_module("opgraft", *words, env=env, cwd=folder)


@pytest.fixture
def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """The same in this process: one of its own takes seconds to begin."""
    monkeypatch.setenv("OPGRAFT_TABLES", str(folder / "tables"))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        registry.reset()
        sources.forget()
        sys.modules.pop("mine", None)
        capsys.readouterr()
        status = cli.main(["tune", "--import", "mine", *arguments])
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    yield run
    sources.forget()


def test_it_writes_the_users_table_and_goes_on_where_it_stopped(folder: Path) -> None:
    done = run_in_a_process(folder, "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    path = Path(result["path"])
    assert result["name"] == "tuned" and result["left"] == 0
    assert 2 <= result["measured"] <= 3
    assert path.parent == folder / "tables" / "user"
    assert len(json.loads(path.read_text())["overrides"]["tuned"]["cells"]) == result["measured"]
    again = run_in_a_process(folder)
    assert again.returncode == 0, again.stderr
    title, _, row = (line.split("\t") for line in again.stdout.splitlines())
    assert title == ["OPGRAFT TUNE"]
    assert row[:4] == ["tuned", "0", str(result["measured"]), "0"]


#: Ends its process, without a word, when most cells are measured.
KILLED = """
import os, signal
from opgraft.tuning import tuner

def killed(entries, table):
    found = own(entries, table)
    if len(found["tuned"]["cells"]) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return found

tuner.WRITE_SECONDS = 0.0
own, tuner._Tuning._entries = tuner._Tuning._entries, killed
"""


def test_a_process_that_was_killed_leaves_a_whole_table_and_no_claim(
    folder: Path, run: Run
) -> None:
    (folder / "killed.py").write_text(KILLED)
    done = run_in_a_process(folder, "--import", "killed")
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = run("--json", "--budget", "60s")
    (result,) = json.loads(done.stdout)
    assert done.returncode == 0 and (result["known"], result["left"]) == (1, 0)
    tables = folder / "tables" / "user"
    assert [path.suffix for path in tables.iterdir()] == [".json"]


def test_what_another_process_tunes_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = named(
        ("a", "CPU"), ("b", "CPU"), crossover=opgraft.Crossover(n=when.numel("self"))
    )
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    held, may_end = threading.Event(), threading.Event()

    def other() -> None:
        claim = tune._claim(first, tmp_path)
        assert claim.take()
        held.set()
        may_end.wait(60)
        claim.release()

    def tune_override(override: opgraft.Override, *_: Any) -> tuner.Result:
        tuned.append(override)
        may_end.set()
        return tuner.Result(override.name)

    tuned: list[opgraft.Override] = []
    monkeypatch.setattr(tuner, "tune_override", tune_override)
    thread = threading.Thread(target=other)
    thread.start()
    assert held.wait(60)
    status, results = tune._tune([first, second], tmp_path, 60.0, None, {}, progress=False)
    thread.join()
    assert tuned == [second, first]
    assert status == 0 and results.keys() == {first, second}
    assert tune._claim(first, tmp_path).owner() is None


def test_parts_of_an_override_are_tuned_at_a_time(tmp_path: Path) -> None:
    (override,) = named(("a", "CPU"), crossover=opgraft.Crossover(n=when.numel("self")))
    parts = [(1, 2), (2, 2), (1, 3), None]
    assert len({tune._claim(override, tmp_path, part).name for part in parts}) == len(parts)


def test_a_part_is_measured(folder: Path, run: Run) -> None:
    """The module's grid has one dtype: the first part is all of it."""
    found = {part: json.loads(run("--json", "--part", part).stdout)[0] for part in ("2/2", "1/2")}
    assert found["2/2"]["measured"] == 0 < found["1/2"]["measured"]
    assert run("--json", "--part", "1/1").returncode == 0


def test_what_another_process_tunes_is_left_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (override,) = named(("a", "CPU"), crossover=opgraft.Crossover(n=when.numel("self")))
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    claim = tune._claim(override, tmp_path)
    thread = threading.Thread(target=claim.take)  # which ends, and its claim with it
    thread.start()
    thread.join()
    assert tune._next([override], tmp_path, 0.0, lambda *_: None)[0] is override
    seconds: list[float] = []

    def tune_override(_: Any, device: Any, options: tuner.Options, progress: Any) -> tuner.Result:
        seconds.append(options.seconds)
        return tuner.Result("a")

    monkeypatch.setattr(tuner, "tune_override", tune_override)
    monkeypatch.setattr(claims.Claim, "take", lambda self: False)
    assert tune._tune([override], tmp_path, 0.0, None, {}, progress=False)[0] == 0
    assert seconds[0] <= 0


def test_a_folder_is_claimed_by_whatever_path(tmp_path: Path) -> None:
    (override,) = named(("a", "CPU"), crossover=opgraft.Crossover(n=when.numel("self")))
    (tmp_path / "link").symlink_to("tables")  # which is made later
    one, other = (tune._claim(override, tmp_path / name).name for name in ("tables", "link"))
    assert one == other != tune._claim(override, tmp_path).name


def test_what_others_measure_anew_meanwhile_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    override = register()
    options = tuner.Options(tmp_path)
    cells = tuner.tune_override(override, torch.device("cpu"), options, print).measured
    own = tune._next

    def after_another_process(*arguments: Any) -> Any:
        clock.from_rows = 63
        again = tuner.Options(tmp_path, again=True)
        assert tuner.tune_override(override, torch.device("cpu"), again, print).measured >= cells
        return own(*arguments)

    monkeypatch.setattr(tune, "_next", after_another_process)
    _, results = tune._tune([override], tmp_path, 60.0, None, {"again": True}, progress=False)
    assert results[override].measured == 0


def test_a_picture_is_drawn_for_each_override(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run_in_a_process(folder, "--png", "pictures")
    assert done.returncode == 0, done.stderr
    assert (folder / "pictures" / "tuned.png").read_bytes().startswith(b"\x89PNG")


def named(*names: tuple[str, str], **declared: Any) -> list[opgraft.Override]:
    """Overrides by their names and dispatch keys."""
    return [
        opgraft.register_op_override(
            *("aten", op, key, lambda *args: args[0]),
            name=name,
            unconditional_override=True,
            **declared,
        )
        for op, (name, key) in zip(("_softmax", "_log_softmax", "relu", "neg"), names, strict=False)
    ]


@pytest.mark.parametrize(
    "names",
    [
        [("a", "CPU"), ("a", "CPU"), ("b", "CPU")],
        [("a", "CPU"), ("a", "CUDA")],
        [("a/b", "CPU"), ("a:b", "CPU"), ("../../a", "CPU")],
        [("a b", "CPU"), ("a/b", "CPU"), ("a_b", "CPU"), ("a_b", "CPU")],
    ],
    ids=str,
)
def test_each_override_has_a_picture_of_its_own(
    names: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Path] = []
    monkeypatch.setattr(heat, "save", lambda path, *_: saved.append(path))
    overrides = named(*names)
    tune._draw(
        overrides, {each: tuner.Result(each.name) for each in overrides}, tmp_path / "pictures"
    )
    assert len(set(saved)) == len(overrides)
    assert {each.parent for each in saved} == {tmp_path / "pictures"}
    assert ("b", "CPU") not in names or tmp_path / "pictures" / "b.png" in saved


@pytest.mark.parametrize("folder", [None, Path("mine")])
def test_overrides_of_one_place_in_a_table_are_refused(folder: Path | None) -> None:
    crossover = opgraft.Crossover(rows=when.size("self", 0))
    tune._check_names(named(("a", "CPU"), ("a", "CUDA"), ("b", "CPU"), crossover=crossover), folder)
    for chosen in (slice(2), slice(1)):
        clashing = named(("c", "CPU"), ("c", "CPU"), crossover=crossover)
        with pytest.raises(click.ClickException, match=r"softmax at CPU and .* are both named 'c'"):
            tune._check_names(clashing[chosen], folder)


def test_a_scripts_own_sizes_are_measured(folder: Path, run: Run) -> None:
    (folder / "script.py").write_text(
        "import sys, threading, torch\n"
        "assert sys.argv[1:] == ['--size', '50']\n"
        "def call(rows, columns=4):\n"
        "    torch.softmax(torch.zeros(rows, columns), -1)\n"
        "call(50)\n"
        "call(20, 5)\n"  # the condition declines it
        "call(1000)\n"  # outside of the ranges
        "other = threading.Thread(target=call, args=(40,))\n"
        "other.start(), other.join()\n"
    )
    done = run("--json", "script.py", "--", "--size", "50")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    cells = json.loads(Path(result["path"]).read_text())["overrides"]["tuned"]["cells"]
    assert [cell.partition(" : ")[0] for cell in cells] == ["32 float32"]
    assert result["left"] == 0
    assert result["skipped"] == {"outside of ranges=": 1}


def test_a_sample_of_the_cells_is_measured_again(folder: Path, run: Run) -> None:
    assert run("--output", "mine").returncode == 0
    done = run("--output", "mine", "--check", "2", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["measured"] == 2 and len(row["otherwise"]) <= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "soon"], "'soon' is no duration: write 90s, 10m or 2h"),
        (["--part", "5/4"], "'5/4' is no part: write 1/4, or 4/4 for the last of four"),
        (["--part", "0/4"], "'0/4' is no part"),
        (["--check", "2", "--part", "1/2"], "writes nothing: leave --part away"),
        (["--check", "2", "--again", "--budget", "9s"], "leave --again and --budget away"),
        (["--name", "plain"], "no override here declares a crossover="),
        (["--name", "shared"], "shared by that of tuned: tune that one"),
        (["aten::relu"], "no override of aten::relu here declares a crossover="),
        (["aten::_softmax", "more"], "only a script has arguments: more"),
        (["absent.py"], "there is no file 'absent.py'"),
        (["fails.py"], "fails.py ended with 3: nothing was measured"),
    ],
)
def test_what_cannot_be_tuned_is_told(
    folder: Path, run: Run, arguments: list[str], message: str
) -> None:
    (folder / "fails.py").write_text("raise SystemExit(3)")
    done = run(*arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_overrides_without_a_device_here_are_told_and_the_others_measured(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mine.py").write_text(
        MODULE.replace('"CPU", impl', 'keywords.pop("key", "CPU"), impl')
        + 'register("elsewhere", key="XPU", crossover=opgraft.Crossover('
        'calls=calls, ranges={"rows": (16, 64)}, rows=when.size("self", 0)))\n'
    )
    done = run("--json")
    assert done.returncode == 0, done.stderr
    assert "not measured: elsewhere: there is no xpu device here" in done.stderr
    assert [each["name"] for each in json.loads(done.stdout)] == ["tuned"]
    done = run("--name", "elsewhere")
    assert done.returncode == 1
    assert "nothing can be measured: there is no xpu device here" in done.stderr


def test_an_override_of_which_every_call_fails_is_a_failure(folder: Path, run: Run) -> None:
    text = MODULE.replace("    yield (torch", "    raise ValueError('no calls')\n    yield (torch")
    (folder / "mine.py").write_text(text)
    done = run()
    assert done.returncode == 1 and "no calls" in done.stdout
    done = run("--check", "2")
    assert done.returncode == 1 and "run opgraft tune" in done.stderr


def test_what_the_interpreter_takes_is_no_measurement(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (folder / "interpreted.py").write_text(INTERPRETED)
    done = run_in_a_process(folder, "--import", "interpreted", "--name", "interpreted")
    assert done.returncode == 1
    assert "interpreted would run in Triton's interpreter" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_table_is_kept(folder: Path, run: Run) -> None:
    assert run().returncode == 0
    (table,) = (folder / "tables" / "user").iterdir()
    table.write_text("mine")
    done = run()
    assert done.returncode == 1 and "damaged" in done.stderr
    assert table.read_text() == "mine"


@pytest.mark.parametrize(
    ("what", "arguments"), [("a folder", []), ("a pipe", []), ("no UTF-8", ["--check", "1"])]
)
def test_what_cannot_be_read_as_a_table_is_told(
    what: str, arguments: list[str], folder: Path, run: Run
) -> None:
    place = folder / "tables" / "user"
    place.mkdir(parents=True)
    path = place / models.file_name(models.of_device(torch.device("cpu")).name)
    UNREADABLE[what](path)
    done = run(*arguments)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"Error: the table {path} stays as it is: it ")
    assert list(place.iterdir()) == [path]


def test_nothing_is_measured_for_a_folder_whose_tables_would_not_be_read(
    folder: Path, run: Run
) -> None:
    (folder / "tables").mkdir()
    (folder / "tables").chmod(0o775)
    done = run()
    assert done.returncode == 1
    assert "would not be used: others may write to" in done.stderr and "chmod go-w" in done.stderr
    assert run("--output", "mine").returncode == 0


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_measured(
    folder: Path, run: Run
) -> None:
    output = "/dev/null/tables"
    done = run("--output", output)
    assert done.returncode == 1 and output in done.stderr
    assert "Traceback" not in done.stderr


def test_a_table_that_is_written_with_a_umask_for_groups_is_trusted(folder: Path, run: Run) -> None:
    before = os.umask(0o002)
    try:
        assert run().returncode == 0
    finally:
        os.umask(before)
    (table,) = (folder / "tables" / "user").iterdir()
    assert store.why_untrusted(table) == ""


@pytest.mark.parametrize("answer", ["", "a\nb", "1, 2"])
def test_odd_answers_about_the_device_say_nothing_against_it(answer: str) -> None:
    assert busy._reason(answer) is None
