"""Conditions as programs for the compiled core: the same expression, as nodes."""

from __future__ import annotations

from functools import singledispatchmethod
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
        compiler.add(condition)
    except NotCompilable:
        return None
    return compiler.nodes


class _Compiler:
    def __init__(self, op: Op) -> None:
        self.nodes: list[Node] = []
        self._kinds = {argument.name: argument.kind for argument in op.arguments}
        self._index = {argument.name: i for i, argument in enumerate(op.arguments)}

    def _emit(
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
        indices = [self.add(child) for child in children]
        places_ = [self._place(each) for each in places]
        self.nodes.append((code, place, integer, real, constant, indices, places_))
        return len(self.nodes) - 1

    def _place(self, tensor: when.TensorName) -> tuple[int, int, bool]:
        if isinstance(tensor, str):
            return (self._index[tensor], 0, False)
        return (self._index[tensor.name], tensor.index, True)

    @singledispatchmethod
    def add(self, part: when.Expression) -> int:
        """Add a part with all it is made of; returns its index."""
        raise NotCompilable(repr(part))

    @add.register
    def _(self, part: when._All) -> int:
        return self._emit("all", children=part.parts)

    @add.register
    def _(self, part: when._Any) -> int:
        return self._emit("any", children=part.parts)

    @add.register
    def _(self, part: when._Not) -> int:
        return self._emit("not", children=(part.part,))

    @add.register
    def _(self, part: when._IsNone) -> int:
        return self._emit("is_none", place=self._place(part.name))

    @add.register
    def _(self, part: when._Same) -> int:
        return self._emit(f"same_{part.attribute}", places=part.tensors)

    @add.register
    def _(self, part: when._TensorCondition) -> int:
        place = self._place(part.tensor)
        if part.function == "aligned":
            return self._emit("aligned", place=place, integer=_int64(part.options[0]))
        if part.function == "is_contiguous":
            memory_format = part.options[0] if part.options else torch.contiguous_format
            return self._emit("is_contiguous", place=place, constant=memory_format)
        constant = part.options if part.function == "dtype" else None
        return self._emit(part.function, place=place, constant=constant)

    @add.register
    def _(self, part: when._Comparison) -> int:
        types = {side.type(self._kinds) for side in (part.left, part.right)}
        if types <= {"int", "number", "capability"}:
            return self._emit(part.symbol, children=(part.left, part.right))
        left, right = part.left, part.right
        if not isinstance(left, (when._Value, when._Item)) or not isinstance(right, when._Constant):
            raise NotCompilable(repr(part))
        code = "same_value" if part.symbol == "==" else "other_value"
        place = self._place(left.name if isinstance(left, when._Value) else left)
        return self._emit(code, place=place, constant=right.constant)

    @add.register
    def _(self, part: when._Arithmetic) -> int:
        return self._emit(part.symbol, children=(part.left, part.right))

    @add.register
    def _(self, part: when._TensorNumber) -> int:
        dim = 0 if part.dim is None else _int64(part.dim)
        return self._emit(part.function, place=self._place(part.tensor), integer=dim)

    @add.register
    def _(self, part: when._Length) -> int:
        return self._emit("length", place=self._place(part.name))

    @add.register
    def _(self, part: when._Item) -> int:
        return self._emit("item", place=self._place(part))

    @add.register
    def _(self, part: when._Value) -> int:
        return self._emit("value", place=self._place(part.name))

    @add.register
    def _(self, part: when._Constant) -> int:
        constant = part.constant
        if isinstance(constant, tuple):
            return self._emit("integer", integer=pack_capability(constant))
        if isinstance(constant, int):
            return self._emit("integer", integer=_int64(int(constant)))
        return self._emit("real", real=constant)


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
