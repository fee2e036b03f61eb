"""The possible outcomes of a condition for a call whose sizes may be symbolic.

`torch.compile` traces a call on FakeTensors, whose sizes may be SymInts. A condition on them is
true for all sizes, false for all sizes, or depends on them. Evaluating a SymInt as a bool uses the
sizes of the call that is being traced (its *hint*) and installs a guard, so each other outcome
recompiles. :func:`outcomes` uses only what is true for all sizes, and installs no guard.

The value of a part is the set of its possible outcomes: `True`, `False`, and `None` for undefined
(see :mod:`opgraft.when`). A part that is known has one outcome. A comparison of symbols has all.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce, singledispatchmethod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from opgraft.ops.schema import Call
from opgraft.when import nodes
from opgraft.when.grid import Axis, ExactAxis
from opgraft.when.nodes import Arguments, Condition, Undefined

if TYPE_CHECKING:
    from opgraft.registry import Override

Outcomes: TypeAlias = frozenset[bool | None]

HOLDS: Outcomes = frozenset({True})
FAILS: Outcomes = frozenset({False})
UNDEFINED: Outcomes = frozenset({None})
EITHER: Outcomes = frozenset({True, False})
ANY: Outcomes = frozenset({True, False, None})


def outcomes(condition: Condition, arguments: Arguments) -> Outcomes:
    """The possible outcomes of a condition, for all values of the symbols. Installs no guard.

    Args:
        condition: one that was checked against the op's schema.
        arguments: all arguments by name. Tensors may be fake, and numbers symbolic.

    >>> from opgraft import when
    >>> cond = (when.ndim("x") == 2) & when.aligned("x", 16)
    >>> outcomes(cond, {"x": torch.ones(2)}), outcomes(cond, {"x": torch.ones(2, 2)}) == EITHER
    (frozenset({False}), True)
    """
    return _Evaluator(arguments, _truth_of_all).outcomes(condition)


def guarded_outcomes(condition: Condition, arguments: Arguments) -> Outcomes:
    """The outcomes of a condition for the symbols' hints. The graph is guarded on each.

    Conditions on addresses, which guards cannot check, keep all outcomes.

    Raises:
        Exception: what torch raises for a symbol without a hint, which depends on data.
    """
    return _Evaluator(arguments, lambda value: frozenset({bool(value)})).outcomes(condition)


def of_override(override: Override, call: Call) -> Outcomes:
    """The possible outcomes of an override's condition for a call. Installs no guard.

    A condition that is a Python callable is called. Its result counts if it needed no guard.
    """
    if override.eligible is None:
        return HOLDS
    if isinstance(override.eligible, Condition):
        return of_condition(override.eligible, call)
    try:
        with _error_on_guards(call):
            return frozenset({override.condition_holds(call)})
    except Exception:  # it needs a guard, or the values of tensors
        return EITHER


def of_condition(condition: Condition, call: Call) -> Outcomes:
    """The possible outcomes of a condition for a call. Installs no guard."""
    return EITHER if _symbol_for_tensor(call) else outcomes(condition, call.named)


def _symbol_for_tensor(call: Call) -> bool:
    """Whether a symbol is given for an argument that the dispatcher will make a tensor."""
    pairs = zip(call.op.arguments, call.values, strict=True)
    return any(argument.is_tensor and is_symbol(value) for argument, value in pairs)


@contextmanager
def _error_on_guards(call: Call) -> Iterator[None]:
    if not is_symbolic(call):
        yield
        return
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    shape_env: Any = getattr(detect_fake_mode(list(call.tensors())), "shape_env", None)
    # torch 2.11 has no `error_on_new_guards`. Its AttributeError makes the outcome unknown.
    with disable_proxy_modes_tracing(), shape_env.error_on_new_guards():
        yield


def first_failing_part(condition: Condition, arguments: Arguments) -> str:
    """The first part because of which a condition can never hold, as it was written."""
    if isinstance(condition, nodes.And):
        for part in condition.parts:
            if True not in outcomes(part, arguments):
                return first_failing_part(part, arguments)
    return repr(condition)


def is_symbol(value: object) -> bool:
    """Whether a number is symbolic."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_symbolic(call: Call) -> bool:
    """Whether a call's numbers, or its tensors' sizes, strides or offsets, are symbolic."""
    for value in call.values:
        if isinstance(value, (list, tuple)):
            if any(map(is_symbol, value)):
                return True
        elif is_symbol(value):
            return True
    return any(tensor._has_symbolic_sizes_strides for tensor in call.tensors())


def _truth_of_all(value: torch.SymBool) -> Outcomes:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if statically_known_true(value):
        return HOLDS
    return FAILS if statically_known_true(torch.sym_not(value)) else ANY


# Kleene's logic, on single values and on sets of possible values.


def _and(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _or(left: bool | None, right: bool | None) -> bool | None:
    return _not(_and(_not(left), _not(right)))


def _joined(
    join: Callable[[bool | None, bool | None], bool | None], parts: Iterable[Outcomes]
) -> Outcomes:
    def both(left: Outcomes, right: Outcomes) -> Outcomes:
        return frozenset(itertools.starmap(join, itertools.product(left, right)))

    return reduce(both, parts)


class _Unknown:
    """The value of a number that cannot be computed for all values of the symbols."""


_UNKNOWN = _Unknown()


class _Evaluator:
    def __init__(self, arguments: Arguments, truth_of: Callable[[torch.SymBool], Outcomes]) -> None:
        self._arguments = arguments
        self._truth_of = truth_of

    def _truth(self, value: Any) -> Outcomes:
        return self._truth_of(value) if is_symbol(value) else frozenset({bool(value)})

    # Conditions.

    @singledispatchmethod
    def outcomes(self, condition: Condition) -> Outcomes:
        """The possible outcomes of a condition."""
        return ANY

    @outcomes.register
    def _(self, condition: nodes.And) -> Outcomes:
        return _joined(_and, map(self.outcomes, condition.parts))

    @outcomes.register
    def _(self, condition: nodes.Or) -> Outcomes:
        return _joined(_or, map(self.outcomes, condition.parts))

    @outcomes.register
    def _(self, condition: nodes.Not) -> Outcomes:
        return frozenset(map(_not, self.outcomes(condition.part)))

    @outcomes.register(nodes.IsNone)
    @outcomes.register(nodes.Same)
    def _(self, condition: Condition) -> Outcomes:
        value = condition.evaluate(self._arguments)
        return UNDEFINED if isinstance(value, Undefined) else self._truth(value)

    @outcomes.register
    def _(self, condition: nodes.TensorCondition) -> Outcomes:
        tensor = nodes.tensor_of(self._arguments, condition.tensor)
        if isinstance(tensor, Undefined):
            return UNDEFINED
        if condition.function == "dtype":
            return self._truth(tensor.dtype in condition.options)
        if condition.function == "is_contiguous":
            return self._contiguous(tensor, *condition.options)
        # An address is known only at run time. And what a compiled graph computes never requires
        # grad, even if the traced tensor does.
        return EITHER

    def _contiguous(
        self, tensor: torch.Tensor, layout: torch.memory_format = torch.contiguous_format
    ) -> Outcomes:
        if not any(map(is_symbol, (*tensor.shape, *tensor.stride()))):
            return self._truth(tensor.is_contiguous(memory_format=layout))
        if layout != torch.contiguous_format:
            return EITHER
        expected: Any = 1
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            # If a stride differs, the tensor may still be contiguous: empty, or of size 1 in that
            # dimension.
            if self._truth(stride == expected) != HOLDS:
                return EITHER
            expected = expected * size
        return HOLDS

    @outcomes.register
    def _(self, condition: nodes.Comparison) -> Outcomes:
        left, right = self._value(condition.left), self._value(condition.right)
        if isinstance(left, Undefined) or isinstance(right, Undefined):
            return UNDEFINED
        if isinstance(left, _Unknown) or isinstance(right, _Unknown):
            return ANY
        try:
            return self._truth(nodes.COMPARISONS[condition.symbol](left, right))
        except TypeError:  # a scalar argument that came as a complex number has no order
            return UNDEFINED

    @outcomes.register
    def _(self, condition: nodes.Lookup) -> Outcomes:
        tensor = nodes.tensor_of(self._arguments, condition.tensor)
        values = [self._value(feature) for feature in condition.features.values()]
        if any(isinstance(value, Undefined) for value in (tensor, *values)):
            return UNDEFINED
        assert isinstance(tensor, torch.Tensor)
        grid = condition.tables.grid(tensor.device)
        unknown = any(isinstance(value, _Unknown) for value in values)
        found: set[bool | None] = {None} if unknown else set()
        if grid is None:
            return frozenset({*found, False})
        possible = [
            self._possible_buckets(axis, value)
            for axis, value in zip(grid.axes, values, strict=True)
        ]
        if any(None in buckets for buckets in possible):
            found.add(False)  # it may be outside
            if any(map(is_symbol, values)):
                found.add(None)  # of sizes whose product leaves 64 bits
        inside = [[each for each in buckets if each is not None] for buckets in possible]
        return frozenset(found | grid.decisions(inside, condition.column))

    def _possible_buckets(self, axis: Axis, value: Any) -> set[int | None]:
        """The buckets that a number may fall into; None among them if it may be outside."""
        if isinstance(value, _Unknown):
            return {None, *range(axis.count)}
        if not is_symbol(value) or isinstance(value, torch.SymFloat):
            return {axis.index_of(value)}
        if isinstance(axis, ExactAxis):
            return self._possible_values(axis, value)
        # How many lower ends of buckets it has surely reached, and how many it may have reached.
        ends = range(axis.count + 1)

        def reached(index: int) -> Outcomes:
            return self._truth(value >= axis.lower(index))

        known = bisect_left(ends, True, key=lambda index: reached(index) != HOLDS)
        maybe = bisect_left(ends, True, lo=known, key=lambda index: reached(index) == FAILS)
        possible: set[int | None] = set(range(max(known - 1, 0), min(maybe, axis.count)))
        below, above = known == 0, maybe > axis.count
        if not axis.open_ended:
            return possible | ({None} if below or above else set())
        is_number = self._truth(value >= 1)
        if is_number == FAILS:
            return {None}
        if is_number != HOLDS:
            possible.add(None)
        return possible | ({0} if below else set()) | ({axis.count - 1} if above else set())

    def _possible_values(self, axis: ExactAxis, value: Any) -> set[int | None]:
        possible: set[int | None] = {None}
        for index, each in enumerate(axis.values):
            is_it = self._truth(value == each)
            if is_it == HOLDS:
                return {index}
            if is_it != FAILS:
                possible.add(index)
        if len(possible) > 1 and self._is_surely_among(axis.values, value):
            possible.remove(None)
        return possible

    def _is_surely_among(self, values: Sequence[object], number: Any) -> bool:
        """Whether a number must be one of these: all integers from the least to the greatest."""
        integers = sorted(value for value in values if isinstance(value, int))
        if not isinstance(number, torch.SymInt) or not integers or len(integers) != len(values):
            return False
        low, high = integers[0], integers[-1]
        return (
            high - low == len(integers) - 1
            and self._truth(number >= low) == HOLDS
            and self._truth(number <= high) == HOLDS
        )

    # Numbers.

    @singledispatchmethod
    def _value(self, number: nodes.Number) -> Any:
        """A number's value, which may be a symbol, undefined or unknown."""
        return number.evaluate(self._arguments)

    @_value.register
    def _(self, number: nodes.Arithmetic) -> Any:
        left, right = self._value(number.left), self._value(number.right)
        for side in (left, right):
            if isinstance(side, (Undefined, _Unknown)):
                return side
        if not is_symbol(left) and not is_symbol(right):
            return number.evaluate(self._arguments)
        if number.symbol in ("//", "%"):
            is_zero = self._truth(right == 0)
            if is_zero == HOLDS:
                return Undefined(f"{number.right!r} is 0")
            if is_zero != FAILS:
                return _UNKNOWN
        return nodes.ARITHMETIC[number.symbol][1](left, right)
