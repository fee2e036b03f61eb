"""What a callable does, as a hash that is the same in every process.

A graph that an impl is traced into is that impl's work with all that it has read on the way:
helpers, globals, closures, the environment. :func:`reach` describes all of it, or says that it
cannot; what cannot be described must not be found again in a cache.
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

#: Packages with more files than this are told apart by their files' sizes and times.
_MAX_FILES = 500
#: Told apart by their version, which is in the caches' keys.
_LIBRARIES = ("torch", "triton", "opgraft")
#: Without a state that could matter.
_PURE = ("builtins", "math", "cmath", "operator", "_operator", "itertools", "typing", "numbers")
_TRUSTED = frozenset(_LIBRARIES + _PURE)
#: Through these a function reaches what no name in it tells.
_BLIND = {
    *("getattr", "setattr", "delattr", "globals", "locals", "vars", "dir", "eval", "exec"),
    *("compile", "open", "input", "id", "hash", "__import__", "breakpoint"),
}
#: Attributes through which a function reaches what no name in it tells.
_BLIND_ATTRIBUTES = {"__globals__", "__builtins__", "__getattribute__", "__subclasses__"}
#: Their instances are classes as any are.
_METACLASSES = (type, abc.ABCMeta, enum.EnumMeta)
#: In every class body, and of no effect on what its methods compute.
_OF_CLASSES = {
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
#: How many values are looked at: what reaches more is not described.
_MOST = 5000


def digest(value: Any) -> str:
    """A hash of a callable's code and of what it refers to in its own module.

    Code that another module holds counts by name only.

    >>> digest(lambda x: x + 1) == digest(lambda x: x + 1), digest(len) == digest(abs)
    (True, False)
    """
    return _Description(elsewhere=False).of(value)


def sources(function: Callable[..., Any]) -> str:
    """A hash of all Python sources of the top-level package that a callable comes from."""
    name = getattr(function, "__module__", None) or type(function).__module__
    file = _file(name.partition(".")[0])
    if file is None:  # an interactive session
        return ""
    path = Path(file)
    paths = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    if len(paths) > _MAX_FILES:
        return _hash(f"{each} {each.stat().st_size} {each.stat().st_mtime_ns}" for each in paths)
    return _hash(hashlib.sha256(each.read_bytes()).hexdigest() for each in paths)


def _file(package: str) -> str | None:
    """The file of a top-level module, which is not imported for that."""
    if package in sys.modules:
        return getattr(sys.modules[package], "__file__", None)
    spec = importlib.util.find_spec(package)
    return spec.origin if spec is not None else None


def _hash(lines: Any) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def reach(*values: Any) -> str | None:
    """A hash of all that callables can read, wherever it is; None where that cannot be told.

    >>> factors = [2]
    >>> before = reach(functools.partial(max, factors))
    >>> factors[0] = 3
    >>> before is not None and reach(functools.partial(max, factors)) != before
    True
    >>> import time
    >>> print(reach(time.time))
    None
    """
    description = _Description(elsewhere=True)
    found = description.of(values)
    return found if description.is_complete else None


def _is_trusted(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _TRUSTED


class _Description:
    """Lines that describe values; one that was described before is only named.

    Args:
        elsewhere: whether to go into what other modules hold.
    """

    def __init__(self, *, elsewhere: bool) -> None:
        self._elsewhere = elsewhere
        self._lines: list[str] = []
        #: By id, with the value itself, so that no other one gets its id.
        self._seen: dict[int, tuple[int, Any]] = {}
        self.is_complete = True

    def of(self, value: Any) -> str:
        self._add(value)
        return hashlib.sha256("\n".join(self._lines).encode()).hexdigest()

    def _say(self, *what: object) -> None:
        self._lines.append(" ".join(map(str, what)))

    def _give_up(self, value: Any) -> None:
        self.is_complete = False
        kind = type(value)
        self._say("?", kind.__module__, kind.__qualname__, getattr(value, "__qualname__", ""))

    def _add(self, value: Any) -> None:
        if type(value) in _CONSTANTS:
            self._say(type(value).__name__, repr(value))
        elif id(value) in self._seen:
            self._say("#", self._seen[id(value)][0])
        elif len(self._seen) >= _MOST:
            self._give_up(value)
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
            self._say("op", value)
        elif isinstance(value, ModuleType):
            self._say("module", value.__name__)
            # What is read of it is told by the names in a function that has it as a global only.
            self.is_complete &= not self._elsewhere or _is_trusted(value.__name__)
        elif isinstance(value, (BuiltinFunctionType, WrapperDescriptorType, MethodWrapperType)):
            self._builtin(value)
        elif (key := _of_triton(value)) is not None:
            self._say("kernel", key)
        else:
            self._object(value)

    def _parts(self, what: str, parts: Iterable[Any]) -> None:
        values = list(parts)
        self._say(what, len(values))
        for value in values:
            self._add(value)

    def _set(self, values: Iterable[Any]) -> None:
        values = list(values)
        self._say("set", *sorted(map(repr, values)))
        if not all(type(value) in _CONSTANTS for value in values):
            self._give_up(values)

    def _enum(self, value: enum.Enum) -> None:
        self._say(type(value).__qualname__, value.name, repr(value.value))
        if not self._elsewhere:
            return
        held = {name: each for name, each in vars(value).items() if name != "__objclass__"}
        methods = [
            each
            for each in vars(type(value)).values()
            if isinstance(each, (FunctionType, property, classmethod, staticmethod))
            and getattr(each, "__module__", None) != "enum"
        ]
        self._parts("enum", (held, *methods))

    def _lazy(self, value: Lazy) -> None:
        self._say(repr(value), sources(value))
        if not self._elsewhere:
            return
        if value.__module__ in sys.modules:
            self._add(value.load())
        else:
            self.is_complete = False  # it is not imported to describe it

    def _builtin(self, value: Any) -> None:
        self._say("builtin", getattr(value, "__module__", ""), value.__qualname__)
        bound = getattr(value, "__self__", None)
        if bound is not None and not isinstance(bound, ModuleType):
            self._add(bound)
        elif not _is_trusted(getattr(value, "__module__", None)) or value.__name__ in _BLIND:
            self.is_complete = False

    def _object(self, value: Any) -> None:
        kind = type(value)
        if not self._elsewhere:
            self._say(kind.__module__, kind.__qualname__, getattr(value, "__qualname__", ""))
            self._parts("object", (kind.__dict__.get("__call__"), getattr(value, "__dict__", None)))
        elif _is_trusted(kind.__module__) or not hasattr(value, "__dict__") or _has_more(kind):
            self._give_up(value)  # a tensor, a generator of numbers, a lock, what C keeps
        else:
            self._parts("object", (kind, vars(value)))

    def _class(self, kind: type) -> None:
        self._say("class", kind.__module__, kind.__qualname__)
        if _is_trusted(kind.__module__) or not self._elsewhere:
            return
        if type(kind) not in _METACLASSES:
            self._add(type(kind))
        for base in kind.__mro__:
            if _is_trusted(base.__module__):
                self._say("base", base.__module__, base.__qualname__)
                continue
            held = {name: each for name, each in vars(base).items() if name not in _OF_CLASSES}
            self._parts(base.__qualname__, [part for item in held.items() for part in item])

    def _function(self, function: FunctionType) -> None:
        self._say("function", function.__module__, function.__qualname__)
        # Not by `__module__`, which functools.wraps assigns.
        if self._elsewhere and _is_trusted(function.__globals__.get("__name__")):
            self._parts("holds", _cells(function))  # it may call what somebody gave it
            return
        self._add(function.__code__)
        held = (function.__defaults__, function.__kwdefaults__, vars(function) or None)
        self._parts("holds", (*held, *_cells(function)))
        names = sorted(set(_names(function.__code__)))
        for name in names:
            self._global(name, names, function)
        if self._elsewhere:
            self._imports(function.__code__, names, function)
            self.is_complete &= _BLIND_ATTRIBUTES.isdisjoint(names)
            self.is_complete &= not _hands_a_module_on(function.__code__, function.__globals__)

    def _global(self, name: str, names: list[str], function: FunctionType) -> None:
        if name in function.__globals__:
            value = function.__globals__[name]
            if self._elsewhere or _is_module_state(value, function):
                self._say("global", name)
                self._module_or_value(value, names)
        elif name in _BLIND and hasattr(builtins, name):
            self.is_complete = False

    def _module_or_value(self, value: Any, names: list[str]) -> None:
        if isinstance(value, ModuleType):
            self._module(value, names, set())
        else:
            self._add(value)

    def _module(self, module: ModuleType, names: list[str], asked: set[str]) -> None:
        self._say("module", module.__name__)
        if _is_trusted(module.__name__) or module.__name__ in asked:
            return
        asked.add(module.__name__)
        # Any of a function's names may be asked of the module, or of one in it.
        for name in names:
            if name in vars(module):
                self._say(module.__name__, name)
                held = vars(module)[name]
                if isinstance(held, ModuleType):
                    self._module(held, names, asked)
                else:
                    self._add(held)

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
        self._say(code.co_code.hex())
        self._say(code.co_names, code.co_varnames, code.co_freevars)
        self._parts("constants", code.co_consts)


def _imported(name: str, level: object, function: FunctionType) -> str | None:
    """The full name of a module that a function imports; None where it cannot be told."""
    if not isinstance(level, int):
        return None
    try:
        package = function.__globals__.get("__package__")
        return importlib.util.resolve_name("." * level + name, package) if level else name
    except ImportError:
        return None


def _of_triton(value: Any) -> str | None:
    """What Triton itself tells its kernels apart by: their code, and what that refers to."""
    if type(value).__module__.partition(".")[0] != "triton":
        return None
    key = getattr(value, "cache_key", None)
    return key if isinstance(key, str) else None


def _has_more(kind: type) -> bool:
    """Whether instances hold more than their `__dict__`: slots, or what a base in C keeps."""
    return any(
        vars(base).get("__slots__") or (_is_trusted(base.__module__) and not _is_plain(base))
        for base in kind.__mro__
    )


def _is_plain(base: type) -> bool:
    return base in (object, torch.nn.Module) or base.__module__ == "typing"


def _hands_a_module_on(code: CodeType, variables: dict[str, Any]) -> bool:
    """Whether code does more with a module than to read attributes that the module has.

    What else does (a helper that it is passed to, its `__dict__` or `__getattr__`, another variable
    for it) could read any of them.
    """
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    imported = set(_imported_variables(instructions))
    for index, instruction in enumerate(instructions):
        if instruction.opname.startswith(("STORE_", "DELETE_", "MAKE_CELL", "COPY_FREE")):
            continue
        name = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if _ends_in_a_module(variables.get(name), instructions[index + 1 :]):
                return True
        elif not imported.isdisjoint(name if isinstance(name, tuple) else (name,)):
            after = instructions[index + 1].opname
            if instruction.opname in ("LOAD_FAST_LOAD_FAST", "LOAD_CLOSURE") or (
                instruction.opname.startswith("LOAD_") and after not in _READS
            ):
                return True
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(_hands_a_module_on(each, variables) for each in nested)


_READS = ("LOAD_ATTR", "LOAD_METHOD")


def _ends_in_a_module(value: Any, reads: list[dis.Instruction]) -> bool:
    """Whether a value, or what is read of it at once, is a module that is not torch's."""
    for read in reads:
        if not isinstance(value, ModuleType) or _is_trusted(value.__name__):
            return False
        if read.opname not in _READS or read.argval not in vars(value):
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
