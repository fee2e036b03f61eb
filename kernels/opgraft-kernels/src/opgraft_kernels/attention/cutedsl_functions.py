"""FlashAttention-4's kernels compiled behind functions that `cutedsl_kernels` calls.

Importing this imports CuteDSL and the library, which takes seconds; only compiling needs it.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from flash_attn.cute import interface as library
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.flash_bwd_postprocess import FlashAttentionBackwardPostprocess
from flash_attn.cute.flash_bwd_preprocess import FlashAttentionBackwardPreprocess
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.utils import AuxData

from opgraft_kernels.attention.cutedsl_biased import BiasedBackward, biased_forward
from opgraft_kernels.attention.cutedsl_dense import dense_forward
from opgraft_kernels.attention.cutedsl_dense_backward import DenseBackward, NaturalPreprocess
from opgraft_kernels.attention.cutedsl_kernels import BackwardTile, Kind
from opgraft_kernels.attention.cutedsl_multicast import multicast_forward
from opgraft_kernels.attention.cutedsl_products import NarrowBackward, steps_of
from opgraft_kernels.attention.cutedsl_short_backward import ShortBackward
from opgraft_kernels.attention.cutedsl_tiles import (
    forward_dim,
    listed_backward_tile,
    product_dim,
    wide_dim,
)
from opgraft_kernels.attention.cutedsl_walking import walking_forward
from opgraft_kernels.cutedsl import CUTLASS_DTYPES, compile_function, fake_tensor
from opgraft_kernels.integers import round_up

__all__ = ["compile_kind"]

_ARCH = 90
# 16 bytes, what the copy engine asks of strides and addresses, in elements.
_ALIGNED_16BIT, _ALIGNED_FP32 = 8, 4


# --------------------------------------------------------------------------------------------------
# Functions on tensors as ATen has them
# --------------------------------------------------------------------------------------------------


def _without_unused_strides(t: Any, order: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    """`t` with its dimensions in another order.

    The stride of a dimension of size 1 says nothing, and DLPack writes 1 there, which the copy
    engine refuses; 0 it takes.
    """
    shape = t.shape
    stride = [
        s if isinstance(s, int) else s * Int64(n != 1) for n, s in zip(shape, t.stride, strict=True)
    ]
    layout = cute.make_layout(
        tuple(shape[i] for i in order), stride=tuple(stride[i] for i in order)
    )
    return cute.make_tensor(t.iterator, layout)


def _swap_heads_and_length(t: Any) -> Any:
    """``(b, h, s, d)`` as ``(b, s, h, d)``."""
    return _without_unused_strides(t, (0, 2, 1, 3))


def _tiles_listed(lists: cute.Tensor | None) -> BlockSparseTensors | None:
    """Lists of tiles as the library has them; `triton_lists` says how they are laid out."""
    if lists is None:
        return None
    *shape, _, entries = lists.shape
    *strides, of_kind, _ = lists.stride

    def listed(kind: int) -> tuple[Any, Any]:
        begin = lists.iterator + kind * of_kind
        counts = cute.make_layout(tuple(shape), stride=tuple(strides))
        tiles = cute.make_layout((*shape, entries - 1), stride=(*strides, 1))
        return cute.make_tensor(begin, counts), cute.make_tensor(begin + 1, tiles)

    return BlockSparseTensors(*listed(0), *listed(1))


class _Forward:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        logsumexp: cute.Tensor | None,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        q, k, v, out = [_swap_heads_and_length(t) for t in (q, k, v, out)]
        self.kernel(q, k, v, out, logsumexp, scale, stream=stream)


class _BiasedForward(_Forward):
    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        logsumexp: cute.Tensor | None,
        bias: cute.Tensor,
        lists: cute.Tensor,
        lowest: Float32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        q, k, v, out = [_swap_heads_and_length(t) for t in (q, k, v, out)]
        self.kernel(
            q, k, v, out, logsumexp, scale, blocksparse_tensors=_tiles_listed(lists),
            aux_data=AuxData([bias], (scale, lowest)), stream=stream,
        )  # fmt: skip


class _DenseForward(_Forward):
    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        logsumexp: cute.Tensor | None,
        bias: cute.Tensor,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        q, k, v, out = [_swap_heads_and_length(t) for t in (q, k, v, out)]
        tiles = self.kernel.tiles_of(_without_unused_strides(bias))
        self.kernel(
            q, k, v, out, logsumexp, scale, blocksparse_tensors=tiles,
            aux_data=AuxData(None, (scale,)), stream=stream,
        )  # fmt: skip


class _ForwardVarlen(_Forward):
    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        logsumexp: cute.Tensor,
        cum_q: cute.Tensor,
        cum_k: cute.Tensor,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(q, k, v, out, logsumexp, scale, cum_q, cum_k, stream=stream)


class _Backward:
    """delta and the zeroed dq accumulator, and of the logsumexp, where there is no bias, one in
    powers of two; dk, dv and dq in float32; dq (dk, dv) in 16 bits."""

    def __init__(
        self, preprocess: Any, kernel: Any, finish_dq: Any, finish_dk: Any, finish_dv: Any
    ):
        self.preprocess = preprocess
        self.kernel = kernel
        self.finish_dq = finish_dq
        self.finish_dk = finish_dk
        self.finish_dv = finish_dv

    @cute.jit
    def __call__(
        self,
        grad_out: cute.Tensor,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        logsumexp: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        delta: cute.Tensor,
        logsumexp2: cute.Tensor,
        dq_sum: cute.Tensor,
        dk_sum: cute.Tensor | None,
        dv_sum: cute.Tensor | None,
        cum_q: cute.Tensor | None,
        cum_k: cute.Tensor | None,
        bias: cute.Tensor | None,
        lists: cute.Tensor | None,
        lowest: Float32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        if cutlass.const_expr(cum_q is None):
            grad_out, q, k, v, out, dq, dk, dv = [
                _swap_heads_and_length(t) for t in (grad_out, q, k, v, out, dq, dk, dv)
            ]
        one = Float32(1.0)
        # With a bias `logsumexp2` is natural: see `BiasedBackward`. Where there are lists it is
        # given, and what is read of it here is not used.
        read, made = (
            (logsumexp, logsumexp2) if cutlass.const_expr(lists is None) else (logsumexp2, None)
        )
        self.preprocess(
            out, grad_out, delta, read, made, dq_sum, cum_q, None, None, None, None, one,
            stream=stream,
        )  # fmt: skip
        of_keys = (dk, dv) if cutlass.const_expr(dk_sum is None) else (dk_sum, dv_sum)
        aux_data, tiles = AuxData(), _tiles_listed(lists)
        if cutlass.const_expr(lists is not None):
            aux_data = AuxData([bias], (scale, lowest))
        elif cutlass.const_expr(bias is not None):
            aux_data = AuxData(None, (scale,))
            tiles = self.kernel.tiles_of(_without_unused_strides(bias))
        self.kernel(
            q, k, v, grad_out, logsumexp2, delta, dq_sum, *of_keys, scale, cum_q, cum_k,
            blocksparse_tensors=tiles, aux_data=aux_data, stream=stream,
        )  # fmt: skip
        self.finish_dq(dq_sum, dq, scale, cum_q, None, None, stream=stream)
        if cutlass.const_expr(dk_sum is not None):
            self.finish_dk(dk_sum, dk, scale, cum_k, None, None, stream=stream)
            self.finish_dv(dv_sum, dv, one, cum_k, None, None, stream=stream)


class _ShortBackward:
    def __init__(self, kernel: ShortBackward) -> None:
        self.kernel = kernel

    @cute.jit
    def __call__(
        self,
        grad_out: cute.Tensor,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        logsumexp: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        programs: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        grad_out, q, k, v, out, dq, dk, dv = [
            _swap_heads_and_length(t) for t in (grad_out, q, k, v, out, dq, dk, dv)
        ]
        self.kernel(q, k, v, out, grad_out, logsumexp, dq, dk, dv, scale, programs, stream=stream)


# --------------------------------------------------------------------------------------------------
# Compiling them, without tensors
# --------------------------------------------------------------------------------------------------


def _compile(function: Any, *arguments: Any) -> Callable[..., None]:
    with warnings.catch_warnings():
        # CuteDSL says of the library's own default argument that it is no kernel argument.
        warnings.filterwarnings("ignore", message="Argument aux_data")
        return compile_function(function, *arguments)


def compile_kind(kind: Kind) -> Any:
    """Compile the function for `kind`; needs no GPU where ``CUTE_DSL_ARCH`` names one.

    Returns:
        The function; of a backward also the `BackwardTile` that it was compiled for.
    """
    if kind.short is not None:
        return _compile_short_backward(kind)
    return _compile_forward(kind) if kind.is_forward else _compile_backward(kind)


def _forward_kernel(dtype: Any, kind: Kind) -> FlashAttentionForwardSm90:
    dims = forward_dim(kind.head_dim), forward_dim(kind.head_dim_v)
    if kind.tile is None:
        config = library._tile_size_fwd_sm90(*dims, kind.causal, False)
        kernel_class = FlashAttentionForwardSm90
    else:
        # Probabilities stay in registers, and the next product of queries and keys overlaps.
        config = library.FwdConfig(kind.tile.queries, kind.tile.keys, True, True)
        of_programs = multicast_forward if kind.tile.is_shared else walking_forward
        kernel_class = of_programs(kind.tile.programs)
    if kind.bias is not None:
        assert kind.tile is not None
        kernel_class = (
            dense_forward(kind.tile.programs)
            if kind.bias.is_dense
            else biased_forward(kind.tile.programs, kind.bias.is_by_key)
        )
        kernel_class = functools.partial(kernel_class, bias=kind.bias)
    kernel = kernel_class(
        dtype,
        kind.head_dim,
        kind.head_dim_v,
        kind.group,
        is_causal=kind.causal,
        is_local=False,
        # The lists of tiles, and the bias, are of queries of one head.
        pack_gqa=kind.group > 1 and kind.bias is None,
        tile_m=config.m_block_size,
        tile_n=config.n_block_size,
        num_stages=2 if kind.tile is None else kind.tile.stages,
        num_threads=384,
        Q_in_regs=False,
        intra_wg_overlap=config.intra_wg_overlap,
        mma_pv_is_rs=config.mma_pv_is_rs,
    )
    kernel.tile_hdim, kernel.tile_hdimv = dims
    kernel.steps = steps_of(kind.head_dim)
    kernel.value_columns = kernel.tile_hdimv
    if kind.tile is not None and kind.tile.is_wide:
        kernel.tile_hdim = kernel.value_columns = wide_dim(kind.head_dim)
        kernel.tile_hdimv = product_dim(kind.head_dim)
    return kernel


def _compile_forward(kind: Kind) -> Callable[..., None]:
    dtype = CUTLASS_DTYPES[kind.dtype]
    kernel = _forward_kernel(dtype, kind)
    ndim = 3 if kind.is_varlen else 4
    tensors = [fake_tensor(dtype, ndim, _ALIGNED_16BIT) for _ in range(4)]
    logsumexp = fake_tensor(Float32, ndim - 1, 1) if kind.has_logsumexp else None
    if kind.is_varlen:
        cum = [fake_tensor(cutlass.Int32, 1, 1) for _ in range(2)]
        return _compile(_ForwardVarlen(kernel), *tensors, logsumexp, *cum, Float32(1.0))
    if kind.bias is not None and kind.bias.is_dense:
        bias, _ = _fake_bias(kind)
        return _compile(_DenseForward(kernel), *tensors, logsumexp, bias, Float32(1.0))
    if kind.bias is not None:
        return _compile(
            _BiasedForward(kernel), *tensors, logsumexp, *_fake_bias(kind), *[Float32(1.0)] * 2
        )
    return _compile(_Forward(kernel), *tensors, logsumexp, Float32(1.0))


def _fake_bias(kind: Kind) -> tuple[Any, Any]:
    """A bias of any strides but the last one, or a boolean mask's bits, and the lists of its
    tiles; or a bias of each head's own, without lists."""
    assert kind.bias is not None
    if kind.bias.is_dense:
        return fake_tensor(CUTLASS_DTYPES[kind.bias.dtype], 4, _ALIGNED_16BIT), None
    lists = fake_tensor(cutlass.Int32, 5, 1)
    if kind.bias.dtype is torch.bool:
        return fake_tensor(cutlass.Int32, 4, 4), lists
    dtype = Float32 if kind.bias.dtype is torch.float32 else CUTLASS_DTYPES[kind.bias.dtype]
    return fake_tensor(dtype, 4, 2 if kind.bias.in_pairs else 1), lists


def _backward_kernel(
    dtype: Any, dims: tuple[int, int], kind: Kind, config: Any
) -> FlashAttentionBackwardSm90:
    kernel_class, tiles_of_listed = FlashAttentionBackwardSm90, 1
    steps = steps_of(max(kind.head_dim, kind.head_dim_v))
    if kind.bias is None and steps < steps_of(min(dims)):
        kernel_class = functools.partial(NarrowBackward, steps=steps)
    if kind.bias is not None and kind.bias.is_dense:
        kernel_class = functools.partial(DenseBackward, bias=kind.bias)
    elif kind.bias is not None:
        kernel_class = functools.partial(BiasedBackward, bias=kind.bias)
        queries, _ = listed_backward_tile(kind.head_dim)
        tiles_of_listed = queries // config.m_block_size
    return kernel_class(
        dtype,
        *dims,
        kind.group,
        kind.causal,
        is_local=False,
        deterministic=False,
        tile_m=config.m_block_size,
        tile_n=config.n_block_size,
        Q_stage=config.num_stages_Q,
        dO_stage=config.num_stages_dO,
        PdS_stage=config.num_stages_PdS,
        SdP_swapAB=config.SdP_swapAB,
        dKV_swapAB=config.dKV_swapAB,
        dQ_swapAB=config.dQ_swapAB,
        AtomLayoutMSdP=config.AtomLayoutMSdP,
        AtomLayoutNdKV=config.AtomLayoutNdKV,
        AtomLayoutMdQ=config.AtomLayoutMdQ,
        num_threads=(config.num_wg + 1) * 128,
        V_in_regs=False,
        dQ_single_wg=config.dQ_single_wg,
        q_subtile_factor=tiles_of_listed,
    )


def _listed_queries(kind: Kind) -> int | None:
    """Of how many queries tiles are listed, which those of the kernel divide; None: of none.

    Without lists, too, a bias leaves no registers for the 80 queries of tiles of heads of 128.
    """
    return listed_backward_tile(kind.head_dim)[0] if kind.bias is not None else None


def _built_dim(dim: int) -> int:
    """The head dimension that a backward's kernel is built for; tiles are empty beyond the call's.

    The library's kernel for 80, to which it pads 72, sometimes gives wrong gradients where there
    are many tiles, on an H200 (flash-attn-4 4.0.0b36). The one for 112 was not tested, and is built
    in the same way: its tiles were tuned for another dimension.
    """
    return {80: 96, 112: 128}.get(round_up(dim, 16), dim)


def _compile_backward(kind: Kind) -> tuple[Callable[..., None], BackwardTile]:
    dtype = CUTLASS_DTYPES[kind.dtype]
    dims = _built_dim(kind.head_dim), _built_dim(kind.head_dim_v)
    config = library._tile_size_bwd_sm90(*dims, kind.causal, False, _listed_queries(kind))
    kernel = _backward_kernel(dtype, dims, kind, config)
    # To what the kernel rounds head dimensions. The kernels before and after it have to agree: the
    # library's own front says 32 to them where the kernel takes 16, and dq of heads of 40, 72 and
    # 80 is wrong through it (flash-attn-4 4.0.0b36).
    multiple = math.gcd(kernel.tile_hdim, kernel.tile_hdimv)
    is_natural = kind.bias is not None and kind.bias.is_dense
    preprocess = (NaturalPreprocess if is_natural else FlashAttentionBackwardPreprocess)(
        dtype, kind.head_dim, kind.head_dim_v, config.m_block_size, hdim_multiple_of=multiple
    )

    def finish(dim: int, tile: int, threads: int, atom_layout: int, swap: bool) -> Any:
        return FlashAttentionBackwardPostprocess(
            dtype, dim, _ARCH, tile, threads, atom_layout, swap, hdim_multiple_of=multiple
        )

    threads = config.num_wg * 128
    threads_dq = 128 if config.dQ_single_wg else threads
    finish_dq = finish(
        kind.head_dim, config.m_block_size, threads_dq, config.AtomLayoutMdQ, config.dQ_swapAB
    )
    finish_dk, finish_dv = (
        finish(dim, config.n_block_size, threads, config.AtomLayoutNdKV, config.dKV_swapAB)
        for dim in (kind.head_dim, kind.head_dim_v)
    )
    ndim = 3 if kind.is_varlen else 4
    inputs = [fake_tensor(dtype, ndim, _ALIGNED_16BIT) for _ in range(5)]
    gradients = [fake_tensor(dtype, ndim, _ALIGNED_16BIT) for _ in range(3)]
    sums = [fake_tensor(Float32, ndim - 1, _ALIGNED_FP32) for _ in range(5)]
    if kind.group == 1:
        sums[3:] = [None, None]
    cum = [fake_tensor(cutlass.Int32, 1, 1) if kind.is_varlen else None for _ in range(2)]
    bias = (None, None) if kind.bias is None else _fake_bias(kind)
    function = _Backward(preprocess, kernel, finish_dq, finish_dk, finish_dv)
    logsumexp = fake_tensor(Float32, ndim - 1, 1)
    numbers = [Float32(1.0)] * 2
    compiled = _compile(function, *inputs, logsumexp, *gradients, *sums, *cum, *bias, *numbers)
    sizes = (config.m_block_size, config.n_block_size, kernel.tile_hdim, kernel.tile_hdimv)
    return compiled, BackwardTile(*sizes)


def _compile_short_backward(kind: Kind) -> Callable[..., None]:
    assert kind.short is not None
    dtype = CUTLASS_DTYPES[kind.dtype]
    kernel = ShortBackward(dtype, kind.head_dim, kind.short)
    tensors = [fake_tensor(dtype, 4, _ALIGNED_16BIT) for _ in range(8)]
    logsumexp = fake_tensor(Float32, 3, 1)
    arguments = *tensors[:5], logsumexp, *tensors[5:]
    return _compile(_ShortBackward(kernel), *arguments, Int32(1), Float32(1.0))
