"""RMSNorm's forward in CuteDSL, for rows so long that a cluster of Hopper's blocks shares one.

Triton cannot reduce over the blocks of a cluster. Here every block of a cluster holds a slice of a
row in shared memory, fetched there without passing through registers, so that a multiprocessor has
room for several blocks and always waits for some of them. Each of a block's warps writes its sum of
squares into the memory of every block of the cluster, and every block adds up what it was sent, in
the same order as the others: so x is read once, and all agree on the bits of rstd.

Every width is a function of its own; the number of rows and their distance are run-time values.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

__all__ = ["Kind", "Tile", "compile_kind", "kinds", "rms_norm_forward"]

_DTYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}
_WARP = 32
# Elements of 16 bits in a load of 16 bytes.
_VECTOR = 8


class Tile(NamedTuple):
    """A block's slice of a row: `threads` x `vectors` loads of 16 bytes, one of `cluster`."""

    threads: int
    vectors: int
    cluster: int  # up to 16: above 8 a launch is not portable, but Hopper takes it
    per_sm: int  # how many blocks a multiprocessor is to hold: no more registers than that allows

    @property
    def slice(self) -> int:
        return self.threads * self.vectors * _VECTOR

    @property
    def warps(self) -> int:
        return self.threads // _WARP

    @property
    def hidden(self) -> int:
        return self.slice * self.cluster


class Kind(NamedTuple):
    """What one compiled function is for."""

    dtype: torch.dtype
    tile: Tile
    has_weight: bool
    device: int | None  # compiled for the architecture of the device that its first call is on


class _Forward:
    def __init__(self, tile: Tile) -> None:
        self.tile = tile

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor | None,
        y: cute.Tensor,
        rstd: cute.Tensor,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(x, weight, y, rstd, eps).launch(
            grid=[self.tile.cluster * x.shape[0], 1, 1],
            block=[self.tile.threads, 1, 1],
            cluster=[self.tile.cluster, 1, 1],
            min_blocks_per_mp=self.tile.per_sm,
            preferred_smem_carveout=100,  # percent: nothing here is read twice through L1
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weight: cute.Tensor | None,
        y: cute.Tensor,
        rstd: cute.Tensor,
        eps: Float32,
    ):
        tile = self.tile
        shares_a_row = tile.cluster * tile.warps
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, rank = block // tile.cluster, block % tile.cluster
        warp, lane = thread // _WARP, thread % _WARP

        allocator = cutlass.utils.SmemAllocator()
        own = allocator.allocate_tensor(
            x.element_type, cute.make_layout((tile.slice,)), byte_alignment=128
        )
        shares = allocator.allocate_tensor(
            Float32, cute.make_layout((shares_a_row,)), byte_alignment=16
        )
        arrived = allocator.allocate_array(Int64, num_elems=1)
        if thread == 0:
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_init_fence()
            # All shares of the row arrive in this block's memory, its own among them.
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, shares_a_row * 4)
        # Nobody may write here before the barrier is there; waited for below, after the loads.
        cute.arch.cluster_arrive_relaxed()

        # Vectors of the row, of y's, of the weights and of the slice in shared memory, by index. A
        # thread reads what it fetched itself, so that no thread waits for another.
        by_vector = cute.make_layout(_VECTOR)
        x_row = cute.logical_divide(x[row, None], by_vector)
        y_row = cute.logical_divide(y[row, None], by_vector)
        held = cute.logical_divide(own, by_vector)
        first = rank * (tile.threads * tile.vectors) + thread
        fetch = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL),  # past L1
            x.element_type,
            num_bits_per_copy=16 * _VECTOR,
        )
        for i in cutlass.range_constexpr(tile.vectors):
            at = i * tile.threads
            cute.copy(fetch, x_row[None, first + at], held[None, thread + at])
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

        share = Float32(0.0)
        for i in cutlass.range_constexpr(tile.vectors):
            values = held[None, thread + i * tile.threads].load().to(Float32)
            share += (values * values).reduce(cute.ReductionOp.ADD, 0.0, 0)
        share = cute.arch.warp_reduction(share, lambda a, b: a + b)
        cute.arch.cluster_wait()
        if lane < tile.cluster:
            _send(share, shares.iterator + (rank * tile.warps + warp), arrived, lane)
        cute.arch.mbarrier_wait(arrived, 0)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(-(-shares_a_row // _WARP)):
            if lane + i * _WARP < shares_a_row:
                total += shares[lane + i * _WARP]
        total = cute.arch.warp_reduction(total, lambda a, b: a + b)
        scale = cute.math.rsqrt(total / tile.hidden + eps)
        if rank == 0 and thread == 0:
            rstd[row] = scale

        for i in cutlass.range_constexpr(tile.vectors):
            at = i * tile.threads
            result = held[None, thread + at].load().to(Float32) * scale
            if cutlass.const_expr(weight is not None):
                w_row = cute.logical_divide(weight, by_vector)
                result = result * w_row[None, first + at].load().to(Float32)
            y_row[None, first + at].store(result.to(y.element_type))


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


# --------------------------------------------------------------------------------------------------
# Compiling and calling
# --------------------------------------------------------------------------------------------------


def _fake(dtype: Any, ndim: int, aligned: int) -> Any:
    stride = [cute.sym_int64(divisibility=aligned) for _ in range(ndim - 1)]
    return cute.runtime.make_fake_tensor(
        dtype,
        tuple(cute.sym_int() for _ in range(ndim)),
        stride=(*stride, 1),
        assumed_align=aligned * dtype.width // 8,
    )


def compile_kind(kind: Kind) -> Callable[..., None]:
    """Compile the function for `kind`; needs no GPU where ``CUTE_DSL_ARCH`` names one."""
    dtype = _DTYPES[kind.dtype]
    x, y = (_fake(dtype, 2, _VECTOR) for _ in range(2))
    weight = _fake(dtype, 1, _VECTOR) if kind.has_weight else None
    # The stream is the one that tvm-ffi's environment holds, torch's current one.
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled: Callable[..., None] = cute.compile(
        _Forward(kind.tile), x, weight, y, _fake(Float32, 1, 1), Float32(1.0), stream,
        options="--enable-tvm-ffi",
    )  # fmt: skip
    return compiled


# The fastest of those tried on an H200, by the width of the rows.
_TILES = {tile.hidden: tile for tile in (Tile(512, 4, 4, 4), Tile(512, 4, 8, 4))}


def kinds() -> Iterator[Kind]:
    """Functions that there are, to be compiled for any Hopper GPU."""
    for tile in _TILES.values():
        for dtype in _DTYPES:
            yield Kind(dtype, tile, True, None)
        yield Kind(torch.bfloat16, tile, False, None)


_functions: dict[Kind, Callable[..., None]] = {}
_compiling = threading.Lock()


def _function(kind: Kind) -> Callable[..., None]:
    found = _functions.get(kind)
    if found is None:
        with _compiling:
            found = _functions.get(kind)
            if found is None:
                found = _functions[kind] = compile_kind(kind)
    return found


def rms_norm_forward(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the trailing dimensions, ``input * rsqrt(mean(input ** 2) + eps) * weight``.

    The signature, the formula and the results are those of ``aten::_fused_rms_norm``.

    Args:
        input: ``[*outer, hidden]``, float16 or bfloat16, contiguous, not empty, 16 bytes aligned;
            hidden is 65536 or 131072.
        normalized_shape: ``[hidden]``.
        weight: ``[hidden]``, the dtype of ``input``, contiguous, 16 bytes aligned; or None.
        eps: added to the mean. None is the epsilon of float32, whatever the input's dtype.

    Returns:
        The output, contiguous, in the shape and dtype of ``input``; and ``rstd``, float32,
        ``[*outer, 1]``, for the backward.
    """
    hidden = normalized_shape[0]
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    rstd = torch.empty((*input.shape[:-1], 1), dtype=torch.float32, device=input.device)
    rows = math.prod(input.shape[:-1])
    kind = Kind(input.dtype, _TILES[hidden], weight is not None, input.device.index)
    x, y = input.view(rows, hidden), output.view(rows, hidden)
    _function(kind)(x, weight, y, rstd.view(rows), eps)
    return output, rstd
