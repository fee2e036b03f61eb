"""The forward of RMSNorm and LayerNorm.

With ``rows x hidden`` the input seen as a matrix, and all arithmetic in float32::

    rstd = rsqrt(mean((x - mean(x)) ** 2) + eps)              one value a row, like mean(x)
    y    = (x - mean) * rstd * w + b

RMSNorm has no mean, and no bias. LayerNorm's variance is the mean of squared differences from the
mean, which the blocks agree on before they take them: two exchanges a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from opgraft_kernels.clusters.compiling import Functions, compile_function, fake
from opgraft_kernels.clusters.exchange import (
    DTYPES,
    Exchange,
    Loads,
    Tile,
    await_loads,
    by_vector,
    fetch_atom,
    gather_shares,
    launch_options,
    open_exchange,
    reopen_slot,
    send_shares,
    start_loads,
    store_vector,
    warp_sum,
)
from opgraft_kernels.clusters.residency import walkers

__all__ = ["Forward", "ForwardKind", "compile_forward", "norm_forward"]

# Slots of the exchanges, where there are several of them. Who sends the shares of one has gathered
# those of the one before; so all have sent those, and before that gathered those of the one before
# that.
_RING = 2


class Forward:
    """A norm, its mean if it has one, and rstd.

    With one stage every cluster has one row, and a multiprocessor has room for several blocks and
    always waits for some of them. With more, clusters walk over the rows, a grid apart, with the
    next ones on their way into shared memory, where the weights stay.
    """

    def __init__(self, tile: Tile) -> None:
        assert tile.stages == 1 or not tile.bulk
        self.tile = tile
        self.walks = tile.stages > 1

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
        clusters: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(x, weight, bias, y, mean, rstd, eps, clusters).launch(
            grid=[self.tile.cluster * clusters, 1, 1], stream=stream, **launch_options(self.tile)
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
        clusters: Int32,
    ):
        tile = self.tile
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cluster, rank = block // tile.cluster, block % tile.cluster

        allocator = cutlass.utils.SmemAllocator()
        loads = Loads(allocator, tile, x.element_type)
        slots = _RING if self.walks or mean is not None else 1
        exchange = Exchange(allocator, tile, slots)
        open_exchange(exchange, thread)
        if cutlass.const_expr(not self.walks):
            start_loads(loads, x, cluster, 0, thread, rank)
            await_loads(loads)
            self.finish(loads, exchange, cluster, 0, weight, bias, y, mean, rstd, eps, thread, rank)
        else:
            # They arrive with the first row.
            own_weight = self.fetch_own(weight, allocator, thread, rank)
            own_bias = self.fetch_own(bias, allocator, thread, rank)
            for stage in cutlass.range_constexpr(tile.stages - 1):
                start_loads(loads, x, cluster + stage * clusters, stage, thread, rank)
            cute.arch.cluster_wait()
            for step in cutlass.range((x.shape[0] - cluster + clusters - 1) // clusters):
                row = cluster + step * clusters
                ahead = step + (tile.stages - 1)
                start_loads(loads, x, cluster + ahead * clusters, ahead, thread, rank)
                await_loads(loads)
                self.finish(
                    loads, exchange, row, step, own_weight, own_bias, y, mean, rstd, eps, thread,
                    rank,
                )  # fmt: skip

    @cute.jit
    def finish(
        self,
        loads: Loads,
        exchange: Exchange,
        row: Int32,
        step: Int32,
        weight: cute.Tensor | None,
        bias: cute.Tensor | None,
        y: cute.Tensor,
        mean: cute.Tensor | None,
        rstd: cute.Tensor,
        eps: Float32,
        thread: Int32,
        rank: Int32,
    ):
        """The row that this cluster's `step`-th loads fetched."""
        tile, held = self.tile, loads.held
        at = (step % tile.stages) * (tile.threads * tile.vectors) + thread
        slot, phase = step % _RING, (step // _RING) % 2
        centre = Float32(0.0)
        if cutlass.const_expr(mean is not None):
            share = Float32(0.0)
            for i in cutlass.range_constexpr(tile.vectors):
                values = held[None, at + i * tile.threads].load().to(Float32)
                share += values.reduce(cute.ReductionOp.ADD, 0.0, 0)
            total = self.total(exchange, share, 0, step % 2, True, thread, rank)
            centre = total / tile.hidden
            slot, phase = 1, step % 2

        share = Float32(0.0)
        for i in cutlass.range_constexpr(tile.vectors):
            values = held[None, at + i * tile.threads].load().to(Float32)
            if cutlass.const_expr(mean is not None):
                values = values - centre
            share += (values * values).reduce(cute.ReductionOp.ADD, 0.0, 0)
        total = self.total(exchange, share, slot, phase, mean is None, thread, rank)
        scale = cute.math.rsqrt(total / tile.hidden + eps)
        if rank == 0 and thread == 0:
            rstd[row] = scale
            if cutlass.const_expr(mean is not None):
                _write(mean, row, centre)

        y_row = by_vector(y[row, None])
        first = rank * (tile.threads * tile.vectors) + thread
        for i in cutlass.range_constexpr(tile.vectors):
            values = held[None, at + i * tile.threads].load().to(Float32)
            if cutlass.const_expr(mean is not None):
                values = values - centre
            result = values * scale
            if cutlass.const_expr(weight is not None):
                result = result * self.parameters(weight, i, thread, rank)
            if cutlass.const_expr(bias is not None):
                result = result + self.parameters(bias, i, thread, rank)
            store_vector(tile, y_row, first + i * tile.threads, result.to(y.element_type))

    @cute.jit
    def total(
        self,
        exchange: Exchange,
        share: Float32,
        slot: Any,
        phase: Any,
        is_first: cutlass.Constexpr,
        thread: Int32,
        rank: Int32,
    ):
        """The sum of all threads' shares over the cluster."""
        share = warp_sum(share)
        if cutlass.const_expr(is_first and not self.walks):
            cute.arch.cluster_wait()
        send_shares(exchange, slot, (share,), thread, rank)
        (total,) = gather_shares(exchange, slot, phase, thread)
        if cutlass.const_expr(self.walks):
            reopen_slot(exchange, slot, thread)
        return total

    def fetch_own(self, parameters: Any, allocator: Any, thread: Any, rank: Any) -> Any:
        """A block's slice of the weight or bias, on its way into shared memory."""
        if parameters is None:
            return None
        tile = self.tile
        own = by_vector(
            allocator.allocate_tensor(
                parameters.element_type, cute.make_layout((tile.slice,)), byte_alignment=128
            )
        )
        fetch, vectors = fetch_atom(parameters.element_type), by_vector(parameters)
        first = rank * (tile.threads * tile.vectors) + thread
        for i in range(tile.vectors):
            j = i * tile.threads
            cute.copy(fetch, vectors[None, first + j], own[None, thread + j])
        return own

    def parameters(self, parameters: Any, i: int, thread: Any, rank: Any) -> Any:
        tile = self.tile
        if self.walks:
            return parameters[None, thread + i * tile.threads].load().to(Float32)
        first = rank * (tile.threads * tile.vectors) + thread
        return by_vector(parameters)[None, first + i * tile.threads].load().to(Float32)


def _write(numbers: Any, row: Any, value: Any) -> None:
    numbers[row] = value


# --------------------------------------------------------------------------------------------------
# Compiling and calling
# --------------------------------------------------------------------------------------------------


class ForwardKind(NamedTuple):
    """What one compiled forward is for."""

    dtype: torch.dtype
    tile: Tile
    has_weight: bool
    has_bias: bool
    has_mean: bool
    device: int | None  # compiled for the architecture of the device that its first call is on


def compile_forward(kind: ForwardKind) -> Callable[..., None]:
    """Compile the forward for `kind`; needs no GPU where ``CUTE_DSL_ARCH`` names one."""
    dtype = DTYPES[kind.dtype]
    matrix, row = functools.partial(fake, dtype, 2), functools.partial(fake, dtype, 1)
    number = functools.partial(fake, Float32, 1, 1)
    return compile_function(
        Forward(kind.tile),
        matrix(),
        row() if kind.has_weight else None,
        row() if kind.has_bias else None,
        matrix(),
        number() if kind.has_mean else None,
        number(),
        Float32(1.0),
        Int32(1),
    )


def norm_forward(
    tile: Tile,
    functions: Functions,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    has_mean: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """A norm, its mean if it has one, and rstd."""
    hidden, device = tile.hidden, input.device
    rows = input.numel() // hidden
    output = torch.empty(input.shape, dtype=input.dtype, device=device)
    shape = (*input.shape[:-1], 1)
    mean = torch.empty(shape, dtype=torch.float32, device=device) if has_mean else None
    rstd = torch.empty(shape, dtype=torch.float32, device=device)
    kind = ForwardKind(
        input.dtype, tile, weight is not None, bias is not None, has_mean, device.index
    )
    functions[kind](
        input.view(rows, hidden),
        weight,
        bias,
        output.view(rows, hidden),
        None if mean is None else mean.view(rows),
        rstd.view(rows),
        eps,
        rows if tile.stages == 1 else walkers(tile, rows, device.index),
    )
    return output, mean, rstd
