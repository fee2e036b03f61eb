"""Calls of the attention ops for `opgraft verify`, on both sides of what the conditions ask.

Made by hand, as native's kernels trust the sizes and strides that these ops get, and crash on
others; and because those of PyTorch's own tests are too small to be taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch

from opgraft_kernels.integers import round_up
from opgraft_kernels.samples import MEASURED

from . import aten, boolean_ops
from .overrides import FEWEST_DIMS_32BIT, MANY_QUERIES, MAX_DIM, TILE

__all__ = [
    "boolean_mask",
    "boolean_samples",
    "calls",
    "samples",
    "samples_of_boolean_op",
    "samples_of_boolean_op_backward",
    "strided_calls",
    "strided_mask",
    "strided_samples",
]


class _Case(NamedTuple):
    dtype: torch.dtype = torch.bfloat16
    heads: int = 16
    key_heads: int = 16
    queries: int = 2048
    keys: int = 2048
    dim: int = 128
    dim_v: int = 128
    is_causal: bool = False
    batch: int = 1
    dropout_p: float = 0.0
    scale: float | None = None
    # The shape of an additive mask; 1 where it is broadcast.
    bias: tuple[int, ...] | None = None
    # In memory [batch, length, heads, dim], as a projection's output is seen.
    is_projected: bool = False


_FLOAT16 = torch.float16

# What is worth the most first: a verification may stop anywhere.
_CASES = (
    _Case(),
    _Case(_FLOAT16, is_causal=True),
    _Case(is_projected=True),
    _Case(heads=8, key_heads=1, queries=4096, keys=4096, is_causal=True),  # grouped queries
    _Case(queries=511, keys=8192),  # the last that is too few, and the first that is not
    _Case(queries=512, keys=8192),
    _Case(_FLOAT16, queries=2047, keys=2113),
    _Case(queries=1024, keys=4096, is_causal=True),  # aligned otherwise by different ops
    _Case(_FLOAT16, batch=4, heads=32, key_heads=32, dim=64, dim_v=64),
    _Case(scale=0.25),
    _Case(scale=-0.25),
    _Case(dropout_p=0.1),
    _Case(bias=(1, 16, 2048, 2048)),
    _Case(_FLOAT16, batch=2, bias=(2, 1, 1, 2048)),
    _Case(torch.float32, heads=2, key_heads=2, queries=64, keys=64),
    _Case(batch=4, queries=197, keys=200, dim=72, dim_v=72, bias=(1, 1, 197, 200)),
    _Case(heads=2, key_heads=2, queries=256, keys=256),
    _Case(dim=96, dim_v=96),
    _Case(dim=256, dim_v=256),
    _Case(dim=192, dim_v=128, is_causal=True),
    _Case(dim=72, dim_v=72),
)


def samples(
    arguments: Collection[str], device: torch.device, *, heads_first: bool
) -> Iterator[dict[str, Any]]:
    """Calls of a forward op, as arguments by name.

    Args:
        arguments: the op's, by name.
        device: where the tensors are to live.
        heads_first: whether the op's tensors are ``[batch, heads, length, dim]``, or else
            ``[batch, length, heads, dim]``.
    """
    for case in _CASES:
        if case.bias is not None and "attn_bias" not in arguments:
            continue
        named = {**_tensors(case, device, heads_first), **_options(case, device)}
        yield {name: value for name, value in named.items() if name in arguments}
    if "cum_seq_q" in arguments:
        for lengths in ((2048, 513, 1, 1534), (3, 5)):
            named = _packed_sequences(lengths, device)
            yield {name: value for name, value in named.items() if name in arguments}


def _tensors(case: _Case, device: torch.device, heads_first: bool) -> dict[str, torch.Tensor]:
    shapes = {
        "query": (case.heads, case.queries, case.dim),
        "key": (case.key_heads, case.keys, case.dim),
        "value": (case.key_heads, case.keys, case.dim_v),
    }
    made = {}
    for name, (heads, length, dim) in shapes.items():
        as_projected = case.is_projected or not heads_first
        shape = (length, heads, dim) if as_projected else (heads, length, dim)
        tensor = torch.randn(case.batch, *shape, device=device, dtype=case.dtype)
        made[name] = tensor.transpose(1, 2) if as_projected == heads_first else tensor
    return made


def _options(case: _Case, device: torch.device) -> dict[str, Any]:
    return {
        "attn_bias": None if case.bias is None else _bias(case, device),
        "compute_log_sumexp": True,
        "cum_seq_q": None,
        "cum_seq_k": None,
        "max_q": case.queries,
        "max_k": case.keys,
        "dropout_p": case.dropout_p,
        "is_causal": case.is_causal,
        "return_debug_mask": False,
        "scale": case.scale,
    }


def _bias(case: _Case, device: torch.device) -> torch.Tensor:
    """A mask as `F.scaled_dot_product_attention` gives it to the ops: expanded, with rows that
    begin at multiples of 16 elements."""
    assert case.bias is not None
    *others, keys = case.bias
    padded = torch.randn(*others, round_up(keys, 16), device=device, dtype=case.dtype)
    return padded[..., :keys].expand(case.batch, case.heads, case.queries, case.keys)


# --------------------------------------------------------------------------------------------------
# Boolean masks
# --------------------------------------------------------------------------------------------------

_BOOLEAN_CASES = (
    _Case(batch=2, queries=512, keys=512, dim=64, dim_v=64, is_projected=True),
    _Case(_FLOAT16, heads=4, key_heads=4, batch=2, queries=300, keys=333),
    _Case(heads=8, key_heads=2, queries=640, keys=640),  # grouped queries
    _Case(heads=4, key_heads=4, queries=200, keys=512, dim=72, dim_v=72, scale=0.25),
    _Case(heads=4, key_heads=4, queries=256, keys=256, dim=256, dim_v=256),
    _Case(heads=4, key_heads=4, queries=256, keys=256, scale=-0.25),
    _Case(heads=4, key_heads=4, queries=256, keys=256, dropout_p=0.1),
    _Case(torch.float32, heads=2, key_heads=2, queries=64, keys=64, dim=32, dim_v=32),
)
#: Of keys: a prefix; what a causal language model sees of a batch that is padded at its beginning,
#: where the first queries see nothing; nothing; everything; any.
_BOOLEAN_MASKS = ("padding", "causal", "nothing", "everything", "random")


def boolean_mask(
    name: str, batch: int, queries: int, keys: int, device: torch.device
) -> torch.Tensor:
    """A boolean mask that heads share, ``[batch, 1, queries or 1, keys]``."""
    key = torch.arange(keys, device=device)
    query = torch.arange(queries, device=device)[:, None]
    share = (torch.arange(batch, device=device) + 1)[:, None, None, None] / (batch + 1)
    if name == "padding":
        return key < share * keys
    if name == "causal":
        return (key <= query + keys - queries) & (key >= (1 - share) * keys / 2)
    if name == "random":
        return torch.rand(batch, 1, queries, keys, device=device) < 0.5
    whole = torch.full((batch, 1, 1, keys), name == "everything", device=device)
    return whole.expand(batch, 1, queries, keys)


def boolean_samples(device: torch.device) -> Iterator[dict[str, Any]]:
    """Calls of ``aten::scaled_dot_product_attention``, as arguments by name.

    Args:
        device: where the tensors are to live.
    """
    for case, name in itertools.product(_BOOLEAN_CASES, _BOOLEAN_MASKS):
        mask = boolean_mask(name, case.batch, case.queries, case.keys, device)
        yield _call_under(mask, case, device)


def _call_under(mask: torch.Tensor, case: _Case, device: torch.device) -> dict[str, Any]:
    """A call of the op that a model calls, as arguments by name."""
    return {
        **_tensors(case, device, heads_first=True),
        "attn_mask": mask,
        "dropout_p": case.dropout_p,
        "is_causal": False,
        "scale": case.scale,
        "enable_gqa": case.heads != case.key_heads,
    }


def samples_of_boolean_op(device: torch.device) -> Iterator[dict[str, Any]]:
    """Calls of the op of its forward, as arguments by name.

    Args:
        device: where the tensors are to live.
    """
    for compute_logsumexp, given in itertools.product((False, True), _of_boolean_ops(device)):
        yield {**given, "compute_logsumexp": compute_logsumexp}


def samples_of_boolean_op_backward(device: torch.device) -> Iterator[dict[str, Any]]:
    """Calls of the op of its backward, of what native's forward returned.

    Args:
        device: where the tensors are to live.
    """
    for given in _of_boolean_ops(device):
        if device.type == "cuda" and given["query"].dtype == torch.float32:
            continue  # native's forward is cuDNN's there, which has no float32
        out, logsumexp = boolean_ops.attention(**given, compute_logsumexp=True)
        yield {"grad_out": torch.randn_like(out), **given, "out": out, "logsumexp": logsumexp}


def _of_boolean_ops(device: torch.device) -> Iterator[dict[str, Any]]:
    """What both ops take."""
    for lowest, sample in itertools.product((-math.inf, -65504.0), boolean_samples(device)):
        if sample["dropout_p"] == 0.0:
            scale = aten.scale_of(sample["query"], sample["scale"])
            given = {name: sample[name] for name in ("query", "key", "value")}
            yield {**given, "mask": sample["attn_mask"], "scale": scale, "lowest": lowest}


# --------------------------------------------------------------------------------------------------
# Masks whose last stride is not 1
# --------------------------------------------------------------------------------------------------

#: A bias of each head's own, permuted as T5's; of each query alone, expanded along keys, as a
#: compiled ViT's; and such that rows are columns in memory.
_STRIDED_MASKS = ("bias", "of queries", "transposed", "transposed bias")


def strided_mask(name: str, case: _Case, device: torch.device) -> torch.Tensor:
    """A mask by name. Of all but the first a query attends to nothing."""
    batch, heads, queries, keys = case.batch, case.heads, case.queries, case.keys
    if name == "bias":
        bias = torch.randn(batch, queries, keys, heads, device=device, dtype=case.dtype)
        return bias.permute(0, 3, 1, 2)
    if name == "of queries":
        query = torch.arange(queries, device=device)[:, None]
        return (query > 0).expand(batch, 1, queries, keys)
    seen = torch.rand(batch, 1, keys, queries, device=device) < 0.5
    seen[..., 0] = False
    if name == "transposed":
        return seen.mT
    bias = torch.randn(seen.shape, device=device, dtype=case.dtype)
    return bias.masked_fill(~seen, -math.inf).mT


def strided_samples(device: torch.device) -> Iterator[dict[str, Any]]:
    """Calls of ``aten::scaled_dot_product_attention``, as arguments by name.

    Args:
        device: where the tensors are to live.
    """
    for case, name in itertools.product(_BOOLEAN_CASES, _STRIDED_MASKS):
        yield _call_under(strided_mask(name, case, device), case, device)


# --------------------------------------------------------------------------------------------------
# Calls to measure
# --------------------------------------------------------------------------------------------------

# Heads of queries that share one of keys, and the dimensions that models with such heads have.
_GROUP = 4
_GROUPED_DIMS = (64, 128, 256)
# Natively these refuse values of another dimension.
_SAME_DIMS = (aten.FLASH.op, aten.FLASH.backward_op)
# `F.scaled_dot_product_attention` repeats the keys for these ops, which know no groups.
_UNGROUPED = (aten.EFFICIENT.op, aten.EFFICIENT.backward_op)


def calls(
    op: str,
    device: torch.device,
    *,
    rows: int,
    keys: int,
    dim: int,
    itemsize: int = 2,
    for_all_queries: int | None = None,
    for_all_heads: int = 1,
    is_causal: bool = False,
    is_grouped: bool = False,
    holds_keys: int = 0,
    fills_tiles: int = 0,
) -> Iterator[dict[str, Any]]:
    """Calls of an attention op to measure, as arguments by name; none if there is no such call.

    As many queries as keys, where that many rows are wanted, and up to 16 heads. Kernels compute
    whole tiles of a sequence, each kernel other ones: lengths that fill them are one kind of calls,
    and a length that fills none, of native's either, stands for the other kind.

    Args:
        op: the op's name.
        device: where the tensors are to live.
        rows: queries of all heads and batches, at least; less than twice as many.
        keys: of a head, likewise.
        dim: of a head; 192 stands for values of 128, as DeepSeek has them.
        itemsize: bytes of an element.
        for_all_queries: whether they share the mask, 1 or 0; None: there is no mask.
        for_all_heads: whether they do.
        is_causal: whether it is causal; then there are as many queries as keys.
        is_grouped: whether four heads of queries share one of keys, as in Llama.
        holds_keys: whether there are many queries of up to a tile of keys, 1 or 0.
        fills_tiles: whether both lengths are multiples of a tile's height, 1 or 0.
    """
    if dim == 192 and op in _SAME_DIMS:
        return
    most = rows + rows // 2
    dtype = MEASURED[itemsize]
    for length in _lengths(keys, bool(fills_tiles)):
        queries = min(length, most // TILE * TILE if fills_tiles else most)
        if holds_keys:
            if keys > TILE:
                return
            length = min(length, TILE)
            # Of a whole tile of keys, queries that fill none are the other kind.
            is_other = length == TILE and not fills_tiles
            queries = MANY_QUERIES + TILE // 2 if is_other else MANY_QUERIES
        found = _batch_and_heads(rows, queries)
        if found is None or (is_causal and queries != length):
            continue
        batch, heads = found
        key_heads = heads // _GROUP if is_grouped else heads
        if key_heads == 0 or (is_grouped and (dim not in _GROUPED_DIMS or op in _UNGROUPED)):
            continue
        case = _Case(
            *(dtype, heads, key_heads, queries, length, dim, 128 if dim == 192 else dim),
            is_causal=bool(is_causal),
            batch=batch,
            is_projected=True,
        )
        if for_all_queries is not None:
            bias = (1 if for_all_heads else heads, 1 if for_all_queries else queries)
            # One head, or query, has a mask that cannot be told from one that all share.
            if (not for_all_heads and heads == 1) or (not for_all_queries and queries == 1):
                continue
            case = case._replace(bias=(batch, *bias, length))
        yield _measured_call(op, case, device)
        if not fills_tiles:
            return


def strided_calls(
    device: torch.device, *, rows: int, keys: int, dim: int, mask_itemsize: int
) -> Iterator[dict[str, Any]]:
    """Calls with a mask whose last stride is not 1, to measure, as arguments by name.

    Args:
        device: where the tensors are to live.
        rows: queries of all heads and batches, at least; less than twice as many.
        keys: of a head, likewise.
        dim: of a head, likewise, but no more than the largest.
        mask_itemsize: 1: the mask is a boolean one, of queries; 2: a bias of each head's own.
    """
    length = keys + keys // 2
    queries = min(length, rows + rows // 2)
    found = _batch_and_heads(rows, queries)
    if found is None:
        return
    batch, heads = found
    for width in dict.fromkeys((dim, min(dim + dim // 4 // 8 * 8, MAX_DIM))):
        case = _Case(
            *(MEASURED[2], heads, heads, queries, length, width, width),
            batch=batch,
            is_projected=True,
        )
        mask = strided_mask("of queries" if mask_itemsize == 1 else "bias", case, device)
        yield _call_under(mask, case, device)


def _lengths(keys: int, fills_tiles: bool) -> list[int]:
    """Numbers of keys to measure: from `keys` to less than twice as many.

    Of those that fill no tile one is enough: the second is for where the first is too long. Both
    leave the last tile almost empty where `keys` begins a bucket.
    """
    middle = keys + keys // 2
    if fills_tiles:
        # Random numbers, with which tables are tried, begin no bucket.
        filling = dict.fromkeys(round_up(length, TILE) for length in (keys, middle))
        return [length for length in filling if length < 2 * keys]
    length = min(middle + 8, 2 * keys - 1)
    length -= 8 * (length % TILE == 0)
    return [each for each in (length, length - TILE) if each >= keys]


def _measured_call(op: str, case: _Case, device: torch.device) -> dict[str, Any]:
    named = {**_tensors(case, device, heads_first=True), **_options(case, device)}
    if case.bias is not None and case.bias[1] == 1:
        mask = named["attn_bias"]
        mask = mask.as_strided(case.bias, mask.stride())
        _mask_padding(mask, op)
        if not op.startswith("_"):  # the op that a model calls, with a boolean mask
            named |= {"attn_mask": mask == 0, "enable_gqa": False}
    named["compute_log_sumexp"] = case.dtype.itemsize == 2 or case.dim >= FEWEST_DIMS_32BIT
    if op.endswith("_backward"):
        named |= _of_backward(op, named)
    schema = getattr(torch.ops.aten, op).default._schema
    return {each.name: named[each.name] for each in schema.arguments}


def _mask_padding(mask: torch.Tensor, op: str) -> None:
    """What heads share is a mask in models, and how much of it is left out matters. Here it is
    padding: a quarter of it, as with lengths from a half to the whole. Causal is less."""
    batch, keys = mask.shape[0], mask.shape[-1]
    each = torch.arange(batch, device=mask.device)
    lengths = keys * (0.5 + (each + 0.5) / (2 * batch))
    removed = torch.arange(keys, device=mask.device) >= lengths[:, None]
    # What torch 2.11 makes of a boolean mask for this op, and the kernels need more time for.
    nothing = -65504.0 if "cudnn" in op else -torch.inf
    mask.zero_().masked_fill_(removed[:, None, None], nothing)


def _batch_and_heads(rows: int, queries: int) -> tuple[int, int] | None:
    """With which there are at least `rows` of queries, and less than twice as many."""
    for heads in (16, 8, 4, 2, 1):
        batch = (rows + rows // 2) // (heads * queries)
        if batch and rows <= batch * heads * queries:
            return batch, heads
    return None


def _of_backward(op: str, forward: dict[str, Any]) -> dict[str, Any]:
    """What a backward takes besides its forward's arguments.

    How long it takes does not depend on the values, if only no exponential is infinite.
    """
    (layout,) = (
        each for each in (aten.CUDNN, aten.FLASH, aten.EFFICIENT) if each.backward_op == op
    )
    query, key, value = forward["query"], forward["key"], forward["value"]
    out = torch.randn_like(query[..., : value.shape[-1]])
    logsumexp = layout.logsumexp(query, True)
    assert logsumexp is not None
    results = layout.results(out, logsumexp.fill_(8.0), query, key)
    seed, offset = results[6:8] or results[2:4]
    return {
        "grad_out": out,
        "grad_out_": out,
        "out": out,
        "logsumexp": logsumexp,
        "philox_seed": seed,
        "philox_offset": offset,
        "cum_seq_q": None,
        "cum_seq_k": None,
        "max_q": query.shape[2],
        "max_k": key.shape[2],
        "grad_input_mask": [True, True, True, _wants_gradient(forward["attn_bias"])],
    }


def _wants_gradient(bias: torch.Tensor | None) -> bool:
    """Whether a bias is learnt, as those are that each head has one of. Others are masks."""
    return bias is not None and bias.stride(1) != 0


def _packed_sequences(lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Packed sequences: laid end to end, with no padding."""
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    case = _Case(queries=max(lengths), keys=max(lengths), is_causal=True)
    shape = (sum(lengths), case.heads, case.dim)
    names = ("query", "key", "value")
    return {
        **_options(case, device),
        **{name: torch.randn(shape, device=device, dtype=case.dtype) for name in names},
        "cum_seq_q": ends,
        "cum_seq_k": ends,
    }
