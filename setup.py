"""Builds opgraft. What a build may add to the Python sources is the compiled core, from csrc/.

The core is compiled against the torch that is importable here, and its module carries that torch's
version in its name. Where it cannot be built (no torch, as in an isolated build, or no working C++
compiler), the result is a pure-Python wheel and one line that says why.

`OPGRAFT_BUILD_CORE=1` makes that an error, `OPGRAFT_BUILD_CORE=0` does not try.
`OPGRAFT_TORCH_HEADERS=/one/include:/other/include` builds a core for each torch whose headers these
folders hold, in place of the one that is importable: tools/build_wheel.py makes release wheels so.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import setuptools
from setuptools import Extension, setup

if int(setuptools.__version__.split(".")[0]) < 77:
    # Without build isolation, pip does not look at what the build requires.
    raise SystemExit(
        f"opgraft: needs setuptools 77 or newer to build, and this is {setuptools.__version__}: "
        "pip install --upgrade setuptools"
    )

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
REQUEST = os.environ.get("OPGRAFT_BUILD_CORE", "").strip()
REQUIRED = REQUEST == "1"
# pip runs this file for the metadata too, where importing torch would be seconds for nothing.
BUILDS = bool(
    {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}
    & set(sys.argv[1:])
)


def skip(reason: str) -> None:
    """Go on without the core, and say so; end the build if the core was asked for."""
    if REQUIRED:
        raise SystemExit(f"opgraft: the compiled core cannot be built: {reason}")
    print(f"opgraft: building without the compiled core: {reason}", flush=True)


def compiles() -> ModuleType:
    """`opgraft.core.building`, without opgraft, which imports torch."""
    spec = importlib.util.spec_from_file_location(
        "building", ROOT / "python/opgraft/core/building.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = compiles()


def headers() -> list[Path]:
    """The folders of headers to compile cores against."""
    if given := os.environ.get("OPGRAFT_TORCH_HEADERS", ""):
        return [Path(folder).absolute() for folder in given.split(os.pathsep)]
    import torch

    return [Path(torch.__file__).parent / "include"]


class CoreExtension(Extension):
    """A core, by the headers of the torch that it is for."""

    def __init__(self, include: Path) -> None:
        self.include = include
        super().__init__(
            build.module_name(build.headers_release(include)),
            sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/*.cpp")),
            depends=sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/*.h")),
        )


def planned() -> list[Extension]:
    """The cores to compile; none, and a line that says why, where that is known to be in vain."""
    if REQUEST == "0":
        skip("OPGRAFT_BUILD_CORE=0")
        return []
    try:
        extensions = [CoreExtension(include) for include in headers()]
        build.find_compiler()
    except build.BuildError as error:
        skip(f"{error}; then pip install --no-build-isolation builds it")
        return []
    except (ImportError, OSError) as error:
        skip(
            f"torch is not importable in this build ({error}); where torch is installed, "
            "pip install --no-build-isolation builds it"
        )
        return []
    names = [extension.name for extension in extensions]
    if len(set(names)) < len(names):
        raise SystemExit(f"opgraft: one core for each minor version of torch, not {names}")
    return extensions


class BuildCore(build_ext):
    """A `build_ext` in which a failed compile leaves a pure-Python build."""

    def run(self) -> None:
        inplace = self.inplace  # setuptools does not restore it when the compile fails
        try:
            super().run()
        except Exception as error:
            if REQUIRED:
                raise
            self.inplace = inplace
            self.forget()
            skip(
                f"compiling it failed ({type(error).__name__}: {error}); the compiler's "
                "messages are above, and pip shows them with -v"
            )

    def build_extension(self, ext: CoreExtension) -> None:
        print(f"building {ext.name} against {ext.include}", flush=True)
        build.compile_core(
            ext.include,
            Path(self.get_ext_fullpath(ext.name)),
            folder=ROOT / "csrc",
            objects=Path(self.build_temp),
            warnings=self.verbose > 0,
        )

    def forget(self) -> None:
        """Leave neither the extensions nor what an earlier build of them made."""
        for extension in self.extensions:
            Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
        self.extensions = []
        self.distribution.ext_modules = []


class BuildPython(build_py):
    """Puts the core's sources into the package, for `opgraft build`; a clone has them beside it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copy = Path(self.build_lib) / "opgraft" / "csrc"
            shutil.rmtree(copy, ignore_errors=True)  # of an earlier build
            shutil.copytree(ROOT / "csrc", copy)


class CoreWheel(bdist_wheel):
    """A wheel whose tag says what was built, not what was planned before the compile."""

    @property
    def root_is_pure(self) -> bool:
        return not self.distribution.has_ext_modules()

    @root_is_pure.setter
    def root_is_pure(self, value: bool | None) -> None:
        """Ignored: setuptools decides before the build."""


setup(
    ext_modules=planned() if BUILDS else [],
    cmdclass={"bdist_wheel": CoreWheel, "build_ext": BuildCore, "build_py": BuildPython},
)
