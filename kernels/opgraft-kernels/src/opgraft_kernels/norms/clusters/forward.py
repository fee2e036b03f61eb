"""The forward of RMSNorm and LayerNorm.

`opgraft_kernels.norms.ops` says what it computes. LayerNorm's variance is the mean of squared
differences from the mean, which the blocks agree on before they take them: two exchanges a row.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from opgraft_kernels.norms.clusters.exchange import (
    Exchange,
    by_vector,
    collect_sums,
    launch_options,
    load_parameters,
    open_exchange,
    send_partials,
    start_loads,
    warp_sum,
)
from opgraft_kernels.norms.clusters.tile import Tile

__all__ = ["Forward"]


class Forward:
    """A norm, its mean if it has one, and rstd.

    Every cluster has one row. A multiprocessor has room for several blocks, some of which wait for
    their slice while others compute. (Clusters that walk over rows, the next ones on their way, as
    in the backward, were slower at every width.)
    """

    def __init__(self, tile: Tile) -> None:
        self.tile = tile

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor | None,
        bias: cute.Tensor | None,
        y: cute.Tensor,
        mean: cute.Tensor | None,
        rstd: cute.Tensor,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(x, weight, bias, y, mean, rstd, eps).launch(
            grid=[self.tile.cluster * x.shape[0], 1, 1], stream=stream, **launch_options(self.tile)
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weight: cute.Tensor | None,
        bias: cute.Tensor | None,
        y: cute.Tensor,
        mean: cute.Tensor | None,
        rstd: cute.Tensor,
        eps: Float32,
    ):
        tile = self.tile
        has_mean = cutlass.const_expr(mean is not None)
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, rank = block // tile.cluster, block % tile.cluster
        first = rank * (tile.threads * tile.vectors) + thread

        allocator = cutlass.utils.SmemAllocator()
        layout = cute.make_layout((tile.slice,))
        row_slice = by_vector(allocator.allocate_tensor(x.element_type, layout, byte_alignment=128))
        exchange = Exchange(allocator, tile, slots=2 if has_mean else 1)
        open_exchange(exchange, thread)
        start_loads(tile, [(x[row, None], row_slice)], first, thread)
        cute.arch.cp_async_commit_group()
        # While the row is on its way: after the exchange they would be waited for once more.
        own_weight, own_bias = [load_parameters(tile, each, first) for each in (weight, bias)]
        cute.arch.cp_async_wait_group(0)

        row_mean = Float32(0.0)
        if cutlass.const_expr(has_mean):
            partial = Float32(0.0)
            for i in cutlass.range_constexpr(tile.vectors):
                values = row_slice[None, thread + i * tile.threads].load().to(Float32)
                partial += values.reduce(cute.ReductionOp.ADD, 0.0, 0)
            row_mean = self.total(exchange, partial, 0, thread, rank) / tile.hidden

        partial = Float32(0.0)
        for i in cutlass.range_constexpr(tile.vectors):
            values = row_slice[None, thread + i * tile.threads].load().to(Float32)
            if cutlass.const_expr(has_mean):
                values = values - row_mean
            partial += (values * values).reduce(cute.ReductionOp.ADD, 0.0, 0)
        total = self.total(exchange, partial, 1 if has_mean else 0, thread, rank)
        row_rstd = cute.math.rsqrt(total / tile.hidden + eps)
        if rank == 0 and thread == 0:
            rstd[row] = row_rstd
            if cutlass.const_expr(has_mean):
                _write(mean, row, row_mean)

        y_row = by_vector(y[row, None])
        for i in cutlass.range_constexpr(tile.vectors):
            values = row_slice[None, thread + i * tile.threads].load().to(Float32)
            if cutlass.const_expr(has_mean):
                values = values - row_mean
            result = values * row_rstd
            if cutlass.const_expr(weight is not None):
                result = result * own_weight[None, i].load().to(Float32)
            if cutlass.const_expr(bias is not None):
                result = result + own_bias[None, i].load().to(Float32)
            y_row[None, first + i * tile.threads].store(result.to(y.element_type))

    @cute.jit
    def total(
        self,
        exchange: Exchange,
        partial: Float32,
        slot: cutlass.Constexpr,
        thread: Int32,
        rank: Int32,
    ):
        """The sum of all threads' partial sums over the cluster."""
        partial = warp_sum(partial)
        if cutlass.const_expr(slot == 0):
            cute.arch.cluster_wait()
        send_partials(exchange, slot, (partial,), thread, rank)
        (total,) = collect_sums(exchange, slot, 0, thread)
        return total


def _write(values: Any, row: Any, value: Any) -> None:
    values[row] = value
