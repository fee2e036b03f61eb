"""What crossovers of row-wise kernels share: features of rows, and where the pack's tables are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["TABLES", "aligned_width", "misalignment"]

#: The tables that the pack ships.
TABLES = Path(__file__).parent / "tables"


def misalignment(row: Any) -> Any:
    """Of the bytes of a row, a number or an expression: 0: a multiple of 16, 1: of 8, 2: of less.

    Where rows are no multiples of 16 bytes, kernels load less at a time.

    >>> misalignment(32), misalignment(24), misalignment(20)
    (0, 1, 2)
    """
    return (row % 16 + 15) // 16 + (row % 8 + 7) // 8


def aligned_width(width: int, itemsize: int, wanted: int) -> int | None:
    """A width in the bucket that begins at `width`, whose rows have the wanted misalignment.

    From the middle of the bucket: its lower end is a power of two, which kernels are best at, and
    the bucket's one decision holds for the widths in between, too.
    """
    middle = width + width // 2
    widths = (*range(middle, min(2 * width, middle + 16)), *range(width, min(middle, width + 16)))
    return next((each for each in widths if misalignment(each * itemsize) == wanted), None)
