"""Attention in Triton over few keys; `triton_kernels` says what it computes.

A program holds all keys and values of a head, and walks over queries. In the forward a row's
maximum is known before any exponential is taken, and nothing is scaled down. The backward is one
kernel with 5 matrix products: dQ needs no other program's part, and dO and O are there for D.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opgraft_kernels.rows import multiple_of

from .triton_tiles import (
    INF,
    LOWEST,
    NO_BIAS,
    head_at,
    load_bias,
    load_rows,
    probabilities,
    row_stride,
    store_attended,
    store_rows,
)

__all__ = ["short_backward_kernel", "short_forward_kernel"]

# Rows of a tile from which Hopper's matrix product takes it from the left. Lower ones are the right
# factor, and the product is the transposed one.
_LOWEST_TILE = tl.constexpr(64)


@triton.jit
def _scores(q, k, length_k, FIRST: tl.constexpr, KEYS: tl.constexpr, IS_LAST: tl.constexpr):
    """Of KEYS keys from FIRST on, not scaled yet; -inf where there is no key."""
    scores = tl.dot(q, k.T)
    if IS_LAST:
        key = (FIRST + tl.arange(0, KEYS))[None, :]
        scores = tl.where(key < length_k, scores, -INF)
    return scores


@triton.jit
def short_forward_kernel(
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
    tiles,
    scale,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    KEYS: tl.constexpr,
    MORE: tl.constexpr,
    STAGES: tl.constexpr,
    UNIT: tl.constexpr,
    FAR: tl.constexpr,
):
    """A program computes up to `tiles` tiles of BLOCK_Q rows of one head.

    A block's size is a power of two: keys are held in one of KEYS and, unless it is 0, one of MORE.
    `scale` is in powers of two.
    """
    stride_qm = row_stride(stride_qm, UNIT, FAR)
    stride_kn = row_stride(stride_kn, UNIT, FAR)
    stride_vn = row_stride(stride_vn, UNIT, FAR)
    stride_om = row_stride(stride_om, UNIT, FAR)
    runs = tl.cdiv(length_q, BLOCK_Q * tiles)
    run = tl.program_id(0) % runs
    batch = tl.program_id(0) // runs // heads
    head = tl.program_id(0) // runs % heads
    q_rows = head_at(q_ptr, batch, head, stride_qb, stride_qh, UNIT)
    k_rows = head_at(k_ptr, batch, head // group, stride_kb, stride_kh, UNIT)
    v_rows = head_at(v_ptr, batch, head // group, stride_vb, stride_vh, UNIT)
    out_rows = head_at(out_ptr, batch, head, stride_ob, stride_oh, UNIT)
    lse_head = logsumexp_ptr
    if logsumexp_ptr is not None:
        lse_head = head_at(logsumexp_ptr, batch, head, stride_lb, stride_lh)
    k = load_rows(k_rows, 0, length_k, stride_kn, DIM, KEYS, BLOCK_DIM, False)
    v = load_rows(v_rows, 0, length_k, stride_vn, DIM_V, KEYS, BLOCK_DIM_V, False)
    if MORE:
        k_1 = load_rows(k_rows, KEYS, length_k, stride_kn, DIM, MORE, BLOCK_DIM, False)
        v_1 = load_rows(v_rows, KEYS, length_k, stride_vn, DIM_V, MORE, BLOCK_DIM_V, False)
    begin = run * tiles * BLOCK_Q
    end = tl.minimum(begin + tiles * BLOCK_Q, length_q)
    for first in tl.range(begin, end, BLOCK_Q, num_stages=STAGES):
        q = load_rows(q_rows, first, length_q, stride_qm, DIM, BLOCK_Q, BLOCK_DIM, False)
        scores = _scores(q, k, length_k, 0, KEYS, MORE == 0)
        top = tl.max(scores, axis=1)
        if MORE:
            scores_1 = _scores(q, k_1, length_k, KEYS, MORE, True)
            top = tl.maximum(top, tl.max(scores_1, axis=1))
        # As where tiles of keys follow each other, a row of -inf alone attends to nothing.
        top = tl.maximum(top * scale, LOWEST)
        p = tl.exp2(scores * scale - top[:, None])
        total = tl.sum(p, axis=1)
        out = tl.dot(p.to(v.dtype), v)
        if MORE:
            p_1 = tl.exp2(scores_1 * scale - top[:, None])
            total += tl.sum(p_1, axis=1)
            out = tl.dot(p_1.to(v.dtype), v_1, out)
        store_attended(
            out_rows, lse_head, out, top, total, first, length_q, stride_om, stride_lm,
            NO_BIAS, DIM_V, BLOCK_Q, BLOCK_DIM_V,
        )  # fmt: skip


@triton.jit
def _gradients(
    q,
    grad,
    k,
    v,
    bias_ptr,
    dbias_ptr,
    lse,
    delta,
    query,
    length_q,
    length_k,
    shift,
    stride_sm,
    stride_sn,
    stride_dsm,
    scale,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
):
    """P and dS, both transposed; writes dbias."""
    key = tl.arange(0, KEYS)[:, None]
    bias = 0.0
    if BIAS != NO_BIAS:
        bias = load_bias(
            bias_ptr, query[None, :], key, length_q, length_k, stride_sm, stride_sn, BIAS, True
        )
    p = probabilities(tl.dot(k, q.T), bias, lse[None, :], scale, BIAS)
    # Keys that are not there are zeros, but where all scores are low exp(0 - L) is inf.
    keep = key < length_k
    if CAUSAL:
        keep = keep & (key <= query[None, :] + shift)
    p = tl.where(keep, p, 0.0)
    ds = p * (tl.dot(v, grad.T) - delta[None, :])
    if dbias_ptr is not None:
        ptrs = dbias_ptr + query.to(tl.int64)[None, :] * stride_dsm + key
        there = (query < length_q)[None, :] & (key < length_k)
        tl.store(ptrs, ds.to(dbias_ptr.dtype.element_ty), mask=there)
    return p.to(q.dtype), ds.to(q.dtype)


@triton.jit
def short_backward_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    logsumexp_ptr,
    bias_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dbias_ptr,
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
    stride_ob,
    stride_oh,
    stride_om,
    stride_lb,
    stride_lh,
    stride_lm,
    stride_sb,
    stride_sh,
    stride_sm,
    stride_sn,
    stride_dqb,
    stride_dqh,
    stride_dqm,
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
    stride_dsm,
    heads,
    group,
    length_q,
    length_k,
    scale,
    grad_scale,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    UNIT: tl.constexpr,
    FAR: tl.constexpr,
    UNIT_BIAS: tl.constexpr,
):
    """A program computes all gradients of one key head, and of the query heads of its group."""
    stride_gm = row_stride(stride_gm, UNIT, FAR)
    stride_qm = row_stride(stride_qm, UNIT, FAR)
    stride_kn = row_stride(stride_kn, UNIT, FAR)
    stride_vn = row_stride(stride_vn, UNIT, FAR)
    stride_om = row_stride(stride_om, UNIT, FAR)
    stride_sm = multiple_of(stride_sm, UNIT_BIAS)
    stride_dqm = row_stride(stride_dqm, UNIT, FAR)
    stride_dkn = row_stride(stride_dkn, UNIT, FAR)
    stride_dvn = row_stride(stride_dvn, UNIT, FAR)
    heads_k = heads // group
    batch = tl.program_id(0) // heads_k
    head_k = tl.program_id(0) % heads_k
    k_rows = head_at(k_ptr, batch, head_k, stride_kb, stride_kh, UNIT)
    v_rows = head_at(v_ptr, batch, head_k, stride_vb, stride_vh, UNIT)
    k = load_rows(k_rows, 0, length_k, stride_kn, DIM, KEYS, BLOCK_DIM, False)
    v = load_rows(v_rows, 0, length_k, stride_vn, DIM_V, KEYS, BLOCK_DIM_V, False)
    dk = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_DIM_V], tl.float32)
    shift = length_k - length_q
    for member in range(group):
        head = head_k * group + member
        q_rows = head_at(q_ptr, batch, head, stride_qb, stride_qh, UNIT)
        grad_rows = head_at(grad_ptr, batch, head, stride_gb, stride_gh, UNIT)
        out_rows = head_at(out_ptr, batch, head, stride_ob, stride_oh, UNIT)
        dq_rows = head_at(dq_ptr, batch, head, stride_dqb, stride_dqh, UNIT)
        lse_head = head_at(logsumexp_ptr, batch, head, stride_lb, stride_lh)
        bias_head = bias_ptr
        if BIAS != NO_BIAS:
            bias_head = head_at(bias_ptr, batch, head, stride_sb, stride_sh, UNIT_BIAS)
        dbias_head = dbias_ptr
        if dbias_ptr is not None:
            flat_head = (batch * heads + head).to(tl.int64)
            dbias_head = dbias_ptr + flat_head * length_q * stride_dsm
        for first in tl.range(0, length_q, BLOCK_Q, num_stages=STAGES):
            q = load_rows(q_rows, first, length_q, stride_qm, DIM, BLOCK_Q, BLOCK_DIM, False)
            grad = load_rows(
                grad_rows, first, length_q, stride_gm, DIM_V, BLOCK_Q, BLOCK_DIM_V, False
            )
            out = load_rows(
                out_rows, first, length_q, stride_om, DIM_V, BLOCK_Q, BLOCK_DIM_V, False
            )
            delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), axis=1)
            query = first + tl.arange(0, BLOCK_Q)
            # Infinity: queries that are not there attend to nothing.
            lse = tl.load(lse_head + query * stride_lm, mask=query < length_q, other=INF)
            p, ds = _gradients(
                q, grad, k, v, bias_head, dbias_head, lse, delta, query, length_q, length_k, shift,
                stride_sm, stride_sn, stride_dsm, scale, KEYS, CAUSAL, BIAS,
            )  # fmt: skip
            dv = tl.dot(p, grad, dv)
            dk = tl.dot(ds, q, dk)
            if BLOCK_Q < _LOWEST_TILE:
                dq = tl.dot(k.T, ds).T
            else:
                dq = tl.dot(ds.T, k)
            dq = (dq * grad_scale).to(dq_ptr.dtype.element_ty)
            store_rows(dq_rows, dq, first, length_q, stride_dqm, DIM, BLOCK_Q, BLOCK_DIM)
    dk_rows = head_at(dk_ptr, batch, head_k, stride_dkb, stride_dkh, UNIT)
    dv_rows = head_at(dv_ptr, batch, head_k, stride_dvb, stride_dvh, UNIT)
    dk = (dk * grad_scale).to(dk_ptr.dtype.element_ty)
    dv = dv.to(dv_ptr.dtype.element_ty)
    store_rows(dk_rows, dk, 0, length_k, stride_dkn, DIM, KEYS, BLOCK_DIM)
    store_rows(dv_rows, dv, 0, length_k, stride_dvn, DIM_V, KEYS, BLOCK_DIM_V)
