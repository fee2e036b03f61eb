"""Tiles of softmax over another dimension than the last: the chosen one against all others.

    python benchmarks/softmax_tiles.py                # every kind of shape, on a GPU
    python benchmarks/softmax_tiles.py --part 2/3     # a third of them, beside processes on others
    python benchmarks/softmax_tiles.py --seconds 200  # what is left is said
    python benchmarks/softmax_tiles.py --summary RESULTS  # no GPU is needed
    python benchmarks/softmax_tiles.py --smoke        # on the CPU: does this script work?

The rules that choose a tile, `strided_forward` and `strided_backward` of the pack's softmax, come
from these results. A kind of shape is a direction, a size of elements, a length of lines, and how
many lines are neighbours in memory: many, some or few, in numbers that vectors of 16 bytes divide
or do not. For each kind every sensible tile takes its turn with the chosen one, with native and
with a copy. Lines are a little shorter than a power of two, as those of models are. Wrong results
are left out, and said.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import _common
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from _gpu import gpu_times, natively

import opgraft
from opgraft_kernels.softmax import triton_kernels

RESULTS_NAME = "softmax_tiles"
#: Lines of a tile, and of each its length in elements and its warps.
LINES = (2, 4, 8, 16, 32, 64, 128, 256)
PARTS = (256, 512, 1024, 2048)
WARPS = (1, 2, 4, 8, 16)
#: Bytes of a tile: fewer are not worth a program, more spill registers.
FEWEST_BYTES = 1024
MOST_BYTES = {"forward": 65536, "backward": 32768}
#: Elements of a thread, by the size of one. A warp alone may have more.
EACH = {2: (16, 32, 64), 4: (8, 16, 32)}
EACH_ALONE = 128
#: Numbers of neighbouring lines by the size of an element: that vectors of 16 bytes divide; others.
WIDE = {2: (200, 24, 8), 4: (196, 20, 4)}
NARROW = (201, 25, 3)
#: Lengths of lines: the shortest, and some five sixths of powers of two.
SIZES = (14, *(n * 27 // 32 | 1 for n in (32, 64, 128, 256, 512, 1024, 2048)), 3482)
#: Elements of a tensor, by the size of one: no cache holds two.
ELEMENTS = {2: 2**26, 4: 2**25}
DTYPES = {2: torch.bfloat16, 4: torch.float32}
WORKERS = 15
#: A tile is better if it takes less than this share of the chosen one's time.
BETTER = 0.95


class Kind(NamedTuple):
    """A kind of shape: ``[outer, size, inner]``, softmax over `size`."""

    direction: str
    itemsize: int
    size: int
    inner: int


def kinds() -> Iterator[Kind]:
    for direction, itemsize, size in itertools.product(MOST_BYTES, DTYPES, SIZES):
        for inner in (*WIDE[itemsize], *NARROW):
            yield Kind(direction, itemsize, size, inner)


def tiles(kind: Kind) -> Iterator[triton_kernels.Tile]:
    """Every sensible tile.

    >>> [_name(tile) for tile in tiles(Kind("forward", 2, 13, 3))]
    []
    >>> [_name(tile) for tile in tiles(Kind("forward", 4, 108, 3))][:2]
    ['2 x 128, 1 warps', '4 x 128, 1 warps']
    """
    block = triton_kernels.power_of_2(kind.size)
    parts = [block, *(part for part in PARTS if 512 < block > part)]
    for lines, part, warps in itertools.product(LINES, parts, WARPS):
        elements = lines * part
        is_sensible = (
            lines <= triton_kernels.power_of_2(kind.inner)
            and (lines >= 8 or kind.inner < 100)
            and FEWEST_BYTES <= elements * kind.itemsize <= MOST_BYTES[kind.direction]
        )
        each = elements // (32 * warps)
        if is_sensible and (each in EACH[kind.itemsize] or (each == EACH_ALONE and warps == 1)):
            yield triton_kernels.Tile(lines, part, part >= block, warps)


def _inputs(kind: Kind, outer: int, device: str) -> tuple[torch.Tensor, ...]:
    dtype = DTYPES[kind.itemsize] if device == "cuda" else torch.float32
    x = torch.randn(outer, kind.size, kind.inner, device=device, dtype=dtype)
    if kind.direction == "forward":
        return x, torch.empty_like(x)
    return x, torch.softmax(torch.randn_like(x), 1), torch.empty_like(x)


def _launch(
    kind: Kind, tensors: Sequence[torch.Tensor], tile: triton_kernels.Tile | None
) -> Callable[[], Any]:
    """The kernel's launch: log-softmax's forward, softmax's backward. None: the tile it chooses."""
    chosen = triton_kernels.strided_tile_of
    if tile is not None:
        triton_kernels.strided_tile_of = lambda *_: tile
    try:
        if kind.direction == "forward":
            return triton_kernels.plan_forward(*tensors, dim=1, log=True)
        return triton_kernels.plan_backward(*tensors, dim=1, log=False)
    finally:
        triton_kernels.strided_tile_of = chosen


def _natively(kind: Kind, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if kind.direction == "forward":
        return torch.log_softmax(tensors[0], 1)
    return torch._softmax_backward_data(tensors[0], tensors[1], 1, tensors[0].dtype)


def _is_right(kind: Kind, tensors: Sequence[torch.Tensor], launch: Callable[[], Any]) -> bool:
    tensors[-1].zero_()
    launch()
    expected = natively(lambda: _natively(kind, tensors))()
    return torch.allclose(tensors[-1].float(), expected.float(), rtol=0.02, atol=0.03)  # type: ignore[attr-defined]


def _compile(kind: Kind, some: Sequence[triton_kernels.Tile]) -> None:
    """In a worker: Triton's cache on disk has the kernels afterwards."""
    tensors = _inputs(kind, 2, "cuda")
    for tile in some:
        with contextlib.suppress(Exception):  # the measuring process meets it, too, and says it
            _launch(kind, tensors, tile)()


def _name(tile: triton_kernels.Tile) -> str:
    return f"{tile.lines} x {tile.block}, {tile.num_warps} warps"


def bench(kind: Kind, rounds: int) -> dict[str, Any]:
    """Microseconds by tile, the fastest first; of the chosen one, of native, and of a copy."""
    outer = max(1, ELEMENTS[kind.itemsize] // kind.size // kind.inner)
    sets = [_inputs(kind, outer, "cuda") for _ in range(2)]
    contenders: dict[str, Sequence[Callable[[], Any]]] = {
        "native": [natively(lambda t=t: _natively(kind, t)) for t in sets],  # type: ignore[misc]
        "copy": [lambda t=t: t[-1].copy_(t[0]) for t in sets],  # type: ignore[misc]
    }
    wrong = []
    for tile in (None, *tiles(kind)):
        name = "chosen" if tile is None else _name(tile)
        try:
            launches = [_launch(kind, tensors, tile) for tensors in sets]
            is_right = _is_right(kind, sets[0], launches[0])
        except Exception as error:  # too many registers, say
            print(f"{kind}: without {name}: {str(error).splitlines()[0][:80]}", flush=True)
            continue
        if is_right:
            contenders[name] = launches
        else:
            wrong.append(name)
    times = {name: round(1e3 * each, 1) for name, each in gpu_times(contenders, rounds).items()}
    apart = {name: times.pop(name) for name in ("native", "copy", "chosen")}
    by_time = sorted(times.items(), key=lambda item: item[1])
    return {**kind._asdict(), **apart, "tiles": dict(by_time), "wrong": wrong}


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """How the chosen tile does, by direction and size of elements.

    >>> record = {"direction": "forward", "itemsize": 2, "copy": 8.0, "native": 30.0}
    >>> print(summary([{**record, "chosen": 10.0, "tiles": {"one": 9.0, "other": 12.0}}]))
    forward, 2 bytes: 1 kinds, 0.80 of a copy, 3.00 x native, 0.90 of it the fastest; better for 1
    """
    lines = []
    for direction, itemsize in sorted({(r["direction"], r["itemsize"]) for r in records}):
        some = [
            r
            for r in records
            if (r["direction"], r["itemsize"]) == (direction, itemsize) and r["tiles"]
        ]
        least = [min(r["tiles"].values()) / r["chosen"] for r in some]
        lines.append(
            f"{direction}, {itemsize} bytes: {len(some)} kinds, "
            f"{statistics.geometric_mean(r['copy'] / r['chosen'] for r in some):.2f} of a copy, "
            f"{statistics.geometric_mean(r['native'] / r['chosen'] for r in some):.2f} x native, "
            f"{statistics.geometric_mean(least):.2f} of it the fastest; "
            f"better for {sum(each < BETTER for each in least)}"
        )
    return "\n".join(lines)


def run(mine: Sequence[Kind], rounds: int, seconds: float) -> None:
    """Measure kinds until the time is up, and add them to the results."""
    end = time.monotonic() + seconds
    gpu = torch.cuda.get_device_name()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool:
        waiting: dict[Kind, list[Future[None]]] = {}
        for kind in mine:
            all_tiles = [*tiles(kind)]
            some = (all_tiles[n::3] for n in range(3))
            waiting[kind] = [pool.submit(_compile, kind, each) for each in some if each]
        # All of them first: workers use the GPU, too.
        for future in itertools.chain.from_iterable(waiting.values()):
            if time.monotonic() > end:
                break
            future.result()
        pool.shutdown(cancel_futures=True)
    for number, kind in enumerate(mine):
        if time.monotonic() > end:
            print(f"left: {len(mine) - number} of {len(mine)}")
            break
        record = bench(kind, rounds)
        fastest = itertools.islice(record["tiles"].items(), 3)
        figures = {name: record[name] for name in ("copy", "native", "chosen")}
        print(*kind, figures, *fastest, *record["wrong"], flush=True)
        _common.add(RESULTS_NAME, gpu, [record], *Kind._fields)
        torch.cuda.empty_cache()


def smoke() -> None:
    """Each direction under the interpreter with two tiles: whether the script works."""
    for direction in MOST_BYTES:
        kind = Kind(direction, 4, 14, 25)
        tensors = _inputs(kind, 2, "cpu")
        for tile in (None, *itertools.islice(tiles(kind), 2)):
            assert _is_right(kind, tensors, _launch(kind, tensors, tile)), (kind, tile)
    print("kernels agree with native; nothing was measured")


def _part(text: str) -> tuple[int, int]:
    number, count = (int(each) for each in text.split("/"))
    if not 1 <= number <= count:
        raise ValueError
    return number, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="run on the CPU, measure nothing")
    parser.add_argument("--summary", type=Path, metavar="RESULTS", help="measure nothing")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="of the kinds")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all of them")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.summary:
        print(summary(json.loads(options.summary.read_text())["records"]))
        return
    opgraft.disable()
    if options.smoke:
        smoke()
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke runs without one")
    number, count = options.part
    run([*kinds()][number - 1 :: count], options.rounds, options.seconds)


if __name__ == "__main__":
    main()
