"""Checks of calls of several threads."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch

from opgraft.ops.schema import Call
from opgraft.verification.checks.registry import check
from opgraft.verification.observation import (
    Failed,
    NotApplicable,
    Observation,
    first_difference_from_run,
    first_line,
    needs_plain_hit,
)
from opgraft.verification.samples import run
from opgraft.verification.single_override import is_interpreted, only_on_this_thread

#: Threads, and calls of each.
_THREADS = 4
_CALLS = 6
#: Times that a thread lets the others go on, in the midst of its calls.
_YIELDS = 500


@check(
    "once", suits=lambda seen: any(t.is_floating_point() for t in seen.override_run.call.tensors())
)
def check_threads(seen: Observation) -> None:
    """Calls of several threads at once give what one thread gets, each of values of its own."""
    if seen.is_random:
        raise NotApplicable("the op is random")
    needs_plain_hit(seen)
    override = seen.subject.override
    if is_interpreted(override):
        raise NotApplicable("Triton's interpreter works on one thread at a time")
    drawn = [
        Observation(seen.subject, seen.sample.with_new_values(draw)) for draw in range(_THREADS)
    ]
    ours = [each if each.took else seen for each in drawn]
    problems: list[str] = []
    start = threading.Barrier(len(ours))

    def work(mine: Observation, calls: list[Call]) -> None:
        try:
            start.wait(30)
            with torch.no_grad(), only_on_this_thread(override):
                for call in calls:
                    sys.setprofile(_Yielding())
                    result = run(call)
                    sys.setprofile(None)
                    if first_difference_from_run(mine, result) is not None:
                        problems.append("a result differs from what one thread gets")
        except Exception as error:
            problems.append(f"a thread raised {first_line(error)}")
        finally:
            sys.setprofile(None)

    for each in ours:
        assert each.override_run is not None  # before there is more than one thread
    # Before the threads start: if one cannot make its calls, the others would wait for it.
    each_ones = [[each.sample.call() for _ in range(_CALLS)] for each in ours]
    workers = [
        threading.Thread(target=work, args=each) for each in zip(ours, each_ones, strict=True)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if problems:
        raise Failed(f"with {len(workers)} threads: {problems[0]}")


class _Yielding:
    """Lets other threads go on after each call of C: between two, what they share is seen."""

    def __init__(self) -> None:
        self._left = _YIELDS // _CALLS

    def __call__(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_return" and self._left:
            self._left -= 1
            time.sleep(1e-5)
