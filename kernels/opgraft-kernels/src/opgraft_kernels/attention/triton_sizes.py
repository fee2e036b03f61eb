"""Which tiles Triton's kernels of attention compute, by the device and the kind of call."""

from __future__ import annotations

from typing import Any, NamedTuple

from opgraft_kernels.integers import power_of_2, power_of_2_within, round_up

from .triton_parts import PART_ROWS
from .triton_tiles import BY_SCORE, NO_BIAS

__all__ = [
    "MAX_DIM",
    "SPLIT_BACKWARD_DIMS",
    "Device",
    "Kind",
    "Tile",
    "backward_holds_keys",
    "backward_keys_tile",
    "backward_queries_tile",
    "block_dim",
    "blocks_of_keys",
    "forward_holds_keys",
    "forward_tile",
    "short_backward_tile",
    "splits_backward",
    "splits_forward",
    "tiles_of_program",
]


class Tile(NamedTuple):
    """Queries and keys a program holds at once, its warps, how many tiles deep it loads ahead,
    whether by descriptors, and the most registers of a thread; 0: as the compiler likes."""

    q: int
    k: int
    num_warps: int
    stages: int
    described: bool = False
    registers: int = 0

    def options(self) -> dict[str, Any]:
        return {"maxnreg": self.registers} if self.registers else {}

    def constexprs(self) -> dict[str, Any]:
        return {
            "BLOCK_Q": self.q,
            "BLOCK_K": self.k,
            "STAGES": self.stages,
            "DESCRIBED": self.described,
        }


class Device(NamedTuple):
    """What of a device the tiles depend on."""

    major: int  # of its compute capability; 0 for the interpreter

    @property
    def precision(self) -> str:
        """Of products of float32.

        Six products of bfloat16 are more exact than three of tf32, and faster on an H200:
        `triton_parts` says more of them. The interpreter has no name for them, and computes in
        float32 whatever it is told.
        """
        return "bf16x6" if self.major else "tf32x3"


# The smallest tile of a matrix product; heads of smaller dimension are padded with zeros.
_MIN_BLOCK_DIM = 16
# Above, a tile's sums leave no registers for anything else. In float32, half of it.
MAX_DIM = 256


class Kind(NamedTuple):
    """What of a call the tiles depend on, besides its lengths."""

    dim: int  # the larger one
    itemsize: int = 2
    bias: int = NO_BIAS.value
    # Whether so many heads share the bias that its tiles are listed.
    is_listed: bool = False
    # Whether what programs walk over is split into parts of bfloat16 before.
    is_split: bool = False
    # Whether the bias's gradient is written, for which a tile goes through shared memory.
    has_dbias: bool = False


# The tiles for Hopper are the fastest, or nearly, of those tried on an H200: in bfloat16 with 16384
# tokens of width 2048, 512 to 16384 long, and for the calls of `attention.py --everywhere` (scores
# of 64 x 32 to 128 x 128, 4 or 8 warps, 1 to 4 stages, descriptors or loads). Where sequences are
# short, a head's descriptors take longer to make than they save. Elsewhere nothing was measured:
# these fit the shared memory of compute capability 8.0.

# Up to here a sequence is short.
_SHORT = 256
# Registers of a thread with which 16 warps fit a multiprocessor: otherwise 8 do, and wait.
_HALF = 128
# Programs of 8 warps, and of 4, from which a GPU has as many at once as it can: of fewer, smaller
# tiles make more.
_FULL_OF_8, _FULL_OF_4 = 256, 1024


def _is_measured(device: Device, kind: Kind) -> bool:
    return device.major == 9 and kind.dim <= (128 if kind.itemsize == 2 else 64)


# Rows that read what is split, from which splitting float32 before is faster than in each program.
# Of wide heads a program's registers have no room for it. Elsewhere than on Hopper nothing was
# measured; the interpreter does both, for tests.
_SPLIT_FROM, _SPLIT_WIDE_FROM, _SPLIT_BACKWARD_FROM = 384, 64, 256
_SPLIT_IN_INTERPRETER = 64
# Of narrower heads a backward's products are so small that starting them is what takes the time. Of
# wider ones parts leave no room for tiles.
SPLIT_BACKWARD_DIMS = range(33, 65)


def splits_forward(device: Device, kind: Kind, readers: int, length_k: int) -> bool:
    # Parts have whole tiles of rows: of few keys they would be many times as large as the keys.
    if kind.itemsize != 4 or kind.dim > MAX_DIM // 2 or length_k < PART_ROWS.value // 2:
        return False
    if device.major == 0:
        return readers >= _SPLIT_IN_INTERPRETER
    least = _SPLIT_FROM if kind.dim <= 64 else _SPLIT_WIDE_FROM
    return device.major == 9 and readers >= least


def splits_backward(device: Device, kind: Kind, readers: int) -> bool:
    if kind.itemsize != 4:
        return False
    if device.major == 0:
        return readers >= _SPLIT_IN_INTERPRETER
    is_fast = device.major == 9 and kind.dim in SPLIT_BACKWARD_DIMS
    return is_fast and readers >= _SPLIT_BACKWARD_FROM


def forward_tile(device: Device, kind: Kind, queries: int, length_k: int) -> Tile:
    """Of so many queries, of all heads together."""
    if device.major == 0:
        return Tile(32, 32, 4, 1)
    if kind.is_split:
        has_room = kind.dim <= 64
        if has_room and kind.bias != NO_BIAS.value:
            return Tile(64, 64, 4, 2, True)
        return Tile(64, 32, 4, 3 if has_room else 2, True)
    if not _is_measured(device, kind):
        return _unmeasured_tile(kind)
    if kind.itemsize == 4:
        return Tile(128, 32, 4, 2)
    if length_k <= _SHORT:
        return Tile(64, 32, 4, 3)
    if kind.dim > 64:
        return Tile(128, 64, 4, 2, True)
    if kind.bias != NO_BIAS.value and queries >= 128 * _FULL_OF_8:
        return Tile(128, 64, 8, 3, registers=_HALF)
    if kind.bias != NO_BIAS.value or length_k < 8192:
        return Tile(64, 64, 4, 3)
    return Tile(64, 128, 4, 3, True)


def backward_keys_tile(device: Device, kind: Kind, length_q: int, keys: int) -> Tile:
    """Of so many keys, of all heads together."""
    if device.major == 0:
        return Tile(32, 32, 4, 1)
    # One query Triton knows of: it unrolls the loop over queries, and cannot pipeline the one over
    # heads that is left, since descriptors are made there.
    if not _is_measured(device, kind) or length_q == 1:
        tile = _unmeasured_backward_tile(kind)
        return tile if kind.dim <= 64 and kind.itemsize == 2 else tile._replace(q=32, k=tile.q)
    if kind.is_split:
        return Tile(64, 128, 8, 2, True)
    if kind.itemsize == 4:
        return Tile(32, 64, 4, 1)
    if kind.dim > 64:
        return Tile(64, 64, 4, 2, True)
    has_bias = kind.bias != NO_BIAS.value
    if kind.bias == BY_SCORE.value and not kind.is_listed:
        return Tile(32, 64, 4, 2, True)
    if length_q > _SHORT and keys >= 64 * _FULL_OF_4 and (has_bias or length_q < 8192):
        return Tile(32, 64, 4, 2, True, registers=_HALF)
    if length_q <= _SHORT or has_bias:
        return Tile(32, 64, 4, 3)
    return Tile(32 if length_q < 8192 else 64, 64, 4, 3, True)


def backward_queries_tile(
    device: Device, kind: Kind, queries: int, length_k: int, causal: bool
) -> Tile:
    """Of so many queries, of all heads together."""
    if device.major == 0:
        return Tile(32, 32, 4, 1)
    if not _is_measured(device, kind):
        return _unmeasured_backward_tile(kind)
    if kind.is_split:
        return Tile(128, 32, 8, 3, True) if kind.has_dbias else Tile(128, 64, 8, 2, True)
    if kind.itemsize == 4:
        return Tile(64, 32, 4, 1)
    if kind.bias != NO_BIAS.value and kind.dim > 64:
        return Tile(64, 64, 4, 2, True)
    is_full = queries >= 128 * _FULL_OF_8
    if kind.bias == BY_SCORE.value and length_k > _SHORT and is_full:
        return Tile(128, 64, 8, 3, registers=_HALF)
    if kind.bias != NO_BIAS.value:
        return Tile(64, 32, 4, 3)
    if kind.dim > 64:
        return Tile(64, 32, 4, 3, True) if causal else Tile(128, 32, 8, 3, True)
    if length_k <= _SHORT:
        return Tile(64, 32, 4, 3)
    return Tile(128, 64, 8, 3) if length_k < 2048 else Tile(64, 64, 4, 3, True)


# ------------------------------------------------------------------ few keys

# Up to so many keys a program can hold, by the device's major: on Hopper their sums fill its
# registers, and elsewhere nothing was measured.
_FEW_KEYS = {9: 128}
# In a backward without a bias more, at heads of half the dimension: there is no tile to leave out.
_MORE_KEYS = 224
# Queries from which reading keys once is worth more than having more programs. Tables ask for it,
# too: `overrides.MANY_QUERIES`, where Triton is not imported. A test holds the two together.
_MANY_QUERIES = 1024
# So many programs keep a GPU busy, and so few leave half of it idle.
_MANY_PROGRAMS, _FEW_PROGRAMS = 512, 64
# Tiles of queries after which a program has read few keys for what it computed.
_MOST_TILES = 8


def _few_keys(device: Device, kind: Kind) -> int:
    """Up to how many keys are few. In 32 bits a tile has no room for all of them."""
    return _FEW_KEYS.get(device.major, 0) if kind.itemsize == 2 and kind.dim <= 128 else 0


def forward_holds_keys(
    device: Device, kind: Kind, causal: bool, length_q: int, length_k: int
) -> bool:
    return (
        length_k <= _few_keys(device, kind)
        and length_q >= _MANY_QUERIES
        and kind.bias == NO_BIAS.value
        and not causal
    )


def backward_holds_keys(device: Device, kind: Kind, programs: int, length_k: int) -> bool:
    most = _few_keys(device, kind)
    if most and kind.bias == NO_BIAS.value and kind.dim <= 64:
        most = _MORE_KEYS
    return length_k <= most and programs >= _FEW_PROGRAMS


def tiles_of_program(tiles: int) -> int:
    """Of queries, which a forward that holds keys walks over; of so many in all."""
    return max(1, min(_MOST_TILES, tiles // _MANY_PROGRAMS))


def short_backward_tile(kind: Kind, programs: int, length_k: int) -> Tile:
    keys = max(power_of_2(length_k), _MIN_BLOCK_DIM)
    if keys <= 64:
        return Tile(32, keys, 4, 1)
    if keys == 128 and kind.dim <= 64:
        # Where there are hardly more programs than multiprocessors each may have all registers.
        is_alone = programs <= _MANY_PROGRAMS // 2
        return Tile(64, keys, 8, 2) if is_alone else Tile(32, keys, 8, 2, registers=_HALF)
    return Tile(32, keys, 8, 2)


def blocks_of_keys(length: int) -> tuple[int, int]:
    """Powers of two that hold so many keys together; the second may be 0."""
    padded = round_up(length, _MIN_BLOCK_DIM)
    first = power_of_2_within(padded)
    rest = padded - first
    return first, max(power_of_2(rest), _MIN_BLOCK_DIM) if rest else 0


# ------------------------------------------------------------------ what was not measured

# What a program holds grows with a head's row: a tile has as many rows less. In float32 it takes
# registers for three parts of each operand.


def _unmeasured_tile(kind: Kind) -> Tile:
    if kind.itemsize == 4:
        return Tile(64, 32, 4, 2) if kind.dim <= 64 else Tile(32, 32, 4, 1)
    if kind.bias == BY_SCORE.value and kind.dim <= 64:
        # A bias that is not aligned is loaded element by element, for which sm_100 spills.
        return Tile(64, 32, 4, 3)
    if kind.dim <= 128:
        return Tile(64, 64, 4, 3 if kind.dim <= 64 else 2)
    return Tile(64, 32, 8, 2)


def _unmeasured_backward_tile(kind: Kind) -> Tile:
    if kind.itemsize == 4:
        return Tile(32, 32, 4 if kind.dim <= 64 else 8, 1)
    if kind.dim <= 128:
        return Tile(64, 64, 4, 2) if kind.dim <= 64 else Tile(64, 32, 8, 2)
    return Tile(32, 32, 8, 1)


def block_dim(dim: int) -> int:
    return max(_MIN_BLOCK_DIM, power_of_2(dim))
