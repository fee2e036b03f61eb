"""How the blocks of a cluster share a row: slices, loads, and sums over the cluster.

Every block of a cluster holds a slice of a row in shared memory, fetched there without passing
through registers. Each of a block's warps writes its partial sum into the memory of every block of
the cluster, and every block adds up what it was sent, in the same order as the others: so all agree
on the bits of a row's sums.

A thread reads of a slice what it fetched itself, so that no thread waits for another but in an
exchange of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from opgraft_kernels.norms.clusters.tile import VECTOR, WARP, Tile

__all__ = [
    "Exchange",
    "by_vector",
    "collect_sums",
    "launch_options",
    "load_parameters",
    "open_exchange",
    "reopen_slot",
    "send_partials",
    "start_loads",
    "warp_sum",
]


def launch_options(tile: Tile) -> dict[str, Any]:
    """How a kernel's blocks are launched; the grid and the stream are the caller's."""
    return {
        "block": [tile.threads, 1, 1],
        "cluster": [tile.cluster, 1, 1],
        "min_blocks_per_mp": tile.per_sm,
        "preferred_smem_carveout": 100,  # percent: nothing here is read twice through L1
    }


# --------------------------------------------------------------------------------------------------
# In kernels
# --------------------------------------------------------------------------------------------------


def by_vector(row: Any) -> Any:
    """The vectors of a row, of a slice, of weights, by index: ``[None, index]``."""
    return cute.logical_divide(row, cute.make_layout(VECTOR))


def start_loads(tile: Tile, rows: Sequence[tuple[Any, Any]], first: Any, at: Any) -> None:
    """Starts to load this thread's vectors of rows into slices in shared memory, past L1.

    Args:
        tile: of the slices.
        rows: a row and the memory that it goes to, of each matrix.
        first: this thread's first vector in a row.
        at: and in that memory.
    """
    for i in range(tile.vectors):
        j = i * tile.threads
        for row, memory in rows:
            dtype = memory.element_type
            atom = cute.make_copy_atom(
                cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL),
                dtype,
                num_bits_per_copy=dtype.width * VECTOR,
            )
            cute.copy(atom, by_vector(row)[None, first + j], memory[None, at + j])


def load_parameters(tile: Tile, parameters: Any, first: Any) -> Any:
    """This thread's vectors of a weight or bias, in registers."""
    if parameters is None:
        return None
    own = cute.make_rmem_tensor((VECTOR, tile.vectors), parameters.element_type)
    for i in range(tile.vectors):
        own[None, i].store(by_vector(parameters)[None, first + i * tile.threads].load())
    return own


def warp_sum(value: Any) -> Any:
    return cute.arch.warp_reduction(value, lambda a, b: a + b)


class Exchange:
    """Memory for sums over a cluster, `sums` at a time.

    Each of `slots` has room for the partial sums of a row, and a barrier. Its operations are
    functions, not methods: a loop in CuteDSL has to carry an object that a method may change.
    """

    def __init__(self, allocator: Any, tile: Tile, slots: int = 1, sums: int = 1) -> None:
        self.tile, self.slots, self.sums = tile, slots, sums
        self.partials_a_sum = tile.cluster * tile.warps
        self.partials = allocator.allocate_tensor(
            Float32, cute.make_layout((slots * sums * self.partials_a_sum,)), byte_alignment=16
        )
        self.arrived = allocator.allocate_array(Int64, num_elems=slots)


@cute.jit
def open_exchange(exchange: Exchange, thread: Int32):
    """Initialises the barriers. No block may send before `cluster_wait`, when all have done so."""
    if thread == 0:
        for slot in cutlass.range_constexpr(exchange.slots):
            cute.arch.mbarrier_init(exchange.arrived + slot, 1)
        cute.arch.mbarrier_init_fence()
        for slot in cutlass.range_constexpr(exchange.slots):
            _expect_partials(exchange, slot)
    cute.arch.cluster_arrive_relaxed()


def _first_partial(exchange: Exchange, slot: Any, index: int) -> Any:
    """The index of the first partial of one of a slot's sums."""
    return (slot * exchange.sums + index) * exchange.partials_a_sum


def _expect_partials(exchange: Exchange, slot: Any) -> None:
    # All partial sums of the row arrive in this block's memory, its own among them.
    size = exchange.partials_a_sum * exchange.sums * 4
    cute.arch.mbarrier_arrive_and_expect_tx(exchange.arrived + slot, size)


@cute.jit
def send_partials(exchange: Exchange, slot: Any, partials: Any, thread: Int32, rank: Int32):
    """Sends a warp's partial sums to every block."""
    tile = exchange.tile
    warp, lane = thread // WARP, thread % WARP
    if lane < tile.cluster:
        for index in cutlass.range_constexpr(exchange.sums):
            own = _first_partial(exchange, slot, index) + (rank * tile.warps + warp)
            _send(partials[index], exchange.partials.iterator + own, exchange.arrived + slot, lane)


@cute.jit
def collect_sums(exchange: Exchange, slot: Any, phase: Any, thread: Int32):
    """The sums over the cluster, once all partial sums are there."""
    lane = thread % WARP
    cute.arch.mbarrier_wait(exchange.arrived + slot, phase)
    totals = []
    for index in cutlass.range_constexpr(exchange.sums):
        total = Float32(0.0)
        for i in cutlass.range_constexpr(-(-exchange.partials_a_sum // WARP)):
            if lane + i * WARP < exchange.partials_a_sum:
                total += exchange.partials[_first_partial(exchange, slot, index) + lane + i * WARP]
        totals.append(warp_sum(total))
    return totals


@cute.jit
def reopen_slot(exchange: Exchange, slot: Any, thread: Int32):
    """Makes a slot ready for another row, once the partial sums of the last one have arrived."""
    if thread == 0:
        _expect_partials(exchange, slot)


def _send(value: Any, slot: Any, barrier: Any, rank: Any) -> None:
    """Writes to the same `slot` of another block of the cluster, and tells that block's barrier."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[
            Int32(cute.arch.map_dsmem_ptr(slot, rank).toint()),
            value,
            Int32(cute.arch.map_dsmem_ptr(barrier, rank).toint()),
        ],
    )
