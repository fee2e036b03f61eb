"""The nodes of conditions, which :mod:`opgraft.when` creates.

An expression is data, not code. It is checked against the schema at registration, evaluated on real
tensors, FakeTensors and SymInts, and printed as it was written. It can report which part failed for
a call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeAlias

import torch

from opgraft.when.grid import Grid

Arguments: TypeAlias = Mapping[str, Any]


class Undefined:
    """The value of a part that has no value, with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Failure(NamedTuple):
    """The first part of a condition that did not hold, and the values that it was evaluated on."""

    part: str
    saw: str

    def __str__(self) -> str:
        return f"{self.part} ({self.saw})"


class ExpressionError(TypeError):
    """An expression that can never be evaluated: an argument's name or type is wrong."""


# Binding powers for printing, weakest first, as in Python.
_COMPARE, _OR, _AND, _SUM, _PRODUCT, _UNARY, _ATOM = range(7)


class Expression:
    """Part of a condition. Immutable; two expressions are the same if they print the same."""

    precedence: ClassVar[int] = _ATOM
    # `==` builds a comparison, so expressions are hashed by identity.
    __hash__ = object.__hash__

    def evaluate(self, arguments: Arguments) -> Any:
        """The value for a call, given all arguments by name; :class:`Undefined` if it has none."""
        raise NotImplementedError

    def check(self, kinds: Mapping[str, str]) -> None:
        """Check against a schema: argument names to kinds such as `"Tensor"` or `"List[int]"`.

        Raises:
            ExpressionError: an argument does not exist or is of the wrong kind.
        """
        raise NotImplementedError

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} has no truth value before a call: combine conditions with & | ~ instead of "
            "and, or, not, and split a chained comparison: (1 <= n) & (n <= 3)"
        )

    def __rand__(self, other: object) -> NoReturn:
        _refuse(other)

    __ror__ = __rand__

    def _inner(self, child: Expression, tighter: bool = False) -> str:
        weakest = self.precedence + tighter
        return f"({child!r})" if child.precedence < weakest else repr(child)


class Number(Expression):
    """A part with a value: combine with `+ - * // %`, compare with `< <= == != >= >`."""

    def type(self, kinds: Mapping[str, str]) -> str:
        """The type of the value under a schema: `"int"`, `"number"`, `"capability"`, ..."""
        raise NotImplementedError

    def __add__(self, other: Operand) -> Number:
        return _arithmetic("+", self, other)

    def __radd__(self, other: int) -> Number:
        return _arithmetic("+", other, self)

    def __sub__(self, other: Operand) -> Number:
        return _arithmetic("-", self, other)

    def __rsub__(self, other: int) -> Number:
        return _arithmetic("-", other, self)

    def __mul__(self, other: Operand) -> Number:
        return _arithmetic("*", self, other)

    def __rmul__(self, other: int) -> Number:
        return _arithmetic("*", other, self)

    def __floordiv__(self, other: Operand) -> Number:
        return _arithmetic("//", self, other)

    def __rfloordiv__(self, other: int) -> Number:
        return _arithmetic("//", other, self)

    def __mod__(self, other: Operand) -> Number:
        return _arithmetic("%", self, other)

    def __rmod__(self, other: int) -> Number:
        return _arithmetic("%", other, self)

    def __truediv__(self, other: object) -> Number:
        raise TypeError(f"{self!r} / {other!r}: conditions compute with integers, use //")

    __rtruediv__ = __truediv__

    def __and__(self, other: object) -> NoReturn:
        _refuse(self)

    __or__ = __and__

    def __lt__(self, other: Any) -> Condition:
        return _compare("<", self, other)

    def __le__(self, other: Any) -> Condition:
        return _compare("<=", self, other)

    def __gt__(self, other: Any) -> Condition:
        return _compare(">", self, other)

    def __ge__(self, other: Any) -> Condition:
        return _compare(">=", self, other)

    def __eq__(self, other: object) -> Condition:  # type: ignore[override]
        return _compare("==", self, other)

    def __ne__(self, other: object) -> Condition:  # type: ignore[override]
        return _compare("!=", self, other)

    __hash__ = object.__hash__


Operand: TypeAlias = "Number | int"


class Condition(Expression):
    """A part that holds or does not: combine with `& | ~`."""

    def holds(self, arguments: Arguments) -> bool:
        """Whether the condition is true for a call, given all arguments by name."""
        value = self.evaluate(arguments)
        return not isinstance(value, Undefined) and bool(value)

    def failure(self, arguments: Arguments) -> Failure | None:
        """The first part that fails; None if the condition holds."""
        return None if self.holds(arguments) else Failure(repr(self), self._saw(arguments))

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"{self!r} == {other!r}: conditions are combined with & | ~, not compared")

    __hash__ = object.__hash__

    def _saw(self, arguments: Arguments) -> str:
        """The values that this part was evaluated on, as text."""
        raise NotImplementedError

    def __and__(self, other: Condition) -> Condition:
        return And(_parts(And, self) + _parts(And, _condition(other)))

    def __or__(self, other: Condition) -> Condition:
        return Or(_parts(Or, self) + _parts(Or, _condition(other)))

    def __invert__(self) -> Condition:
        return Not(self)


# ------------------------------------------------------------------ naming an argument


class Item(Number):
    """An item of a list argument: a number, or a tensor where a tensor is expected."""

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.index = index

    def evaluate(self, arguments: Arguments) -> Any:
        items = arguments[self.name]
        if items is None:
            return Undefined(f"{self.name} is None")
        if not -len(items) <= self.index < len(items):
            return Undefined(f"{self.name} has {len(items)} items")
        return items[self.index]

    def check(self, kinds: Mapping[str, str]) -> None:
        if not _kind(kinds, self.name, self).removeprefix("Optional[").startswith("List["):
            raise ExpressionError(f"{self!r}: {self.name!r} is a {kinds[self.name]}, not a list")

    def item_kind(self, kinds: Mapping[str, str]) -> str:
        self.check(kinds)
        return _unwrap("List", _unwrap("Optional", kinds[self.name]))

    def type(self, kinds: Mapping[str, str]) -> str:
        kind = self.item_kind(kinds)
        if "Tensor" in kind:
            raise ExpressionError(f"{self!r} is a tensor: ask for its size, dtype, ... instead")
        return _value_type(kind)

    def __repr__(self) -> str:
        return f"when.item({self.name!r}, {self.index})"


def _unwrap(outer: str, kind: str) -> str:
    return kind[len(outer) + 1 : -1] if kind.startswith(f"{outer}[") else kind


def _value_type(kind: str) -> str:
    """The type that values of a schema's kind are compared as; one for all numbers."""
    kind = _unwrap("Optional", kind)
    if kind in ("int", "SymInt"):
        return "int"
    return "number" if kind in ("float", "bool", "number", "complex") else kind


TensorName: TypeAlias = "str | Item"


def _name(tensor: TensorName) -> str:
    return repr(tensor)


def _plain(tensor: TensorName) -> str:
    return tensor if isinstance(tensor, str) else f"{tensor.name}[{tensor.index}]"


def tensor_of(arguments: Arguments, tensor: TensorName) -> torch.Tensor | Undefined:
    value = arguments[tensor] if isinstance(tensor, str) else tensor.evaluate(arguments)
    if isinstance(value, (torch.Tensor, Undefined)):
        return value
    return Undefined(f"{_plain(tensor)} is {value!r}")


def _dim(tensor: torch.Tensor, dim: int, name: str) -> Undefined | None:
    if -tensor.ndim <= dim < tensor.ndim:
        return None
    return Undefined(f"{name} has {tensor.ndim} dimensions")


def _kind(kinds: Mapping[str, str], name: str, where: Expression) -> str:
    if name in kinds:
        return kinds[name]
    raise ExpressionError(f"{where!r}: the op has no argument {name!r}; it has {', '.join(kinds)}")


def _check_tensor(kinds: Mapping[str, str], tensor: TensorName, where: Expression) -> None:
    if isinstance(tensor, Item):
        kind, mend = tensor.item_kind(kinds), ""
    else:
        kind = _kind(kinds, tensor, where)
        mend = f"; name one of its items: when.item({tensor!r}, 0)" if "List[Tensor" in kind else ""
    if kind not in ("Tensor", "Optional[Tensor]"):
        raise ExpressionError(f"{where!r}: {_plain(tensor)!r} is a {kind}, not a tensor{mend}")


# ------------------------------------------------------------------ numbers


class TensorNumber(Number):
    """A number of a tensor: those of `_TENSOR_NUMBERS`."""

    def __init__(self, function: str, tensor: TensorName, dim: Operand | None = None) -> None:
        self.function = function
        self.tensor = tensor
        self.dim = dim

    def evaluate(self, arguments: Arguments) -> Any:
        tensor = tensor_of(arguments, self.tensor)
        if isinstance(tensor, Undefined):
            return tensor
        dim = self.dim.evaluate(arguments) if isinstance(self.dim, Number) else self.dim
        if isinstance(dim, Undefined):
            return dim
        if dim is not None and (missing := _dim(tensor, dim, _plain(self.tensor))):
            return missing
        return _TENSOR_NUMBERS[self.function](tensor, dim)

    def check(self, kinds: Mapping[str, str]) -> None:
        _check_tensor(kinds, self.tensor, self)
        if isinstance(self.dim, Number):
            self.dim.check(kinds)
            if self.dim.type(kinds) != "int":
                raise ExpressionError(f"{self!r}: {self.dim!r} is not an integer")

    def type(self, kinds: Mapping[str, str]) -> str:
        return _TENSOR_NUMBER_TYPES.get(self.function, "int")

    def __repr__(self) -> str:
        dim = "" if self.dim is None else f", {self.dim}"
        return f"when.{self.function}({_name(self.tensor)}{dim})"


def _capability(tensor: torch.Tensor, _: object) -> tuple[int, int] | Undefined:
    # On ROCm the device type is "cuda" too, but its (major, minor) is no CUDA capability.
    if tensor.device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return Undefined(f"{tensor.device.type} has no CUDA compute capability here")
    return cuda_capability(tensor.device.index or 0)


@cache
def cuda_capability(index: int) -> tuple[int, int]:
    """A CUDA device's (major, minor). The driver is asked once per device."""
    return torch.cuda.get_device_capability(index)


_TENSOR_NUMBERS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    # Not `shape`, which is an error of a parameter that has no sizes yet.
    "size": lambda tensor, dim: tensor.size(dim),
    "stride": lambda tensor, dim: tensor.stride()[dim],
    "ndim": lambda tensor, _: tensor.ndim,
    "numel": lambda tensor, _: tensor.numel(),
    "itemsize": lambda tensor, _: tensor.itemsize,
    "device_capability": _capability,
    "dtype_of": lambda tensor, _: tensor.dtype,
}
# Of those that are not integers.
_TENSOR_NUMBER_TYPES = {"device_capability": "capability", "dtype_of": "ScalarType"}


class Length(Number):
    """The number of items of a list argument."""

    def __init__(self, name: str) -> None:
        self.name = name

    def evaluate(self, arguments: Arguments) -> Any:
        items = arguments[self.name]
        return Undefined(f"{self.name} is None") if items is None else len(items)

    def check(self, kinds: Mapping[str, str]) -> None:
        if "List[" not in _kind(kinds, self.name, self):
            raise ExpressionError(f"{self!r}: {self.name!r} is a {kinds[self.name]}, not a list")

    def type(self, kinds: Mapping[str, str]) -> str:
        return "int"

    def __repr__(self) -> str:
        return f"when.length({self.name!r})"


class Value(Number):
    """The value of a scalar argument."""

    def __init__(self, name: str) -> None:
        self.name = name

    def evaluate(self, arguments: Arguments) -> Any:
        value = arguments[self.name]
        return Undefined(f"{self.name} is None") if value is None else value

    def check(self, kinds: Mapping[str, str]) -> None:
        kind = _kind(kinds, self.name, self)
        if "Tensor" in kind:
            raise ExpressionError(
                f"{self!r}: {self.name!r} is a tensor, and reading its value would wait for the "
                "device; a condition sees metadata only"
            )
        if "List[" in kind:
            raise ExpressionError(
                f"{self!r}: {self.name!r} is a list; use when.item or when.length"
            )

    def type(self, kinds: Mapping[str, str]) -> str:
        return _value_type(kinds[self.name])

    def __repr__(self) -> str:
        return f"when.value({self.name!r})"


class Constant(Number):
    """A constant: a number, string, dtype or tuple."""

    def __init__(self, constant: Any) -> None:
        self.constant = constant

    def evaluate(self, arguments: Arguments) -> Any:
        return self.constant

    def check(self, kinds: Mapping[str, str]) -> None:
        pass

    def type(self, kinds: Mapping[str, str]) -> str:
        if (exact := _CONSTANTS.get(type(self.constant))) is not None:
            return exact
        return next(name for kind, name in _CONSTANTS.items() if isinstance(self.constant, kind))

    @property
    def precedence(self) -> int:  # type: ignore[override]
        return _UNARY if repr(self).startswith("-") else _ATOM

    def __repr__(self) -> str:
        if isinstance(self.constant, float) and not math.isfinite(self.constant):
            return f"float({str(self.constant)!r})"
        if isinstance(self.constant, torch.device):
            return f"torch.device({str(self.constant)!r})"
        return repr(self.constant)


# The types of constants, and their names, which are the schema's names for torch types.
_CONSTANTS: dict[type, str] = {
    bool: "number",
    int: "int",
    float: "number",
    tuple: "capability",
    str: "str",
    torch.dtype: "ScalarType",
    torch.layout: "Layout",
    torch.device: "Device",
    torch.memory_format: "MemoryFormat",
}
_CONSTANT_TYPES = tuple(_CONSTANTS)


ARITHMETIC: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "+": (_SUM, operator.add),
    "-": (_SUM, operator.sub),
    "*": (_PRODUCT, operator.mul),
    "//": (_PRODUCT, operator.floordiv),
    "%": (_PRODUCT, operator.mod),
}


class Arithmetic(Number):
    """Arithmetic on two integers."""

    def __init__(self, symbol: str, left: Number, right: Number) -> None:
        self.symbol = symbol
        self.left = left
        self.right = right

    def evaluate(self, arguments: Arguments) -> Any:
        left, right = self.left.evaluate(arguments), self.right.evaluate(arguments)
        for value in (left, right):
            if isinstance(value, Undefined):
                return value
        if self.symbol in ("//", "%") and right == 0:
            return Undefined(f"{self.right!r} is 0")
        result = ARITHMETIC[self.symbol][1](left, right)
        if type(result) is int and not -(2**63) <= result < 2**63:
            return Undefined(f"{self!r} leaves 64 bits")  # as in C++
        return result

    def check(self, kinds: Mapping[str, str]) -> None:
        for side in (self.left, self.right):
            side.check(kinds)
            if side.type(kinds) != "int":
                raise ExpressionError(f"{self!r}: {side!r} is not an integer")

    def type(self, kinds: Mapping[str, str]) -> str:
        return "int"

    @property
    def precedence(self) -> int:  # type: ignore[override]
        return ARITHMETIC[self.symbol][0]

    def __repr__(self) -> str:
        right = self._inner(self.right, tighter=True)
        return f"{self._inner(self.left)} {self.symbol} {right}"


class Dim(Arithmetic):
    """A dimension, counted from the first. Compared with a negative number, from the end."""

    def __init__(self, name: str, tensor: TensorName) -> None:
        self._ndim = TensorNumber("ndim", tensor)
        super().__init__("%", Value(name), self._ndim)

    def _counted(self, other: Any) -> Any:
        is_from_the_end = type(other) is int and other < 0
        return self._ndim + other if is_from_the_end else other

    def __lt__(self, other: Any) -> Condition:
        return super().__lt__(self._counted(other))

    def __le__(self, other: Any) -> Condition:
        return super().__le__(self._counted(other))

    def __gt__(self, other: Any) -> Condition:
        return super().__gt__(self._counted(other))

    def __ge__(self, other: Any) -> Condition:
        return super().__ge__(self._counted(other))

    def __eq__(self, other: object) -> Condition:  # type: ignore[override]
        return super().__eq__(self._counted(other))

    def __ne__(self, other: object) -> Condition:  # type: ignore[override]
        return super().__ne__(self._counted(other))

    __hash__ = object.__hash__


def _arithmetic(symbol: str, left: Operand, right: Operand) -> Number:
    return Arithmetic(symbol, _integer(left), _integer(right))


def _integer(operand: object) -> Number:
    if isinstance(operand, Number):
        return operand
    if isinstance(operand, int) and not isinstance(operand, bool):
        return Constant(operand)
    raise TypeError(f"conditions compute with integers, not with {operand!r}")


# ------------------------------------------------------------------ conditions

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


class Comparison(Condition):
    """A comparison of two numbers."""

    precedence = _COMPARE

    def __init__(self, symbol: str, left: Number, right: Number) -> None:
        self.symbol = symbol
        self.left = left
        self.right = right

    def evaluate(self, arguments: Arguments) -> Any:
        left, right = self.left.evaluate(arguments), self.right.evaluate(arguments)
        for value in (left, right):
            if isinstance(value, Undefined):
                return value
        try:
            return COMPARISONS[self.symbol](left, right)
        except TypeError:  # a complex number has no order
            return Undefined(f"{left!r} {self.symbol} {right!r} has no answer")

    def check(self, kinds: Mapping[str, str]) -> None:
        self.left.check(kinds)
        self.right.check(kinds)
        left, right = self.left.type(kinds), self.right.type(kinds)
        left, right = _NUMERIC.get(left, left), _NUMERIC.get(right, right)
        if left != right:
            raise ExpressionError(f"{self!r} compares a {left} with a {right}")
        if self.symbol not in ("==", "!=") and left not in _ORDERED:
            raise ExpressionError(f"{self!r}: a {left} has no order, use == or !=")

    def _saw(self, arguments: Arguments) -> str:
        sides = [side for side in (self.left, self.right) if not isinstance(side, Constant)]
        return ", ".join(_shown(side, arguments) for side in sides)

    def __repr__(self) -> str:
        left, right = (self._inner(side, tighter=True) for side in (self.left, self.right))
        return f"{left} {self.symbol} {right}"


# Integers and other numbers compare with each other.
_NUMERIC = {"int": "number"}
_ORDERED = ("number", "capability")


def _shown(side: Number, arguments: Arguments) -> str:
    value = side.evaluate(arguments)
    return value.reason if isinstance(value, Undefined) else f"{side!r} is {value}"


def _compare(symbol: str, left: Number, right: object) -> Condition:
    if isinstance(right, Condition):
        raise TypeError(f"{left!r} {symbol} {right!r}: a number is compared with a number")
    if right is None:
        raise TypeError(f"{left!r} {symbol} None: ask when.is_none(...) instead")
    for side in (left, right):
        if isinstance(side, TensorNumber) and side.function == "dtype_of":
            raise TypeError(
                f"{left!r} {symbol} {right!r}: ask when.dtype(...) or when.same_dtype(...) instead"
            )
    if not isinstance(right, Number):
        _check_constant(symbol, left, right)
        right = Constant(right)
    return Comparison(symbol, left, right)


def _check_constant(symbol: str, left: Number, right: object) -> None:
    """Refuse what is wrong for every schema. The rest is checked against the op's schema."""
    if not isinstance(right, _CONSTANT_TYPES):
        raise TypeError(f"{left!r} {symbol} {right!r}: not a value that an argument can have")
    if isinstance(left, TensorNumber) and left.function == "device_capability":
        if not isinstance(right, tuple):
            raise TypeError(f"{left!r} {symbol} {right!r}: compare it with a tuple such as (9, 0)")
    elif not isinstance(right, (int, float)):
        scalar = isinstance(left, (Value, Item)) and not isinstance(right, tuple)
        if not scalar or symbol not in ("==", "!="):
            raise TypeError(f"{left!r} {symbol} {right!r}: compare it with a number")


class TensorCondition(Condition):
    """A predicate on one tensor: `dtype`, `is_contiguous`, `aligned`, `requires_grad`."""

    def __init__(self, function: str, tensor: TensorName, options: tuple[Any, ...] = ()) -> None:
        self.function = function
        self.tensor = tensor
        self.options = options

    def evaluate(self, arguments: Arguments) -> Any:
        tensor = tensor_of(arguments, self.tensor)
        if isinstance(tensor, Undefined):
            return tensor
        return _TENSOR_CONDITIONS[self.function][0](tensor, self.options)

    def check(self, kinds: Mapping[str, str]) -> None:
        _check_tensor(kinds, self.tensor, self)

    def _saw(self, arguments: Arguments) -> str:
        tensor = tensor_of(arguments, self.tensor)
        if isinstance(tensor, Undefined):
            return tensor.reason
        return f"{_plain(self.tensor)} {_TENSOR_CONDITIONS[self.function][1](tensor, self.options)}"

    def __repr__(self) -> str:
        options = "".join(f", {option!r}" for option in self.options)
        return f"when.{self.function}({_name(self.tensor)}{options})"


def address(tensor: torch.Tensor) -> int:
    """The address of a tensor's first element; 0 if it is empty; the offset if it is fake."""
    offset = int(tensor.storage_offset()) * tensor.element_size()
    try:
        # Not `data_ptr()`, which would materialize a copy-on-write tensor.
        base: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
        if tensor.numel() == 0:
            return 0
    except RuntimeError:
        # A FakeTensor has no memory. Allocators align storages by more than conditions require, so
        # the storage offset decides.
        base = 0
    return base + offset


def _has_dtype(tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    return tensor.dtype in dtypes


def _has_layout(tensor: torch.Tensor, options: tuple[torch.memory_format, ...]) -> bool:
    memory_format = options[0] if options else torch.contiguous_format
    return tensor.is_contiguous(memory_format=memory_format)


_TENSOR_CONDITIONS: dict[
    str,
    tuple[Callable[[torch.Tensor, Any], Any], Callable[[torch.Tensor, Any], str]],
] = {
    "dtype": (_has_dtype, lambda tensor, _: f"is {tensor.dtype}"),
    "is_contiguous": (
        _has_layout,
        lambda tensor, _: f"has sizes {tuple(tensor.shape)} and strides {tensor.stride()}",
    ),
    "aligned": (
        lambda tensor, options: address(tensor) % options[0] == 0,
        lambda tensor, options: f"is {address(tensor) % options[0]} bytes off",
    ),
    "requires_grad": (
        lambda tensor, _: tensor.requires_grad,
        lambda tensor, _: f"has requires_grad={tensor.requires_grad}",
    ),
}


class Same(Condition):
    """`same_dtype` and `same_device`."""

    def __init__(self, attribute: str, tensors: tuple[TensorName, ...]) -> None:
        self.attribute = attribute
        self.tensors = tensors

    def evaluate(self, arguments: Arguments) -> Any:
        values = self._values(arguments)
        undefined = next((value for value in values if isinstance(value, Undefined)), None)
        return undefined or all(value == values[0] for value in values)

    def _values(self, arguments: Arguments) -> list[Any]:
        tensors = [tensor_of(arguments, tensor) for tensor in self.tensors]
        return [t if isinstance(t, Undefined) else getattr(t, self.attribute) for t in tensors]

    def check(self, kinds: Mapping[str, str]) -> None:
        for tensor in self.tensors:
            _check_tensor(kinds, tensor, self)

    def _saw(self, arguments: Arguments) -> str:
        pairs = zip(self.tensors, self._values(arguments), strict=True)
        return ", ".join(
            value.reason if isinstance(value, Undefined) else f"{_plain(tensor)} is {value}"
            for tensor, value in pairs
        )

    def __repr__(self) -> str:
        return f"when.same_{self.attribute}({', '.join(map(_name, self.tensors))})"


class IsNone(Condition):
    """An argument is None."""

    def __init__(self, name: str) -> None:
        self.name = name

    def evaluate(self, arguments: Arguments) -> Any:
        return arguments[self.name] is None

    def check(self, kinds: Mapping[str, str]) -> None:
        _kind(kinds, self.name, self)

    def _saw(self, arguments: Arguments) -> str:
        return f"{self.name} is {'None' if arguments[self.name] is None else 'given'}"

    def __repr__(self) -> str:
        return f"when.is_none({self.name!r})"


class Tables(Protocol):
    """Where a lookup finds its grids, and why one of them declines a call."""

    def grid(self, device: torch.device) -> Grid | None:
        """The grid for the calls on a device; None if there is none. Always the same."""

    def failure(self, device: torch.device, values: tuple[Any, ...], column: int) -> Failure:
        """Why the column's decision for a call's features is against it."""


class Lookup(Condition):
    """A measured table decides, by the bucket that each feature of a call falls into.

    Args:
        features: numbers of a call, by name, in the order of the grid's axes.
        column: which of the grid's decisions counts.
        column_name: how it prints.
        tables: the grids, by device. The device is that of the first tensor that a feature names.
    """

    def __init__(
        self, features: Mapping[str, Number], column: int, column_name: str, tables: Tables
    ) -> None:
        self.features = dict(features)
        self.column = column
        self.column_name = column_name
        self.tables = tables
        tensors = (each for feature in features.values() for each in tensors_of(feature))
        self.tensor = next(tensors)

    def evaluate(self, arguments: Arguments) -> Any:
        tensor = tensor_of(arguments, self.tensor)
        values = self._values(arguments)
        for value in (tensor, *values):
            if isinstance(value, Undefined):
                return value
        grid = self.tables.grid(tensor.device)  # type: ignore[union-attr]
        return grid is not None and grid.takes(values, self.column)

    def _values(self, arguments: Arguments) -> tuple[Any, ...]:
        return tuple(feature.evaluate(arguments) for feature in self.features.values())

    def check(self, kinds: Mapping[str, str]) -> None:
        for name, feature in self.features.items():
            feature.check(kinds)
            if (found := feature.type(kinds)) not in ("int", "number", "ScalarType"):
                raise ExpressionError(
                    f"the feature {name}={feature!r} is a {found}: a table has buckets for "
                    "integers, booleans and dtypes"
                )

    def failure(self, arguments: Arguments) -> Failure | None:
        value = self.evaluate(arguments)
        if isinstance(value, Undefined):
            return Failure(repr(self), value.reason)
        if value:
            return None
        tensor = tensor_of(arguments, self.tensor)
        assert isinstance(tensor, torch.Tensor)
        return self.tables.failure(tensor.device, self._values(arguments), self.column)

    def _saw(self, arguments: Arguments) -> str:
        return ", ".join(_shown(feature, arguments) for feature in self.features.values())

    def __repr__(self) -> str:
        features = ", ".join(f"{name}={feature!r}" for name, feature in self.features.items())
        return f"crossover({features}).{self.column_name}"


def tensors_of(number: Number) -> Iterator[TensorName]:
    """The tensors that a number is computed from."""
    if isinstance(number, TensorNumber):
        yield number.tensor
    elif isinstance(number, Arithmetic):
        yield from tensors_of(number.left)
        yield from tensors_of(number.right)


class Joined(Condition):
    """Conditions joined by one symbol: `&` or `|`."""

    symbol: ClassVar[str]
    #: The value of a part that decides the result, whatever the other parts are.
    decided_by: ClassVar[bool]

    def __init__(self, parts: tuple[Condition, ...]) -> None:
        self.parts = parts

    def evaluate(self, arguments: Arguments) -> Any:
        result: Any = not self.decided_by
        for part in self.parts:
            value = part.evaluate(arguments)
            if isinstance(value, Undefined):
                result = value
            elif bool(value) is self.decided_by:
                return self.decided_by
        return result

    def check(self, kinds: Mapping[str, str]) -> None:
        for part in self.parts:
            part.check(kinds)

    def _saw(self, arguments: Arguments) -> str:
        return ", ".join(part._saw(arguments) for part in self.parts)

    def __repr__(self) -> str:
        return f" {self.symbol} ".join(self._inner(part, tighter=True) for part in self.parts)


class And(Joined):
    """`&`: every part holds."""

    precedence = _AND
    symbol = "&"
    decided_by = False

    def failure(self, arguments: Arguments) -> Failure | None:
        return next(filter(None, (part.failure(arguments) for part in self.parts)), None)


class Or(Joined):
    """`|`: one of the parts holds."""

    precedence = _OR
    symbol = "|"
    decided_by = True


class Not(Condition):
    """`~`: the part does not hold."""

    precedence = _UNARY

    def __init__(self, part: Condition) -> None:
        self.part = part

    def evaluate(self, arguments: Arguments) -> Any:
        value = self.part.evaluate(arguments)
        return value if isinstance(value, Undefined) else not value

    def check(self, kinds: Mapping[str, str]) -> None:
        self.part.check(kinds)

    def _saw(self, arguments: Arguments) -> str:
        return self.part._saw(arguments)

    def __repr__(self) -> str:
        return f"~{self._inner(self.part)}"


def _parts(kind: type[And] | type[Or], part: Condition) -> tuple[Condition, ...]:
    return part.parts if isinstance(part, kind) else (part,)


def _condition(part: object) -> Condition:
    if isinstance(part, Condition):
        return part
    _refuse(part)


def _refuse(part: object) -> NoReturn:
    raise TypeError(
        f"{part!r} is no condition: & | ~ combine conditions, and Python binds & tighter than "
        "comparisons, so write (when.ndim('x') == 2) & (...)"
    )


def part_against_capability(condition: Condition, capability: tuple[int, int]) -> Condition | None:
    """The part of a condition that holds for no tensor on a device of a compute capability.

    Only the parts of an `&` are considered. None if none of them rules the device out.

    >>> from opgraft import when
    >>> cond = (when.device_capability("x") >= (9, 0)) & (when.ndim("x") == 2)
    >>> part_against_capability(cond, (8, 6))
    when.device_capability('x') >= (9, 0)
    """
    for part in _parts(And, condition):
        if (
            isinstance(part, Comparison)
            and isinstance(part.left, TensorNumber)
            and part.left.function == "device_capability"
            and isinstance(part.right, Constant)
            and not COMPARISONS[part.symbol](capability, part.right.constant)
        ):
            return part
    return None
