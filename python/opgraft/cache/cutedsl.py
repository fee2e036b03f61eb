"""Functions that CuteDSL compiles: compiled once for all processes, loaded without importing it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch

from opgraft.cache import entries, libraries, origins
from opgraft.ops.lazy_impl import Lazy

__all__ = ["CannotKeep", "Functions", "compiling_for_others"]

log = logging.getLogger(__name__)

#: What a compile function returns: a function, or with it what callers need to know of it.
CompileFunction = Callable[[Any], Any]
#: What an entry calls the library of a function.
LIBRARY = "function.so"


class CannotKeep(Exception):
    """What CuteDSL compiled cannot be written to the cache."""


class Functions:
    """Functions that CuteDSL compiles, one for each kind of call.

    A function that any process of this user's has compiled for the same kind and GPU, of the same
    sources, is loaded from `~/.cache/opgraft/kernels` in milliseconds, without importing CuteDSL.
    So the module that calls them should not import it: `compile_kind` and what it needs belong into
    a module of their own. Workers compile what overrides need that are registered with
    `when_not_ready="native"`.

    Args:
        compile_kind: takes a kind, and returns what
            `cute.compile(..., options="--enable-tvm-ffi")` returns for fake tensors; or a pair of
            that and what `facts` is to return, which JSON can write. Best given by name, with
            :func:`opgraft.lazy`. It may depend on its argument, on the device's architecture and
            number of multiprocessors, and on the sources of its module, and of those that this one
            imports, alone.

    >>> import opgraft
    >>> functions = opgraft.cutedsl_utils.Functions(opgraft.lazy("my_kernels.compile:compile_kind"))
    >>> functions
    Functions(lazy('my_kernels.compile:compile_kind'))
    """

    def __init__(self, compile_kind: CompileFunction) -> None:
        self._compile_kind = compile_kind
        #: By kind, as `_exactly` has it, and the index of the device.
        self._made: dict[tuple[Any, int | None], tuple[Callable[..., None], Any]] = {}
        #: Each held while that function is loaded or compiled, by this process and not its parent.
        self._locks: dict[tuple[Any, int | None, int], threading.RLock] = {}

    def __repr__(self) -> str:
        return f"Functions({self._compile_kind!r})"

    def __call__(self, kind: Any, device: torch.device) -> Callable[..., None]:
        """The function for a kind of call on a device.

        Args:
            kind: what the function is for, in a named tuple of numbers, strings, dtypes, None and
                such tuples.
            device: the device of the call's tensors.

        Returns:
            It takes the arguments that were compiled for, by position, and launches on the current
            stream.

        Raises:
            Exception: what `compile_kind` raises, where it has to compile.
        """
        made = self._made.get((_exactly(kind), device.index))
        return (made or self._make(kind, device))[0]

    def facts(self, kind: Any, device: torch.device) -> Any:
        """What `compile_kind` returned beside the function; None where that was nothing."""
        made = self._made.get((_exactly(kind), device.index))
        return (made or self._make(kind, device))[1]

    def _make(self, kind: Any, device: torch.device) -> tuple[Callable[..., None], Any]:
        if _for_others is not None:  # what is made cannot be called here
            with _compiling:
                return self._make_for_others(_for_others, kind, device)
        # Autograd's threads call backwards while others call forwards. Who needs a function waits
        # for that one alone: while another is compiled, this one can be loaded. What must be
        # compiled waits for its turn, as nobody says that CuteDSL compiles in two threads at once.
        # No thread waits for its turn while it holds the lock of a function: `compile_kind`, whose
        # turn it is, may need that function.
        exactly = _exactly(kind), device.index
        lock = self._locks.setdefault((*exactly, os.getpid()), threading.RLock())
        key = _key(self._compile_kind, kind, device)
        with lock:
            made = self._made.get(exactly) or _load(key)
            if made is not None:
                return self._made.setdefault(exactly, made)
        with _compiling, lock:  # another thread had its turn before, or another process was faster
            made = self._made.get(exactly) or _load(key) or self._compile(kind, key)
            return self._made.setdefault(exactly, made)

    def _make_for_others(
        self, others: ForOthers, kind: Any, device: torch.device
    ) -> tuple[Callable[..., None], Any]:
        key = _key(self._compile_kind, kind, device)
        others.names.append(f"{key['function']} {kind}")
        entry = _find(key)  # which may have been removed since this process made it
        if entry is None:
            entry = _keep(key, *self._compiled(kind))

        def note_call(*arguments: Any) -> None:
            others.called(entry, arguments)

        return note_call, entry.facts["facts"]

    def _compile(self, kind: Any, key: dict[str, Any]) -> tuple[Callable[..., None], Any]:
        function, facts = self._compiled(kind)
        try:
            facts = _keep(key, function, facts).facts["facts"]
        except CannotKeep as error:
            log.info("a compiled function is not kept for other processes: %s", error)
        return function, facts

    def _compiled(self, kind: Any) -> tuple[Callable[..., None], Any]:
        made = self._compile_kind(kind)
        return made if isinstance(made, tuple) else (made, None)


class ForOthers(NamedTuple):
    """What is compiled for other processes."""

    #: The names of the functions that were asked for.
    names: list[str]
    #: Called in place of a function, with its entry and its arguments.
    called: Callable[[entries.Entry, tuple[Any, ...]], None]


# Held while compiling, for seconds: whose turn it is. A fork must not wait for it, and its child
# gets another.
_compiling = threading.RLock()
#: While functions are compiled for other processes alone.
_for_others: ForOthers | None = None


@contextmanager
def compiling_for_others(
    called: Callable[[entries.Entry, tuple[Any, ...]], None],
) -> Iterator[list[str]]:
    """Compile functions without calling them, for processes that have a GPU.

    Args:
        called: called in place of a function, with its entry in the cache and its arguments.

    Returns:
        The names of those that were asked for.
    """
    global _for_others
    _for_others = ForOthers([], called)
    try:
        yield _for_others.names
    finally:
        _for_others = None


def _forget_in_child() -> None:
    global _compiling
    _compiling = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)


# --------------------------------------------------------------------------------------------------
# Keys
# --------------------------------------------------------------------------------------------------


def _key(function: CompileFunction, kind: Any, device: torch.device) -> dict[str, Any]:
    """All that a compiled function depends on, but for the sources: those are in its entry."""
    return {
        "function": _name(function),
        "kind": _described(kind),
        "device": _device(device),
        "versions": origins.versions(),
        "environment": origins.environment("CUTE_DSL_", "CUTLASS_"),
    }


def _name(function: CompileFunction) -> str | None:
    """By which name another process finds a function; None where it finds none."""
    if not isinstance(function, (FunctionType, Lazy)):
        return None
    module, name = function.__module__, function.__qualname__
    return None if module == "__main__" or "<" in name else f"{module}:{name}"


def _exactly(kind: Any) -> Any:
    """A kind as a key of a dictionary: two are equal where :func:`_described` says the same.

    Python itself takes 1, 1.0 and True for one key, 0.0 and -0.0, and two named tuples of different
    types with the same values; and NaN for another key each time.
    """
    if isinstance(kind, tuple):
        return type(kind), *map(_exactly, kind)
    return type(kind), repr(kind) if type(kind) is float else kind


def _described(value: Any) -> Any:
    if isinstance(value, tuple):
        return [type(value).__name__, *map(_described, value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    raise TypeError(
        f"opgraft.cutedsl_utils.Functions got a kind with a {type(value).__name__} in it: name "
        "what the function is for by numbers, strings, dtypes, None and tuples of them"
    )


def _device(device: torch.device) -> list[Any]:
    if device.type != "cuda":
        return [os.environ.get("CUTE_DSL_ARCH", device.type), 0]
    properties = torch.cuda.get_device_properties(device)
    return [architecture(properties), properties.multi_processor_count]


def architecture(properties: Any) -> str:
    """For which architecture CuteDSL compiles for a device."""
    named = os.environ.get("CUTE_DSL_ARCH")
    # From Hopper on there are instructions that one architecture alone has, and "a" allows them.
    suffix = "a" if properties.major >= 9 else ""
    return named or f"sm_{properties.major}{properties.minor}{suffix}"


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


def _find(key: dict[str, Any]) -> entries.Entry | None:
    entry = entries.read(key) if key["function"] else None
    return entry if entry and origins.are_unchanged(entry.facts["sources"]) else None


def _load(key: dict[str, Any]) -> tuple[Callable[..., None], Any] | None:
    """A function that was kept; None where there is none, or it cannot be loaded."""
    entry = _find(key)
    if entry is None:
        return None
    from opgraft.cache import loaded

    try:
        needs = list(map(origins.absolute, entry.facts["libraries"]))
        return loaded.load(entry.open(LIBRARY), needs), entry.facts["facts"]
    except (OSError, AttributeError) as error:  # no library of CuteDSL's, a folder of no programs
        log.warning("a compiled kernel cannot be loaded, and is compiled anew: %s", error)
        return None


def _keep(key: dict[str, Any], function: Any, facts: Any) -> entries.Entry:
    """Write a function to the cache.

    Returns:
        It as other processes find it: JSON makes lists of tuples in its facts, for instance.

    Raises:
        CannotKeep: it cannot be written, or not found again.
    """
    if not hasattr(function, "export_to_c"):
        raise CannotKeep(f"a {type(function).__name__} cannot be exported")
    if key["function"] is None:
        raise CannotKeep("its compile function is no function of a module that others can import")
    try:
        sources = origins.hashes(key["function"].partition(":")[0])
        library, needs = _exported(function)
        told = {"facts": facts, "sources": sources, "libraries": needs}
        entries.write(key, {LIBRARY: library}, told)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CannotKeep(f"{type(error).__name__}: {error}") from error
    entry = _find(key)
    if entry is None:  # nobody trusts the folder, for instance: a call would compile anew, and wait
        raise CannotKeep(f"it is not found again: {entries.why_unusable() or 'it was removed'}")
    return entry


def _exported(function: Any) -> tuple[bytes, list[str]]:
    """A function as a shared library, and the libraries that it needs."""
    runtime = sys.modules["cutlass.cute"].runtime
    needs = [str(path) for path in runtime.find_runtime_libraries(enable_tvm_ffi=True)]
    with entries.temporary_folder() as name:
        folder = Path(name)
        compiled, linked = folder / "function.o", folder / "function.so"
        function.export_to_c(str(compiled), function_name=libraries.NAME)
        command = [*_linker(), "-shared", "-o", str(linked), str(compiled), *needs]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise CannotKeep(f"{' '.join(command)} failed: {done.stderr.strip()[-1000:]}")
        return linked.read_bytes(), list(map(origins.relative, needs))


def _linker() -> list[str]:
    named = os.environ.get("CC", "").split()
    for name in (*named[:1], "cc", "gcc", "clang", "ld"):
        if shutil.which(name):
            return named if named and name == named[0] else [name]
    raise CannotKeep("no linker (cc, gcc, clang or ld) was found: install one")
