"""Statistics of measurements that were made in rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median_and_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the interval that holds the true one in 95 of 100 runs.

    The ranks between which a median lies, the values being independent, are those of a binomial
    distribution, here approximated by a normal one.

    >>> median_and_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    (5.0, 2.0, 8.0)
    """
    ranked = sorted(values)
    low = max(0, len(ranked) // 2 - round(0.98 * len(ranked) ** 0.5))
    return statistics.median(ranked), ranked[low], ranked[-1 - low]
