"""FlashAttention-4's forward for Hopper with a bias of which each head has its own.

Every tile has one, and each is read once: so there are no lists of tiles, and the copy engine loads
a tile's bias into shared memory as it does the tile's keys. The threads read it from there in the
layout of their scores.

A bias has as many stages as keys have, and at any time the same stage and phase: it is loaded after
the keys of its tile, and given back before the next one's are waited for. Its barriers are behind
those of the keys, as further stages of their pipeline, and its memory is behind theirs.

Importing this imports CuteDSL and the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.utils import LayoutEnum
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.mask import AttentionMask
from quack import copy_utils, layout_utils, sm90_utils

from opgraft_kernels.attention.cutedsl_biased import (
    BiasedForward,
    BiasedSoftmax,
    as_float32,
)
from opgraft_kernels.attention.cutedsl_renamed import renamed
from opgraft_kernels.attention.cutedsl_walking import LastKeysMask, walking_forward

__all__ = ["BiasTiles", "WithoutLists", "bias_tiles", "dense_forward"]


class BiasTiles(BlockSparseTensors):  # type: ignore[misc]
    """What the copy engine loads a tile's bias by.

    The library hands it on in the place of its lists of tiles, two of whose fields it has.
    """

    @property
    def atom(self) -> cute.CopyAtom:
        return self.mask_block_cnt

    @property
    def tensor(self) -> cute.Tensor:
        """``(queries, keys, heads, batch)``, of places."""
        return self.mask_block_idx

    def __new_from_mlir_values__(self, values: list[Any]) -> BiasTiles:
        atom, tensor = values
        return BiasTiles(cutlass.new_from_mlir_values(self.atom, [atom]), tensor)


def _stage_of(stages: int, state: Any) -> pipeline.PipelineState:
    """The bias's place in the pipeline of the keys, of which `state` is."""
    return pipeline.PipelineState(0, Int32(0), state.index + stages, state.phase)


@dataclasses.dataclass(frozen=True)
class DenseMask(LastKeysMask):  # type: ignore[misc]
    """The library's mask, which adds the bias that is in shared memory."""

    pipeline_k: Any = None
    #: How a warp reads a bias, and its part of all stages.
    copy: Any = None
    biases: Any = None

    @cute.jit
    def apply_mask(
        self,
        acc_S: cute.Tensor,
        batch_idx: Int32,
        head_idx: Int32,
        m_block: Int32,
        n_block: Int32,
        thr_mma: cute.TiledMma,
        mask_seqlen: cutlass.Constexpr[bool],
        mask_causal: cutlass.Constexpr[bool],
        mask_local: cutlass.Constexpr[bool] = False,
        mask_mod: cutlass.Constexpr[Any] = None,
        aux_data: Any = None,
        fastdiv_mods: Any = (None, None),
        state: Any = None,
    ) -> None:
        """Scores become ``scale * score + bias``; those of no key -inf. `state` is of the keys."""
        place = _stage_of(cute.size(self.biases.shape[3]), state)
        self.pipeline_k.consumer_wait(place, self.pipeline_k.consumer_try_wait(place))
        bias = cute.make_rmem_tensor(acc_S.shape, self.biases.element_type)
        cute.copy(self.copy, self.biases[None, None, None, state.index], self.copy.retile(bias))
        acc_S.store(acc_S.load() * aux_data.scalars[0] + as_float32(bias).load())
        # One thread gives it back for its warp.
        cute.arch.sync_warp()
        self.pipeline_k.consumer_release(place)
        if cutlass.const_expr(mask_seqlen):
            self.mask_no_keys(acc_S, n_block, thr_mma)


class WithoutLists:
    """A kernel that the library hands `BiasTiles` in the place of lists of tiles."""

    @property
    def use_block_sparsity(self) -> bool:
        """The library sets it where it is given lists, in the place of which the bias comes."""
        return False

    @use_block_sparsity.setter
    def use_block_sparsity(self, _: bool) -> None:
        pass


def bias_tiles(bias: cute.Tensor, layout: Any, tile: tuple[int, int]) -> BiasTiles:
    """Of a bias ``(batch, heads, queries, keys)``, in what calls the kernel.

    Args:
        bias: the address, and all strides but the last, of multiples of 16 bytes.
        layout: of one tile in shared memory.
        tile: its queries and keys.
    """
    bias = layout_utils.select(assume_tensor_aligned(bias), [2, 3, 1, 0])
    return BiasTiles(
        *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), bias, layout, tile, 1)
    )


class DenseForward(WithoutLists, BiasedForward):
    """A forward in which every tile has a bias."""

    #: There are no lists that a kernel before it would write.
    is_early = False
    sK_layout: Any
    num_stages: int
    #: Of how many blocks keys, and biases, are in shared memory at a time.
    stages: int

    def bias_layout(self, stages: int | None) -> Any:
        shape = (self.tile_m, self.tile_n)
        return sm90_utils.make_smem_layout(self.dtype, LayoutEnum.ROW_MAJOR, shape, stages)

    def tiles_of(self, bias: cute.Tensor) -> BiasTiles:
        """Of a bias ``(batch, heads, queries, keys)``, in what calls the kernel."""
        return bias_tiles(bias, self.bias_layout(None), (self.tile_m, self.tile_n))

    def _get_shared_storage_cls(self) -> Any:
        layout = self.sK_layout
        self.stages = self.num_stages
        #: Elements of all stages' keys; behind them are the biases.
        self.keys = cute.cosize(layout)
        assert self.keys * self.dtype.width // 8 % self.buffer_align_bytes == 0
        self.sK_layout = cute.make_layout(self.keys + cute.cosize(self.bias_layout(self.stages)))
        # The kernel makes pipelines of so many stages. The values' have more than they use.
        self.num_stages *= 2
        storage = super()._get_shared_storage_cls()
        self.sK_layout = layout
        return storage

    def _biases(self, sK: cute.Tensor) -> cute.Tensor:
        """Where the biases are in shared memory."""
        layout = self.bias_layout(self.stages)
        begin = cute.recast_ptr(sK.iterator + self.keys, layout.inner, dtype=self.dtype)
        return cute.make_tensor(begin, layout.outer)

    @cute.jit
    def load(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
        tma_atom_Q: cute.CopyAtom,
        tma_atom_K: cute.CopyAtom,
        tma_atom_V: cute.CopyAtom,
        pipeline_k: Any,
        pipeline_v: Any,
        pipeline_q: Any,
        _gmem_tiled_copy_Q: Any,
        _mPageTable: Any,
        tiles: BiasTiles,
        block_info: Any,
        SeqlenInfoCls: Callable[..., Any],
        TileSchedulerCls: Callable[..., Any],
    ) -> None:
        """As the library has it, and after a tile's keys its bias: then what is waited for is given
        back in that order, too. First of a row of tiles its keys and bias are loaded, and then
        queries, for which there is room when the row before has had its last product of keys.

        Nothing is waited for at the end: the threads that compute wait for all that is loaded.
        """
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            cpasync.prefetch_descriptor(tiles.atom)
            biases = self._biases(sK)
            q_phase = Int32(1)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
            scheduler = TileSchedulerCls()
            work = scheduler.initial_work_tile_info()
            while work.is_valid_tile:
                m_block, head, batch, _ = work.tile_idx
                seqlen = SeqlenInfoCls(batch)
                bias_rows = tiles.tensor[None, None, head, batch]
                gBias = cute.local_tile(bias_rows, (self.tile_m, self.tile_n), (m_block, None))
                load_Q, load_K, load_V = self.copies(
                    *(m_block, head, batch, seqlen, (mQ, mK, mV), (sQ, sK, sV)),
                    *((tma_atom_Q, tma_atom_K, tma_atom_V), (pipeline_k, pipeline_v)),
                )
                load_bias, _, _ = copy_utils.tma_get_copy_fn(
                    tiles.atom, 0, cute.make_layout(1), gBias, biases
                )

                _, blocks = block_info.get_n_block_min_max(seqlen, m_block)
                n_block = blocks - 1
                self._load_keys(n_block, state, load_K, load_bias, pipeline_k)
                pipeline_q.producer_acquire_w_index_phase(0, q_phase)
                load_Q(tma_bar_ptr=pipeline_q.sync_object_full.get_barrier(0))
                q_phase ^= 1
                for i in cutlass.range(blocks - 1, unroll=1):
                    block_before = blocks - 1 - i
                    n_block = block_before - 1
                    state_before = state.clone()
                    state.advance()
                    self._load_keys(n_block, state, load_K, load_bias, pipeline_k)
                    pipeline_v.producer_acquire(state_before)
                    load_V(src_idx=block_before, producer_state=state_before)
                pipeline_v.producer_acquire(state)
                load_V(src_idx=0, producer_state=state)
                state.advance()
                scheduler.prefetch_next_work()
                scheduler.advance_to_next_work()
                work = scheduler.get_current_work()

    def _load_keys(
        self,
        n_block: Int32,
        state: Any,
        load_K: Callable[..., None],
        load_bias: Callable[..., None],
        pipeline_k: Any,
    ) -> None:
        """A block of keys, and then its bias."""
        pipeline_k.producer_acquire(state)
        load_K(src_idx=n_block, producer_state=state)
        place = _stage_of(self.stages, state)
        # A barrier's arrival says how many bytes come, by default as many as keys have.
        of_bias = cute.size_in_bytes(self.dtype, self.bias_layout(None))
        pipeline_k.producer_acquire(place, extra_tx_count=of_bias - self.tma_copy_bytes["K"])
        load_bias(
            src_idx=n_block,
            dst_idx=state.index,
            tma_bar_ptr=pipeline_k.producer_get_barrier(place),
        )

    def first_half_block_overlap(self, **keywords: Any) -> Any:
        state = keywords["kv_consumer_state"]
        return FlashAttentionForwardSm90.first_half_block_overlap(
            self, **self._with_state(state, **keywords)
        )

    def mma_one_n_block_intrawg_overlap(self, state_before: Any, **keywords: Any) -> Any:
        """The library is given the state of the values, and its keys are the next ones."""
        state = state_before.clone()
        state.advance()
        return FlashAttentionForwardSm90.mma_one_n_block_intrawg_overlap(
            self, state_before, **self._with_state(state, **keywords)
        )

    def _with_state(
        self, state: Any, softmax: BiasedSoftmax, mask_fn: partial[None], **others: Any
    ) -> dict[str, Any]:
        """What a step is given whose keys have `state`."""
        softmax = dataclasses.replace(softmax, is_biased=True)
        return {"softmax": softmax, "mask_fn": partial(mask_fn, state=state), **others}

    def mask_class(self, known: partial[Any], tiled_mma: Any, sK: Any, keys: Any, tidx: Any) -> Any:
        """`DenseMask` in the place of the library's mask."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(num_matrices=4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(tidx)
        biases = copy.partition_S(self._biases(sK))
        return partial(
            DenseMask,
            *known.args,
            **known.keywords,
            pipeline_k=keys,
            copy=copy,
            biases=biases,
        )


@cache
def dense_forward(programs: int) -> type[DenseForward]:
    """The class of a forward with a bias of each head's own.

    Args:
        programs: as many walk over tiles; 0: there is a program for each tile.
    """
    base = walking_forward(programs) if programs else FlashAttentionForwardSm90
    library_mma = renamed(FlashAttentionForwardSm90.mma, {"Softmax": BiasedSoftmax})

    def mma(self: Any, *args: Any) -> None:
        # As the library's own: see `_get_shared_storage_cls`.
        self.num_stages = self.stages
        tiled_mma, sK, keys, tidx, known = (args[i] for i in (0, 5, 10, 15, 20))
        assert known.func is AttentionMask
        known = self.mask_class(known, tiled_mma, sK, keys, tidx)
        library_mma(self, *args[:20], known, *args[21:])

    return type("DenseForward", (DenseForward, base), {"mma": mma})
