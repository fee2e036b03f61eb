"""Attention by FlashAttention-4's CuteDSL kernels for Hopper (the package ``flash-attn-4``).

The kernels are the library's; what is here is their launch. The library's own front takes the host
more than twice as long, most of it for features that SDPA does not have. Here the kernel classes
are compiled once for each kind of call, by `cutedsl_functions`, behind functions that take the
tensors as ATen has them, ``[batch, heads, length, dim]`` in any strides, so that no view is made
for a call; and a whole backward, three to five kernels, is one such function. What is left of a
call is a dictionary lookup and a call through tvm-ffi. Nothing here imports CuteDSL or the library:
a compiled function is loaded from the disk where it was compiled before.

Causal is aligned at the bottom right, as in the library: with lengths that differ, the last query
sees every key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opgraft import cutedsl_utils, lazy
from opgraft_kernels.attention.cutedsl_tiles import (
    ForwardTile,
    ShortTile,
    biased_forward_tile,
    dense_forward_tile,
    dense_forward_tiles,
    forward_tile,
    listed_backward_tile,
    short_backward_fits,
    short_backward_tile,
)
from opgraft_kernels.devices import multiprocessors
from opgraft_kernels.integers import round_up

if TYPE_CHECKING:
    from opgraft_kernels.attention.triton_lists import Lists

__all__ = [
    "BackwardTile",
    "Kind",
    "backward",
    "backward_varlen",
    "forward",
    "forward_varlen",
]


class BiasKind(NamedTuple):
    """What of an additive mask of the scores a compiled function is for."""

    dtype: torch.dtype
    is_by_key: bool  # all queries share it
    in_pairs: bool  # two of its elements can be read at once, from an even key on
    is_dense: bool = False  # each head has its own, which the copy engine reads


class Kind(NamedTuple):
    """What one compiled function is for. Strides are not in it, nor sizes but by the tile."""

    is_forward: bool
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    group: int  # query heads that share a key head
    causal: bool
    has_logsumexp: bool
    is_varlen: bool
    # Of a forward by programs that walk over tiles; otherwise the library's.
    tile: ForwardTile | None = None
    bias: BiasKind | None = None
    # Of a backward of short sequences, of which a program computes whole heads.
    short: ShortTile | None = None


class BackwardTile(NamedTuple):
    """The sizes of a backward's tiles that its temporaries depend on."""

    q: int
    k: int
    dim: int
    dim_v: int


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------

_functions = cutedsl_utils.Functions(
    lazy("opgraft_kernels.attention.cutedsl_functions:compile_kind")
)


def _tile(kind: Kind, device: torch.device) -> BackwardTile:
    return BackwardTile(*_functions.facts(kind, device))


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor | None,
    scale: float,
    causal: bool,
    bias: torch.Tensor | None = None,
    lowest: float | None = None,
) -> None:
    """Writes ``softmax(scale * q @ k.T + bias) @ v`` to `out`, and the scores' logsumexp.

    Args:
        q: ``[batch, heads, length_q, dim]``, float16 or bfloat16, as `k`, `v` and `out` are; the
            last dimension contiguous, everything else a multiple of 16 bytes apart.
        k: ``[batch, heads_k, length_k, dim]``; `heads_k` divides `heads`.
        v: ``[batch, heads_k, length_k, dim_v]``.
        out: ``[batch, heads, length_q, dim_v]``.
        logsumexp: ``[batch, heads, length_q]``, float32, natural logarithm; None where unwanted.
        scale: of the scores; above 0, as scores of no key are -inf before they are scaled.
        causal: whether query i sees key j only where ``j <= i + length_k - length_q``; not beside
            a bias.
        bias: ``[batch, heads, length_q, length_k]``, of the inputs' dtype or float32, its last
            dimension contiguous, the same for all heads, the others of any strides, 0 where it is
            broadcast; None for 0. A query whose scores are all -inf gets an output of 0, and a
            logsumexp of inf. Or a boolean mask, laid out likewise, of the keys that each query
            attends to. Or of each head's own: of the inputs' dtype, heads of up to 128, and laid
            out as they are, where batches may share it.
        lowest: of a boolean mask, what is added to the scores where it is False. It counts for
            queries that attend to no key: others get nothing of a tile that is False throughout.
    """
    batch, heads, queries, head_dim = q.shape
    _, heads_k, keys, head_dim_v = v.shape
    kind = Kind(
        True,
        q.dtype,
        head_dim,
        head_dim_v,
        heads // heads_k,
        causal,
        logsumexp is not None,
        False,
    )
    dim, programs = max(head_dim, head_dim_v), multiprocessors(q.device)
    if bias is None:
        tile = forward_tile(dim, kind.group, causal, batch * heads_k, queries, keys, programs)
        _functions(kind._replace(tile=tile), q.device)(q, k, v, out, logsumexp, scale)
        return
    if _is_of_each_head(bias):
        kind = kind._replace(bias=_dense_kind(bias, q))
        kind = kind._replace(tile=dense_forward_tile(dim, batch * heads, queries, programs))
        _functions(kind, q.device)(q, k, v, out, logsumexp, bias, scale)
        return
    tile = biased_forward_tile(dim, bias.stride(2) == 0, batch * heads, queries, programs)
    kind = kind._replace(tile=tile, bias=_bias_kind(bias))
    if lowest is None:
        lists = _written(_plan_lists(bias, q, k, scale, tile.queries, tile.keys))
        given: tuple[Any, ...] = bias, lists.tiles, 0.0
    else:
        lists = _written(_plan_boolean_lists(bias, tile.queries, tile.keys, lowest))
        # To scores that are not scaled yet.
        given = lists.bits, lists.tiles, lowest / scale
    _functions(kind, q.device)(q, k, v, out, logsumexp, *given, scale)


def _is_of_each_head(bias: torch.Tensor) -> bool:
    return bias.shape[1] > 1 and bias.stride(1) != 0


def _dense_kind(bias: torch.Tensor, q: torch.Tensor) -> BiasKind:
    """Of a bias of each head's own.

    Raises:
        ValueError: there are no kernels for it.
    """
    beginnings = (bias.data_ptr(), *(n * bias.element_size() for n in bias.stride()[:3]))
    is_aligned = bias.stride(3) == 1 and all(n % _COPIED == 0 for n in beginnings)
    if not is_aligned or bias.dtype != q.dtype or not dense_forward_tiles(q.shape[3], 0):
        raise ValueError("the copy engine cannot read a bias of each head's own that is so")
    return BiasKind(bias.dtype, False, True, is_dense=True)


def _bias_kind(bias: torch.Tensor) -> BiasKind:
    beginnings = (*bias.stride()[:3], bias.data_ptr() // bias.element_size(), bias.shape[3])
    return BiasKind(
        bias.dtype,
        is_by_key=bias.stride(2) == 0,
        in_pairs=bias.dtype is torch.bool or all(n % 2 == 0 for n in beginnings),
    )


# The copy engine reads so many bytes at a time.
_COPIED = 16
# Triton's, which no other kernel here needs.
_plan_lists = lazy("opgraft_kernels.attention.triton_lists:plan_lists")
_plan_boolean_lists = lazy("opgraft_kernels.attention.triton_lists:plan_boolean_lists")


def _written(lists: Lists) -> Lists:
    """Lists of tiles, which their launches write on the stream."""
    for launch in lists.launches:
        launch()
    return lists


def forward_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_q: torch.Tensor,
    cum_k: torch.Tensor,
    scale: float,
    causal: bool,
) -> None:
    """`forward` on packed sequences, which are laid end to end.

    Args:
        q: ``[total_q, heads, dim]``; `k`, `v`, `out` likewise.
        logsumexp: ``[heads, total_q]``, float32.
        cum_q: ``[batch + 1]``, int32: where each sequence of queries begins, and where the last
            one ends; `cum_k` for keys.
    """
    _, heads, head_dim = q.shape
    _, heads_k, head_dim_v = v.shape
    kind = Kind(True, q.dtype, head_dim, head_dim_v, heads // heads_k, causal, True, True)
    _functions(kind, q.device)(q, k, v, out, logsumexp, cum_q, cum_k, scale)


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
    bias: torch.Tensor | None = None,
    lowest: float | None = None,
) -> None:
    """Writes the gradients of `forward` to `dq`, `dk` and `dv`, laid out as `forward`'s tensors.

    Not deterministic, but of short sequences: the parts of dq are added in whatever order they
    come. A bias has no gradient here.
    """
    batch, heads, length_q, head_dim = q.shape
    _, heads_k, length_k, head_dim_v = v.shape
    group = heads // heads_k
    kind = Kind(False, q.dtype, head_dim, head_dim_v, group, causal, True, False)
    is_short = short_backward_fits(head_dim, group, causal, length_q, length_k)
    if is_short and bias is None and head_dim == head_dim_v:
        kind = kind._replace(short=short_backward_tile(head_dim, length_q, length_k))
        _functions(kind, q.device)(
            grad_out, q, k, v, out, logsumexp, dq, dk, dv, multiprocessors(q.device), scale
        )
        return
    lists = usable = None
    if bias is not None and _is_of_each_head(bias):
        kind = kind._replace(bias=_dense_kind(bias, q))
    elif bias is not None:
        kind = kind._replace(bias=_bias_kind(bias))
        listed = listed_backward_tile(head_dim)
        if lowest is None:
            found = _written(_plan_lists(bias, q, k, scale, *listed, logsumexp))
        else:
            found = _written(_plan_boolean_lists(bias, *listed, lowest, logsumexp))
            bias = found.bits
        lists, usable = found.tiles, found.logsumexp
    tile = _tile(kind, q.device)
    rows = round_up(length_q, tile.q)
    device, fp32 = q.device, torch.float32
    delta = torch.empty((batch, heads, rows), dtype=fp32, device=device)
    # Natural where there is a bias.
    logsumexp2 = (
        torch.empty((batch, heads, rows), dtype=fp32, device=device)
        if usable is None
        else usable[..., :rows]
    )
    dq_sum = torch.empty((batch, heads, rows * tile.dim), dtype=fp32, device=device)
    dk_sum = dv_sum = None
    if group > 1:
        columns = round_up(length_k, tile.k)
        dk_sum = torch.zeros((batch, heads_k, columns * tile.dim), dtype=fp32, device=device)
        dv_sum = torch.zeros((batch, heads_k, columns * tile.dim_v), dtype=fp32, device=device)
    _functions(kind, device)(
        grad_out, q, k, v, out, logsumexp, dq, dk, dv,
        delta, logsumexp2, dq_sum, dk_sum, dv_sum, None, None, bias, lists, lowest or 0.0, scale,
    )  # fmt: skip


def backward_varlen(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cum_q: torch.Tensor,
    cum_k: torch.Tensor,
    scale: float,
    causal: bool,
) -> None:
    """`backward` on packed sequences, as `forward_varlen` has them."""
    total_q, heads, head_dim = q.shape
    total_k, heads_k, head_dim_v = v.shape
    group = heads // heads_k
    kind = Kind(False, q.dtype, head_dim, head_dim_v, group, causal, True, True)
    tile = _tile(kind, q.device)
    # Every sequence begins at a tile of its own.
    rows = (total_q + cum_q.shape[0] * tile.q - 1) // tile.q * tile.q
    device, fp32 = q.device, torch.float32
    delta = torch.empty((heads, rows), dtype=fp32, device=device)
    logsumexp2 = torch.empty((heads, rows), dtype=fp32, device=device)
    dq_sum = torch.empty((heads, rows * tile.dim), dtype=fp32, device=device)
    dk_sum = dv_sum = None
    if group > 1:
        columns = (total_k + cum_k.shape[0] * tile.k - 1) // tile.k * tile.k
        dk_sum = torch.zeros((heads_k, columns * tile.dim), dtype=fp32, device=device)
        dv_sum = torch.zeros((heads_k, columns * tile.dim_v), dtype=fp32, device=device)
    _functions(kind, device)(
        grad_out, q, k, v, out, logsumexp, dq, dk, dv,
        delta, logsumexp2, dq_sum, dk_sum, dv_sum, cum_q, cum_k, None, None, 0.0, scale,
    )  # fmt: skip
