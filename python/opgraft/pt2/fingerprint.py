"""Hashes what a callable does. The hash is the same in every process.

A traced graph depends on the impl and on everything that the impl read while it was traced:
helpers, globals, closures, the environment. :func:`digest_reachable` hashes all of it, or says
that it cannot. A graph whose inputs cannot be hashed must not be found again in a cache.
"""

from __future__ import annotations

import abc
import builtins
import dis
import enum
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from opgraft.ops.lazy_impl import Lazy

#: Packages with more files than this are distinguished by their files' sizes and times.
_MAX_HASHED_FILES = 500
#: Distinguished by their version, which is in the caches' keys.
_VERSIONED_LIBRARIES = ("torch", "triton", "opgraft")
#: Modules without state that could matter.
_STATELESS_MODULES = (
    "builtins",
    "math",
    "cmath",
    "operator",
    "_operator",
    "itertools",
    "typing",
    "numbers",
)
_TRUSTED = frozenset(_VERSIONED_LIBRARIES + _STATELESS_MODULES)
#: Through these a function reaches values that no name in its code shows.
_REFLECTIVE_BUILTINS = {
    *("getattr", "setattr", "delattr", "globals", "locals", "vars", "dir", "eval", "exec"),
    *("compile", "open", "input", "id", "hash", "__import__", "breakpoint"),
}
#: Attributes through which a function reaches values that no name in its code shows.
_REFLECTIVE_ATTRIBUTES = {"__globals__", "__builtins__", "__getattribute__", "__subclasses__"}
#: Their instances are ordinary classes.
_METACLASSES = (type, abc.ABCMeta, enum.EnumMeta)
#: Every class has these; they do not change what its methods compute.
_CLASS_BOILERPLATE = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__"),
    *("__annotate__", "__annotations_cache__", "__annotate_func__", "__firstlineno__"),
    *("__static_attributes__", "__parameters__", "__orig_bases__", "__abstractmethods__"),
    *("_abc_impl", "__match_args__"),
}
_CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
#: How many values are visited at most: what reaches more counts as unknown.
_MAX_VALUES = 5000


def digest_code(value: Any) -> str:
    """A hash of a callable's code and of what it refers to in its own module.

    Code that another module holds counts by name only.

    >>> digest_code(lambda x: x + 1) == digest_code(lambda x: x + 1)
    True
    >>> digest_code(len) == digest_code(abs)
    False
    """
    return _Description(follow_modules=False).of(value)


def digest_sources(function: Callable[..., Any]) -> str:
    """A hash of all Python sources of the top-level package that a callable comes from."""
    name = getattr(function, "__module__", None) or type(function).__module__
    file = _file(name.partition(".")[0])
    if file is None:  # an interactive session
        return ""
    path = Path(file)
    paths = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    if len(paths) > _MAX_HASHED_FILES:
        return _hash(f"{each} {each.stat().st_size} {each.stat().st_mtime_ns}" for each in paths)
    return _hash(hashlib.sha256(each.read_bytes()).hexdigest() for each in paths)


def _file(package: str) -> str | None:
    """The file of a top-level module, found without importing it."""
    if package in sys.modules:
        return getattr(sys.modules[package], "__file__", None)
    spec = importlib.util.find_spec(package)
    return spec.origin if spec is not None else None


def _hash(lines: Any) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_reachable(*values: Any) -> str | None:
    """A hash of everything that callables can read, in any module; None where it is not known.

    >>> factors = [2]
    >>> before = digest_reachable(functools.partial(max, factors))
    >>> factors[0] = 3
    >>> before is not None and digest_reachable(functools.partial(max, factors)) != before
    True
    >>> import time
    >>> print(digest_reachable(time.time))
    None
    """
    description = _Description(follow_modules=True)
    found = description.of(values)
    return found if description.is_complete else None


def _is_trusted(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _TRUSTED


class _Description:
    """Lines that describe values; a value that was described before gets a back reference.

    Args:
        follow_modules: whether to describe what other modules hold as well.
    """

    def __init__(self, *, follow_modules: bool) -> None:
        self._follows_modules = follow_modules
        self._lines: list[str] = []
        #: By id, with the value itself, so that no other one gets its id.
        self._seen: dict[int, tuple[int, Any]] = {}
        self.is_complete = True

    def of(self, value: Any) -> str:
        self._add(value)
        return hashlib.sha256("\n".join(self._lines).encode()).hexdigest()

    def _write(self, *what: object) -> None:
        self._lines.append(" ".join(map(str, what)))

    def _mark_unknown(self, value: Any) -> None:
        self.is_complete = False
        cls = type(value)
        self._write("?", cls.__module__, cls.__qualname__, getattr(value, "__qualname__", ""))

    def _add(self, value: Any) -> None:
        if type(value) in _CONSTANTS:
            self._write(type(value).__name__, repr(value))
        elif id(value) in self._seen:
            self._write("#", self._seen[id(value)][0])
        elif len(self._seen) >= _MAX_VALUES:
            self._mark_unknown(value)
        else:
            self._seen[id(value)] = len(self._seen), value
            self._add_new(value)

    def _add_new(self, value: Any) -> None:
        if isinstance(value, enum.Enum):
            self._enum(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, MethodType):
            self._parts("method", (value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            self._parts("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, Lazy):
            self._lazy(value)
        elif isinstance(value, (staticmethod, classmethod)):
            self._parts(type(value).__name__, (value.__func__,))
        elif isinstance(value, property):
            self._parts("property", (value.fget, value.fset, value.fdel))
        elif type(value) in (tuple, list, torch.Size):
            self._parts(type(value).__name__, value)
        elif type(value) is dict:
            self._parts("dict", [part for item in value.items() for part in item])
        elif type(value) in (set, frozenset):
            self._set(value)
        elif isinstance(value, CodeType):
            self._code(value)
        elif isinstance(value, (OpOverload, OpOverloadPacket)):
            self._write("op", value)
        elif isinstance(value, ModuleType):
            self._write("module", value.__name__)
            # Only a function that has the module as a global names what it reads of it.
            self.is_complete &= not self._follows_modules or _is_trusted(value.__name__)
        elif isinstance(value, (BuiltinFunctionType, WrapperDescriptorType, MethodWrapperType)):
            self._builtin(value)
        elif (key := _triton_cache_key(value)) is not None:
            self._write("kernel", key)
        else:
            self._object(value)

    def _parts(self, what: str, parts: Iterable[Any]) -> None:
        values = list(parts)
        self._write(what, len(values))
        for value in values:
            self._add(value)

    def _set(self, values: Iterable[Any]) -> None:
        values = list(values)
        self._write("set", *sorted(map(repr, values)))
        if not all(type(value) in _CONSTANTS for value in values):
            self._mark_unknown(values)

    def _enum(self, value: enum.Enum) -> None:
        self._write(type(value).__qualname__, value.name, repr(value.value))
        if not self._follows_modules:
            return
        attributes = {name: each for name, each in vars(value).items() if name != "__objclass__"}
        methods = [
            each
            for each in vars(type(value)).values()
            if isinstance(each, (FunctionType, property, classmethod, staticmethod))
            and getattr(each, "__module__", None) != "enum"
        ]
        self._parts("enum", (attributes, *methods))

    def _lazy(self, value: Lazy) -> None:
        self._write(repr(value), digest_sources(value))
        if not self._follows_modules:
            return
        if value.__module__ in sys.modules:
            self._add(value.load())
        else:
            self.is_complete = False  # describing it must not import it

    def _builtin(self, value: Any) -> None:
        self._write("builtin", getattr(value, "__module__", ""), value.__qualname__)
        bound = getattr(value, "__self__", None)
        if bound is not None and not isinstance(bound, ModuleType):
            self._add(bound)
        elif (
            not _is_trusted(getattr(value, "__module__", None))
            or value.__name__ in _REFLECTIVE_BUILTINS
        ):
            self.is_complete = False

    def _object(self, value: Any) -> None:
        cls = type(value)
        if not self._follows_modules:
            self._write(cls.__module__, cls.__qualname__, getattr(value, "__qualname__", ""))
            self._parts("object", (cls.__dict__.get("__call__"), getattr(value, "__dict__", None)))
        elif (
            _is_trusted(cls.__module__) or not hasattr(value, "__dict__") or _has_hidden_state(cls)
        ):
            self._mark_unknown(value)  # a tensor, a random generator, a lock, state kept in C
        else:
            self._parts("object", (cls, vars(value)))

    def _class(self, cls: type) -> None:
        self._write("class", cls.__module__, cls.__qualname__)
        if _is_trusted(cls.__module__) or not self._follows_modules:
            return
        if type(cls) not in _METACLASSES:
            self._add(type(cls))
        for base in cls.__mro__:
            if _is_trusted(base.__module__):
                self._write("base", base.__module__, base.__qualname__)
                continue
            attributes = {
                name: each for name, each in vars(base).items() if name not in _CLASS_BOILERPLATE
            }
            self._parts(base.__qualname__, [part for item in attributes.items() for part in item])

    def _function(self, function: FunctionType) -> None:
        self._write("function", function.__module__, function.__qualname__)
        # Not by `__module__`, which functools.wraps assigns.
        if self._follows_modules and _is_trusted(function.__globals__.get("__name__")):
            self._parts("holds", _cells(function))  # it may call what somebody gave it
            return
        self._add(function.__code__)
        attributes = (function.__defaults__, function.__kwdefaults__, vars(function) or None)
        self._parts("holds", (*attributes, *_cells(function)))
        names = sorted(set(_names(function.__code__)))
        for name in names:
            self._global(name, names, function)
        if self._follows_modules:
            self._imports(function.__code__, names, function)
            self.is_complete &= _REFLECTIVE_ATTRIBUTES.isdisjoint(names)
            self.is_complete &= not _lets_a_module_escape(function.__code__, function.__globals__)

    def _global(self, name: str, names: list[str], function: FunctionType) -> None:
        if name in function.__globals__:
            value = function.__globals__[name]
            if self._follows_modules or _is_module_state(value, function):
                self._write("global", name)
                self._module_or_value(value, names)
        elif name in _REFLECTIVE_BUILTINS and hasattr(builtins, name):
            self.is_complete = False

    def _module_or_value(self, value: Any, names: list[str]) -> None:
        if isinstance(value, ModuleType):
            self._module(value, names, set())
        else:
            self._add(value)

    def _module(self, module: ModuleType, names: list[str], visited: set[str]) -> None:
        self._write("module", module.__name__)
        if _is_trusted(module.__name__) or module.__name__ in visited:
            return
        visited.add(module.__name__)
        # Any of a function's names may be an attribute of the module, or of a module in it.
        for name in names:
            if name in vars(module):
                self._write(module.__name__, name)
                attributes = vars(module)[name]
                if isinstance(attributes, ModuleType):
                    self._module(attributes, names, visited)
                else:
                    self._add(attributes)

    def _imports(self, code: CodeType, names: list[str], function: FunctionType) -> None:
        instructions = list(dis.get_instructions(code))
        for index, instruction in enumerate(instructions):
            if instruction.opname != "IMPORT_NAME":
                continue
            level = instructions[index - 2].argval
            name = _imported(instruction.argval, level, function)
            if name is not None and name in sys.modules:
                self._module_or_value(sys.modules[name], names)
            elif not _is_trusted(name):
                self.is_complete = False
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._imports(constant, names, function)

    def _code(self, code: CodeType) -> None:
        self._write(code.co_code.hex())
        self._write(code.co_names, code.co_varnames, code.co_freevars)
        self._parts("constants", code.co_consts)


def _imported(name: str, level: object, function: FunctionType) -> str | None:
    """The full name of a module that a function imports; None where it is not known."""
    if not isinstance(level, int):
        return None
    try:
        package = function.__globals__.get("__package__")
        return importlib.util.resolve_name("." * level + name, package) if level else name
    except ImportError:
        return None


def _triton_cache_key(value: Any) -> str | None:
    """Triton's own cache key of a kernel: its code, and what that refers to."""
    if type(value).__module__.partition(".")[0] != "triton":
        return None
    key = getattr(value, "cache_key", None)
    return key if isinstance(key, str) else None


def _has_hidden_state(cls: type) -> bool:
    """Whether instances hold more than their `__dict__`: slots, or what a base in C keeps."""
    return any(
        vars(base).get("__slots__") or (_is_trusted(base.__module__) and not _is_plain(base))
        for base in cls.__mro__
    )


def _is_plain(base: type) -> bool:
    return base in (object, torch.nn.Module) or base.__module__ == "typing"


def _lets_a_module_escape(code: CodeType, variables: dict[str, Any]) -> bool:
    """Whether code does more with a module than read attributes that the module has.

    A helper that the module is passed to, its `__dict__` or `__getattr__`, or another variable that
    it is assigned to could read any attribute.
    """
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    imported = set(_imported_variables(instructions))
    for index, instruction in enumerate(instructions):
        if instruction.opname.startswith(("STORE_", "DELETE_", "MAKE_CELL", "COPY_FREE")):
            continue
        name = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if _resolves_to_a_module(variables.get(name), instructions[index + 1 :]):
                return True
        elif not imported.isdisjoint(name if isinstance(name, tuple) else (name,)):
            after = instructions[index + 1].opname
            if instruction.opname in ("LOAD_FAST_LOAD_FAST", "LOAD_CLOSURE") or (
                instruction.opname.startswith("LOAD_") and after not in _ATTRIBUTE_READS
            ):
                return True
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(_lets_a_module_escape(each, variables) for each in nested)


_ATTRIBUTE_READS = ("LOAD_ATTR", "LOAD_METHOD")


def _resolves_to_a_module(value: Any, reads: list[dis.Instruction]) -> bool:
    """Whether a value, or the attribute read from it right away, is a module other than torch's."""
    for read in reads:
        if not isinstance(value, ModuleType) or _is_trusted(value.__name__):
            return False
        if read.opname not in _ATTRIBUTE_READS or read.argval not in vars(value):
            return True
        value = vars(value)[read.argval]
    return False


def _imported_variables(instructions: list[dis.Instruction]) -> Iterator[str]:
    """The variables that code's own `import x` and `import x.y as z` assign."""
    for index, instruction in enumerate(instructions):
        if instruction.opname != "IMPORT_NAME" or _is_trusted(instruction.argval):
            continue
        if instruction.argrepr and instructions[index - 1].argval:  # from x import ...
            continue
        for after in instructions[index + 1 :]:
            if after.opname.startswith("STORE_"):
                yield after.argval
                break


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that is not assigned yet
            yield None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_module_state(value: Any, function: FunctionType) -> bool:
    if isinstance(value, FunctionType):
        return value.__module__ == function.__module__
    return isinstance(value, (bool, int, float, str, tuple, frozenset, torch.dtype))
