"""Sums over rows with few wide programs, for Triton's interpreter."""

from __future__ import annotations

from opgraft_kernels.integers import ceil_div
from opgraft_kernels.launches import Launch
from opgraft_kernels.rows import sum_partials_kernel

__all__ = ["BLOCK", "with_wide_sums"]

#: Columns of a program. A row of more has several, the last of which may be partly beyond its end.
BLOCK = 1024


def with_wide_sums(launch: Launch) -> Launch:
    """The launch, or if it is of sums over more columns than a program has, one of fewer programs.

    A column's sum does not depend on the columns beside it: the bits are the same.
    """
    if launch.kernel is not sum_partials_kernel:
        return launch
    _, _, other_sum, _, hidden, _ = launch.arguments
    block = launch.constexprs["BLOCK"]
    while block < min(hidden, BLOCK):
        block *= 2
    return launch._replace(
        grid=ceil_div(hidden, block) * (1 if other_sum is None else 2),
        constexprs={**launch.constexprs, "BLOCK": block},
    )
