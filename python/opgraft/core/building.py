"""Compiles the core from its C++ sources, for setup.py and for `opgraft build`.

setup.py runs this file where neither torch nor opgraft is installed, so it imports only the
standard library. A core needs only torch's headers to compile. Its symbols are resolved when it is
loaded, from the libraries that `import torch` has loaded, so a machine can compile a core for a
torch that it does not have.

`loader` imports this module at every `import torch` with packs. So `shlex` and `sysconfig`, which
nothing else imports by then, are imported where they are used.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "BuildError",
    "TorchBuild",
    "compile_core",
    "digest",
    "file_name",
    "find_compiler",
    "headers_build",
    "headers_release",
    "module_name",
    "release",
    "sources",
]

# The version of a release, with the suffix of the devices that it was built for.
_RELEASE = r"(\d+\.\d+\.\d+)(?:\+(?:cpu|cu\d+|rocm[\d.]+|xpu))?"
# The headers of every torch from 2.11 on compile with it, and those from 2.13 on need it.
_STANDARD = "-std=c++20"
_FLAGS = ["-O3", "-DNDEBUG", "-g0", "-Wall", "-fPIC", "-fvisibility=hidden"]
# Torch's libraries that a core is linked against by name. torch does not load them with global
# symbols, so a core would not find their symbols otherwise.
_LIBRARIES = ("c10", "torch_cpu", "torch_python")
# The most sources for one run of the compiler. Its memory use grows with them, and so does the
# object's name.
_MAX_SOURCES_PER_UNIT = 12
# Sources that take as many times longer to compile than others of their size: the bindings, and the
# templates that are instantiated for each signature.
_SLOW_SOURCES = {"core": 3, "typed": 8}
# What every call runs. It is compiled as one, however many compilers run in parallel, so that a
# call's way is inlined: across units nothing is.
_RUN_BY_EVERY_CALL = frozenset({"condition", "lookup", "router", "typed"})


class BuildError(Exception):
    """The core cannot be compiled here. The message says why, and what to do about it."""


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
    """The file name of an extension module for the running Python."""
    import sysconfig

    return module.rpartition(".")[2] + str(sysconfig.get_config_var("EXT_SUFFIX"))


def headers_release(include: Path) -> str:
    """The release of the torch headers in a folder, such as "2.13.0"."""
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


class TorchBuild(NamedTuple):
    """A build of torch: the one a core was compiled for, or the running one.

    Attributes:
        version: as `torch.__version__` has it.
        commit: of torch's repository, as `torch.version.git_version` has it.
    """

    version: str
    commit: str

    def __str__(self) -> str:
        return f"{self.version} (commit {self.commit[:12] or 'unknown'})"

    def agrees_with(self, other: TorchBuild) -> bool:
        """Whether a core for this build fits the other one.

        A core depends on the C++ structures of torch's commit. The builds of a release, for the CPU
        or any CUDA, are made from one commit, and agree. Any other build (a vendor's, a nightly,
        one from modified sources) may differ from its commit, so it agrees only with itself.

        >>> cpu = TorchBuild("2.13.0+cpu", "cf30153c")
        >>> cpu.agrees_with(TorchBuild("2.13.0+cu130", "cf30153c"))
        True
        >>> cpu.agrees_with(TorchBuild("2.13.0a0+cf30153c.nv26.1", "cf30153c"))
        False
        """
        if self.commit != other.commit:
            return False
        mine, its = (re.fullmatch(_RELEASE, build.version) for build in (self, other))
        if mine is None or its is None:
            return self.version == other.version
        return mine.group(1) == its.group(1)


def headers_build(include: Path) -> TorchBuild:
    """The build of the torch headers in a folder, from the `version.py` beside the folder."""
    path = include.parent / "version.py"
    try:
        tree = ast.parse(path.read_text())
    except (OSError, SyntaxError, ValueError) as error:
        raise BuildError(
            f"which torch the headers in {include} are of cannot be told from {path}: {error}"
        ) from error
    found: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found |= {t.id: node.value.value for t in node.targets if isinstance(t, ast.Name)}
    build = TorchBuild(str(found.get("__version__", "")), str(found.get("git_version", "")))
    if release(build.version) != release(headers_release(include)):
        raise BuildError(f"{path} is of torch {build.version}, and the headers beside it are not")
    return build


def sources() -> Path:
    """The folder of the C++ sources: inside the package if installed, beside it in a clone."""
    here = Path(__file__).resolve().parents[1]  # the package
    installed, clone = here / "csrc", here.parents[1] / "csrc"
    for folder in (installed, clone):
        if (folder / "core.cpp").is_file():
            return folder
    raise BuildError(f"the core's sources are missing: neither {installed} nor {clone} has them")


def digest(folder: Path) -> str:
    """A digest of the sources and of how they are compiled."""
    state = hashlib.sha256()
    for path in [*sorted(folder.glob("*.cpp")), *sorted(folder.glob("*.h")), Path(__file__)]:
        content = path.read_bytes()
        state.update(f"{path.name} {len(content)}\n".encode() + content)
    return state.hexdigest()[:16]


def find_compiler() -> list[str]:
    """The C++ compiler's command: `CXX`, which may include a launcher, or `c++`."""
    command = _split_variable("CXX") or ["c++"]
    if shutil.which(command[0]) is None:
        raise BuildError(
            f"no C++ compiler ({command[0]!r} not found); install one (Debian and Ubuntu: apt "
            "install g++; Fedora: dnf install gcc-c++; conda: conda install cxx-compiler) or set "
            "CXX"
        )
    return command


def compile_core(
    include: Path, target: Path, *, folder: Path, objects: Path, warnings: bool = False
) -> None:
    """Compile the core in `folder` against the torch headers in `include`.

    Progress is printed to stdout.

    Args:
        target: the extension module's file, which is replaced atomically. The module has its name.
        objects: the folder for object files. Those that are newer than the sources are used again.
        warnings: whether to show the compiler's output even if it succeeds.

    Raises:
        BuildError: it cannot be compiled here. The compiler's output is on stderr.
    """
    if not sys.platform.startswith("linux"):
        raise BuildError(f"the core is built on Linux only so far, and this is {sys.platform}")
    compiler = find_compiler()
    build = headers_build(include)
    import sysconfig

    python = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    if not any((Path(folder) / "Python.h").is_file() for folder in python):
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
        *(f"-isystem{folder}" for folder in (include, include / "torch/csrc/api/include")),
        *(f"-isystem{folder}" for folder in sorted(python)),
        *_split_variable("CXXFLAGS"),
        f'-DOPGRAFT_TORCH_VERSION="{build.version}"',
        f'-DOPGRAFT_TORCH_COMMIT="{build.commit}"',
    ]
    # Objects are kept apart by torch (even in the same folder), compiler and flags.
    object_folder = objects / hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]
    object_folder.mkdir(parents=True, exist_ok=True)
    reused, units = _outdated(folder, object_folder)
    try:
        compiled = _compile(units, [*command, f"-iquote{folder}"], object_folder, warnings=warnings)
        _link(compiler, [str(path) for path in sorted(reused + compiled)], target)
    except _CompilerError as error:
        print(error.output, end="", file=sys.stderr, flush=True)
        raise


def _outdated(folder: Path, object_folder: Path) -> tuple[list[Path], list[list[Path]]]:
    """The objects to use again, and the units of the other sources to compile.

    A unit is several sources that are compiled as one, so that torch's headers, which take nearly
    all of the time, are parsed once. An object's name lists its sources. A source that was edited
    since is compiled alone from then on, so that working on it recompiles no other.
    """
    left = {path.stem: path for path in sorted(folder.glob("*.cpp"))}
    edited_at = {stem: path.stat().st_mtime_ns for stem, path in left.items()}
    headers = max((path.stat().st_mtime_ns for path in folder.glob("*.h")), default=0)
    reused, edited = [], []
    for path in sorted(object_folder.glob("*.o")):
        made, stems = path.stat().st_mtime_ns, path.stem.split("+")
        newer = [stem for stem in stems if edited_at.get(stem, 0) >= made]
        if made > headers and not newer and left.keys() >= set(stems):
            reused.append(path)
            for stem in stems:
                del left[stem]
        else:
            path.unlink()
            edited += newer if made > headers else []
    alone = [[left.pop(stem)] for stem in edited if stem in left]
    return reused, alone + _units(list(left.values()))


def _units(sources: Sequence[Path]) -> list[list[Path]]:
    """Sources in groups that take about as long, one per parallel compiler."""
    count = max(_jobs(), -(-len(sources) // _MAX_SOURCES_PER_UNIT))
    units: list[list[Path]] = [[] for _ in range(max(min(count, len(sources)), 1))]
    costs = {path: path.stat().st_size * _SLOW_SOURCES.get(path.stem, 1) for path in sources}
    units[0] += (path for path in sources if path.stem in _RUN_BY_EVERY_CALL)
    rest = (path for path in sources if path.stem not in _RUN_BY_EVERY_CALL)
    for path in sorted(rest, key=lambda path: (-costs[path], path)):
        room = [unit for unit in units if len(unit) < _MAX_SOURCES_PER_UNIT]
        min(room, key=lambda unit: sum(costs[each] for each in unit)).append(path)
    return [sorted(unit) for unit in units if unit]


def _compile(
    units: Sequence[Sequence[Path]], command: Sequence[str], object_folder: Path, *, warnings: bool
) -> list[Path]:
    """Compile units in parallel. Returns their objects."""
    from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

    def compile_unit(unit: Sequence[Path]) -> list[Path]:
        try:
            return [_compile_unit(unit, command, object_folder, warnings=warnings)]
        except _CompilerError:
            if len(unit) == 1:
                raise
        # If the sources do not compile as one, or need too much memory, each may compile alone.
        return [
            _compile_unit([source], command, object_folder, warnings=warnings) for source in unit
        ]

    compiled: list[Path] = []
    progress = _Progress(sum(map(len, units)))
    with ThreadPoolExecutor(_jobs()) as pool:
        pending = {pool.submit(compile_unit, unit): unit for unit in units}
        try:
            while pending:
                progress.show()
                for done in wait(pending, timeout=1, return_when=FIRST_COMPLETED).done:
                    compiled += done.result()
                    progress.add(pending.pop(done))
        finally:
            progress.end()
            for each in pending:
                each.cancel()
    return compiled


class _CompilerError(BuildError):
    def __init__(self, command: Sequence[str], status: int, output: str) -> None:
        import shlex

        super().__init__(f"{shlex.join(command)} ended with {status}")
        self.output = output


def _compile_unit(
    unit: Sequence[Path], command: Sequence[str], object_folder: Path, *, warnings: bool
) -> Path:
    result = object_folder / f"{'+'.join(source.stem for source in unit)}.o"
    source = unit[0]
    if len(unit) > 1:
        source = result.with_suffix(".cpp")
        source.write_text("".join(f'#include "{each.name}"\n' for each in unit))
    partial = result.with_suffix(".tmp")  # an interrupted compile must leave no object
    started = time.time_ns()
    output = _run([*command, "-c", str(source), "-o", str(partial)])
    if warnings and output:
        print(output, end="", file=sys.stderr, flush=True)
    os.utime(partial, ns=(started, started))  # so sources edited since count as newer
    return partial.replace(result)


class _Progress:
    """Prints how many files are compiled. On a terminal it overwrites one line."""

    def __init__(self, count: int) -> None:
        self._count, self._done, self._started = count, 0, time.monotonic()
        self._is_terminal = sys.stdout.isatty()

    def add(self, unit: Sequence[Path]) -> None:
        self._done += len(unit)
        if not self._is_terminal:
            names = ", ".join(source.name for source in unit)
            print(f"  {self._text()}: {names}", flush=True)

    def show(self) -> None:
        if self._is_terminal:
            print(f"\r  {self._text()}\x1b[K", end="", flush=True)

    def end(self) -> None:
        if self._is_terminal and self._count:
            self.show()
            print(flush=True)

    def _text(self) -> str:
        seconds = time.monotonic() - self._started
        return f"compiled {self._done} of {self._count} files, {seconds:.0f} s"


def _link(compiler: Sequence[str], objects: Sequence[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".link") as folder:
        # The linker needs only the libraries' names, so empty libraries with those names will do.
        for library in (f"lib{name}.so" for name in _LIBRARIES):
            named = ["-shared", "-nostdlib", f"-Wl,-soname,{library}", "-x", "c++", os.devnull]
            _run([*compiler, *named, "-o", f"{folder}/{library}"])
        linked = Path(folder) / target.name
        needed = [f"-L{folder}", "-Wl,--no-as-needed", *(f"-l{name}" for name in _LIBRARIES)]
        extra = _split_variable("LDFLAGS")
        _run([*compiler, "-shared", *objects, "-o", str(linked), *needed, *extra])
        # Not written in place, because processes that have the old file loaded would crash.
        linked.replace(target)


def _split_variable(variable: str) -> list[str]:
    """An environment variable, split as a shell would."""
    import shlex

    return shlex.split(os.environ.get(variable, ""))


def _run(command: Sequence[str]) -> str:
    """Run a compiler. Returns its output."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        raise _CompilerError(command, done.returncode, done.stdout)
    return done.stdout


def _jobs() -> int:
    """How many compilers run at once: `MAX_JOBS`, as for torch's own extensions, or every core."""
    asked = os.environ.get("MAX_JOBS", "")
    return max(1, int(asked)) if asked.isdigit() else len(os.sched_getaffinity(0))
