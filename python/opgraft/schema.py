"""Ops as their schema describes them: names, arguments, defaults, and a call bound to them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from opgraft._keys import BACKEND_KEYS
from opgraft.errors import RegistrationError


class Argument:
    """One argument of an op's schema.

    Attributes:
        name: what the schema calls it.
        kind: the schema's type, such as `"Tensor"`, `"Optional[Tensor]"`, `"List[int]"`.
        keyword_only: whether it is given by name.
        required: whether it has no default.
        default: the default, in Python's types; None where there is none.
        written: whether the op writes to it (`Tensor(a!)`).
        list_size: of a list that a single number is repeated for (`int[2]`); 0 for no list.
    """

    __slots__ = ("default", "keyword_only", "kind", "list_size", "name", "required", "written")

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        keyword_only: bool,
        required: bool,
        default: Any,
        written: bool,
        list_size: int,
    ) -> None:
        self.name = name
        self.kind = kind
        self.keyword_only = keyword_only
        self.required = required
        self.default = default
        self.written = written
        self.list_size = list_size

    @property
    def is_tensor(self) -> bool:
        return self.kind in ("Tensor", "Optional[Tensor]")


class Op:
    """An overload of an operator, with what its schema says.

    Get one with :func:`resolve`; there is one object per overload.
    """

    def __init__(self, overload: OpOverload) -> None:
        schema = overload._schema
        self.overload = overload
        self.name = qualified_name(overload)
        self.arguments = tuple(_argument(arg) for arg in schema.arguments)
        self.positional = tuple(a for a in self.arguments if not a.keyword_only)
        self.keyword_only = tuple(a for a in self.arguments if a.keyword_only)
        self.returns = tuple(schema.returns)
        self.mutates = any(a.written for a in self.arguments)
        self.is_random = torch.Tag.nondeterministic_seeded in overload.tags
        #: Where each argument stands, and its kind, by name.
        self.index = {a.name: i for i, a in enumerate(self.arguments)}
        self.kinds = {a.name: a.kind for a in self.arguments}

    def __repr__(self) -> str:
        return f"<Op {self.name}>"

    @property
    def registration_name(self) -> str:
        """The name as `torch.library.Library.impl` wants it: without the namespace."""
        return self.name.split("::", 1)[1]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Bind a call to the schema, defaults filled in.

        torch drops trailing arguments that equal their default before it calls a kernel written in
        Python; here they come back, so that `cond` and `impl` always see all of them.

        Raises:
            TypeError: the arguments do not fit the schema.
        """
        if len(args) > len(self.positional):
            raise TypeError(f"{self.name} takes {len(self.positional)} positional arguments")
        values = [a.default for a in self.arguments]
        bound = set(range(len(args)))
        values[: len(args)] = args
        for name, value in kwargs.items():
            index = self.index.get(name)
            if index is None or index in bound:
                problem = "has no argument" if index is None else "got twice the argument"
                raise TypeError(f"{self.name} {problem} {name!r}: {self.overload._schema}")
            values[index] = value
            bound.add(index)
        missing = [a.name for i, a in enumerate(self.arguments) if a.required and i not in bound]
        if missing:
            raise TypeError(f"{self.name} misses {', '.join(missing)}: {self.overload._schema}")
        return Call(self, tuple(map(_as_dispatched, self.arguments, values)))


class Call:
    """A call of an op: every argument's value, in the schema's order."""

    __slots__ = ("op", "values")

    def __init__(self, op: Op, values: tuple[Any, ...]) -> None:
        self.op = op
        self.values = values

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments; lists are copies, so that an impl may change its own."""
        return tuple(map(_fresh, self.values[: len(self.op.positional)]))

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword-only arguments by name."""
        rest = map(_fresh, self.values[len(self.op.positional) :])
        return {a.name: value for a, value in zip(self.op.keyword_only, rest, strict=True)}

    @property
    def named(self) -> dict[str, Any]:
        return {a.name: value for a, value in zip(self.op.arguments, self.values, strict=True)}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor among the arguments, those inside lists too."""
        for value in self.values:
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from (item for item in value if isinstance(item, torch.Tensor))


def qualified_name(overload: OpOverload) -> str:
    """An overload's name as torch prints it.

    >>> import torch
    >>> qualified_name(torch.ops.aten.mul.Tensor), qualified_name(torch.ops.aten._softmax.default)
    ('aten::mul.Tensor', 'aten::_softmax')
    """
    return str(overload._name)


def resolve(op: str | OpOverload | OpOverloadPacket | Op) -> Op:
    """The :class:`Op` for a name as torch prints it, an `OpOverload`, or a packet with a default.

    Raises:
        RegistrationError: there is no such op, or the name leaves the overload open.

    >>> resolve("aten::mul.Tensor")
    <Op aten::mul.Tensor>
    """
    if isinstance(op, Op):
        return op
    if isinstance(op, OpOverload):
        return _op(op)
    if isinstance(op, OpOverloadPacket):
        return _op(_overload(op, "default"))
    if not isinstance(op, str) or "::" not in op:
        raise RegistrationError(
            f"{op!r} does not name an op: give it as torch prints it, such as 'aten::mul.Tensor' "
            "or 'aten::_softmax', or as the OpOverload, such as torch.ops.aten.mul.Tensor"
        )
    namespace, symbol = op.split("::", 1)
    return resolve_symbol(namespace, symbol)


def resolve_symbol(namespace: str, symbol: str) -> Op:
    """The op for a namespace and a symbol: `("aten", "mul.Tensor")`; no overload means `default`.

    Raises:
        RegistrationError: there is no such op or overload; the message lists near names.
    """
    name, _, overload = symbol.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
    except AttributeError:
        packet = None
    if not isinstance(packet, OpOverloadPacket):
        raise RegistrationError(f"there is no op {namespace}::{name}{_near(namespace, name)}")
    return _op(_overload(packet, overload or "default"))


def _overload(packet: OpOverloadPacket, overload: str) -> OpOverload:
    names = packet.overloads()
    if overload not in names:
        listed = ", ".join(f"{packet._qualified_op_name}.{name}" for name in names)
        raise RegistrationError(
            f"{packet._qualified_op_name} has no overload {overload!r}: name one of {listed}"
        )
    return getattr(packet, overload)


@cache
def _op(overload: OpOverload) -> Op:
    return Op(overload)


def _near(namespace: str, name: str) -> str:
    known = {full.split(".")[0] for full in torch._C._dispatch_get_all_op_names()}
    if not any(full.startswith(f"{namespace}::") for full in known):
        return f"; import the library that defines the namespace {namespace!r} first"
    near = difflib.get_close_matches(f"{namespace}::{name}", known, n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""


def _fresh(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _as_dispatched(argument: Argument, value: Any) -> Any:
    """What the dispatcher makes of a value: a tensor of a number, a list of an integer."""
    if not isinstance(value, (bool, int, float, complex)):
        return value
    if argument.is_tensor:
        from opgraft.wrapped_number import wrapped_number

        return wrapped_number(value)
    return [value] * argument.list_size if argument.list_size else value


# A schema holds default dtypes and memory formats as the numbers that C++ gives them.
_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128, torch.bool),
)
_MEMORY_FORMATS = (
    *(torch.contiguous_format, torch.preserve_format),
    *(torch.channels_last, torch.channels_last_3d),
)


def _typed(kind: str, default: Any) -> Any:
    if isinstance(default, int) and "ScalarType" in kind:
        return _DTYPES[default]
    if isinstance(default, int) and "MemoryFormat" in kind:
        return _MEMORY_FORMATS[default]
    return default


def _argument(arg: Any) -> Argument:
    required = not arg.has_default_value()
    kind = str(arg.real_type)
    default = None if required else _typed(kind, arg.default_value)
    alias = arg.alias_info
    return Argument(
        name=arg.name,
        kind=kind,
        keyword_only=arg.kwarg_only,
        required=required,
        default=default,
        written=alias is not None and alias.is_write,
        list_size=(arg.N or 1) if "List[" in kind else 0,
    )


def check_dispatch_key(dispatch_key: str) -> None:
    """Refuse a dispatch key at which an override makes no sense.

    Raises:
        RegistrationError: it is not a dense backend key.
    """
    if dispatch_key in BACKEND_KEYS and hasattr(torch._C.DispatchKey, dispatch_key):
        return
    mend = f"use a backend key, one of {', '.join(BACKEND_KEYS)}"
    if dispatch_key == "Meta" or str(dispatch_key).startswith("Composite"):
        reason = "is not where a kernel runs: an override there would change shape inference and"
        reason += " decompositions"
    elif str(dispatch_key).startswith(("Autograd", "Autocast", "FuncTorch")):
        reason = "is above the kernels: an override there would lose the op's derivative or casting"
    else:
        reason = "is not a dense backend's dispatch key"
    raise RegistrationError(f"dispatch_key={dispatch_key!r} {reason}; {mend}")


def check_accepts(
    function: Callable[..., Any], op: Op, *, what: str, leading: Sequence[str] = ()
) -> None:
    """Refuse a callable whose parameters cannot take the op's arguments.

    Args:
        function: the impl or the condition.
        op: whose arguments it will get: positional by position, keyword-only by name.
        what: names the callable in the error.
        leading: what comes before the op's own arguments (`["DispatchKeySet"]`).

    Raises:
        RegistrationError: the call could never bind. Callables without a signature pass.
    """
    if not callable(function):
        raise RegistrationError(f"{what} for {op.name} must be callable, not {function!r}")
    names = [a.name for a in op.keyword_only]
    if _plainly_accepts(function, len(leading) + len(op.positional), names):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins and some extension types have none
        return
    args = [*leading, *(a.name for a in op.positional)]
    try:
        signature.bind(*args, **dict.fromkeys(names))
    except TypeError as error:
        wanted = ", ".join(args + [f"{name}=" for name in names])
        raise RegistrationError(
            f"{what} {_describe(function)}{signature} cannot take the arguments of {op.name}: "
            f"{error}. It is called with ({wanted}); the schema is {op.overload._schema}"
        ) from None


def _plainly_accepts(function: Callable[..., Any], positional: int, names: list[str]) -> bool:
    """Whether a function surely takes so many arguments by position, and these by name.

    False where that takes `inspect.signature` to tell, which is 20 times as slow.
    """
    if isinstance(function, partial) and not function.keywords and not vars(function):
        positional, function = positional + len(function.args), function.func
    if not isinstance(function, FunctionType) or vars(function):  # what decorators leave behind
        return False
    code, defaults = function.__code__, len(function.__defaults__ or ())
    first = code.co_argcount
    by_name = code.co_varnames[first : first + code.co_kwonlyargcount]
    return (
        not code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        and first - defaults <= positional <= first
        and set(names) <= set(by_name)
        and set(by_name) <= {*names, *(function.__kwdefaults__ or ())}
    )


def _describe(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
