"""The build with and without a compiled core, and the loader that finds the core."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from opgraft import _core

ROOT = Path(__file__).resolve().parents[1]
# A module that imports, without torch's headers: what compiles it is under test, not what it does.
TINY_CORE = """
#include <Python.h>
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "core", nullptr, -1, nullptr};
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""
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
    assert "--no-build-isolation" in str(status)
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


@has_setuptools
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
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
