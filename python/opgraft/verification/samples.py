"""Samples: calls of an op that can be made again from a line of text.

A sample is a *base* call (from PyTorch's own OpInfo, from a pack, or guessed from the schema), with
*edits* that change sizes, numbers and dtypes, and *layouts* that change a tensor's memory layout,
or give it special values. Its `id` contains all three:

    opinfo:softmax:float32:3.0 self[1]=8 @self:transposed

So that line and the seed reproduce a failure.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from opgraft.ops.describing import dtype_name
from opgraft.ops.schema import Call, Op, resolve
from opgraft.router import threads
from opgraft.router.call_keys import exact_key
from opgraft.router.device import is_out_of_memory
from opgraft.verification import journal
from opgraft.verification.layouts import applicable_layouts, apply_layout
from opgraft.verification.random_values import RandomValues

#: Edits cast every floating-point (and complex) tensor by this pseudo-argument ...
EVERY_TENSOR = "*"
#: ... and by this one give them new random values; its value distinguishes several such sets.
EVERY_VALUE = "**"

Values = tuple[Any, ...]


class CannotMake(Exception):
    """A sample that cannot be made: the op refuses such arguments, or they are too large."""


@dataclass(frozen=True, order=True)
class Position:
    """The position of a number in a call: a tensor's size, a list's item, or a scalar argument."""

    argument: str
    item: int | None = None  #: of a list argument
    dim: int | None = None  #: of a tensor

    def __str__(self) -> str:
        item = "" if self.item is None else f".{self.item}"
        dim = "" if self.dim is None else f"[{self.dim}]"
        return f"{self.argument}{item}{dim}"


_EDIT = re.compile(r"(?P<argument>[*\w]+)(?:\.(?P<item>\d+))?(?:\[(?P<dim>\d+)\])?=(?P<value>.+)")
_LITERALS = {"None": None, "True": True, "False": False}

Edits = Mapping[Position, Any]
#: Layouts by place; the place names a tensor (its `dim` is None).
Layouts = Mapping[Position, str]


@dataclass(frozen=True)
class Base:
    """A call from which samples are made.

    `make` returns the op's arguments after edits. For most ops it edits the arguments themselves.
    For a backward op it edits those of the forward op, and runs that to make the backward's.
    """

    id: str
    op: Op
    make: Callable[[Edits, int], Values]
    #: The positions that edits may change, with their values.
    positions: Mapping[Position, Any]
    #: Tensors whose values no other argument depends on, so that they may have other values.
    independent: frozenset[str]
    #: The dtype of its first tensor.
    dtype: torch.dtype | None
    #: The call of the other op that this one's arguments come from.
    source: Base | None = None
    #: The call of a function, such as `F.softmax`, that made it.
    function_call: Any = None
    #: Whether the override's author gave it, or the call that it comes from.
    is_from_author: bool = False


@dataclass(frozen=True)
class Sample:
    """A call of an op that can be made again as often as needed."""

    base: Base
    edits: Edits
    layouts: Layouts
    seed: int

    @property
    def id(self) -> str:
        edits = [f"{position}={_written(value)}" for position, value in self.edits.items()]
        layouts = [f"@{position}:{layout}" for position, layout in self.layouts.items()]
        return " ".join([self.base.id, *edits, *layouts])

    @property
    def op(self) -> Op:
        return self.base.op

    def call(self) -> Call:
        """The call, with new tensors.

        Raises:
            CannotMake: there is no such call.
        """
        if journal.is_left_out(self.id):
            raise CannotMake("native ends the process on it")
        journal.note(self.id)
        values = list(self.base.make(self.edits, _sample_seed(self.seed, self.id)))
        for position, layout in self.layouts.items():
            _lay_out(self.op, values, position, layout)
        return Call(self.op, tuple(values))

    def with_edits(self, edits: Edits) -> Sample:
        return replace(self, edits={**self.edits, **edits})

    def with_layout(self, position: Position, layout: str) -> Sample:
        return replace(self, layouts={**self.layouts, position: layout})

    def with_new_values(self, draw: int) -> Sample:
        """The same call with other floating-point values."""
        return self.with_edits({Position(EVERY_VALUE): draw})


def parse(sample_id: str) -> tuple[str, dict[Position, Any], dict[Position, str]]:
    """A sample's id as base, edits and layouts.

    Raises:
        ValueError: it is no such id.

    >>> parse("opinfo:softmax:float32:3.0 self[1]=8 @self:transposed")[1]
    {Position(argument='self', item=None, dim=1): 8}
    """
    base, *tokens = sample_id.split()
    edits: dict[Position, Any] = {}
    layouts: dict[Position, str] = {}
    for token in tokens:
        name, _, layout = token.removeprefix("@").partition(":")
        match = _EDIT.fullmatch(f"{name}=0" if token.startswith("@") else token)
        if match is None:
            raise ValueError(f"{token!r} in {sample_id!r} is neither name=value nor @name:layout")
        item, dim = match["item"], match["dim"]
        position = Position(
            match["argument"],
            None if item is None else int(item),
            None if dim is None else int(dim),
        )
        if token.startswith("@"):
            layouts[position] = layout
        else:
            edits[position] = _read(match["value"])
    return base, edits, layouts


def _written(value: Any) -> str:
    return dtype_name(value) if isinstance(value, torch.dtype) else repr(value)


def _read(text: str) -> Any:
    if text in _LITERALS:
        return _LITERALS[text]
    if isinstance(dtype := getattr(torch, text, None), torch.dtype):
        return dtype
    try:
        return int(text)
    except ValueError:
        return float(text)


def _sample_seed(seed: int, text: str) -> int:
    return zlib.crc32(text.encode(), seed & 0xFFFFFFFF)


# ------------------------------------------------------------------ bases


def base_from_arguments(
    base_id: str, op: Op, values: Values, *, function_call: Any = None, fixed: bool = False
) -> Base:
    """A base whose edits change the op's own arguments.

    Args:
        base_id: what to call it.
        op: the op.
        values: its arguments, all of them in the schema's order.
        front: the call of a function, such as `F.softmax`, that made it.
        fixed: whether only dtypes may be edited, because arguments depend on each other in an
            unknown way.
    """

    def make(edits: Edits, seed: int) -> Values:
        return edited(op, values, edits, seed)

    independent = frozenset(
        a.name for a in op.arguments if "Tensor" in a.kind and not a.declares_write
    )
    dtype = next((tensor.dtype for _, tensor in tensors_of(op, values)), None)
    if fixed:
        return Base(base_id, op, make, {}, frozenset(), dtype, None, function_call)
    return Base(
        base_id, op, make, dict(positions(op, values)), independent, dtype, None, function_call
    )


def with_rank(base: Base, rank: int) -> Base | None:
    """A base whose tensors have another rank, as far as they have that of the first; or None.

    Dimensions are removed or added in front, so arguments for the last dimensions still fit.
    """
    prefix = f"rank{rank}:"
    if base.source is not None:
        source = with_rank(base.source, rank)
        return None if source is None else base_from_other_op(base.op, source)
    values = base.make({}, 0)
    first_rank = next((tensor.ndim for _, tensor in tensors_of(base.op, values)), 0)
    if not base.positions or first_rank in (0, rank):
        return None
    rng = RandomValues(rank)

    def changed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [changed(each) for each in value]
        if not isinstance(value, torch.Tensor) or value.ndim != first_rank:
            return value
        kept = list(value.shape[max(first_rank - rank, 0) :])
        return _similar_values(value, [3, 2, 3, 2][: rank - len(kept)] + kept, rng)

    return base_from_arguments(prefix + base.id, base.op, tuple(map(changed, values)))


def base_from_other_op(op: Op, source: Base) -> Base | None:
    """A base of an op whose arguments come from a run of another: a backward's from its forward's,
    an `out=` variant's or an in-place one's from the functional op's.

    Edits change the other op's arguments, so this op's arguments always fit together.

    Args:
        base_id: what to call it.
        op: such as `aten::_softmax_backward_data`, `aten::mul.out` or `aten::relu_`.
        source: a call of the other op.

    Returns:
        The base; None where the two ops' arguments cannot be matched.
    """
    makers = _argument_makers(op, source.op)
    if makers is None:
        return None

    def make(edits: Edits, seed: int) -> Values:
        values = source.make(edits, seed)
        call = Call(source.op, values)
        result = run_natively(call)
        outputs = result if isinstance(result, tuple) else (result,)
        rng = RandomValues(seed)
        return tuple(each(call, outputs, rng) for each in makers)

    is_independent = _is_gradient if forward_of(op) else source.independent.__contains__
    independent = frozenset(
        a.name for a in op.arguments if not a.declares_write and is_independent(a.name)
    )
    return replace(
        source, id=f"for:{source.id}", op=op, make=make, independent=independent, source=source
    )


_ArgumentMaker = Callable[[Call, tuple[Any, ...], RandomValues], Any]


def _argument_makers(op: Op, forward: Op) -> list[_ArgumentMaker] | None:
    names = {argument.name for argument in forward.arguments}
    returned = [declared.name or "" for declared in forward.returns]
    # Output 0 has a usual name; other outputs without a name are used in their order.
    rest = [index for index, name in enumerate(returned) if index > 0]
    written = 0
    makers: list[_ArgumentMaker] = []
    for argument in op.arguments:
        if argument.written and argument.keyword_only:
            makers.append(_empty_output(written))
            written += 1
        elif argument.name in names:
            makers.append(_same_argument(argument.name))
        elif _is_gradient(argument.name):
            if not argument.is_tensor:
                return None
            makers.append(_gradient)
        elif argument.name in returned:
            found = returned.index(argument.name)
            rest = [each for each in rest if each != found]
            makers.append(_output(found))
        elif argument.name in ("output", "out", "result"):
            makers.append(_output(0))
        elif argument.name == "input_dtype":
            makers.append(_first_dtype)
        elif argument.kind == "List[bool]":
            makers.append(_mask_of_given(forward, max(argument.list_size, 1)))
        elif argument.is_tensor and rest:
            makers.append(_output(rest.pop(0)))
        elif not argument.required:
            makers.append(_constant(argument.default))
        else:
            return None
    return makers


def _is_gradient(name: str) -> bool:
    return name.startswith("grad") and "mask" not in name


def _same_argument(name: str) -> _ArgumentMaker:
    return lambda call, outputs, rng: call.named[name]


def _output(index: int) -> _ArgumentMaker:
    return lambda call, outputs, rng: outputs[index]


def _empty_output(index: int) -> _ArgumentMaker:
    return lambda call, outputs, rng: torch.empty_like(outputs[index])


def _constant(value: Any) -> _ArgumentMaker:
    return lambda call, outputs, rng: list(value) if isinstance(value, list) else value


def _mask_of_given(forward: Op, size: int) -> _ArgumentMaker:
    """A mask of gradients for the forward's first tensors: true for those that are not None."""
    tensors = [argument.name for argument in forward.arguments if "Tensor" in argument.kind]
    names = tensors[:size]

    def mask(call: Call, outputs: tuple[Any, ...], rng: RandomValues) -> list[bool]:
        given = [call.named[name] is not None for name in names]
        return given + [True] * (size - len(given))

    return mask


def _first_dtype(call: Call, outputs: tuple[Any, ...], rng: RandomValues) -> Any:
    return next(call.tensors()).dtype


def _gradient(call: Call, outputs: tuple[Any, ...], rng: RandomValues) -> Any:
    return rng.normal(outputs[0])


def forward_of(op: Op) -> Op | None:
    """The op that a backward op belongs to, by its name: `_softmax` for `_softmax_backward_data`.

    >>> forward_of(resolve("aten::_softmax_backward_data"))
    <Op aten::_softmax>
    """
    name, _, overload = op.name.partition(".")
    stem = re.sub(r"_backward(_data)?$", "", name)
    if stem == name or overload:
        return None
    for forward in (stem, f"{stem}_forward"):  # as `_flash_attention_forward` is called
        try:
            return resolve(forward)
        except Exception:  # no such op, or it has no default overload
            continue
    return None


def functional_of(op: Op) -> Op | None:
    """The op that an `out=` or in-place variant belongs to.

    >>> functional_of(resolve("aten::mul.out")), functional_of(resolve("aten::relu_"))
    (<Op aten::mul.Tensor>, <Op aten::relu>)
    """
    if not op.mutates:
        return None
    wanted = [(a.name, a.kind) for a in op.arguments if not (a.declares_write and a.keyword_only)]
    stem = op.name.partition(".")[0]
    for name in (stem, stem.removesuffix("_")):
        namespace, _, symbol = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), symbol, None)
        for overload in packet.overloads() if packet is not None else ():
            sibling = resolve(getattr(packet, overload))
            if not sibling.mutates and wanted == [(a.name, a.kind) for a in sibling.arguments]:
                return sibling
    return None


def is_internal(op: Op) -> bool:
    """Whether torch means an op for its own use: its name begins with an underscore.

    >>> is_internal(resolve("aten::_softmax")), is_internal(resolve("aten::softmax.int"))
    (True, False)
    """
    return op.name.split("::", 1)[1].startswith("_")


def run(call: Call) -> Any:
    """Call the op as a user would."""
    return call.op.overload(*call.args, **call.kwargs)


#: Calls of internal ops that their native kernels refused, with the reason.
_refused: dict[Hashable, str] = {}


def run_natively(call: Call) -> Any:
    """Call the native kernel, to see whether it takes the call.

    A call of an internal op that was refused is not made again: cuDNN's attention raises on the
    first call of a kind that it has no plan for, and ends the process on the second one.

    Raises:
        CannotMake: native refused the same call before.
        Exception: what native raises.
    """
    key = (call.op.name, exact_key(call)) if is_internal(call.op) else None
    if key in _refused:
        raise CannotMake(f"native refused it: {_refused[key]}")
    try:
        with torch.no_grad(), threads.scope(threads.EVERYTHING):
            return run(call)
    except Exception as error:
        is_calls_fault = not isinstance(error, NotImplementedError) and not is_out_of_memory(error)
        if key is not None and is_calls_fault:
            _refused[key] = str(error)
        raise


# ------------------------------------------------------------------ edits


def tensors_of(op: Op, values: Values) -> Iterator[tuple[Position, torch.Tensor]]:
    """Every tensor of a call, with its position."""
    for argument, value in zip(op.arguments, values, strict=True):
        if isinstance(value, torch.Tensor):
            yield Position(argument.name), value
        elif isinstance(value, (list, tuple)):
            for item, each in enumerate(value):
                if isinstance(each, torch.Tensor):
                    yield Position(argument.name, item), each


def positions(op: Op, values: Values) -> Iterator[tuple[Position, Any]]:
    """Every number of a call that an edit can change, with its value."""
    for position, tensor in tensors_of(op, values):
        for dim, size in enumerate(tensor.shape):
            yield replace(position, dim=dim), size
    for argument, value in zip(op.arguments, values, strict=True):
        if isinstance(value, (bool, int, float)):
            yield Position(argument.name), value
        elif isinstance(value, (list, tuple)):
            for item, each in enumerate(value):
                if isinstance(each, (bool, int, float)):
                    yield Position(argument.name, item), each
        elif value is None or argument.kind.startswith("Optional["):
            yield Position(argument.name), value


def edited(op: Op, values: Values, edits: Edits, seed: int) -> Values:
    """New arguments with changed sizes, numbers and dtypes.

    A tensor of another size gets new values that are similar to its old ones.
    """
    rng = RandomValues(seed)
    dtype = edits.get(Position(EVERY_TENSOR))
    result = []
    for argument, value in zip(op.arguments, values, strict=True):
        whole = Position(argument.name)
        if whole in edits and not isinstance(value, torch.Tensor):
            value = edits[whole]
        elif isinstance(value, (list, tuple)):
            value = [
                _edit(Position(argument.name, item), each, edits, dtype, rng)
                for item, each in enumerate(value)
            ]
        else:
            value = _edit(whole, value, edits, dtype, rng)
        result.append(value)
    return tuple(result)


def _edit(
    position: Position, value: Any, edits: Edits, dtype: torch.dtype | None, rng: RandomValues
) -> Any:
    if not isinstance(value, torch.Tensor):
        return edits.get(position, value)
    if position in edits:  # another dtype for this tensor alone, or None instead of it
        dtype = edits[position]
        if dtype is None:
            return None
    shape = [edits.get(replace(position, dim=dim), size) for dim, size in enumerate(value.shape)]
    if any(size < 0 for size in shape):
        raise CannotMake(f"{position} cannot have the sizes {shape}")
    with_new_values = Position(EVERY_VALUE) in edits and value.is_floating_point()
    if with_new_values or shape != list(value.shape):
        fresh = _similar_values(value, shape, rng)
    else:
        fresh = value.detach().clone()
    if dtype is not None and (fresh.is_floating_point() or fresh.is_complex()):
        fresh = fresh.to(dtype)
    return fresh


def _similar_values(tensor: torch.Tensor, shape: list[int], rng: RandomValues) -> torch.Tensor:
    """New random values in the range of the old ones; integers and bools are chosen among them."""
    if not tensor.is_floating_point():
        flat = tensor.detach().reshape(-1)
        if flat.numel() == 0:
            return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        count = torch.Size(shape).numel()
        return flat[rng.integers(flat.numel(), count, tensor.device)].reshape(shape)
    low, high = _range(tensor)
    if low < 0 < high or low == high:
        bound = max(abs(low), abs(high)) or 1.0
        low, high = (-bound, bound) if low < 0 or high == 0 else (bound / 2, bound)
    return (rng.uniform(shape, tensor.device) * (high - low) + low).to(tensor.dtype)


def _range(tensor: torch.Tensor) -> tuple[float, float]:
    """The least and the greatest finite value of a tensor; from -1 to 1 where there is none."""
    values = tensor.detach()
    if values.dtype.itemsize == 1:  # not every operation is there for those
        values = values.double()
    if values.numel():
        low, high = map(float, values.aminmax())
        if math.isfinite(low) and math.isfinite(high):  # as in most tensors
            return low, high
        values = values[values.isfinite()]
    low, high = (-1.0, 1.0) if values.numel() == 0 else map(float, values.aminmax())
    return low, high


# ------------------------------------------------------------------ layouts


def layouts(base: Base, position: Position, tensor: torch.Tensor) -> list[str]:
    """The layouts that a tensor of a call can be given."""
    return applicable_layouts(tensor, other_values=position.argument in base.independent)


def _lay_out(op: Op, values: list[Any], position: Position, layout: str) -> None:
    index = next((i for i, a in enumerate(op.arguments) if a.name == position.argument), None)
    if index is None:
        raise CannotMake(f"{op.name} has no argument {position.argument!r}")
    tensor = values[index] if position.item is None else values[index][position.item]
    if not isinstance(tensor, torch.Tensor):
        raise CannotMake(f"{position} is {tensor!r}, not a tensor")
    relaid = _relaid(op, values, tensor, layout)
    if position.item is None:
        values[index] = relaid
    else:
        values[index] = [*values[index]]
        values[index][position.item] = relaid


def _relaid(op: Op, values: list[Any], tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout.startswith("="):  # the same tensor as another argument
        named = dict(zip((a.name for a in op.arguments), values, strict=True))
        return named[layout[1:]]  # type: ignore[no-any-return]
    try:
        return apply_layout(tensor, layout)
    except ValueError as error:
        raise CannotMake(str(error)) from None
