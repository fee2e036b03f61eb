"""The builds with and without a compiled core, the loader that finds it, and `opgraft build`."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import filelock
import pytest
import torch

from opgraft import cli
from opgraft.base import locks
from opgraft.cli import build as build_command
from opgraft.core import building, loader, store

ROOT = Path(__file__).resolve().parents[1]
# What a core tells the loader, without the rest: how it is compiled is under test.
TINY_CORE = """
#include <Python.h>
#include <torch/headeronly/version.h>
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
static PyObject* version(PyObject*, PyObject*) {
  return PyUnicode_FromFormat("%d.%d.%d", TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR,
                              TORCH_VERSION_PATCH);
}
static PyObject* abi(PyObject*, PyObject*) { return Py_BuildValue("{s:O}", "cxx11_abi", Py_True); }
static PyObject* build(PyObject*, PyObject*) {
  return Py_BuildValue("(ss)", OPGRAFT_TORCH_VERSION, OPGRAFT_TORCH_COMMIT);
}
static PyMethodDef methods[] = {{"torch_version", version, METH_NOARGS, ""},
                                {"torch_build", build, METH_NOARGS, ""},
                                {"abi", abi, METH_NOARGS, ""},
                                {}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "core", nullptr, -1, methods};
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""
COMMIT = f"(commit {str(torch.version.git_version)[:12]})"
TORCH_HEADERS = Path(torch.__file__).parent / "include"
has_compiler = pytest.mark.skipif(
    shutil.which("c++") is None or not sys.platform.startswith("linux"),
    reason="needs a C++ compiler, and Linux",
)
has_setuptools = pytest.mark.skipif(
    int(metadata.version("setuptools").split(".")[0]) < 77, reason="builds need setuptools 77"
)


# ---------------------------------------------------------------------------------- the loader


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.11.0+cu130", "opgraft._C_torch2_11"),
        ("2.13.1", "opgraft._C_torch2_13"),
        ("2.15.0a0+gitcf30153", "opgraft._C_torch2_15"),
        ("2.16.0.dev20261101+cpu", "opgraft._C_torch2_16"),
    ],
)
def test_the_modules_name_carries_torchs_major_and_minor(version: str, name: str) -> None:
    assert loader.module_name(version) == name


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="not a torch version: 'unknown'"):
        loader.module_name("unknown")


def test_no_core_for_the_running_torch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="opgraft"):
        module, status = loader._find("1.99.0")
    assert module is None
    assert not status.built
    assert status.module == "opgraft._C_torch1_99"
    assert "`python -m opgraft build` compiles one" in str(status)
    assert len(caplog.records) == 1


class FakeCore:
    """Puts a module where a core is looked for, and remembers which were asked for."""

    def __init__(self, name: str, compiled_for: str, cxx11_abi: bool, commit: str) -> None:
        self.name, self.compiled_for, self.cxx11_abi = name, compiled_for, cxx11_abi
        self.commit = commit
        self.loaded = 0

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == self.name else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self.loaded += 1
        build = (self.compiled_for, self.commit) if self.compiled_for else None
        module.torch_build = lambda: build  # type: ignore[attr-defined]
        module.abi = lambda: {"cxx11_abi": self.cxx11_abi}  # type: ignore[attr-defined]


@pytest.fixture
def fake_core(monkeypatch: pytest.MonkeyPatch):
    def put(
        name: str,
        compiled_for: str,
        *,
        same_abi: bool = True,
        commit: str = str(torch.version.git_version),
    ) -> FakeCore:
        fake = FakeCore(name, compiled_for, torch.compiled_with_cxx11_abi() == same_abi, commit)
        monkeypatch.setattr(sys, "meta_path", [fake, *sys.meta_path])
        return fake

    yield put
    for name in [name for name in sys.modules if name.startswith("opgraft._C_torch1_")]:
        del sys.modules[name]


def test_a_core_for_the_running_torch_loads(fake_core) -> None:
    fake_core("opgraft._C_torch1_99", "1.99.0")
    module, status = loader._find("1.99.0+cpu")
    assert module is sys.modules["opgraft._C_torch1_99"]
    assert status == loader.CoreStatus(True, "opgraft._C_torch1_99")
    assert str(status) == "compiled core: opgraft._C_torch1_99"


def test_a_core_for_another_torch_is_not_even_imported(fake_core) -> None:
    other = fake_core("opgraft._C_torch1_98", "1.98.0")
    assert loader._find("1.99.0")[0] is None
    assert other.loaded == 0


@pytest.mark.parametrize(
    ("compiled_for", "same_abi", "reason"),
    [
        ("1.98.0", True, f"compiled for torch 1.98.0 {COMMIT}, and this is 1.99.0"),
        ("1.99.1", True, f"compiled for torch 1.99.1 {COMMIT}, and this is 1.99.0"),
        ("1.99.0", False, "another C++ ABI"),
        ("", True, "importing it failed"),
    ],
)
def test_a_core_that_does_not_fit_is_refused(
    fake_core, caplog: pytest.LogCaptureFixture, compiled_for: str, same_abi: bool, reason: str
) -> None:
    fake = fake_core("opgraft._C_torch1_99", compiled_for, same_abi=same_abi)
    with caplog.at_level("WARNING", logger="opgraft"):
        module, status = loader._find("1.99.0+cpu")
    assert fake.loaded == 1
    assert module is None
    assert not status.built
    assert reason in status.reason
    assert reason in caplog.text


RUNNING = ("1.99.0+cpu", "c0ffee")
NO_RELEASE = [
    *("1.99.0a0+c0ffee", "1.99.0a0+c0ffee.nv26.1", "1.99.0.dev20261101+cpu", "1.99.0rc1+cpu"),
    *("1.99.0+gitc0ffee", "1.99.0+mine", "1.99.0.post1"),
]


@pytest.mark.parametrize("version", ["1.99.0", "1.99.0+cpu", "1.99.0+cu130", "1.99.0+rocm7.1"])
def test_a_release_is_one_source_whatever_it_was_built_for(fake_core, version: str) -> None:
    fake_core("opgraft._C_torch1_99", version, commit="c0ffee")
    assert loader._find(*RUNNING)[1].built


@pytest.mark.parametrize(
    ("version", "commit"),
    [("1.99.0+cpu", "badcafe"), *((version, "c0ffee") for version in NO_RELEASE)],
)
@pytest.mark.parametrize("runs", [True, False])
def test_a_core_for_another_source_of_the_same_patch_release_is_refused(
    fake_core, version: str, commit: str, runs: bool
) -> None:
    running, compiled_for = ((version, commit), RUNNING) if runs else (RUNNING, (version, commit))
    fake_core("opgraft._C_torch1_99", compiled_for[0], commit=compiled_for[1])
    module, status = loader._find(*running)
    assert module is None
    assert f"compiled for torch {compiled_for[0]} (commit {compiled_for[1]})" in status.reason
    assert f"and this is {running[0]} (commit {running[1]})" in status.reason
    assert "`python -m opgraft build` compiles one for this torch" in status.reason


@pytest.mark.parametrize("version", NO_RELEASE)
@pytest.mark.parametrize("commit", ["c0ffee", "Unknown"])
def test_a_core_that_was_built_on_such_a_torch_fits_it(
    fake_core, version: str, commit: str
) -> None:
    fake_core("opgraft._C_torch1_99", version, commit=commit)
    assert loader._find(version, commit)[1].built


def test_the_headers_torch_says_which_it_is(tmp_path: Path) -> None:
    build = building.headers_build(TORCH_HEADERS)
    assert build == (torch.__version__, torch.version.git_version)
    header = tmp_path / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    parts = {"MAJOR": 1, "MINOR": 99, "PATCH": 0}
    header.write_text("".join(f"#define TORCH_VERSION_{k} {v}\n" for k, v in parts.items()))
    with pytest.raises(building.BuildError, match=r"cannot be told from .*version\.py"):
        building.headers_build(tmp_path / "include")
    version = tmp_path / "version.py"
    version.write_text("__version__ = '1.99.0a0+abc'\ngit_version = 'abcdef'\n")
    assert building.headers_build(tmp_path / "include") == ("1.99.0a0+abc", "abcdef")
    version.write_text("__version__ = '1.99.1'\ngit_version = 'abcdef'\n")
    with pytest.raises(building.BuildError, match=r"is of torch 1\.99\.1"):
        building.headers_build(tmp_path / "include")


def test_the_core_of_this_environment_is_the_running_torchs() -> None:
    core, status = loader.load(), loader.status()
    if core is None:
        pytest.skip(str(status))
    assert core.torch_version() == torch.__version__.split("+")[0]
    assert core.torch_build() == (torch.__version__, torch.version.git_version)
    assert core.abi()["cxx11_abi"] == torch.compiled_with_cxx11_abi()
    assert core.__name__ == status.module == loader.module_name(torch.__version__)
    assert loader.load() is core


# ------------------------------------------------------------------------- the cache of cores


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a core for torch 1.99.0 in a cache of this test's own."""
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    path = store.core_path("1.99.0")
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(b"no library")
    for each in (path, path.parent, tmp_path / "cache"):
        each.chmod(0o700)
    return path


def test_a_cached_core_is_for_one_torch_one_python_and_one_state_of_the_sources(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.find("1.99.0") == (cached, "")
    assert store.find("1.99.0+cu130") == (None, "")
    assert store.find("1.99.1") == (None, "")
    assert sysconfig.get_config_var("SOABI") in cached.parent.name
    monkeypatch.setattr(building, "sources", lambda: tmp_path)  # none of them
    assert store.find("1.99.0") == (None, "")


def test_the_digest_is_the_sources(tmp_path: Path) -> None:
    (tmp_path / "core.cpp").write_text("int a;")
    before = building.digest(tmp_path)
    (tmp_path / "core.h").write_text("")
    assert building.digest(tmp_path) != before
    (tmp_path / "core.h").unlink()
    assert building.digest(tmp_path) == before


def test_without_a_cache_the_sources_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(building, "sources", lambda: pytest.fail("looked"))
    assert store.find("1.99.0") == (None, "")


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
@pytest.mark.parametrize(
    "spoil", [lambda core: core, lambda core: core.parent, lambda core: core.parents[2]]
)
def test_a_core_that_others_could_have_written_is_not_loaded(
    cached: Path, mode: int, spoil: Callable[[Path], Path], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(cached).chmod(mode)
    path, reason = store.find("1.99.0")
    assert path is None
    assert f"others may write to {spoil(cached)}" in reason
    module, status = loader._find("1.99.0")
    assert module is None
    assert status.reason == reason
    assert reason in caplog.text


def test_a_sticky_folder_above_is_fine(cached: Path) -> None:
    cached.parents[2].chmod(0o1777)  # as /tmp is
    assert store.find("1.99.0") == (cached, "")


def test_a_core_of_another_user_is_not_loaded(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(cached, 12345, -1)
    else:
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    path, reason = store.find("1.99.0")
    assert path is None
    assert "belongs to user" in reason


def test_a_link_leads_to_what_is_checked(cached: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    cached.parent.rename(elsewhere)
    cached.parent.symlink_to(elsewhere)
    assert store.find("1.99.0") == (cached, "")
    elsewhere.chmod(0o777)
    path, reason = store.find("1.99.0")
    assert path is None
    assert f"others may write to {elsewhere}" in reason


def test_a_cached_core_goes_before_an_installed_one(
    cached: Path, fake_core, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = fake_core("opgraft._C_torch1_99", "1.99.0")
    built = ModuleType("opgraft._C_torch1_99")
    built.torch_build = lambda: ("1.99.0", str(torch.version.git_version))  # type: ignore[attr-defined]
    built.abi = lambda: {"cxx11_abi": torch.compiled_with_cxx11_abi()}  # type: ignore[attr-defined]
    files: list[Path] = []
    monkeypatch.setattr(loader, "_import_file", lambda name, path: files.append(path) or built)
    assert loader._find("1.99.0") == (built, loader.CoreStatus(True, "opgraft._C_torch1_99"))
    assert files == [cached]
    assert installed.loaded == 0
    cached.chmod(0o777)  # the installed one does where the other may not be loaded
    assert loader._find("1.99.0")[0] is sys.modules["opgraft._C_torch1_99"]
    assert installed.loaded == 1


def test_a_cached_core_that_is_broken_costs_the_core_only(cached: Path) -> None:
    module, status = loader._find("1.99.0")
    assert module is None
    assert "importing it failed (ImportError" in status.reason
    assert "opgraft._C_torch1_99" not in sys.modules


def test_what_is_swapped_after_it_was_checked_is_not_loaded(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a link in a folder of others', between the look at the file and its load."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    cached.parent.rename(ours)
    theirs.mkdir()
    (theirs / cached.name).write_bytes(b"evil")
    cached.parent.symlink_to(ours)
    loaded: list[bytes] = []

    def swap() -> None:
        cached.parent.unlink()
        cached.parent.symlink_to(theirs)

    def load(self: object, spec: ModuleSpec) -> ModuleType:
        swap()
        assert spec.origin is not None
        loaded.append(Path(spec.origin).read_bytes())
        return ModuleType(spec.name)

    assert store.find("1.99.0") == (cached, "")
    python_loader = importlib.machinery.ExtensionFileLoader
    monkeypatch.setattr(python_loader, "create_module", load)
    monkeypatch.setattr(python_loader, "exec_module", lambda self, module: None)
    module = loader._import_file("opgraft._C_torch1_99", cached)
    del sys.modules["opgraft._C_torch1_99"]
    assert loaded == [b"no library"]
    assert module.__file__ == str(cached)


def test_what_is_swapped_before_it_is_opened_is_checked_again(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = store.find

    def then_swap(version: str) -> tuple[Path | None, str]:
        found = find(version)
        theirs = tmp_path / "theirs"
        cached.parent.rename(theirs)
        cached.parent.symlink_to(theirs)
        theirs.chmod(0o777)
        return found

    monkeypatch.setattr(store, "find", then_swap)
    module, status = loader._find("1.99.0")
    assert module is None
    assert f"others may write to {tmp_path / 'theirs'}" in status.reason


def test_what_is_replaced_while_it_is_looked_at_is_distrusted(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readlink = os.readlink

    def then_replace(path: str) -> str:
        real = readlink(path)
        other = cached.with_name("other")
        other.write_bytes(b"evil")
        other.replace(cached)
        return real

    monkeypatch.setattr(os, "readlink", then_replace)
    assert "was replaced while it was looked at" in store.why_untrusted(cached)


# ------------------------------------------------------------------------------- opgraft build


def test_a_build_waits_for_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held, free = threading.Event(), threading.Event()

    def other() -> None:
        with filelock.FileLock(tmp_path / "core.lock"):
            held.set()
            free.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    held.wait(10)
    threading.Timer(0.2, free.set).start()
    with locks.file_lock(tmp_path / "core.lock", build_command._say_that_it_waits):
        assert free.is_set()
    thread.join()
    assert "waiting for another process" in capsys.readouterr().out


def test_a_core_that_is_there_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "status", lambda: loader.CoreStatus(True, "opgraft._C_torch1_99"))
    assert cli.main(["build"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def no_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As where no core is there; returns the cache."""
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "status", lambda: loader.CoreStatus(False, "none", "no reason"))
    return tmp_path / "cache"


def test_building_without_a_compiler_says_what_to_install(
    no_core: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "ccache /nonexistent/c++")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert cli.main(["build"]) == 1
    message = capsys.readouterr().err
    assert "no C++ compiler ('ccache' not found); install one" in message
    assert "apt install g++" in message
    assert no_core.stat().st_mode & 0o777 == 0o700
    assert [path for path in no_core.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="says so on others")
def test_building_without_pythons_headers_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # anything that is there
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(building.BuildError, match=r"no Python\.h .* apt install python3-dev"):
        building.compile_core(TORCH_HEADERS, tmp_path / "c.so", folder=tmp_path, objects=tmp_path)


def test_building_into_a_folder_of_others_is_refused(
    no_core: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_core.mkdir()
    no_core.chmod(0o777)
    assert cli.main(["build"]) == 1
    assert f"others may write to {no_core}" in capsys.readouterr().err
    assert list(no_core.iterdir()) == []


def test_headers_say_which_torch_they_are_of(tmp_path: Path) -> None:
    assert building.headers_release(TORCH_HEADERS) == torch.__version__.split("+")[0]
    with pytest.raises(building.BuildError, match=r"holds no headers of torch 2\.11 or newer"):
        building.headers_release(tmp_path)


@pytest.mark.slow
@has_compiler
def test_what_is_built_is_loaded_from_then_on(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "core.cpp").write_text(TINY_CORE)
    program = """
        import os, sys, torch
        from pathlib import Path
        from opgraft.core import building, loader, store
        from opgraft import cli

        building.sources = lambda: Path(sys.argv[1])
        os.umask(0o002)
        assert cli.main(["build", "--force"]) == 0
        path = store.core_path(torch.__version__)
        core, status = loader._find(torch.__version__)
        assert status.built and core.__file__ == str(path), status
        assert {p.stat().st_mode & 0o077 for p in (path, path.parent, path.parents[1])} == {0}
        first = path.stat().st_ino
        assert cli.main(["build", "--force"]) == 0 and path.stat().st_ino != first
        (Path(sys.argv[1]) / "core.cpp").write_text("#error this does not compile")
        assert cli.main(["build", "--force"]) == 1 and path.exists()
        left = {p for p in path.parents[1].iterdir() if p.suffix != ".lock"}
        assert left == {path.parent}, left
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "csrc")],
        env=os.environ
        | {"OPGRAFT_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiling the core for torch" in done.stdout
    assert "this does not compile" in done.stderr


# ----------------------------------------------------------------------------------- the build


@dataclass(frozen=True)
class Build:
    returncode: int
    output: str
    wheel: Path | None

    def skipped(self) -> list[str]:
        return [line for line in self.output.splitlines() if "without the compiled core" in line]

    def cores(self) -> list[str]:
        assert self.wheel is not None, self.output
        return [name for name in zipfile.ZipFile(self.wheel).namelist() if "_C_torch" in name]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the distribution is built from, with a core that compiles in a second."""
    copy = tmp_path / "opgraft"
    shutil.copytree(
        ROOT / "python",
        copy / "python",
        ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"),
    )
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    (copy / "csrc").mkdir()
    (copy / "csrc" / "core.cpp").write_text(TINY_CORE)
    return copy


def build_wheel(tree: Path, **environment: str) -> Build:
    """What `pip wheel --no-build-isolation` does, through the same hook."""
    out = tree.parent / "wheels"
    shutil.rmtree(out, ignore_errors=True)
    inherited = {name: value for name, value in os.environ.items() if name != "OPGRAFT_BUILD_CORE"}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})",
        ],
        cwd=tree,
        env=inherited | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Build(done.returncode, done.stdout, next(out.glob("*.whl"), None))


@has_setuptools
def test_without_a_compiler_the_wheel_is_pure_and_the_build_says_so(tree: Path) -> None:
    build = build_wheel(tree, CXX="/nonexistent/c++")
    assert build.returncode == 0, build.output
    assert build.wheel is not None
    assert build.wheel.name.endswith("-py3-none-any.whl")
    assert build.cores() == []
    (line,) = build.skipped()
    assert "no C++ compiler ('/nonexistent/c++' not found)" in line
    assert "pip install --no-build-isolation" in line


@has_setuptools
def test_without_torch_the_wheel_is_pure_and_the_build_says_so(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "torch.py").write_text("raise ModuleNotFoundError('there is no torch')")
    build = build_wheel(tree, PYTHONPATH=str(tmp_path / "blocked"))
    assert build.returncode == 0, build.output
    assert build.wheel is not None
    assert build.wheel.name.endswith("-py3-none-any.whl")
    assert build.cores() == []
    (line,) = build.skipped()
    assert "torch is not importable in this build (there is no torch)" in line
    assert "pip install --no-build-isolation" in line


@has_setuptools
def test_a_core_that_was_asked_for_is_built_or_the_build_fails(tree: Path) -> None:
    build = build_wheel(tree, CXX="/nonexistent/c++", OPGRAFT_BUILD_CORE="1")
    assert build.returncode != 0
    assert build.wheel is None
    assert "the compiled core cannot be built: no C++ compiler" in build.output


@has_setuptools
def test_a_core_that_is_not_wanted_is_not_tried(tree: Path) -> None:
    build = build_wheel(tree, OPGRAFT_BUILD_CORE="0")
    assert build.returncode == 0, build.output
    assert build.cores() == []
    assert len(build.skipped()) == 1
    assert build.wheel is not None
    assert "opgraft/csrc/core.cpp" in zipfile.ZipFile(build.wheel).namelist()


@has_setuptools
@pytest.mark.slow
@has_compiler
def test_the_wheel_is_the_platforms_while_it_holds_a_core(tree: Path) -> None:
    build = build_wheel(tree)
    assert build.returncode == 0, build.output
    (core,) = build.cores()
    module = loader.module_name(torch.__version__).replace(".", "/")
    assert core.startswith(f"{module}.")
    assert build.wheel is not None
    assert f"-cp{sys.version_info.major}{sys.version_info.minor}-" in build.wheel.name
    assert build.skipped() == []

    # A compile that fails leaves a pure wheel, without the core of the build before.
    (tree / "csrc" / "core.cpp").write_text("#error this does not compile\n")
    build = build_wheel(tree)
    assert build.returncode == 0, build.output
    assert build.wheel is not None
    assert build.wheel.name.endswith("-py3-none-any.whl")
    assert build.cores() == []
    (line,) = build.skipped()
    assert "compiling it failed" in line

    build = build_wheel(tree, OPGRAFT_BUILD_CORE="1")
    assert build.returncode != 0
    assert build.wheel is None


@has_setuptools
@pytest.mark.slow
@has_compiler
def test_a_wheel_with_a_core_for_each_torch_whose_headers_are_given(
    tree: Path, tmp_path: Path
) -> None:
    folders = []
    for minor in (98, 99):
        include = tmp_path / str(minor) / "include"
        header = include / "torch" / "headeronly" / "version.h"
        header.parent.mkdir(parents=True)
        parts = {"MAJOR": 1, "MINOR": minor, "PATCH": 0}
        header.write_text("".join(f"#define TORCH_VERSION_{k} {v}\n" for k, v in parts.items()))
        (include.parent / "version.py").write_text(f"__version__ = '1.{minor}.0'\n")
        folders.append(str(include))
    build = build_wheel(tree, OPGRAFT_TORCH_HEADERS=os.pathsep.join(folders))
    assert build.returncode == 0, build.output
    assert [core.partition(".")[0] for core in sorted(build.cores())] == [
        "opgraft/_C_torch1_98",
        "opgraft/_C_torch1_99",
    ]
    twice = build_wheel(tree, OPGRAFT_TORCH_HEADERS=os.pathsep.join(folders[:1] * 2))
    assert twice.returncode != 0
    assert "one core for each minor version of torch" in twice.output


# ---------------------------------------------------------- what is compiled, and in which units


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of a core that compile in no time, and a compiler that lists its runs."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "common.h").write_text("#pragma once\nint sum();\n")
    for name in ("a", "b", "c"):
        text = (
            f'#include "common.h"\nnamespace {{ int own = 1; }}\nint {name}() {{ return own; }}\n'
        )
        (folder / f"{name}.cpp").write_text(text.replace("own", f"own_{name}"))
    (folder / "core.cpp").write_text('#include "common.h"\nint sum() { return 1; }\n')
    compiler = tmp_path / "compiler"
    log = tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MAX_JOBS", "2")
    monkeypatch.delenv("CXXFLAGS", raising=False)
    return folder


def compile_project(folder: Path) -> list[list[str]]:
    """The sources that each run of the compiler read."""
    log = folder.parent / "log"
    log.unlink(missing_ok=True)
    objects = folder.parent / "objects"
    building.compile_core(
        TORCH_HEADERS, folder.parent / "_C_test.so", folder=folder, objects=objects
    )
    runs = [line.split() for line in log.read_text().splitlines() if " -c " in line]
    results = [Path(words[words.index("-o") + 1]) for words in runs]
    return sorted(result.stem.split("+") for result in results)


def touch(path: Path) -> None:
    path.write_text(path.read_text() + "\n")


@has_compiler
def test_sources_are_compiled_together_and_one_that_is_edited_alone(project: Path) -> None:
    first = compile_project(project)
    assert len(first) == 2  # one for each process
    assert sorted(name for unit in first for name in unit) == ["a", "b", "c", "core"]
    assert compile_project(project) == []
    touch(project / "a.cpp")
    (others,) = [[name for name in unit if name != "a"] for unit in first if "a" in unit]
    assert compile_project(project) == sorted([["a"], others])
    touch(project / "a.cpp")
    assert compile_project(project) == [["a"]]
    touch(project / "common.h")
    again = compile_project(project)
    assert len(again) == 2
    assert sorted(name for unit in again for name in unit) == ["a", "b", "c", "core"]


@pytest.mark.parametrize("jobs", [2, 4])
def test_what_takes_longest_is_compiled_at_the_same_time(
    jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", str(jobs))
    units = building._units(sorted((ROOT / "csrc").glob("*.cpp")))
    slow = [{each.stem for each in unit} & building._SLOW_SOURCES.keys() for unit in units]
    assert len(units) == jobs
    assert sorted(map(len, slow), reverse=True)[:3] == [1, 1, 0][:jobs]
    assert set().union(*slow) == building._SLOW_SOURCES.keys()  # they have their names still


@pytest.mark.parametrize("jobs", [1, 2, 16])
def test_what_every_call_runs_is_compiled_as_one(
    jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", str(jobs))
    units = building._units(sorted((ROOT / "csrc").glob("*.cpp")))
    assert any({each.stem for each in unit} >= building._RUN_BY_EVERY_CALL for unit in units)


@has_compiler
def test_a_source_that_comes_or_goes_is_noticed(project: Path) -> None:
    compile_project(project)
    (project / "d.cpp").write_text("int d() { return 2; }\n")
    assert compile_project(project) == [["d"]]
    (project / "d.cpp").unlink()
    assert compile_project(project) == []  # and it is not linked any more
    symbols = subprocess.run(
        ["nm", "-C", project.parent / "_C_test.so"], capture_output=True, text=True, check=True
    )
    assert " a()" in symbols.stdout
    assert " d()" not in symbols.stdout


@has_compiler
def test_sources_that_do_not_go_together_are_compiled_alone(project: Path) -> None:
    for name in ("a", "b", "c", "core"):
        path = project / f"{name}.cpp"
        path.write_text(path.read_text() + "namespace { int the_same = 0; }\n")
    runs = compile_project(project)
    assert [unit for unit in runs if len(unit) == 1] == [["a"], ["b"], ["c"], ["core"]]
    assert compile_project(project) == []


@has_compiler
def test_a_source_that_is_edited_while_it_is_compiled_is_compiled_again(project: Path) -> None:
    compiler = project.parent / "compiler"
    compiler.write_text(
        compiler.read_text().replace("exec c++", f'touch "{project}/a.cpp"; exec c++')
    )
    compile_project(project)
    assert any("a" in unit for unit in compile_project(project))


@has_compiler
def test_the_compilers_warnings_are_shown_to_who_works_on_it(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    touched = project / "core.cpp"
    touched.write_text(touched.read_text() + "static int unused() { return 0; }\n")
    compile_project(project)
    out, err = capfd.readouterr()
    assert err == ""
    assert "compiled 4 of 4 files" in out
    assert "core.cpp" in out
    touch(touched)
    building.compile_core(
        TORCH_HEADERS,
        project.parent / "_C_test.so",
        folder=project,
        objects=project.parent / "objects",
        warnings=True,
    )
    assert "unused" in capfd.readouterr().err


@has_compiler
def test_what_the_compiler_says_is_shown_where_it_fails(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "b.cpp").write_text("#error this does not compile\n")
    with pytest.raises(building.BuildError, match=r"ended with 1"):
        compile_project(project)
    assert capfd.readouterr().err.count("error: #error this does not compile") == 1
    assert not (project.parent / "_C_test.so").exists()


@pytest.mark.longest
@pytest.mark.slow
@has_compiler
def test_the_sources_of_the_core_go_together(tmp_path: Path) -> None:
    """Whatever the number of processes, and so the units, is.

    All are one unit here, each name of theirs beside every other one, and in the order in which no
    build has them: a source that needs what another one includes comes before it. The other order
    is that of the core that tests run with, which has two units of it.
    """
    unit = tmp_path / "all.cpp"
    sources = sorted((path.name for path in (ROOT / "csrc").glob("*.cpp")), reverse=True)
    unit.write_text("".join(f'#include "{name}"\n' for name in sources))
    folders = [TORCH_HEADERS, TORCH_HEADERS / "torch/csrc/api/include"]
    folders.append(Path(sysconfig.get_path("include")))
    done = subprocess.run(
        [
            *building.find_compiler(),
            *("-std=c++20", "-fsyntax-only", "-w", f"-iquote{ROOT / 'csrc'}"),
            # In kilobytes: below this GCC does not look for memory that it could use again.
            *("--param", "ggc-min-heapsize=1500000"),
            *("-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C_test"),
            *('-DOPGRAFT_TORCH_VERSION="1.99.0"', '-DOPGRAFT_TORCH_COMMIT=""'),
            *(f"-isystem{each}" for each in folders),
            str(unit),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_packs_wheel_holds_its_package_alone(wheels: list[Path]) -> None:
    (pack,) = (wheel for wheel in wheels if wheel.name.startswith("opgraft_kernels-"))
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(pack).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"opgraft_kernels"}
