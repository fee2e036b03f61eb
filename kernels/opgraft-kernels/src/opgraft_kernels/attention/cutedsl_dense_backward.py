"""FlashAttention-4's backward for Hopper with a bias of which each head has its own.

As in `cutedsl_dense` the copy engine loads a tile's bias, and there are no lists. It takes no
memory of its own: the bias comes to where the gradients of the tile's scores will be, which have
its size, its dtype and its layout, and each warp reads there what it will write. It comes with the
tile's queries, and counts for their barrier, which is given back when the last product has read the
gradients: so those need as many stages as queries.

Importing this imports CuteDSL and the library.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.utils import LayoutEnum
from flash_attn.cute.flash_bwd_preprocess import FlashAttentionBackwardPreprocess
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.mask import AttentionMask
from quack import copy_utils, layout_utils, sm90_utils

from opgraft_kernels.attention.cutedsl_biased import BiasedBackward, as_float32
from opgraft_kernels.attention.cutedsl_dense import BiasTiles, WithoutLists, bias_tiles
from opgraft_kernels.attention.cutedsl_renamed import renamed

__all__ = ["DenseBackward", "NaturalPreprocess"]


# In which log2(e) is 1.
_NATURAL = {"math": SimpleNamespace(e=math.e, log2=lambda _: 1.0)}


class NaturalPreprocess(FlashAttentionBackwardPreprocess):  # type: ignore[misc]
    """The library's, of a natural logsumexp: padded with infinity, and 0 for -inf."""

    kernel = renamed(FlashAttentionBackwardPreprocess.kernel, _NATURAL, cute.kernel)


@dataclasses.dataclass(frozen=True)
class DenseBackwardMask(AttentionMask):  # type: ignore[misc]
    """The library's mask, which adds the bias that is where the gradients will be."""

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
        stage: Any = None,
    ) -> None:
        """Scores become ``scale * score + bias``; those of no key -inf."""
        bias = cute.make_rmem_tensor(acc_S.shape, self.biases.element_type)
        cute.copy(self.copy, self.biases[None, None, None, stage], self.copy.retile(bias))
        # Before a warp writes gradients there.
        cute.arch.sync_warp()
        acc_S.store(acc_S.load() * aux_data.scalars[0] + as_float32(bias).load())
        AttentionMask.apply_mask(
            self, acc_S, batch_idx, head_idx, m_block, n_block, thr_mma, mask_seqlen, mask_causal,
            mask_local,
        )  # fmt: skip


class DenseBackward(WithoutLists, BiasedBackward):
    """A backward in which every tile has a bias. The logsumexp is natural."""

    sPdS_layout: Any

    def _gradients_layout(self) -> Any:
        """Of the scores' gradients in shared memory, as the library has it."""
        columns = self.tile_n // (self.num_wg_mma // self.AtomLayoutMSdP)
        columns = math.gcd(columns, self.tile_n // self.AtomLayoutNdKV)
        return sm90_utils.make_smem_layout(
            self.dtype,
            LayoutEnum.ROW_MAJOR,
            (self.tile_m, self.tile_n),
            self.PdS_stage,
            major_mode_size=columns,
        )

    def tiles_of(self, bias: cute.Tensor) -> BiasTiles:
        """Of a bias ``(batch, heads, queries, keys)``, in what calls the kernel."""
        assert self.Q_stage == self.dO_stage == self.PdS_stage
        layout = cute.select(self._gradients_layout(), mode=[0, 1])
        return bias_tiles(bias, layout, (self.tile_m, self.tile_n))

    def _get_shared_storage_cls(self) -> Any:
        storage = super()._get_shared_storage_cls()
        # The gradients of scores are behind that of the output: see `load`.
        begin = storage._offsets["sdO"] + cute.cosize(self.sdO_layout) * self.dtype.width // 8
        assert storage._offsets["sdS"] == begin
        assert str(self._gradients_layout()) == str(self.sPdS_layout)
        return storage

    @cute.jit
    def load(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdPsum: cute.Tensor,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
        sdO: cute.Tensor,
        sLSE: cute.Tensor,
        sdPsum: cute.Tensor,
        tma_atom_Q: cute.CopyAtom,
        tma_atom_K: cute.CopyAtom,
        tma_atom_V: cute.CopyAtom,
        tma_atom_dO: cute.CopyAtom,
        pipeline_Q: Any,
        pipeline_dO: Any,
        block_info: Any,
        SeqlenInfoCls: Callable[..., Any],
        TileSchedulerCls: Callable[..., Any],
        tiles: BiasTiles,
        qhead_per_kvhead_divmod: Any = None,
    ) -> None:
        """As the library has it, and with a tile's queries its bias."""
        cpasync.prefetch_descriptor(tiles.atom)
        layout = self._gradients_layout()
        begin = sdO.iterator + cute.cosize(sdO.layout)
        begin = cute.recast_ptr(begin, layout.inner, dtype=self.dtype)
        biases = cute.make_tensor(begin, layout.outer)
        of_bias = self.tile_m * self.tile_n * self.dtype.width // 8
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.Q_stage)
        scheduler = TileSchedulerCls()
        work = scheduler.initial_work_tile_info()
        while work.is_valid_tile:
            n_block, head, batch, _ = work.tile_idx
            seqlen = SeqlenInfoCls(batch)
            head_k = head
            if cutlass.const_expr(self.qhead_per_kvhead > 1):
                head_k = head // qhead_per_kvhead_divmod
            k_rows, v_rows = (
                seqlen.offset_batch_K(t, batch, dim=3)[None, None, head_k] for t in (mK, mV)
            )
            q_rows, dO_rows = (
                seqlen.offset_batch_Q(t, batch, dim=3)[None, None, head] for t in (mQ, mdO)
            )
            lse, dPsum = (
                seqlen.offset_batch_Q(t, batch, dim=2, padded=True)[None, head]
                for t in (mLSE, mdPsum)
            )
            bias_rows = tiles.tensor[None, None, head, batch]
            gK = cute.local_tile(k_rows, (self.tile_n, self.tile_hdim), (n_block, 0))
            gV = cute.local_tile(v_rows, (self.tile_n, self.tile_hdimv), (n_block, 0))
            gQ = cute.local_tile(q_rows, (self.tile_m, self.tile_hdim), (None, 0))
            gdO = cute.local_tile(dO_rows, (self.tile_m, self.tile_hdimv), (None, 0))
            gBias = cute.local_tile(bias_rows, (self.tile_m, self.tile_n), (None, n_block))
            gLSE, gdPsum = (cute.local_tile(t, (self.tile_m,), (None,)) for t in (lse, dPsum))
            one = cute.make_layout(1)
            load_K, _, _ = copy_utils.tma_get_copy_fn(tma_atom_K, 0, one, gK, sK, single_stage=True)
            load_V, _, _ = copy_utils.tma_get_copy_fn(tma_atom_V, 0, one, gV, sV, single_stage=True)
            of_queries = [
                copy_utils.tma_get_copy_fn(tma_atom_Q, 0, one, gQ, sQ)[0],
                copy_utils.tma_get_copy_fn(tiles.atom, 0, one, gBias, biases)[0],
                copy_utils.cpasync_bulk_get_copy_fn(gLSE, sLSE),
            ]
            of_outputs = [
                copy_utils.tma_get_copy_fn(tma_atom_dO, 0, one, gdO, sdO)[0],
                copy_utils.cpasync_bulk_get_copy_fn(gdPsum, sdPsum),
            ]
            of_queries = [copy_utils.tma_producer_copy_fn(each, pipeline_Q) for each in of_queries]
            of_outputs = [copy_utils.tma_producer_copy_fn(each, pipeline_dO) for each in of_outputs]

            begin_block, end_block = block_info.get_m_block_min_max(seqlen, n_block)
            pipeline_Q.producer_acquire(state, extra_tx_count=of_bias + self.tma_copy_bytes["K"])
            load_K(tma_bar_ptr=pipeline_Q.producer_get_barrier(state))
            of_queries[0](begin_block, producer_state=state)
            of_queries[1](begin_block, producer_state=state)
            # What the kernel before this one wrote is read from here on.
            cute.arch.griddepcontrol_wait()
            of_queries[2](begin_block, producer_state=state)
            pipeline_dO.producer_acquire(state, extra_tx_count=self.tma_copy_bytes["V"])
            load_V(tma_bar_ptr=pipeline_dO.producer_get_barrier(state))
            of_outputs[0](begin_block, producer_state=state)
            of_outputs[1](begin_block, producer_state=state)
            state.advance()
            for m_block in cutlass.range(begin_block + 1, end_block, unroll=1):
                pipeline_Q.producer_acquire(state, extra_tx_count=of_bias)
                of_queries[0](m_block, producer_state=state)
                of_queries[1](m_block, producer_state=state)
                of_queries[2](m_block, producer_state=state)
                pipeline_dO.producer_acquire(state)
                of_outputs[0](m_block, producer_state=state)
                of_outputs[1](m_block, producer_state=state)
                state.advance()
            scheduler.prefetch_next_work()
            scheduler.advance_to_next_work()
            work = scheduler.get_current_work()

    def mma(self, *args: Any, **more: Any) -> None:
        tiled_mma, sdS, tidx, known = (args[i] for i in (0, 14, 20, 28))
        assert known.func is AttentionMask
        # As the library writes gradients there.
        is_swapped = self.SdP_swapAB
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(is_swapped, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(tidx)
        biases = copy.partition_S(layout_utils.transpose_view(sdS) if is_swapped else sdS)
        known = partial(DenseBackwardMask, *known.args, **known.keywords, copy=copy, biases=biases)
        FlashAttentionBackwardSm90.mma(self, *args[:28], known, *args[29:], **more)

    def mma_one_m_block(
        self, m_block: Int32, state: Any, state_dO: Any, mask_fn: partial[None], **more: Any
    ) -> Any:
        mask_fn = partial(mask_fn, stage=state.index)
        return super().mma_one_m_block(m_block, state, state_dO, mask_fn=mask_fn, **more)
