"""What crossovers of row-wise kernels share: how they are declared, and features of rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from opgraft import Crossover, when

__all__ = ["TABLES", "aligned_widths", "crossover_of", "features_of_rows", "misalignment"]

#: The tables that the pack ships.
TABLES = Path(__file__).parent / "tables"


def crossover_of(
    calls: Callable[..., Iterable[Any]],
    version: int,
    sizes: Mapping[str, tuple[Any, int, int]],
    exact: Mapping[str, tuple[Any, ...]],
    *,
    bounded: Collection[str] = (),
) -> Crossover:
    """On what it depends whether kernels are faster than ATen's, as the pack's tables say.

    Args:
        calls: as in `opgraft.Crossover`: makes calls to measure of a device and the features.
        version: of the kernels: raised when they become faster or slower.
        sizes: features that fall into buckets: an expression of `opgraft.when`, and the smallest
            and the largest number that is measured. They decide for what lies beyond, too, where
            nothing changes any more: at one end native and kernel take as long as a launch does,
            at the other what the memory needs.
        exact: the others: an expression, and all of its values that are measured.
        bounded: the sizes of which beyond their ends nothing is known.

    >>> crossover_of(lambda device, *, rows: (), 1, {"rows": (when.size("self", 0), 2, 64)}, {})
    Crossover(rows=when.size('self', 0))
    """
    features = {**sizes, **exact}
    return Crossover(
        calls=calls,
        ranges={name: ends for name, (_, *ends) in features.items()},
        exact=exact,
        open_ended=sizes.keys() - set(bounded),
        version=version,
        tables=TABLES,
        **{name: expression for name, (expression, *_) in features.items()},
    )


def features_of_rows(
    tensor: str, row: Any, misalignments: tuple[int, ...] = (0, 1, 2)
) -> dict[str, tuple[Any, ...]]:
    """The exact features of a tensor's rows of so many elements: their bytes, and alignment."""
    itemsize = when.itemsize(tensor)
    misaligned = misalignment(row * itemsize)
    return {"itemsize": (itemsize, 2, 4), "misalignment": (misaligned, *misalignments)}


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
