"""A backward for Hopper of short sequences, in which a program has all of a head.

FlashAttention-4's backward has a program for each block of keys. They add their parts of dq to
numbers in float32 in global memory, which a kernel before zeroes, and a kernel after makes 16 bits
of. Where a head has two blocks of keys at most, a program can compute both, and keep the parts of
the first in shared memory: so dq is written once, in 16 bits, and is always the same.

A program walks over heads. All of a head's queries, keys and values are in shared memory at a time,
each loaded once, and as soon as a part of them is not needed, the gradient of this very part is put
where it was. One warp writes it to global memory from there, and then another one loads the same
part of the next head: neither do the threads that compute wait for that.

The products are the library's, and so are the layouts of what they read. Importing this imports
CuteDSL and the library.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import FastDivmodDivisorV2
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum, SmemAllocator
from flash_attn.cute import utils
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.named_barrier import NamedBarrierBwd
from quack import copy_utils, layout_utils, sm90_utils
from quack.sm90_utils import gemm_w_idx, gemm_zero_init, partition_fragment_ABC

from opgraft_kernels.attention.cutedsl_tiles import SHORT_KEYS, ShortTile

__all__ = ["ShortBackward"]

# Two warp groups compute, each 64 keys of a block. Another one's warps load and store.
_WARP_GROUP, _GROUPS = 128, 2
_COMPUTING = _GROUPS * _WARP_GROUP
_THREADS = _COMPUTING + _WARP_GROUP
_WARPS_COMPUTING = _COMPUTING // 32
# Registers of a thread, of 504 that the three warp groups have.
_REGISTERS_TO_MOVE, _REGISTERS_TO_COMPUTE = 24, 240
# How many floats a thread copies at a time.
_VECTOR = 4
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class _Buffers:
    """Barriers of buffers that are used one after the other, in a circle.

    A use is counted from 0 on: of which buffer it is, and the how manieth of that, follows.
    """

    barriers: cute.Pointer
    count: cutlass.Constexpr[int]

    def init(self, warps: int) -> None:
        """So many warps arrive for each use."""
        for buffer in range(self.count):
            cute.arch.mbarrier_init(self.barriers + buffer, warps)

    def buffer(self, use: Int32) -> Int32:
        return use % self.count

    def barrier(self, use: Int32) -> cute.Pointer:
        return self.barriers + use % self.count

    def wait(self, use: Int32) -> None:
        """Until what the barriers stand for has happened for this use."""
        cute.arch.mbarrier_wait(self.barrier(use), use // self.count % 2)

    def wait_for_the_last(self, use: Int32) -> None:
        """Until it has happened for the use of the same buffer before, if there was one."""
        cute.arch.mbarrier_wait(self.barrier(use), 1 - use // self.count % 2)

    def arrive(self, use: Int32) -> None:
        """What a warp does when all of its threads have done it."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barrier(use))

    def expect(self, use: Int32, count: int) -> None:
        """So many bytes, of copies that this warp begins."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(use), count)


class ShortBackward(FlashAttentionBackwardSm90):  # type: ignore[misc]
    """The kernel; see `__call__`.

    Args:
        dtype: of all tensors.
        head_dim: of queries, keys and values, 64 or 128; tensors may have fewer.
        tile: its sizes.
    """

    def __init__(self, dtype: Any, head_dim: int, tile: ShortTile) -> None:
        super().__init__(
            dtype,
            head_dim,
            tile_m=tile.queries,
            tile_n=SHORT_KEYS,
            Q_stage=2,
            dO_stage=2,
            PdS_stage=1,
            SdP_swapAB=True,
            dQ_swapAB=True,
            # Of 64 columns warp groups have other queries each, of 128 other columns.
            AtomLayoutMdQ=_GROUPS if head_dim == 64 else 1,
            num_threads=_THREADS,
        )
        assert self.mma_dkv_is_rs
        self.num_threads_per_warp_group = _WARP_GROUP
        self.key_blocks = tile.key_blocks
        #: How many blocks of keys and values shared memory holds.
        self.key_buffers = tile.key_buffers
        #: Of dq of a tile, a thread's numbers.
        self.part = self.tile_m * self.tile_hdim // _COMPUTING
        #: What a copy brings, by what it copies.
        size = dtype.width // 8
        self.bytes_of_keys = 2 * self.tile_n * self.tile_hdim * size
        self.bytes_of_queries = self.tile_m * (self.tile_hdim * size + 4)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        grad_out: cute.Tensor,
        logsumexp: cute.Tensor,
        delta: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: Float32,
        programs: Int32,
        stream: cuda.CUstream = None,
    ) -> None:
        """Tensors are ``[batch, length, heads, dim]``, of all heads' own keys.

        `logsumexp`, in powers of two, and `delta` are ``[batch, heads, rows]``, of whole tiles:
        infinity and 0 where there is no query.
        """
        q, k, v, grad_out, dq, dk, dv = (
            layout_utils.select(t, [1, 3, 2, 0]) for t in (q, k, v, grad_out, dq, dk, dv)
        )
        logsumexp, delta = (layout_utils.select(t, [2, 1, 0]) for t in (logsumexp, delta))
        layouts = self._layouts()
        of_queries = cute.select(layouts.queries, [0, 1]), (self.tile_m, self.tile_hdim)
        of_keys = cute.select(layouts.keys, [0, 1]), (self.tile_n, self.tile_hdim)
        of_values = cute.select(layouts.values, [0, 1]), (self.tile_n, self.tile_hdim)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        copies = (
            cpasync.make_tiled_tma_atom(load, q, *of_queries),
            cpasync.make_tiled_tma_atom(load, k, *of_keys),
            cpasync.make_tiled_tma_atom(load, v, *of_values),
            cpasync.make_tiled_tma_atom(load, grad_out, *of_queries),
            cpasync.make_tiled_tma_atom(store, dq, *of_queries),
            cpasync.make_tiled_tma_atom(store, dk, *of_keys),
            cpasync.make_tiled_tma_atom(store, dv, *of_values),
        )
        heads = cute.size(q.shape[2])
        all_heads = heads * cute.size(q.shape[3])
        self.kernel(
            *(atom for atom, _ in copies), *(tensor for _, tensor in copies), logsumexp, delta,
            scale, FastDivmodDivisorV2(heads), all_heads,
        ).launch(
            grid=(cutlass.min(programs, all_heads), 1, 1),
            block=(_THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip

    def _layouts(self) -> Any:
        """Of what is in shared memory, as the library has it, and of as many buffers."""
        self._setup_attributes()
        keys, values = (
            sm90_utils.make_smem_layout(
                self.dtype,
                LayoutEnum.ROW_MAJOR,
                (self.tile_n, self.tile_hdim),
                self.key_buffers,
                major_mode_size=columns,
            )
            for columns in (self.tile_hdim * self.AtomLayoutMdQ // _GROUPS, self.tile_hdim)
        )
        return SimpleNamespace(
            queries=self.sQ_layout, keys=keys, values=values, dS=self.sPdS_layout
        )

    def _storage(self, layouts: Any) -> Any:
        """The class of what is in shared memory, but of one buffer of dS."""

        def memory(dtype: Any, count: int, aligned: int = 1024) -> Any:
            return cute.struct.Align[cute.struct.MemRange[dtype, count], aligned]

        queries, keys, values, dS = (
            memory(self.dtype, cute.cosize(layout))
            for layout in (layouts.queries, layouts.keys, layouts.values, layouts.dS)
        )
        rows = memory(Float32, 2 * self._rows, 128)
        # Of all tiles of a head; none where there is one block of keys.
        parts = 0 if self.key_blocks == 1 else 2 * self.part * _COMPUTING
        parts = memory(Float32, parts)
        barriers = cute.struct.MemRange[cutlass.Int64, 5 * 2 + 3 * self.key_buffers]
        members = {"barriers": barriers, "logsumexp": rows, "delta": rows, "Q": queries}
        members |= {"dO": queries, "K": keys, "V": values, "dS": dS, "dQ": parts}
        return cute.struct(type("Storage", (), {"__annotations__": members}))

    @property
    def _rows(self) -> int:
        """Between the beginnings of the logsumexps of two tiles."""
        return (self.tile_m + 31) // 32 * 32

    @cute.kernel
    def kernel(
        self,
        load_Q: cute.CopyAtom,
        load_K: cute.CopyAtom,
        load_V: cute.CopyAtom,
        load_dO: cute.CopyAtom,
        store_dQ: cute.CopyAtom,
        store_dK: cute.CopyAtom,
        store_dV: cute.CopyAtom,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        grad_out: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        logsumexp: cute.Tensor,
        delta: cute.Tensor,
        scale: Float32,
        heads: FastDivmodDivisorV2,
        all_heads: Int32,
    ) -> None:
        layouts = self._layouts()
        storage = SmemAllocator().allocate(self._storage(layouts))
        shared = SimpleNamespace(
            Q=storage.Q.get_tensor(layouts.queries.outer, swizzle=layouts.queries.inner),
            dO=storage.dO.get_tensor(layouts.queries.outer, swizzle=layouts.queries.inner),
            K=storage.K.get_tensor(layouts.keys.outer, swizzle=layouts.keys.inner),
            V=storage.V.get_tensor(layouts.values.outer, swizzle=layouts.values.inner),
            dS=storage.dS.get_tensor(layouts.dS.outer, swizzle=layouts.dS.inner),
            logsumexp=storage.logsumexp.get_tensor(self._rows_layout()),
            delta=storage.delta.get_tensor(self._rows_layout()),
            dQ=storage.dQ.data_ptr(),
        )
        begin, many = storage.barriers.data_ptr(), self.key_buffers
        #: By the copy engine, of queries with their logsumexps, of dO with its delta, of keys with
        #: their values; gradients put in the place of queries, and of keys and values; and what is
        #: free to be loaded again.
        at = SimpleNamespace(
            loaded_Q=_Buffers(begin, 2),
            loaded_dO=_Buffers(begin + 2, 2),
            put_dQ=_Buffers(begin + 4, 2),
            free_Q=_Buffers(begin + 6, 2),
            free_dO=_Buffers(begin + 8, 2),
            loaded_KV=_Buffers(begin + 10, many),
            put_dKV=_Buffers(begin + 10 + many, many),
            free_KV=_Buffers(begin + 10 + 2 * many, many),
        )
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (load_Q, load_K, load_V, load_dO, store_dQ, store_dK, store_dV):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                # By one warp, which loads or stores.
                for buffers in (at.loaded_Q, at.loaded_dO, at.free_Q, at.loaded_KV, at.free_KV):
                    buffers.init(1)
                for buffers in (at.put_dQ, at.free_dO, at.put_dKV):
                    buffers.init(_WARPS_COMPUTING)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        #: A program's heads: so many, of all batches in a row, from the first one on.
        program, programs = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        turns = (all_heads - program + programs - 1) // programs
        walk = SimpleNamespace(first=program, step=programs, turns=turns, heads=heads)
        if warp < 4:
            cute.arch.setmaxregister_decrease(_REGISTERS_TO_MOVE)
            if warp == 0:
                self.load(
                    (load_Q, load_K, load_V, load_dO), (q, k, v, grad_out), (logsumexp, delta),
                    shared, at, walk,
                )  # fmt: skip
            if warp == 1:
                self.store((store_dQ, store_dK, store_dV), (dq, dk, dv), shared, at, walk)
        else:
            cute.arch.setmaxregister_increase(_REGISTERS_TO_COMPUTE)
            tidx = cute.arch.thread_idx()[0] - _WARP_GROUP
            self.mma(tidx, cute.size(q.shape[0]), cute.size(k.shape[0]), scale, shared, at, walk)

    def _rows_layout(self) -> Any:
        return cute.make_layout((self.tile_m, 2), stride=(1, self._rows))

    def _tile_of(self, block: Any, rows: int) -> Any:
        return (rows, self.tile_hdim), (block, 0)

    @cute.jit
    def load(self, atoms: Any, tensors: Any, rows: Any, shared: Any, at: Any, walk: Any) -> None:
        """What one warp does: it loads each head's keys and values and its queries."""
        load_Q, load_K, load_V, load_dO = atoms
        q, k, v, grad_out = tensors
        one = cute.make_layout(1)
        tiles = cute.ceil_div(cute.size(q.shape[0]), self.tile_m)
        for turn in cutlass.range(walk.turns, unroll=1):
            batch, head = divmod(walk.first + turn * walk.step, walk.heads)
            gQ, gdO = (
                cute.local_tile(t[None, None, head, batch], *self._tile_of(None, self.tile_m))
                for t in (q, grad_out)
            )
            gK, gV = (
                cute.local_tile(t[None, None, head, batch], *self._tile_of(None, self.tile_n))
                for t in (k, v)
            )
            gL, gD = (cute.local_tile(t[None, head, batch], (self.tile_m,), (None,)) for t in rows)
            copy_Q, _, _ = copy_utils.tma_get_copy_fn(load_Q, 0, one, gQ, shared.Q)
            copy_dO, _, _ = copy_utils.tma_get_copy_fn(load_dO, 0, one, gdO, shared.dO)
            copy_K, _, _ = copy_utils.tma_get_copy_fn(load_K, 0, one, gK, shared.K)
            copy_V, _, _ = copy_utils.tma_get_copy_fn(load_V, 0, one, gV, shared.V)
            copy_L = copy_utils.cpasync_bulk_get_copy_fn(gL, shared.logsumexp)
            copy_D = copy_utils.cpasync_bulk_get_copy_fn(gD, shared.delta)
            for block in cutlass.range_constexpr(self.key_blocks):
                use = turn * self.key_blocks + block
                at.free_KV.wait_for_the_last(use)
                at.loaded_KV.expect(use, self.bytes_of_keys)
                buffer, barrier = at.loaded_KV.buffer(use), at.loaded_KV.barrier(use)
                copy_K(block, buffer, tma_bar_ptr=barrier)
                copy_V(block, buffer, tma_bar_ptr=barrier)
                if cutlass.const_expr(block == 0):
                    for tile in cutlass.range(tiles, unroll=1):
                        use = turn * tiles + tile
                        buffer = at.loaded_Q.buffer(use)
                        at.free_Q.wait_for_the_last(use)
                        at.loaded_Q.expect(use, self.bytes_of_queries)
                        copy_Q(tile, buffer, tma_bar_ptr=at.loaded_Q.barrier(use))
                        at.free_dO.wait_for_the_last(use)
                        at.loaded_dO.expect(use, self.bytes_of_queries)
                        copy_dO(tile, buffer, tma_bar_ptr=at.loaded_dO.barrier(use))
                        # What the kernel before this one wrote is read from here on.
                        cute.arch.griddepcontrol_wait()
                        copy_L(tile, buffer, tma_bar_ptr=at.loaded_Q.barrier(use))
                        copy_D(tile, buffer, tma_bar_ptr=at.loaded_dO.barrier(use))

    @cute.jit
    def store(self, atoms: Any, tensors: Any, shared: Any, at: Any, walk: Any) -> None:
        """What another warp does: it writes gradients from where queries, keys and values were."""
        store_dQ, store_dK, store_dV = atoms
        dq, dk, dv = tensors
        one = cute.make_layout(1)
        tiles = cute.ceil_div(cute.size(dq.shape[0]), self.tile_m)
        for turn in cutlass.range(walk.turns, unroll=1):
            batch, head = divmod(walk.first + turn * walk.step, walk.heads)
            gdQ = cute.local_tile(dq[None, None, head, batch], *self._tile_of(None, self.tile_m))
            gdK, gdV = (
                cute.local_tile(t[None, None, head, batch], *self._tile_of(None, self.tile_n))
                for t in (dk, dv)
            )
            copy_dQ, _, _ = copy_utils.tma_get_copy_fn(store_dQ, 0, one, shared.Q, gdQ)
            copy_dK, _, _ = copy_utils.tma_get_copy_fn(store_dK, 0, one, shared.K, gdK)
            copy_dV, _, _ = copy_utils.tma_get_copy_fn(store_dV, 0, one, shared.V, gdV)
            for block in cutlass.range_constexpr(self.key_blocks):
                if cutlass.const_expr(block == self.key_blocks - 1):
                    for tile in cutlass.range(tiles, unroll=1):
                        use = turn * tiles + tile
                        at.put_dQ.wait(use)
                        copy_dQ(at.put_dQ.buffer(use), tile)
                        cute.arch.cp_async_bulk_commit_group()
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        at.free_Q.arrive(use)
                use = turn * self.key_blocks + block
                at.put_dKV.wait(use)
                copy_dV(at.put_dKV.buffer(use), block)
                copy_dK(at.put_dKV.buffer(use), block)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                at.free_KV.arrive(use)

    def _fragments(self, tidx: Int32, shared: Any) -> Any:
        """The products' operands and results, and where a thread's parts of them are."""
        mma_S, mma_dK, mma_dV, mma_dQ = self._get_tiled_mma()
        group = cute.arch.make_warp_uniform(tidx // _WARP_GROUP)
        first = cute.make_layout(_GROUPS, stride=_WARP_GROUP)(group)
        tile, dim = (self.tile_m, self.tile_n), self.tile_hdim
        of_S, of_dK, of_dV, of_dQ = (
            mma.get_slice(first) for mma in (mma_S, mma_dK, mma_dV, mma_dQ)
        )
        _, S_Q, S_K = partition_fragment_ABC(of_S, (*tile, dim), shared.Q, shared.K, swap_AB=True)
        _, dP_dO, dP_V = partition_fragment_ABC(
            of_S, (*tile, dim), shared.dO, shared.V, swap_AB=True
        )
        dOt, Qt, Kt = (layout_utils.transpose_view(t) for t in (shared.dO, shared.Q, shared.K))
        dV, _, dV_dO = partition_fragment_ABC(of_dV, (self.tile_n, dim, self.tile_m), None, dOt)
        dK, _, dK_Q = partition_fragment_ABC(of_dK, (self.tile_n, dim, self.tile_m), None, Qt)
        _, dQ_dS, dQ_K = partition_fragment_ABC(
            of_dQ, (self.tile_m, dim, self.tile_n), shared.dS, Kt, swap_AB=True
        )
        put_dS, _, _ = copy_utils.get_smem_store_C(
            mma_S, layout_utils.transpose_view(shared.dS), tidx, transpose=True,
            position_independent=True, major_mode_size=self.tile_n // _GROUPS,
        )  # fmt: skip
        put_dQ, _, _ = copy_utils.get_smem_store_C(
            mma_dQ, Qt, tidx, transpose=True, position_independent=True,
            # How many queries a warp group has decides how many a copy can have.
            major_mode_size=self.tile_m // self.AtomLayoutMdQ,
        )  # fmt: skip
        put_dK, _, _ = copy_utils.get_smem_store_C(
            mma_dK, shared.K, tidx, position_independent=True
        )
        put_dV, _, _ = copy_utils.get_smem_store_C(
            mma_dV, shared.V, tidx, position_independent=True
        )
        thread = mma_S.get_slice(tidx)
        logsumexp, delta = (
            layout_utils.mma_partition_C_vec(t, thread, expand_shape=self.tile_n, is_colvec=False)
            for t in (shared.logsumexp, shared.delta)
        )
        places = thread.partition_C(cute.make_identity_tensor((self.tile_n, self.tile_m)))
        keys = layout_utils.reshape_acc_to_mn(places, transpose=True)
        # A thread's parts of dq, in vectors; those of all threads are behind one another.
        parts = cute.make_layout(
            (_VECTOR, _COMPUTING, self.part // _VECTOR, 2),
            stride=(1, _VECTOR, _VECTOR * _COMPUTING, self.part * _COMPUTING),
        )
        parts = cute.make_tensor(shared.dQ, parts)[None, tidx, None, None]
        return SimpleNamespace(
            mma_S=mma_S, mma_dK=mma_dK, mma_dV=mma_dV, mma_dQ=mma_dQ, S_Q=S_Q, S_K=S_K, dP_dO=dP_dO,
            dP_V=dP_V, dV=dV, dV_dO=dV_dO, dK=dK, dK_Q=dK_Q, dQ_dS=dQ_dS, dQ_K=dQ_K, put_dS=put_dS,
            put_dQ=put_dQ, put_dK=put_dK, put_dV=put_dV, logsumexp=logsumexp, delta=delta,
            keys=keys, parts=parts,
        )  # fmt: skip

    @cute.jit
    def mma(
        self,
        tidx: Int32,
        queries: Int32,
        keys: Int32,
        scale: Float32,
        shared: Any,
        at: Any,
        walk: Any,
    ) -> None:
        """What two warp groups do: they compute a head's gradients."""
        of = self._fragments(tidx, shared)
        tiles = cute.ceil_div(queries, self.tile_m)
        for turn in cutlass.range(walk.turns, unroll=1):
            for block in cutlass.range_constexpr(self.key_blocks):
                use = turn * self.key_blocks + block
                at.loaded_KV.wait(use)
                buffer = at.loaded_KV.buffer(use)
                for tile in cutlass.range(tiles, unroll=1):
                    self.compute_tile(tile, turn * tiles + tile, block, buffer, keys, scale, of, at)
                self.put_gradients_of_keys(buffer, scale, of)
                at.put_dKV.arrive(use)

    @cute.jit
    def put_gradients_of_keys(self, buffer: Int32, scale: Float32, of: Any) -> None:
        """In the place of keys and values, which no thread reads any more."""
        of.dK.store(of.dK.load() * scale)
        of.put_dV(of.dV, dst_idx=buffer)
        of.put_dK(of.dK, dst_idx=buffer)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def compute_tile(
        self,
        tile: Int32,
        use: Int32,
        block: cutlass.Constexpr[int],
        buffer_K: Int32,
        keys: Int32,
        scale: Float32,
        of: Any,
        at: Any,
    ) -> None:
        """A tile of queries and a block of keys: parts of dq, and more of dk and dv."""
        is_last = cutlass.const_expr(block == self.key_blocks - 1)
        buffer = at.loaded_Q.buffer(use)
        shape = (self.tile_m, self.tile_n)
        at.loaded_Q.wait(use)
        S = gemm_zero_init(
            of.mma_S, shape, of.S_Q, of.S_K, A_idx=buffer, B_idx=buffer_K, swap_AB=True
        )
        at.loaded_dO.wait(use)
        dP = gemm_zero_init(
            of.mma_S, shape, of.dP_dO, of.dP_V, A_idx=buffer, B_idx=buffer_K, swap_AB=True
        )
        warpgroup.wait_group(1)
        scores, gradients = (layout_utils.reshape_acc_to_mn(t, transpose=True) for t in (S, dP))
        rows, columns = cute.size(scores.shape[0]), cute.size(scores.shape[1])
        if cutlass.const_expr(is_last):
            self.mask(scores, of.keys, keys - block * self.tile_n)
        for row in cutlass.range_constexpr(0, rows, 2):
            pair = self._pair(of.logsumexp, row, buffer)
            for half in cutlass.range_constexpr(2):
                for column in cutlass.range_constexpr(columns):
                    power = scores[row + half, column] * (scale * _LOG2_E) - pair[half]
                    scores[row + half, column] = cute.math.exp2(power, fastmath=True)
        P = utils.cvt_f16(layout_utils.reshape_acc_to_frgA(S), self.dtype)
        warpgroup.wait_group(0)
        for row in cutlass.range_constexpr(0, rows, 2):
            pair = self._pair(of.delta, row, buffer)
            for half in cutlass.range_constexpr(2):
                for column in cutlass.range_constexpr(columns):
                    gradient = gradients[row + half, column] - pair[half]
                    gradients[row + half, column] = scores[row + half, column] * gradient
        dS = utils.cvt_f16(layout_utils.reshape_acc_to_frgA(dP), self.dtype)
        of.put_dS(dS, dst_idx=0)
        gemm_w_idx(of.mma_dV, of.dV, P, of.dV_dO, zero_init=tile == 0, B_idx=buffer)
        # All keys' dS.
        cute.arch.fence_view_async_shared()
        self._meet(NamedBarrierBwd.PdS)
        dQ = gemm_zero_init(
            of.mma_dQ, (self.tile_m, self.tile_hdim), of.dQ_dS, of.dQ_K, A_idx=0, B_idx=buffer_K,
            wg_wait=1, swap_AB=True,
        )  # fmt: skip
        if cutlass.const_expr(is_last):
            at.free_dO.arrive(use)
        gemm_w_idx(of.mma_dK, of.dK, dS, of.dK_Q, zero_init=tile == 0, B_idx=buffer, wg_wait=1)
        if cutlass.const_expr(self.key_blocks > 1):
            parts = cute.make_tensor(dQ.iterator, cute.make_layout((_VECTOR, self.part // _VECTOR)))
            if cutlass.const_expr(block == 0):
                cute.autovec_copy(parts, of.parts[None, None, tile])
            else:
                before = copy_utils.load_s2r(of.parts[None, None, tile])
                parts.store(parts.load() + before.load())
        warpgroup.wait_group(0)
        # Now all warps have read dS, and where they are done with them, queries or keys.
        self._meet(NamedBarrierBwd.Epilogue)
        if cutlass.const_expr(is_last):
            dQ.store(dQ.load() * scale)
            of.put_dQ(dQ, dst_idx=buffer)
            cute.arch.fence_view_async_shared()
            at.put_dQ.arrive(use)

    @cute.jit
    def mask(self, scores: cute.Tensor, places: cute.Tensor, keys: Int32) -> None:
        """Scores of no key become -inf: 0 would be far above the others where all are low."""
        if keys < self.tile_n:
            for column in cutlass.range_constexpr(cute.size(scores.shape[1])):
                is_key = places[0, column][0] < keys
                for row in cutlass.range_constexpr(cute.size(scores.shape[0])):
                    score = scores[row, column]
                    scores[row, column] = score if is_key else -Float32.inf

    def _pair(self, rows: cute.Tensor, row: int, buffer: Int32) -> cute.Tensor:
        """Of two queries of a thread that are side by side, what there is one of for each."""
        pairs = cute.logical_divide(rows[None, buffer], cute.make_layout(2))
        return copy_utils.load_s2r(pairs[None, row // 2])

    def _meet(self, barrier: NamedBarrierBwd) -> None:
        """All that compute."""
        cute.arch.barrier(barrier_id=int(barrier), number_of_threads=_COMPUTING)
