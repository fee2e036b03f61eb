"""Which tiles a forward of FlashAttention-4 computes, and by how many programs.

A program for each tile begins by waiting for its first queries and keys, and ends by writing its
output, while its multiprocessor computes nothing: of short rows of keys for much of the time. A
program that walks over tiles loads the next one's while it computes. But which program computes
which tiles is then known before it begins, so one that is slow makes all wait: of long rows of keys
a program for each tile is faster.

What is compared are estimates: the tiles that a multiprocessor computes, one after the other, times
what one costs, which is most of all the keys of its blocks. So blocks are best of as many keys that
they hold a row and little more: 197 keys are one block of 208.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from opgraft_kernels.integers import ceil_div, round_up

__all__ = [
    "SHORT_KEYS",
    "ForwardTile",
    "ShortTile",
    "biased_forward_tile",
    "dense_forward_tile",
    "dense_forward_tiles",
    "forward_dim",
    "forward_tile",
    "forward_tiles",
    "listed_backward_tile",
    "product_dim",
    "short_backward_fits",
    "short_backward_tile",
    "wide_dim",
]


class ForwardTile(NamedTuple):
    """A tile, and how many programs walk over tiles of that size; 0: each tile has a program."""

    queries: int
    keys: int
    programs: int
    #: Of how many blocks keys, and values, are in shared memory at a time.
    stages: int = 2
    #: Whether rows are as long in shared memory as `wide_dim` says.
    is_wide: bool = False
    #: Whether two programs side by side load keys and values for both.
    is_shared: bool = False


class ShortTile(NamedTuple):
    """What a backward of short sequences is compiled for; see `short_backward_tile`."""

    queries: int
    #: Blocks of `SHORT_KEYS`.
    key_blocks: int


class _Call(NamedTuple):
    """What the tiles of a call depend on; see `forward_tile`."""

    head_dim: int
    group: int
    causal: bool
    heads: int
    queries: int
    keys: int
    multiprocessors: int


class _Costs(NamedTuple):
    """What tiles cost, in the time that a tile of `_LOW` queries takes for one of its keys."""

    #: A tile of `_HIGH` queries, in those of `_LOW`.
    high: float
    #: One of the library's up to `_LIBRARY_WIDE_DIMS`, which hold their probabilities in shared
    #: memory above `_WIDE_DIMS`.
    library_high: float
    #: For how many keys' time a program of one tile waits.
    wait: int
    #: A fixed share of the tiles for each program, by head dimension, as a part of the time.
    fixed: float


# Those of `_COSTS`, and the three below, are such that the tiles that are chosen are the fastest of
# `benchmarks/attention_tiles.py`, or nearly. Causal tiles, which differ in their keys, were not
# compared so.
_COSTS = _Costs(high=1.2, library_high=1.25, wait=150, fixed=1.5e-4)
_CAUSAL_COSTS = _Costs(high=1.3, library_high=1.36, wait=176, fixed=2e-4)
# Of a tile that is not causal, beside its keys: the tile itself; that it has several blocks, and
# each block, of `_LOW` queries and of `_HIGH`.
_A_TILE, _SEVERAL_BLOCKS, _A_BLOCK = 80, (40, 60), (12, 16)
# A program's shared memory holds a tile of queries and one of the output up to this dimension.
_MOST_DIMS = 128
# Up to this one three warp groups have registers for 64 queries each and scores of 128 keys.
_WIDE_DIMS = 64
# Up to this one the library's tiles have 192 queries.
_LIBRARY_WIDE_DIMS = 96
_HIGH, _LOW = 192, 128
_KEYS = 128
# Blocks of other numbers of keys, where as many as hold a row take less time. Each is one kernel
# more to compile: so these are not all there could be, and it has to be worth it.
_WIDTHS = (80, 96, 112, 128, 144, 160, 176, 208, 240)
_ANOTHER_KERNEL = 1.01
# Rows that are longer in shared memory, in the time of others.
_WIDE_ROWS = 0.97
# With a bias, above `_MOST_DIMS`: as many keys as registers and shared memory have room for, of
# those that marks of a bias divide.
_LISTED_FEWER_KEYS = 64
# With a bias of each head's own, the most first: two more stages of it share the memory.
_DENSE_WIDTHS = (128, 96, 64)
# What a thread of two warp groups, or of three, has for scores, probabilities and output. Of two it
# has fewer where the threads that load do not leave queries to the copy engine.
_LOW_REGISTERS, _HIGH_REGISTERS = 212, 128
_REGISTERS_TO_LOAD = 16
# The most keys of tiles of `_HIGH` above `_WIDE_DIMS`.
_HIGH_KEYS = 96
# Bytes of shared memory, less what barriers take.
_SHARED_MEMORY = 225 * 1024
# Of a backward of short sequences: the keys of a block, which two warp groups compute; up to which
# dimension shared memory has room for two blocks of a head, and its dq; and the queries of tiles.
SHORT_KEYS = 128
_SHORT_DIMS, _SHORT_DIMS_OF_ONE_BLOCK = 64, 128
_SHORT_QUERIES, _SHORT_QUERIES_OF_WIDE = (64, 80, 96, 112, 128), (64,)
# What is tested; one block of keys takes any number of queries.
_MOST_SHORT_QUERIES = 256


@functools.lru_cache(maxsize=1024)
def forward_tile(
    head_dim: int,
    group: int,
    causal: bool,
    heads: int,
    queries: int,
    keys: int,
    multiprocessors: int,
) -> ForwardTile | None:
    """The tiles of a forward; None where the library's, and a program for each, are better.

    Args:
        head_dim: of queries, keys and values.
        group: query heads that share a key head; their queries are in a tile together.
        causal: whether query i sees key j only where ``j <= i + keys - queries``.
        heads: key heads of the whole batch.
        queries: of a head.
        keys: of a head.
        multiprocessors: the device's.
    """
    # Tiles whose queries see no key are the library's to skip.
    if keys == 0 or (causal and queries > keys):
        return None
    call = _Call(head_dim, group, causal, heads, queries, keys, multiprocessors)
    best = min(_tiles(call), key=lambda tile: _walking_time(call, tile), default=None)
    if best is None:
        return None
    units, _ = _units(call, best.queries)
    # Where each program would have one unit of work, none would load ahead.
    if units <= multiprocessors or _walking_time(call, best) >= _library_time(call):
        return None
    return best._replace(is_shared=_should_share(call, best))


def forward_tiles(head_dim: int, keys: int, multiprocessors: int) -> list[ForwardTile]:
    """Those to choose from for a forward that is not causal, of heads that share no keys."""
    return [*_tiles(_Call(head_dim, 1, False, 1, 1, keys, multiprocessors))]


def biased_forward_tile(
    head_dim: int, is_by_key: bool, heads: int, queries: int, multiprocessors: int
) -> ForwardTile:
    """The tiles of a forward with a bias, of which lists say which are computed.

    Args:
        head_dim: of queries, keys and values.
        is_by_key: whether all queries share the bias: then a head's tiles see the same keys.
        heads: of queries, of the whole batch.
        queries: of a head.
        multiprocessors: the device's.
    """
    if head_dim > _MOST_DIMS:
        return ForwardTile(_LOW, _LISTED_FEWER_KEYS, 0)
    height = _HIGH if head_dim <= _WIDE_DIMS else _LOW
    tiles = ceil_div(queries, height)
    # Two tiles of a head are a unit where they may see other keys.
    units = tiles * heads if is_by_key else ceil_div(tiles, 2) * heads
    return ForwardTile(height, _KEYS, multiprocessors if units > multiprocessors else 0)


def dense_forward_tile(
    head_dim: int, heads: int, queries: int, multiprocessors: int
) -> ForwardTile:
    """The tiles of a forward with a bias of each head's own.

    Args:
        head_dim: of queries, keys and values; up to 128.
        heads: of queries, of the whole batch.
        queries: of a head.
        multiprocessors: the device's.
    """
    # Where each program would have one tile, none would load ahead.
    tile, *_ = dense_forward_tiles(head_dim, multiprocessors)
    if ceil_div(queries, tile.queries) * heads > multiprocessors:
        return tile
    return dense_forward_tiles(head_dim, 0)[0]


def dense_forward_tiles(head_dim: int, programs: int) -> list[ForwardTile]:
    """Those to choose from for a forward with a bias of each head's own, the best ones first.

    Args:
        head_dim: of queries, keys and values.
        programs: as many walk over tiles; 0: there is a program for each tile.
    """
    if head_dim > _MOST_DIMS:
        return []
    row = forward_dim(head_dim) * 2
    heights = (_HIGH, _LOW) if head_dim <= _WIDE_DIMS else (_LOW,)
    return [
        ForwardTile(height, width, programs)
        for height in heights
        for width in _DENSE_WIDTHS
        # Two stages of keys, of values and of the bias.
        if (2 if programs else 1) * height * row + 4 * width * row + 2 * height * width * 2
        <= _SHARED_MEMORY
    ]


def listed_backward_tile(head_dim: int) -> tuple[int, int]:
    """The queries and keys of the tiles that are listed for a backward with a bias.

    Tiles of its kernels are as many keys, and their queries divide these.
    """
    return _LOW, _KEYS if head_dim <= _MOST_DIMS else _LISTED_FEWER_KEYS


def short_backward_fits(head_dim: int, group: int, causal: bool, queries: int, keys: int) -> bool:
    """Whether a program can compute the backward of a whole head.

    Args:
        head_dim: of queries, keys and values.
        group: query heads that share a key head.
        causal: whether query i sees key j only where ``j <= i + keys - queries``.
        queries: of a head.
        keys: of a head.
    """
    blocks = 2 if head_dim <= _SHORT_DIMS else 1
    return (
        group == 1
        and not causal
        and head_dim <= _SHORT_DIMS_OF_ONE_BLOCK
        and 0 < queries <= _MOST_SHORT_QUERIES
        and 0 < keys <= blocks * SHORT_KEYS
    )


def short_backward_tile(head_dim: int, queries: int, keys: int) -> ShortTile:
    """The tiles of such a backward: as few as can be, of as few queries as hold a head then."""
    heights = _SHORT_QUERIES if head_dim <= _SHORT_DIMS else _SHORT_QUERIES_OF_WIDE
    tiles = ceil_div(queries, heights[-1])
    height = next(height for height in heights if height * tiles >= queries)
    return ShortTile(height, ceil_div(keys, SHORT_KEYS))


def forward_dim(head_dim: int) -> int:
    """The columns of a forward's tiles, which are 0 beyond the call's head dimension.

    Rows of 72 are no multiple of 32 bytes. Tiles of 80 columns are loaded in pieces of 32 bytes, of
    which the device would read 64; those of 96 in pieces of 64, of which it reads 96.
    """
    return 96 if head_dim == 72 else product_dim(head_dim)


def product_dim(head_dim: int) -> int:
    """The columns that operations multiply, or make, of a head's."""
    return round_up(head_dim, 16)


def wide_dim(head_dim: int) -> int:
    """The columns of queries, keys and values in shared memory where a tile is wide.

    The copy engine loads a row in as long pieces of 128, 64 or 32 bytes as divide it: those of 32
    take it longest, of 128 it is fastest even if most of the last one is not there. Three of 64, as
    of 88 and 96, are about as fast as two of 128.
    """
    dim = product_dim(head_dim)
    return dim if dim % 32 == 0 or dim < 32 else round_up(head_dim, 64)


def _tiles(call: _Call) -> Iterator[ForwardTile]:
    """Those of which `call` has one, if it is not the library's."""
    if call.head_dim > _MOST_DIMS:
        return
    for height in (_LOW, _HIGH):
        # Tiles of 192 are of whole groups: the copy engine loads no part of one.
        if height == _HIGH and _HIGH % call.group != 0:
            continue
        for width in _widths(call, height):
            tile = ForwardTile(height, width, call.multiprocessors)
            if _has_room_to_be_wide(call, tile):
                yield tile._replace(is_wide=True)
            # Where tiles are not wide reading keys of 72 takes the longest, as their rows are no
            # multiple of 32 bytes: so more queries share them.
            elif height == _HIGH or not _WIDE_DIMS < call.head_dim < 80:
                stages = _stages(call, tile)
                if stages > 0:
                    yield tile._replace(stages=stages)


def _widths(call: _Call, height: int) -> Iterator[int]:
    """The keys of blocks that registers have room for."""
    is_wide, is_high = call.head_dim > _WIDE_DIMS, height == _HIGH
    if is_high and (call.head_dim > _LIBRARY_WIDE_DIMS or (is_wide and call.causal)):
        return
    registers = _HIGH_REGISTERS if is_high else _LOW_REGISTERS
    if height % call.group != 0:
        registers -= _REGISTERS_TO_LOAD
    for width in (_KEYS,) if call.causal else _WIDTHS:
        # Of float32 scores, of their probabilities in 16 bits, and of the output.
        fits = width // 2 + width // 4 + call.head_dim // 2 <= registers
        is_too_wide = is_high and is_wide and width > _HIGH_KEYS
        if fits and not is_too_wide:
            yield width


def _has_room_to_be_wide(call: _Call, tile: ForwardTile) -> bool:
    """Whether rows can be longer in shared memory than `forward_dim`, with two blocks there."""
    columns = wide_dim(call.head_dim)
    if columns <= forward_dim(call.head_dim) or tile.queries % call.group != 0:
        return False  # no longer; or no copy engine loads queries
    blocks = 2 * tile.stages * tile.keys * columns
    of_queries = tile.queries * (columns + product_dim(call.head_dim))
    return 2 * (blocks + of_queries) <= _SHARED_MEMORY


def _should_share(call: _Call, tile: ForwardTile) -> bool:
    """Whether two programs load keys and values for both.

    It is worth it where programs wait for what they load: rows of 72 and 88 begin in the middle of
    the 32 bytes that the device reads at once. Shorter ones are waited for less; longer ones were
    not compared.
    """
    is_waited_for = call.head_dim % 16 != 0 and _WIDE_DIMS < call.head_dim <= _LIBRARY_WIDE_DIMS
    # Else the two would see different keys, or one of a head's last two would have no query.
    is_even = call.group == 1 and not call.causal and ceil_div(call.queries, tile.queries) % 2 == 0
    return is_waited_for and is_even


def _stages(call: _Call, tile: ForwardTile) -> int:
    """How many blocks are loaded ahead; 0 where shared memory has no room for them."""
    row = forward_dim(call.head_dim) * 2
    left = _SHARED_MEMORY - 2 * tile.queries * row
    # A tile of one block has the next tile's to load alone.
    least = 1 if call.keys <= tile.keys else 2
    stages = min(2, left // (2 * tile.keys * row))
    return stages if stages >= least else 0


def _units(call: _Call, height: int) -> tuple[int, int]:
    """How many units of work there are, and of how many tiles one is.

    Causal, it is a tile that sees few keys and one that sees many. An odd tile is a unit of its
    own, and the same programs may have all of those: so they count as two.
    """
    tiles = ceil_div(call.queries * call.group, height)
    if call.causal:
        return ceil_div(tiles, 2) * call.heads, min(tiles, 2)
    return tiles * call.heads, 1


def _costs(call: _Call) -> _Costs:
    return _CAUSAL_COSTS if call.causal else _COSTS


def _walking_time(call: _Call, tile: ForwardTile) -> float:
    """Of programs that walk over tiles: the time of the one that has the most."""
    height, width, *_ = tile
    units, tiles_of_unit = _units(call, height)
    turns = ceil_div(units, call.multiprocessors) * tiles_of_unit
    # It waits for its first tile alone.
    computed = turns * _tile_time(call, height, width) + width
    costs = _costs(call)
    high = costs.high if height == _HIGH else 1.0
    worth = 1.0 if width == _KEYS else _ANOTHER_KERNEL
    rows = _WIDE_ROWS if tile.is_wide else 1.0
    return computed * (1 + costs.fixed * call.head_dim) * high * worth * rows


def _library_time(call: _Call) -> float:
    """Of the library's tiles, each by a program of its own; as if all had blocks of 128 keys."""
    costs = _costs(call)
    height, high = _LOW, 1.0
    if call.head_dim <= _LIBRARY_WIDE_DIMS:
        height = _HIGH
        high = costs.high if call.head_dim <= _WIDE_DIMS else costs.library_high
    tiles = ceil_div(call.queries * call.group, height) * call.heads
    a_tile = _tile_time(call, height, _KEYS) + costs.wait
    if call.causal:
        # The device begins with those that see the most keys, so programs end at one time.
        return max(tiles / call.multiprocessors * a_tile, call.keys + costs.wait) * high
    return ceil_div(tiles, call.multiprocessors) * a_tile * high


def _tile_time(call: _Call, height: int, width: int) -> float:
    """Of a tile in the mean, of the keys of its last block, too."""
    if call.causal:
        return call.keys - call.queries / 2 + (height / call.group + width) / 2
    is_high = height == _HIGH
    blocks = ceil_div(call.keys, width)
    several = _SEVERAL_BLOCKS[is_high] if blocks > 1 else 0
    return _A_TILE + several + blocks * (width + _A_BLOCK[is_high])
