"""Compiles the core from its C++ sources, for setup.py and for `opgraft build`.

setup.py runs this file where neither torch nor opgraft is installed: it is the standard library's
alone. Torch's headers are all that a core is compiled from. Its symbols are found when it is
loaded, in the libraries that `import torch` has loaded by then, so one machine can compile a core
for a torch that it does not have.

`_core` takes names from here at every `import torch` with packs: `shlex` and `sysconfig`, which
nothing else needs by then, are imported where they are used.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = [
    "BuildError",
    "compile_core",
    "digest",
    "file_name",
    "find_compiler",
    "headers_release",
    "module_name",
    "release",
    "sources",
]

# What the headers of every torch from 2.11 on compile as; those from 2.13 on ask for it.
_STANDARD = "-std=c++20"
_FLAGS = ["-O3", "-DNDEBUG", "-g0", "-Wall", "-fPIC", "-fvisibility=hidden"]
# The libraries of torch that a core names as needed, and so finds among those that are loaded:
# torch does not load them for everyone, so that without the names nothing of theirs is found.
_LIBRARIES = ("c10", "torch_cpu", "torch_python")


class BuildError(Exception):
    """The core cannot be compiled here; the message says why, and what to do about it."""


def release(version: str) -> tuple[int, int, int]:
    """Major, minor and patch of a version.

    >>> release("2.13.0+cpu"), release("2.13.0a0+git1234"), release("2.13")
    ((2, 13, 0), (2, 13, 0), (2, 13, 0))
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise ValueError(f"not a torch version: {version!r}")
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch or 0)


def module_name(torch_version: str) -> str:
    """The module that holds the core for a torch of that version.

    >>> module_name("2.13.0+cpu")
    'opgraft._C_torch2_13'
    """
    major, minor, _ = release(torch_version)
    return f"opgraft._C_torch{major}_{minor}"


def file_name(module: str) -> str:
    """What the file of an extension module is called under the Python that runs this."""
    import sysconfig

    return module.rpartition(".")[2] + str(sysconfig.get_config_var("EXT_SUFFIX"))


def headers_release(include: Path) -> str:
    """The release of the torch whose headers are in a folder, such as "2.13.0"."""
    header = include / "torch" / "headeronly" / "version.h"
    try:
        text = header.read_text()
    except OSError as error:
        raise BuildError(f"{include} holds no headers of torch 2.11 or newer: {error}") from error
    parts = [
        re.search(rf"^#define TORCH_VERSION_{part} (\d+)", text, re.MULTILINE)
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    if None in parts:
        raise BuildError(f"{header} does not say which torch it is of")
    return ".".join(part.group(1) for part in parts if part is not None)


def sources() -> Path:
    """The folder of the C++ sources: an install has them in the package, a clone beside it."""
    here = Path(__file__).resolve().parent
    installed, clone = here / "csrc", here.parents[1] / "csrc"
    for folder in (installed, clone):
        if (folder / "core.cpp").is_file():
            return folder
    raise BuildError(f"the core's sources are missing: neither {installed} nor {clone} has them")


def digest(folder: Path) -> str:
    """What tells cores apart that were compiled from other sources, or in another way."""
    state = hashlib.sha256()
    for path in [*sorted(folder.glob("*.cpp")), *sorted(folder.glob("*.h")), Path(__file__)]:
        content = path.read_bytes()
        state.update(f"{path.name} {len(content)}\n".encode() + content)
    return state.hexdigest()[:16]


def find_compiler() -> list[str]:
    """The C++ compiler's command: what `CXX` says, which may hold a launcher, or `c++`."""
    command = _words("CXX") or ["c++"]
    if shutil.which(command[0]) is None:
        raise BuildError(
            f"no C++ compiler ({command[0]!r} not found); install one (Debian and Ubuntu: apt "
            "install g++; Fedora: dnf install gcc-c++; conda: conda install cxx-compiler) or set "
            "CXX"
        )
    return command


def compile_core(include: Path, target: Path, *, folder: Path, objects: Path) -> None:
    """Compile the core in `folder` against the torch headers in `include`.

    Args:
        target: the extension module's file, which is replaced at once; its name says the module's.
        objects: keeps the object files; those that are newer than the sources are used again.

    Raises:
        BuildError: it cannot be compiled here. What the compiler said is on stderr.
    """
    if not sys.platform.startswith("linux"):
        raise BuildError(f"the core is built on Linux only so far, and this is {sys.platform}")
    compiler = find_compiler()
    import sysconfig

    python = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    if not any((Path(place) / "Python.h").is_file() for place in python):
        raise BuildError(
            f"Python's own headers are missing (no Python.h in {' or '.join(sorted(python))}); "
            "install them (Debian and Ubuntu: apt install python3-dev; Fedora: dnf install "
            "python3-devel)"
        )
    command = [
        *compiler,
        _STANDARD,
        *_FLAGS,
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-DTORCH_EXTENSION_NAME={target.name.partition('.')[0]}",
        *(f"-isystem{place}" for place in (include, include / "torch/csrc/api/include")),
        *(f"-isystem{place}" for place in sorted(python)),
        *_words("CXXFLAGS"),
    ]
    # Another torch, compiler or flag has objects of its own.
    kept = objects / hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]
    kept.mkdir(parents=True, exist_ok=True)
    headers = max((path.stat().st_mtime_ns for path in folder.glob("*.h")), default=0)

    def compile_one(source: Path) -> str:
        result = kept / f"{source.stem}.o"
        newest = max(headers, source.stat().st_mtime_ns)
        if not result.is_file() or result.stat().st_mtime_ns <= newest:
            print(f"  compiling {source.name}", flush=True)
            fresh = result.with_suffix(".tmp")  # what an interrupted compile leaves is no object
            _run([*command, "-c", str(source), "-o", str(fresh)])
            fresh.replace(result)
        return str(result)

    with ThreadPoolExecutor(_jobs()) as pool:
        compiled = list(pool.map(compile_one, sorted(folder.glob("*.cpp"))))
    _link(compiler, compiled, target)


def _link(compiler: Sequence[str], objects: Sequence[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".link") as place:
        # A library's name is all that is taken from it here, so empty ones of that name will do.
        for library in (f"lib{name}.so" for name in _LIBRARIES):
            named = ["-shared", "-nostdlib", f"-Wl,-soname,{library}", "-x", "c++", os.devnull]
            _run([*compiler, *named, "-o", f"{place}/{library}"])
        linked = Path(place) / target.name
        needed = [f"-L{place}", "-Wl,--no-as-needed", *(f"-l{name}" for name in _LIBRARIES)]
        extra = _words("LDFLAGS")
        _run([*compiler, "-shared", *objects, "-o", str(linked), *needed, *extra])
        # Not written in place: a process that runs the file of before would crash.
        linked.replace(target)


def _words(variable: str) -> list[str]:
    """An environment variable, split as a shell would."""
    import shlex

    return shlex.split(os.environ.get(variable, ""))


def _run(command: Sequence[str]) -> None:
    import shlex

    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)} ended with {done.returncode}")


def _jobs() -> int:
    """How many compilers run at once: `MAX_JOBS`, as for torch's own extensions, or every core."""
    asked = os.environ.get("MAX_JOBS", "")
    return max(1, int(asked)) if asked.isdigit() else len(os.sched_getaffinity(0))
