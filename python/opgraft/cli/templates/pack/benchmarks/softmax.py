"""From which size on is the kernel worth it, from a call's start to its result?

    make bench

Prints microseconds of a loop of calls, PyTorch's own kernel against this pack's, medians of rounds
that take turns. What `MIN_ELEMENTS` and `MIN_COLUMNS` let through should have a ratio above 1.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ["OPGRAFT_PACKS"] = "none"  # the pack under test is registered here

import opgraft
import torch

from my_pack import overrides

COLUMNS = (128, 1024, 4096, 16384)
ELEMENTS = tuple(2**power for power in range(16, 29, 2))
CALLS, ROUNDS = 20, 15


def microseconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS * 1e6


def measure(x: torch.Tensor) -> tuple[float, float]:
    """Medians: PyTorch's own, and the kernel's."""

    def call() -> torch.Tensor:
        return torch.softmax(x, -1)

    rounds: list[tuple[float, float]] = []
    for _ in range(ROUNDS + 2):  # two to warm up
        with opgraft.disabled():
            native = microseconds(call)
        rounds.append((native, microseconds(call)))
    native, mine = zip(*rounds[2:], strict=True)
    return statistics.median(native), statistics.median(mine)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this needs a GPU: Triton's interpreter says nothing about speed")
    overrides.MIN_ELEMENTS = overrides.MIN_COLUMNS = 0  # measure below them, too
    override = overrides.register_softmax("CUDA")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16")
    print(f"{'columns':>8} {'elements':>12} {'native us':>12} {'kernel us':>12} {'ratio':>8}")
    for columns in COLUMNS:
        for elements in ELEMENTS:
            x = torch.randn(elements // columns, columns, device="cuda", dtype=torch.bfloat16)
            native, mine = measure(x)
            print(f"{columns:8} {elements:12} {native:12.1f} {mine:12.1f} {native / mine:8.2f}")
    assert override.hits > 0


if __name__ == "__main__":
    main()
