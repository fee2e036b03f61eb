"""Grids: what a measured table decides, as bytes that a condition looks up.

A grid has an axis for each feature of a call. An axis divides the numbers that a feature can have
into buckets, and each combination of buckets is a cell. csrc/condition.cpp looks up the same cells.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

#: What a feature of a call can be. A bool counts as 0 or 1.
Feature: TypeAlias = "int | torch.dtype"

#: More cells than this are no table for a router: a byte each.
MAX_CELLS = 2**16
#: Into how many parts an axis can divide an octave.
STEPS = (1, 2, 4, 8)


class ExactAxis:
    """A bucket for each of a few values: dtypes, booleans, numbers of heads.

    >>> axis = ExactAxis([torch.float32, torch.float16])
    >>> axis.index_of(torch.float16), axis.index_of(torch.int8)
    (1, None)
    """

    def __init__(self, values: Iterable[Feature]) -> None:
        self.values = tuple(values)
        self._indices = {value: index for index, value in enumerate(self.values)}

    @property
    def count(self) -> int:
        return len(self.values)

    def index_of(self, value: object) -> int | None:
        """The bucket of a value; None if it is outside."""
        value = _feature(value)
        return None if value is None else self._indices.get(value)

    def lower(self, index: int) -> Feature:
        """The value of a bucket."""
        return self.values[index]

    def compiled(self) -> tuple[Any, ...]:
        return list(self.values), 0, 0, self.count, False


class SteppedAxis:
    """Buckets from powers of two, or from points that divide the octaves evenly.

    Args:
        steps: the buckets of an octave, one of `STEPS`. 2: they start at `2**k` and `3 * 2**k`.
        lowest: a number in the first bucket.
        highest: a number in the last bucket.
        open_ended: smaller numbers, from 1 on, fall into the first bucket, too, and greater ones
            into the last.

    >>> axis = SteppedAxis(2, 16, 64)
    >>> [axis.lower(index) for index in range(axis.count)]
    [16, 24, 32, 48, 64]
    >>> axis.index_of(47), axis.index_of(95), axis.index_of(96), axis.index_of(0)
    (2, 4, None, None)
    >>> axis = SteppedAxis(2, 16, 64, open_ended=True)
    >>> axis.index_of(1), axis.index_of(2**40), axis.index_of(0)
    (0, 4, None)
    """

    def __init__(self, steps: int, lowest: int, highest: int, *, open_ended: bool = False) -> None:
        self.steps = steps
        self.open_ended = open_ended
        self._shift = STEPS.index(steps)
        self._first = self._bucket(lowest)
        self.count = self._bucket(highest) - self._first + 1

    def _bucket(self, number: int) -> int:
        octave = number.bit_length() - 1
        digits = (number << self._shift) >> octave
        return (octave << self._shift) + digits - (1 << self._shift)

    def index_of(self, value: object) -> int | None:
        """The bucket of a number; None if it is outside."""
        number = _feature(value)
        if not isinstance(number, int) or not 1 <= number < 2**63:
            return None
        index = self._bucket(number) - self._first
        if self.open_ended:
            return min(max(index, 0), self.count - 1)
        return index if 0 <= index < self.count else None

    def lower(self, index: int) -> int:
        """The smallest number from a bucket on; of the one behind the last, too."""
        octave, part = divmod(self._first + index, 1 << self._shift)
        return -((-((1 << self._shift) + part) << octave) >> self._shift)

    def compiled(self) -> tuple[Any, ...]:
        return None, self._shift, self._first, self.count, self.open_ended


Axis: TypeAlias = "ExactAxis | SteppedAxis"


def joined(one: Sequence[Axis], other: Sequence[Axis]) -> tuple[Axis, ...] | None:
    """The axes that have the buckets of both; None where buckets of both are not alike.

    >>> (axis,) = joined([SteppedAxis(1, 4, 8)], [SteppedAxis(1, 32, 64)]) or ()
    >>> axis.lower(0), axis.count
    (4, 5)
    >>> joined([SteppedAxis(1, 4, 8)], [SteppedAxis(2, 4, 8)])
    """
    found = [_joined_axis(*each) for each in zip(one, other, strict=True)]
    axes = tuple(axis for axis in found if axis is not None)
    is_whole = len(axes) == len(found)
    return axes if is_whole and math.prod(axis.count for axis in axes) <= MAX_CELLS else None


def _joined_axis(one: Axis, other: Axis) -> Axis | None:
    if isinstance(one, ExactAxis) and isinstance(other, ExactAxis):
        return ExactAxis(dict.fromkeys((*one.values, *other.values)))
    if isinstance(one, SteppedAxis) and isinstance(other, SteppedAxis) and one.steps == other.steps:
        ends = [axis.lower(index) for axis in (one, other) for index in (0, axis.count - 1)]
        return SteppedAxis(one.steps, min(ends), max(ends), open_ended=one.open_ended)
    return None


def places_in(
    axes: Sequence[Axis], corner: Sequence[Feature], *, beyond_ends: bool = False
) -> tuple[int, ...] | None:
    """The buckets that begin at these values; None where one does not begin there, or is outside.

    Args:
        axes: an axis for each value.
        corner: the values.
        beyond_ends: whether what lies beyond an open end is in the outermost bucket.

    >>> axes = [SteppedAxis(1, 4, 64, open_ended=True)]
    >>> places_in(axes, [8]), places_in(axes, [128], beyond_ends=True)
    ((1,), (4,))
    >>> places_in(axes, [128])
    """
    found = [axis.index_of(value) for axis, value in zip(axes, corner, strict=True)]
    indices = tuple(index for index in found if index is not None)
    if len(indices) != len(found):
        return None
    begin = [axis.lower(index) for axis, index in zip(axes, indices, strict=True)]
    return indices if beyond_ends or begin == [*corner] else None


def _feature(value: object) -> Feature | None:
    """The value of a feature; None of what no bucket holds, such as a float."""
    if isinstance(value, (int, torch.SymInt)):
        return int(value)
    return value if isinstance(value, torch.dtype) else None


class Grid:
    """Decisions for every cell. Immutable.

    Args:
        axes: one for each feature.
        cells: a byte for each cell, the last axis varying fastest; a bit for each column.

    >>> grid = Grid((ExactAxis([False, True]), SteppedAxis(1, 4, 8)), bytes([0, 1, 2, 3]))
    >>> grid.takes([False, 9], column=0), grid.takes([True, 9], column=1)
    (True, True)
    >>> grid.takes([True, 16], column=0)
    False
    """

    def __init__(self, axes: Sequence[Axis], cells: bytes) -> None:
        self.axes = tuple(axes)
        self.cells = cells
        if len(cells) != math.prod(axis.count for axis in axes):
            raise ValueError("a grid has a cell for each combination of buckets")

    def indices_of(self, values: Iterable[object]) -> tuple[int, ...] | None:
        """The buckets that a call's features fall into; None if one is outside."""
        indices = [axis.index_of(value) for axis, value in zip(self.axes, values, strict=True)]
        found = tuple(index for index in indices if index is not None)
        return found if len(found) == len(self.axes) else None

    def bits(self, indices: Iterable[int]) -> int:
        """The byte of a cell."""
        cell = 0
        for axis, index in zip(self.axes, indices, strict=True):
            cell = cell * axis.count + index
        return self.cells[cell]

    def takes(self, values: Iterable[object], column: int) -> bool:
        """What a column decides for a call's features; false outside."""
        indices = self.indices_of(values)
        return indices is not None and bool(self.bits(indices) >> column & 1)

    def decisions(self, possible: Sequence[Iterable[int]], column: int) -> frozenset[bool]:
        """What a column decides in the cells of which each axis has one of some buckets."""
        found: set[bool] = set()
        for indices in itertools.product(*possible):
            found.add(bool(self.bits(indices) >> column & 1))
            if len(found) == 2:
                break
        return frozenset(found)

    def compiled(self) -> tuple[list[tuple[Any, ...]], bytes]:
        """The grid as the core takes it."""
        return [axis.compiled() for axis in self.axes], self.cells
