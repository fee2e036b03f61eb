"""Attention in Triton over few keys; `triton_kernels` says what it computes.

A program holds all keys and values of a head, and walks over queries. In the forward a row's
maximum is known before any exponential is taken, and nothing is scaled down. The backward is one
kernel with 5 matrix products: dQ needs no other program's part, and dO and O are there for D.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opgraft_kernels.rows import begin_program

from .triton_tiles import (
    INF,
    LOWEST,
    NO_BIAS,
    bias_at,
    load_bias,
    load_rows,
    probabilities,
    rows_of,
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
    q,
    k,
    v,
    out,
    logsumexp,
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
    EARLY: tl.constexpr,
):
    """A program computes up to `tiles` tiles of BLOCK_Q rows of one head.

    A block's size is a power of two: keys are held in one of KEYS and, unless it is 0, one of MORE.
    `scale` is in powers of two.
    """
    begin_program(EARLY)
    runs = tl.cdiv(length_q, BLOCK_Q * tiles)
    run = tl.program_id(0) % runs
    batch = tl.program_id(0) // runs // heads
    head = tl.program_id(0) // runs % heads
    q_rows = rows_of(q, batch, head, UNIT, FAR)
    k_rows = rows_of(k, batch, head // group, UNIT, FAR)
    v_rows = rows_of(v, batch, head // group, UNIT, FAR)
    out_rows = rows_of(out, batch, head, UNIT, FAR)
    lse_rows = None
    if logsumexp is not None:
        lse_rows = rows_of(logsumexp, batch, head, 1, False)
    k_0 = load_rows(k_rows, 0, length_k, DIM, KEYS, BLOCK_DIM, False)
    v_0 = load_rows(v_rows, 0, length_k, DIM_V, KEYS, BLOCK_DIM_V, False)
    if MORE:
        k_1 = load_rows(k_rows, KEYS, length_k, DIM, MORE, BLOCK_DIM, False)
        v_1 = load_rows(v_rows, KEYS, length_k, DIM_V, MORE, BLOCK_DIM_V, False)
    begin = run * tiles * BLOCK_Q
    end = tl.minimum(begin + tiles * BLOCK_Q, length_q)
    for first in tl.range(begin, end, BLOCK_Q, num_stages=STAGES):
        of_q = load_rows(q_rows, first, length_q, DIM, BLOCK_Q, BLOCK_DIM, False)
        scores = _scores(of_q, k_0, length_k, 0, KEYS, MORE == 0)
        top = tl.max(scores, axis=1)
        if MORE:
            scores_1 = _scores(of_q, k_1, length_k, KEYS, MORE, True)
            top = tl.maximum(top, tl.max(scores_1, axis=1))
        # As where tiles of keys follow each other, a row of -inf alone attends to nothing.
        top = tl.maximum(top * scale, LOWEST)
        p = tl.exp2(scores * scale - top[:, None])
        total = tl.sum(p, axis=1)
        values = tl.dot(p.to(v_0.dtype), v_0)
        if MORE:
            p_1 = tl.exp2(scores_1 * scale - top[:, None])
            total += tl.sum(p_1, axis=1)
            values = tl.dot(p_1.to(v_1.dtype), v_1, values)
        store_attended(
            out_rows, lse_rows, values, top, total, first, length_q,
            NO_BIAS, DIM_V, BLOCK_Q, BLOCK_DIM_V,
        )  # fmt: skip


@triton.jit
def _gradients(
    q,
    grad,
    k,
    v,
    bias,
    dbias_rows,
    lse,
    delta,
    query,
    length_q,
    length_k,
    shift,
    scale,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
):
    """P and dS, both transposed; writes dbias."""
    key = tl.arange(0, KEYS)[:, None]
    added = 0.0
    if BIAS != NO_BIAS:
        added = load_bias(bias, query[None, :], key, length_q, length_k, BIAS, True)
    p = probabilities(tl.dot(k, q.T), added, lse[None, :], scale, BIAS)
    # Keys that are not there are zeros, but where all scores are low exp(0 - L) is inf.
    keep = key < length_k
    if CAUSAL:
        keep = keep & (key <= query[None, :] + shift)
    p = tl.where(keep, p, 0.0)
    ds = p * (tl.dot(v, grad.T) - delta[None, :])
    if dbias_rows is not None:
        ptrs = dbias_rows[0] + query.to(tl.int64)[None, :] * dbias_rows[1] + key
        there = (query < length_q)[None, :] & (key < length_k)
        tl.store(ptrs, ds.to(dbias_rows[0].dtype.element_ty), mask=there)
    return p.to(q.dtype), ds.to(q.dtype)


@triton.jit
def short_backward_kernel(
    grad,
    q,
    k,
    v,
    out,
    logsumexp,
    bias,
    dq,
    dk,
    dv,
    dbias,
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
    EARLY: tl.constexpr,
):
    """A program computes all gradients of one key head, and of the query heads of its group."""
    begin_program(EARLY)
    heads_k = heads // group
    batch = tl.program_id(0) // heads_k
    head_k = tl.program_id(0) % heads_k
    k_rows = rows_of(k, batch, head_k, UNIT, FAR)
    v_rows = rows_of(v, batch, head_k, UNIT, FAR)
    of_k = load_rows(k_rows, 0, length_k, DIM, KEYS, BLOCK_DIM, False)
    of_v = load_rows(v_rows, 0, length_k, DIM_V, KEYS, BLOCK_DIM_V, False)
    sum_k = tl.zeros([KEYS, BLOCK_DIM], tl.float32)
    sum_v = tl.zeros([KEYS, BLOCK_DIM_V], tl.float32)
    shift = length_k - length_q
    for member in range(group):
        head = head_k * group + member
        q_rows = rows_of(q, batch, head, UNIT, FAR)
        grad_rows = rows_of(grad, batch, head, UNIT, FAR)
        out_rows = rows_of(out, batch, head, UNIT, FAR)
        dq_rows = rows_of(dq, batch, head, UNIT, FAR)
        lse_rows = rows_of(logsumexp, batch, head, 1, False)
        bias_head = None
        if BIAS != NO_BIAS:
            bias_head = bias_at(bias, batch, head, UNIT_BIAS)
        dbias_rows = None
        if dbias is not None:
            dbias_rows = rows_of(dbias, batch, head, 1, False)
        for first in tl.range(0, length_q, BLOCK_Q, num_stages=STAGES):
            of_q = load_rows(q_rows, first, length_q, DIM, BLOCK_Q, BLOCK_DIM, False)
            of_grad = load_rows(grad_rows, first, length_q, DIM_V, BLOCK_Q, BLOCK_DIM_V, False)
            of_out = load_rows(out_rows, first, length_q, DIM_V, BLOCK_Q, BLOCK_DIM_V, False)
            delta = tl.sum(of_grad.to(tl.float32) * of_out.to(tl.float32), axis=1)
            query = first + tl.arange(0, BLOCK_Q)
            # Infinity: queries that are not there attend to nothing.
            lse = tl.load(lse_rows[0] + query * lse_rows[1], mask=query < length_q, other=INF)
            p, ds = _gradients(
                of_q, of_grad, of_k, of_v, bias_head, dbias_rows, lse, delta, query,
                length_q, length_k, shift, scale, KEYS, CAUSAL, BIAS,
            )  # fmt: skip
            sum_v = tl.dot(p, of_grad, sum_v)
            sum_k = tl.dot(ds, of_q, sum_k)
            if BLOCK_Q < _LOWEST_TILE:
                of_dq = tl.dot(of_k.T, ds).T
            else:
                of_dq = tl.dot(ds.T, of_k)
            of_dq = (of_dq * grad_scale).to(dq.ptr.dtype.element_ty)
            store_rows(dq_rows, of_dq, first, length_q, DIM, BLOCK_Q, BLOCK_DIM)
    dk_rows = rows_of(dk, batch, head_k, UNIT, FAR)
    dv_rows = rows_of(dv, batch, head_k, UNIT, FAR)
    sum_k = (sum_k * grad_scale).to(dk.ptr.dtype.element_ty)
    sum_v = sum_v.to(dv.ptr.dtype.element_ty)
    store_rows(dk_rows, sum_k, 0, length_k, DIM, KEYS, BLOCK_DIM)
    store_rows(dv_rows, sum_v, 0, length_k, DIM_V, KEYS, BLOCK_DIM_V)
