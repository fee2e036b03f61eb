"""Which tiles a forward of FlashAttention-4 computes, and by how many programs.

A program for each tile begins by waiting for its first queries and keys, and ends by writing its
output, while its multiprocessor computes nothing: of short rows of keys for much of the time. A
program that walks over tiles loads the next one's while it computes. But which program computes
which tiles is then known before it begins, so one that is slow makes all wait: of long rows of keys
a program for each tile is faster.

What is compared are estimates: the queries that a multiprocessor computes, one tile after the
other, times the keys of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["ForwardTile", "biased_forward_tile", "forward_tile", "listed_backward_tile"]


class ForwardTile(NamedTuple):
    """A tile, and how many programs walk over tiles of that size; 0: each tile has a program."""

    queries: int
    keys: int
    programs: int


class _Call(NamedTuple):
    """What the tiles of a call depend on; see `forward_tile`."""

    head_dim: int
    group: int
    causal: bool
    heads: int
    queries: int
    keys: int
    multiprocessors: int


# A program's shared memory holds a tile of queries and one of the output up to this dimension.
_MOST_DIMS = 128
# Up to this one three warp groups have registers for 64 queries each and scores of 128 keys.
_WIDE_DIMS = 64
# Up to this one the library's tiles have 192 queries.
_LIBRARY_WIDE_DIMS = 96
_HIGH, _LOW = 192, 128
_KEYS = 128
# With a bias, above `_MOST_DIMS`: as many as registers and shared memory have room for, of those
# that marks of a bias divide.
_LISTED_FEWER_KEYS = 64
# Blocks of fewer keys, where as many of them hold a short row of keys. Each is one kernel more to
# compile.
_FEWER_KEYS = (80, 112)
# How many more queries a second tiles of 192 compute than tiles of 128. The library's hold their
# probabilities in shared memory from dimension 65 on.
_HIGH_GAIN, _LIBRARY_HIGH_GAIN = 1.15, 1.1
# For how many keys' time a program of a tile waits: causal programs, of unlike lengths, for longer.
_WAIT, _CAUSAL_WAIT = 128, 176
# What a fixed share of the tiles for each program costs, by head dimension, as a part of the time.
_FIXED_COST = 2e-4


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
    if head_dim > _MOST_DIMS or keys == 0 or (causal and queries > keys):
        return None
    call = _Call(head_dim, group, causal, heads, queries, keys, multiprocessors)
    best = min(_sizes(call), key=lambda size: _walking_time(call, *size), default=None)
    if best is None:
        return None
    units, _ = _units(call, best[0])
    # Where each program would have one unit of work, none would load ahead.
    if units <= multiprocessors or _walking_time(call, *best) >= _library_time(call):
        return None
    return ForwardTile(*best, multiprocessors)


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
    tiles = -(-queries // height) * heads
    walks = is_by_key and tiles > multiprocessors
    return ForwardTile(height, _KEYS, multiprocessors if walks else 0)


def listed_backward_tile(head_dim: int) -> tuple[int, int]:
    """The queries and keys of the tiles that are listed for a backward with a bias.

    Tiles of its kernels are as many keys, and their queries divide these.
    """
    return _LOW, _KEYS if head_dim <= _MOST_DIMS else _LISTED_FEWER_KEYS


def _sizes(call: _Call) -> Iterator[tuple[int, int]]:
    """Queries and keys of a tile, from which to choose."""
    # Tiles of 192 are of whole groups: the copy engine loads no part of one.
    if call.head_dim <= _WIDE_DIMS and _HIGH % call.group == 0:
        yield _HIGH, _width(call)
    if _WIDE_DIMS < call.head_dim < 80:
        # Rows of 72 are no multiple of 32 bytes, and reading keys takes the longest: so more
        # queries share them. Then registers hold scores of 80 keys.
        if not call.causal and _HIGH % call.group == 0:
            yield _HIGH, 80
    else:
        yield _LOW, _width(call)


def _width(call: _Call) -> int:
    """The keys of a block, so that as many blocks hold no more than a row's keys need."""
    blocks = -(-call.keys // _KEYS)
    if call.causal or blocks > 4:
        return _KEYS
    return next((n for n in _FEWER_KEYS if n * blocks >= call.keys), _KEYS)


def _units(call: _Call, height: int) -> tuple[int, int]:
    """How many units of work there are, and of how many tiles one is.

    Causal, it is a tile that sees few keys and one that sees many. An odd tile is a unit of its
    own, and the same programs may have all of those: so they count as two.
    """
    tiles = -(-call.queries * call.group // height)
    if call.causal:
        return -(-tiles // 2) * call.heads, min(tiles, 2)
    return tiles * call.heads, 1


def _walking_time(call: _Call, height: int, width: int) -> float:
    """Of programs that walk over tiles: the time of the one that has the most."""
    units, tiles_of_unit = _units(call, height)
    turns = -(-units // call.multiprocessors) * tiles_of_unit
    gain = _HIGH_GAIN if height == _HIGH else 1.0
    # It waits for its first tile alone.
    computed = turns * _keys_of_tile(call, height, width) + width
    return height * computed * (1 + _FIXED_COST * call.head_dim) / gain


def _library_time(call: _Call) -> float:
    """Of the library's tiles, each by a program of its own."""
    height, gain = _LOW, 1.0
    if call.head_dim <= _WIDE_DIMS:
        height, gain = _HIGH, _HIGH_GAIN
    elif call.head_dim <= _LIBRARY_WIDE_DIMS:
        height, gain = _HIGH, _LIBRARY_HIGH_GAIN
    tiles = -(-call.queries * call.group // height) * call.heads
    keys = _keys_of_tile(call, height, _KEYS)
    if call.causal:
        # The device begins with those that see the most keys, so programs end at one time.
        turns = tiles / call.multiprocessors
        computed = max(turns * (keys + _CAUSAL_WAIT), call.keys + _CAUSAL_WAIT)
    else:
        computed = -(-tiles // call.multiprocessors) * (keys + _WAIT)
    return height * computed / gain


def _keys_of_tile(call: _Call, height: int, width: int) -> float:
    """The keys that a tile computes in the mean, those of its last block included."""
    if call.causal:
        return call.keys - call.queries / 2 + (height / call.group + width) / 2
    return float(-(-call.keys // width) * width)
