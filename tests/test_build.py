"""The builds with and without a compiled core, the loader that finds it, and `opgraft build`."""

from __future__ import annotations

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

from opgraft import _build, _cache, _core, cli

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
static PyMethodDef methods[] = {
    {"torch_version", version, METH_NOARGS, ""}, {"abi", abi, METH_NOARGS, ""}, {}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "core", nullptr, -1, methods};
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""
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
    assert _core.module_name(version) == name


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="not a torch version: 'unknown'"):
        _core.module_name("unknown")


def test_no_core_for_the_running_torch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="opgraft"):
        module, status = _core._find("1.99.0")
    assert module is None
    assert not status.built
    assert status.module == "opgraft._C_torch1_99"
    assert "`python -m opgraft build` compiles one" in str(status)
    assert len(caplog.records) == 1


class FakeCore:
    """Puts a module where a core is looked for, and remembers which were asked for."""

    def __init__(self, name: str, compiled_for: str, cxx11_abi: bool) -> None:
        self.name, self.compiled_for, self.cxx11_abi = name, compiled_for, cxx11_abi
        self.loaded = 0

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == self.name else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self.loaded += 1
        module.torch_version = lambda: self.compiled_for  # type: ignore[attr-defined]
        module.abi = lambda: {"cxx11_abi": self.cxx11_abi}  # type: ignore[attr-defined]


@pytest.fixture
def fake_core(monkeypatch: pytest.MonkeyPatch):
    def put(name: str, compiled_for: str, *, same_abi: bool = True) -> FakeCore:
        fake = FakeCore(name, compiled_for, torch.compiled_with_cxx11_abi() == same_abi)
        monkeypatch.setattr(sys, "meta_path", [fake, *sys.meta_path])
        return fake

    yield put
    for name in [name for name in sys.modules if name.startswith("opgraft._C_torch1_")]:
        del sys.modules[name]


def test_a_core_for_the_running_torch_loads(fake_core) -> None:
    fake_core("opgraft._C_torch1_99", "1.99.0")
    module, status = _core._find("1.99.0+cpu")
    assert module is sys.modules["opgraft._C_torch1_99"]
    assert status == _core.CoreStatus(True, "opgraft._C_torch1_99")
    assert str(status) == "compiled core: opgraft._C_torch1_99"


def test_a_core_for_another_torch_is_not_even_imported(fake_core) -> None:
    other = fake_core("opgraft._C_torch1_98", "1.98.0")
    assert _core._find("1.99.0")[0] is None
    assert other.loaded == 0


@pytest.mark.parametrize(
    ("compiled_for", "same_abi", "reason"),
    [
        ("1.98.0", True, "compiled for torch 1.98.0, and this is 1.99.0"),
        ("1.99.1", True, "compiled for torch 1.99.1, and this is 1.99.0"),
        ("1.99.0", False, "another C++ ABI"),
        ("", True, "importing it failed"),
    ],
)
def test_a_core_that_does_not_fit_is_refused(
    fake_core, caplog: pytest.LogCaptureFixture, compiled_for: str, same_abi: bool, reason: str
) -> None:
    fake = fake_core("opgraft._C_torch1_99", compiled_for, same_abi=same_abi)
    with caplog.at_level("WARNING", logger="opgraft"):
        module, status = _core._find("1.99.0+cpu")
    assert fake.loaded == 1
    assert module is None
    assert not status.built
    assert reason in status.reason
    assert reason in caplog.text


def test_the_core_of_this_environment_is_the_running_torchs() -> None:
    core, status = _core.load(), _core.status()
    if core is None:
        pytest.skip(str(status))
    assert core.torch_version() == torch.__version__.split("+")[0]
    assert core.abi()["cxx11_abi"] == torch.compiled_with_cxx11_abi()
    assert core.__name__ == status.module == _core.module_name(torch.__version__)
    assert _core.load() is core


# ------------------------------------------------------------------------- the cache of cores


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a core for torch 1.99.0 in a cache of this test's own."""
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    path = _cache.place("1.99.0")
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(b"no library")
    for each in (path, path.parent, tmp_path / "cache"):
        each.chmod(0o700)
    return path


def test_a_cached_core_is_for_one_torch_one_python_and_one_state_of_the_sources(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _cache.find("1.99.0") == (cached, "")
    assert _cache.find("1.99.0+cu130") == (None, "")
    assert _cache.find("1.99.1") == (None, "")
    assert sysconfig.get_config_var("SOABI") in cached.parent.name
    monkeypatch.setattr(_build, "sources", lambda: tmp_path)  # none of them
    assert _cache.find("1.99.0") == (None, "")


def test_the_digest_is_the_sources(tmp_path: Path) -> None:
    (tmp_path / "core.cpp").write_text("int a;")
    before = _build.digest(tmp_path)
    (tmp_path / "core.h").write_text("")
    assert _build.digest(tmp_path) != before
    (tmp_path / "core.h").unlink()
    assert _build.digest(tmp_path) == before


def test_without_a_cache_the_sources_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(_build, "sources", lambda: pytest.fail("looked"))
    assert _cache.find("1.99.0") == (None, "")


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
@pytest.mark.parametrize(
    "spoil", [lambda core: core, lambda core: core.parent, lambda core: core.parents[2]]
)
def test_a_core_that_others_could_have_written_is_not_loaded(
    cached: Path, mode: int, spoil: Callable[[Path], Path], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(cached).chmod(mode)
    path, reason = _cache.find("1.99.0")
    assert path is None
    assert f"others may write to {spoil(cached)}" in reason
    module, status = _core._find("1.99.0")
    assert module is None
    assert status.reason == reason
    assert reason in caplog.text


def test_a_sticky_folder_above_is_fine(cached: Path) -> None:
    cached.parents[2].chmod(0o1777)  # as /tmp is
    assert _cache.find("1.99.0") == (cached, "")


def test_a_core_of_another_user_is_not_loaded(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(cached, 12345, -1)
    else:
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    path, reason = _cache.find("1.99.0")
    assert path is None
    assert "belongs to user" in reason


def test_a_link_leads_to_what_is_checked(cached: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    cached.parent.rename(elsewhere)
    cached.parent.symlink_to(elsewhere)
    assert _cache.find("1.99.0") == (cached, "")
    elsewhere.chmod(0o777)
    path, reason = _cache.find("1.99.0")
    assert path is None
    assert f"others may write to {elsewhere}" in reason


def test_a_cached_core_goes_before_an_installed_one(
    cached: Path, fake_core, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = fake_core("opgraft._C_torch1_99", "1.99.0")
    built = ModuleType("opgraft._C_torch1_99")
    built.torch_version = lambda: "1.99.0"  # type: ignore[attr-defined]
    built.abi = lambda: {"cxx11_abi": torch.compiled_with_cxx11_abi()}  # type: ignore[attr-defined]
    files: list[Path] = []
    monkeypatch.setattr(_core, "_import_file", lambda name, path: files.append(path) or built)
    assert _core._find("1.99.0") == (built, _core.CoreStatus(True, "opgraft._C_torch1_99"))
    assert files == [cached]
    assert installed.loaded == 0
    cached.chmod(0o777)  # the installed one does where the other may not be loaded
    assert _core._find("1.99.0")[0] is sys.modules["opgraft._C_torch1_99"]
    assert installed.loaded == 1


def test_a_cached_core_that_is_broken_costs_the_core_only(cached: Path) -> None:
    module, status = _core._find("1.99.0")
    assert module is None
    assert "importing it failed (ImportError" in status.reason
    assert "opgraft._C_torch1_99" not in sys.modules


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
    with cli.build._lock(tmp_path / "core.lock"):
        assert free.is_set()
    thread.join()
    assert "waiting for another process" in capsys.readouterr().out


def test_a_core_that_is_there_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_core, "status", lambda: _core.CoreStatus(True, "opgraft._C_torch1_99"))
    assert cli.main(["build"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def no_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As where no core is there; returns the cache."""
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_core, "status", lambda: _core.CoreStatus(False, "none", "no reason"))
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
    with pytest.raises(_build.BuildError, match=r"no Python\.h .* apt install python3-dev"):
        _build.compile_core(TORCH_HEADERS, tmp_path / "c.so", folder=tmp_path, objects=tmp_path)


def test_building_into_a_folder_of_others_is_refused(
    no_core: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_core.mkdir()
    no_core.chmod(0o777)
    assert cli.main(["build"]) == 1
    assert f"others may write to {no_core}" in capsys.readouterr().err
    assert list(no_core.iterdir()) == []


def test_headers_say_which_torch_they_are_of(tmp_path: Path) -> None:
    assert _build.headers_release(TORCH_HEADERS) == torch.__version__.split("+")[0]
    with pytest.raises(_build.BuildError, match=r"holds no headers of torch 2\.11 or newer"):
        _build.headers_release(tmp_path)


@pytest.mark.slow
@has_compiler
def test_what_is_built_is_loaded_from_then_on(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "core.cpp").write_text(TINY_CORE)
    program = """
        import os, sys, torch
        from pathlib import Path
        from opgraft import _build, _cache, _core, cli

        _build.sources = lambda: Path(sys.argv[1])
        os.umask(0o002)
        assert cli.main(["build", "--force"]) == 0
        path = _cache.place(torch.__version__)
        core, status = _core._find(torch.__version__)
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
    module = _core.module_name(torch.__version__).replace(".", "/")
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
        header = tmp_path / str(minor) / "torch" / "headeronly" / "version.h"
        header.parent.mkdir(parents=True)
        parts = {"MAJOR": 1, "MINOR": minor, "PATCH": 0}
        header.write_text("".join(f"#define TORCH_VERSION_{k} {v}\n" for k, v in parts.items()))
        folders.append(str(tmp_path / str(minor)))
    build = build_wheel(tree, OPGRAFT_TORCH_HEADERS=os.pathsep.join(folders))
    assert build.returncode == 0, build.output
    assert [core.partition(".")[0] for core in sorted(build.cores())] == [
        "opgraft/_C_torch1_98",
        "opgraft/_C_torch1_99",
    ]
    twice = build_wheel(tree, OPGRAFT_TORCH_HEADERS=os.pathsep.join(folders[:1] * 2))
    assert twice.returncode != 0
    assert "one core for each minor version of torch" in twice.output
