"""A sample of combinations in which each value is met, chosen by a rule.

What there is to compile grows as a product of dtypes, tiles and options, and a whole run of it
takes minutes. The tests compile a sample; `make compile-all` compiles all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["IS_EVERY_CONFIGURATION", "covering", "sample"]

#: Whether all is to be compiled, and not a sample.
IS_EVERY_CONFIGURATION = os.environ.get("COMPILE_ALL", "") not in ("", "0")

T = TypeVar("T")


def sample(items: Iterable[T], values: Callable[[T], Iterable[object]]) -> list[T]:
    """Those of `items` that this run is to compile: `covering` ones, or all."""
    return list(items) if IS_EVERY_CONFIGURATION else covering(items, values)


def covering(items: Iterable[T], values: Callable[[T], Iterable[object]]) -> list[T]:
    """A few of `items`, in their order, that have each value that any of them has.

    The next is the one with most values that are not met yet. Among equals a hash decides: not the
    place in `items`, by which the first of each loop would be all that is met together.

    Args:
        items: what to choose from.
        values: the values of an item. Their `repr` tells them apart.
    """
    items = list(items)
    of_items = [frozenset(map(repr, values(item))) for item in items]
    ranks = [_hash(of_item) for of_item in of_items]
    missing, chosen = frozenset[str]().union(*of_items), set[int]()
    while missing:
        best = max(range(len(items)), key=lambda i: (len(of_items[i] & missing), ranks[i]))
        chosen.add(best)
        missing -= of_items[best]
    return [items[i] for i in sorted(chosen)]


def _hash(values: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(values)).encode()).hexdigest()
