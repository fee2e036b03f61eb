"""What crossovers of row-wise kernels share: features of rows, and where the pack's tables are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["TABLES", "aligned_widths", "misalignment"]

#: The tables that the pack ships.
TABLES = Path(__file__).parent / "tables"


def misalignment(row: Any) -> Any:
    """Of the bytes of a row, a number or an expression: 0: a multiple of 16, 1: of 8, 2: of less.

    Where rows are no multiples of 16 bytes, kernels load less at a time.

    >>> misalignment(32), misalignment(24), misalignment(20)
    (0, 1, 2)
    """
    return (row % 16 + 15) // 16 + (row % 8 + 7) // 8


def aligned_widths(width: int, itemsize: int, wanted: int) -> Iterator[int]:
    """Widths in the bucket that begins at `width`, whose rows have the wanted misalignment.

    One from the middle and one from near the lower end, where kernels that pad rows to a power of
    two have most to pad. The bucket's one decision holds for all widths; a power of two, which
    kernels are best at, says little of the others.

    >>> [*aligned_widths(64, 2, 0)], [*aligned_widths(64, 2, 2)], [*aligned_widths(8, 2, 0)]
    ([96, 72], [97, 73], [8])
    """
    starts = (width + width // 2, width + width // 8)
    found = dict.fromkeys(_first(start, width, itemsize, wanted) for start in starts)
    return (each for each in found if each is not None)


def _first(start: int, width: int, itemsize: int, wanted: int) -> int | None:
    """The first such width from a place in the bucket on, or else from its lower end on."""
    after, before = range(start, min(2 * width, start + 16)), range(width, min(start, width + 16))
    return next((n for n in (*after, *before) if misalignment(n * itemsize) == wanted), None)
