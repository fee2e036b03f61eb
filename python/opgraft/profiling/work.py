"""Computes the bytes and flops of a call from its inputs in a profile.

A profile has a call's inputs, but not its outputs. So the call is made again on meta tensors with
the same sizes, dtypes and strides. They have no memory; the outputs have the metadata of the call's
outputs. Nothing runs on a device, and nothing of the program changes.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

from opgraft.ops import schema
from opgraft.ops.schema import Call, Op
from opgraft.profiling.timeline import Input

#: dtypes by their C++ types, which a profile has.
DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "long int": torch.int64,
    "long long": torch.int64,
    "short": torch.int16,
    "short int": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "unsigned short": torch.uint16,
    "short unsigned int": torch.uint16,
    "unsigned int": torch.uint32,
    "unsigned long": torch.uint64,
    "long unsigned int": torch.uint64,
    "bool": torch.bool,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn,
    "c10::Float8_e5m2": torch.float8_e5m2,
    "c10::Float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "c10::Float8_e5m2fnuz": torch.float8_e5m2fnuz,
}

#: Types that a profile records as numbers, and that ops accept as numbers.
_ENUMERATIONS = ("ScalarType", "MemoryFormat", "Layout")

#: Ops that write to an argument without reading it.
_WRITE_ONLY = frozenset(
    f"aten::{name}_"
    for name in (
        *("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal"),
        *("normal", "random", "uniform", "zero"),
    )
)
#: Ops that read only some elements of an argument: as many as the output has (""), or a row for
#: each element of another argument.
_READ_IN_PART = {
    "aten::embedding": ("weight", ""),
    "aten::gather": ("self", ""),
    "aten::index": ("self", ""),
    "aten::index_select": ("self", ""),
    "aten::take": ("self", ""),
    "aten::_embedding_bag": ("weight", "indices"),
    "aten::_embedding_bag_forward_only": ("weight", "indices"),
}
#: Ops that write to as many elements of an argument as another argument has.
_WRITTEN_IN_PART = {
    "aten::index_add_": ("self", "source"),
    "aten::index_copy_": ("self", "source"),
    "aten::index_put_": ("self", "values"),
    "aten::_index_put_impl_": ("self", "values"),
    "aten::scatter_": ("self", "index"),
    "aten::scatter_add_": ("self", "index"),
    "aten::scatter_reduce_": ("self", "index"),
}
#: A list of indices is not recorded. It is a small part of what an op that writes by it moves.
_INDICES = "List[Optional[Tensor]]"
#: Ops that return memory without writing to it.
_ALLOCATES = ("empty", "new_empty", "resize", "set_")


@dataclass(frozen=True)
class Work:
    """What a call has to move and compute. None: it is not known, for `reason`."""

    bytes: int | None
    flops: int | None = None
    #: The dtype that is multiplied.
    dtype: torch.dtype | None = None
    reason: str = ""


NOTHING = Work(0)


@cache
def work_of(name: str, inputs: tuple[Input, ...]) -> Work:
    """The work of a call of the op.

    Args:
        name: the op as a profile names it: without its overload.
        inputs: the arguments as the profile has them.
    """
    try:
        call = rebuilt(name, inputs)
        if call is None:
            return Work(None, reason="the profiler does not record all its arguments")
        if _moves_nothing(call.op):
            return NOTHING
        if _INDICES in call.op.kinds.values() and not call.named["values"].ndim:
            return Work(None, reason="the profiler does not record the indices")
        result = _on_meta(call) if _returns_new(call.op) else None
    except Exception as error:  # no meta function, or an output whose size depends on data
        return Work(None, reason=f"its outputs are not known ({type(error).__name__})")
    flops = _flops(call, result)
    return Work(_bytes(call, result), flops, _product_dtype(call) if flops is not None else None)


def knows_flops(name: str) -> bool:
    """Whether torch counts the flops of an op."""
    return _formula(name) is not None


@cache
def _formula(name: str) -> Callable[..., int] | None:
    from torch.utils.flop_counter import flop_registry

    namespace, _, rest = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), rest.partition(".")[0], None)
    return flop_registry.get(packet)


@cache
def is_composed(name: str, inputs: tuple[Input, ...]) -> bool:
    """Whether torch has no CPU kernel of the op, so that it calls other ops there."""
    try:
        call = rebuilt(name, inputs)
    except Exception:  # as in work_of: what cannot be made again is judged by its time
        return False
    if call is None or not call.op.name.startswith("aten::"):
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return not has(call.op.name, "CPU") and has(call.op.name, "CompositeExplicitAutograd")


def rebuilt(name: str, inputs: tuple[Input, ...]) -> Call | None:
    """The call on meta tensors; None where the profile does not record enough."""
    namespace, _, rest = name.partition("::")
    symbol, _, overload = rest.partition(".")
    is_partial_write = name in _WRITTEN_IN_PART
    for op in schema.resolve_all(namespace, symbol):
        if overload and op.name != name:
            continue
        if len(op.arguments) != len(inputs):
            continue
        try:
            values = tuple(
                [] if is_partial_write and argument.kind == _INDICES else _value(argument, given)
                for argument, given in zip(op.arguments, inputs, strict=True)
            )
        except (ValueError, SyntaxError):
            continue
        tensors = Call(op, values).tensors()
        if any(True for _ in tensors) or any("Device" in a.kind for a in op.arguments):
            return Call(op, values)
    return None


def _value(argument: schema.Argument, given: Input) -> Any:
    """An argument's value.

    Raises:
        ValueError: it has another type, so another overload was called, or it was not recorded.
        SyntaxError: the recorded text is no literal.
    """
    kind = argument.kind
    if kind.startswith("Optional["):
        kind = kind.removeprefix("Optional[").removesuffix("]")
    if kind == "Tensor" and given.dtype in DTYPES:
        return _tensor(DTYPES[given.dtype], given.sizes, given.strides)
    if kind == "List[Tensor]" and (given.dtypes is not None or not given.sizes):
        lists = zip(given.dtypes or (), given.sizes, given.strides, strict=True)
        return [_tensor(*each) for each in lists]
    if kind == "Device":
        return torch.device("meta")
    if given.dtype in DTYPES or given.dtype == "TensorList" or kind == "Tensor":
        if kind == "Tensor" and not given.dtype and argument.kind != kind:
            return None
        raise ValueError(given.dtype)
    if not given.value:
        # Strings are not recorded, and neither are lists of tensors with None in them.
        if argument.required and argument.kind == kind:
            raise ValueError("not recorded")
        return argument.default
    return _number(kind, given)


def _number(kind: str, given: Input) -> Any:
    is_list = kind.startswith("List[")
    if is_list != (given.dtype == "ScalarList"):
        raise ValueError(given.dtype)
    is_not_literal = given.value in ("inf", "-inf", "nan")
    value: Any = float(given.value) if is_not_literal else ast.literal_eval(given.value)
    items = value if is_list else [value]
    item_kind = kind.removeprefix("List[").removesuffix("]")
    accepted = {"int": (int,), "SymInt": (int,), "bool": (bool,), "float": (float, int)}
    if item_kind in accepted and not all(isinstance(item, accepted[item_kind]) for item in items):
        raise ValueError(given.value)
    if item_kind not in (*accepted, *_ENUMERATIONS, "number", "Scalar"):
        raise ValueError(item_kind)
    return value


def _tensor(dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")


def _moves_nothing(op: Op) -> bool:
    """Whether the op makes views, allocates, or only calls others."""
    symbol = op.name.partition("::")[2]
    if symbol.startswith(_ALLOCATES):
        return True
    if torch.Tag.inplace_view in op.overload.tags:
        return True
    if not op.writes and op.returns and all(r.alias_info is not None for r in op.returns):
        return True
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name, "CompositeImplicitAutograd")
    )


def _returns_new(op: Op) -> bool:
    """Whether it returns tensors that are none of its arguments."""
    return any(r.alias_info is None and "Tensor" in str(r.type) for r in op.returns)


def _on_meta(call: Call) -> Any:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call.op.overload(*call.args, **call.kwargs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _elements(tensor: torch.Tensor) -> int:
    """How many elements a tensor has in memory: expanded elements count once."""
    sized = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(int(size) for size, stride in sized if stride or not size)


def _bytes(call: Call, result: Any) -> int:
    """The bytes that a call reads and writes: each tensor once, or twice if it does both to it."""
    name = call.op.name.partition(".")[0]
    results = (result,) if len(call.op.returns) == 1 else tuple(result or ())
    returned = zip(call.op.returns, results, strict=result is not None)
    outputs = [t for r, value in returned if r.alias_info is None for t in _tensors(value)]
    written = {id(tensor): argument for argument, tensor in call.written()}
    total = sum(_elements(tensor) * tensor.element_size() for tensor in outputs)
    for argument, tensor in call.named_tensors():
        elements = _elements(tensor)
        if limit := _touched_elements(name, argument.name, call, outputs):
            elements = min(elements, limit)
        times = 1
        if id(tensor) in written and not argument.keyword_only and name not in _WRITE_ONLY:
            times = 2
        total += times * elements * tensor.element_size()
    return total


def _touched_elements(
    name: str, argument: str, call: Call, outputs: list[torch.Tensor]
) -> int | None:
    """How many elements of an argument the call touches at most; None where it is all of them."""
    limited, by = _READ_IN_PART.get(name) or _WRITTEN_IN_PART.get(name) or ("", "")
    if limited != argument:
        return None
    if not by:
        return sum(map(_elements, outputs))
    values = call.named
    row = prod(values[limited].shape[1:]) if by == "indices" else 1
    return _elements(values[by]) * row


def _flops(call: Call, result: Any) -> int | None:
    formula = _formula(call.op.name)
    if formula is None:
        return None
    try:
        return int(formula(*call.args, **call.kwargs, out_val=result))
    except Exception:  # the formula does not expect such sizes
        return None


def _product_dtype(call: Call) -> torch.dtype | None:
    """The dtype of a matrix product: that of the call's last floating-point tensor."""
    found = [tensor.dtype for tensor in call.tensors() if tensor.dtype.is_floating_point]
    return found[-1] if found else None
