"""What a kernel was compiled of: the source files that its compile function reaches."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from opgraft.base import distributions

#: Modules that the version of a distribution stands for, which is in a kernel's key.
_BY_VERSION = {
    "cuda": "cuda-bindings",
    "cutlass": "nvidia-cutlass-dsl",
    "numpy": "numpy",
    "opgraft": "opgraft",
    "torch": "torch",
    "triton": "triton",
    "tvm_ffi": "apache-tvm-ffi",
}


#: Variables of the environment that say nothing of what a DSL compiles.
_OTHER_VARIABLES = {
    *("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR"),
    *("CUTE_DSL_ARCH", "CUTE_DSL_LIBS", "CUTE_DSL_CACHE_DIR", "CUTE_DSL_DUMP_DIR"),
}


def environment(*prefixes: str) -> dict[str, str]:
    """The variables of the environment on which it depends what DSLs compile.

    Args:
        prefixes: what their names begin with.
    """
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(prefixes) and name not in _OTHER_VARIABLES
    }


def versions() -> dict[str, str]:
    """The versions of the distributions whose files are not looked at."""
    found = {name: distributions.version(name) for name in _BY_VERSION.values()}
    return {name: version for name, version in found.items() if version is not None}


def is_looked_at(module: str) -> bool:
    """Whether a module has been imported, and no version stands for it."""
    top = module.partition(".")[0]
    is_there = sys.modules.get(module) is not None  # None: its import is forbidden
    return is_there and top not in _BY_VERSION and top not in sys.stdlib_module_names


def hashes(*modules: str) -> dict[str, str]:
    """The hash of each source file that imported modules were made of.

    Args:
        modules: their names. What they import and have values of counts, and what that does, and so
            on.

    Returns:
        By path, below a folder of `sys.path` where there is one: another process may find the same
        files elsewhere.

    Raises:
        ValueError: a module has no source file, or one that may not be what was imported.
    """
    found = sorted(_files(modules))
    for path in found:
        if os.path.getmtime(path) >= _began():
            raise ValueError(f"{path} was changed since this process began")
    return {relative(path): _hash(path) for path in found}


def are_unchanged(known: dict[str, str]) -> bool:
    """Whether the files are what they were when :func:`hashes` returned this."""
    return all(_hash(absolute(path)) == hashed for path, hashed in known.items())


def _files(modules: Iterable[str]) -> set[str]:
    found: set[str] = set()
    seen = set(modules)
    waiting = list(seen)
    while waiting:
        name = waiting.pop()
        values = _values(name)
        file = values.get("__file__")
        if file is None:
            if "__path__" not in values:  # a package without __init__.py has no code
                raise ValueError(f"{name} has no source file")
        elif not file.endswith(".py"):
            raise ValueError(f"{name} is no Python source: {file}")
        else:
            found.add(file)
        for reached in _reached(name, values):
            if reached not in seen:
                seen.add(reached)
                waiting.append(reached)
    return found


def _values(module: str) -> dict[str, Any]:
    """What is in a module, without what a `__getattr__` of its own makes or raises."""
    values: dict[str, Any] = getattr(sys.modules[module], "__dict__", {})
    return values


def _reached(module: str, values: dict[str, Any]) -> Iterator[str]:
    """The modules that a module imports or has values of, and the packages that it is in."""
    parts = module.split(".")
    names = {".".join(parts[:n]) for n in range(1, len(parts))}
    names.update(_imported(module, values))
    for value in list(values.values()):
        if not issubclass(type(value), ModuleType):  # `isinstance` asks the value for its class
            names.add(_module_of(value))
        # A package has all its modules as attributes, whoever imported them.
        elif not value.__name__.startswith(module + "."):
            names.add(value.__name__)
    yield from filter(is_looked_at, names)


def _module_of(value: object) -> str:
    """The module that a function, a class or an object's class is defined in; empty if unknown."""
    try:
        return str(getattr(value, "__module__", None) or "")
    except Exception:  # an object that is made when it is first used, and cannot be made here
        return type(value).__module__


def _imported(module: str, values: dict[str, Any]) -> Iterator[str]:
    """The names in a module's import statements: of modules, and of what may be one."""
    file = values.get("__file__")
    if file is None:
        return
    for base, names in _import_statements(file):
        if base is None:
            yield from names
        elif (found := _absolute_name(base, _package(module, values))) is not None:
            yield found
            yield from (f"{found}.{name}" for name in names)


def _package(module: str, values: dict[str, Any]) -> str:
    """What relative imports of a module begin at, as the import system finds it."""
    package, spec = values.get("__package__"), values.get("__spec__")
    if package is not None:
        return str(package)
    if spec is not None:
        return str(spec.parent)
    return module if "__path__" in values else module.rpartition(".")[0]


def _absolute_name(name: str, package: str) -> str | None:
    """The module that an import statement names; None if it can only fail, as in a script that is
    also a part of a package (``try: from .utils import ...``).
    """
    try:
        return resolve_name(name, package)
    except ImportError:
        return None


@cache
def _import_statements(file: str) -> tuple[tuple[str | None, tuple[str, ...]], ...]:
    """Of each import statement of a file where it imports from, None in `import x`, and the names.

    Each file is read once: it takes seconds for all that a DSL is made of.
    """
    found: list[tuple[str | None, tuple[str, ...]]] = []
    try:
        tree = ast.parse(Path(file).read_bytes())
    except SyntaxError as error:
        raise ValueError(f"{file} is not what was imported: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.append((None, tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found.append((base, tuple(alias.name for alias in node.names)))
    return tuple(found)


def relative(path: str) -> str:
    """A path below a folder of `sys.path`, where it is below one: other processes may find the same
    files elsewhere.
    """
    above = [each for each in sys.path if each and path.startswith(os.path.join(each, ""))]
    return os.path.relpath(path, max(above, key=len)) if above else path


def absolute(path: str) -> str:
    """The file that :func:`relative` was given, as this process finds it."""
    return path if os.path.isabs(path) else _found(path, tuple(sys.path))


@cache
def _found(path: str, folders: tuple[str, ...]) -> str:
    """Each is looked for once, as each is read once."""
    top = path.partition(os.sep)[0]
    # In the others, too, if need be: a package may have come since it was looked for.
    places = (os.path.join(each, path) for each in (*_folders_with(top, folders), *folders) if each)
    return next(filter(os.path.isfile, places), path)


@cache
def _folders_with(name: str, folders: tuple[str, ...]) -> list[str]:
    """The folders that have something of this name: most have not, and a package many files."""
    return [each for each in folders if each and os.path.exists(os.path.join(each, name))]


@cache
def _began() -> float:
    """When this process began, as `time.time` has it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


@cache
def _hash(path: str) -> str:
    """A file's hash; empty where there is none. Each is read once: so is a module."""
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""
