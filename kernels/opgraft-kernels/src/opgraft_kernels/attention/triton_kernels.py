"""Attention in Triton: FlashAttention's forward and backward.

With ``S = scale * Q K^T``, in tiles that never leave the chip (Dao, "FlashAttention-2", 2023)::

    P = exp(S - L)        L = logsumexp(S), one value a row, kept for the backward
    O = P V
    D = rowsum(dO * O)
    dV = P^T dO           dS = P * (dO V^T - D)
    dQ = scale * dS K     dK = scale * dS^T Q

The forward finds L as it goes: a row's maximum and sum so far, by which what was summed before is
scaled down. The backward is two kernels, each of which recomputes P: one walks over queries and
sums dK and dV, the other walks over keys and sums dQ. That is 7 matrix products instead of the 5
of one kernel that adds its parts of dQ up in memory, and yet faster here, and it has the same bits
on every run.

On Hopper tiles are fetched by the copy engine (tensor descriptors, made in the kernel for one head
each); elsewhere, and where sequences are short, by loads. Warp specialisation is left alone: the
compiler's, asked for with three stages, computed NaN (triton 3.6.0, H200).
"""

from __future__ import annotations

import contextvars
import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from opgraft_kernels.rows import Launch, ceil_div

__all__ = ["Device", "backward", "forward", "plan_backward", "plan_forward"]

_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)
_INF = tl.constexpr(float("inf"))
# Where a row's maximum begins: finite, since a row whose scores are all -inf attends to nothing, as
# natively, and -inf - -inf would be NaN.
_LOWEST = tl.constexpr(-3.0e38)


# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------


@triton.jit
def _head(ptr, batch, head, stride_batch, stride_head):
    """Where one head of one batch begins."""
    return ptr + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head


@triton.jit
def _rows(
    ptr,
    length,
    stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """A head, ``[length, DIM]``, as `_load` and `_store` take it: a descriptor, or its pointer."""
    if DESCRIBED:
        return tl.make_tensor_descriptor(
            ptr, shape=[length, DIM], strides=[stride, 1], block_shape=[BLOCK, BLOCK_DIM]
        )
    else:
        return ptr


@triton.jit
def _load(
    rows,
    start,
    length,
    stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Rows `start` to ``start + BLOCK``, zeros where there are none."""
    if DESCRIBED:
        return rows.load([start, 0])
    else:
        row = tl.arange(0, BLOCK)
        dim = tl.arange(0, BLOCK_DIM)
        ptrs = rows + tl.full([], start, tl.int64) * stride + row[:, None] * stride + dim[None, :]
        mask = (start + row < length)[:, None]
        if DIM != BLOCK_DIM:
            mask = mask & (dim < DIM)[None, :]
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _store(
    rows,
    value,
    start,
    length,
    stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    if DESCRIBED:
        rows.store([start, 0], value)
    else:
        row = tl.arange(0, BLOCK)
        dim = tl.arange(0, BLOCK_DIM)
        ptrs = rows + tl.full([], start, tl.int64) * stride + row[:, None] * stride + dim[None, :]
        mask = (start + row < length)[:, None]
        if DIM != BLOCK_DIM:
            mask = mask & (dim < DIM)[None, :]
        tl.store(ptrs, value, mask=mask)


@triton.jit
def _attend(
    q,
    k_rows,
    v_rows,
    out,
    top,
    total,
    begin,
    end,
    query,
    length_k,
    shift,
    stride_kn,
    stride_vn,
    scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Takes the keys from `begin` to `end` into a tile's output, maximum and sum."""
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = _load(k_rows, start, length_k, stride_kn, DIM, BLOCK_K, BLOCK_DIM, DESCRIBED)
        scores = tl.dot(q, k.T)
        if MASKED:
            key = start + tl.arange(0, BLOCK_K)
            keep = (key < length_k)[None, :]
            if CAUSAL:
                keep = keep & (key[None, :] <= query[:, None] + shift)
            scores = tl.where(keep, scores, -_INF)
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        p = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        out = out * shrink[:, None]
        top = new_top
        v = _load(v_rows, start, length_k, stride_vn, DIM_V, BLOCK_K, BLOCK_DIM_V, DESCRIBED)
        out = tl.dot(p.to(v.dtype), v, out)
    return out, top, total


@triton.jit
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    logsumexp_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_om,
    stride_lb,
    stride_lh,
    stride_lm,
    heads,
    group,
    length_q,
    length_k,
    scale,
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """A program computes BLOCK_Q rows of one head. `scale` is in powers of two."""
    blocks = tl.cdiv(length_q, BLOCK_Q)
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest first
    batch = tl.program_id(0) // blocks // heads
    head = tl.program_id(0) // blocks % heads
    q_rows = _rows(
        _head(q_ptr, batch, head, stride_qb, stride_qh),
        length_q, stride_qm, DIM, BLOCK_Q, BLOCK_DIM, DESCRIBED,
    )  # fmt: skip
    k_rows = _rows(
        _head(k_ptr, batch, head // group, stride_kb, stride_kh),
        length_k, stride_kn, DIM, BLOCK_K, BLOCK_DIM, DESCRIBED,
    )  # fmt: skip
    v_rows = _rows(
        _head(v_ptr, batch, head // group, stride_vb, stride_vh),
        length_k, stride_vn, DIM_V, BLOCK_K, BLOCK_DIM_V, DESCRIBED,
    )  # fmt: skip
    first = block * BLOCK_Q
    query = first + tl.arange(0, BLOCK_Q)
    q = _load(q_rows, first, length_q, stride_qm, DIM, BLOCK_Q, BLOCK_DIM, DESCRIBED)

    shift = length_k - length_q
    end = length_k
    unmasked = length_k
    if CAUSAL:
        end = tl.minimum(length_k, first + BLOCK_Q + shift)
        unmasked = tl.minimum(length_k, first + shift + 1)
    unmasked = unmasked // BLOCK_K * BLOCK_K
    out = tl.zeros([BLOCK_Q, BLOCK_DIM_V], tl.float32)
    top = tl.full([BLOCK_Q], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    out, top, total = _attend(
        q, k_rows, v_rows, out, top, total, 0, unmasked,
        query, length_k, shift, stride_kn, stride_vn, scale,
        False, CAUSAL, DIM, DIM_V, BLOCK_K, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED,
    )  # fmt: skip
    out, top, total = _attend(
        q, k_rows, v_rows, out, top, total, unmasked, end,
        query, length_k, shift, stride_kn, stride_vn, scale,
        True, CAUSAL, DIM, DIM_V, BLOCK_K, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED,
    )  # fmt: skip

    empty = total == 0.0
    out = (out / tl.where(empty, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
    # Not by descriptor: one more would have to be made for a single store.
    out_rows = _head(out_ptr, batch, head, stride_ob, stride_oh)
    _store(out_rows, out, first, length_q, stride_om, DIM_V, BLOCK_Q, BLOCK_DIM_V, False)
    if logsumexp_ptr is not None:
        ptrs = _head(logsumexp_ptr, batch, head, stride_lb, stride_lh) + query * stride_lm
        # Infinity where there is nothing: exp(S - L) is then 0 in anybody's backward.
        logsumexp = tl.where(empty, _INF, (top + tl.log2(total)) * _LN_2)
        tl.store(ptrs, logsumexp, mask=query < length_q)


@triton.jit
def _delta_kernel(
    grad_ptr,
    out_ptr,
    delta_ptr,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_ob,
    stride_oh,
    stride_om,
    heads,
    length,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """delta = rowsum(dO * O), ``[batch, heads, length]`` without gaps."""
    blocks = tl.cdiv(length, BLOCK)
    first = tl.program_id(0) % blocks * BLOCK
    flat_head = tl.program_id(0) // blocks
    batch = flat_head // heads
    head = flat_head % heads
    grad_rows = _head(grad_ptr, batch, head, stride_gb, stride_gh)
    out_rows = _head(out_ptr, batch, head, stride_ob, stride_oh)
    grad = _load(grad_rows, first, length, stride_gm, DIM, BLOCK, BLOCK_DIM, False)
    out = _load(out_rows, first, length, stride_om, DIM, BLOCK, BLOCK_DIM, False)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), axis=1)
    row = first + tl.arange(0, BLOCK)
    tl.store(delta_ptr + flat_head.to(tl.int64) * length + row, delta, mask=row < length)


@triton.jit
def _gather_keys(
    q_rows,
    grad_rows,
    logsumexp_ptr,
    delta_ptr,
    k,
    v,
    dk,
    dv,
    begin,
    end,
    key,
    length_q,
    shift,
    stride_qm,
    stride_gm,
    stride_lm,
    scale,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Adds what the queries from `begin` to `end` give to a tile of dk and dv; all transposed."""
    for start in tl.range(begin, end, BLOCK_Q, num_stages=STAGES):
        q = _load(q_rows, start, length_q, stride_qm, DIM, BLOCK_Q, BLOCK_DIM, DESCRIBED)
        query = start + tl.arange(0, BLOCK_Q)
        in_length = query < length_q
        # Infinity: queries that are not there attend to nothing.
        lse = tl.load(logsumexp_ptr + query * stride_lm, mask=in_length, other=_INF)
        p = tl.exp2(tl.dot(k, q.T) * scale - lse[None, :] * 1.4426950408889634)
        if MASKED:
            p = tl.where(key[:, None] <= query[None, :] + shift, p, 0.0)
        grad = _load(grad_rows, start, length_q, stride_gm, DIM_V, BLOCK_Q, BLOCK_DIM_V, DESCRIBED)
        dv = tl.dot(p.to(grad.dtype), grad, dv)
        delta = tl.load(delta_ptr + query, mask=in_length, other=0.0)
        ds = p * (tl.dot(v, grad.T) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def _backward_keys_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    logsumexp_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_lb,
    stride_lh,
    stride_lm,
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
    heads,
    group,
    length_q,
    length_k,
    scale,
    grad_scale,
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """A program sums dk and dv of BLOCK_K keys of one key head, over all queries of its group."""
    blocks = tl.cdiv(length_k, BLOCK_K)
    first = tl.program_id(0) % blocks * BLOCK_K
    heads_k = heads // group
    batch = tl.program_id(0) // blocks // heads_k
    head_k = tl.program_id(0) // blocks % heads_k
    # Not by descriptor: one load each.
    k_rows = _head(k_ptr, batch, head_k, stride_kb, stride_kh)
    v_rows = _head(v_ptr, batch, head_k, stride_vb, stride_vh)
    k = _load(k_rows, first, length_k, stride_kn, DIM, BLOCK_K, BLOCK_DIM, False)
    v = _load(v_rows, first, length_k, stride_vn, DIM_V, BLOCK_K, BLOCK_DIM_V, False)
    key = first + tl.arange(0, BLOCK_K)
    shift = length_k - length_q
    begin = 0
    unmasked = 0
    if CAUSAL:
        begin = tl.maximum(0, first - shift) // BLOCK_Q * BLOCK_Q
        # From here on every query sees every key of the block.
        unmasked = tl.cdiv(tl.maximum(0, first + BLOCK_K - 1 - shift), BLOCK_Q) * BLOCK_Q
        unmasked = tl.minimum(unmasked, tl.cdiv(length_q, BLOCK_Q) * BLOCK_Q)
    dk = tl.zeros([BLOCK_K, BLOCK_DIM], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_DIM_V], tl.float32)
    for member in range(group):
        head = head_k * group + member
        flat_head = (batch * heads + head).to(tl.int64)
        q_rows = _rows(
            _head(q_ptr, batch, head, stride_qb, stride_qh),
            length_q, stride_qm, DIM, BLOCK_Q, BLOCK_DIM, DESCRIBED,
        )  # fmt: skip
        grad_rows = _rows(
            _head(grad_ptr, batch, head, stride_gb, stride_gh),
            length_q, stride_gm, DIM_V, BLOCK_Q, BLOCK_DIM_V, DESCRIBED,
        )  # fmt: skip
        lse_head = _head(logsumexp_ptr, batch, head, stride_lb, stride_lh)
        delta_head = delta_ptr + flat_head * length_q
        if CAUSAL:
            dk, dv = _gather_keys(
                q_rows, grad_rows, lse_head, delta_head, k, v, dk, dv, begin, unmasked,
                key, length_q, shift, stride_qm, stride_gm, stride_lm, scale,
                True, DIM, DIM_V, BLOCK_Q, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED,
            )  # fmt: skip
        dk, dv = _gather_keys(
            q_rows, grad_rows, lse_head, delta_head, k, v, dk, dv, unmasked, length_q,
            key, length_q, shift, stride_qm, stride_gm, stride_lm, scale,
            False, DIM, DIM_V, BLOCK_Q, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED,
        )  # fmt: skip
    dk = (dk * grad_scale).to(dk_ptr.dtype.element_ty)
    dv = dv.to(dv_ptr.dtype.element_ty)
    dk_rows = _head(dk_ptr, batch, head_k, stride_dkb, stride_dkh)
    dv_rows = _head(dv_ptr, batch, head_k, stride_dvb, stride_dvh)
    _store(dk_rows, dk, first, length_k, stride_dkn, DIM, BLOCK_K, BLOCK_DIM, False)
    _store(dv_rows, dv, first, length_k, stride_dvn, DIM_V, BLOCK_K, BLOCK_DIM_V, False)


@triton.jit
def _gather_queries(
    k_rows,
    v_rows,
    q,
    grad,
    lse,
    delta,
    dq,
    begin,
    end,
    query,
    length_k,
    shift,
    stride_kn,
    stride_vn,
    scale,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Adds what the keys from `begin` to `end` give to a tile of dq."""
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        # Keys that are not there are zeros, and add nothing.
        k = _load(k_rows, start, length_k, stride_kn, DIM, BLOCK_K, BLOCK_DIM, DESCRIBED)
        v = _load(v_rows, start, length_k, stride_vn, DIM_V, BLOCK_K, BLOCK_DIM_V, DESCRIBED)
        p = tl.exp2(tl.dot(q, k.T) * scale - lse[:, None])
        if MASKED:
            key = start + tl.arange(0, BLOCK_K)
            p = tl.where(key[None, :] <= query[:, None] + shift, p, 0.0)
        ds = p * (tl.dot(grad, v.T) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def _backward_queries_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    logsumexp_ptr,
    delta_ptr,
    dq_ptr,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_lb,
    stride_lh,
    stride_lm,
    stride_dqb,
    stride_dqh,
    stride_dqm,
    heads,
    group,
    length_q,
    length_k,
    scale,
    grad_scale,
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """A program sums dq of BLOCK_Q queries of one head, over all keys."""
    blocks = tl.cdiv(length_q, BLOCK_Q)
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest first
    flat_head = tl.program_id(0) // blocks
    batch = flat_head // heads
    head = flat_head % heads
    k_rows = _rows(
        _head(k_ptr, batch, head // group, stride_kb, stride_kh),
        length_k, stride_kn, DIM, BLOCK_K, BLOCK_DIM, DESCRIBED,
    )  # fmt: skip
    v_rows = _rows(
        _head(v_ptr, batch, head // group, stride_vb, stride_vh),
        length_k, stride_vn, DIM_V, BLOCK_K, BLOCK_DIM_V, DESCRIBED,
    )  # fmt: skip
    first = block * BLOCK_Q
    query = first + tl.arange(0, BLOCK_Q)
    in_length = query < length_q
    q_rows = _head(q_ptr, batch, head, stride_qb, stride_qh)
    grad_rows = _head(grad_ptr, batch, head, stride_gb, stride_gh)
    q = _load(q_rows, first, length_q, stride_qm, DIM, BLOCK_Q, BLOCK_DIM, False)
    grad = _load(grad_rows, first, length_q, stride_gm, DIM_V, BLOCK_Q, BLOCK_DIM_V, False)
    lse_ptrs = _head(logsumexp_ptr, batch, head, stride_lb, stride_lh) + query * stride_lm
    lse = tl.load(lse_ptrs, mask=in_length, other=_INF) * 1.4426950408889634
    delta_ptrs = delta_ptr + flat_head.to(tl.int64) * length_q + query
    delta = tl.load(delta_ptrs, mask=in_length, other=0.0)
    shift = length_k - length_q
    unmasked = length_k
    end = length_k
    if CAUSAL:
        end = tl.minimum(length_k, first + BLOCK_Q + shift)
        unmasked = tl.minimum(length_k, first + shift + 1) // BLOCK_K * BLOCK_K
    dq = tl.zeros([BLOCK_Q, BLOCK_DIM], tl.float32)
    dq = _gather_queries(
        k_rows, v_rows, q, grad, lse, delta, dq, 0, unmasked,
        query, length_k, shift, stride_kn, stride_vn, scale,
        False, DIM, DIM_V, BLOCK_K, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED,
    )  # fmt: skip
    if CAUSAL:
        dq = _gather_queries(
            k_rows, v_rows, q, grad, lse, delta, dq, unmasked, end,
            query, length_k, shift, stride_kn, stride_vn, scale,
            True, DIM, DIM_V, BLOCK_K, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED,
        )  # fmt: skip
    dq = (dq * grad_scale).to(dq_ptr.dtype.element_ty)
    dq_rows = _head(dq_ptr, batch, head, stride_dqb, stride_dqh)
    _store(dq_rows, dq, first, length_q, stride_dqm, DIM, BLOCK_Q, BLOCK_DIM, False)


# --------------------------------------------------------------------------------------------------
# Launches: which kernel, over which grid, with which tiles
# --------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Queries and keys a program holds at once, its warps, how many tiles deep it loads ahead, and
    whether by descriptors."""

    q: int
    k: int
    num_warps: int
    stages: int
    described: bool = False

    def constexprs(self) -> dict[str, Any]:
        return {
            "BLOCK_Q": self.q,
            "BLOCK_K": self.k,
            "STAGES": self.stages,
            "DESCRIBED": self.described,
        }


class Device(NamedTuple):
    """What of a device the tiles depend on."""

    major: int  # of its compute capability; 0 for the interpreter


# The smallest tile of a matrix product; heads of smaller dimension are padded with zeros.
_MIN_BLOCK_DIM = 16
# Above, a tile's sums leave no registers for anything else.
MAX_DIM = 128


# The tiles for Hopper are the fastest, or nearly, of those tried on an H200 in bfloat16 with 16384
# tokens of width 2048, 512 to 16384 long (scores of 64 x 32 to 128 x 128, 4 or 8 warps, 2 to 4
# stages, descriptors or loads). Where sequences are short, a head's descriptors take longer to make
# than they save. Elsewhere nothing was measured: these fit the shared memory of compute capability
# 8.0.


def _forward_tile(device: Device, dim: int, length_k: int) -> Tile:
    if device.major == 0:
        return Tile(32, 32, 4, 1)
    if device.major != 9:
        return Tile(128, 64, 4, 3) if dim <= 64 else Tile(64, 64, 4, 2)
    if dim <= 64:
        return Tile(64, 64, 4, 3) if length_k < 8192 else Tile(64, 128, 4, 3, True)
    return Tile(128, 64, 4, 2, True)


def _backward_keys_tile(device: Device, dim: int, length_q: int) -> Tile:
    if device.major == 0:
        return Tile(32, 32, 4, 1)
    if device.major != 9:
        return Tile(64, 64, 4, 2) if dim <= 64 else Tile(32, 64, 8, 2)
    if dim <= 64:
        return Tile(32 if length_q < 8192 else 64, 64, 4, 3, True)
    return Tile(64, 64, 4, 2, True)


def _backward_queries_tile(device: Device, dim: int, length_k: int, causal: bool) -> Tile:
    if device.major == 0:
        return Tile(32, 32, 4, 1)
    if device.major != 9:
        return Tile(64, 64, 4, 2) if dim <= 64 else Tile(64, 32, 8, 2)
    if dim <= 64:
        return Tile(128, 64, 8, 3) if length_k < 2048 else Tile(64, 64, 4, 3, True)
    return Tile(64, 32, 4, 3, True) if causal else Tile(128, 32, 8, 3, True)


def _block_dim(dim: int) -> int:
    return max(_MIN_BLOCK_DIM, 1 << (dim - 1).bit_length())


def _dims(q: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    dim, dim_v = q.shape[-1], v.shape[-1]
    return {
        "DIM": dim,
        "DIM_V": dim_v,
        "BLOCK_DIM": _block_dim(dim),
        "BLOCK_DIM_V": _block_dim(dim_v),
    }


def plan_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor | None,
    scale: float,
    causal: bool,
    device: Device,
) -> Launch:
    batch, heads, length_q, _ = q.shape
    _, heads_k, length_k, _ = k.shape
    dims = _dims(q, v)
    tile = _forward_tile(device, max(dims["DIM"], dims["DIM_V"]), length_k)
    strides = (t.stride()[:3] for t in (q, k, v, out))
    lse_stride = (0, 0, 0) if logsumexp is None else logsumexp.stride()
    return Launch(
        _forward_kernel,
        ceil_div(length_q, tile.q) * batch * heads,
        (
            q,
            k,
            v,
            out,
            logsumexp,
            *(s for stride in strides for s in stride),
            *lse_stride,
            heads,
            heads // heads_k,
            length_q,
            length_k,
            scale * _LOG2_E,
        ),
        {"CAUSAL": causal, **dims, **tile.constexprs()},
        tile.num_warps,
    )


_DELTA_ROWS = 64


def plan_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    causal: bool,
    device: Device,
) -> list[Launch]:
    """The launches of a backward, in the stream's order. delta is allocated here."""
    batch, heads, length_q, _ = q.shape
    _, heads_k, length_k, _ = k.shape
    dims = _dims(q, v)
    widest = max(dims["DIM"], dims["DIM_V"])
    delta = torch.empty((batch, heads, length_q), dtype=torch.float32, device=q.device)
    delta_launch = Launch(
        _delta_kernel,
        ceil_div(length_q, _DELTA_ROWS) * batch * heads,
        (
            grad_out,
            out,
            delta,
            *grad_out.stride()[:3],
            *out.stride()[:3],
            heads,
            length_q,
        ),
        {"DIM": dims["DIM_V"], "BLOCK": _DELTA_ROWS, "BLOCK_DIM": dims["BLOCK_DIM_V"]},
        4,
    )
    inputs = (grad_out, q, k, v)
    strides = (*(s for t in inputs for s in t.stride()[:3]), *logsumexp.stride())
    sizes = (heads, heads // heads_k, length_q, length_k, scale * _LOG2_E, scale)
    tile = _backward_keys_tile(device, widest, length_q)
    keys = Launch(
        _backward_keys_kernel,
        ceil_div(length_k, tile.k) * batch * heads_k,
        (*inputs, logsumexp, delta, dk, dv, *strides, *dk.stride()[:3], *dv.stride()[:3], *sizes),
        {"CAUSAL": causal, **dims, **tile.constexprs()},
        tile.num_warps,
    )
    tile = _backward_queries_tile(device, widest, length_k, causal)
    queries = Launch(
        _backward_queries_kernel,
        ceil_div(length_q, tile.q) * batch * heads,
        (*inputs, logsumexp, delta, dq, *strides, *dq.stride()[:3], *sizes),
        {"CAUSAL": causal, **dims, **tile.constexprs()},
        tile.num_warps,
    )
    return [delta_launch, keys, queries]


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


@functools.cache
def _device(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(0)
    return Device(torch.cuda.get_device_capability(device)[0])


def _allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for a launch's descriptors. Triton asks for it on the current device and stream."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _run(launches: list[Launch]) -> None:
    triton.set_allocator(_allocate)
    for launch in launches:
        launch()


def _launch(launches: list[Launch]) -> None:
    # In a context of its own: the allocator is a context variable, and the user's is theirs.
    contextvars.copy_context().run(_run, launches)


def _expect_positive(scale: float) -> None:
    if not scale > 0 or math.isinf(scale):
        raise ValueError(f"attention: scale must be positive and finite, not {scale}")


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> None:
    """Writes ``softmax(scale * q @ k.T) @ v`` to `out`, and the scores' logsumexp.

    Args:
        q: ``[batch, heads, length_q, dim]``, of one dtype with `k`, `v` and `out`: float16 or
            bfloat16 (in the interpreter float16 or float32). The last dimension is contiguous, on
            Hopper everything else a multiple of 16 bytes apart.
        k: ``[batch, heads_k, length_k, dim]``; `heads_k` divides `heads`.
        v: ``[batch, heads_k, length_k, dim_v]``.
        out: ``[batch, heads, length_q, dim_v]``.
        logsumexp: ``[batch, heads, length_q]``, float32, natural logarithm; None where unwanted.
        scale: of the scores; positive.
        causal: whether query i sees key j only where ``j <= i + length_k - length_q``. Every query
            has to see one: ``length_q <= length_k``.
    """
    _expect_positive(scale)
    _launch([plan_forward(q, k, v, out, logsumexp, scale, causal, _device(q.device))])


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    causal: bool,
) -> None:
    """Writes the gradients of `forward` to `dq`, `dk` and `dv`: the same bits on every run."""
    _expect_positive(scale)
    device = _device(q.device)
    _launch(plan_backward(grad_out, q, k, v, out, logsumexp, dq, dk, dv, scale, causal, device))
