"""Attention in Triton: FlashAttention's forward and backward.

With ``S = scale * Q K^T + bias``, in tiles that never leave the chip (Dao, "FlashAttention-2",
2023)::

    P = exp(S - L)        L = logsumexp(S), one value a row, kept for the backward
    O = P V
    D = rowsum(dO * O)
    dV = P^T dO           dS = P * (dO V^T - D)
    dQ = scale * dS K     dK = scale * dS^T Q     dbias = dS

The forward finds L as it goes: a row's maximum and sum so far, by which what was summed before is
scaled down. The backward is two kernels, each of which recomputes P: one walks over queries and
sums dK and dV, the other walks over keys and sums dQ. That is 7 matrix products instead of the 5
of one kernel that adds its parts of dQ up in memory, and yet faster here, and it has the same bits
on every run. Where there are few keys a program holds them all, and one kernel is enough.

A bias is added to the scores: a mask is one of 0 and -inf. Where heads share it, two kernels before
list the tiles of each row of tiles: those that are -inf throughout are in no list, and not
computed; those that are 0 throughout come first, and are computed without it. Those that stand for
-inf, which torch makes of a boolean mask where cuDNN is to have it, come last: they are computed
where P may be other than 0, which the rows' norms tell.

`triton_sizes` says which tiles programs compute. On Hopper they are fetched by the copy engine
(tensor descriptors, made in the kernel for one head each); elsewhere, and where sequences are
short, by loads. Warp specialisation is left alone: the compiler's, asked for with three stages,
computed NaN (triton 3.6.0, H200).
"""

from __future__ import annotations

import contextvars
import functools
import math
from typing import Any, NamedTuple, overload

import torch
import triton

from opgraft_kernels.integers import ceil_div, power_of_2, round_up, unit_of
from opgraft_kernels.launches import Launch

from .triton_backward import backward_keys_kernel, backward_queries_kernel, delta_kernel
from .triton_forward import forward_kernel
from .triton_parts import PART_ROWS, PART_UNIT, split_kernel
from .triton_short import short_backward_kernel, short_forward_kernel
from .triton_sizes import (
    Device,
    Kind,
    Tile,
    backward_holds_keys,
    backward_keys_tile,
    backward_queries_tile,
    block_dim,
    blocks_of_keys,
    forward_holds_keys,
    forward_tile,
    short_backward_tile,
    splits_backward,
    splits_forward,
    tiles_of_program,
)
from .triton_tiles import (
    BY_KEY,
    BY_SCORE,
    HEADER,
    LOG2_E,
    NO_BIAS,
    Heads,
    Listed,
    Scores,
    list_tiles_kernel,
    mark_tiles_kernel,
    norms_kernel,
)

__all__ = [
    "apart",
    "are_far_apart",
    "backward",
    "bias_kind",
    "constexprs_of",
    "forward",
    "heads_of",
    "mark_tiles",
    "plan_backward",
    "plan_forward",
]


# --------------------------------------------------------------------------------------------------
# Launches: which kernel, over which grid, with which arguments
# --------------------------------------------------------------------------------------------------


def _kind(q: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool) -> Kind:
    dim = max(q.shape[-1], v.shape[-1])
    return Kind(dim, q.element_size(), bias_kind(bias), _is_listed(bias, causal))


# Rows that a tile has at the most.
_TALLEST = 256


def are_far_apart(strides: tuple[int, ...]) -> bool:
    """Whether 32 bits are too few for where a tile's rows begin. `strides`: as `apart` has them."""
    return _TALLEST * max(strides[2::3]) >= 2**31


def _constexprs(
    q: torch.Tensor, v: torch.Tensor, strides: tuple[int, ...], device: Device
) -> dict[str, Any]:
    """What every kernel of a call is compiled with. `strides`: as `apart` has its tensors'."""
    dim, dim_v = q.shape[-1], v.shape[-1]
    return {
        "DIM": dim,
        "DIM_V": dim_v,
        "BLOCK_DIM": block_dim(dim),
        "BLOCK_DIM_V": block_dim(dim_v),
        "UNIT": unit_of(q.element_size(), *strides),
        "FAR": are_far_apart(strides),
        "PRECISION": device.precision if q.dtype is torch.float32 else "tf32",
    }


def constexprs_of(x: torch.Tensor, *others: torch.Tensor) -> dict[str, Any]:
    """What a kernel is compiled with that reads rows of one dimension, of one tensor or of more."""
    strides = apart(x, *others)
    return {
        "DIM": x.shape[-1],
        "BLOCK_DIM": block_dim(x.shape[-1]),
        "UNIT": unit_of(x.element_size(), *strides),
        "FAR": are_far_apart(strides),
    }


@overload
def heads_of(tensor: torch.Tensor) -> Heads: ...


@overload
def heads_of(tensor: torch.Tensor | None) -> Heads | None: ...


def heads_of(tensor: torch.Tensor | None) -> Heads | None:
    """A tensor of 3 or 4 dimensions as a kernel gets it. None stays."""
    return None if tensor is None else Heads(tensor, *tensor.stride()[:3])


def _scores_of(bias: torch.Tensor | None) -> Scores | None:
    return None if bias is None else Scores(bias, *bias.stride())


def apart(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Of each but the last dimension, which is contiguous."""
    return tuple(stride for t in tensors for stride in t.stride()[:3])


# ------------------------------------------------------------------ bias

# Listing tiles reads the bias once more. That is little where so many heads share it.
_LIST_FROM_HEADS = 4


class Bias(NamedTuple):
    """How a kernel gets a bias."""

    kind: int
    tensor: torch.Tensor | None
    tiles: torch.Tensor | None = None
    # The largest of the norms that bound scores where the bias is low, ``[batch * heads, parts]``.
    norms: torch.Tensor | None = None

    def arguments(self) -> tuple[Scores | None, Listed | None, torch.Tensor | None]:
        return _scores_of(self.tensor), self.listed(), self.norms

    def listed(self) -> Listed | None:
        """Apart in the list are batches and rows of tiles, where there are more than one."""
        if self.tiles is None:
            return None
        batch, row = (
            stride if size > 1 else 0
            for size, stride in zip(self.tiles.shape, self.tiles.stride()[:2], strict=False)
        )
        return Listed(self.tiles, batch, row)

    def constexprs(self) -> dict[str, Any]:
        unit = 1
        if self.tensor is not None:
            unit = unit_of(self.tensor.element_size(), *self.tensor.stride()[:3])
        splits = 1 if self.norms is None else self.norms.shape[1]
        return {"BIAS": self.kind, "UNIT_BIAS": unit, "SPLITS": splits}


def bias_kind(bias: torch.Tensor | None) -> int:
    if bias is None:
        return NO_BIAS.value
    return BY_KEY.value if bias.stride(2) == 0 else BY_SCORE.value


def _is_listed(bias: torch.Tensor | None, causal: bool) -> bool:
    """Whether tiles that a bias leaves out are found before. Causal leaves out tiles by itself."""
    if bias is None or causal:
        return False
    return bias.stride(1) == 0 and bias.shape[1] >= _LIST_FROM_HEADS


def _plan_bias(
    bias: torch.Tensor | None,
    causal: bool,
    queries: Tile | None = None,
    keys: Tile | None = None,
) -> tuple[Bias, Bias, list[Launch]]:
    """A bias as two kernels get it, with the launches that list its tiles where that is worth it.

    One launch reads the bias for both.

    Args:
        bias: ``[batch, heads, length_q, length_k]``, or None.
        causal: whether attention is causal besides.
        queries: the tile of the kernel whose programs have queries; None: it needs no list.
        keys: the same, of keys.

    Returns:
        For the kernel of `queries`; for the one of `keys`; the launches.
    """
    kind = bias_kind(bias)
    planned = Bias(kind, bias)
    if kind == BY_KEY.value:  # a program of keys has one tile of the bias
        keys = None
    wanted = [tile for tile in (queries, keys) if tile is not None]
    if bias is None or not wanted or not _is_listed(bias, causal):
        return planned, planned, []
    rows, cols = min(tile.q for tile in wanted), min(tile.k for tile in wanted)
    marks, best, mark = mark_tiles(bias, rows, cols)
    of_queries, of_keys, launches = planned, planned, [mark]
    if queries is not None:
        tiles, collect = _list_tiles(marks, best, queries.q // rows, queries.k // cols)
        of_queries = planned._replace(tiles=tiles)
        launches.append(collect)
    if keys is not None:
        across = (marks.transpose(1, 2), best.transpose(1, 2))
        tiles, collect = _list_tiles(*across, keys.k // cols, keys.q // rows)
        of_keys = planned._replace(tiles=tiles)
        launches.append(collect)
    return of_queries, of_keys, launches


# Elements of a tile that a warp marks. One warp marks most tiles alone, so it waits for no other.
_MARKED_BY_WARP = 4096


def mark_tiles(
    bias: torch.Tensor, rows: int, cols: int
) -> tuple[torch.Tensor, torch.Tensor, Launch]:
    """What tiles of so many rows and columns are, ``[batch, rows of tiles, tiles]``."""
    batch, _, length_q, length_k = bias.shape
    batch = 1 if bias.stride(0) == 0 else batch
    if bias_kind(bias) == BY_KEY.value:
        length_q = rows = 1  # all rows are the same
    shape = (batch, ceil_div(length_q, rows), ceil_div(length_k, cols))
    marks = torch.empty(shape, dtype=torch.int32, device=bias.device)
    best = torch.empty(shape, dtype=torch.float32, device=bias.device)
    launch = Launch(
        mark_tiles_kernel,
        marks.numel(),
        (
            *(bias, marks, best, bias.stride(0), bias.stride(2), bias.stride(3)),
            *(length_q, length_k, shape[1]),
        ),
        {"ROWS": rows, "COLS": cols},
        max(rows * cols // _MARKED_BY_WARP, 1),
    )
    return marks, best, launch


def _list_tiles(
    marks: torch.Tensor, best: torch.Tensor, rows: int, cols: int
) -> tuple[torch.Tensor, Launch]:
    """The lists of tiles of so many rows and columns of marks."""
    batch, row_marks, col_marks = marks.shape
    row_tiles, col_tiles = ceil_div(row_marks, rows), ceil_div(col_marks, cols)
    shape = (batch, row_tiles, HEADER.value + col_tiles)
    tiles = torch.empty(shape, dtype=torch.int32, device=marks.device)
    launch = Launch(
        list_tiles_kernel,
        batch * row_tiles,
        (marks, best, tiles, *marks.stride(), row_marks, col_marks, row_tiles, col_tiles),
        {"ROWS": rows, "COLS": cols, "BLOCK": max(power_of_2(col_tiles), 32)},
        1,
    )
    return tiles, launch


# Rows that a program takes the norms of at once, and how many programs share a head at the most.
_NORM_ROWS, _MOST_SPLITS = 64, 16


def _with_norms(planned: Bias, listed: Bias, x: torch.Tensor) -> tuple[Bias, list[Launch]]:
    """`planned` with the norms of `x`, found by a launch that reads it if `listed` has low tiles.

    Args:
        planned: for whom.
        listed: with a list of tiles, of that kernel or of another one of the call.
        x: ``[batch, heads, length, dim]``: keys where a program has queries, and otherwise queries.
    """
    if listed.tiles is None:
        return planned, []
    batch, heads, length, _ = x.shape
    splits = min(power_of_2(ceil_div(length, 4 * _NORM_ROWS)), _MOST_SPLITS)
    norms = torch.empty((batch * heads, splits), dtype=torch.float32, device=x.device)
    launch = Launch(
        norms_kernel,
        norms.numel(),
        (
            *(heads_of(x), norms, listed.listed()),
            *(listed.tiles.shape[1], heads, length),
        ),
        {
            **constexprs_of(x),
            "BLOCK": _NORM_ROWS,
            "BLOCK_TILES": power_of_2(listed.tiles.shape[1]),
            "SPLITS": splits,
        },
        4,
    )
    return planned._replace(norms=norms), [launch]


# ------------------------------------------------------------------ launches


def plan_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor | None,
    scale: float,
    causal: bool,
    device: Device,
    bias: torch.Tensor | None = None,
) -> list[Launch]:
    """The launches of a forward, in the stream's order."""
    batch, heads, length_q, _ = q.shape
    _, heads_k, length_k, _ = k.shape
    kind = _kind(q, v, bias, causal)
    readers = length_q * heads // heads_k  # of each key
    kind = kind._replace(is_split=splits_forward(device, kind, readers, length_k))
    if forward_holds_keys(device, kind, causal, length_q, length_k):
        return _plan_short_forward(q, k, v, out, logsumexp, scale, device)
    tile = forward_tile(device, kind, batch * heads * length_q, length_k)
    planned, _, listing = _plan_bias(bias, causal, queries=tile)
    planned, norms = _with_norms(planned, planned, k)
    (k, v), splitting = _split(k, v) if kind.is_split else ((k, v), [])
    strides = apart(q, k, v, out)
    forward = Launch(
        forward_kernel,
        ceil_div(length_q, tile.q) * batch * heads,
        (
            *map(heads_of, (q, k, v, out, logsumexp)),
            *planned.arguments(),
            heads,
            heads // heads_k,
            length_q,
            length_k,
            _in_kernel(scale, bias),
        ),
        {
            "CAUSAL": causal,
            **planned.constexprs(),
            **_constexprs(q, v, strides, device),
            **tile.constexprs(),
            "SPLIT": kind.is_split,
        },
        tile.num_warps,
        tile.options(),
    )
    return [*listing, *norms, *splitting, forward]


# Rows that a program splits.
_SPLIT_ROWS = 64


def _split(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[Launch]]:
    """Each ``[batch, heads, length, dim]``, of float32, as `load_factor` takes it if SPLIT, and the
    launches that write it."""
    found, launches = [], []
    for x in tensors:
        batch, heads, length, dim = x.shape
        rows, padded = round_up(length, PART_ROWS.value), round_up(dim, PART_UNIT.value)
        parts = x.new_empty((batch, heads, 3 * rows, padded), dtype=torch.bfloat16)[..., :dim]
        launches.append(
            Launch(
                split_kernel,
                rows // _SPLIT_ROWS * batch * heads,
                (heads_of(x), heads_of(parts), heads, length),
                {**constexprs_of(x, parts), "BLOCK": _SPLIT_ROWS},
                4,
            )
        )
        found.append(parts)
    return found, launches


def _in_kernel(scale: float, bias: torch.Tensor | None) -> float:
    return scale * LOG2_E.value if bias is None else scale


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
    bias: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
) -> list[Launch]:
    """The launches of a backward, in the stream's order. delta is allocated here."""
    batch, heads, length_q, _ = q.shape
    _, heads_k, length_k, _ = k.shape
    kind = _kind(q, v, bias, causal)
    is_split = splits_backward(device, kind, min(length_q, length_k))
    kind = kind._replace(is_split=is_split, has_dbias=dbias is not None)
    if backward_holds_keys(device, kind, batch * heads_k, length_k):
        return _plan_short_backward(
            *(grad_out, q, k, v, out, logsumexp, dq, dk, dv),
            *(scale, causal, device, bias, dbias),
        )
    inputs = (grad_out, q, k, v)
    common = {
        **_constexprs(q, v, apart(*inputs, out, dq, dk, dv), device),
        "CAUSAL": causal,
        "SPLIT": kind.is_split,
    }
    delta = torch.empty((batch, heads, length_q), dtype=torch.float32, device=q.device)
    delta_launch = Launch(
        delta_kernel,
        ceil_div(length_q, _DELTA_ROWS) * batch * heads,
        (heads_of(grad_out), heads_of(out), delta, heads, length_q),
        {
            "DIM": common["DIM_V"],
            "BLOCK": _DELTA_ROWS,
            "BLOCK_DIM": common["BLOCK_DIM_V"],
            "UNIT": common["UNIT"],
            "FAR": common["FAR"],
        },
        4,
    )
    sizes = (heads, heads // heads_k, length_q, length_k, _in_kernel(scale, bias), scale)

    tile_q = backward_queries_tile(device, kind, batch * heads * length_q, length_k, causal)
    tile = backward_keys_tile(device, kind, length_q, batch * heads_k * length_k)
    # Every element of dbias is to be written, those of tiles, too, that are in no list.
    listed_q = tile_q if dbias is None else None
    planned_q, planned, listing = _plan_bias(bias, causal, queries=listed_q, keys=tile)
    planned_q, norms_k = _with_norms(planned_q, planned_q, k)
    planned, norms_q = _with_norms(planned, planned_q if planned.tiles is None else planned, q)
    # What one kernel walks over is what the other one's programs have.
    over_queries, over_keys = inputs, inputs
    splitting: list[Launch] = []
    if kind.is_split:
        (grad_parts, q_parts, k_parts, v_parts), splitting = _split(*inputs)
        over_queries, over_keys = (grad_parts, q_parts, k, v), (grad_out, q, k_parts, v_parts)
    keys = Launch(
        backward_keys_kernel,
        ceil_div(length_k, tile.k) * batch * heads_k,
        (
            *map(heads_of, (*over_queries, logsumexp)),
            delta,
            *planned.arguments(),
            *map(heads_of, (dk, dv)),
            *sizes,
        ),
        {**planned.constexprs(), **common, **tile.constexprs()},
        tile.num_warps,
        tile.options(),
    )

    queries = Launch(
        backward_queries_kernel,
        ceil_div(length_q, tile_q.q) * batch * heads,
        (
            *map(heads_of, (*over_keys, logsumexp)),
            delta,
            *planned_q.arguments(),
            *map(heads_of, (dq, dbias)),
            *sizes,
        ),
        {
            "HAS_TAIL": length_k % tile_q.k != 0,
            **planned_q.constexprs(),
            **common,
            **tile_q.constexprs(),
        },
        tile_q.num_warps,
        tile_q.options(),
    )
    return [delta_launch, *listing, *norms_k, *norms_q, *splitting, keys, queries]


# ------------------------------------------------------------------ few keys


def _plan_short_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor | None,
    scale: float,
    device: Device,
) -> list[Launch]:
    batch, heads, length_q, _ = q.shape
    _, heads_k, length_k, _ = k.shape
    rows = 64
    tiles = tiles_of_program(ceil_div(length_q, rows) * batch * heads)
    strides = apart(q, k, v, out)
    common = _constexprs(q, v, strides, device)
    del common["PRECISION"]  # 16 bits have one
    keys, more = blocks_of_keys(length_k)
    return [
        Launch(
            short_forward_kernel,
            ceil_div(length_q, rows * tiles) * batch * heads,
            (
                *map(heads_of, (q, k, v, out, logsumexp)),
                *(heads, heads // heads_k, length_q, length_k, tiles, _in_kernel(scale, None)),
            ),
            {**common, "BLOCK_Q": rows, "KEYS": keys, "MORE": more, "STAGES": 2},
            4,
        )
    ]


def _plan_short_backward(
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
    bias: torch.Tensor | None,
    dbias: torch.Tensor | None,
) -> list[Launch]:
    batch, heads, length_q, _ = q.shape
    _, heads_k, length_k, _ = k.shape
    programs = batch * heads_k
    tile = short_backward_tile(_kind(q, v, bias, causal), programs, length_k)
    inputs, results = (grad_out, q, k, v, out), (dq, dk, dv)
    strides = apart(*inputs, *results)
    common = _constexprs(q, v, strides, device)
    planned = Bias(bias_kind(bias), bias)
    of_bias = planned.constexprs()
    del common["PRECISION"], of_bias["SPLITS"]  # 16 bits have one; no tiles are listed
    return [
        Launch(
            short_backward_kernel,
            programs,
            (
                *map(heads_of, (*inputs, logsumexp)),
                *(_scores_of(bias), *map(heads_of, (*results, dbias))),
                *(heads, heads // heads_k, length_q, length_k, _in_kernel(scale, bias), scale),
            ),
            {
                "CAUSAL": causal,
                **of_bias,
                **common,
                "BLOCK_Q": tile.q,
                "KEYS": tile.k,
                "STAGES": tile.stages,
            },
            tile.num_warps,
            tile.options(),
        )
    ]


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
    bias: torch.Tensor | None = None,
) -> None:
    """Writes ``softmax(scale * q @ k.T + bias) @ v`` to `out`, and the scores' logsumexp.

    Args:
        q: ``[batch, heads, length_q, dim]``, of one dtype with `k`, `v` and `out`: float16,
            bfloat16 or float32 (in the interpreter not bfloat16). The last dimension is contiguous,
            on Hopper everything else a multiple of 16 bytes apart.
        k: ``[batch, heads_k, length_k, dim]``; `heads_k` divides `heads`.
        v: ``[batch, heads_k, length_k, dim_v]``.
        out: ``[batch, heads, length_q, dim_v]``.
        logsumexp: ``[batch, heads, length_q]``, float32, natural logarithm; None where unwanted.
        scale: of the scores; positive.
        causal: whether query i sees key j only where ``j <= i + length_k - length_q``. Every query
            has to see one: ``length_q <= length_k``.
        bias: ``[batch, heads, length_q, length_k]``, with any strides, 0 where it is broadcast;
            None for 0. A query whose scores are all -inf gets an output of 0, and a logsumexp of
            inf.
    """
    _expect_positive(scale)
    _launch(plan_forward(q, k, v, out, logsumexp, scale, causal, _device(q.device), bias))


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
    dbias: torch.Tensor | None = None,
) -> None:
    """Writes the gradients of `forward` to `dq`, `dk` and `dv`: the same bits on every run.

    And to `dbias`, where it is given: rows of any distance, without gaps between heads and batches,
    and 0 wherever causal leaves scores out.
    """
    _expect_positive(scale)
    gradients = (dq, dk, dv)
    _launch(
        plan_backward(
            *(grad_out, q, k, v, out, logsumexp, *gradients, scale, causal, _device(q.device)),
            *(bias, dbias),
        )
    )
