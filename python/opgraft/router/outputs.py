"""Comparing what two runs of an op returned: metadata, aliasing, and values within a tolerance.

The contract check, shadow mode, traced impls, trials and proofs of launch plans, and verification
all use this module, so that they agree on what a difference is. Only this module says which outputs
and arguments are compared by value, and which are exempt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from opgraft.ops.schema import Call, Op
from opgraft.router import copies

#: Outputs that hold a random generator's state. A kernel may represent it in its own way.
RNG_STATES = frozenset(
    {"philox_seed", "philox_offset", "rng_state", "seed", "offset", "unused", "reserve"}
)
#: Outputs whose values nobody may rely on: random states, and what exists for debugging.
UNSPECIFIED = RNG_STATES | {"debug_attn_mask"}
#: Arguments that an op uses as scratch memory or advances. An impl need not.
CONSUMED = frozenset({"reserve", "dropout_state"})

# How far two correct results may differ, relative to native's largest value. This allows for
# rounding in the dtype, and for sums of thousands of terms that are added up in another order.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}

#: Elements that are compared at a time: several temporaries of as many.
_PART = 2**22

#: Whether the op promises native's strides of an output. Called with the output's index, the item's
#: index if the output is a list of tensors (else None), and the tensor.
StridesPromised = Callable[[int, int | None, torch.Tensor], bool]


class OpResult:
    """What a run of an op returned, and its input tensors.

    Args:
        op: the op.
        outputs: one value per output of the schema.
        given: the tensors among the arguments.
    """

    def __init__(self, op: Op, outputs: Sequence[Any], inputs: Iterable[torch.Tensor]) -> None:
        self.op = op
        self.outputs = outputs
        self.inputs = tuple(inputs)

    def flat(self) -> Iterator[tuple[int, int | None, Any]]:
        """Every value, with its output's index, and the item's index if the output is a list."""
        for index, value in enumerate(self.outputs):
            if isinstance(value, (list, tuple)):
                yield from ((index, item, each) for item, each in enumerate(value))
            else:
                yield index, None, value

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every returned tensor that is not a random state."""
        for index, _, value in self.flat():
            if isinstance(value, torch.Tensor) and not is_rng_state(self.op, index):
                yield value


def as_outputs(op: Op, result: Any) -> tuple[Any, ...]:
    """An op's result as one value per output of the schema."""
    return (result,) if len(op.returns) == 1 else tuple(result or ())


def is_rng_state(op: Op, index: int) -> bool:
    """Whether an output holds a random generator's state."""
    return index < len(op.returns) and op.returns[index].name in RNG_STATES


def has_comparable_values(op: Op, index: int) -> bool:
    """Whether the op promises the values of an output, so that they are compared.

    >>> from opgraft.ops.schema import resolve
    >>> op = resolve("aten::_scaled_dot_product_flash_attention")
    >>> [each.name for i, each in enumerate(op.returns) if has_comparable_values(op, i)][:2]
    ['output', 'logsumexp']
    """
    return index >= len(op.returns) or op.returns[index].name not in UNSPECIFIED


def _is_written(op: Op, index: int) -> bool:
    """Whether an output is an argument that the op writes to."""
    alias = op.returns[index].alias_info
    return alias is not None and alias.is_write


def name_of(op: Op, index: int, item: int | None = None) -> str:
    """The name of an output in messages."""
    name = op.returns[index].name
    suffix = "" if item is None else f", item {item}"
    return f"output {index}" + (f" ({name})" if name else "") + suffix


# ------------------------------------------------------------------ all but values


def compare(
    actual: OpResult, native: OpResult, strides_promised: StridesPromised | None = None
) -> Iterator[tuple[str, str]]:
    """How an impl's result differs from native's, values aside.

    Args:
        actual: what the impl returned.
        native: what native returned, for the same arguments or for copies with the same layout in
            memory.
        strides_promised: whether an output's strides are compared; None: always.

    Yields:
        The output's name, and the difference, as a phrase that begins with "with" or "in".
    """
    op = actual.op
    for index, (output, native_output) in enumerate(
        zip(actual.outputs, native.outputs, strict=True)
    ):
        if is_rng_state(op, index):
            continue
        lists = [isinstance(each, (list, tuple)) for each in (output, native_output)]
        if any(lists) and not all(lists):
            difference = f"with {describe(output)}, native returns {describe(native_output)}"
        elif all(lists) and len(output) != len(native_output):
            difference = f"with {len(output)} items, native returns {len(native_output)}"
        else:
            continue
        yield name_of(op, index), difference
        return
    pairs = [
        (index, item, output, native_output)
        for (index, item, output), (_, _, native_output) in zip(
            actual.flat(), native.flat(), strict=True
        )
        if not is_rng_state(op, index)
    ]
    for index, item, output, native_output in pairs:
        label = name_of(op, index, item)
        # A written argument is the caller's tensor. Its copy is neither a leaf nor a Parameter.
        compared = (
            dtype_device_shape_differences if _is_written(op, index) else metadata_differences
        )
        for difference in compared(output, native_output):
            yield label, f"with {difference}"
        if strides_differ(output, native_output) and (
            strides_promised is None or strides_promised(index, item, native_output)
        ):
            yield (
                label,
                f"with strides {output.stride()}, native's are {native_output.stride()}",
            )
    yield from _aliasing_differences(actual, native, pairs)


def metadata_differences(actual: Any, native: Any) -> Iterator[str]:
    """How a value's metadata differs from native's: all but strides, aliasing and values."""
    if not isinstance(actual, torch.Tensor) or not isinstance(native, torch.Tensor):
        if type(actual) is not type(native):
            yield f"{describe(actual)}, native returns {describe(native)}"
        return
    if type(actual) is not type(native):
        yield f"type {describe(actual)}, native's is {describe(native)}"
    yield from dtype_device_shape_differences(actual, native)
    for what, has in _FLAGS.items():
        if has(actual) and not has(native):
            yield f"{what}, native's has none"
        elif (
            has(native)
            and not has(actual)
            and not (what in _SET_ON_VIEWS_LATER and native._is_view())
        ):
            yield f"no {what}, native's has one"
    yield from _layout_differences(actual, native)


def dtype_device_shape_differences(actual: Any, native: Any) -> Iterator[str]:
    """How one tensor differs from native's in dtype, device, layout and shape."""
    if not isinstance(actual, torch.Tensor) or not isinstance(native, torch.Tensor):
        if actual is not native:
            yield f"{describe(actual)}, native returns {describe(native)}"
        return
    for what in ("dtype", "device", "layout"):
        if getattr(actual, what) != getattr(native, what):
            yield f"{what} {getattr(actual, what)}, native's is {getattr(native, what)}"
    if actual.is_nested or native.is_nested:
        return  # a nested tensor has no single shape
    sizes = zip(actual.shape, native.shape, strict=False)
    if actual.ndim != native.ndim or any(sizes_differ(one, other) for one, other in sizes):
        ranks = f" (ndim {actual.ndim}, {native.ndim})" if actual.ndim != native.ndim else ""
        yield f"shape {actual.shape}, native's is {native.shape}{ranks}"


_FLAGS: dict[str, Callable[[torch.Tensor], bool]] = {
    "a conjugate bit": torch.Tensor.is_conj,
    "a negative bit": torch.Tensor.is_neg,
    "a gradient to be computed (requires_grad)": lambda t: t.requires_grad,
    "inference mode's mark (is_inference)": torch.Tensor.is_inference,
}


#: Flags that autograd sets on views of arguments, after the impl has returned.
_SET_ON_VIEWS_LATER = ("a gradient to be computed (requires_grad)",)


def _layout_differences(actual: torch.Tensor, native: torch.Tensor) -> Iterator[str]:
    if actual.layout != native.layout:
        return
    one, other = _quantizer(actual), _quantizer(native)
    if one != other:
        yield f"quantizer {one}, native's is {other}"
    if actual.layout == torch.sparse_coo:
        for what in ("sparse_dim", "dense_dim", "is_coalesced"):
            one, other = getattr(actual, what)(), getattr(native, what)()
            # A coalesced tensor that is not marked so only costs time.
            if one != other and not (what == "is_coalesced" and one):
                yield f"{what} {one}, native's is {other}"
    parts = zip(_parts(actual), _parts(native), strict=True)
    for (what, part), (_, native_part) in parts:
        if part.dtype != native_part.dtype:
            yield f"{what} of dtype {part.dtype}, native's are of {native_part.dtype}"


def _quantizer(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    if not tensor.is_quantized:
        return None
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return (scheme, tensor.q_scale(), tensor.q_zero_point())
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return (scheme, tensor.q_per_channel_axis(), scales.tolist(), zero_points.tolist())


def _parts(tensor: torch.Tensor) -> tuple[tuple[str, torch.Tensor], ...]:
    """The strided tensors that a sparse one consists of."""
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
    """The type of a value in messages."""
    return type(value).__name__ if value is not None else "None"


# ------------------------------------------------------------------ sizes and strides


def strides_differ(actual: Any, native: Any) -> bool:
    """Whether two tensors of the same shape have different strides where strides matter."""
    if not all(isinstance(each, torch.Tensor) for each in (actual, native)):
        return False
    if any(copies.storage_of(each) is None for each in (actual, native)):
        return False
    if actual.ndim != native.ndim:
        return True
    if any(_is_number(size, 0) for size in native.shape):
        return False
    return any(
        not _is_number(size, 1) and sizes_differ(one, other)
        for size, one, other in zip(native.shape, actual.stride(), native.stride(), strict=True)
    )


def sizes_differ(one: Any, other: Any) -> bool:
    """Whether two sizes surely differ. Symbolic sizes do if they differ for all values."""
    if isinstance(one, int) and isinstance(other, int):
        return one != other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(torch.sym_not(one == other)))


def _is_number(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


# ------------------------------------------------------------------ sharing of memory


def shares_memory(tensor: torch.Tensor, others: Iterable[Any]) -> bool:
    """Whether a tensor shares a storage with one of the others."""
    return any(isinstance(each, torch.Tensor) and _share_storage(tensor, each) for each in others)


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not _storages(one).isdisjoint(_storages(other))


def _storages(tensor: torch.Tensor) -> frozenset[int]:
    """The storages of a tensor's elements; none for an empty tensor."""
    parts = [part for _, part in _parts(tensor)] or [tensor]
    storages = [copies.storage_of(each) for each in parts if not is_empty(each)]
    return frozenset(each._cdata for each in storages if each is not None)


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor surely has no element."""
    return not tensor.is_nested and any(_is_number(size, 0) for size in tensor.shape)


def _aliasing_differences(
    actual: OpResult, native: OpResult, pairs: Sequence[tuple[int, int | None, Any, Any]]
) -> Iterator[tuple[str, str]]:
    """Aliasing of an argument or another output that native's outputs do not have, or lack."""
    earlier: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for index, item, output, native_output in pairs:
        if not isinstance(output, torch.Tensor) or not isinstance(native_output, torch.Tensor):
            continue
        label = name_of(actual.op, index, item)
        alias = actual.op.returns[index].alias_info
        if not _is_written(actual.op, index):  # a written output is checked to be the argument
            found = _argument_aliasing_differences(
                actual, native, output, native_output, is_view=alias is not None
            )
            yield from ((label, each) for each in found)
        for name, before, native_before in earlier:
            if _share_storage(output, before) and not _share_storage(native_output, native_before):
                where = f"in the same memory, {name} and {label}; return separate tensors"
                yield "two outputs", where
            elif (
                alias
                and _share_storage(native_output, native_before)
                and not _share_storage(output, before)
            ):
                yield label, f"in other memory than {name}, where native's share theirs"
        earlier.append((label, output, native_output))


def _argument_aliasing_differences(
    actual: OpResult,
    native: OpResult,
    output: torch.Tensor,
    native_output: torch.Tensor,
    *,
    is_view: bool,
) -> Iterator[str]:
    """Aliasing of arguments. Memory need not be shared where no schema says so (`_unsafe_view`)."""
    for given, native_given in zip(actual.inputs, native.inputs, strict=True):
        shared, should = _share_storage(output, given), _share_storage(native_output, native_given)
        if shared and not should:
            yield "in the memory of an argument; return a new tensor"
        elif is_view and should and not shared:
            yield "in new memory, where native's is a view of an argument; return a view"
        elif output is given and native_output is not native_given:
            yield "being an argument itself, where native's is a view of it; return a view"
        elif shared and _offset(output, given) != _offset(native_output, native_given):
            offsets = _offset(output, given), _offset(native_output, native_given)
            yield "{} bytes into an argument's memory, native's is {}".format(*offsets)
        else:
            continue
        return


def _offset(tensor: torch.Tensor, base: torch.Tensor) -> Any:
    """The offset in bytes of a tensor from another one in the same storage."""
    if copies.storage_of(tensor) is None or copies.storage_of(base) is None:
        return 0
    offsets = [each.storage_offset() * each.element_size() for each in (tensor, base)]
    return offsets[0] - offsets[1] if all(isinstance(each, int) for each in offsets) else 0


# ------------------------------------------------------------------ values


def comparable_outputs(actual: OpResult, native: OpResult) -> Iterator[tuple[str, Any, Any]]:
    """The outputs of two runs whose values are compared, each with its name."""
    for (index, item, one), (_, _, other) in zip(actual.flat(), native.flat(), strict=True):
        if has_comparable_values(actual.op, index):
            yield name_of(actual.op, index, item), one, other


def comparable_writes(
    actual: Call, native: Call
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The written arguments of two runs whose values are compared, each with its name."""
    for (argument, one), (_, other) in zip(actual.written(), native.written(), strict=True):
        if argument.name not in CONSUMED:
            yield f"argument {argument.name!r}", one, other


def same_bits(one: torch.Tensor, other: Any) -> bool:
    """Whether two tensors are equal bit for bit; all NaNs count as equal.

    >>> nan = torch.tensor([float("nan"), 1.0])
    >>> same_bits(nan, nan.clone()), same_bits(nan, nan.nan_to_num()), same_bits(nan, nan[:1])
    (True, False, False)
    """
    if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.is_complex():
        one, other = (torch.view_as_real(each.resolve_conj()) for each in (one, other))
    return torch.equal(one.isnan(), other.isnan()) and bool((one.eq(other) | one.isnan()).all())


def _special_values(values: torch.Tensor) -> torch.Tensor:
    """By element 0 if it is finite, else a number for NaN, for inf and for -inf."""
    # The infinities of complex numbers are one.
    signs = 1 if values.is_complex() else values.sign().to(torch.int8)
    return torch.where(values.isnan(), 2, torch.where(values.isinf(), signs, 0))


def _magnitude(values: torch.Tensor) -> torch.Tensor:
    """The absolute values; of a complex number that of its larger part, which is finite where both
    parts are."""
    if values.is_complex():
        return torch.maximum(values.real.abs(), values.imag.abs())
    return values.abs()


def value_difference(actual: torch.Tensor, native: torch.Tensor, factor: float = 1.0) -> str | None:
    """How the values of two tensors differ beyond rounding; None if they do not.

    Args:
        actual: what an impl computed.
        native: what native computed, of the same dtype and shape.
        factor: multiplies the tolerance.
    """
    if actual.numel() == 0:
        return None
    if actual.dtype not in TOLERANCES:
        count = int((actual != native).sum())
        return f"{count} of {actual.numel()} elements" if count else None
    finite = native.isfinite()
    mismatched = int((_special_values(native) != _special_values(actual)).sum())
    if mismatched:
        return f"{mismatched} of {actual.numel()} elements are NaN, inf or -inf on one side only"
    difference = torch.where(finite, _magnitude(actual - native), 0).double()
    scale = float(torch.where(finite, _magnitude(native), 0).max())
    allowed = TOLERANCES[actual.dtype] * factor * scale
    largest = float(difference.max())
    if largest <= allowed:
        return None
    count = int((difference > allowed).sum())
    return (
        f"{count} of {actual.numel()} elements are up to {largest:.3g} off, of values up to "
        f"{scale:.3g}; allowed are {allowed:.3g}"
    )


class Difference:
    """Whether :func:`value_difference` finds one: what the device finds out, and nothing waits.

    Args:
        actual: what an impl computed.
        native: what native computed, of the same dtype and shape.
        finite: whether all numbers are expected to be finite, which takes fewer kernels.

    >>> inf = float("inf")
    >>> Difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), finite=True).found()
    True
    >>> Difference(torch.tensor([1.0, inf]), torch.tensor([1.0, inf]), finite=True).found()
    >>> Difference(torch.tensor([1.0, inf]), torch.tensor([1.0, inf]), finite=False).found()
    False
    """

    # Each kernel of ATen's is loaded at its first call in a process, which the call waits for. So
    # there are few, and parts are small enough to stay in a GPU's cache from one to the next.

    def __init__(self, actual: torch.Tensor, native: torch.Tensor, *, finite: bool) -> None:
        self.device = actual.device
        self._tolerance = TOLERANCES.get(actual.dtype)
        self._finite = finite
        parts = list(_in_parts(actual, native)) if actual.numel() else []
        #: Of each part the least and the largest difference, and number of native's.
        self._found = actual.new_zeros((len(parts), 4), dtype=_computed_in(actual.dtype))
        for (one, other), found in zip(parts, self._found.unbind(), strict=True):
            if self._tolerance is None:
                found[1].copy_((one != other).any())
                continue
            one, other = one.to(found.dtype), other.to(found.dtype)
            difference = one - other
            if not finite:
                # NaN is no difference to NaN, nor is an infinity to itself. Any other is infinite.
                difference.nan_to_num_(0.0, math.inf, -math.inf)
                difference.masked_fill_((one != one) != (other != other), math.inf)
                other = other.nan_to_num(0.0, 0.0, 0.0)
            torch.aminmax(difference, out=(found[0], found[1]))
            torch.aminmax(other, out=(found[2], found[3]))

    def found(self) -> bool | None:
        """Whether they differ; None where that is open: not all is finite. Waits for the device."""
        parts = self._found.tolist()
        if self._finite and not all(math.isfinite(each) for part in parts for each in part):
            return None
        scale = max((max(-part[2], part[3]) for part in parts), default=0.0)
        allowed = (self._tolerance or 0.0) * scale
        return any(max(-part[0], part[1]) > allowed for part in parts)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """What differences are computed in: the kernels of few dtypes are loaded."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _in_parts(
    one: torch.Tensor, other: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both in parts, as real numbers."""
    if one.is_complex():
        one, other = (torch.view_as_real(_with_one_infinity(each)) for each in (one, other))
    if one.is_contiguous() and other.is_contiguous():
        one, other = one.view(-1), other.view(-1)
    if one.numel() <= _PART:
        yield one, other
        return
    dim = max(range(one.ndim), key=lambda each: one.shape[each])
    parts = min(one.shape[dim], math.ceil(one.numel() / _PART))
    yield from zip(one.tensor_split(parts, dim), other.tensor_split(parts, dim), strict=True)


def _with_one_infinity(values: torch.Tensor) -> torch.Tensor:
    """Complex numbers, of which all that are infinite are the same, and all that are NaN."""
    values = values.resolve_conj().masked_fill(values.isnan(), complex(math.nan, 0))
    return values.masked_fill_(values.isinf(), complex(math.inf, 0))
