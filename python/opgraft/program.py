"""Conditions as programs for the compiled core: the same expression, as nodes."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch

from opgraft import when
from opgraft.schema import Op

#: (code, place, integer, real, constant, children, places); see csrc/condition.h.
Node = tuple[str, tuple[int, int, bool], int, float, Any, list[int], list[tuple[int, int, bool]]]

_NOWHERE = (0, 0, False)
_INT64 = range(-(2**63), 2**63)


class NotCompilable(Exception):
    """The expression needs Python: a constant beyond 64 bits, strings of two arguments compared."""


def compile_condition(condition: when.Condition, op: Op) -> list[Node] | None:
    """The nodes of a condition, children before parents, the whole condition last.

    Args:
        condition: checked against the op's schema before.
        op: whose arguments it names.

    Returns:
        The nodes; None where only Python can evaluate it.

    >>> from opgraft.schema import resolve
    >>> len(compile_condition(when.ndim("self") == 2, resolve("aten::_softmax")))
    3
    """
    compiler = _Compiler(op)
    try:
        _add(condition, compiler)
    except NotCompilable:
        return None
    return compiler.nodes


class _Compiler:
    def __init__(self, op: Op) -> None:
        self.nodes: list[Node] = []
        self.kinds = {argument.name: argument.kind for argument in op.arguments}
        self._index = {argument.name: i for i, argument in enumerate(op.arguments)}

    def emit(
        self,
        code: str,
        *,
        place: tuple[int, int, bool] = _NOWHERE,
        integer: int = 0,
        real: float = 0.0,
        constant: Any = None,
        children: tuple[when.Expression, ...] = (),
        places: tuple[when.TensorName, ...] = (),
    ) -> int:
        indices = [_add(child, self) for child in children]
        places_ = [self.place(each) for each in places]
        self.nodes.append((code, place, integer, real, constant, indices, places_))
        return len(self.nodes) - 1

    def place(self, tensor: when.TensorName) -> tuple[int, int, bool]:
        if isinstance(tensor, str):
            return (self._index[tensor], 0, False)
        return (self._index[tensor.name], tensor.index, True)


@singledispatch
def _add(part: when.Expression, compiler: _Compiler) -> int:
    """Add a part with all it is made of; returns its index."""
    raise NotCompilable(repr(part))


@_add.register(when._All)
def _(part: when._All, compiler: _Compiler) -> int:
    return compiler.emit("all", children=part.parts)


@_add.register(when._Any)
def _(part: when._Any, compiler: _Compiler) -> int:
    return compiler.emit("any", children=part.parts)


@_add.register(when._Not)
def _(part: when._Not, compiler: _Compiler) -> int:
    return compiler.emit("not", children=(part.part,))


@_add.register(when._IsNone)
def _(part: when._IsNone, compiler: _Compiler) -> int:
    return compiler.emit("is_none", place=compiler.place(part.name))


@_add.register(when._Same)
def _(part: when._Same, compiler: _Compiler) -> int:
    return compiler.emit(f"same_{part.attribute}", places=part.tensors)


@_add.register(when._TensorCondition)
def _(part: when._TensorCondition, compiler: _Compiler) -> int:
    place = compiler.place(part.tensor)
    if part.function == "aligned":
        return compiler.emit("aligned", place=place, integer=_int64(part.options[0]))
    if part.function == "is_contiguous":
        memory_format = part.options[0] if part.options else torch.contiguous_format
        return compiler.emit("is_contiguous", place=place, constant=memory_format)
    constant = part.options if part.function == "dtype" else None
    return compiler.emit(part.function, place=place, constant=constant)


@_add.register(when._Comparison)
def _(part: when._Comparison, compiler: _Compiler) -> int:
    types = {side.type(compiler.kinds) for side in (part.left, part.right)}
    if types <= {"int", "number", "capability"}:
        return compiler.emit(part.symbol, children=(part.left, part.right))
    left, right = part.left, part.right
    if not isinstance(left, (when._Value, when._Item)) or not isinstance(right, when._Constant):
        raise NotCompilable(repr(part))
    code = "same_value" if part.symbol == "==" else "other_value"
    place = compiler.place(left.name if isinstance(left, when._Value) else left)
    return compiler.emit(code, place=place, constant=right.constant)


@_add.register(when._Arithmetic)
def _(part: when._Arithmetic, compiler: _Compiler) -> int:
    return compiler.emit(part.symbol, children=(part.left, part.right))


@_add.register(when._TensorNumber)
def _(part: when._TensorNumber, compiler: _Compiler) -> int:
    dim = 0 if part.dim is None else _int64(part.dim)
    return compiler.emit(part.function, place=compiler.place(part.tensor), integer=dim)


@_add.register(when._Length)
def _(part: when._Length, compiler: _Compiler) -> int:
    return compiler.emit("length", place=compiler.place(part.name))


@_add.register(when._Item)
def _(part: when._Item, compiler: _Compiler) -> int:
    return compiler.emit("item", place=compiler.place(part))


@_add.register(when._Value)
def _(part: when._Value, compiler: _Compiler) -> int:
    return compiler.emit("value", place=compiler.place(part.name))


@_add.register(when._Constant)
def _(part: when._Constant, compiler: _Compiler) -> int:
    constant = part.constant
    if isinstance(constant, tuple):
        return compiler.emit("integer", integer=pack_capability(constant))
    if isinstance(constant, int):
        return compiler.emit("integer", integer=_int64(int(constant)))
    return compiler.emit("real", real=constant)


def pack_capability(capability: tuple[int, ...]) -> int:
    """(major, minor) as one integer in the same order.

    >>> pack_capability((9, 0)) > pack_capability((8, 9))
    True
    """
    if len(capability) != 2 or not all(0 <= part < 2**16 for part in capability):
        raise NotCompilable(repr(capability))
    return capability[0] << 16 | capability[1]


def _int64(value: int) -> int:
    if value not in _INT64:
        raise NotCompilable(repr(value))
    return value
