"""How fast a device moves bytes and multiplies: what no op on it can be faster than.

Both are measured, with the profiler that measures the program: copies of several sizes (a small one
never gets to the bandwidth of a large one, and neither does any other op on as few bytes) and a
matrix product of each dtype that is asked for. They are kept in opgraft's cache, since they are the
device's.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import tempfile
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opgraft.core import store
from opgraft.ops.describing import dtype_name
from opgraft.profiling import timeline
from opgraft.router import threads

#: How many bytes are copied, that is, read and written: half of what is moved.
_COPIES = {
    "gpu": tuple(4096 << n for n in range(0, 19, 3)),
    "cpu": tuple(4096 << n for n in (0, 4, 8, 12, 14)),
}
_ROWS = {"gpu": 8192, "cpu": 1024}
_RUNS = 20
#: How often these are done, if it goes on getting faster.
_ROUNDS = 8


class Limits:
    """What a device does at most.

    Attributes:
        device: its name.
    """

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.device = name_of(where)
        self._path = _place(where, self.device)
        self._copies: list[tuple[int, float]] = []
        self._products: dict[str, float | None] = {}
        self._read()

    def seconds_to_move(self, count: int) -> float:
        """How long a copy takes that moves as many bytes, read and written."""
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
        part = math.log(count / low) / math.log(high / low)
        return fast * (slow / fast) ** part

    def flops_per_second(self, dtype: torch.dtype) -> float | None:
        """How many flops a matrix product of the dtype does in a second; None: there is none."""
        name = dtype_name(dtype)
        if name not in self._products:
            self._products[name] = _measured_product(self.where, dtype)
            self._write()
        return self._products[name]

    def as_dict(self) -> dict[str, Any]:
        """What was measured, for machines."""
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
            return  # not there, not to be trusted, or of another version: measured again

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a cache that cannot be written to is none
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, other = tempfile.mkstemp(dir=self._path.parent)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(self.as_dict(), file)
            os.replace(other, self._path)


def name_of(where: torch.device) -> str:
    """A device's name, as its maker calls it."""
    if where.type != "cpu":
        module = torch.get_device_module(where)
        return str(module.get_device_name(where.index or 0))
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {torch.get_num_threads()} threads"
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _place(where: torch.device, device: str) -> Path:
    # How a product of float32 is computed is the program's choice.
    parts = [where.type, device, torch.__version__, torch.get_float32_matmul_precision()]
    return store.root() / "limits" / (re.sub(r"[^\w.+-]+", "_", "-".join(parts)) + ".json")


def _measured_copies(where: torch.device) -> list[tuple[int, float]]:
    found = []
    for size in _COPIES[_kind(where)]:
        source = torch.zeros(size, dtype=torch.uint8, device=where)
        target = torch.empty_like(source)
        found.append((2 * size, _seconds(partial(target.copy_, source))))
        if _is_scarce(where, 32 * size):
            break
    return [
        (size, min(seconds for _, seconds in found[index:]))  # fewer bytes never take longer
        for index, (size, _) in enumerate(found)
    ]


def _measured_product(where: torch.device, dtype: torch.dtype) -> float | None:
    rows = _ROWS[_kind(where)]
    while _is_scarce(where, 4 * rows * rows * dtype.itemsize):
        rows //= 2
    try:
        left = torch.ones(rows, rows, dtype=torch.float32, device=where).to(dtype)
        right = left.clone()
        out = torch.empty_like(left)
        return 2 * rows**3 / _seconds(lambda: torch.mm(left, right, out=out))
    except RuntimeError:  # this device has no product of the dtype
        return None


def _kind(where: torch.device) -> str:
    return "cpu" if where.type == "cpu" else "gpu"


def _is_scarce(where: torch.device, count: int) -> bool:
    """Whether so many bytes would not fit beside what the program holds."""
    return where.type == "cuda" and torch.cuda.mem_get_info(where)[0] < count


def _seconds(run: Callable[[], object]) -> float:
    """The shortest time of what it runs on its device, or of its op where that is the CPU.

    The shortest, because it is a limit: clocks that are not up yet and other processes only add to
    it. So it is run until that does not help any more.
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
    recorded = timeline.recorded(profiler)
    times = [kernel.seconds for kernel in recorded.kernels]
    times = times or [n.end - n.start for n in recorded.nodes if n.is_op and n.parent is None]
    return max(min(times), 1e-9)
