"""How a row is cut into slices, one for each block of a cluster."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["VECTOR", "WARP", "Tile"]

WARP = 32
# Elements of 16 bits in a load of 16 bytes.
VECTOR = 8


class Tile(NamedTuple):
    """A block's slice of a row: `threads` x `vectors` loads of 16 bytes, one of `cluster`."""

    threads: int
    vectors: int
    cluster: int  # up to 16; above 8 only where the GPU has as many multiprocessors side by side
    per_sm: int  # how many blocks a multiprocessor is to hold: no more registers than that allows
    stages: int = 1  # of a backward: slices in a block's memory, all but one of rows to come

    @property
    def slice(self) -> int:
        return self.threads * self.vectors * VECTOR

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def hidden(self) -> int:
        return self.slice * self.cluster

    def shared_memory(self, slices: int, sums: int) -> int:
        """Bytes that a block has of slices and of partials of `sums` at once, barriers included."""
        return slices * self.slice * 2 + sums * (4 * self.cluster * self.warps + 8) + 8
