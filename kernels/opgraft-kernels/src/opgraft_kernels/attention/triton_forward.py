"""The forward of attention in Triton; `triton_kernels` says what it computes."""

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
    HEADER,
    INF,
    LOG2_E,
    LOWEST,
    NO_BIAS,
    bias_at,
    fast_exp,
    head_rows,
    keys_seen,
    largest_norm,
    load_bias,
    load_rows,
    norms_of,
    row_of_tiles,
    rows_of,
    store_attended,
    tiles_listed,
)

__all__ = ["forward_kernel"]


@triton.jit
def _attend(
    q,
    k_rows,
    v_rows,
    bias,
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
        k = load_factor(k_rows, start, length_k, DIM, BLOCK_K, BLOCK_DIM, DESCRIBED, SPLIT)
        scores = product_transposed(q, k, PRECISION, SPLIT)
        key = (start + tl.arange(0, BLOCK_K))[None, :]
        if BIAS != NO_BIAS and ADDED:
            scores = scores * scale + load_bias(
                bias, query[:, None], key, length_q, length_k, BIAS, MASKED
            )
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
        v = load_factor(v_rows, start, length_k, DIM_V, BLOCK_K, BLOCK_DIM_V, DESCRIBED, SPLIT)
        out = product(p, v, out, PRECISION, SPLIT)
    return out, top, total


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
    logsumexp,
    bias,
    tiles,
    norms_ptr,
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
    EARLY: tl.constexpr,
):
    """A program computes BLOCK_Q rows of one head. Without a bias `scale` is in powers of two."""
    begin_program(EARLY)
    blocks = tl.cdiv(length_q, BLOCK_Q)
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest first
    batch = tl.program_id(0) // blocks // heads
    head = tl.program_id(0) // blocks % heads
    UNIT_K: tl.constexpr = PART_UNIT if SPLIT else UNIT
    q_rows = head_rows(q, batch, head, length_q, DIM, BLOCK_Q, BLOCK_DIM, UNIT, FAR, DESCRIBED)
    rows = factor_rows(length_k, SPLIT)
    k_rows = head_rows(
        k, batch, head // group, rows, DIM, BLOCK_K, BLOCK_DIM, UNIT_K, FAR, DESCRIBED
    )
    v_rows = head_rows(
        v, batch, head // group, rows, DIM_V, BLOCK_K, BLOCK_DIM_V, UNIT_K, FAR, DESCRIBED
    )
    first = block * BLOCK_Q
    query = first + tl.arange(0, BLOCK_Q)
    whole = load_rows(q_rows, first, length_q, DIM, BLOCK_Q, BLOCK_DIM, DESCRIBED)
    of_queries = parts_of(whole, SPLIT)

    bias_head = None
    if BIAS != NO_BIAS:
        bias_head = bias_at(bias, batch, head, UNIT_BIAS)
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
    values = tl.zeros([BLOCK_Q, BLOCK_DIM_V], tl.float32)
    top = tl.full([BLOCK_Q], LOWEST if BIAS == NO_BIAS else -INF, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    values, top, total = _attend(
        of_queries, k_rows, v_rows, bias_head, None, values, top, total, seen, unmasked,
        query, length_q, length_k, shift, scale,
        False, CAUSAL, BIAS, tiles is None,
        DIM, DIM_V, BLOCK_K, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
    )  # fmt: skip
    values, top, total = _attend(
        of_queries, k_rows, v_rows, bias_head, entries_ptr, values, top, total, begin, end,
        query, length_q, length_k, shift, scale,
        True, CAUSAL, BIAS, True,
        DIM, DIM_V, BLOCK_K, BLOCK_DIM, BLOCK_DIM_V, STAGES, DESCRIBED, SPLIT, PRECISION,
    )  # fmt: skip

    out_rows = rows_of(out, batch, head, UNIT, FAR)
    lse_rows = None
    if logsumexp is not None:
        lse_rows = rows_of(logsumexp, batch, head, 1, False)
    store_attended(
        out_rows, lse_rows, values, top, total, first, length_q, BIAS, DIM_V, BLOCK_Q, BLOCK_DIM_V
    )
