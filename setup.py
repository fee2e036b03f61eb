"""Builds opgraft. What a build may add to the Python sources is the compiled core, from csrc/.

The core is compiled against the torch that is importable here, and its module carries that torch's
version in its name. Where it cannot be built (no torch, as in an isolated build, or no working C++
compiler), the result is a pure-Python wheel and one line that says why.

`OPGRAFT_BUILD_CORE=1` makes that an error, `OPGRAFT_BUILD_CORE=0` does not try.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup

if int(setuptools.__version__.split(".")[0]) < 77:
    # Without build isolation, pip does not look at what the build requires.
    raise SystemExit(
        f"opgraft: needs setuptools 77 or newer to build, and this is {setuptools.__version__}: "
        "pip install --upgrade setuptools"
    )

from setuptools.command.bdist_wheel import bdist_wheel

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


def obstacle() -> str | None:
    """Why the core cannot be compiled here, as far as that is known before trying."""
    if REQUEST == "0":
        return "OPGRAFT_BUILD_CORE=0"
    try:
        from torch.utils.cpp_extension import get_cxx_compiler
    except (ImportError, OSError) as error:
        return (
            f"torch is not importable in this build ({error}); where torch is installed, "
            "pip install --no-build-isolation builds it"
        )
    compiler = (shlex.split(get_cxx_compiler()) or [""])[0]  # CXX may be empty, or name a launcher
    if shutil.which(compiler) is None:
        return (
            f"no C++ compiler ({compiler!r} not found); install one or set CXX, then "
            "pip install --no-build-isolation builds it"
        )
    return None


def core_extension() -> Extension:
    import torch
    from torch.utils.cpp_extension import CppExtension

    # The rule for the name lives with the loader, which must find what is built here.
    module_name = runpy.run_path(str(ROOT / "python/opgraft/_core.py"))["module_name"]
    return CppExtension(
        module_name(torch.__version__),
        sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/*.cpp")),
        depends=sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/*.h")),
        # BuildExtension adds the language standard that torch's headers ask for.
        extra_compile_args=[] if os.name == "nt" else ["-O3", "-g0", "-fvisibility=hidden"],
    )


def build_core_command() -> type:
    """A `build_ext` of torch's in which a failed compile leaves a pure-Python build."""
    from torch.utils.cpp_extension import BuildExtension

    class BuildCore(BuildExtension):
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

        def forget(self) -> None:
            """Leave neither the extensions nor what an earlier build of them made."""
            for extension in self.extensions:
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
            self.extensions = []
            self.distribution.ext_modules = []

    return BuildCore


class CoreWheel(bdist_wheel):
    """A wheel whose tag says what was built, not what was planned before the compile."""

    @property
    def root_is_pure(self) -> bool:
        return not self.distribution.has_ext_modules()

    @root_is_pure.setter
    def root_is_pure(self, value: bool | None) -> None:
        """Ignored: setuptools decides before the build."""


def main() -> None:
    reason = obstacle() if BUILDS else None
    if reason:
        skip(reason)
    with_core = BUILDS and not reason
    setup(
        ext_modules=[core_extension()] if with_core else [],
        cmdclass={
            "bdist_wheel": CoreWheel,
            **({"build_ext": build_core_command()} if with_core else {}),
        },
    )


main()
