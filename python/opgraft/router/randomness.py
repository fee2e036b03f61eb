"""Calls that depend on random numbers: what runs one depends on the call alone.

An impl draws other numbers than the native kernel does. A program may run such a call twice and
expect the same numbers: checkpointing runs a forward again, with the generator's state of the first
time, and the backward of attention makes the mask of its forward anew, from its seed. If the impl
ran one of the two and the native kernel the other, gradients would be wrong, and nothing would tell
so. So these calls are not native's until their kernels are compiled, and have no launch plan.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from opgraft import when
from opgraft.ops.schema import Call, Op
from opgraft.when import Condition
from opgraft.when.compilation import NEVER_HOLDS, Node, compile_condition

# The argument of a forward that says how much is dropped, as its backward has it.
_DROPOUT = {"dropout_p": 0.0, "dropout": 0.0}
#: Arguments of ATen's ops, and the value with which no random numbers matter.
_SWITCHES = {**_DROPOUT, "train": False, "training": False}


def depends_on_random_numbers(call: Call) -> bool:
    """Whether a call draws random numbers, or makes anew those that another call has drawn.

    >>> import torch
    >>> from opgraft.ops.schema import resolve
    >>> dropout, x = resolve("aten::native_dropout"), torch.ones(4)
    >>> [depends_on_random_numbers(dropout.bind((x, 0.5, train), {})) for train in (True, False)]
    [True, False]
    """
    if not _may_depend(call.op):
        return False
    without = _without(call.op)
    return without is None or not without.holds(call.named)


def without_random_numbers(op: Op) -> Sequence[Node] | None:
    """For which calls of an op no random numbers matter, for the core; None: for all."""
    if not _may_depend(op):
        return None
    without = _without(op)
    return NEVER_HOLDS if without is None else compile_condition(without, op) or NEVER_HOLDS


def _may_depend(op: Op) -> bool:
    return op.is_random or (_is_atens(op) and not _DROPOUT.keys().isdisjoint(op.kinds))


@functools.cache
def _without(op: Op) -> Condition | None:
    if not _is_atens(op):  # the same names may mean something else
        return None
    switches = _SWITCHES.keys() & op.kinds.keys()
    parts = [when.value(name) == _SWITCHES[name] for name in sorted(switches)]
    return functools.reduce(operator.or_, parts) if parts else None


def _is_atens(op: Op) -> bool:
    return op.name.startswith("aten::")
