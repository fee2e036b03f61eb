"""Chooses the samples on which an override is verified, the most useful first."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from opgraft.ops.schema import Call
from opgraft.registry import Override
from opgraft.verification import code_constants, sources
from opgraft.verification.boundaries import (
    Coverage,
    Explorer,
    claimed_dtypes,
    predicates,
    supports_layout,
)
from opgraft.verification.layouts import FINITE, SPECIAL
from opgraft.verification.samples import Edits, Position, Sample, layouts, tensors_of, with_rank
from opgraft.when import Condition, nodes

#: The dtypes of samples where a condition names none.
_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.complex64, torch.bool),
)
#: Values for every size: those of models, just above powers of two, zero, one, primes.
_SIZES = (
    *(1000, 4097, 128, 0, 1, 50257, 257, 768, 3, 5120, 31, 1536, 2, 64, 8193),
    *(127, 2048, 320, 1025, 12288, 4096, 511, 11008, 32000),
)
#: How many random sizes are added, as likely small as large, and the largest of them.
_RANDOM_SIZES, _LARGEST_RANDOM_SIZE = 8, 20000
#: The largest value of the other sizes when one size is large.
_SMALL_SIZE = 6
#: How many integers of the impl's code are tried as sizes, with their neighbours.
_CODE_CONSTANTS = 12
#: Pairs of sizes with the same number of elements: a cache by that number confuses them.
_SAME_NUMEL = ((4, 6), (6, 4), (12, 2), (3, 8))
#: The value of all sizes of a call whose sizes are equal.
_SQUARE_SIZE = 5
#: Ranks in which calls are made if the condition holds for them.
_RANKS = (3, 0, 1, 4)
#: How many calls for which the condition holds are varied, for each dtype, in different ranks.
_ANCHORS = 2
#: How many of these calls are varied to find the condition's boundaries.
_MAX_VARIED = 3
#: Arguments that name dimensions.
_DIMENSIONS = ("dim", "axis")
#: Flags without which each kernel chooses the order of its results.
_ORDER_FLAGS = ("sorted",)

Anchor = tuple[Explorer, Sample]


class Candidates:
    """The samples of one override.

    Args:
        override: the override that is verified.
        device: the device of the tensors.
        seed: the seed of all values.
        max_bytes: no sample has a tensor that is much larger than this.
        use_opinfo: whether to use PyTorch's own samples.
        coverage: gets the reasons why a side of the condition cannot be reached.
    """

    def __init__(
        self,
        override: Override,
        device: torch.device,
        seed: int,
        max_bytes: int,
        coverage: Coverage,
        *,
        use_opinfo: bool,
    ) -> None:
        self._override = override
        self._condition = override.cond if isinstance(override.cond, Condition) else None
        self._coverage = coverage
        self._seed = seed
        self._max_bytes = max_bytes
        dtypes = claimed_dtypes(override.cond) or list(_DTYPES)
        found = sources.bases(override, dtypes, device, seed, use_opinfo=use_opinfo)
        self._explorers = [Explorer(base, seed, max_bytes) for base in found]

    def __iter__(self) -> Iterator[Sample]:
        # The author's calls are varied, if there are any: it takes long to change one of torch's
        # own so that the condition holds.
        given = [explorer for explorer in self._explorers if explorer.base.is_from_author]
        by_dtype = self._wanted_calls(given or self._explorers)
        anchors = list(_ranked(by_dtype))
        return _round_robin(
            [
                # The base calls unchanged, then variations of each call that hits.
                (explorer.sample({}) for explorer in _alternating_dtypes(self._explorers)),
                (sample for _, sample in anchors),
                self._sizes(anchors),
                self._squares(),
                *(self._boundaries(*anchor) for anchor in anchors[:_MAX_VARIED]),
                self._layouts(anchors),
                self._values(anchors or self._as_given(given)),
                self._scalars(by_dtype),
            ]
        )

    # ------------------------------------------------------------------ calls to vary

    def _wanted_calls(self, explorers: Sequence[Explorer]) -> list[dict[int, Anchor]]:
        """For each dtype, calls for which the condition holds, by rank."""
        found: dict[Any, dict[int, Anchor]] = {}
        for explorer in explorers:
            self._add(found, explorer)
        for by_rank in list(found.values()):
            # Most other ranks can be made from two dimensions, and none from zero.
            from_here, _ = by_rank[
                min((r for r in by_rank if r), default=0, key=_distance_from_rank_2)
            ]
            for rank in _RANKS:
                base = None if rank in by_rank else with_rank(from_here.base, rank)
                if base is not None:
                    self._add(found, Explorer(base, self._seed, self._max_bytes))
        return list(found.values())

    def _add(self, found: dict[Any, dict[int, Anchor]], explorer: Explorer) -> None:
        # Kernels of internal ops trust their callers, and crash on invalid arguments. Only the
        # author knows other valid calls.
        if explorer.base.is_from_author and explorer.is_internal:
            return
        edits = self._wanted(explorer)
        call = None if edits is None else explorer.call(edits)
        if call is not None and edits is not None:
            rank = max((tensor.ndim for tensor in call.tensors()), default=0)
            of_dtype = found.setdefault(main_dtype(call), {})
            of_dtype.setdefault(rank, (explorer, explorer.sample(edits)))

    def _as_given(self, given: Sequence[Explorer]) -> list[Anchor]:
        """The author's calls of an internal op: only their values may be changed."""
        return [
            (explorer, explorer.sample({}))
            for explorer in given
            if explorer.is_internal and self._wanted(explorer) == {}
        ]

    def _wanted(self, explorer: Explorer) -> dict[Position, Any] | None:
        call = explorer.call({})
        if call is None:
            return None
        if self._condition is not None:
            if explorer.is_internal and explorer.base.is_from_author:
                return {} if self._condition.holds(call.named) else None
            return explorer.edits_to_hold(self._condition, {})
        try:
            wanted = self._override.condition_holds(call)
        except Exception:  # a condition in Python; the checks report its error
            wanted = False
        return {} if wanted else None

    # ------------------------------------------------------------------ variations of these calls

    def _boundaries(self, explorer: Explorer, anchor: Sample) -> Iterator[Sample]:
        if self._condition is None:
            return
        for index, predicate in enumerate(predicates(self._condition)):
            explorer.refusal = ""
            if isinstance(predicate, nodes.Comparison):
                yield from map(explorer.sample, explorer.boundary_edits(predicate, anchor.edits))
            else:
                yield from map(explorer.sample, explorer.predicate_edits(predicate, anchor.edits))
            if explorer.refusal:
                self._coverage.reasons.setdefault(
                    index, f"calls beyond it are refused: {explorer.refusal}"
                )

    def _sizes(self, anchors: Sequence[Anchor]) -> Iterator[Sample]:
        """The first and the last size of a call's first tensor, for one call after another."""
        sized = [
            (explorer, self._small(explorer, anchor))
            for explorer, anchor in anchors
            if _sizes_of(explorer, anchor)
        ]
        for number, size in enumerate(self._interesting_sizes()):
            # The last size matters most: it is varied in the first dtype, and in another.
            for end, start in ((0, 0), (0, 1 + number), (1, number)):
                for explorer, anchor in _rotated(sized, start):
                    positions = _sizes_of(explorer, anchor)
                    edits = explorer.resize(
                        positions[min(end, len(positions) - 1)], size, anchor.edits
                    )
                    if edits is not None:
                        yield explorer.sample(edits)
                        break
            if number == 4:
                yield from self._of_same_numel(sized)
        for explorer, anchor in sized:  # then the other sizes
            for position in _sizes_of(explorer, anchor)[2:]:
                for size in _SIZES:
                    edits = explorer.resize(position, size, anchor.edits)
                    if edits is not None:
                        yield explorer.sample(edits)

    def _squares(self) -> Iterator[Sample]:
        """Calls with equal sizes: only the order of dimensions distinguishes them."""
        for explorer in _alternating_dtypes(self._explorers):
            if explorer.base.is_from_author and explorer.is_internal:
                continue
            sizes = [position for position in explorer.base.positions if position.dim is not None]
            edits = dict.fromkeys(sizes, _SQUARE_SIZE)
            # With only one tensor, no dimension can be taken from another one.
            if len({(p.argument, p.item) for p in sizes}) > 1 and explorer.accepts(edits):
                yield explorer.sample(edits)

    def _small(self, explorer: Explorer, anchor: Sample) -> Sample:
        """The call with few elements, if it still hits, so that one size can be large."""
        edits = dict(anchor.edits)
        for position in _sizes_of(explorer, anchor):
            if {**anchor.base.positions, **edits}[position] > _SMALL_SIZE:
                fewer = explorer.resize(position, _SMALL_SIZE, edits)
                call = None if fewer is None else explorer.call(fewer)
                if fewer is not None and call is not None and self._override.condition_holds(call):
                    edits = fewer
        return explorer.sample(edits)

    def _interesting_sizes(self) -> list[int]:
        constants = code_constants.integer_constants(self._override.impl, _CODE_CONSTANTS)
        beside = [near for number in constants for near in (number, number + 1, number - 1)]
        rng = random.Random(self._seed)
        random_sizes = [round(_LARGEST_RANDOM_SIZE ** rng.random()) for _ in range(_RANDOM_SIZES)]
        return list(dict.fromkeys([*beside, *_SIZES, *random_sizes]))

    def _of_same_numel(self, anchors: Sequence[Anchor]) -> Iterator[Sample]:
        having_two = [(e, a) for e, a in anchors if len(_sizes_of(e, a)) > 1]
        for explorer, anchor in having_two[:_MAX_VARIED]:
            last, first, *_ = _sizes_of(explorer, anchor)
            along = {p: -1 for p in anchor.base.positions if p.argument == "dim" and p.item is None}
            if not explorer.accepts({**anchor.edits, **along}):
                along = {}
            for rows, columns in _SAME_NUMEL:
                edits = explorer.resize(first, rows, {**anchor.edits, **along})
                both = None if edits is None else explorer.resize(last, columns, edits)
                if both is not None:
                    yield explorer.sample(both)
        for explorer, anchor in anchors:  # one element in all
            edits = dict(anchor.edits)
            for position in _sizes_of(explorer, anchor):
                edits = explorer.resize(position, 1, edits) or edits
            yield explorer.sample(edits)

    def _layouts(self, anchors: Sequence[Anchor]) -> Iterator[Sample]:
        """Each layout of each tensor, of one call after another."""
        as_they_are = (
            e.sample({}) for e in _alternating_dtypes(self._explorers) if not e.base.is_from_author
        )
        plain = itertools.chain((anchor for _, anchor in anchors), as_they_are)
        shared = itertools.chain.from_iterable(map(self._shared, plain))
        yield from itertools.islice(shared, _MAX_VARIED)
        yield from _diagonally([list(self._layouts_of(*anchor)) for anchor in anchors])

    def _layouts_of(self, explorer: Explorer, anchor: Sample) -> Iterator[Sample]:
        call = _made(anchor)
        if call is None:
            return
        for position, tensor in tensors_of(call.op, call.values):
            for layout in layouts(anchor.base, position, tensor):
                sample = anchor.with_layout(position, layout)
                if layout not in SPECIAL and (not explorer.is_internal or supports_layout(sample)):
                    yield sample

    def _shared(self, anchor: Sample) -> Iterator[Sample]:
        """The same tensor given twice."""
        call = _made(anchor)
        if call is None:
            return
        positions = tensors_of(call.op, call.values)
        free = [
            (p, t) for p, t in positions if p.item is None and p.argument in anchor.base.independent
        ]
        if self._override.operator.mutates or len(free) < 2:
            return
        (first, one), *rest = free
        for position, other in rest:
            if one.ndim and other.shape == one.shape and other.dtype == one.dtype:
                yield anchor.with_layout(position, f"={first.argument}")

    def _values(self, anchors: Sequence[Anchor]) -> Iterator[Sample]:
        """Values that kernels are often wrong at, of one call after another."""
        yield from _diagonally([list(self._values_of(*anchor)) for anchor in anchors])

    def _values_of(self, explorer: Explorer, anchor: Sample) -> Iterator[Sample]:
        call = _made(anchor)
        if call is None:
            return
        positions = list(tensors_of(call.op, call.values))
        only_given = explorer.is_internal and explorer.base.is_from_author
        for layout in SPECIAL:
            for number, (position, tensor) in enumerate(positions):
                if layout not in layouts(anchor.base, position, tensor):
                    continue
                if only_given and (
                    layout not in FINITE or not _may_have_other_values(position, call)
                ):
                    continue
                if layout == "wide" and (number or not _takes_wide_integers(explorer, call)):
                    continue
                yield anchor.with_layout(position, layout)

    def _scalars(self, by_dtype: Sequence[dict[int, Anchor]]) -> Iterator[Sample]:
        """Other ranks, every dimension of each, and other numbers."""
        for number, rank in enumerate((*_RANKS, 2)):
            having = [by_rank[rank] for by_rank in by_dtype if rank in by_rank]
            for explorer, anchor in _rotated(having, number)[:1]:
                yield anchor
                for edits in _other_scalars(explorer, anchor, rank):
                    if explorer.accepts(edits):
                        yield explorer.sample(edits)


def _made(sample: Sample) -> Call | None:
    """The call of a sample; None where an op that makes its arguments refuses to."""
    try:
        return sample.call()
    except Exception:
        return None


def _sizes_of(explorer: Explorer, anchor: Sample) -> list[Position]:
    """The sizes of a call: the last and the first of its first tensor, then the others."""
    positions = [
        position
        for position in {**anchor.base.positions, **anchor.edits}
        if position.dim is not None
    ]
    if not positions:
        return []
    own = [position for position in positions if position.argument == positions[0].argument]
    return list(dict.fromkeys([own[-1], own[0], *positions]))


def _other_scalars(explorer: Explorer, anchor: Sample, rank: int) -> Iterator[Edits]:
    for position, value in {**anchor.base.positions, **anchor.edits}.items():
        if position.dim is not None:
            continue
        if position.argument.startswith(_DIMENSIONS) and not isinstance(value, bool):
            others: Iterable[Any] = range(-rank, rank)
        elif explorer.is_internal or position.item is not None or position.argument in _ORDER_FLAGS:
            continue  # its callers know what goes together
        elif isinstance(value, bool):
            others = (not value,)
        elif isinstance(value, float):
            others = (0.25, 0.0, 0.5, 2.0)
            # What is added to a variance is not negative: the sum would be nothing but rounding.
            others += () if position.argument == "eps" else (-1.0,)
        elif isinstance(value, int):
            others = (-1, 0, 1, 2)
        else:
            continue
        yield from ({**anchor.edits, position: other} for other in others if other != value)


def _may_have_other_values(position: Position, call: Any) -> bool:
    """Whether no other argument of the call was computed from this one."""
    return "backward" not in call.op.name or position.argument.startswith("grad")


def _takes_wide_integers(explorer: Explorer, call: Any) -> bool:
    """Whether integers are values here, not indices and not sizes."""
    integers = all(not t.is_floating_point() and not t.is_complex() for t in call.tensors())
    sized_by_values = torch.Tag.dynamic_output_shape in call.op.overload.tags
    return integers and not sized_by_values and not explorer.is_internal


def _ranked(by_dtype: Sequence[dict[int, Anchor]]) -> Iterator[Anchor]:
    """A few calls of each dtype, of different ranks, each dtype in turn."""
    # Two dimensions come first: with fewer there is less to vary, with more each is smaller.
    ranked = [[by[rank] for rank in sorted(by, key=_distance_from_rank_2)] for by in by_dtype]
    for row in itertools.zip_longest(*(each[:_ANCHORS] for each in ranked)):
        yield from (each for each in row if each is not None)


def _distance_from_rank_2(rank: int) -> tuple[int, int]:
    return (abs(rank - 2), -rank)


def _alternating_dtypes(explorers: Sequence[Explorer]) -> Iterator[Explorer]:
    """The explorers, alternating between dtypes."""
    by_dtype: dict[Any, list[Explorer]] = {}
    for explorer in explorers:
        by_dtype.setdefault(explorer.base.dtype, []).append(explorer)
    for row in itertools.zip_longest(*by_dtype.values()):
        yield from (each for each in row if each is not None)


def _rotated(anchors: Sequence[Anchor], start: int) -> list[Anchor]:
    """The anchors, rotated to begin at another one."""
    start %= len(anchors) or 1
    return [*anchors[start:], *anchors[:start]]


def _diagonally(lists: Sequence[Sequence[Sample]]) -> Iterator[Sample]:
    """The first of the first list, the second of the second, and so on: soon one of each kind."""
    longest = max(map(len, lists), default=0)
    for shift in range(len(lists)):
        for index in range(longest):
            chosen = lists[(index + shift) % len(lists)]
            if index < len(chosen):
                yield chosen[index]


def _round_robin(sources_: Iterable[Iterator[Sample]]) -> Iterator[Sample]:
    """A sample of each source in turn, so that a limit on the total leaves out no source."""
    live = list(sources_)
    while live:
        for source in list(live):
            try:
                yield next(source)
            except StopIteration:
                live.remove(source)


def main_dtype(call: Any) -> torch.dtype | None:
    """The dtype of a call's first tensor."""
    return next((tensor.dtype for tensor in call.tensors()), None)
