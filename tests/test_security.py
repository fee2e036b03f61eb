"""Nothing runs that another user could have written, and nothing that is read back is code.

Cores that others could have written are in test_build.py.
"""

from __future__ import annotations

import ast
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import opgraft
from opgraft import RegistrationError
from opgraft.cli import doctor
from opgraft.core import store
from opgraft.router import saved_calls
from tests import ops

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for folder in ("python/opgraft", "kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not {"build", "tests"} & set(path.parts)
]
#: What makes code, or objects with code of their own, of data.
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "execfile", "compile", "__import__"}
METHODS = {
    ("torch", "load"),
    ("torch", "save"),
    ("torch.jit", "load"),
    ("yaml", "load"),
    ("numpy", "load"),
    ("np", "load"),
    ("os", "system"),
    ("os", "popen"),
}


def dangerous(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in MODULES:
                yield node.module or ""
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in CALLS:
                yield called.id
            elif isinstance(called, ast.Attribute):
                pair = (ast.unparse(called.value), called.attr)
                if pair in METHODS:
                    yield ".".join(pair)
            if any(k.arg == "shell" and not _is_false(k.value) for k in node.keywords):
                yield "shell="


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def test_no_source_makes_code_of_data() -> None:
    assert len(SOURCES) > 60
    found = {
        f"{path.relative_to(ROOT)}: {what}"
        for path in SOURCES
        for what in dangerous(ast.parse(path.read_text()))
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from dill import loads", "eval(x)", "torch.load(f)"),
        "subprocess.run(x, shell=True)",
    ],
)
def test_what_would_be_found(source: str) -> None:
    assert list(dangerous(ast.parse(source)))


# ------------------------------------------------------------------ saved calls


def saved_softmax(folder: Path) -> Path:
    """The file of a call that shadow mode has found and saved."""
    override = opgraft.register_op_override(
        *("aten", "_softmax", "CPU"),
        lambda *args: ops.softmax(*args) * 1.5,
        unconditional_override=True,
    )
    with opgraft.shadow(rate=1.0, save=folder):
        torch.softmax(torch.randn(2, 4), -1)
    assert override.mismatches == 1
    (file,) = folder.glob("*.json")
    return file


def test_saved_calls_are_json_and_bytes_that_no_one_else_can_read(tmp_path: Path) -> None:
    file = saved_softmax(tmp_path / "calls")
    assert json.loads(file.read_text())["op"] == "aten::_softmax"
    assert sorted(each.suffix for each in file.parent.iterdir()) == [".bin", ".json"]
    assert file.with_suffix(".0.bin").stat().st_size == 2 * 4 * 4
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in file.parent.iterdir()} == {0o600}


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_calls_are_not_saved_where_others_can_write(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(RegistrationError, match=r"can be written to by others \(chmod go-w"):
        saved_softmax(folder)
    assert list(folder.iterdir()) == []
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    folder.chmod(0o755)
    saved_softmax(folder)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can chown")
def test_calls_are_not_saved_in_a_folder_of_another_user(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    folder.mkdir()
    os.chown(folder, 12345, -1)
    with pytest.raises(RegistrationError, match="belongs to user 12345"):
        saved_softmax(folder)


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    """Nor does a link, in a folder that others can write to, lead anywhere."""
    file = saved_softmax(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    facts = json.loads(file.read_text())
    call = saved_calls.load(file)
    for number in range(1, 3):
        link = file.with_name(file.name.replace("-0.json", f"-{number}.0.bin"))
        link.symlink_to(victim)
    with pytest.raises(FileExistsError):
        saved_calls.save(tmp_path, facts, call)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["torch.hub.load", "torch.load", "torch.classes", "torch.nn"])
@pytest.mark.parametrize("place", ["an argument", "a dtype"])
def test_a_saved_call_that_was_tampered_with_reaches_no_function(
    name: str, place: str, tmp_path: Path
) -> None:
    file = saved_softmax(tmp_path)
    facts = json.loads(file.read_text())
    if place == "a dtype":
        facts["arguments"]["self"]["dtype"] = name.removeprefix("torch.")
    else:
        facts["arguments"]["dim"] = name
    file.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="is no dtype, layout or memory format"):
        saved_calls.load(file)


# ------------------------------------------------------------------ caches


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o757])
def test_a_cache_that_others_can_write_to_is_distrusted(mode: int, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / "kernel.so").touch()
    tmp_path.chmod(0o700)
    trusted = store.why_untrusted(cache / "kernel.so")
    cache.chmod(mode)
    assert "others may write to" in store.why_untrusted(cache / "kernel.so") and trusted == ""


def test_doctor_says_that_others_can_write_to_the_cache_of_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "inductor"
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    (check,) = [each for each in doctor._caches() if str(cache) in each.text]
    assert check.level == "problem" and "others could have written it" in check.text
    cache.chmod(0o700)
    (check,) = [each for each in doctor._caches() if str(cache) in each.text]
    assert check.level == "ok"


def test_nothing_is_read_from_the_folder_that_a_program_runs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No configuration file, no plugin: entry points and environment variables are all there is."""
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    inside = False

    def audit(event: str, args: tuple[object, ...]) -> None:
        if inside and event in ("open", "os.listdir", "os.scandir") and args:
            opened.append(str(args[0]))

    import sys

    sys.addaudithook(audit)
    inside = True
    override = opgraft.register_op_override(
        "aten", "_softmax", "CPU", ops.softmax, unconditional_override=True
    )
    torch.softmax(torch.randn(2, 4), -1)
    with opgraft.disabled(), opgraft.shadow(rate=1.0):
        torch.softmax(torch.randn(2, 4), -1)
    inside = False
    assert override.hits == 1
    assert not [each for each in opened if not Path(each).is_absolute()]
    assert not [each for each in opened if each.startswith(str(tmp_path))]
