"""Times calls on a device and on the host, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeAlias

import torch

from opgraft.crossover import rule

Call: TypeAlias = Callable[[], object]

#: How long the device is kept busy at first while calls are issued, in its clock's cycles.
_CYCLES = 1_000_000
#: No sleep is longer: a tenth of a second.
_MOST_CYCLES = 2**28
#: How long a burst is to take on the device, and how many calls it makes at the most.
_BURST_SECONDS, _MOST_CALLS = 2e-3, 64
#: On the CPU, where calls are not issued ahead: how long a burst takes, and its fewest calls.
_CPU_SECONDS, _FEWEST_CPU_CALLS = 2e-3, 5


class Way(NamedTuple):
    """One way to make a call.

    Attributes:
        scope: a context in which the calls go this way.
        calls: the calls of a turn. Several, so that none finds its arguments in the caches.
        warm_ups: how many calls it takes to compile what is compiled and to record launch plans.
        rounds: after so many it is not measured again; None: in every round.
        most_calls: of a burst.
    """

    scope: Callable[[], AbstractContextManager[object]]
    calls: Sequence[Call]
    warm_ups: int = 1
    rounds: int | None = None
    most_calls: int = _MOST_CALLS


class Turns:
    """Microseconds of a call by each way, a number for each of its rounds.

    In each round every way has its turn, each time another one the first, so that a device that
    changes its clock changes it for all; forth and back, as the host takes longer for a way that
    follows another one than for the same way again.
    """

    def __init__(self, ways: Mapping[str, Way], device: torch.device) -> None:
        self._ways = dict(ways)
        self._device = device
        self.rounds = 0
        self.on_device: dict[str, list[float]] = {name: [] for name in ways}
        self.on_host: dict[str, list[float]] = {name: [] for name in ways}
        #: By way: how long the device has to sleep for the host to issue its calls meanwhile.
        self._cycles = dict.fromkeys(ways, _CYCLES)
        #: By way: how many calls a burst makes.
        self._counts = {name: _warm_up(way, device) for name, way in self._ways.items()}

    def round(self) -> None:
        """Measure every way once more."""
        names = [
            name
            for name, way in self._ways.items()
            if way.rounds is None or self.rounds < way.rounds
        ]
        first = self.rounds // 2 % len(names)
        names = names[first:] + names[:first]
        if self.rounds % 2:
            names.reverse()
        self.rounds += 1
        for name in names:
            way = self._ways[name]
            with way.scope():
                host, device, self._cycles[name] = _burst(
                    way.calls, self._device, self._counts[name], self._cycles[name]
                )
            self.on_host[name].append(host * 1e6)
            self.on_device[name].append(device * 1e6)

    def drop(self, name: str) -> None:
        """Measure a way no more."""
        del self._ways[name], self.on_device[name], self.on_host[name]

    def ratios(self, one: str, other: str) -> list[float]:
        """By round: how much longer one way takes than another, on the device or on the host."""
        return _ratios(self._longer(one), self._longer(other))

    def gains(self, one: str, other: str) -> list[float]:
        """By round: what the rule compares with `1 + MARGIN`, where `one` stands for native."""
        others = zip(self.on_device[other], self.on_host[other], strict=True)
        pairs = zip(self._longer(one), others, strict=True)
        return [rule.gain(longer, *times) for longer, times in pairs]

    def ratios_on_device(self, one: str, other: str) -> list[float]:
        """By round: how much longer one way takes on the device than another."""
        return _ratios(self.on_device[one], self.on_device[other])

    def _longer(self, name: str) -> Iterator[float]:
        return map(max, self.on_device[name], self.on_host[name])

    def median(self, name: str) -> tuple[float, float]:
        """The median on the device and on the host."""
        return statistics.median(self.on_device[name]), statistics.median(self.on_host[name])


def _ratios(times: Iterable[float], others: Iterable[float]) -> list[float]:
    return [a / b for a, b in zip(times, others, strict=True)]


def _warm_up(way: Way, device: torch.device) -> int:
    """Compile what a way compiles, record its launch plan, and count the calls of its bursts."""
    with way.scope():
        for _ in range(way.warm_ups):
            way.calls[0]()
        _synchronize(device)
        start = time.perf_counter()
        way.calls[0]()
        _synchronize(device)
        seconds = time.perf_counter() - start
    return max(1, min(round(_BURST_SECONDS / seconds), way.most_calls))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _burst(
    calls: Sequence[Call], device: torch.device, count: int, cycles: int
) -> tuple[float, float, int]:
    """Seconds a call, on the host and on the device, and for how many cycles that slept."""
    if device.type != "cuda":
        seconds = _host_seconds(calls, len(calls))
        count = max(_FEWEST_CPU_CALLS, min(1000, round(_CPU_SECONDS / max(seconds, 1e-9))))
        seconds = _host_seconds(calls, count)
        return seconds, seconds, cycles
    with torch.cuda.device(device):
        return _cuda_burst(calls, count, cycles)


def _host_seconds(calls: Sequence[Call], count: int) -> float:
    start = time.perf_counter()
    for index in range(count):
        calls[index % len(calls)]()
    return (time.perf_counter() - start) / count


def _cuda_burst(calls: Sequence[Call], count: int, cycles: int) -> tuple[float, float, int]:
    """The device sleeps while the calls are issued, so that it never waits for the host."""
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        start.record()
        host = _host_seconds(calls, count)
        end.record()
        late = start.query()  # the sleep was too short
        torch.cuda.synchronize()
        # A call that waits for the device waits for the sleep, too, however long it is. What such
        # calls take is taken as it is, with what the device waits for the host.
        if not late or cycles >= _MOST_CYCLES:
            return host, start.elapsed_time(end) / 1e3 / count, cycles
        cycles = min(2 * cycles, _MOST_CYCLES)
