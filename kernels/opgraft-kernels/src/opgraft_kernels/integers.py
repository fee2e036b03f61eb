"""Arithmetic with the sizes of tensors and tiles."""

from __future__ import annotations

import math

__all__ = ["ceil_div", "power_of_2", "power_of_2_within", "round_up", "unit_of"]


def ceil_div(a: int, b: int) -> int:
    """How many times `b` covers `a`.

    >>> ceil_div(8, 4), ceil_div(9, 4)
    (2, 3)
    """
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is no less than `n`.

    >>> round_up(8, 4), round_up(9, 4)
    (8, 12)
    """
    return ceil_div(n, multiple) * multiple


def power_of_2(n: int) -> int:
    """The least power of two that is no less than `n`."""
    return 1 << (n - 1).bit_length()


def power_of_2_within(n: int) -> int:
    """The largest power of two that is no more than `n`."""
    return 1 << (n.bit_length() - 1)


def unit_of(itemsize: int, *lengths: int) -> int:
    """How many elements may be loaded at once: up to 16 bytes of them, where all lengths (of rows,
    and how far they are apart) are multiples.

    >>> unit_of(2, 5496), unit_of(4, 5496), unit_of(2, 5496, 5500), unit_of(2, 1001)
    (8, 4, 4, 1)
    """
    return math.gcd(16 // itemsize, *lengths)
