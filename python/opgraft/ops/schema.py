"""Ops as their schemas describe them: names, arguments, defaults, and calls bound to them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from opgraft.errors import RegistrationError
from opgraft.ops.dispatch_keys import BACKEND_KEYS
from opgraft.ops.lazy_impl import Lazy


class HiddenWrites:
    """Arguments that an op writes to without declaring it in its schema.

    Attributes:
        arguments: their names.
        only_if: the name of a boolean argument: only if it is true does the op write; empty if
            there is none.
    """

    __slots__ = ("arguments", "only_if")

    def __init__(self, arguments: tuple[str, ...], only_if: str = "") -> None:
        self.arguments = arguments
        self.only_if = only_if


_STATISTICS = ("running_mean", "running_var")

#: Ops that write to arguments without declaring it in their schemas, `out=` variants included. A
#: test searches for others with PyTorch's own samples.
HIDDEN_WRITES = {
    # Training updates the running statistics.
    "aten::native_batch_norm": HiddenWrites(_STATISTICS, "training"),
    "aten::cudnn_batch_norm": HiddenWrites(_STATISTICS, "training"),
    "aten::miopen_batch_norm": HiddenWrites(_STATISTICS, "training"),
    "aten::batch_norm": HiddenWrites(_STATISTICS, "training"),
    "aten::_batch_norm_impl_index": HiddenWrites(_STATISTICS, "training"),
    "aten::instance_norm": HiddenWrites(_STATISTICS, "use_input_stats"),
    "aten::batch_norm_update_stats": HiddenWrites(_STATISTICS),
    "aten::batch_norm_gather_stats": HiddenWrites(_STATISTICS),
    "aten::batch_norm_gather_stats_with_counts": HiddenWrites(_STATISTICS),
    # cuDNN's and MIOpen's dropout advances its random state. The backwards overwrite what the
    # forward reserved (autograd passes a copy if it is needed again).
    "aten::_cudnn_rnn": HiddenWrites(("dropout_state",)),
    "aten::_cudnn_rnn_backward": HiddenWrites(("dropout_state", "reserve")),
    "aten::miopen_rnn": HiddenWrites(("dropout_state",)),
    "aten::miopen_rnn_backward": HiddenWrites(("dropout_state", "reserve")),
    # Each weight becomes a view of the buffer that is returned.
    "aten::_cudnn_rnn_flatten_weight": HiddenWrites(("weight_arr",)),
    # `copy_` calls these on out-of-tree backends.
    "aten::_copy_from": HiddenWrites(("dst",)),
    "aten::_copy_from_and_resize": HiddenWrites(("dst",)),
    # Its schema declares it since torch 2.6. Libraries have copies of the old schema.
    "aten::rrelu_with_noise": HiddenWrites(("noise",), "training"),
    "aten::rrelu_with_noise_": HiddenWrites(("noise",), "training"),
    # Accumulates in the buffer that the ranks share.
    "symm_mem::one_shot_all_reduce_copy": HiddenWrites(("symm_buffer",)),
}
_NO_HIDDEN_WRITES = HiddenWrites(())


class Argument:
    """One argument of an op's schema.

    Attributes:
        name: what the schema calls it.
        kind: the schema's type, such as `"Tensor"`, `"Optional[Tensor]"`, `"List[int]"`.
        keyword_only: whether it is given by name.
        required: whether it has no default.
        default: the default, in Python's types; None where there is none.
        written: whether the op writes to it, declared in the schema (`Tensor(a!)`) or not.
        declares_write: whether the schema declares that the op writes to it.
        written_only_if: the boolean argument that must be true for the op to write; empty if none.
        is_choice: whether it is an integer, or a list of them, that selects a behaviour, as `dim`
            does. Such an integer cannot be symbolic. Sizes can.
        list_size: for a list, how often a single number is repeated (`int[2]`); 0 if it is no list.
    """

    __slots__ = (
        *("default", "is_choice", "declares_write", "keyword_only", "kind", "list_size", "name"),
        *("required", "written", "written_only_if"),
    )

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        keyword_only: bool,
        required: bool,
        default: Any,
        written: bool,
        declares_write: bool,
        written_only_if: str,
        is_choice: bool,
        list_size: int,
    ) -> None:
        self.name = name
        self.kind = kind
        self.keyword_only = keyword_only
        self.required = required
        self.default = default
        self.written = written
        self.declares_write = declares_write
        self.written_only_if = written_only_if
        self.is_choice = is_choice
        self.list_size = list_size

    @property
    def is_tensor(self) -> bool:
        return self.kind in ("Tensor", "Optional[Tensor]")

    @property
    def is_list_of_tensors(self) -> bool:
        return "Tensor]" in self.kind and not self.is_tensor


#: They apply dropout between their layers.
_UNTAGGED = frozenset({"aten::quantized_lstm", "aten::quantized_gru"})


class Op:
    """An overload of an operator, with the facts of its schema.

    Get one with :func:`resolve`; there is one object per overload.
    """

    def __init__(self, overload: OpOverload) -> None:
        schema = overload._schema
        self.overload = overload
        self.name = qualified_name(overload)
        hidden = HIDDEN_WRITES.get(self.name.partition(".")[0], _NO_HIDDEN_WRITES)
        self.arguments = tuple(_argument(arg, hidden) for arg in schema.arguments)
        self.positional = tuple(a for a in self.arguments if not a.keyword_only)
        self.keyword_only = tuple(a for a in self.arguments if a.keyword_only)
        self.returns = tuple(schema.returns)
        #: Whether its schema declares that it writes to an argument.
        self.mutates = any(a.declares_write for a in self.arguments)
        #: Whether it may write to one, declared or not. Whatever runs it a second time must know.
        self.writes = any(a.written for a in self.arguments)
        #: Whether its schema declares that it writes to or returns (a view of) an argument.
        self.writes_or_aliases = any(
            a.alias_info is not None for a in (*schema.arguments, *schema.returns)
        )
        self._returns_tensors = all("Tensor" in str(each.type) for each in self.returns)
        #: Whether it draws random numbers: not each op that does has torch's tag.
        self.is_random = (
            torch.Tag.nondeterministic_seeded in overload.tags
            or any("Generator" in a.kind for a in self.arguments)
            or schema.name in _UNTAGGED
        )
        #: The position of each argument, and its kind, by name.
        self.index = {a.name: i for i, a in enumerate(self.arguments)}
        self.kinds = {a.name: a.kind for a in self.arguments}

    def __repr__(self) -> str:
        return f"<Op {self.name}>"

    @property
    def registration_name(self) -> str:
        """The name for `torch.library.Library.impl`: without the namespace."""
        return self.name.split("::", 1)[1]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Bind a call to the schema, defaults filled in.

        torch drops trailing arguments that equal their default before it calls a kernel in Python.
        This adds them again, so that `cond` and `impl` always get all arguments.

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

    def as_returned(self, result: Any) -> Any:
        """A result as the kernel returned it. torch unwraps wrapped numbers, so wrap them again."""
        if isinstance(result, torch.Tensor) or not self._returns_tensors:
            return result
        from opgraft.ops.wrapped_number import as_tensors

        return as_tensors(result)


class Call:
    """A call of an op: every argument's value, in the schema's order."""

    __slots__ = ("_found", "op", "values")

    def __init__(self, op: Op, values: tuple[Any, ...]) -> None:
        self.op = op
        self.values = values
        # The tensors among them, which routing one call asks for a dozen times.
        self._found: tuple[torch.Tensor, ...] | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments. Lists are copied, so that an impl may change them."""
        return tuple(map(_copied_list, self.values[: len(self.op.positional)]))

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword-only arguments by name."""
        rest = map(_copied_list, self.values[len(self.op.positional) :])
        return {a.name: value for a, value in zip(self.op.keyword_only, rest, strict=True)}

    @property
    def named(self) -> dict[str, Any]:
        return {a.name: value for a, value in zip(self.op.arguments, self.values, strict=True)}

    @property
    def writes(self) -> bool:
        """Whether the op writes to an argument of this call."""
        return any(True for _ in self.written())

    def written(self) -> Iterator[tuple[Argument, torch.Tensor]]:
        """Every tensor that this call writes to, with its argument."""
        if not self.op.writes:
            return
        for argument, value in zip(self.op.arguments, self.values, strict=True):
            only_if = argument.written_only_if
            if argument.written and (not only_if or self.values[self.op.index[only_if]]):
                for tensor in _tensors(value):
                    yield argument, tensor

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor among the arguments, also those in lists."""
        if self._found is None:
            self._found = tuple(tensor for value in self.values for tensor in _tensors(value))
        return iter(self._found)

    def changed(self, change: Callable[[Any], Any]) -> Call:
        """The call with each of its arguments changed, and in a list each of its elements.

        >>> doubled = resolve("aten::cat").bind(([torch.ones(1)], 0), {}).changed(lambda v: 2 * v)
        >>> doubled.values
        ([tensor([2.])], 0)
        """
        return Call(self.op, tuple(_changed(value, change) for value in self.values))

    def named_tensors(self) -> Iterator[tuple[Argument, torch.Tensor]]:
        """Every tensor among the arguments, each with its argument."""
        for argument, value in zip(self.op.arguments, self.values, strict=True):
            yield from ((argument, tensor) for tensor in _tensors(value))


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
    namespace, symbol = _parts(op) if isinstance(op, str) else ("", "")
    if not namespace:
        near = _suggestions("aten", op.rpartition(".")[2]) if isinstance(op, str) else ""
        raise RegistrationError(
            f"{op!r} does not name an op{near or ':'} give it as torch prints it, such as "
            "'aten::mul.Tensor' or 'aten::_softmax', or as the OpOverload, such as "
            "torch.ops.aten.mul.Tensor"
        )
    return resolve_symbol(namespace, symbol)


def _parts(name: str) -> tuple[str, str]:
    """An op's namespace and symbol; empty ones where the name has no namespace.

    >>> _parts("aten::mul.Tensor"), _parts("torch.ops.aten.mul.Tensor"), _parts("F.rms_norm")
    (('aten', 'mul.Tensor'), ('aten', 'mul.Tensor'), ('', ''))
    """
    if "::" in name:
        namespace, symbol = name.split("::", 1)
        return namespace, symbol
    # As Python writes it: torch.ops.aten.mul.Tensor, and how an OpOverload prints.
    namespace, _, symbol = name.removeprefix("torch.ops.").partition(".")
    is_op = name.startswith("torch.ops.") or namespace == "aten"
    return (namespace, symbol) if is_op and symbol else ("", "")


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
        raise RegistrationError(
            f"there is no op {namespace}::{name}{_suggestions(namespace, name)}"
        )
    return _op(_overload(packet, overload or "default"))


def _overload(packet: OpOverloadPacket, overload: str) -> OpOverload:
    if overload in packet.overloads() and _is_dispatched(packet, overload):
        return getattr(packet, overload)
    names = _overloads(packet)
    listed = ", ".join(
        packet._qualified_op_name + (f".{name}" if name != "default" else "") for name in names
    )
    raise RegistrationError(
        f"{packet._qualified_op_name} has no overload {overload!r}: name one of {listed}"
    )


def resolve_all(namespace: str, name: str) -> list[Op]:
    """The ops of all overloads that the dispatcher has of one name.

    >>> [op.name for op in resolve_all("aten", "exp")]  # not TorchScript's `exp.float`
    ['aten::exp', 'aten::exp.out']
    """
    packet = getattr(getattr(torch.ops, namespace), name)
    return [_op(getattr(packet, overload)) for overload in _overloads(packet)]


def _overloads(packet: OpOverloadPacket) -> list[str]:
    return [name for name in packet.overloads() if _is_dispatched(packet, name)]


def _is_dispatched(packet: OpOverloadPacket, overload: str) -> bool:
    """Whether the dispatcher has the overload. TorchScript has more, for Python numbers."""
    name = packet._qualified_op_name + (f".{overload}" if overload != "default" else "")
    return bool(torch._C._dispatch_has_kernel(name))  # whether the dispatcher has it


def is_current(op: Op) -> bool:
    """Whether it is what torch has under its name now.

    What is not has been defined anew; or a library was freed that once defined an op of that name,
    after which torch makes another object for the same op.

    >>> is_current(resolve("aten::mul.Tensor"))
    True
    """
    namespace, _, symbol = op.name.partition("::")
    if namespace == "aten":  # PyTorch's own are never defined anew
        return True
    packet = getattr(getattr(torch.ops, namespace), symbol.partition(".")[0], None)
    return getattr(packet, op.overload._overloadname, None) is op.overload


def current(op: Op) -> Op:
    """What torch has under an op's name now: the same op, unless it was defined anew.

    Raises:
        RegistrationError: there is no op of that name any more.

    >>> current(resolve("aten::exp"))
    <Op aten::exp>
    """
    return op if is_current(op) else resolve(op.name)


@cache
def _op(overload: OpOverload) -> Op:
    return Op(overload)


def _suggestions(namespace: str, name: str) -> str:
    known = {full.split(".")[0] for full in torch._C._dispatch_get_all_op_names()}
    if not any(full.startswith(f"{namespace}::") for full in known):
        return f"; import the library that defines the namespace {namespace!r} first"
    whole = f"{namespace}::{name}"
    near = [whole] if whole in known else []
    near += [each for each in difflib.get_close_matches(whole, known, n=3) if each != whole]
    return f"; did you mean {', '.join(near)}?" if near else ""


# A function inside `Call.changed` that calls itself would be a reference cycle, and keep what
# `change` holds until garbage is collected: tensors of gigabytes.


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_changed(each, change) for each in value]
    return change(value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (item for item in value if isinstance(item, torch.Tensor))


def _copied_list(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _as_dispatched(argument: Argument, value: Any) -> Any:
    """The value that the dispatcher passes on: a tensor for a number, a list for an integer."""
    is_list = isinstance(value, (list, tuple))
    if not is_list and not isinstance(value, (bool, int, float, complex)):
        return value
    if argument.is_list_of_tensors if is_list else argument.is_tensor:
        from opgraft.ops.wrapped_number import as_tensors

        return as_tensors(value)
    return [value] * argument.list_size if argument.list_size and not is_list else value


# A schema holds default dtypes and memory formats as the integers of C++'s enums.
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


def _argument(arg: Any, hidden: HiddenWrites) -> Argument:
    required = not arg.has_default_value()
    kind = str(arg.real_type)
    default = None if required else _typed(kind, arg.default_value)
    alias = arg.alias_info
    declares_write = alias is not None and alias.is_write
    is_hidden = arg.name in hidden.arguments and not declares_write
    return Argument(
        name=arg.name,
        kind=kind,
        keyword_only=arg.kwarg_only,
        required=required,
        default=default,
        written=declares_write or is_hidden,
        declares_write=declares_write,
        written_only_if=hidden.only_if if is_hidden else "",
        is_choice=_is_choice(arg.real_type),
        list_size=(arg.N or 1) if "List[" in kind else 0,
    )


def _is_choice(declared: Any) -> bool:
    while declared.kind() in ("OptionalType", "ListType"):
        declared = declared.getElementType()
    return bool(declared.kind() == "IntType")


def check_dispatch_key(dispatch_key: str) -> None:
    """Refuse a dispatch key that an override cannot have.

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
    """Refuse a callable that cannot be called with the op's arguments.

    Args:
        function: the impl or the condition.
        op: the op whose arguments it will get: positional by position, keyword-only by name.
        what: the callable's name in the error.
        leading: names of parameters before the op's own arguments (`["DispatchKeySet"]`).

    Raises:
        RegistrationError: the call could never bind. Callables without a signature pass, and so do
            lazy impls.
    """
    if isinstance(function, Lazy):
        return
    if not callable(function):
        raise RegistrationError(f"{what} for {op.name} must be callable, not {function!r}")
    names = [a.name for a in op.keyword_only]
    if _surely_accepts(function, len(leading) + len(op.positional), names):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins and some extension types have no signature
        return
    args = [*leading, *(a.name for a in op.positional)]
    try:
        signature.bind(*args, **dict.fromkeys(names))
    except TypeError as error:
        wanted = ", ".join(args + [f"{name}=" for name in names])
        mend = ""
        if leading and _binds(signature, args[len(leading) :], names):
            mend = (
                ". It takes the op's own arguments: give cond=, which says for which calls it "
                "runs, or unconditional_override=True for all of them; with neither, it decides "
                "for itself, and gets the torch.DispatchKeySet first"
            )
        raise RegistrationError(
            f"{what} {_describe(function)}{signature} cannot take the arguments of {op.name}: "
            f"{error}. It is called with ({wanted}); the schema is {op.overload._schema}{mend}"
        ) from None


def _binds(signature: inspect.Signature, args: Sequence[str], names: Sequence[str]) -> bool:
    try:
        signature.bind(*args, **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def _surely_accepts(function: Callable[..., Any], positional: int, names: list[str]) -> bool:
    """Whether a function surely accepts so many arguments by position, and these by name.

    False if only `inspect.signature` can tell, which is 20 times as slow.
    """
    if isinstance(function, partial) and not function.keywords and not vars(function):
        positional, function = positional + len(function.args), function.func
    if not isinstance(function, FunctionType) or vars(function):  # decorators leave attributes
        return False
    code, defaults = function.__code__, len(function.__defaults__ or ())
    first = code.co_argcount
    by_name = code.co_varnames[first : first + code.co_kwonlyargcount]
    takes_more = bool(code.co_flags & inspect.CO_VARARGS)
    takes_any_name = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return (
        first - defaults <= positional
        and (takes_more or positional <= first)
        # A name that is also a positional parameter would be given twice.
        and (takes_any_name or set(names) <= set(by_name))
        and not set(names) & set(code.co_varnames[:first])
        and set(by_name) <= {*names, *(function.__kwdefaults__ or ())}
    )


def _describe(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
