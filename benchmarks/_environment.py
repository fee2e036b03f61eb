"""Makes a virtual environment in which opgraft and packs are installed as wheels, as for a user.

It is for tests and benchmarks of `import torch`. The environment links torch and other requirements
from the running one. The compiled core is copied, because compiling one takes a minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
# What decides what opgraft and Triton do: an environment begins without any of it.
_VARIABLES = ("OPGRAFT_", "TRITON_", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTHON")


class Environment:
    """A virtual environment.

    Attributes:
        folder: where it is.
        python: its interpreter.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"

    def run(
        self, *command: str | Path, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it; its own programs are found first."""
        return subprocess.run(
            [str(part) for part in command],
            cwd=cwd or self.folder,
            env=self.variables() | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def program(self, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program with its interpreter."""
        return self.run(self.python, "-c", text, **variables)

    def variables(self) -> dict[str, str]:
        """The environment variables of what runs in it."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_VARIABLES)}
        return kept | {"PATH": f"{self.folder / 'bin'}{os.pathsep}{kept.get('PATH', '')}"}

    def install(self, *places: Path, target: Path | None = None) -> None:
        """Install wheels or folders of sources, with what is there for building and nothing else.

        Args:
            *places: what to install.
            target: where to, in place of the environment's own packages.
        """
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        options = ["--no-deps", "--no-build-isolation", "--no-index"]
        if target is not None:
            options += ["--target", str(target)]
        into = ["--python", str(self.python), "install", *options]
        subprocess.run([*pip, *into, *map(str, places)], check=True, env=self.variables())

    @property
    def packages(self) -> Path:
        """Its folder of packages."""
        (folder,) = self.folder.glob("lib/python*/site-packages")
        return folder


def make(folder: Path) -> Environment:
    """A virtual environment in which torch is, and nothing of opgraft's."""
    venv.EnvBuilder(symlinks=True).create(folder)
    environment = Environment(folder)
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for file in _files_of(_with_requirements(*_BORROWED)):
        link = borrowed / file.name
        if not link.exists():
            link.symlink_to(file)
    (environment.packages / "borrowed.pth").write_text(f"{borrowed}\n")
    pip = folder / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{environment.python}" -m pip "$@"\n')
    pip.chmod(0o755)
    return environment


# What opgraft, its packs and their tests need, and what installs them.
_BORROWED = (
    "torch",
    "triton",
    "numpy",
    "click",
    "expecttest",
    "packaging",
    "rich",
    "pytest",
    "pip",
    "setuptools",
)


def _with_requirements(*names: str) -> list[metadata.Distribution]:
    """The distributions of these names that are installed, with all that they require.

    Extras of what they require, too: pip takes a distribution for broken that lacks one of them.
    """
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            try:
                found[name] = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                continue
            for requirement in map(Requirement, found[name].requires or ()):
                if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                    waiting.append(requirement)
    return list(found.values())


def _files_of(distributions: Iterable[metadata.Distribution]) -> Iterator[Path]:
    """The files and folders of distributions in the folder that they are installed in."""
    for distribution in distributions:
        found = {file.parts[0] for file in distribution.files or ()}
        names = found - {"..", "__pycache__"}  # what several distributions share
        yield from (Path(str(distribution.locate_file(name))) for name in sorted(names))


def wheel(project: Path, folder: Path) -> Path:
    """Build a distribution's wheel, opgraft's without a core, and leave its sources as they are."""
    tree = folder / "trees" / project.name
    ignored = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__", ".*", "build", "dist")
    shutil.copytree(project, tree, ignore=ignored)
    # The templates have a file whose name begins with a dot.
    for hidden in project.glob("python/**/.gitignore"):
        shutil.copy2(hidden, tree / hidden.relative_to(project))
    out = folder / "wheels" / project.name
    subprocess.run(
        [sys.executable, "-c", _BUILD, str(out)],
        cwd=tree,
        env=os.environ | {"OPGRAFT_BUILD_CORE": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    (built,) = out.glob("*.whl")
    return built


_BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def wheels(folder: Path) -> list[Path]:
    """The wheels of opgraft and opgraft-kernels; built where the folder does not have them."""
    built = sorted(folder.glob("wheels/*/*.whl"))
    return built or [wheel(ROOT, folder), wheel(ROOT / "kernels" / "opgraft-kernels", folder)]


def with_opgraft(folder: Path, built: Sequence[Path]) -> Environment:
    """An environment with opgraft and opgraft-kernels, and this process's core, if it has one."""
    from opgraft.core import loader

    environment = make(folder)
    environment.install(*built)
    core = loader.load()
    if core is not None and core.__file__ is not None:
        shutil.copy2(core.__file__, environment.packages / "opgraft")
    return environment
