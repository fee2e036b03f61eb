"""What two runs of an op returned, compared: everything but values, and how far values may differ.

The contract check, shadow mode, traced impls, launch plans that are tried out, and verification ask
here, so that what one of them takes for a difference the others do too: which outputs and arguments
are compared by their values, and which in no way, is said here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from opgraft.ops.schema import Call, Op
from opgraft.router import copies

#: Outputs that hold a random generator's state: a kernel may keep it in its own way.
STATES = frozenset(
    {"philox_seed", "philox_offset", "rng_state", "seed", "offset", "unused", "reserve"}
)
#: Outputs whose values nobody may rely on: those, and what is there for debugging.
UNSPECIFIED = STATES | {"debug_attn_mask"}
#: Arguments that an op uses up, or goes on counting in, and an impl need not.
USED_UP = frozenset({"reserve", "dropout_state"})

# How far two right results may be apart, as a share of the native one's largest value: rounding of
# the dtype, and sums of many thousand terms that were added up in another order.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}

#: Whether native's strides of an output are those that the op promises: asked with its index, its
#: place in a list of tensors (None where the output is none), and the tensor.
Promises = Callable[[int, int | None, torch.Tensor], bool]


class Returned:
    """What a run of an op returned, and the tensors that it was given.

    Args:
        op: the op.
        outputs: one value per output of the schema.
        given: the tensors among the arguments.
    """

    def __init__(self, op: Op, outputs: Sequence[Any], given: Iterable[torch.Tensor]) -> None:
        self.op = op
        self.outputs = outputs
        self.given = tuple(given)

    def flat(self) -> Iterator[tuple[int, int | None, Any]]:
        """Every value, with its output's index and its place where the output is a list."""
        for index, value in enumerate(self.outputs):
            if isinstance(value, (list, tuple)):
                yield from ((index, place, item) for place, item in enumerate(value))
            else:
                yield index, None, value

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that it returned, but for random states."""
        for index, _, value in self.flat():
            if isinstance(value, torch.Tensor) and not is_state(self.op, index):
                yield value


def as_outputs(op: Op, result: Any) -> tuple[Any, ...]:
    """An op's result as one value per output of the schema."""
    return (result,) if len(op.returns) == 1 else tuple(result or ())


def is_state(op: Op, index: int) -> bool:
    """Whether an output holds a random generator's state."""
    return index < len(op.returns) and op.returns[index].name in STATES


def has_values(op: Op, index: int) -> bool:
    """Whether the values of an output are what the op promises, and are compared.

    >>> from opgraft.ops.schema import resolve
    >>> op = resolve("aten::_scaled_dot_product_flash_attention")
    >>> [op.returns[index].name for index in range(len(op.returns)) if has_values(op, index)][:2]
    ['output', 'logsumexp']
    """
    return index >= len(op.returns) or op.returns[index].name not in UNSPECIFIED


def _is_written(op: Op, index: int) -> bool:
    """Whether an output is an argument that the op writes to."""
    alias = op.returns[index].alias_info
    return alias is not None and alias.is_write


def name_of(op: Op, index: int, place: int | None = None) -> str:
    """How messages name an output."""
    name = op.returns[index].name
    item = "" if place is None else f", item {place}"
    return f"output {index}" + (f" ({name})" if name else "") + item


# ------------------------------------------------------------------ all but values


def compare(
    mine: Returned, native: Returned, promises: Promises | None = None
) -> Iterator[tuple[str, str]]:
    """How what an impl returned is not what native returned, values aside.

    Args:
        mine: what the impl returned.
        native: what native returned, for the same arguments or copies that lie as they do.
        promises: whether strides count; None: they always do.

    Yields:
        The output's name, and what it is "returned with" or "in".
    """
    op = mine.op
    for index, (one, other) in enumerate(zip(mine.outputs, native.outputs, strict=True)):
        if is_state(op, index):
            continue
        lists = [isinstance(each, (list, tuple)) for each in (one, other)]
        if any(lists) and not all(lists):
            difference = f"with {describe(one)}, native returns {describe(other)}"
        elif all(lists) and len(one) != len(other):
            difference = f"with {len(one)} items, native returns {len(other)}"
        else:
            continue
        yield name_of(op, index), difference
        return
    pairs = [
        (index, place, one, other)
        for (index, place, one), (_, _, other) in zip(mine.flat(), native.flat(), strict=True)
        if not is_state(op, index)
    ]
    for index, place, one, other in pairs:
        label = name_of(op, index, place)
        # What is written to is the caller's own, whose copy is neither a leaf nor a Parameter.
        compared = place_differences if _is_written(op, index) else metadata_differences
        for difference in compared(one, other):
            yield label, f"with {difference}"
        if layouts_differ(one, other) and (promises is None or promises(index, place, other)):
            yield (
                label,
                f"with strides {one.stride()}, native's are {other.stride()}",
            )
    yield from _sharing_differences(mine, native, pairs)


def metadata_differences(mine: Any, native: Any) -> Iterator[str]:
    """How one value differs from native's in what it is: all but strides, sharing and values."""
    if not isinstance(mine, torch.Tensor) or not isinstance(native, torch.Tensor):
        if type(mine) is not type(native):
            yield f"{describe(mine)}, native returns {describe(native)}"
        return
    if type(mine) is not type(native):
        yield f"type {describe(mine)}, native's is {describe(native)}"
    yield from place_differences(mine, native)
    for what, has in _FLAGS.items():
        if has(mine) and not has(native):
            yield f"{what}, native's has none"
        elif has(native) and not has(mine) and not (what in _OF_VIEWS and native._is_view()):
            yield f"no {what}, native's has one"
    yield from _layout_differences(mine, native)


def place_differences(mine: Any, native: Any) -> Iterator[str]:
    """How one tensor differs from native's in dtype, device, layout and shape."""
    if not isinstance(mine, torch.Tensor) or not isinstance(native, torch.Tensor):
        if mine is not native:
            yield f"{describe(mine)}, native returns {describe(native)}"
        return
    for what in ("dtype", "device", "layout"):
        if getattr(mine, what) != getattr(native, what):
            yield f"{what} {getattr(mine, what)}, native's is {getattr(native, what)}"
    if mine.is_nested or native.is_nested:
        return  # a nested tensor has no shape to speak of
    sizes = zip(mine.shape, native.shape, strict=False)
    if mine.ndim != native.ndim or any(sizes_differ(one, other) for one, other in sizes):
        ranks = f" (ndim {mine.ndim}, {native.ndim})" if mine.ndim != native.ndim else ""
        yield f"shape {mine.shape}, native's is {native.shape}{ranks}"


_FLAGS: dict[str, Callable[[torch.Tensor], bool]] = {
    "a conjugate bit": torch.Tensor.is_conj,
    "a negative bit": torch.Tensor.is_neg,
    "a gradient to be computed (requires_grad)": lambda t: t.requires_grad,
    "inference mode's mark (is_inference)": torch.Tensor.is_inference,
}


#: What a view of an argument has of that: autograd gives it to an impl's after the impl.
_OF_VIEWS = ("a gradient to be computed (requires_grad)",)


def _layout_differences(mine: torch.Tensor, native: torch.Tensor) -> Iterator[str]:
    if mine.layout != native.layout:
        return
    one, other = _quantizer(mine), _quantizer(native)
    if one != other:
        yield f"quantizer {one}, native's is {other}"
    if mine.layout == torch.sparse_coo:
        for what in ("sparse_dim", "dense_dim", "is_coalesced"):
            one, other = getattr(mine, what)(), getattr(native, what)()
            # What is coalesced and does not say so costs time, no more.
            if one != other and not (what == "is_coalesced" and one):
                yield f"{what} {one}, native's is {other}"
    parts = zip(_parts(mine), _parts(native), strict=True)
    for (what, part), (_, its) in parts:
        if part.dtype != its.dtype:
            yield f"{what} of dtype {part.dtype}, native's are of {its.dtype}"


def _quantizer(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    if not tensor.is_quantized:
        return None
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return (scheme, tensor.q_scale(), tensor.q_zero_point())
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return (scheme, tensor.q_per_channel_axis(), scales.tolist(), zero_points.tolist())


def _parts(tensor: torch.Tensor) -> tuple[tuple[str, torch.Tensor], ...]:
    """The strided tensors that a sparse one is made of."""
    if tensor.layout == torch.sparse_coo:
        return (("indices", tensor._indices()), ("values", tensor._values()))
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        rows, columns = tensor.crow_indices(), tensor.col_indices()
        return (("indices", rows), ("indices", columns), ("values", tensor.values()))
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        columns, rows = tensor.ccol_indices(), tensor.row_indices()
        return (("indices", columns), ("indices", rows), ("values", tensor.values()))
    return ()


def describe(value: Any) -> str:
    """How messages say what a value is."""
    return type(value).__name__ if value is not None else "None"


# ------------------------------------------------------------------ sizes and strides


def layouts_differ(mine: Any, native: Any) -> bool:
    """Whether two tensors of the same shape have other strides where these matter."""
    if not all(isinstance(each, torch.Tensor) for each in (mine, native)):
        return False
    if any(copies.storage_of(each) is None for each in (mine, native)):
        return False
    if mine.ndim != native.ndim:
        return True
    if any(_is_number(size, 0) for size in native.shape):
        return False
    return any(
        not _is_number(size, 1) and sizes_differ(one, other)
        for size, one, other in zip(native.shape, mine.stride(), native.stride(), strict=True)
    )


def sizes_differ(one: Any, other: Any) -> bool:
    """Whether two sizes surely differ: of symbols, whatever they stand for."""
    if isinstance(one, int) and isinstance(other, int):
        return one != other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(torch.sym_not(one == other)))


def _is_number(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


# ------------------------------------------------------------------ sharing of memory


def shares(tensor: torch.Tensor, others: Iterable[Any]) -> bool:
    """Whether a tensor lies in the memory of one of the others."""
    return any(isinstance(each, torch.Tensor) and _is_shared(tensor, each) for each in others)


def _is_shared(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not _memories(one).isdisjoint(_memories(other))


def _memories(tensor: torch.Tensor) -> frozenset[int]:
    """The storages that a tensor's elements lie in; none of what is empty."""
    parts = [part for _, part in _parts(tensor)] or [tensor]
    storages = [copies.storage_of(each) for each in parts if not is_empty(each)]
    return frozenset(each._cdata for each in storages if each is not None)


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor surely has no element."""
    return not tensor.is_nested and any(_is_number(size, 0) for size in tensor.shape)


def _sharing_differences(
    mine: Returned, native: Returned, pairs: Sequence[tuple[int, int | None, Any, Any]]
) -> Iterator[tuple[str, str]]:
    """Memory shared with an argument or another output, where native's is not, or the reverse."""
    earlier: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for index, place, one, other in pairs:
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue
        label = name_of(mine.op, index, place)
        alias = mine.op.returns[index].alias_info
        if not _is_written(mine.op, index):  # else it is the argument, as another check says
            found = _from_arguments(mine, native, one, other, is_view=alias is not None)
            yield from ((label, each) for each in found)
        for name, before, its in earlier:
            if _is_shared(one, before) and not _is_shared(other, its):
                where = f"in the same memory, {name} and {label}; return separate tensors"
                yield "two outputs", where
            elif alias and _is_shared(other, its) and not _is_shared(one, before):
                yield label, f"in other memory than {name}, where native's share theirs"
        earlier.append((label, one, other))


def _from_arguments(
    mine: Returned, native: Returned, one: torch.Tensor, other: torch.Tensor, *, is_view: bool
) -> Iterator[str]:
    """Memory shared with arguments. What no schema promises (`_unsafe_view`) need not be shared."""
    for given, its in zip(mine.given, native.given, strict=True):
        shared, should = _is_shared(one, given), _is_shared(other, its)
        if shared and not should:
            yield "in the memory of an argument; return a new tensor"
        elif is_view and should and not shared:
            yield "in new memory, where native's is a view of an argument; return a view"
        elif one is given and other is not its:
            yield "being an argument itself, where native's is a view of it; return a view"
        elif is_view and shared and _offset(one, given) != _offset(other, its):
            offsets = _offset(one, given), _offset(other, its)
            yield "{} bytes into an argument's memory, native's is {}".format(*offsets)
        else:
            continue
        return


def _offset(tensor: torch.Tensor, base: torch.Tensor) -> Any:
    """Where a tensor begins behind another one in the same storage, in bytes."""
    if copies.storage_of(tensor) is None or copies.storage_of(base) is None:
        return 0
    places = [each.storage_offset() * each.element_size() for each in (tensor, base)]
    return places[0] - places[1] if all(isinstance(each, int) for each in places) else 0


# ------------------------------------------------------------------ values


def with_values(mine: Returned, native: Returned) -> Iterator[tuple[str, Any, Any]]:
    """The outputs of two runs that are compared by their values, each with its name."""
    for (index, place, one), (_, _, other) in zip(mine.flat(), native.flat(), strict=True):
        if has_values(mine.op, index):
            yield name_of(mine.op, index, place), one, other


def written_values(mine: Call, native: Call) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The arguments that two runs wrote to and that are compared, each with its name."""
    for (argument, one), (_, other) in zip(mine.written(), native.written(), strict=True):
        if argument.name not in USED_UP:
            yield f"argument {argument.name!r}", one, other


def same_bits(one: torch.Tensor, other: Any) -> bool:
    """Whether two tensors are the same, bit for bit; NaN is NaN, whatever its bits.

    >>> nan = torch.tensor([float("nan"), 1.0])
    >>> same_bits(nan, nan.clone()), same_bits(nan, nan.nan_to_num()), same_bits(nan, nan[:1])
    (True, False, False)
    """
    if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.is_complex():
        one, other = (torch.view_as_real(each.resolve_conj()) for each in (one, other))
    return torch.equal(one.isnan(), other.isnan()) and bool((one.eq(other) | one.isnan()).all())


def distance(mine: torch.Tensor, native: torch.Tensor, factor: float = 1.0) -> str | None:
    """How the values of two tensors differ beyond rounding; None where they do not.

    Args:
        mine: one tensor.
        native: another one of the same dtype and shape.
        factor: on what may differ.
    """
    if mine.numel() == 0:
        return None
    if mine.dtype not in TOLERANCES:
        count = int((mine != native).sum())
        return f"{count} of {mine.numel()} elements" if count else None
    finite = native.isfinite()
    elsewhere = int((finite != mine.isfinite()).sum())
    if elsewhere:
        return f"{elsewhere} of {mine.numel()} elements are NaN or infinite on one side only"
    apart = torch.where(finite, (mine - native).abs(), 0).double()
    size = float(torch.where(finite, native.abs(), 0).max())
    allowed = TOLERANCES[mine.dtype] * factor * size
    largest = float(apart.max())
    if largest <= allowed:
        return None
    count = int((apart > allowed).sum())
    return (
        f"{count} of {mine.numel()} elements are up to {largest:.3g} off, of values up to "
        f"{size:.3g}; allowed are {allowed:.3g}"
    )
