"""Shared by the benchmarks: timing on the GPU, and native beside the overrides."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

import opgraft

Call: TypeAlias = Callable[[], object]


def natively(call: Call) -> Call:
    """The call without any override."""

    def native() -> object:
        with opgraft.disabled():
            return call()

    return native


def gpu_times(contenders: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, float]:
    """Median milliseconds a call, the GPU's time alone.

    Args:
        contenders: by name, the calls of a turn; several where inputs have to rotate.
        rounds: in each of them every contender has its turn, each time another one the first.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for calls in contenders.values():
        for call in calls:
            call()
    names = list(contenders)
    for n in range(rounds):
        first = n % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(_turn(contenders[name]))
    return {name: statistics.median(values) for name, values in times.items()}


_MOST_CYCLES = 2**28


def _turn(calls: Sequence[Call]) -> float:
    # The GPU is kept busy while the calls are issued, whatever they cost on the host.
    cycles = 4_000_000
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        start.record()
        for call in calls:
            call()
        end.record()
        late = start.query()  # the GPU had to wait for the host
        torch.cuda.synchronize()
        if not late or cycles >= _MOST_CYCLES:  # a call that waits for the GPU is always late
            return start.elapsed_time(end) / len(calls)
        cycles = min(2 * cycles, _MOST_CYCLES)


def end_to_end_time(call: Call, rounds: int, calls: int = 50) -> float:
    """Median milliseconds a call in a loop of calls, whatever it waits for: the host or the GPU."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / calls)
    return statistics.median(times)
