"""The forward of attention in Triton; `triton_kernels` says what it computes."""

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
    HEADER,
    INF,
    LOG2_E,
    LOWEST,
    NO_BIAS,
    fast_exp,
    head_at,
    head_rows,
    keys_seen,
    largest_norm,
    load_bias,
    load_rows,
    norms_of,
    row_stride,
    store_attended,
    tiles_listed,
)

__all__ = ["forward_kernel"]


@triton.jit
def _attend(
    q,
    k_rows,
    v_rows,
    bias_ptr,
    entries_ptr,
    out,
    top,
    total,
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
    """Takes the keys from `begin` to `end` into a tile's output, maximum and sum.

    With a list of tiles `begin` and `end` are places in it. ADDED: the bias is not 0 there.
    """
    STEP: tl.constexpr = BLOCK_K if entries_ptr is None else 1
    for at in tl.range(begin, end, STEP, num_stages=STAGES):
        start = at
        if entries_ptr is not None:
            start = tl.load(entries_ptr + at) * BLOCK_K
        k = load_factor(
            k_rows, start, length_k, stride_kn, DIM, BLOCK_K, BLOCK_DIM, DESCRIBED, SPLIT
        )
        scores = product_transposed(q, k, PRECISION, SPLIT)
        key = (start + tl.arange(0, BLOCK_K))[None, :]
        if BIAS != NO_BIAS and ADDED:
            scores = scores * scale + load_bias(
                bias_ptr, query[:, None], key, length_q, length_k,
                stride_sm, stride_sn, BIAS, MASKED,
            )  # fmt: skip
        if MASKED:
            keep = key < length_k
            if CAUSAL:
                keep = keep & (key <= query[:, None] + shift)
            scores = tl.where(keep, scores, -INF)
        if BIAS == NO_BIAS:
            new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
            p = tl.exp2(scores * scale - new_top[:, None])
            shrink = tl.exp2(top - new_top)
        elif ADDED:
            # Not in powers of two: the lowest float, which stands for -inf in some models' masks,
            # would become -inf, and rows of nothing else would attend to nothing.
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            # Of a row that has seen -inf alone. -inf - -inf would be NaN.
            base = tl.where(new_top == -INF, 0.0, new_top)
            p = fast_exp(scores - base[:, None])
            shrink = fast_exp(top - base)
        else:
            new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
            base = tl.where(new_top == -INF, 0.0, new_top)
            if PRECISION == "tf32":
                # One instruction an element in place of three. Products are rounded apart, which
                # results in 16 bits hide.
                p = tl.exp2(scores * (scale * LOG2_E) - (base * LOG2_E)[:, None])
            else:
                p = fast_exp(scores * scale - base[:, None])
            shrink = fast_exp(top - base)
        total = total * shrink + tl.sum(p, axis=1)
        out = out * shrink[:, None]
        top = new_top
        v = load_factor(
            v_rows, start, length_k, stride_vn, DIM_V, BLOCK_K, BLOCK_DIM_V, DESCRIBED, SPLIT
        )
        out = product(p, v, out, PRECISION, SPLIT)
    return out, top, total


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    logsumexp_ptr,
    bias_ptr,
    tiles_ptr,
    norms_ptr,
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
    stride_tb,
    stride_tm,
    heads,
    group,
    length_q,
    length_k,
    scale,
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
    """A program computes BLOCK_Q rows of one head. Without a bias `scale` is in powers of two."""
    UNIT_K: tl.constexpr = PART_UNIT if SPLIT else UNIT
    stride_qm = row_stride(stride_qm, UNIT, FAR)
    stride_kn = row_stride(stride_kn, UNIT_K, FAR)
    stride_vn = row_stride(stride_vn, UNIT_K, FAR)
    stride_om = row_stride(stride_om, UNIT, FAR)
    stride_sm = multiple_of(stride_sm, UNIT_BIAS)
    blocks = tl.cdiv(length_q, BLOCK_Q)
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest first
    batch = tl.program_id(0) // blocks // heads
    head = tl.program_id(0) // blocks % heads
    q_rows = head_rows(
        head_at(q_ptr, batch, head, stride_qb, stride_qh, UNIT),
        length_q, stride_qm, DIM, BLOCK_Q, BLOCK_DIM, DESCRIBED,
    )  # fmt: skip
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
    loaded = load_rows(q_rows, first, length_q, stride_qm, DIM, BLOCK_Q, BLOCK_DIM, DESCRIBED)
    q = parts_of(loaded, SPLIT)

    bias_head = bias_ptr
    if BIAS != NO_BIAS:
        bias_head = head_at(bias_ptr, batch, head, stride_sb, stride_sh, UNIT_BIAS)
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
    out = tl.zeros([BLOCK_Q, BLOCK_DIM_V], tl.float32)
    top = tl.full([BLOCK_Q], LOWEST if BIAS == NO_BIAS else -INF, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    out, top, total = _attend(
        q, k_rows, v_rows, bias_head, None, out, top, total, seen, unmasked,
        query, length_q, length_k, shift, stride_kn, stride_vn, stride_sm, stride_sn, scale,
        False, CAUSAL, BIAS, tiles_ptr is None,
        DIM, DIM_V, BLOCK_K, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
    )  # fmt: skip
    out, top, total = _attend(
        q, k_rows, v_rows, bias_head, entries_ptr, out, top, total, begin, end,
        query, length_q, length_k, shift, stride_kn, stride_vn, stride_sm, stride_sn, scale,
        True, CAUSAL, BIAS, True,
        DIM, DIM_V, BLOCK_K, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
    )  # fmt: skip

    out_rows = head_at(out_ptr, batch, head, stride_ob, stride_oh, UNIT)
    lse_head = logsumexp_ptr
    if logsumexp_ptr is not None:
        lse_head = head_at(logsumexp_ptr, batch, head, stride_lb, stride_lh)
    store_attended(
        out_rows, lse_head, out, top, total, first, length_q, stride_om, stride_lm,
        BIAS, DIM_V, BLOCK_Q, BLOCK_DIM_V,
    )  # fmt: skip
