"""The backward of RMSNorm and LayerNorm in CuteDSL, for rows that a cluster of blocks shares.

`opgraft_kernels.norms.ops` says what it computes, and the package what clusters are for.
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
    reopen_slot,
    send_partials,
    start_loads,
    warp_sum,
)
from opgraft_kernels.norms.clusters.tile import VECTOR, Tile

__all__ = ["Backward"]

# Slots of an exchange that is repeated for every row. A warp that sends its partial sums of row n
# has collected those of row n - 1; so all have sent those, and before that collected those of row
# n - 2.
_RING = 2
# Columns, and threads, of a block that adds up partial sums.
_SUM_VECTOR, _SUM_THREADS = 4, 128


def _row(matrix: Any, row: Any) -> Any:
    """The vectors of a row."""
    return by_vector(matrix[row, None])


def _value(values: Any, row: Any) -> Any:
    return values[row]


class Backward:
    """The gradients of a norm's input, weight and bias.

    Clusters walk over the rows, a grid apart, with the next ones on their way into shared memory;
    every block's part of dw and db stays in registers. Each cluster writes one row of partial sums
    and a second kernel adds those up, in a fixed order. RMSNorm has no mean.
    """

    def __init__(self, tile: Tile) -> None:
        self.tile = tile

    @cute.jit
    def __call__(
        self,
        g: cute.Tensor,
        x: cute.Tensor,
        weight: cute.Tensor | None,
        mean: cute.Tensor | None,
        rstd: cute.Tensor,
        dx: cute.Tensor,
        partial_dw: cute.Tensor | None,
        partial_db: cute.Tensor | None,
        dw: cute.Tensor | None,
        db: cute.Tensor | None,
        clusters: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(g, x, weight, mean, rstd, dx, partial_dw, partial_db, clusters).launch(
            grid=[self.tile.cluster * clusters, 1, 1], stream=stream, **launch_options(self.tile)
        )
        for partial, total in ((partial_dw, dw), (partial_db, db)):
            if cutlass.const_expr(total is not None):
                self.add_up(partial, total).launch(
                    grid=[self.tile.hidden // (_SUM_VECTOR * _SUM_THREADS), 1, 1],
                    block=[_SUM_THREADS, 1, 1],
                    stream=stream,
                )

    @cute.kernel
    def kernel(
        self,
        g: cute.Tensor,
        x: cute.Tensor,
        weight: cute.Tensor | None,
        mean: cute.Tensor | None,
        rstd: cute.Tensor,
        dx: cute.Tensor,
        partial_dw: cute.Tensor | None,
        partial_db: cute.Tensor | None,
        clusters: Int32,
    ):
        tile = self.tile
        has_mean = cutlass.const_expr(mean is not None)
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cluster, rank = block // tile.cluster, block % tile.cluster
        first = rank * (tile.threads * tile.vectors) + thread
        rows = x.shape[0]

        allocator = cutlass.utils.SmemAllocator()
        layout = cute.make_layout((tile.slice * tile.stages,))
        g_slices, x_slices = [
            by_vector(allocator.allocate_tensor(x.element_type, layout, byte_alignment=128))
            for _ in range(2)
        ]
        exchange = Exchange(allocator, tile, slots=_RING, sums=2 if has_mean else 1)
        open_exchange(exchange, thread)
        for stage in cutlass.range_constexpr(tile.stages - 1):
            self.fetch(g, x, g_slices, x_slices, cluster + stage * clusters, stage, first, thread)

        shape = (VECTOR, tile.vectors)
        dw_own = cute.make_rmem_tensor(shape, Float32)
        db_own = cute.make_rmem_tensor(shape, Float32)
        dw_own.fill(0.0)
        db_own.fill(0.0)
        w_own = load_parameters(tile, weight, first)
        cute.arch.cluster_wait()

        row_rstd, row_mean = rstd[cluster], Float32(0.0)
        if cutlass.const_expr(has_mean):
            row_mean = _value(mean, cluster)
        for step in cutlass.range((rows - cluster + clusters - 1) // clusters):
            row = cluster + step * clusters
            stage, slot = step % tile.stages, step % _RING
            ahead = (step + (tile.stages - 1)) % tile.stages
            self.fetch(
                g, x, g_slices, x_slices, row + (tile.stages - 1) * clusters, ahead, first, thread
            )
            cute.arch.cp_async_wait_group(tile.stages - 1)

            products, sums = Float32(0.0), Float32(0.0)
            at = stage * (tile.threads * tile.vectors) + thread
            for i in cutlass.range_constexpr(tile.vectors):
                wg = g_slices[None, at + i * tile.threads].load().to(Float32)
                if cutlass.const_expr(weight is not None):
                    wg = wg * w_own[None, i].load().to(Float32)
                values = x_slices[None, at + i * tile.threads].load().to(Float32)
                if cutlass.const_expr(has_mean):
                    sums += wg.reduce(cute.ReductionOp.ADD, 0.0, 0)
                    values = values - row_mean
                products += (wg * values).reduce(cute.ReductionOp.ADD, 0.0, 0)
            partials = [warp_sum(each) for each in ((products, sums) if has_mean else (products,))]
            send_partials(exchange, slot, partials, thread, rank)
            # While the partial sums are on their way. Beyond the last row there is nothing to read.
            next_row = cutlass.min(row + clusters, rows - 1)
            next_rstd, next_mean = rstd[next_row], row_mean
            if cutlass.const_expr(has_mean):
                next_mean = _value(mean, next_row)
            totals = collect_sums(exchange, slot, (step // _RING) % 2, thread)
            reopen_slot(exchange, slot, thread)

            mean_gx = totals[0] * row_rstd / tile.hidden
            dx_row = _row(dx, row)
            for i in cutlass.range_constexpr(tile.vectors):
                wg = g_slices[None, at + i * tile.threads].load().to(Float32)
                values = x_slices[None, at + i * tile.threads].load().to(Float32)
                if cutlass.const_expr(has_mean):
                    values = values - row_mean
                xhat = values * row_rstd
                if cutlass.const_expr(partial_dw is not None):
                    dw_own[None, i].store(dw_own[None, i].load() + wg * xhat)
                if cutlass.const_expr(partial_db is not None):
                    db_own[None, i].store(db_own[None, i].load() + wg)
                if cutlass.const_expr(weight is not None):
                    wg = wg * w_own[None, i].load().to(Float32)
                result = wg - xhat * mean_gx
                if cutlass.const_expr(has_mean):
                    result = result - totals[1] / tile.hidden
                result = result * row_rstd
                dx_row[None, first + i * tile.threads].store(result.to(dx.element_type))
            row_rstd, row_mean = next_rstd, next_mean

        for partial, own in ((partial_dw, dw_own), (partial_db, db_own)):
            if cutlass.const_expr(partial is not None):
                row_of_sums = _row(partial, cluster)
                for i in cutlass.range_constexpr(tile.vectors):
                    row_of_sums[None, first + i * tile.threads].store(own[None, i].load())

    @cute.jit
    def fetch(
        self,
        g: cute.Tensor,
        x: cute.Tensor,
        g_slices: cute.Tensor,
        x_slices: cute.Tensor,
        row: Int32,
        stage: Int32,
        first: Int32,
        thread: Int32,
    ):
        """Starts to load this thread's vectors of a row, if there is one; a group of its own."""
        tile = self.tile
        if row < x.shape[0]:
            at = stage * (tile.threads * tile.vectors) + thread
            rows = [(g[row, None], g_slices), (x[row, None], x_slices)]
            start_loads(tile, rows, first, at)
        cute.arch.cp_async_commit_group()

    @cute.kernel
    def add_up(self, partial: cute.Tensor, total: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        at = block * _SUM_THREADS + thread
        layout = cute.make_layout(_SUM_VECTOR)
        sums = cute.make_rmem_tensor((_SUM_VECTOR,), Float32)
        sums.fill(0.0)
        for i in cutlass.range(partial.shape[0], unroll=8):
            row = cute.logical_divide(partial[i, None], layout)
            sums.store(sums.load() + row[None, at].load())
        cute.logical_divide(total, layout)[None, at].store(sums.load().to(total.element_type))
