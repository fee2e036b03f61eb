"""Which cells of a grid to measure next: a coarse lattice first, then where decisions change."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

from opgraft.crossover.rule import PYTHON, Indices, filled
from opgraft.when.grid import Axis, ExactAxis

#: How many buckets lie between two neighbours that are measured first. Each round halves it. From
#: corners that agree nothing follows for what lies far from all of them: kernels have other tiles
#: there, and native has others of its own.
FIRST_STRIDE = 4

#: What neighbours have to agree on. A kind of call runs from Python until its plan is recorded:
#: where exactly that alone begins to pay is not worth the time, and cells between decline it. An
#: override without plans has the same decision in both columns.
_ALL_BUT_PYTHON = ~(1 << PYTHON)


def strides() -> Iterator[int]:
    """The strides of the rounds, from the first to 1."""
    stride = FIRST_STRIDE
    while stride:
        yield stride
        stride //= 2


def open_cells(
    decided: Mapping[Indices, int], axes: Sequence[Axis], stride: int
) -> list[list[Indices]]:
    """The cells of one round that measured neighbours do not decide; of the first one, all.

    Args:
        decided: what was measured, as the bits that the rule makes of it.
        axes: of the grid.
        stride: how many buckets lie between two neighbours of this round.

    Returns:
        Groups of cells. Those of a group lie between cells of the groups before it, so that a
        group is to be asked for again when the one before it was measured.

    >>> from opgraft.when.grid import SteppedAxis
    >>> axes = (SteppedAxis(1, 1, 2**8),)
    >>> open_cells({}, axes, 4)
    [[(0,), (8,)], [(4,)]]
    >>> open_cells({(0,): 0, (4,): 0}, axes, 2), open_cells({(0,): 0, (4,): 1}, axes, 2)
    ([[(8,)], [(6,)]], [[(8,)], [(2,), (6,)]])
    >>> by_plan, from_python_too = 1, 3
    >>> open_cells({(0,): by_plan, (2,): from_python_too}, (SteppedAxis(1, 1, 4),), 1)
    []
    """
    least = filled(decided, axes, operator.and_)
    most = filled(decided, axes, operator.or_)
    groups: dict[int, list[Indices]] = {}
    for cell in itertools.product(*(_places(axis, stride) for axis in axes)):
        agree = cell in least and not (least[cell] ^ most[cell]) & _ALL_BUT_PYTHON
        if cell in decided or (agree and stride < FIRST_STRIDE):
            continue
        groups.setdefault(_depth(cell, axes, 2 * stride), []).append(cell)
    return [groups[depth] for depth in sorted(groups)]


def left_cells(decided: Mapping[Indices, int], axes: Sequence[Axis]) -> set[Indices]:
    """All cells of which a round will measure some.

    Args:
        decided: as for `open_cells`, like `axes`.
    """
    rounds = (open_cells(decided, axes, stride) for stride in (FIRST_STRIDE, 1))
    return {cell for groups in rounds for group in groups for cell in group}


def _places(axis: Axis, stride: int) -> Iterable[int]:
    if isinstance(axis, ExactAxis):
        return range(axis.count)
    return sorted({*range(0, axis.count, stride), axis.count - 1})


def _depth(cell: Indices, axes: Sequence[Axis], stride: int) -> int:
    """Along how many axes a cell is none of those of the round before."""
    return sum(
        not isinstance(axis, ExactAxis) and place % stride != 0 and place != axis.count - 1
        for place, axis in zip(cell, axes, strict=True)
    )
