"""FlashAttention-4's kernels for Hopper with an additive mask, a bias, of the scores.

The library's kernels take lists of tiles: those that are computed as they are, and those whose
scores are changed first. Here the first are those where the bias is 0, the others those with a
bias, and those that it leaves out are in neither.

The library's own way to change scores calls a function for each element, which divides and loads by
element. Here a tile's mask adds the bias, which it loads before the tile's product where there are
registers for it, and the softmax has two forms. Scores of a tile without a bias are scaled as they
are exponentiated, as in the library. Those with a bias are scaled before. Times log2(e) the
lowest float, which stands for -inf in some models' masks, would be -inf, and rows of nothing else
would attend to nothing: so beside so large a maximum scores are taken to powers of two as they are.

Boolean masks are taken, too, as bits. A thread of a forward has all of a tile's row in a few words.
One of a backward may have few keys of many rows: it collects a word of each key, a bit for a row.
In a forward what is False gets a number added before it is scaled, so that all tiles are
exponentiated alike.

Importing this imports CuteDSL and the library.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Uint32, pipeline
from cutlass._mlir.dialects import math as mlir_math
from cutlass.cutlass_dsl import dsl_user_op
from flash_attn.cute import utils
from flash_attn.cute.block_sparse_utils import get_curr_blocksparse_tensors
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.mask import AttentionMask
from flash_attn.cute.softmax import Softmax
from quack import copy_utils, layout_utils

from opgraft_kernels.attention.cutedsl_kernels import BiasKind
from opgraft_kernels.attention.cutedsl_renamed import renamed
from opgraft_kernels.attention.cutedsl_walking import LongestFirst, walking_forward

__all__ = ["BiasedBackward", "as_float32", "biased_forward"]

_LOG2_E, _LN_2 = math.log2(math.e), math.log(2.0)
# Scores beyond it differ by 16 at least, in float32. Below it log2(e) times one is rounded by 8 at
# most, so that the power of two of the maximum is a number of 16 bits.
_FAR = 2.0**27
# From so many warp groups on a thread has no registers for a bias beside a product.
_MANY_WARP_GROUPS = 3
# Of a word of a boolean mask; and of how many rows words are loaded before they are used.
_BITS, _ROWS_AT_ONCE = 32, 4


def _has_bias(*_: Any) -> bool:
    """Stands where the library expects a function of its own: tiles of one list have a bias."""
    raise AssertionError("BiasMask adds the bias")


@cute.jit
def as_float32(values: cute.Tensor) -> cute.Tensor:
    """Registers of 16 bits, of which each two are neighbours, in float32.

    The compiler takes the second of two bfloat16 in two operations: it moves the bits down and up
    again. Here both take one.
    """
    wide = cute.make_rmem_tensor(values.shape, Float32)
    if cutlass.const_expr(values.element_type is cutlass.BFloat16):
        words = cute.recast_tensor(values, Uint32)
        for i in cutlass.range_constexpr(cute.size(words)):
            wide[2 * i] = (words[i] << 16).bitcast(Float32)
            wide[2 * i + 1] = (words[i] & Uint32(0xFFFF0000)).bitcast(Float32)
    else:
        wide.store(values.load().to(Float32))
    return wide


@dataclasses.dataclass(frozen=True)
class BiasMask(AttentionMask):  # type: ignore[misc]
    """The library's mask, which adds a bias where it is asked to change scores."""

    # Whether scores without a bias are scaled, too: a forward scales them as it exponentiates.
    scales_all: cutlass.Constexpr[bool] = False
    # Whether all queries share the bias.
    is_by_key: cutlass.Constexpr[bool] = False
    # Whether two keys can be read at once, from an even one on.
    in_pairs: cutlass.Constexpr[bool] = False
    # Whether the bias is the bits of a boolean mask, 32 keys a word.
    is_boolean: cutlass.Constexpr[bool] = False

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
        bias: cute.Tensor | None = None,
    ) -> None:
        """As the library has it; `bias` is what `load` returns, where it was called before."""
        if cutlass.const_expr(mask_mod is None):
            AttentionMask.apply_mask(
                self, acc_S, batch_idx, head_idx, m_block, n_block, thr_mma, mask_seqlen,
                mask_causal, mask_local,
            )  # fmt: skip
            if cutlass.const_expr(self.scales_all):
                acc_S.store(acc_S.load() * aux_data.scalars[0])
        else:
            if cutlass.const_expr(bias is None):
                bias = self.load(aux_data, batch_idx, head_idx, m_block, n_block, thr_mma)
            if cutlass.const_expr(self.is_boolean):
                self._add_where_false(acc_S, bias, n_block, thr_mma, *aux_data.scalars)
            else:
                self._add(acc_S, bias, n_block, thr_mma, aux_data.scalars[0])

    def _places(self, thr_mma: cute.TiledMma) -> cute.Tensor:
        """Where in a tile the scores of a thread are, by their row and column."""
        shape = (self.tile_m, self.tile_n)
        places = cute.make_identity_tensor(shape[::-1] if self.swap_AB else shape)
        return layout_utils.reshape_acc_to_mn(thr_mma.partition_C(places), transpose=self.swap_AB)

    @cute.jit
    def load(
        self,
        aux_data: Any,
        batch: Int32,
        head: Int32,
        m_block: Int32,
        n_block: Int32,
        thr_mma: cute.TiledMma,
    ) -> cute.Tensor:
        """The bias of a thread's scores, or words with its bits; where there is no query or key,
        the last one's."""
        bias = aux_data.tensors[0][batch, head, None, None]
        place = self._places(thr_mma)
        if cutlass.const_expr(self.is_boolean):
            return self._load_bits(bias, place, m_block, n_block)
        ROW, COL = (1, 0) if cutlass.const_expr(self.swap_AB) else (0, 1)
        rows, cols = cute.size(place.shape[0]), cute.size(place.shape[1])
        lines = 1 if cutlass.const_expr(self.is_by_key) else rows
        loaded = cute.make_rmem_tensor((lines, cols), bias.element_type)
        # A thread's columns are pairs, but of the product of keys and queries.
        step = 2 if cutlass.const_expr(self.in_pairs and not self.swap_AB) else 1
        for row in cutlass.range_constexpr(lines):
            query = cutlass.min(m_block * self.tile_m + place[row, 0][ROW], self.seqlen_q - 1)
            line = cute.logical_divide(bias[query, None], cute.make_layout(step))
            for col in cutlass.range_constexpr(0, cols, step):
                key = n_block * self.tile_n + place[0, col][COL]
                key = cutlass.min(key, self.seqlen_k - step)
                for half in cutlass.range_constexpr(step):
                    loaded[row, col + half] = line[half, key // step]
        return loaded

    @cute.jit
    def _load_bits(
        self, words: cute.Tensor, place: cute.Tensor, m_block: Int32, n_block: Int32
    ) -> cute.Tensor:
        """Words of which `_bit` is a bit: of each of a thread's rows those of a tile's keys, or of
        each of its keys one with its rows."""
        ROW, COL = (1, 0) if cutlass.const_expr(self.swap_AB) else (0, 1)
        lines = 1 if cutlass.const_expr(self.is_by_key) else cute.size(place.shape[0])
        if cutlass.const_expr(self._has_whole_rows(place)):
            many = self.tile_n // _BITS
            loaded = cute.make_rmem_tensor((lines, many), Int32)
            for row in cutlass.range_constexpr(lines):
                query = cutlass.min(m_block * self.tile_m + place[row, 0][ROW], self.seqlen_q - 1)
                for word in cutlass.range_constexpr(many):
                    loaded[row, word] = words[query, n_block * many + word] >> place[0, 0][COL]
        else:
            assert lines <= _BITS
            cols = cute.size(place.shape[1])
            loaded = cute.make_rmem_tensor((1, cols), Int32)
            loaded.fill(0)
            # A few at a time: there are no registers for the words of all rows.
            for row in cutlass.range(lines, unroll=_ROWS_AT_ONCE):
                query = cutlass.min(m_block * self.tile_m + place[row, 0][ROW], self.seqlen_q - 1)
                for col in cutlass.range_constexpr(cols):
                    key = n_block * self.tile_n + place[0, col][COL]
                    bit = (words[query, key // _BITS] >> (key % _BITS)) & 1
                    loaded[0, col] = loaded[0, col] | (bit << row)
        return loaded

    def _has_whole_rows(self, place: cute.Tensor) -> bool:
        """Whether the four threads of a row have all keys of a tile. In the product of keys and
        queries they have queries; and warp groups may share a row."""
        return not self.swap_AB and cute.size(place.shape[1]) * 4 == self.tile_n

    def _bit(self, words: cute.Tensor, place: cute.Tensor, row: int, col: int) -> Any:
        """Not 0 where the mask is True, of a thread's score in so many-th row and column."""
        line = 0 if self.is_by_key else row
        if not self._has_whole_rows(place):
            return words[0, col] & (1 << line)
        # A thread's columns are pairs, eight apart, from its first one on.
        key = col // 2 * 8 + col % 2
        return words[line, key // _BITS] & (1 << key % _BITS)

    @cute.jit
    def _add(
        self,
        acc_S: cute.Tensor,
        bias: cute.Tensor,
        n_block: Int32,
        thr_mma: cute.TiledMma,
        scale: Float32,
    ) -> None:
        """Scores become ``scale * score + bias``; those of no key -inf."""
        COL = 0 if cutlass.const_expr(self.swap_AB) else 1
        scores = layout_utils.reshape_acc_to_mn(acc_S, transpose=self.swap_AB)
        place = self._places(thr_mma)
        lines = cute.size(bias.shape[0])
        for col in cutlass.range_constexpr(cute.size(scores.shape[1])):
            is_key = n_block * self.tile_n + place[0, col][COL] < self.seqlen_k
            for row in cutlass.range_constexpr(cute.size(scores.shape[0])):
                here = bias[row if lines > 1 else 0, col].to(Float32)
                score = scores[row, col] * scale + here
                scores[row, col] = score if is_key else -Float32.inf

    @cute.jit
    def _add_where_false(
        self,
        acc_S: cute.Tensor,
        words: cute.Tensor,
        n_block: Int32,
        thr_mma: cute.TiledMma,
        scale: Float32,
        lowest: Float32,
    ) -> None:
        """Scores get `lowest` added where a boolean mask is False; those of no key become -inf.

        If `scales_all`, they are scaled before. Otherwise they are scaled later, `lowest` with
        them.
        """
        COL = 0 if cutlass.const_expr(self.swap_AB) else 1
        scores = layout_utils.reshape_acc_to_mn(acc_S, transpose=self.swap_AB)
        place = self._places(thr_mma)
        for col in cutlass.range_constexpr(cute.size(scores.shape[1])):
            for row in cutlass.range_constexpr(cute.size(scores.shape[0])):
                score = scores[row, col]
                if cutlass.const_expr(self.scales_all):
                    score *= scale
                is_true = self._bit(words, place, row, col) != 0
                scores[row, col] = score if is_true else score + lowest
        if (n_block + 1) * self.tile_n > self.seqlen_k:
            for col in cutlass.range_constexpr(cute.size(scores.shape[1])):
                is_key = n_block * self.tile_n + place[0, col][COL] < self.seqlen_k
                for row in cutlass.range_constexpr(cute.size(scores.shape[0])):
                    scores[row, col] = scores[row, col] if is_key else -Float32.inf


@dsl_user_op
def _fma(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """``a * b + c``, rounded once."""
    values = (each.ir_value(loc=loc, ip=ip) for each in (a, b, c))
    return Float32(mlir_math.fma(*values, loc=loc, ip=ip))


@cute.jit
def _to_power(number: Float32) -> Float32:
    """What takes scores beside such a maximum to powers of two.

    Beside one that is so far from 0, scores are the same or so much less that neither their
    exponential nor their power counts.
    """
    is_far = cutlass.max(number, -number) > _FAR
    return Float32(1.0) if is_far else Float32(_LOG2_E)


@cute.jit
def _excess(base: Float32) -> Float32:
    """By how much exponents are too large beside the maximum `base`.

    A score's exponent is its product less the rounded one of the maximum, by one operation. So
    rounding adds one number to all of a row, up to 0.25 beside 4e6. Unless it is taken off, the
    sum of such powers is no sum of exponentials, and a backward's scores do not agree with the
    logsumexp.
    """
    factor = _to_power(base)
    return _fma(base, factor, -(base * factor))


@dataclasses.dataclass
class BiasedSoftmax(Softmax):  # type: ignore[misc]
    """The library's softmax, with maxima of scaled scores, natural logarithms.

    `is_biased` says whether the scores of a tile are scaled already.
    """

    is_biased: cutlass.Constexpr[bool] = False

    @staticmethod
    def create(
        scale_log2: Float32,
        num_rows: int,
        arch: int = 80,
        softmax_scale: Float32 | None = None,
    ) -> BiasedSoftmax:
        row_max = cute.make_rmem_tensor(num_rows, Float32)
        row_sum = cute.make_rmem_tensor(num_rows, Float32)
        return BiasedSoftmax(scale_log2, num_rows, row_max, row_sum, arch, softmax_scale)

    @cute.jit
    def online_softmax(
        self,
        acc_S: cute.Tensor,
        is_first: cutlass.Constexpr[bool] = False,
        check_inf: cutlass.Constexpr[bool] = True,
    ) -> cute.Tensor:
        scores = layout_utils.reshape_acc_to_mn(acc_S)
        row_scale = cute.make_fragment_like(self.row_max, Float32)
        for row in cutlass.range_constexpr(self.num_rows):
            line = scores[row, None].load()
            top = utils.fmax_reduce(line, init_val=None, arch=self.arch)
            top = cute.arch.warp_reduction_max(top, threads_in_group=4)
            if cutlass.const_expr(not self.is_biased):
                top *= self.softmax_scale
            before = -Float32.inf
            if cutlass.const_expr(not is_first):
                before = self.row_max[row]
                top = utils.fmax(before, top)
            self.row_max[row] = top
            # Of a row that has seen -inf alone. -inf - -inf would be NaN.
            base = Float32(0.0) if top == -Float32.inf else top
            if cutlass.const_expr(self.is_biased):
                factor = _to_power(base)
                powers = line * factor - base * factor  # one operation for a score
            else:
                powers = line * (self.softmax_scale * _LOG2_E) - base * _LOG2_E
            powers = cute.math.exp2(powers, fastmath=True)
            if cutlass.const_expr(is_first):
                row_scale[row] = Float32(1.0)
                self.row_sum[row] = utils.fadd_reduce(powers, init_val=None, arch=self.arch)
            else:
                less = (before - base) * _LOG2_E
                if cutlass.const_expr(self.is_biased):  # other maxima are not so large
                    seen = Float32(0.0) if before == -Float32.inf else before
                    less += _excess(base) - _excess(seen)
                shrink = cute.math.exp2(less, fastmath=True)
                row_scale[row] = shrink
                self.row_sum[row] = utils.fadd_reduce(
                    powers, init_val=self.row_sum[row] * shrink, arch=self.arch
                )
            scores[row, None].store(powers)
        return row_scale

    @cute.jit
    def finalize(self, final_scale: float = 1.0, sink_val: Any = None) -> cute.Tensor:
        """What outputs are divided by; the sums become the scores' logsumexp.

        It is infinity of a row that attends to nothing: exp(S - L) is then 0 in anybody's backward.
        """
        self.row_sum.store(utils.warp_reduce(self.row_sum.load(), lambda x, y: x + y, width=4))
        row_scale = cute.make_fragment_like(self.row_max, Float32)
        for row in cutlass.range_constexpr(self.num_rows):
            total = self.row_sum[row]
            is_empty = total == 0.0
            row_scale[row] = cute.arch.rcp_approx(Float32(1.0) if is_empty else total)
            excess = _excess(Float32(0.0) if is_empty else self.row_max[row])
            log2_of_sum = cute.math.log2(total, fastmath=True) - excess
            logsumexp = self.row_max[row] + log2_of_sum * _LN_2
            self.row_sum[row] = Float32.inf if is_empty else logsumexp
        return row_scale


@cute.jit
def _listed(
    place: Int32, biased: Int32, biased_tiles: cute.Tensor, zero: Int32, zero_tiles: cute.Tensor
) -> Int32:
    """The tile that is computed as so many-th: those with a bias first, each list from its end."""
    n_block = Int32(0)
    if place < biased:
        n_block = biased_tiles[biased - 1 - place]
    else:
        n_block = zero_tiles[zero - 1 - (place - biased)]
    return n_block


def _with_bias(mask_class: partial[Any], bias: BiasKind, scales_all: bool = False) -> partial[Any]:
    return partial(
        BiasMask,
        *mask_class.args,
        **mask_class.keywords,
        scales_all=scales_all,
        is_by_key=bias.is_by_key,
        in_pairs=bias.in_pairs,
        is_boolean=bias.dtype is torch.bool,
    )


class _EarlyLaunch(NamedTuple):
    """A launch of a kernel that may begin while the one before it ends."""

    launcher: Any

    def launch(self, **keywords: Any) -> Any:
        return self.launcher.launch(**keywords, use_pdl=True)


class BiasedForward(FlashAttentionForwardSm90):  # type: ignore[misc]
    """A forward in which tiles of one list have a bias.

    The kernel before it writes the lists, and while that ends, this one's programs begin: all warps
    that read or write global memory wait for it first.
    """

    is_early = True

    def __init__(self, *args: Any, bias: BiasKind, **keywords: Any) -> None:
        self.bias = bias
        # With a function of scores the library's softmax gets their scale by itself.
        super().__init__(*args, score_mod=_has_bias, mask_mod=_has_bias, **keywords)

    def kernel(self, *args: Any, **keywords: Any) -> Any:
        launcher = super().kernel(*args, **keywords)
        return _EarlyLaunch(launcher) if self.is_early else launcher

    def mma_init(self) -> None:
        """What the warps that compute do first."""
        cute.arch.griddepcontrol_wait()
        super().mma_init()

    def apply_score_mod(self, *_: Any, **__: Any) -> None:
        """Nothing: the tile's mask adds the bias."""

    def first_half_block_overlap(self, *args: Any, **keywords: Any) -> Any:
        return super().first_half_block_overlap(*args, **self._for_tile(**keywords))

    def mma_one_n_block_intrawg_overlap(self, *args: Any, **keywords: Any) -> Any:
        return super().mma_one_n_block_intrawg_overlap(*args, **self._for_tile(**keywords))

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
        lists: BlockSparseTensors,
        _block_info: Any,
        SeqlenInfoCls: Callable[..., Any],
        TileSchedulerCls: Callable[..., Any],
    ) -> None:
        """As the library has it for listed tiles; but the first keys of a row of tiles are loaded
        before there is room for its queries, while the row before is computed. The library waits
        for that room first, then reads the lists, and then waits for the keys."""
        cute.arch.griddepcontrol_wait()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            q_phase = Int32(1)
            state = pipeline.make_pipeline_state(
                pipeline.PipelineUserType.Producer, self.num_stages
            )
            scheduler = TileSchedulerCls()
            work = scheduler.initial_work_tile_info()
            while work.is_valid_tile:
                m_block, head, batch, _ = work.tile_idx
                seqlen = SeqlenInfoCls(batch)
                load_Q, load_K, load_V = self.copies(
                    *(m_block, head, batch, seqlen, (mQ, mK, mV), (sQ, sK, sV)),
                    *((tma_atom_Q, tma_atom_K, tma_atom_V), (pipeline_k, pipeline_v)),
                )

                biased, biased_tiles, zero, zero_tiles = get_curr_blocksparse_tensors(
                    batch, head, m_block, lists, seqlen
                )
                tiles = biased + zero
                n_block = Int32(0)
                if tiles > 0:
                    n_block = _listed(0, biased, biased_tiles, zero, zero_tiles)
                    pipeline_k.producer_acquire(state)
                    load_K(src_idx=n_block, producer_state=state)
                pipeline_q.producer_acquire_w_index_phase(0, q_phase)
                load_Q(tma_bar_ptr=pipeline_q.sync_object_full.get_barrier(0))
                q_phase ^= 1
                if tiles > 0:
                    for place in cutlass.range(1, tiles, unroll=1):
                        next_block = _listed(place, biased, biased_tiles, zero, zero_tiles)
                        state_before = state.clone()
                        state.advance()
                        pipeline_k.producer_acquire(state)
                        load_K(src_idx=next_block, producer_state=state)
                        pipeline_v.producer_acquire(state_before)
                        load_V(src_idx=n_block, producer_state=state_before)
                        n_block = next_block
                    pipeline_v.producer_acquire(state)
                    load_V(src_idx=n_block, producer_state=state)
                    state.advance()
                scheduler.prefetch_next_work()
                scheduler.advance_to_next_work()
                work = scheduler.get_current_work()
            pipeline_v.producer_tail(state)

    def copies(
        self,
        m_block: Int32,
        head: Int32,
        batch: Int32,
        seqlen: Any,
        inputs: tuple[cute.Tensor, ...],
        shared: tuple[cute.Tensor, ...],
        atoms: tuple[cute.CopyAtom, ...],
        pipelines: tuple[Any, ...],
    ) -> list[Callable[..., None]]:
        """What loads a row of tiles' queries, and blocks of its keys and values, as the library
        has it.

        Args:
            m_block: the row of tiles.
            head: of queries.
            batch: the row's.
            seqlen: the library's, of this batch.
            inputs: query, key and value in global memory.
            shared: where they are in shared memory.
            atoms: the copy engine's, of the three.
            pipelines: of keys and of values.
        """
        mQ, *of_keys = inputs
        head_k = head // self.qhead_per_kvhead
        rows = [seqlen.offset_batch_Q(mQ, batch, dim=3)[None, None, head]]
        rows += [seqlen.offset_batch_K(t, batch, dim=3)[None, None, head_k] for t in of_keys]
        tiles = (
            ((self.tile_m, self.tile_hdim), (m_block, 0)),
            ((self.tile_n, self.tile_hdim), (None, 0)),
            ((self.tile_n, self.tile_hdimv), (None, 0)),
        )
        found = []
        for index, (atom, row, to) in enumerate(zip(atoms, rows, shared, strict=True)):
            tile = cute.local_tile(row, *tiles[index])
            load, _, _ = copy_utils.tma_get_copy_fn(
                atom, 0, cute.make_layout(1), tile, to, single_stage=index == 0
            )
            if index > 0:
                load = copy_utils.tma_producer_copy_fn(load, pipelines[index - 1])
            found.append(load)
        return found

    def _for_tile(
        self, softmax: BiasedSoftmax, mask_fn: partial[None], n_block: Int32, **others: Any
    ) -> dict[str, Any]:
        """What a step is given, by whether its tile has a bias."""
        of_mask = mask_fn.keywords
        if of_mask.get("mask_mod") is not None:
            is_boolean = self.bias.dtype is torch.bool
            softmax = dataclasses.replace(softmax, is_biased=not is_boolean)
            # Of a boolean mask there are few words to load.
            if is_boolean or self.num_wg_mma < _MANY_WARP_GROUPS:
                mask = mask_fn.func.__self__  # type: ignore[attr-defined]
                bias = mask.load(
                    *(of_mask[name] for name in ("aux_data", "batch_idx", "head_idx", "m_block")),
                    *(n_block, of_mask["thr_mma"]),
                )
                mask_fn = partial(mask_fn, bias=bias)
        return {"softmax": softmax, "mask_fn": mask_fn, "n_block": n_block, **others}


@cache
def biased_forward(programs: int, is_by_key: bool) -> type[BiasedForward]:
    """The class of a forward with a bias.

    Args:
        programs: as many walk over tiles; 0: there is a program for each tile, and those of the
            last queries begin first, which see the most keys in most masks.
        is_by_key: whether all queries share the bias: then a head's tiles see the same keys.
    """
    base = walking_forward(programs, not is_by_key) if programs else LongestFirst
    mma = renamed(FlashAttentionForwardSm90.mma, {"Softmax": BiasedSoftmax})

    def with_bias(self: Any, *args: Any) -> None:
        *before, mask_class, scheduler, lists, aux_data, fastdiv_mods = args
        mask_class = _with_bias(mask_class, self.bias)
        mma(self, *before, mask_class, scheduler, lists, aux_data, fastdiv_mods)

    return type("BiasedForward", (BiasedForward, base), {"mma": with_bias})


class _Difference(NamedTuple):
    """What the library has for a score in powers of two, from which it subtracts the logsumexp.

    Both are natural logarithms here. Times log2(e) they would be rounded apart, of numbers such as
    -1e9 by more than a hundred. No score is above the logsumexp, but by what another order of the
    same sum rounds otherwise.
    """

    score: Any

    def __sub__(self, logsumexp: Float32) -> Float32:
        return cute.arch.fmin(self.score - logsumexp, 0.0, nan=True) * _LOG2_E


class _NoFactor:
    """Stands where the library has the factor from scores to powers of two."""

    def __rmul__(self, score: Float32) -> _Difference:
        return _Difference(score)


class BiasedBackward(FlashAttentionBackwardSm90):  # type: ignore[misc]
    """A backward in which tiles of one list have a bias. The logsumexp is natural."""

    def __init__(self, *args: Any, bias: BiasKind, **keywords: Any) -> None:
        self.bias = bias
        super().__init__(*args, mask_mod=_has_bias, **keywords)

    def mma(self, *args: Any, **more: Any) -> None:
        args = tuple(
            _with_bias(each, self.bias, scales_all=True)
            if isinstance(each, partial) and each.func is AttentionMask
            else each
            for each in args
        )
        super().mma(*args, **more)

    def mma_one_m_block(self, *args: Any, **more: Any) -> Any:
        return super().mma_one_m_block(*args, **{**more, "softmax_scale_log2": _NoFactor()})
