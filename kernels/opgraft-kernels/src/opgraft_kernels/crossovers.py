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
    """The first width from `width` on, in its octave, whose rows have the wanted misalignment."""
    widths = range(width, min(2 * width, width + 16))
    return next((each for each in widths if misalignment(each * itemsize) == wanted), None)
