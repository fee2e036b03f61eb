"""The backward of attention in Triton; `triton_kernels` says what it computes."""

from __future__ import annotations

import triton
import triton.language as tl

from opgraft_kernels.rows import multiple_of

from .triton_parts import (
    PART_UNIT,
    factor_rows,
    load_factor,
    parts_of,
    product,
    product_transposed,
)
from .triton_tiles import (
    BY_KEY,
    HEADER,
    INF,
    LOW,
    NO_BIAS,
    NOTHING_BELOW,
    head_at,
    head_rows,
    keys_seen,
    largest_norm,
    least_logsumexp,
    load_bias,
    load_rows,
    low_tiles_end,
    norms_of,
    probabilities,
    row_stride,
    store_rows,
    tiles_listed,
)

__all__ = ["backward_keys_kernel", "backward_queries_kernel", "delta_kernel"]


@triton.jit
def delta_kernel(
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
    UNIT: tl.constexpr,
    FAR: tl.constexpr,
):
    """delta = rowsum(dO * O), ``[batch, heads, length]`` without gaps."""
    stride_gm = row_stride(stride_gm, UNIT, FAR)
    stride_om = row_stride(stride_om, UNIT, FAR)
    blocks = tl.cdiv(length, BLOCK)
    first = tl.program_id(0) % blocks * BLOCK
    flat_head = tl.program_id(0) // blocks
    batch = flat_head // heads
    head = flat_head % heads
    grad_rows = head_at(grad_ptr, batch, head, stride_gb, stride_gh, UNIT)
    out_rows = head_at(out_ptr, batch, head, stride_ob, stride_oh, UNIT)
    grad = load_rows(grad_rows, first, length, stride_gm, DIM, BLOCK, BLOCK_DIM, False)
    out = load_rows(out_rows, first, length, stride_om, DIM, BLOCK, BLOCK_DIM, False)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), axis=1)
    row = first + tl.arange(0, BLOCK)
    tl.store(delta_ptr + flat_head.to(tl.int64) * length + row, delta, mask=row < length)


@triton.jit
def _gather_keys(
    q_rows,
    grad_rows,
    logsumexp_ptr,
    delta_ptr,
    bias_ptr,
    entries_ptr,
    k,
    v,
    dk,
    dv,
    begin,
    end,
    key,
    length_q,
    length_k,
    shift,
    stride_qm,
    stride_gm,
    stride_lm,
    stride_sm,
    stride_sn,
    scale,
    MASKED: tl.constexpr,
    BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds what the queries from `begin` to `end` give to a tile of dk and dv; all transposed.

    With a list of tiles, `begin` and `end` are places in it. ADDED: the bias is not 0 there.
    """
    STEP: tl.constexpr = BLOCK_Q if entries_ptr is None else 1
    for at in tl.range(begin, end, STEP, num_stages=STAGES):
        start = at
        if entries_ptr is not None:
            start = tl.load(entries_ptr + at) * BLOCK_Q
        q = load_factor(
            q_rows, start, length_q, stride_qm, DIM, BLOCK_Q, BLOCK_DIM, DESCRIBED, SPLIT
        )
        query = start + tl.arange(0, BLOCK_Q)
        in_length = query < length_q
        # Infinity: queries that are not there attend to nothing.
        lse = tl.load(logsumexp_ptr + query * stride_lm, mask=in_length, other=INF)
        bias = 0.0
        if BIAS != NO_BIAS and ADDED:
            bias = load_bias(
                bias_ptr, query[None, :], key[:, None], length_q, length_k,
                stride_sm, stride_sn, BIAS, True,
            )  # fmt: skip
        scores = product_transposed(k, q, PRECISION, SPLIT)
        p = probabilities(scores, bias, lse[None, :], scale, BIAS)
        if MASKED:
            p = tl.where(key[:, None] <= query[None, :] + shift, p, 0.0)
        grad = load_factor(
            grad_rows, start, length_q, stride_gm, DIM_V, BLOCK_Q, BLOCK_DIM_V, DESCRIBED, SPLIT
        )
        dv = product(p, grad, dv, PRECISION, SPLIT)
        delta = tl.load(delta_ptr + query, mask=in_length, other=0.0)
        ds = p * (product_transposed(v, grad, PRECISION, SPLIT) - delta[None, :])
        dk = product(ds, q, dk, PRECISION, SPLIT)
    return dk, dv


@triton.jit
def _least_logsumexp(logsumexp_ptr, begin, end, stride_lm, BLOCK: tl.constexpr = 512):
    least = tl.full([], INF, tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=1):
        query = start + tl.arange(0, BLOCK)
        found = least_logsumexp(logsumexp_ptr + query * stride_lm, query < end, 0)
        least = tl.minimum(least, found)
    return least


@triton.jit
def backward_keys_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    logsumexp_ptr,
    delta_ptr,
    bias_ptr,
    tiles_ptr,
    norms_ptr,
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
    stride_sb,
    stride_sh,
    stride_sm,
    stride_sn,
    stride_tb,
    stride_tn,
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
    BIAS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,
    FAR: tl.constexpr,
    UNIT_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program sums dk and dv of BLOCK_K keys of one key head, over all queries of its group."""
    UNIT_Q: tl.constexpr = PART_UNIT if SPLIT else UNIT
    stride_gm = row_stride(stride_gm, UNIT_Q, FAR)
    stride_qm = row_stride(stride_qm, UNIT_Q, FAR)
    stride_kn = row_stride(stride_kn, UNIT, FAR)
    stride_vn = row_stride(stride_vn, UNIT, FAR)
    stride_sm = multiple_of(stride_sm, UNIT_BIAS)
    stride_dkn = row_stride(stride_dkn, UNIT, FAR)
    stride_dvn = row_stride(stride_dvn, UNIT, FAR)
    blocks = tl.cdiv(length_k, BLOCK_K)
    first = tl.program_id(0) % blocks * BLOCK_K
    heads_k = heads // group
    batch = tl.program_id(0) // blocks // heads_k
    head_k = tl.program_id(0) // blocks % heads_k
    # Not by descriptor: one load each.
    k_rows = head_at(k_ptr, batch, head_k, stride_kb, stride_kh, UNIT)
    v_rows = head_at(v_ptr, batch, head_k, stride_vb, stride_vh, UNIT)
    k = load_rows(k_rows, first, length_k, stride_kn, DIM, BLOCK_K, BLOCK_DIM, False)
    v = load_rows(v_rows, first, length_k, stride_vn, DIM_V, BLOCK_K, BLOCK_DIM_V, False)
    norm = 0.0
    if norms_ptr is not None:
        norm = tl.max(norms_of(k), axis=0)
    k, v = parts_of(k, SPLIT), parts_of(v, SPLIT)
    key = first + tl.arange(0, BLOCK_K)
    shift = length_k - length_q
    begin = 0
    unmasked = 0
    end = length_q
    entries_ptr = None
    if tiles_ptr is not None:
        entries_ptr = head_at(tiles_ptr, batch, tl.program_id(0) % blocks, stride_tb, stride_tn)
        zeros, zeros_end, end = tiles_listed(entries_ptr, None)
        entries_ptr += HEADER
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
        q_rows = head_rows(
            head_at(q_ptr, batch, head, stride_qb, stride_qh, UNIT_Q),
            factor_rows(length_q, SPLIT), stride_qm, DIM, BLOCK_Q, BLOCK_DIM, DESCRIBED,
        )  # fmt: skip
        grad_rows = head_rows(
            head_at(grad_ptr, batch, head, stride_gb, stride_gh, UNIT_Q),
            factor_rows(length_q, SPLIT), stride_gm, DIM_V, BLOCK_Q, BLOCK_DIM_V, DESCRIBED,
        )  # fmt: skip
        lse_head = head_at(logsumexp_ptr, batch, head, stride_lb, stride_lh)
        delta_head = delta_ptr + flat_head * length_q
        bias_head = bias_ptr
        last = end
        if BIAS != NO_BIAS:
            bias_head = head_at(bias_ptr, batch, head, stride_sb, stride_sh, UNIT_BIAS)
        if BIAS == BY_KEY:
            own_ptrs = bias_head + key.to(tl.int64) * stride_sn
            own = tl.load(own_ptrs, mask=key < length_k, other=-INF).to(tl.float32)
            last = tl.where(tl.sum((own != -INF).to(tl.int32), axis=0) == 0, unmasked, end)
            if norms_ptr is not None:
                is_low = tl.sum((own <= LOW).to(tl.int32), axis=0) == BLOCK_K
                least = _least_logsumexp(lse_head, 0, tl.where(is_low, last, 0), stride_lm)
                largest = norm * largest_norm(norms_ptr, flat_head, SPLITS) * scale
                last = tl.where(is_low & (largest + LOW - least < NOTHING_BELOW), unmasked, last)
        if CAUSAL:
            dk, dv = _gather_keys(
                q_rows, grad_rows, lse_head, delta_head, bias_head, None,
                k, v, dk, dv, begin, unmasked, key, length_q, length_k, shift,
                stride_qm, stride_gm, stride_lm, stride_sm, stride_sn, scale, True, BIAS, True,
                DIM, DIM_V, BLOCK_Q, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
            )  # fmt: skip
        if tiles_ptr is not None:
            dk, dv = _gather_keys(
                q_rows, grad_rows, lse_head, delta_head, bias_head, None,
                k, v, dk, dv, zeros * BLOCK_Q, zeros_end * BLOCK_Q, key, length_q, length_k, shift,
                stride_qm, stride_gm, stride_lm, stride_sm, stride_sn, scale, False, BIAS, False,
                DIM, DIM_V, BLOCK_Q, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
            )  # fmt: skip
        if tiles_ptr is not None:
            largest = norm * largest_norm(norms_ptr, flat_head, SPLITS) * scale
            last = low_tiles_end(entries_ptr, lse_head, largest, length_q, stride_lm, BLOCK_Q)
        dk, dv = _gather_keys(
            q_rows, grad_rows, lse_head, delta_head, bias_head, entries_ptr,
            k, v, dk, dv, unmasked, last, key, length_q, length_k, shift,
            stride_qm, stride_gm, stride_lm, stride_sm, stride_sn, scale, False, BIAS, True,
            DIM, DIM_V, BLOCK_Q, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
        )  # fmt: skip
    dk = (dk * grad_scale).to(dk_ptr.dtype.element_ty)
    dv = dv.to(dv_ptr.dtype.element_ty)
    dk_rows = head_at(dk_ptr, batch, head_k, stride_dkb, stride_dkh, UNIT)
    dv_rows = head_at(dv_ptr, batch, head_k, stride_dvb, stride_dvh, UNIT)
    store_rows(dk_rows, dk, first, length_k, stride_dkn, DIM, BLOCK_K, BLOCK_DIM)
    store_rows(dv_rows, dv, first, length_k, stride_dvn, DIM_V, BLOCK_K, BLOCK_DIM_V)


@triton.jit
def _gather_queries(
    k_rows,
    v_rows,
    bias_ptr,
    dbias_ptr,
    entries_ptr,
    q,
    grad,
    lse,
    delta,
    dq,
    begin,
    end,
    query,
    length_q,
    length_k,
    shift,
    stride_kn,
    stride_vn,
    stride_sm,
    stride_sn,
    stride_dsm,
    scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds what the keys from `begin` to `end` give to a tile of dq, and writes their dbias.

    With a list of tiles, `begin` and `end` are places in it. ADDED: the bias is not 0 there.
    """
    STEP: tl.constexpr = BLOCK_K if entries_ptr is None else 1
    for at in tl.range(begin, end, STEP, num_stages=STAGES):
        start = at
        if entries_ptr is not None:
            start = tl.load(entries_ptr + at) * BLOCK_K
        k = load_factor(
            k_rows, start, length_k, stride_kn, DIM, BLOCK_K, BLOCK_DIM, DESCRIBED, SPLIT
        )
        v = load_factor(
            v_rows, start, length_k, stride_vn, DIM_V, BLOCK_K, BLOCK_DIM_V, DESCRIBED, SPLIT
        )
        key = (start + tl.arange(0, BLOCK_K))[None, :]
        bias = 0.0
        if BIAS != NO_BIAS and ADDED:
            bias = load_bias(
                bias_ptr, query[:, None], key, length_q, length_k,
                stride_sm, stride_sn, BIAS, MASKED,
            )  # fmt: skip
        scores = product_transposed(q, k, PRECISION, SPLIT)
        p = probabilities(scores, bias, lse[:, None], scale, BIAS)
        if MASKED:
            # Keys that are not there are zeros, but where all scores are low exp(0 - L) is inf.
            keep = key < length_k
            if CAUSAL:
                keep = keep & (key <= query[:, None] + shift)
            p = tl.where(keep, p, 0.0)
        ds = p * (product_transposed(grad, v, PRECISION, SPLIT) - delta[:, None])
        if dbias_ptr is not None:
            ptrs = dbias_ptr + query.to(tl.int64)[:, None] * stride_dsm + key
            there = (query < length_q)[:, None] & (key < length_k)
            tl.store(ptrs, ds.to(dbias_ptr.dtype.element_ty), mask=there)
        dq = product(ds, k, dq, PRECISION, SPLIT)
    return dq


@triton.jit
def backward_queries_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    logsumexp_ptr,
    delta_ptr,
    bias_ptr,
    tiles_ptr,
    norms_ptr,
    dq_ptr,
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
    stride_lb,
    stride_lh,
    stride_lm,
    stride_sb,
    stride_sh,
    stride_sm,
    stride_sn,
    stride_tb,
    stride_tm,
    stride_dqb,
    stride_dqh,
    stride_dqm,
    stride_dsm,
    heads,
    group,
    length_q,
    length_k,
    scale,
    grad_scale,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,
    FAR: tl.constexpr,
    UNIT_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program sums dq of BLOCK_Q queries of one head, over all keys.

    HAS_TAIL: the keys are no multiple of BLOCK_K.
    """
    UNIT_K: tl.constexpr = PART_UNIT if SPLIT else UNIT
    stride_gm = row_stride(stride_gm, UNIT, FAR)
    stride_qm = row_stride(stride_qm, UNIT, FAR)
    stride_kn = row_stride(stride_kn, UNIT_K, FAR)
    stride_vn = row_stride(stride_vn, UNIT_K, FAR)
    stride_sm = multiple_of(stride_sm, UNIT_BIAS)
    stride_dqm = row_stride(stride_dqm, UNIT, FAR)
    blocks = tl.cdiv(length_q, BLOCK_Q)
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest first
    flat_head = tl.program_id(0) // blocks
    batch = flat_head // heads
    head = flat_head % heads
    k_rows = head_rows(
        head_at(k_ptr, batch, head // group, stride_kb, stride_kh, UNIT_K),
        factor_rows(length_k, SPLIT), stride_kn, DIM, BLOCK_K, BLOCK_DIM, DESCRIBED,
    )  # fmt: skip
    v_rows = head_rows(
        head_at(v_ptr, batch, head // group, stride_vb, stride_vh, UNIT_K),
        factor_rows(length_k, SPLIT), stride_vn, DIM_V, BLOCK_K, BLOCK_DIM_V, DESCRIBED,
    )  # fmt: skip
    first = block * BLOCK_Q
    query = first + tl.arange(0, BLOCK_Q)
    in_length = query < length_q
    q_rows = head_at(q_ptr, batch, head, stride_qb, stride_qh, UNIT)
    grad_rows = head_at(grad_ptr, batch, head, stride_gb, stride_gh, UNIT)
    loaded = load_rows(q_rows, first, length_q, stride_qm, DIM, BLOCK_Q, BLOCK_DIM, False)
    grad = load_rows(grad_rows, first, length_q, stride_gm, DIM_V, BLOCK_Q, BLOCK_DIM_V, False)
    q, grad = parts_of(loaded, SPLIT), parts_of(grad, SPLIT)
    lse_ptrs = head_at(logsumexp_ptr, batch, head, stride_lb, stride_lh) + query * stride_lm
    lse = tl.load(lse_ptrs, mask=in_length, other=INF)
    delta_ptrs = delta_ptr + flat_head.to(tl.int64) * length_q + query
    delta = tl.load(delta_ptrs, mask=in_length, other=0.0)
    bias_head = bias_ptr
    if BIAS != NO_BIAS:
        bias_head = head_at(bias_ptr, batch, head, stride_sb, stride_sh, UNIT_BIAS)
    dbias_head = dbias_ptr
    if dbias_ptr is not None:
        dbias_head = dbias_ptr + flat_head.to(tl.int64) * length_q * stride_dsm
    shift = length_k - length_q
    entries_ptr = None
    if tiles_ptr is not None:
        entries_ptr = head_at(tiles_ptr, batch, block, stride_tb, stride_tm)
        flat_head_k = batch * (heads // group) + head // group
        largest = largest_norm(norms_ptr, flat_head_k, SPLITS)
        seen, unmasked, end = tiles_listed(entries_ptr, norms_of(loaded) * largest * scale)
        seen *= BLOCK_K
        unmasked *= BLOCK_K
        begin = 0
        entries_ptr += HEADER
    else:
        seen = 0
        unmasked, end = keys_seen(first, length_k, shift, CAUSAL, BLOCK_Q, BLOCK_K)
        begin = unmasked
    dq = tl.zeros([BLOCK_Q, BLOCK_DIM], tl.float32)
    dq = _gather_queries(
        k_rows, v_rows, bias_head, dbias_head, None, q, grad, lse, delta, dq, seen, unmasked,
        query, length_q, length_k, shift, stride_kn, stride_vn, stride_sm, stride_sn,
        stride_dsm, scale,
        False, CAUSAL, BIAS, tiles_ptr is None,
        DIM, DIM_V, BLOCK_K, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
    )  # fmt: skip
    if CAUSAL or HAS_TAIL or tiles_ptr is not None:
        dq = _gather_queries(
            k_rows, v_rows, bias_head, dbias_head, entries_ptr, q, grad, lse, delta, dq, begin, end,
            query, length_q, length_k, shift, stride_kn, stride_vn, stride_sm, stride_sn,
            stride_dsm, scale,
            True, CAUSAL, BIAS, True,
            DIM, DIM_V, BLOCK_K, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
        )  # fmt: skip
    dq = (dq * grad_scale).to(dq_ptr.dtype.element_ty)
    dq_rows = head_at(dq_ptr, batch, head, stride_dqb, stride_dqh, UNIT)
    store_rows(dq_rows, dq, first, length_q, stride_dqm, DIM, BLOCK_Q, BLOCK_DIM)
