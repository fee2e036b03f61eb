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

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import _tiles
import torch
from _tiles import Tensors

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from opgraft_kernels.softmax import triton_kernels

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


def _inputs(kind: Kind, device: str, is_small: bool) -> Tensors:
    outer = 2 if is_small else max(1, ELEMENTS[kind.itemsize] // kind.size // kind.inner)
    dtype = DTYPES[kind.itemsize] if device == "cuda" else torch.float32
    x = torch.randn(outer, kind.size, kind.inner, device=device, dtype=dtype)
    if kind.direction == "forward":
        return x, torch.empty_like(x)
    return x, torch.softmax(torch.randn_like(x), 1), torch.empty_like(x)


def _launch(kind: Kind, tensors: Tensors, tile: triton_kernels.Tile | None) -> Callable[[], Any]:
    """The kernel's launch: log-softmax's forward, softmax's backward."""
    with _tiles.choosing(triton_kernels, "strided_tile_of", tile):
        if kind.direction == "forward":
            return triton_kernels.plan_forward(*tensors, dim=1, log=True)
        return triton_kernels.plan_backward(*tensors, dim=1, log=False)


def _natively(kind: Kind, tensors: Tensors) -> torch.Tensor:
    if kind.direction == "forward":
        return torch.log_softmax(tensors[0], 1)
    return torch._softmax_backward_data(tensors[0], tensors[1], 1, tensors[0].dtype)


def _copy(kind: Kind, tensors: Tensors) -> object:
    return tensors[-1].copy_(tensors[0])


def _name(tile: triton_kernels.Tile) -> str:
    return f"{tile.lines} x {tile.block}, {tile.num_warps} warps"


def _group(record: Mapping[str, Any]) -> str:
    return f"{record['direction']}, {record['itemsize']} bytes"


STUDY = _tiles.Study(
    "softmax_tiles", kinds, tiles, _name, _inputs, _launch, _natively, _copy, _group
)


if __name__ == "__main__":
    _tiles.main(STUDY, [Kind(each, 4, 14, 25) for each in MOST_BYTES], __doc__)
