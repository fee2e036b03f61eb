"""Conditions compiled for the core: the same expression as a list of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from opgraft.ops.schema import Op
from opgraft.when import nodes


class ArgumentRef(NamedTuple):
    """An argument by its position in the schema, or an item of a list argument."""

    position: int = 0
    item: int = 0
    is_item: bool = False


class Node(NamedTuple):
    """A part of an expression. The meaning of its fields depends on the code: csrc/condition.h."""

    code: str
    argument_ref: ArgumentRef = ArgumentRef()
    integer: int = 0
    real: float = 0.0
    constant: Any = None
    children: Sequence[int] = ()
    argument_refs: Sequence[ArgumentRef] = ()


#: A condition that no call meets: `any` without parts is false.
NEVER_HOLDS: Sequence[Node] = (Node("any"),)

_INT64 = range(-(2**63), 2**63)


class NotCompilable(Exception):
    """Only Python can evaluate it: a constant exceeds 64 bits, or two strings are compared."""


def compile_condition(condition: nodes.Condition, op: Op) -> list[Node] | None:
    """The nodes of a condition: children before parents, the whole condition last.

    Args:
        condition: one that was checked against the op's schema.
        op: the op whose arguments it names.

    Returns:
        The nodes; None if only Python can evaluate it.

    >>> from opgraft import when
    >>> from opgraft.ops.schema import resolve
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
        self.kinds = op.kinds
        self._index = op.index

    def add(self, part: nodes.Expression) -> int:
        """Add a part and its children. Returns its index."""
        add = _ADD.get(type(part))
        if add is None:
            raise NotCompilable(repr(part))
        return add(self, part)

    def emit(
        self,
        code: str,
        *,
        argument_ref: ArgumentRef = ArgumentRef(),  # noqa: B008, it is immutable
        integer: int = 0,
        real: float = 0.0,
        constant: Any = None,
        children: tuple[nodes.Expression, ...] = (),
        tensors: tuple[nodes.TensorName, ...] = (),
    ) -> int:
        indices = list(map(self.add, children)) if children else []
        argument_refs = list(map(self.argument_ref, tensors)) if tensors else []
        self.nodes.append(Node(code, argument_ref, integer, real, constant, indices, argument_refs))
        return len(self.nodes) - 1

    def argument_ref(self, tensor: nodes.TensorName) -> ArgumentRef:
        if isinstance(tensor, str):
            return ArgumentRef(self._index[tensor])
        return ArgumentRef(self._index[tensor.name], tensor.index, True)


def _all(compiler: _Compiler, part: nodes.And) -> int:
    return compiler.emit("all", children=part.parts)


def _any(compiler: _Compiler, part: nodes.Or) -> int:
    return compiler.emit("any", children=part.parts)


def _not(compiler: _Compiler, part: nodes.Not) -> int:
    return compiler.emit("not", children=(part.part,))


def _is_none(compiler: _Compiler, part: nodes.IsNone) -> int:
    return compiler.emit("is_none", argument_ref=compiler.argument_ref(part.name))


def _same(compiler: _Compiler, part: nodes.Same) -> int:
    return compiler.emit(f"same_{part.attribute}", tensors=part.tensors)


def _tensor_condition(compiler: _Compiler, part: nodes.TensorCondition) -> int:
    argument_ref = compiler.argument_ref(part.tensor)
    if part.function == "aligned":
        return compiler.emit("aligned", argument_ref=argument_ref, integer=_int64(part.options[0]))
    if part.function == "is_contiguous":
        memory_format = part.options[0] if part.options else torch.contiguous_format
        return compiler.emit("is_contiguous", argument_ref=argument_ref, constant=memory_format)
    constant = part.options if part.function == "dtype" else None
    return compiler.emit(part.function, argument_ref=argument_ref, constant=constant)


def _lookup(compiler: _Compiler, part: nodes.Lookup) -> int:
    def compiled_grid(device: torch.device) -> Any:
        grid = part.tables.grid(device)
        return None if grid is None else grid.compiled()

    return compiler.emit(
        "lookup",
        argument_ref=compiler.argument_ref(part.tensor),
        constant=(len(part.features), part.column, compiled_grid),
        children=tuple(part.features.values()),
    )


def _comparison(compiler: _Compiler, part: nodes.Comparison) -> int:
    left, right = part.left, part.right
    if left.type(compiler.kinds) in _NUMBERS and right.type(compiler.kinds) in _NUMBERS:
        return compiler.emit(part.symbol, children=(left, right))
    if not isinstance(left, (nodes.Value, nodes.Item)) or not isinstance(right, nodes.Constant):
        raise NotCompilable(repr(part))
    code = "value_is" if part.symbol == "==" else "value_is_not"
    argument_ref = compiler.argument_ref(left.name if isinstance(left, nodes.Value) else left)
    return compiler.emit(code, argument_ref=argument_ref, constant=right.constant)


_NUMBERS = frozenset({"int", "number", "capability"})


def _arithmetic(compiler: _Compiler, part: nodes.Arithmetic) -> int:
    return compiler.emit(part.symbol, children=(part.left, part.right))


def _tensor_number(compiler: _Compiler, part: nodes.TensorNumber) -> int:
    argument_ref = compiler.argument_ref(part.tensor)
    if isinstance(part.dim, nodes.Number):
        return compiler.emit(part.function, argument_ref=argument_ref, children=(part.dim,))
    dim = 0 if part.dim is None else _int64(part.dim)
    return compiler.emit(part.function, argument_ref=argument_ref, integer=dim)


def _length(compiler: _Compiler, part: nodes.Length) -> int:
    return compiler.emit("length", argument_ref=compiler.argument_ref(part.name))


def _item(compiler: _Compiler, part: nodes.Item) -> int:
    return compiler.emit("item", argument_ref=compiler.argument_ref(part))


def _value(compiler: _Compiler, part: nodes.Value) -> int:
    return compiler.emit("value", argument_ref=compiler.argument_ref(part.name))


def _constant(compiler: _Compiler, part: nodes.Constant) -> int:
    constant = part.constant
    if isinstance(constant, tuple):
        return compiler.emit("integer", integer=pack_capability(constant))
    if isinstance(constant, int):
        return compiler.emit("integer", integer=_int64(int(constant)))
    return compiler.emit("real", real=constant)


# Not `functools.singledispatch`, which takes longer to find a function than the function to run.
_ADD: dict[type, Callable[[_Compiler, Any], int]] = {
    nodes.And: _all,
    nodes.Or: _any,
    nodes.Not: _not,
    nodes.IsNone: _is_none,
    nodes.Same: _same,
    nodes.TensorCondition: _tensor_condition,
    nodes.Comparison: _comparison,
    nodes.Lookup: _lookup,
    nodes.Arithmetic: _arithmetic,
    nodes.Dim: _arithmetic,
    nodes.TensorNumber: _tensor_number,
    nodes.Length: _length,
    nodes.Item: _item,
    nodes.Value: _value,
    nodes.Constant: _constant,
}


def pack_capability(capability: tuple[int, ...]) -> int:
    """(major, minor) as one integer, with the same order.

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
