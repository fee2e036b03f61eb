"""Tiles of FlashAttention-4's forward without a mask: the chosen one against all others.

    python benchmarks/attention_tiles.py                   # every shape, on a Hopper GPU
    python benchmarks/attention_tiles.py --dims 64 80      # beside processes on others
    python benchmarks/attention_tiles.py --seconds 200     # what is left is said
    python benchmarks/attention_tiles.py --summary RESULTS # no GPU is needed
    python benchmarks/attention_tiles.py --smoke           # on the CPU: does this script work?

The estimates by which `cutedsl_tiles.forward_tile` of the pack's attention chooses come from these
results. For each head dimension and length every tile that there is to choose from takes its turn,
with the library's own and with torch's choice without overrides. Wrong results are left out, and
said. The summary says how the tile does that is chosen today.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _common
import torch
import torch.nn.functional as F
from _gpu import gpu_times, natively

import opgraft
from opgraft_kernels.attention import cutedsl_kernels
from opgraft_kernels.attention.cutedsl_tiles import ForwardTile, forward_tile, forward_tiles

RESULTS_NAME = "attention_tiles"
DIMS = (32, 48, 64, 72, 80, 96, 128)
#: As many queries as keys: vision transformers' of 14 and 16 pixels among them, and what fills
#: blocks exactly, nearly, or by a little more.
LENGTHS = (
    *(65, 90, 129, 144, 160, 176, 197, 208, 225, 240, 256, 257, 290, 325, 384, 400, 512),
    *(577, 730, 1024, 1025, 2048, 4096, 8192),
)
#: Elements of queries, at least; and heads, so that programs have several tiles each.
ELEMENTS, LEAST_HEADS = 2**24, 396
HEADS = 4  # of a batch
#: Of a Hopper GPU, whose results a summary reads.
MULTIPROCESSORS = 132
LIBRARY = "library"
#: A tile is better if it takes less than this share of the chosen one's time.
BETTER = 0.97


class Shape(NamedTuple):
    """Queries, keys and values, each ``[heads / HEADS, HEADS, length, dim]``."""

    dim: int
    length: int
    heads: int


def shapes(dims: Sequence[int]) -> list[Shape]:
    """
    >>> shapes([64])[6]
    Shape(dim=64, length=197, heads=1328)
    """
    return [
        Shape(dim, length, max(LEAST_HEADS, ELEMENTS // (length * dim)) // HEADS * HEADS)
        for dim in dims
        for length in LENGTHS
    ]


def _name(tile: ForwardTile | None) -> str:
    if tile is None:
        return LIBRARY
    return f"{tile.queries} x {tile.keys}" + (", shared" if tile.is_shared else "")


def _chosen(shape: Shape, multiprocessors: int) -> ForwardTile | None:
    dim, length, heads = shape
    return forward_tile(dim, 1, False, heads, length, length, multiprocessors)


def _candidates(shape: Shape, multiprocessors: int) -> list[ForwardTile]:
    """Those to choose from, and the chosen one as well where two programs load for both."""
    tiles = forward_tiles(shape.dim, shape.length, multiprocessors)
    chosen = _chosen(shape, multiprocessors)
    return tiles if chosen is None or not chosen.is_shared else [*tiles, chosen]


def _launch(tensors: Sequence[torch.Tensor], tile: ForwardTile | None) -> Callable[[], None]:
    def launch() -> None:
        chosen = cutedsl_kernels.forward_tile
        cutedsl_kernels.forward_tile = lambda *_: tile
        try:
            cutedsl_kernels.forward(*tensors, None, tensors[0].shape[-1] ** -0.5, False)
        finally:
            cutedsl_kernels.forward_tile = chosen

    return launch


def bench(shape: Shape, rounds: int) -> dict[str, Any]:
    """Microseconds by tile, the fastest first; and of native."""
    size = (shape.heads // HEADS, shape.length, HEADS, shape.dim)
    # As projections leave them.
    q, k, v, out = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    native = natively(lambda: F.scaled_dot_product_attention(q, k, v))
    expected = native()
    contenders: dict[str, Sequence[Callable[[], Any]]] = {"native": [native]}
    wrong = []
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    for tile in (None, *_candidates(shape, multiprocessors)):
        launch = _launch((q, k, v, out), tile)
        out.zero_()
        launch()
        if torch.allclose(out, expected, rtol=0, atol=0.05):  # type: ignore[attr-defined]
            contenders[_name(tile)] = [launch]
        else:
            wrong.append(_name(tile))
    times = {name: round(1e3 * each, 1) for name, each in gpu_times(contenders, rounds).items()}
    of_native = times.pop("native")
    by_time = dict(sorted(times.items(), key=lambda item: item[1]))
    return {**shape._asdict(), "native": of_native, "tiles": by_time, "wrong": wrong}


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """How the tiles do that are chosen today, by head dimension.

    >>> record = {"dim": 64, "length": 197, "heads": 1328, "native": 78.0}
    >>> print(summary([{**record, "tiles": {"128 x 208": 64.0, "library": 120.0}}]))
    64: 1 shapes, 1.22 x native, 1.88 x the library, 1.000 of the fastest; better for 0
    """
    lines = []
    for dim in sorted({record["dim"] for record in records}):
        times = []
        for record in records:
            shape = Shape(*(record[field] for field in Shape._fields))
            chosen = record["tiles"].get(_name(_chosen(shape, MULTIPROCESSORS)))
            if shape.dim == dim and chosen is not None:
                library = record["tiles"].get(LIBRARY, math.nan)
                least = min(record["tiles"].values())
                times.append((record["native"] / chosen, library / chosen, chosen / least))
        if times:
            by_native, by_library, by_least = zip(*times, strict=True)
            found = [each for each in by_library if not math.isnan(each)]
            of_library = f"{statistics.geometric_mean(found):.2f}" if found else "-"
            lines.append(
                f"{dim}: {len(times)} shapes, {statistics.geometric_mean(by_native):.2f} x native, "
                f"{of_library} x the library, {statistics.geometric_mean(by_least):.3f} of the "
                f"fastest; better for {sum(each * BETTER > 1 for each in by_least)}"
            )
    return "\n".join(lines)


def run(all_shapes: Sequence[Shape], rounds: int, seconds: float) -> None:
    """Measure shapes until the time is up, and add them to the results."""
    end = time.monotonic() + seconds
    gpu = torch.cuda.get_device_name()
    for number, shape in enumerate(all_shapes):
        if time.monotonic() > end:
            print(f"left: {len(all_shapes) - number} of {len(all_shapes)}")
            break
        record = bench(shape, rounds)
        print(*shape, record["native"], record["tiles"], *record["wrong"], flush=True)
        _common.add(RESULTS_NAME, gpu, [record], *Shape._fields)
        torch.cuda.empty_cache()


def smoke() -> None:
    """Without a GPU: that there are tiles to measure, the chosen ones among them."""
    for shape in shapes(DIMS):
        chosen = _chosen(shape, MULTIPROCESSORS)
        found = _candidates(shape, MULTIPROCESSORS)
        assert found and (chosen is None or chosen in found), shape
    print(f"tiles for {len(shapes(DIMS))} shapes; nothing was measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="run on the CPU, measure nothing")
    parser.add_argument("--summary", type=Path, metavar="RESULTS", help="measure nothing")
    parser.add_argument("--dims", type=int, nargs="+", default=DIMS, help="of heads")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all of them")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.summary:
        print(summary(json.loads(options.summary.read_text())["records"]))
        return
    if options.smoke:
        smoke()
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke runs without one")
    opgraft.disable()
    run(shapes(options.dims), options.rounds, options.seconds)


if __name__ == "__main__":
    main()
