"""Makes base calls: from PyTorch's OpInfo, from the pack itself, or from the op's schema."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from opgraft.ops.describing import dtype_name
from opgraft.ops.schema import Argument, Call, Op
from opgraft.registry import Override
from opgraft.verification import opinfo
from opgraft.verification.samples import (
    Base,
    Values,
    base_from_arguments,
    base_from_other_op,
    forward_of,
    functional_of,
    run_natively,
    with_rank,
)

#: How many bases are used for each dtype and source.
MAX_BASES = 12
#: How many OpInfos are run to find one that reaches an op; others have less similar names.
_MAX_INFOS = 6
#: How many combinations of arguments are tried for an op of which only the schema is known.
_MAX_GUESSES = 200


def bases(
    override: Override,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    seed: int,
    *,
    use_opinfo: bool = True,
) -> Iterator[Base]:
    """Base calls of an override's op, the pack's own first.

    Args:
        override: whose op.
        dtypes: that samples may have.
        device: where their tensors live.
        seed: of their values.
        use_opinfo: look for OpInfos, too.
    """
    op = override.operator
    found = list(pack_bases(override, device, seed))
    other = functional_of(op) or forward_of(op)
    if other is not None:
        found += _bases_from_other_op(other, override, dtypes, device, seed, use_opinfo)
    if use_opinfo and opinfo.missing() is None:
        differentiate = "backward" in op.name
        found += _reaching_bases(
            op, dtypes, device, seed, differentiate=differentiate, any_name=not found
        )
    yield from found or guessed_bases(op, dtypes, device)


def source_kind(base_id: str) -> str:
    """The source of a base, in one word, from its id.

    >>> source_kind("for:rank3:opinfo-grad:softmax:float32:3.0")
    'opinfo'
    """
    return re.sub(r"^(for:|rank\d+:)*", "", base_id).partition(":")[0].partition("-")[0]


def has_other_rank(base_id: str) -> bool:
    return re.match(r"(for:)?rank\d+:", base_id) is not None


def find(override: Override, base_id: str, device: torch.device, seed: int) -> Base:
    """The base of that id, made again.

    Raises:
        LookupError: there is none, or not any more.
    """
    base = _find(override.operator, override, base_id, device, seed)
    if base is None:
        raise LookupError(f"no base call {base_id!r} for {override.op} on {device}")
    return base


def _find(
    op: Op, override: Override | None, base_id: str, device: torch.device, seed: int
) -> Base | None:
    source, _, rest = base_id.partition(":")
    if has_other_rank(base_id) and source != "for":
        base = _find(op, override, rest, device, seed)
        return None if base is None else with_rank(base, int(source.removeprefix("rank")))
    if source == "for":
        other = functional_of(op) or forward_of(op)
        if other is None:
            return None
        relative = None if override is None else _with_samples(other, override)
        base = _find(other, relative, rest, device, seed)
        return None if base is None else base_from_other_op(op, base)
    if source == "pack" and override is not None:
        found: Iterable[Base] = pack_bases(override, device, seed)
    elif source == "schema":
        found = guessed_bases(op, [getattr(torch, rest.partition(":")[0])], device)
    elif source in ("opinfo", "opinfo-grad"):
        found = _from_opinfo(op, rest, device, seed, differentiate=source == "opinfo-grad")
    else:
        found = ()
    return next((each for each in found if each.id == base_id), None)


def _from_opinfo(
    op: Op, rest: str, device: torch.device, seed: int, *, differentiate: bool
) -> Iterator[Base]:
    label, dtype, number = rest.rsplit(":", 2)
    limit = int(number.partition(".")[0]) + 1
    for info in opinfo.all_infos():
        if opinfo.label(info) == label:
            yield from _op_call_bases(
                op,
                info,
                getattr(torch, dtype),
                device,
                seed,
                differentiate=differentiate,
                limit=limit,
            )


# ------------------------------------------------------------------ of a pack


def pack_bases(override: Override, device: torch.device, seed: int) -> Iterator[Base]:
    """The samples of the override, given by `register_op_override(..., samples=...)`.

    Raises:
        TypeError: one of them does not fit the op.
    """
    if override.samples is None:
        return
    with opinfo.seeded(seed):
        made = list(override.samples(device))
    for index, sample in enumerate(made):
        call = call_of_sample(override, sample, f"sample {index}")
        base = base_from_arguments(f"pack:{index}", override.operator, call.values)
        yield replace(base, is_from_author=True)


def call_of_sample(override: Override, sample: Any, what: str) -> Call:
    """The call that an author gave: its arguments as a tuple, or as a dict by name.

    Raises:
        TypeError: it is neither, or it does not fit the op.
    """
    if isinstance(sample, Mapping):
        return override.operator.bind((), sample)
    if not isinstance(sample, (tuple, list)):
        raise TypeError(
            f"{what} of override {override.name!r} is a {type(sample).__name__}: give "
            "the op's arguments as a tuple, or by name as a dict"
        )
    keywords = {}
    if sample and isinstance(sample[-1], dict):
        *sample, keywords = sample
    return override.operator.bind(sample, keywords)


# ------------------------------------------------------------------ of OpInfo


def _reaching_bases(
    op: Op,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    seed: int,
    *,
    differentiate: bool,
    any_name: bool = True,
) -> Iterator[Base]:
    """Calls of the op that OpInfo's samples make; `far`: of OpInfos of any name, if need be."""
    infos = [
        info
        for info in opinfo.infos_by_name(op)[:_MAX_INFOS]
        if _reaches(op, info, dtypes, device, seed, differentiate)
    ]
    if (
        not infos and any_name and op.name.startswith("aten::") and dtypes
    ):  # the OpInfo has another name: all are tried, with few samples each
        infos = [
            info
            for info in opinfo.all_infos()
            if op.overload
            in opinfo.called(info, dtypes[0], device, seed, differentiate=differentiate)
        ][:_MAX_INFOS]
    for dtype in dtypes:
        found = [
            list(_op_call_bases(op, info, dtype, device, seed, differentiate=differentiate))
            for info in infos
        ]
        # From each in turn, so that not all samples are the first one's.
        interleaved = itertools.chain.from_iterable(
            itertools.zip_longest(*map(_varied_kinds_first, found))
        )
        yield from itertools.islice((base for base in interleaved if base), MAX_BASES)


def _reaches(
    op: Op,
    info: Any,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    seed: int,
    differentiate: bool,
) -> bool:
    return any(
        True
        for dtype in dtypes
        for _ in _op_call_bases(op, info, dtype, device, seed, differentiate=differentiate)
    )


def _op_call_bases(
    op: Op,
    info: Any,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    *,
    differentiate: bool,
    limit: int = opinfo.MAX_SAMPLES,
) -> Iterator[Base]:
    calls = opinfo.op_calls(op, info, dtype, device, seed, differentiate=differentiate, limit=limit)
    # The arguments of a backward op depend on each other: their sizes cannot be edited one by one.
    fixed = "backward" in op.name
    for each in calls:
        yield base_from_arguments(
            each.id, op, each.values, function_call=each.function_call, fixed=fixed
        )


def _varied_kinds_first(found: list[Base]) -> list[Base]:
    """The bases with distinct ranks, given arguments and scalars first."""
    kinds: dict[Any, list[Base]] = {}
    for base in found:
        source_kind = tuple(
            (position, value if position.dim is None and position.item is None else None)
            for position, value in base.positions.items()
        )
        kinds.setdefault(source_kind, []).append(base)
    return [base for row in itertools.zip_longest(*kinds.values()) for base in row if base]


def _with_samples(other: Op, override: Override) -> Override | None:
    """The override of another op that came with samples, by the same pack in the same DSL."""
    from opgraft.registry import Selector, registry

    for each in registry.overrides(Selector(op=other.name, dispatch_key=override.dispatch_key)):
        alike = each.pack == override.pack and each.dsl == override.dsl
        if each.samples is not None and alike:
            return each
    return None


def _bases_from_other_op(
    other: Op,
    override: Override,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    seed: int,
    use_opinfo: bool,
) -> Iterator[Base]:
    """Bases made from the forward op, or from the functional op that a variant belongs to."""
    op = override.operator
    relative = _with_samples(other, override)
    given = [] if relative is None else list(pack_bases(relative, device, seed))
    for source in given:
        base = base_from_other_op(op, source)
        if base is not None:
            yield base
    found: list[Base] = []
    if use_opinfo and opinfo.missing() is None:
        backward = forward_of(op) is not None
        if backward:
            # In grad mode a forward computes what its backward needs ...
            found = list(
                _reaching_bases(other, dtypes, device, seed, differentiate=True, any_name=False)
            )
        if not found:  # ... unless it is composed of other ops there.
            found = list(_reaching_bases(other, dtypes, device, seed, differentiate=False))
    if not found and not given:
        found = list(guessed_bases(other, dtypes, device))
    for source in found:
        base = base_from_other_op(op, source)
        if base is not None:
            yield base


# ------------------------------------------------------------------ of a schema

_SHAPES = ((4, 8), (3, 8), (8,), (2, 3, 8), (2, 3, 4, 8), (8, 8))


def guessed_bases(op: Op, dtypes: Sequence[torch.dtype], device: torch.device) -> Iterator[Base]:
    """Calls that the op accepts, made from its schema alone."""
    for dtype in dtypes:
        count = 0
        for values in _guesses(op, dtype, device):
            call = Call(op, values)
            try:
                run_natively(call)
            except Exception:  # not a call, then
                continue
            name = dtype_name(dtype)
            yield base_from_arguments(f"schema:{name}:{count}", op, values)
            count += 1
            if count == 3:
                break


def _guesses(op: Op, dtype: torch.dtype, device: torch.device) -> Iterator[Values]:
    def all_of_one_shape() -> Iterator[Values]:
        for shape in _SHAPES:
            options = [_options(a, [shape], dtype, device) for a in op.arguments]
            yield from (tuple(make() for make in makes) for makes in itertools.product(*options))

    def of_many_shapes() -> Iterator[Values]:
        options = [_options(a, _SHAPES, dtype, device) for a in op.arguments]
        yield from (tuple(make() for make in makes) for makes in itertools.product(*options))

    yield from itertools.islice(all_of_one_shape(), _MAX_GUESSES)
    yield from itertools.islice(of_many_shapes(), _MAX_GUESSES)


def _options(
    argument: Argument,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Callable[[], Any]]:
    """Functions that make values for an argument, the likeliest first."""
    if not argument.required:
        return [_maker(argument.default)]
    if argument.is_tensor or argument.kind == "List[Tensor]":
        makers = [_tensor_maker(shape, dtype, device) for shape in shapes]
        if argument.kind == "List[Tensor]":
            return [partial(_pair, maker) for maker in makers]
        return makers
    if argument.kind.startswith("Optional["):
        return [_maker(None)]
    known: dict[str, list[Any]] = {
        "int": [-1, 1, 0, 2],
        "SymInt": [-1, 1, 0, 2],
        "float": [0.5, 1e-5],
        "number": [2, 0.5],
        "bool": [False, True],
        "str": ["none", "mean"],
        "List[int]": [[8], [-1], [1]],
        "List[SymInt]": [[8], [-1], [1]],
        "List[bool]": [[True] * max(argument.list_size, 1)],
        "ScalarType": [dtype],
        "Device": [device],
    }
    return [_maker(value) for value in known.get(argument.kind, [None])]


def _pair(make: Callable[[], Any]) -> list[Any]:
    return [make(), make()]


def _maker(value: Any) -> Callable[[], Any]:
    return lambda: list(value) if isinstance(value, list) else value


def _tensor_maker(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=generator).to(device, dtype)
        high = 2 if dtype == torch.bool else 8
        return torch.randint(high, shape, generator=generator).to(device, dtype)

    return make
