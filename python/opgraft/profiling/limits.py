"""Measures a device's limits: how fast it moves bytes and multiplies matrices.

No op on the device can be faster. The profiler that measures the program measures the limits too:
copies of several sizes, and a matrix product of each dtype that the program multiplies. There are
several sizes because a small copy never reaches the bandwidth of a large one, and neither does any
other op on as few bytes. opgraft's cache keeps the limits, because they are the device's.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opgraft.base import files, processor
from opgraft.core import store
from opgraft.ops.describing import dtype_name
from opgraft.profiling import timeline
from opgraft.router import threads

#: How many bytes each copy reads, and writes: it moves twice as many.
_COPY_BYTES = {
    "gpu": tuple(4096 << n for n in range(0, 19, 3)),
    "cpu": tuple(4096 << n for n in (0, 4, 8, 12, 14)),
}
_MATRIX_ROWS = {"gpu": 8192, "cpu": 1024}
_RUNS = 20
#: How it is measured: limits of another way are measured anew.
_METHOD = "2"
#: How many times the runs are repeated while they still get faster.
_ROUNDS = 8


class Limits:
    """The limits of a device.

    Attributes:
        device: its name.
    """

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.device = device_name(where)
        self._path = _cache_path(where, self.device)
        self._copies: list[tuple[int, float]] = []
        self._products: dict[str, float | None] = {}
        self._read()

    def seconds_to_move(self, count: int) -> float:
        """How long a copy takes that reads and writes as many bytes together."""
        if not self._copies:
            self._copies = _measured_copies(self.where)
            self._write()
        sizes = [size for size, _ in self._copies]
        first, last = self._copies[0], self._copies[-1]
        if count <= first[0]:
            return first[1]
        if count >= last[0]:
            return last[1] * count / last[0]
        right = bisect_left(sizes, count)
        (low, fast), (high, slow) = self._copies[right - 1 : right + 1]
        fraction = math.log(count / low) / math.log(high / low)
        return fast * (slow / fast) ** fraction

    def flops_per_second(self, dtype: torch.dtype) -> float | None:
        """The flops in a second of a matrix product in a dtype; None where the device has none."""
        name = dtype_name(dtype)
        if name not in self._products:
            self._products[name] = _measured_product(self.where, dtype)
            self._write()
        return self._products[name]

    def as_dict(self) -> dict[str, Any]:
        """What was measured, as a dict that `json` can write."""
        return {
            "device": self.device,
            "copies": [{"bytes": size, "seconds": seconds} for size, seconds in self._copies],
            "flops_per_second": dict(self._products),
        }

    def _read(self) -> None:
        try:
            found = json.loads(store.read_trusted(self._path))
            self._copies = [
                (int(each["bytes"]), float(each["seconds"])) for each in found["copies"]
            ]
            self._products = dict(found["flops_per_second"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return  # missing, not trusted, or of another version: the limits are measured again

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # without a writable cache the limits are not kept
            files.make_folder(self._path.parent)
            files.replace(self._path, json.dumps(self.as_dict()))


def device_name(where: torch.device) -> str:
    """A device's name, as its vendor gives it."""
    if where.type != "cpu":
        module = torch.get_device_module(where)
        return str(module.get_device_name(where.index or 0))
    return f"{processor.name()}, {torch.get_num_threads()} threads"


def _cache_path(where: torch.device, device: str) -> Path:
    # The program chooses how a matrix product of float32 is computed.
    parts = [where.type, device, torch.__version__, torch.get_float32_matmul_precision(), _METHOD]
    return store.root() / "limits" / (re.sub(r"[^\w.+-]+", "_", "-".join(parts)) + ".json")


def _measured_copies(where: torch.device) -> list[tuple[int, float]]:
    found = []
    for size in _COPY_BYTES[_kind(where)]:
        source = torch.zeros(size, dtype=torch.uint8, device=where)
        target = torch.empty_like(source)
        found.append((2 * size, _seconds(partial(target.copy_, source))))
        if _is_memory_short(where, 32 * size):
            break
    return [
        (size, min(seconds for _, seconds in found[index:]))  # fewer bytes never take longer
        for index, (size, _) in enumerate(found)
    ]


def _measured_product(where: torch.device, dtype: torch.dtype) -> float | None:
    rows = _MATRIX_ROWS[_kind(where)]
    while _is_memory_short(where, 4 * rows * rows * dtype.itemsize):
        rows //= 2
    try:
        # A product of equal numbers takes less power, and so the clock is higher than it is for
        # any program. The generator is our own: the program's is not advanced.
        generator = torch.Generator(device=where).manual_seed(0)
        left = torch.randn(rows, rows, device=where, generator=generator).to(dtype)
        right = left.t().contiguous()
        out = torch.empty_like(left)
        return 2 * rows**3 / _seconds(lambda: torch.mm(left, right, out=out))
    except RuntimeError:  # this device has no product of the dtype
        return None


def _kind(where: torch.device) -> str:
    return "cpu" if where.type == "cpu" else "gpu"


def _is_memory_short(where: torch.device, count: int) -> bool:
    """Whether so many bytes would not fit beside the memory that the program uses."""
    return where.type == "cuda" and torch.cuda.mem_get_info(where)[0] < count


def _seconds(run: Callable[[], object]) -> float:
    """The shortest time of the kernels that `run` launches, or of its op on the CPU.

    It is the shortest because it is a limit: clocks that are still low and other processes only
    make it longer. So it is run again until it does not get shorter any more.
    """
    best = float("inf")
    for _ in range(_ROUNDS):
        before, best = best, min(best, _shortest(run))
        if best > 0.97 * before:
            break
    return best


def _shortest(run: Callable[[], object]) -> float:
    with (
        torch.no_grad(),
        threads.scope(threads.EVERYTHING),  # native kernels are what a limit is of
        torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler,
    ):
        for _ in range(_RUNS):
            run()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    recorded = timeline.read_profile(profiler)
    return max(_of_one_run(recorded), 1e-9)


def _of_one_run(recorded: timeline.Timeline) -> float:
    """The shortest time of each kernel, as often as a run launches it; of the op on the CPU."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in recorded.kernels:
        by_name[kernel.name].append(kernel.seconds)
    if not by_name:
        return min(n.end - n.start for n in recorded.nodes if n.is_op and n.parent is None)
    return sum(min(times) * len(times) / _RUNS for times in by_name.values())
