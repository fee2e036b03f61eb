"""Ranks of a process group, forked from one process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable


def run(rank: Callable[[int], object], world: int) -> int:
    """Run a function for each rank, in processes of their own.

    They are forked, since importing torch in each would take most of the time.

    Returns:
        The largest exit status, without its sign.
    """
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank, args=(each,)) for each in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)
