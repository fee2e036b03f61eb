"""The backward of attention in Triton; `triton_kernels` says what it computes."""

from __future__ import annotations

import triton
import triton.language as tl

from opgraft_kernels.rows import begin_program

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
    bias_at,
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
    row_of_tiles,
    rows_of,
    store_rows,
    tiles_listed,
)

__all__ = ["backward_keys_kernel", "backward_queries_kernel", "delta_kernel"]


@triton.jit
def delta_kernel(
    grad,
    out,
    delta_ptr,
    heads,
    length,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    FAR: tl.constexpr,
    EARLY: tl.constexpr,
):
    """delta = rowsum(dO * O), ``[batch, heads, length]`` without gaps."""
    begin_program(EARLY)
    blocks = tl.cdiv(length, BLOCK)
    first = tl.program_id(0) % blocks * BLOCK
    flat_head = tl.program_id(0) // blocks
    batch = flat_head // heads
    head = flat_head % heads
    grad_rows = rows_of(grad, batch, head, UNIT, FAR)
    out_rows = rows_of(out, batch, head, UNIT, FAR)
    of_grad = load_rows(grad_rows, first, length, DIM, BLOCK, BLOCK_DIM, False)
    of_out = load_rows(out_rows, first, length, DIM, BLOCK, BLOCK_DIM, False)
    delta = tl.sum(of_grad.to(tl.float32) * of_out.to(tl.float32), axis=1)
    row = first + tl.arange(0, BLOCK)
    tl.store(delta_ptr + flat_head.to(tl.int64) * length + row, delta, mask=row < length)


@triton.jit
def _gather_keys(
    q_rows,
    grad_rows,
    lse_rows,
    delta_ptr,
    bias,
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
        q = load_factor(q_rows, start, length_q, DIM, BLOCK_Q, BLOCK_DIM, DESCRIBED, SPLIT)
        query = start + tl.arange(0, BLOCK_Q)
        in_length = query < length_q
        # Infinity: queries that are not there attend to nothing.
        lse = tl.load(lse_rows[0] + query * lse_rows[1], mask=in_length, other=INF)
        added = 0.0
        if BIAS != NO_BIAS and ADDED:
            added = load_bias(bias, query[None, :], key[:, None], length_q, length_k, BIAS, True)
        scores = product_transposed(k, q, PRECISION, SPLIT)
        p = probabilities(scores, added, lse[None, :], scale, BIAS)
        if MASKED:
            p = tl.where(key[:, None] <= query[None, :] + shift, p, 0.0)
        grad = load_factor(
            grad_rows, start, length_q, DIM_V, BLOCK_Q, BLOCK_DIM_V, DESCRIBED, SPLIT
        )
        dv = product(p, grad, dv, PRECISION, SPLIT)
        delta = tl.load(delta_ptr + query, mask=in_length, other=0.0)
        ds = p * (product_transposed(v, grad, PRECISION, SPLIT) - delta[None, :])
        dk = product(ds, q, dk, PRECISION, SPLIT)
    return dk, dv


@triton.jit
def _least_logsumexp(lse_rows, begin, end, BLOCK: tl.constexpr = 512):
    least = tl.full([], INF, tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=1):
        query = start + tl.arange(0, BLOCK)
        found = least_logsumexp(lse_rows[0] + query * lse_rows[1], query < end, 0)
        least = tl.minimum(least, found)
    return least


@triton.jit
def backward_keys_kernel(
    grad,
    q,
    k,
    v,
    logsumexp,
    delta_ptr,
    bias,
    tiles,
    norms_ptr,
    dk,
    dv,
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
    EARLY: tl.constexpr,
):
    """A program sums dk and dv of BLOCK_K keys of one key head, over all queries of its group."""
    begin_program(EARLY)
    blocks = tl.cdiv(length_k, BLOCK_K)
    first = tl.program_id(0) % blocks * BLOCK_K
    heads_k = heads // group
    batch = tl.program_id(0) // blocks // heads_k
    head_k = tl.program_id(0) // blocks % heads_k
    # Not by descriptor: one load each.
    k_rows = rows_of(k, batch, head_k, UNIT, FAR)
    v_rows = rows_of(v, batch, head_k, UNIT, FAR)
    of_k = load_rows(k_rows, first, length_k, DIM, BLOCK_K, BLOCK_DIM, False)
    of_v = load_rows(v_rows, first, length_k, DIM_V, BLOCK_K, BLOCK_DIM_V, False)
    norm = 0.0
    if norms_ptr is not None:
        norm = tl.max(norms_of(of_k), axis=0)
    of_k, of_v = parts_of(of_k, SPLIT), parts_of(of_v, SPLIT)
    key = first + tl.arange(0, BLOCK_K)
    shift = length_k - length_q
    begin = 0
    unmasked = 0
    end = length_q
    entries_ptr = None
    if tiles is not None:
        entries_ptr = row_of_tiles(tiles, batch, tl.program_id(0) % blocks)
        zeros, zeros_end, end = tiles_listed(entries_ptr, None)
        entries_ptr += HEADER
    if CAUSAL:
        begin = tl.maximum(0, first - shift) // BLOCK_Q * BLOCK_Q
        # From here on every query sees every key of the block.
        unmasked = tl.cdiv(tl.maximum(0, first + BLOCK_K - 1 - shift), BLOCK_Q) * BLOCK_Q
        unmasked = tl.minimum(unmasked, tl.cdiv(length_q, BLOCK_Q) * BLOCK_Q)
    sum_k = tl.zeros([BLOCK_K, BLOCK_DIM], tl.float32)
    sum_v = tl.zeros([BLOCK_K, BLOCK_DIM_V], tl.float32)
    UNIT_Q: tl.constexpr = PART_UNIT if SPLIT else UNIT
    rows = factor_rows(length_q, SPLIT)
    for member in range(group):
        head = head_k * group + member
        flat_head = (batch * heads + head).to(tl.int64)
        q_rows = head_rows(q, batch, head, rows, DIM, BLOCK_Q, BLOCK_DIM, UNIT_Q, FAR, DESCRIBED)
        grad_rows = head_rows(
            grad, batch, head, rows, DIM_V, BLOCK_Q, BLOCK_DIM_V, UNIT_Q, FAR, DESCRIBED
        )
        lse_rows = rows_of(logsumexp, batch, head, 1, False)
        delta_head = delta_ptr + flat_head * length_q
        bias_head = None
        last = end
        if BIAS != NO_BIAS:
            bias_head = bias_at(bias, batch, head, UNIT_BIAS)
        if BIAS == BY_KEY:
            own_bias = head_at(bias, batch, head, UNIT_BIAS)
            own_ptrs = own_bias + key.to(tl.int64) * bias.stride_key
            own = tl.load(own_ptrs, mask=key < length_k, other=-INF).to(tl.float32)
            last = tl.where(tl.sum((own != -INF).to(tl.int32), axis=0) == 0, unmasked, end)
            if norms_ptr is not None:
                is_low = tl.sum((own <= LOW).to(tl.int32), axis=0) == BLOCK_K
                least = _least_logsumexp(lse_rows, 0, tl.where(is_low, last, 0))
                largest = norm * largest_norm(norms_ptr, flat_head, SPLITS) * scale
                last = tl.where(is_low & (largest + LOW - least < NOTHING_BELOW), unmasked, last)
        if CAUSAL:
            sum_k, sum_v = _gather_keys(
                q_rows, grad_rows, lse_rows, delta_head, bias_head, None,
                of_k, of_v, sum_k, sum_v, begin, unmasked, key, length_q, length_k, shift,
                scale, True, BIAS, True,
                DIM, DIM_V, BLOCK_Q, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
            )  # fmt: skip
        if tiles is not None:
            sum_k, sum_v = _gather_keys(
                q_rows, grad_rows, lse_rows, delta_head, bias_head, None,
                of_k, of_v, sum_k, sum_v, zeros * BLOCK_Q, zeros_end * BLOCK_Q, key,
                length_q, length_k, shift, scale, False, BIAS, False,
                DIM, DIM_V, BLOCK_Q, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
            )  # fmt: skip
        if tiles is not None:
            largest = norm * largest_norm(norms_ptr, flat_head, SPLITS) * scale
            last = low_tiles_end(entries_ptr, lse_rows, largest, length_q, BLOCK_Q)
        sum_k, sum_v = _gather_keys(
            q_rows, grad_rows, lse_rows, delta_head, bias_head, entries_ptr,
            of_k, of_v, sum_k, sum_v, unmasked, last, key, length_q, length_k, shift,
            scale, False, BIAS, True,
            DIM, DIM_V, BLOCK_Q, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
        )  # fmt: skip
    sum_k = (sum_k * grad_scale).to(dk.ptr.dtype.element_ty)
    sum_v = sum_v.to(dv.ptr.dtype.element_ty)
    dk_rows = rows_of(dk, batch, head_k, UNIT, FAR)
    dv_rows = rows_of(dv, batch, head_k, UNIT, FAR)
    store_rows(dk_rows, sum_k, first, length_k, DIM, BLOCK_K, BLOCK_DIM)
    store_rows(dv_rows, sum_v, first, length_k, DIM_V, BLOCK_K, BLOCK_DIM_V)


@triton.jit
def _gather_queries(
    k_rows,
    v_rows,
    bias,
    dbias_rows,
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
        k = load_factor(k_rows, start, length_k, DIM, BLOCK_K, BLOCK_DIM, DESCRIBED, SPLIT)
        v = load_factor(v_rows, start, length_k, DIM_V, BLOCK_K, BLOCK_DIM_V, DESCRIBED, SPLIT)
        key = (start + tl.arange(0, BLOCK_K))[None, :]
        added = 0.0
        if BIAS != NO_BIAS and ADDED:
            added = load_bias(bias, query[:, None], key, length_q, length_k, BIAS, MASKED)
        scores = product_transposed(q, k, PRECISION, SPLIT)
        p = probabilities(scores, added, lse[:, None], scale, BIAS)
        if MASKED:
            # Keys that are not there are zeros, but where all scores are low exp(0 - L) is inf.
            keep = key < length_k
            if CAUSAL:
                keep = keep & (key <= query[:, None] + shift)
            p = tl.where(keep, p, 0.0)
        ds = p * (product_transposed(grad, v, PRECISION, SPLIT) - delta[:, None])
        if dbias_rows is not None:
            ptrs = dbias_rows[0] + query.to(tl.int64)[:, None] * dbias_rows[1] + key
            there = (query < length_q)[:, None] & (key < length_k)
            tl.store(ptrs, ds.to(dbias_rows[0].dtype.element_ty), mask=there)
        dq = product(ds, k, dq, PRECISION, SPLIT)
    return dq


@triton.jit
def backward_queries_kernel(
    grad,
    q,
    k,
    v,
    logsumexp,
    delta_ptr,
    bias,
    tiles,
    norms_ptr,
    dq,
    dbias,
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
    EARLY: tl.constexpr,
):
    """A program sums dq of BLOCK_Q queries of one head, over all keys.

    HAS_TAIL: the keys are no multiple of BLOCK_K.
    """
    begin_program(EARLY)
    blocks = tl.cdiv(length_q, BLOCK_Q)
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest first
    flat_head = tl.program_id(0) // blocks
    batch = flat_head // heads
    head = flat_head % heads
    UNIT_K: tl.constexpr = PART_UNIT if SPLIT else UNIT
    rows = factor_rows(length_k, SPLIT)
    k_rows = head_rows(
        k, batch, head // group, rows, DIM, BLOCK_K, BLOCK_DIM, UNIT_K, FAR, DESCRIBED
    )
    v_rows = head_rows(
        v, batch, head // group, rows, DIM_V, BLOCK_K, BLOCK_DIM_V, UNIT_K, FAR, DESCRIBED
    )
    first = block * BLOCK_Q
    query = first + tl.arange(0, BLOCK_Q)
    in_length = query < length_q
    q_rows = rows_of(q, batch, head, UNIT, FAR)
    grad_rows = rows_of(grad, batch, head, UNIT, FAR)
    whole = load_rows(q_rows, first, length_q, DIM, BLOCK_Q, BLOCK_DIM, False)
    of_grad = load_rows(grad_rows, first, length_q, DIM_V, BLOCK_Q, BLOCK_DIM_V, False)
    of_q, of_grad = parts_of(whole, SPLIT), parts_of(of_grad, SPLIT)
    lse_rows = rows_of(logsumexp, batch, head, 1, False)
    lse = tl.load(lse_rows[0] + query * lse_rows[1], mask=in_length, other=INF)
    delta_ptrs = delta_ptr + flat_head.to(tl.int64) * length_q + query
    delta = tl.load(delta_ptrs, mask=in_length, other=0.0)
    bias_head = None
    if BIAS != NO_BIAS:
        bias_head = bias_at(bias, batch, head, UNIT_BIAS)
    dbias_rows = None
    if dbias is not None:
        dbias_rows = rows_of(dbias, batch, head, 1, False)
    shift = length_k - length_q
    entries_ptr = None
    if tiles is not None:
        entries_ptr = row_of_tiles(tiles, batch, block)
        flat_head_k = batch * (heads // group) + head // group
        largest = largest_norm(norms_ptr, flat_head_k, SPLITS)
        seen, unmasked, end = tiles_listed(entries_ptr, norms_of(whole) * largest * scale)
        seen *= BLOCK_K
        unmasked *= BLOCK_K
        begin = 0
        entries_ptr += HEADER
    else:
        seen = 0
        unmasked, end = keys_seen(first, length_k, shift, CAUSAL, BLOCK_Q, BLOCK_K)
        begin = unmasked
    sum_q = tl.zeros([BLOCK_Q, BLOCK_DIM], tl.float32)
    sum_q = _gather_queries(
        k_rows, v_rows, bias_head, dbias_rows, None, of_q, of_grad, lse, delta, sum_q,
        seen, unmasked, query, length_q, length_k, shift, scale,
        False, CAUSAL, BIAS, tiles is None,
        DIM, DIM_V, BLOCK_K, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
    )  # fmt: skip
    if CAUSAL or HAS_TAIL or tiles is not None:
        sum_q = _gather_queries(
            k_rows, v_rows, bias_head, dbias_rows, entries_ptr, of_q, of_grad, lse, delta, sum_q,
            begin, end, query, length_q, length_k, shift, scale,
            True, CAUSAL, BIAS, True,
            DIM, DIM_V, BLOCK_K, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
        )  # fmt: skip
    sum_q = (sum_q * grad_scale).to(dq.ptr.dtype.element_ty)
    dq_rows = rows_of(dq, batch, head, UNIT, FAR)
    store_rows(dq_rows, sum_q, first, length_q, DIM, BLOCK_Q, BLOCK_DIM)
