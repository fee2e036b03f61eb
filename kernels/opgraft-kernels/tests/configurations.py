"""What there is to compile of each family of kernels: launches on meta tensors, kinds of CuteDSL.

Most of what a call may ask for, each tile at least once. Nothing here is run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from opgraft_kernels.launches import Device, Launch

__all__ = [
    "NORM_KERNELS",
    "copy_launch",
    "cross_entropy_launches",
    "cutedsl_kinds",
    "embedding_launches",
    "launches",
    "nll_loss_launches",
    "norm_launches",
    "permuted_launches",
    "softmax_launches",
]

MULTIPROCESSORS = 132  # an H200's
#: Of a multiprocessor, in bytes, by compute capability.
SHARED_MEMORY = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
#: Too few for several programs a multiprocessor, wherever that is.
FEW_ROWS = 4

#: What the launches of either norm are of, but of permuted inputs.
NORM_KERNELS = {
    "forward_rows_kernel",
    "forward_chunks_kernel",
    "forward_split_kernel",
    "backward_rows_kernel",
    "backward_pieces_kernel",
    "backward_split_kernel",
    "row_means_kernel",
    "backward_columns_kernel",
    "sum_partials_kernel",
}


def launches(family: str, capability: int) -> Iterator[Launch]:
    """The launches of a family of Triton kernels.

    Args:
        family: ``"rms_norm"``, ``"layer_norm"``, ``"softmax"``, ``"cross_entropy"``,
            ``"nll_loss"``, ``"permuted"`` (norms), ``"embedding"``, ``"copies"`` or
            ``"attention"``; and of rows that are shifted alone ``"shifted softmax"`` and
            ``"shifted cross_entropy"``.
        capability: 80, 90 or 100.
    """
    if family == "softmax":
        return _softmax(capability)
    if family == "cross_entropy":
        return _cross_entropy()
    if family.startswith("shifted "):
        return _shifted(family.removeprefix("shifted "), capability)
    if family == "nll_loss":
        return _nll_loss()
    if family == "embedding":
        return _embedding()
    if family == "copies":
        return _copies()
    if family == "permuted":
        return _permuted()
    return _attention(capability // 10) if family == "attention" else _norms(family, capability)


def _can_prefetch(capability: int) -> bool:
    return capability >= 90


def cutedsl_kinds(family: str) -> Iterator[Any]:
    """The kinds of a family's functions in CuteDSL, for any Hopper GPU."""
    return _attention_kinds() if family == "attention" else _norm_kinds(family)


# ------------------------------------------------------------------ norms


def _norms(norm: str, capability: int) -> Iterator[Launch]:
    """Powers of two in 16 and 32 bits, and at a few sizes each: unaligned rows, no weight, no
    bias, some of the gradients, more or fewer rows."""
    has_mean = norm == "layer_norm"
    some = functools.partial(
        norm_launches,
        norm,
        shared_memory=SHARED_MEMORY[capability],
        can_prefetch=_can_prefetch(capability),
    )
    bfloat16, float32 = torch.bfloat16, torch.float32
    for log2 in (4, 7, *range(10, 16), 17) if has_mean else range(4, 18):
        yield from some(bfloat16, 1 << log2)
    for log2 in (10, 13, 14) if has_mean else range(4, 18):
        yield from some(float32, 1 << log2)
    for hidden in (4096, 8192, 32768) if has_mean else (4096, 16384, 65536):
        yield from some(torch.float16, hidden)
        yield from some(bfloat16, hidden - 1)
        yield from some(bfloat16, hidden, has_bias=False)
        yield from some(bfloat16, hidden, has_weight=False, has_bias=False)
        yield from some(bfloat16, hidden, needs=(True, False, False))
        yield from some(bfloat16, hidden, needs=(False, True, True))
    # Of a few lengths between each two powers of two, some exactly so many pieces. The last are
    # multiples of 8 bytes, and of 2.
    lengths = (40, 96, 320, 768, 1152, 1280, 2560, 3072, 3584, 4224, 5120, 5496, 6144, 7168)
    for hidden in (*lengths, 10240, 12288, 13824, 14336, 15360, 5500, 9220, 13828, 4225):
        yield from some(bfloat16, hidden)
    for hidden in (96, 1280, 5120, 7168):
        yield from some(float32, hidden)
    for hidden in (3584, 13824):
        yield from some(torch.float16, hidden)
        yield from some(bfloat16, hidden, rows=1023)
        yield from some(bfloat16, hidden, has_weight=False, has_bias=False)
        yield from some(bfloat16, hidden, needs=(True, False, False))
        yield from some(bfloat16, hidden, needs=(False, True, True))
    yield from some(bfloat16, 1152, rows=1023)
    for hidden in (128, 4096):
        yield from some(bfloat16, hidden, rows=1)
    # Few programs that add up their sums in the same launch, and more elements than are.
    yield from some(bfloat16, 4096, rows=8)
    yield from some(bfloat16, 1024, rows=8192)
    # More than the programs that run at once can hold of one row.
    yield from some(bfloat16, 1 << 22)


def norm_launches(
    norm: str,
    dtype: torch.dtype,
    hidden: int,
    rows: int = 1024,
    has_weight: bool = True,
    has_bias: bool = True,
    needs: tuple[bool, bool, bool] = (True, True, True),
    shared_memory: int = 228 * 1024,
    can_prefetch: bool = True,
) -> list[Launch]:
    """The launches of a forward and then of a backward."""
    from opgraft_kernels.norms import ops, triton_kernels

    has_mean = norm == "layer_norm"
    x = torch.empty(rows, hidden, dtype=dtype, device="meta")
    rstd = torch.empty(rows, 1, dtype=torch.float32, device="meta")
    mean = rstd if has_mean else None
    weight, bias = (
        torch.empty(hidden, dtype=dtype, device="meta") if there else None
        for there in (has_weight, has_bias and has_mean)
    )
    dx, dw, db = (t if need else None for t, need in zip((x, weight, bias), needs, strict=True))
    forward = ops.Forward(x, weight, bias, x, mean, rstd, hidden, 1e-6)
    backward = ops.Backward(x, x, weight, mean, rstd, dx, dw, db, hidden)
    device = Device(MULTIPROCESSORS, shared_memory, can_wait=True, can_prefetch=can_prefetch)
    return [
        triton_kernels.plan_forward(forward, device),
        *triton_kernels.plan_backward(backward, device),
    ]


def _norm_kinds(norm: str) -> Iterator[Any]:
    from opgraft_kernels.norms.cutedsl_kernels import TILES, BackwardKind, ForwardKind

    has_mean = norm == "layer_norm"
    bias = (True, False) if has_mean else (False,)
    bfloat16, tiles = torch.bfloat16, TILES[norm]
    for tile in tiles.forward.values():
        for has_weight in (True, False):
            for has_bias in bias:
                yield ForwardKind(bfloat16, tile, has_weight, has_bias, has_mean)
        yield ForwardKind(torch.float16, tile, True, has_mean, has_mean)
    for tile in tiles.backward.values():
        for needs_db in bias:
            for needs_dw in (True, False):
                yield BackwardKind(bfloat16, tile, True, has_mean, needs_dw, needs_db)
            yield BackwardKind(bfloat16, tile, False, has_mean, False, needs_db)
        yield BackwardKind(torch.float16, tile, True, has_mean, True, has_mean)


# ------------------------------------------------------------------ softmax


def _softmax(capability: int) -> Iterator[Launch]:
    """Rows that share a program, that fit one and longer ones, strided lines, and odd sizes."""
    some = functools.partial(softmax_launches, can_prefetch=_can_prefetch(capability))
    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    for log in (False, True):
        for dtype in (bfloat16, float32):
            for size in (16, 128, 197, 1000, 4096, 5496, 8192, 16384, 50257, 128256, 262144):
                yield from some(dtype, (1024, size), log)
            for shape in (
                (8, 21, 65536),
                (8, 4096, 128),
                (4, 50000, 33),
                (512, 64, 6),
                (64, 28, 232),
            ):
                yield from some(dtype, shape, log)
            # Strided and read element by element, up to the largest tile of such lines.
            for shape in ((64, 135, 75), (8, 1000, 17)):
                yield from some(dtype, shape, log)
            # Rows that are not shifted, since they are an element further apart than they are long.
            for size in (49, 577, 20001):
                yield from some(dtype, (1024, size), log, between=1)
        yield from some(float16, (1024, 4096), log)
        yield from some(float16, (1024, 4096), log, wide=float32)
        yield from some(float16, (64, 128256), log, wide=float32)
        # Few rows, which are split from a larger size on; and where none are split.
        for dtype in (bfloat16, float32):
            for size in (16384, 50264):
                yield from some(dtype, (64, size), log)
        yield from some(float16, (64, 128256), log)
        yield from some(float16, (1024, 128257), log)
        yield from some(float32, (1024, 128256), log, can_wait=False)


def softmax_launches(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    log: bool,
    wide: torch.dtype | None = None,
    between: int = 0,
    shared_memory: int = 228 * 1024,
    can_wait: bool = True,
    can_prefetch: bool = True,
) -> list[Launch]:
    """The launch of a forward over dimension 1, and of a backward; with elements `between` the
    rows of what they read."""
    from opgraft_kernels.softmax import triton_kernels

    apart = (*shape[:-1], shape[-1] + between)
    x, dx = (torch.empty(each, dtype=dtype, device="meta") for each in (apart, shape))
    g, y = (torch.empty(each, dtype=wide or dtype, device="meta") for each in (apart, shape))
    x, g = x[..., : shape[-1]], g[..., : shape[-1]]
    device = Device(MULTIPROCESSORS, shared_memory, can_wait=can_wait, can_prefetch=can_prefetch)
    return [
        triton_kernels.plan_forward(x, y, 1, log, device),
        triton_kernels.plan_backward(g, g, dx, 1, log, device),
    ]


def _shifted(family: str, capability: int) -> Iterator[Launch]:
    """Rows that fit a program, and longer ones."""
    some = functools.partial(softmax_launches, can_prefetch=_can_prefetch(capability))
    for dtype in (torch.bfloat16, torch.float32):
        for size in (1191, 4097, 16383, 32767, 50257):
            if family == "cross_entropy":
                for rows in (FEW_ROWS, 1024):
                    forward, *_, backward = cross_entropy_launches(dtype, rows, size)
                    yield from (forward, backward)
            else:
                for log in (False, True):
                    yield from some(dtype, (1024, size), log)


# ------------------------------------------------------------------ cross-entropy


def _cross_entropy() -> Iterator[Launch]:
    """Rows that share a program, that fit one and longer ones, few and many, odd sizes, and each
    option."""
    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    some = cross_entropy_launches
    for dtype in (bfloat16, float32):
        for classes in (2, 16, 128, 1000, 4096, 5496, 8192, 16384, 32768, 50257, 128256, 262144):
            yield from some(dtype, 1024, classes)
        for classes in (16384, 32768, 128256):
            yield from some(dtype, FEW_ROWS, classes)
        for classes in (1000, 16384, 50257, 128256):
            for smoothing, is_weighted in ((0.1, False), (0.0, True), (0.1, True)):
                yield from some(dtype, 1024, classes, smoothing, is_weighted)
    for is_mean in (False, True):
        yield from some(float16, 1 << 20, 1000, is_mean=is_mean)
        yield from some(float16, 64, 128256, is_mean=is_mean)


def cross_entropy_launches(
    dtype: torch.dtype,
    rows: int,
    classes: int,
    smoothing: float = 0.0,
    is_weighted: bool = False,
    is_mean: bool = True,
) -> list[Launch]:
    """The launches of a forward, and then of a backward."""
    from opgraft_kernels.cross_entropy import triton_kernels as kernels

    make = functools.partial(torch.empty, device="meta")
    x, target = make((rows, classes), dtype=dtype), make(rows, dtype=torch.int64)
    weight = make(classes, dtype=dtype) if is_weighted else None
    kind = 1 if is_mean else 2, -100, smoothing
    (loss, statistics, mass), forward = kernels.plan_forward(x, target, weight, *kind, dtype=dtype)
    _, backward = kernels.plan_backward(loss, x, target, weight, statistics, mass, *kind)
    return [*forward, *backward]


# ------------------------------------------------------------------ negative log-likelihood


def _nll_loss() -> Iterator[Launch]:
    """One program of the sum and more, each reduction, with weights and without."""
    for rows, reduction in ((1000, 1), (100_000, 2), (100_000, 0)):
        yield from nll_loss_launches(torch.bfloat16, rows, reduction, is_weighted=reduction == 2)
    yield from nll_loss_launches(torch.float32, 100_000, 1, is_weighted=True, classes=2)


def nll_loss_launches(
    dtype: torch.dtype,
    rows: int,
    reduction: int,
    is_weighted: bool = False,
    classes: int = 1000,
) -> list[Launch]:
    """The launches of a forward, and then of a backward."""
    from opgraft_kernels.nll_loss import triton_kernels

    make = functools.partial(torch.empty, device="meta", dtype=dtype)
    weight = make(classes) if is_weighted else None
    given = make((rows, classes)), make(rows, dtype=torch.int64), weight, reduction, -100
    (loss, mass), forward = triton_kernels.plan_forward(*given)
    _, backward = triton_kernels.plan_backward(loss, *given, mass)
    return [*forward, *backward]


# ------------------------------------------------------------------ embedding


def _embedding() -> Iterator[Launch]:
    """Rows that share a program, that fit one, and that are split; and each option."""
    some = embedding_launches
    yield from some(torch.bfloat16, 2048, scaled=True)
    for width in (96, 4096, 5496, 1001):
        yield from some(torch.bfloat16, width)
    yield from some(torch.float32, 1024, indices=torch.int32)


def embedding_launches(
    dtype: torch.dtype,
    width: int,
    tokens: int = 16384,
    num_weights: int = 128256,
    scaled: bool = False,
    indices: torch.dtype = torch.int64,
) -> list[Launch]:
    """The launches of a backward."""
    from opgraft_kernels.embedding import triton_kernels

    make = functools.partial(torch.empty, device="meta")
    g = make((tokens, width), dtype=dtype)
    return triton_kernels.plan(g, make(tokens, dtype=indices), num_weights, -1, scaled)[1]


# ------------------------------------------------------------------ norms of permuted inputs


def _permuted() -> Iterator[Launch]:
    """Every block of columns, whole and with lanes left over; and each option."""
    some = permuted_launches
    for hidden in (16, 32, 64, 128, 256, 512, 1024, 2048):
        yield from some(torch.bfloat16, hidden)
    for hidden in (1024, 2048):
        yield from some(torch.float32, hidden)
    yield from some(torch.float32, 96, side=7)
    yield from some(torch.bfloat16, 1000, side=7)
    yield from some(torch.float16, 768, has_mean=False)


def permuted_launches(
    dtype: torch.dtype, hidden: int, side: int = 28, has_mean: bool = True
) -> list[Launch]:
    """The launches of images' forward and, where there is one for such rows, of the backward, with
    a contiguous gradient."""
    from opgraft_kernels.norms import ops, triton_permuted

    make = functools.partial(torch.empty, device="meta")
    x = make((64, hidden, side, side), dtype=dtype).permute(0, 2, 3, 1)
    y, w, row = make(x.shape, dtype=dtype), make(hidden, dtype=dtype), make((64, side, side, 1))
    mean, b = (row, w) if has_mean else (None, None)
    forward = ops.Forward(x, w, b, y, mean, row, hidden, 1e-5)
    planned = [triton_permuted.plan_forward(forward, 1)]
    if hidden <= triton_permuted.MAX_HIDDEN_BACKWARD:
        backward = ops.Backward(y, x, w, mean, row, y, w, b, hidden)
        planned += triton_permuted.plan_backward(backward, 1)
    return planned


# ------------------------------------------------------------------ copies


def _copies() -> Iterator[Launch]:
    """Each pair of dtypes."""
    dtypes = torch.float32, torch.float16, torch.bfloat16
    for source, target in itertools.permutations(dtypes, 2):
        yield copy_launch(source, target)


def copy_launch(source: torch.dtype, target: torch.dtype) -> Launch:
    from opgraft_kernels.copies import triton_kernels

    read, written = (torch.empty(2**20, dtype=each, device="meta") for each in (source, target))
    return triton_kernels.plan(written, read)


# ------------------------------------------------------------------ attention


def _attention(major: int) -> Iterator[Launch]:
    """Every tile, causal with a logsumexp and full without; heads that need padding; each way to
    read a bias, of what tiles grow with; and rows that are far apart."""
    for dim in (64, 128):
        for causal in (False, True):
            for length in (1024, 4096, 16384):
                yield from _attention_launches(torch.bfloat16, dim, length, causal, major)
    yield from _attention_launches(torch.float16, 96, 1024, True, major)
    for dtype, dim, length, bias in (
        (torch.bfloat16, 64, 1024, (2, 16, 1024, 1024)),
        (torch.bfloat16, 128, 2048, (2, 1, 2048, 2048)),
        (torch.float16, 256, 197, (2, 1, 1, 197)),
        (torch.float32, 64, 1024, (1, 1, 1024, 1024)),
        (torch.float32, 64, 1024, (2, 16, 1024, 1024)),
        (torch.float32, 64, 1024, None),
        (torch.float32, 64, 1024, (1, 1, 1, 1024)),
        (torch.float32, 100, 1024, (1, 16, 1024, 1024)),
        (torch.float32, 100, 1001, (1, 16, 1001, 1001)),
        (torch.float32, 128, 1024, None),
        (torch.float32, 64, 200, None),
        (torch.float32, 128, 200, (2, 16, 200, 200)),
    ):
        yield from _attention_launches(dtype, dim, length, False, major, bias)
    for dim in (64, 128):  # in float32, causal, of heads that share keys
        yield from _attention_launches(torch.float32, dim, 1024, True, major, key_heads=4)
    for bias in (None, (1, 16, 1024, 1024), (1, 1, 1, 1024)):  # so many that a GPU is full
        yield from _attention_launches(torch.bfloat16, 64, 1024, False, major, bias, batch=8)
    for dim, queries, keys, bias in (  # few keys, held at once
        (64, 4096, 77, None),
        (128, 1024, 128, None),
        (64, 197, 197, None),
        (32, 49, 49, (1, 16, 49, 49)),
        (64, 128, 128, (1, 1, 1, 128)),
    ):
        for batch in (4, 32):
            yield from _attention_launches(
                torch.bfloat16, dim, keys, False, major, bias, queries, batch=batch
            )
    for queries, keys, bias in ((1024, 1024, (1, 1, 1024, 1024)), (1024, 128, None)):
        yield from _attention_launches(
            torch.bfloat16, 64, keys, False, major, bias, queries, batch=4, apart=2**24
        )
    for dim in (64, 128):  # one query of heads that share keys
        yield from _attention_launches(
            torch.bfloat16, dim, 1024, False, major, queries=1, key_heads=4
        )
    if major == 9:  # for FlashAttention-4
        for dtype, dim, of_queries, height, by_keys in (
            (torch.bfloat16, 64, 1, 192, False),
            (torch.float16, 72, 2048, 192, False),
            (torch.bfloat16, 128, 2048, 128, False),
            (torch.bfloat16, 64, 1, 128, True),
            (torch.float16, 128, 2048, 128, True),
            (torch.bfloat16, 256, 2048, 128, False),
        ):
            yield from _list_launches(dtype, dim, of_queries, height, by_keys)
        for of_queries, length, by_keys in (
            (1, 2048, False),
            (2048, 2048, False),
            (777, 777, False),
            (1, 2048, True),
            (777, 777, True),
        ):
            yield from _boolean_list_launches(of_queries, length, by_keys)


def _list_launches(
    dtype: torch.dtype, dim: int, of_queries: int, height: int, by_keys: bool
) -> list[Launch]:
    """The launches that list tiles of so many queries, of a mask for so many queries."""
    from opgraft_kernels.attention.cutedsl_tiles import listed_backward_tile
    from opgraft_kernels.attention.triton_lists import plan_lists

    make = functools.partial(torch.empty, device="meta", dtype=dtype)
    q, k = make((2, 16, 2048, dim)), make((2, 4, 2048, dim))
    bias = make((2, 1, of_queries, 2048)).expand(2, 16, 2048, 2048)
    logsumexp = make((2, 16, 2048), dtype=torch.float32) if by_keys else None
    _, width = listed_backward_tile(dim)
    return plan_lists(bias, q, k, 0.1, height, width, logsumexp).launches


def _boolean_list_launches(of_queries: int, length: int, by_keys: bool) -> list[Launch]:
    """The same of a boolean mask, for so many queries and keys."""
    from opgraft_kernels.attention.triton_lists import plan_boolean_lists

    mask = torch.empty((2, 1, of_queries, length), dtype=torch.bool, device="meta")
    mask = mask.expand(2, 16, length, length)
    logsumexp = torch.empty((2, 16, length), device="meta") if by_keys else None
    height = 128 if by_keys else 192
    return plan_boolean_lists(mask, height, 128, -65536.0, logsumexp).launches


def _attention_launches(
    dtype: torch.dtype,
    dim: int,
    length: int,
    causal: bool,
    major: int,
    bias_shape: tuple[int, ...] | None = None,
    queries: int | None = None,
    key_heads: int = 16,
    batch: int = 2,
    apart: int | None = None,
) -> Iterator[Launch]:
    """`apart`: how far rows are; None: as they are if all is contiguous."""
    from opgraft_kernels.attention import triton_kernels as kernels
    from opgraft_kernels.attention.triton_sizes import Device

    def heads_of(count: int, rows: int) -> torch.Tensor:
        shape = (batch, count, rows, dim)
        if apart is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        strides = (count * dim, dim, apart, 1)
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    device = Device(major)
    x, k = heads_of(16, queries or length), heads_of(key_heads, length)
    logsumexp = torch.empty(x.shape[:3], dtype=torch.float32, device="meta")
    bias, dbias = None, None
    if bias_shape is not None:
        of_scores = (batch, 16, queries or length, length)
        bias = torch.empty(bias_shape, dtype=dtype, device="meta").expand(of_scores)
        dbias = torch.empty(bias.shape, device="meta") if 0 not in bias.stride() else None
    lse = logsumexp if causal or bias is not None else None
    yield from kernels.plan_forward(x, k, k, x, lse, 0.1, causal, device, bias)
    yield from kernels.plan_backward(
        x, x, k, k, x, logsumexp, x, k, k, 0.1, causal, device, bias, dbias
    )


def _attention_kinds() -> Iterator[Any]:
    """Every head dimension once, and tiles that programs walk over."""
    from opgraft_kernels.attention.cutedsl_kernels import BiasKind, Kind
    from opgraft_kernels.attention.cutedsl_tiles import ForwardTile, ShortTile

    for dim, dim_v, causal in (
        (40, 40, False),
        (64, 64, True),
        (72, 72, False),
        (80, 80, True),
        (88, 88, False),
        (96, 96, False),
        (128, 128, True),
        (192, 128, False),
        (256, 256, True),
    ):
        yield Kind(True, torch.bfloat16, dim, dim_v, 1, causal, True, False)
        yield Kind(False, torch.bfloat16, dim, dim_v, 1, causal, True, False)
    yield Kind(True, torch.float16, 128, 128, 4, False, False, False)
    # Of each kind of heads the tiles that leave the fewest registers, and one block without another
    # ahead of it.
    for dim, group, causal, (queries, keys, *stages) in (
        (40, 1, False, (192, 144)),
        (64, 1, False, (192, 128)),
        (64, 1, True, (128, 128)),
        (64, 4, True, (192, 128)),
        (16, 1, False, (192, 160)),
        (64, 1, False, (128, 240)),
        (64, 5, False, (128, 208)),
        (72, 1, False, (192, 96)),
        (80, 1, True, (128, 128)),
        (96, 1, False, (192, 96)),
        (96, 1, False, (128, 208)),
        (128, 1, False, (128, 160)),
        (112, 1, False, (128, 208, 1)),
        (128, 1, False, (128, 176, 1)),
        (128, 4, True, (128, 128)),
        (128, 5, False, (128, 128)),
    ):
        walked = ForwardTile(queries, keys, MULTIPROCESSORS, *stages)
        yield Kind(True, torch.bfloat16, dim, dim, group, causal, True, False, walked)
    # Rows that are longer in shared memory than heads, and two programs that load for both.
    for dim, group, causal, size, is_shared in (
        (40, 1, False, (192, 144), False),
        (72, 1, False, (128, 128), True),
        (72, 1, True, (128, 128), False),
        (80, 4, True, (128, 128), False),
        (80, 1, False, (128, 160), False),
        (104, 1, False, (128, 160), False),
    ):
        walked = ForwardTile(*size, MULTIPROCESSORS, is_wide=True, is_shared=is_shared)
        yield Kind(True, torch.bfloat16, dim, dim, group, causal, True, False, walked)
    shared = ForwardTile(192, 96, MULTIPROCESSORS, is_shared=True)
    yield Kind(True, torch.float16, 88, 88, 1, False, True, False, shared)
    for is_forward in (True, False):
        yield Kind(is_forward, torch.bfloat16, 128, 128, 4, True, True, True)
    for dim, group, bias, of_bias in (
        (64, 1, BiasKind(torch.bfloat16, True, True), ForwardTile(192, 128, MULTIPROCESSORS)),
        (72, 1, BiasKind(torch.bfloat16, True, False), ForwardTile(128, 128, MULTIPROCESSORS)),
        (96, 4, BiasKind(torch.float32, False, True), ForwardTile(128, 128, 0)),
        (128, 1, BiasKind(torch.bfloat16, False, False), ForwardTile(128, 128, MULTIPROCESSORS)),
        (256, 4, BiasKind(torch.bfloat16, False, True), ForwardTile(128, 64, 0)),
    ):
        yield Kind(True, torch.bfloat16, dim, dim, group, False, True, False, of_bias, bias)
        yield Kind(False, torch.bfloat16, dim, dim, group, False, True, False, bias=bias)
    # Biases of each head's own.
    for dtype, dim, group, of_bias in (
        (torch.bfloat16, 64, 1, ForwardTile(192, 128, MULTIPROCESSORS)),
        (torch.float16, 64, 4, ForwardTile(128, 128, 0)),
        (torch.bfloat16, 72, 1, ForwardTile(128, 128, MULTIPROCESSORS)),
        (torch.bfloat16, 96, 1, ForwardTile(128, 128, MULTIPROCESSORS)),
        (torch.bfloat16, 128, 1, ForwardTile(128, 96, MULTIPROCESSORS)),
        (torch.float16, 128, 4, ForwardTile(128, 128, 0)),
    ):
        dense = BiasKind(dtype, False, True, is_dense=True)
        yield Kind(True, dtype, dim, dim, group, False, True, False, of_bias, dense)
        yield Kind(False, dtype, dim, dim, group, False, True, False, bias=dense)
    # Boolean masks.
    for dim, group, is_by_key, of_mask in (
        (64, 1, True, ForwardTile(192, 128, MULTIPROCESSORS)),
        (128, 4, False, ForwardTile(128, 128, MULTIPROCESSORS)),
        (256, 1, False, ForwardTile(128, 64, 0)),
    ):
        mask = BiasKind(torch.bool, is_by_key, True)
        for has_logsumexp in (False, True):
            yield Kind(
                *(True, torch.bfloat16, dim, dim, group, False, has_logsumexp, False),
                *(of_mask, mask),
            )
        yield Kind(False, torch.bfloat16, dim, dim, group, False, True, False, bias=mask)
    # Backwards of short sequences.
    for dtype, dim, short in (
        (torch.bfloat16, 64, ShortTile(128, 2)),
        (torch.float16, 40, ShortTile(112, 2)),
        (torch.bfloat16, 64, ShortTile(80, 1)),
        (torch.bfloat16, 128, ShortTile(64, 1)),
        (torch.float16, 72, ShortTile(64, 1)),
    ):
        yield Kind(False, dtype, dim, dim, 1, False, True, False, short=short)
