"""A backward for Hopper of short sequences, in which a program has all of a head.

FlashAttention-4's backward has a program for each block of keys. They add their parts of dq to
numbers in float32 in global memory. A kernel before zeroes these, and computes delta, what a row's
gradients are less by, and a kernel after makes 16 bits of them. Of short sequences these two, and
the numbers in float32, take much of the time.

Where a head has two blocks of keys at most, a program can compute both, and keep the parts of dq of
the first in shared memory. So dq is written once, in 16 bits, and is always the same. A program
walks over heads. All of a head's queries, keys and values are in shared memory at a time, each
loaded once. As soon as a block of them is not needed, its gradient is put where it was, from where
one warp writes it to global memory. Then another warp loads the same block of the next head, and
two more compute its delta: for none of that do the warps wait that compute products.

The products are the library's, and so are the layouts of what they read. Importing this imports
CuteDSL and the library.
"""

from __future__ import annotations

import dataclasses
import math
import operator
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
from opgraft_kernels.integers import ceil_div, round_up

__all__ = ["ShortBackward"]

# Two warp groups compute, each 64 keys of a block. Another one's warps load and store.
_WARP_GROUP, _GROUPS = 128, 2
_COMPUTING = _GROUPS * _WARP_GROUP
_THREADS = _COMPUTING + _WARP_GROUP
_WARPS_COMPUTING = _COMPUTING // 32
# Registers of a thread that loads and stores, and of one that computes, of 504 that the three warp
# groups have; and the same where those that compute need the most.
_REGISTERS, _REGISTERS_OF_LARGE = (56, 224), (40, 232)
# Warps that compute delta, the third and the fourth of those that do not compute products.
_FIRST_OF_ROWS, _WARPS_OF_ROWS = 2, 2
# How many vectors of an output the former have room for; one less where columns are few.
_MOST_ROWS, _MOST_ROWS_OF_LARGE = 5, 3
# How many floats a thread copies at a time, and how many numbers of 16 bits.
_VECTOR, _SHORT_VECTOR = 4, 8
# How many blocks of keys and values shared memory holds.
_KEY_BUFFERS = 2
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
        head_dim: of queries, keys and values, up to 128.
        tile: its sizes.
    """

    def __init__(self, dtype: Any, head_dim: int, tile: ShortTile) -> None:
        # Products are of 64 columns or 128. The copy engine fills them with 0.
        columns = round_up(head_dim, 64)
        super().__init__(
            dtype,
            columns,
            tile_m=tile.queries,
            tile_n=SHORT_KEYS,
            Q_stage=2,
            dO_stage=2,
            PdS_stage=1,
            SdP_swapAB=True,
            dQ_swapAB=True,
            # Of 64 columns warp groups have other queries each, of 128 other columns.
            AtomLayoutMdQ=_GROUPS if columns == 64 else 1,
            num_threads=_THREADS,
        )
        assert self.mma_dkv_is_rs
        self.num_threads_per_warp_group = _WARP_GROUP
        self.is_narrow = columns != head_dim
        self.key_blocks = tile.key_blocks
        needs_most = tile.queries == 128 and tile.key_blocks > 1
        self.registers = _REGISTERS_OF_LARGE if needs_most else _REGISTERS
        #: Of an output, how many vectors a thread loads at a time at most.
        self.most_rows = (_MOST_ROWS_OF_LARGE if needs_most else _MOST_ROWS) - self.is_narrow
        #: Of dq of a tile, a thread's numbers.
        self.part = self.tile_m * self.tile_hdim // _COMPUTING
        #: What a copy brings, by what it copies.
        size = dtype.width // 8
        self.bytes_of_keys = 2 * self.tile_n * self.tile_hdim * size
        self.bytes_of_queries = self.tile_m * self.tile_hdim * size

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        grad_out: cute.Tensor,
        logsumexp: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: Float32,
        programs: Int32,
        stream: cuda.CUstream = None,
    ) -> None:
        """Tensors are ``[batch, length, heads, dim]``, and each head has its own keys.

        `logsumexp` is natural, ``[batch, heads, length]``.
        """
        q, k, v, out, grad_out, dq, dk, dv = (
            layout_utils.select(t, [1, 3, 2, 0]) for t in (q, k, v, out, grad_out, dq, dk, dv)
        )
        logsumexp = layout_utils.select(logsumexp, [2, 1, 0])
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
            cpasync.make_tiled_tma_atom(load, out, *of_queries),
            cpasync.make_tiled_tma_atom(store, dq, *of_queries),
            cpasync.make_tiled_tma_atom(store, dk, *of_keys),
            cpasync.make_tiled_tma_atom(store, dv, *of_values),
        )
        heads = cute.size(q.shape[2])
        all_heads = heads * cute.size(q.shape[3])
        self.kernel(
            *(atom for atom, _ in copies), *(tensor for _, tensor in copies), out, logsumexp,
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
                _KEY_BUFFERS,
                major_mode_size=columns,
            )
            for columns in (self.tile_hdim * self.AtomLayoutMdQ // _GROUPS, self.tile_hdim)
        )
        return SimpleNamespace(
            queries=self.sQ_layout, keys=keys, values=values, dS=self.sPdS_layout
        )

    def _storage(self, layouts: Any) -> Any:
        """The class of what is in shared memory."""

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
        barriers = cute.struct.MemRange[cutlass.Int64, 6 * 2 + 3 * _KEY_BUFFERS]
        members = {"barriers": barriers, "logsumexp": rows, "delta": rows, "Q": queries}
        members |= {"dO": queries, "K": keys, "V": values, "dS": dS, "dQ": parts}
        return cute.struct(type("Storage", (), {"__annotations__": members}))

    @property
    def _rows(self) -> int:
        """Between the beginnings of the logsumexps of two tiles."""
        return round_up(self.tile_m, 32)

    @cute.kernel
    def kernel(
        self,
        load_Q: cute.CopyAtom,
        load_K: cute.CopyAtom,
        load_V: cute.CopyAtom,
        load_dO: cute.CopyAtom,
        prefetch_O: cute.CopyAtom,
        store_dQ: cute.CopyAtom,
        store_dK: cute.CopyAtom,
        store_dV: cute.CopyAtom,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        grad_out: cute.Tensor,
        prefetched: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        out: cute.Tensor,
        logsumexp: cute.Tensor,
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
        begin, many = storage.barriers.data_ptr(), _KEY_BUFFERS
        # What the copy engine has loaded; where rows' logsumexp and delta are; where gradients were
        # put in the place of queries, or of keys and values; and what is free to be loaded again.
        at = SimpleNamespace(
            loaded_Q=_Buffers(begin, 2),
            loaded_dO=_Buffers(begin + 2, 2),
            put_dQ=_Buffers(begin + 4, 2),
            free_Q=_Buffers(begin + 6, 2),
            free_dO=_Buffers(begin + 8, 2),
            put_rows=_Buffers(begin + 10, 2),
            loaded_KV=_Buffers(begin + 12, many),
            put_dKV=_Buffers(begin + 12 + many, many),
            free_KV=_Buffers(begin + 12 + 2 * many, many),
        )
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (load_Q, load_K, load_V, load_dO, prefetch_O, store_dQ, store_dK, store_dV):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                # By one warp, which loads or stores.
                for buffers in (at.loaded_Q, at.loaded_dO, at.free_Q, at.loaded_KV, at.free_KV):
                    buffers.init(1)
                for buffers in (at.put_dQ, at.free_dO, at.put_dKV):
                    buffers.init(_WARPS_COMPUTING)
                at.put_rows.init(_WARPS_OF_ROWS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # A program's heads: so many, of all batches in a row, from the first one on.
        program, programs = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        turns = (all_heads - program + programs - 1) // programs
        walk = SimpleNamespace(first=program, step=programs, turns=turns, heads=heads)
        to_move, to_compute = self.registers
        if warp < 4:
            cute.arch.setmaxregister_decrease(to_move)
            # What kernels before this one wrote is read from here on.
            cute.arch.griddepcontrol_wait()
            if warp == 0:
                self.load(
                    (load_Q, load_K, load_V, load_dO, prefetch_O), (q, k, v, grad_out, prefetched),
                    shared, at, walk,
                )  # fmt: skip
            if warp == 1:
                self.store((store_dQ, store_dK, store_dV), (dq, dk, dv), shared, at, walk)
            if warp >= _FIRST_OF_ROWS:
                self.put_rows(out, logsumexp, shared, at, walk)
        else:
            cute.arch.setmaxregister_increase(to_compute)
            tidx = cute.arch.thread_idx()[0] - _WARP_GROUP
            self.mma(tidx, cute.size(q.shape[0]), cute.size(k.shape[0]), scale, shared, at, walk)

    def _rows_layout(self) -> Any:
        return cute.make_layout((self.tile_m, 2), stride=(1, self._rows))

    def _tile_of(self, block: Any, rows: int) -> Any:
        return (rows, self.tile_hdim), (block, 0)

    @cute.jit
    def load(self, atoms: Any, tensors: Any, shared: Any, at: Any, walk: Any) -> None:
        """What one warp does: it loads each head's keys and values and its queries."""
        load_Q, load_K, load_V, load_dO, prefetch_O = atoms
        q, k, v, grad_out, out = tensors
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
            copy_Q, _, _ = copy_utils.tma_get_copy_fn(load_Q, 0, one, gQ, shared.Q)
            copy_dO, _, _ = copy_utils.tma_get_copy_fn(load_dO, 0, one, gdO, shared.dO)
            copy_K, _, _ = copy_utils.tma_get_copy_fn(load_K, 0, one, gK, shared.K)
            copy_V, _, _ = copy_utils.tma_get_copy_fn(load_V, 0, one, gV, shared.V)
            # Of the head that is computed then, of which others are to read the output.
            batch, head = divmod(walk.first + (turn + 1) * walk.step, walk.heads)
            gO = cute.local_tile(out[None, None, head, batch], *self._tile_of(None, self.tile_m))
            _, _, gO = copy_utils.tma_get_copy_fn(prefetch_O, 0, one, gO, shared.dO)
            is_another = turn + 1 < walk.turns
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
                        if is_another:
                            cute.prefetch(prefetch_O, gO[None, tile])

    @cute.jit
    def put_rows(
        self, out: cute.Tensor, logsumexp: cute.Tensor, shared: Any, at: Any, walk: Any
    ) -> None:
        """What two more warps do: of each row of a tile they put its logsumexp, in powers of two,
        and its delta, the sum of ``out * dO``; where there is no query infinity and 0."""
        threads = _WARPS_OF_ROWS * 32
        thread = cute.arch.thread_idx()[0] - _FIRST_OF_ROWS * 32
        of_row = self.tile_hdim // _SHORT_VECTOR
        copy = copy_utils.tiled_copy_2d(self.dtype, of_row, threads, _SHORT_VECTOR)
        copy = copy.get_slice(thread)
        dO = copy.partition_S(shared.dO)
        places = copy.partition_S(cute.make_identity_tensor((self.tile_m, self.tile_hdim)))
        # A thread's rows of a tile in so many rounds, and so many of them in each, or a few more.
        many = self.tile_m * of_row // threads
        rounds = ceil_div(many, self.most_rows)
        some = ceil_div(many, rounds)
        queries, dim = cute.size(out.shape[0]), cute.size(out.shape[1])
        tiles = cute.ceil_div(queries, self.tile_m)
        for turn in cutlass.range(walk.turns, unroll=1):
            batch, head = divmod(walk.first + turn * walk.step, walk.heads)
            rows = cute.local_tile(out[None, None, head, batch], *self._tile_of(None, self.tile_m))
            rows = copy.partition_S(rows)
            lse = cute.local_tile(logsumexp[None, head, batch], (self.tile_m,), (None,))
            for tile in cutlass.range(tiles, unroll=1):
                use = turn * tiles + tile
                buffer = at.put_rows.buffer(use)
                left = queries - tile * self.tile_m
                put_to, delta = shared.logsumexp[None, buffer], shared.delta[None, buffer]
                # No warp reads those of the tile that was here before any more.
                at.free_Q.wait_for_the_last(use)
                numbers = self.load_logsumexp(thread, lse[None, tile], left)
                for turn_of_tile in cutlass.range(rounds, unroll=1):
                    self.put_delta(
                        rows[None, None, 0, tile], dO[None, None, 0, buffer],
                        places[None, None, 0], turn_of_tile * some, some, left, dim, delta, at, use,
                    )  # fmt: skip
                self.put_logsumexp(thread, numbers, put_to)
                at.put_rows.arrive(use)

    @cute.jit
    def put_delta(
        self,
        rows: cute.Tensor,
        dO: cute.Tensor,
        places: cute.Tensor,
        begin: Int32,
        some: cutlass.Constexpr[int],
        left: Int32,
        dim: Int32,
        put_to: cute.Tensor,
        at: Any,
        use: Int32,
    ) -> None:
        """Of some of a thread's rows, of which others have the other columns."""
        found = cute.make_rmem_tensor(((_SHORT_VECTOR, 1), some), self.dtype)
        if cutlass.const_expr(self.is_narrow):
            found.fill(0.0)
        for i in cutlass.range_constexpr(some):
            row, column = places[0, begin + i]
            is_there = row < left
            if cutlass.const_expr(self.is_narrow):
                is_there = is_there and column < dim
            if is_there:
                cute.autovec_copy(rows[None, begin + i], found[None, i])
        # Here all of these loads have begun: without it the compiler would use one by one.
        at.loaded_dO.wait(use)
        totals = cute.make_rmem_tensor(some, Float32)
        for i in cutlass.range_constexpr(some):
            other = copy_utils.load_s2r(dO[None, begin + i])
            product = found[None, i].load().to(Float32) * other.load().to(Float32)
            totals[i] = product.reduce(cute.ReductionOp.ADD, 0.0, reduction_profile=0)
        width = self.tile_hdim // _SHORT_VECTOR
        totals.store(utils.warp_reduce(totals.load(), operator.add, width=width))
        for i in cutlass.range_constexpr(some):
            row, column = places[0, begin + i]
            if column == 0 and row < self.tile_m:
                put_to[row] = totals[i] if row < left else Float32(0.0)

    @cute.jit
    def load_logsumexp(self, thread: Int32, given: cute.Tensor, left: Int32) -> cute.Tensor:
        """Of a thread's rows; infinity where there is no query."""
        threads = _WARPS_OF_ROWS * 32
        numbers = cute.make_rmem_tensor(ceil_div(self.tile_m, threads), Float32)
        numbers.fill(Float32.inf)
        for i in cutlass.range_constexpr(cute.size(numbers)):
            row = thread + i * threads
            if row < left:
                numbers[i] = given[row]
        return numbers

    @cute.jit
    def put_logsumexp(self, thread: Int32, numbers: cute.Tensor, put_to: cute.Tensor) -> None:
        """In powers of two; 0 of a query without keys."""
        threads = _WARPS_OF_ROWS * 32
        for i in cutlass.range_constexpr(cute.size(numbers)):
            row = thread + i * threads
            if row < self.tile_m:
                number = numbers[i]
                put_to[row] = Float32(0.0) if number == -Float32.inf else number * _LOG2_E

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
        at.put_rows.wait(use)
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
        # To begin it before dS is computed leaves that fewer registers, and is slower.
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
