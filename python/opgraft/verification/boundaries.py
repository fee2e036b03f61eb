"""Makes samples on both sides of every boundary of a condition.

A condition is data, so its comparisons are known. For each, a search finds the size at which the
comparison changes: it changes one size of a call (with the other numbers that must change with it)
and evaluates both sides of the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from opgraft.ops.schema import Call
from opgraft.router import threads
from opgraft.router.failure import loses_device
from opgraft.verification import isolated
from opgraft.verification.layouts import INDEX_DTYPES
from opgraft.verification.reference import copied, native, on_host
from opgraft.verification.samples import (
    EVERY_TENSOR,
    Base,
    CannotMake,
    Edits,
    Position,
    Sample,
    is_internal,
    run,
    run_natively,
)
from opgraft.when import nodes

#: dtypes that are tried to make a condition on dtypes fail.
_OTHER_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Steps of a search for the size at which a comparison changes.
_STEPS = 8
#: How many parts of a condition are made to hold, one after another, to make the call a hit.
_REPAIRS = 12


def predicates(condition: nodes.Expression) -> list[nodes.Condition]:
    """The predicates that a condition joins: comparisons and tests, without `& | ~`.

    >>> from opgraft import when
    >>> predicates((when.ndim("x") == 2) & ~when.is_none("w"))
    [when.ndim('x') == 2, when.is_none('w')]
    """
    if isinstance(condition, nodes.Joined):
        return [predicate for part in condition.parts for predicate in predicates(part)]
    if isinstance(condition, nodes.Not):
        return predicates(condition.part)
    return [condition] if isinstance(condition, nodes.Condition) else []


def claimed_dtypes(condition: object) -> list[torch.dtype]:
    """The dtypes that a condition names, in order; empty where it names none."""
    if not isinstance(condition, nodes.Condition):
        return []
    named = [
        dtype
        for predicate in predicates(condition)
        if isinstance(predicate, nodes.TensorCondition) and predicate.function == "dtype"
        for dtype in predicate.options
    ]
    return list(dict.fromkeys(named))


@dataclass
class Coverage:
    """Which sides of each predicate of a condition the samples of a run have covered."""

    predicates: list[nodes.Condition]
    seen: dict[int, set[bool]] = field(default_factory=dict)
    #: Why a side could not be reached.
    reasons: dict[int, str] = field(default_factory=dict)

    def add(self, call: Call) -> None:
        for index, predicate in enumerate(self.predicates):
            value = predicate.evaluate(call.named)
            if not isinstance(value, nodes.Undefined):
                self.seen.setdefault(index, set()).add(bool(value))

    def missing(self) -> list[str]:
        """A text for each side that no sample has covered."""
        lines = []
        for index, predicate in enumerate(self.predicates):
            sides = {True, False} - self.seen.get(index, set())
            for side in sorted(sides, reverse=True):
                reason = self.reasons.get(index) or _why_not(predicate)
                lines.append(f"{predicate!r} {'holds' if side else 'fails'}: {reason}")
        return lines


def _why_not(predicate: nodes.Condition) -> str:
    if isinstance(predicate, nodes.Same) and predicate.attribute == "device":
        return "it needs a second device"
    if "device_capability" in repr(predicate):
        return "there is one kind of device here"
    return "no call of that kind was found"


class Explorer:
    """Makes calls of an op from a base, and evaluates a condition on them."""

    def __init__(self, base: Base, seed: int, max_bytes: int) -> None:
        self.base = base
        self._seed = seed
        self._max_bytes = max_bytes
        self._valid: dict[str, bool] = {}
        self._groups: dict[Position, list[Position]] = {}
        self.refusal = ""
        self.is_internal = is_internal((base.source or base).op)

    def sample(self, edits: Edits) -> Sample:
        return Sample(self.base, dict(edits), {}, self._seed)

    def call(self, edits: Edits) -> Call | None:
        """The call after edits; None where the op refuses it, or it is too large."""
        return self.sample(edits).call() if self.accepts(edits) else None

    def accepts(self, edits: Edits) -> bool:
        """Whether there is a call after edits: the op takes it, and it is not too large.

        The op is asked once for each sample: that runs its meta function and its native kernel.
        """
        sample = self.sample(edits)
        if sample.id not in self._valid:
            try:
                self._check_size(edits)
                self._run(sample.call())
                self._valid[sample.id] = True
            except Exception as error:  # the native kernel refuses the call
                if loses_device(str(error)):
                    raise
                self.refusal = str(error).splitlines()[0] if str(error) else type(error).__name__
                self._valid[sample.id] = False
        return self._valid[sample.id]

    def _check_size(self, edits: Edits) -> None:
        sizes: dict[tuple[str, int | None], int] = {}
        for position, value in {**self.base.positions, **edits}.items():
            if position.dim is not None:
                key = (position.argument, position.item)
                sizes[key] = sizes.get(key, 1) * value
        if edits and self.is_internal and 0 in sizes.values():
            raise CannotMake(
                f"{self.base.op.name} is internal: its kernels trust their callers, who answer "
                "empty tensors themselves, and can crash on them"
            )
        largest = max(sizes.values(), default=0) * 8
        if largest > self._max_bytes:
            raise CannotMake(
                f"it needs tensors of about {largest / 2**30:.1f} GiB, and verify makes none above "
                f"{self._max_bytes / 2**30:.1f} GiB"
            )

    def _run(self, call: Call) -> None:
        with torch.no_grad(), threads.scope(threads.EVERYTHING):
            # The meta function runs first: kernels of internal ops trust their callers, and crash
            # on invalid arguments.
            with suppress(NotImplementedError):
                run(_on_meta(call))
            _check_indices(call)
            with suppress(NotImplementedError):  # no native kernel at this backend
                run_natively(call)

    def resize(self, position: Position, value: int, edits: Edits) -> dict[Position, Any] | None:
        """Edits that give a size a value, and change the other numbers that must be the same.

        It changes the fewest that the op accepts. A size of one argument is often also one of
        another. Only the op itself knows which sizes are equal by chance.
        """
        now = {**self.base.positions, **edits}
        groups = (
            [self._groups[position]]
            if position in self._groups
            else self._candidates(position, now)
        )
        for group in groups:
            tried = {**edits, **dict.fromkeys(group, value)}
            if self.accepts(tried):
                self._groups.setdefault(position, group)
                return tried
        return None

    def _candidates(self, position: Position, now: Edits) -> Iterator[list[Position]]:
        value = now[position]
        same = [p for p, v in now.items() if type(v) is int and v == value and _is_size(p)]
        if position.dim is None and position.item is None:
            yield [position]
            return
        from_end = self._from_end(position)
        yield [p for p in same if self._from_end(p) == from_end]
        yield [p for p in same if (p.dim or 0) == (position.dim or 0)]
        yield same
        yield [position]

    def _from_end(self, position: Position) -> int:
        """How far a size is from its tensor's (or an item from its list's) last."""
        key = (
            (position.argument, position.item)
            if position.dim is not None
            else (position.argument, None)
        )
        index = position.dim if position.dim is not None else position.item
        others = [
            p.dim if position.dim is not None else p.item
            for p in self.base.positions
            if ((p.argument, p.item) if p.dim is not None else (p.argument, None)) == key
        ]
        return max(each for each in others if each is not None) - (index or 0)

    # ------------------------------------------------------------------ comparisons

    def boundary_edits(
        self, predicate: nodes.Comparison, edits: Edits
    ) -> Iterator[dict[Position, Any]]:
        """Edits that put a comparison just inside and just outside, each by one number."""
        yield from self._scalars(predicate, edits)
        found = 0
        for position, value in {**self.base.positions, **edits}.items():
            if type(value) is not int or not _is_number(position) or found == 2:
                continue
            near = list(self._around(predicate, position, edits))
            found += bool(near)
            yield from near

    def _scalars(self, predicate: nodes.Comparison, edits: Edits) -> Iterator[dict[Position, Any]]:
        """Floats and bools that are compared with a constant themselves."""
        if not isinstance(predicate.left, nodes.Value) or not isinstance(
            predicate.right, nodes.Constant
        ):
            return
        position, constant = Position(predicate.left.name), predicate.right.constant
        if isinstance(constant, bool):
            values: list[Any] = [True, False]
        elif isinstance(constant, float) and math.isfinite(constant):
            margin = abs(constant) / 8 or 1e-3
            values = [constant - margin, constant, constant + margin]
        else:
            return
        for value in values:
            tried = {**edits, position: value}
            if self.accepts(tried):
                yield tried

    def _around(
        self, predicate: nodes.Comparison, position: Position, edits: Edits
    ) -> Iterator[dict[Position, Any]]:
        root = self._root(predicate, position, edits)
        if root is None:
            return
        for value in dict.fromkeys((math.floor(root), math.ceil(root))):
            for near in (value - 1, value, value + 1):
                legal = near >= 0 or not _is_size(position)
                if legal and (tried := self.resize(position, near, edits)) is not None:
                    yield tried

    def _root(self, predicate: nodes.Comparison, position: Position, edits: Edits) -> float | None:
        """The size at which both sides are equal; None where this size does not matter."""
        start = {**self.base.positions, **edits}[position]
        here = self._difference(predicate, edits)
        step = self.resize(position, start + 1, edits) or self.resize(position, start * 2, edits)
        there = None if step is None else self._difference(predicate, step)
        if here is None or there is None or step is None or here == there:
            return None
        points = [(float(start), here), (float(step[position]), there)]
        for _ in range(_STEPS):
            (x0, y0), (x1, y1) = points[-2:]
            if y1 == y0:
                return None
            root = x1 - y1 * (x1 - x0) / (y1 - y0)
            value = round(root)
            if value < 0 and _is_size(position):
                return None
            tried = self.resize(position, value, edits)
            if tried is None:
                return None
            difference = self._difference(predicate, tried)
            if difference is None:
                return None
            if difference == 0 or value == round(x1):
                return value if difference == 0 else root
            points.append((float(value), difference))
        return None

    def _difference(self, predicate: nodes.Comparison, edits: Edits) -> float | None:
        call = self.call(edits)
        if call is None:
            return None
        left, right = predicate.left.evaluate(call.named), predicate.right.evaluate(call.named)
        if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
            return None
        return float(left - right)

    def predicate_edits(
        self, predicate: nodes.Condition, edits: Edits
    ) -> Iterator[dict[Position, Any]]:
        """Edits that make a predicate hold or fail: other dtypes, an argument that is None."""
        if isinstance(predicate, nodes.IsNone):
            tries: list[dict[Position, Any]] = [{Position(predicate.name): None}]
        elif isinstance(predicate, nodes.TensorCondition) and predicate.function == "dtype":
            others = [each for each in _OTHER_DTYPES if each not in predicate.options]
            tries = [{Position(EVERY_TENSOR): dtype} for dtype in others]
        elif isinstance(predicate, nodes.Same) and predicate.attribute == "dtype":
            names = [tensor for tensor in predicate.tensors if isinstance(tensor, str)]
            tries = [{Position(name): dtype} for name in names for dtype in _OTHER_DTYPES]
        else:
            tries = []
        for tried in ({**edits, **each} for each in tries):
            if self.accepts(tried):
                yield tried

    # ------------------------------------------------------------------ a call that hits

    def edits_to_hold(self, condition: nodes.Condition, edits: Edits) -> dict[Position, Any] | None:
        """Edits after which the condition holds, found part by part; None where none are found.

        A failing part is changed as little as possible, so that the call is near its boundaries.
        """
        edits = dict(edits)
        for _ in range(_REPAIRS):
            call = self.call(edits)
            if call is None:
                return None
            if condition.holds(call.named):
                return edits
            repaired = next(self._repairs(condition, True, call, edits), None)
            if repaired is None or repaired == edits:
                return None
            edits = repaired
        return None

    def _repairs(
        self, part: nodes.Condition, wanted: bool, call: Call, edits: Edits
    ) -> Iterator[dict[Position, Any]]:
        if isinstance(part, nodes.Not):
            yield from self._repairs(part.part, not wanted, call, edits)
        elif isinstance(part, nodes.Joined):
            # All parts of an `&` must hold (no part of a `|`): change the first that does not.
            for each in part.parts:
                value = each.evaluate(call.named)
                if isinstance(value, nodes.Undefined) or bool(value) is not wanted:
                    yield from self._repairs(each, wanted, call, edits)
        else:
            yield from self._repair(part, wanted, edits)

    def _repair(
        self, predicate: nodes.Condition, wanted: bool, edits: Edits
    ) -> Iterator[dict[Position, Any]]:
        if isinstance(predicate, nodes.Comparison):
            tries: Iterable[dict[Position, Any]] = self.boundary_edits(predicate, edits)
        elif isinstance(predicate, nodes.TensorCondition) and predicate.function == "dtype":
            tries = [{**edits, Position(EVERY_TENSOR): dtype} for dtype in predicate.options]
        elif isinstance(predicate, nodes.IsNone) and wanted:
            tries = [{**edits, Position(predicate.name): None}]
        else:
            tries = []
        for tried in tries:
            call = self.call(tried)
            value = None if call is None else predicate.evaluate(call.named)
            if isinstance(value, bool) and value is wanted:
                yield tried


def _check_indices(call: Call) -> None:
    """Refuse an index that is out of range for the sizes of an edited call.

    On a CUDA device it would be an assertion, after which the process cannot use the device any
    more. On the CPU it is an error, in a fork, as some kernels there trust their callers.
    """
    indices = [t for t in call.tensors() if t.dtype in INDEX_DTYPES and t.numel()]
    rows = _rows_that_backwards_trust(call)
    ignored = call.named.get("ignore_index")
    if rows is not None and any(_is_outside(each, rows, ignored) for each in indices):
        raise CannotMake(f"an index is none of {rows} rows'")
    if not indices or not any(tensor.is_cuda for tensor in call.tensors()):
        return
    on_cpu = on_host(call)
    (outcome,) = isolated.run_in_forks([lambda: run(on_cpu)])
    is_refused = outcome.what == "raised" and outcome.error in ("IndexError", "RuntimeError")
    if is_refused or outcome.what == "died":
        raise CannotMake(f"the CPU's kernel refuses it: {outcome.error}: {outcome.message}")


def _is_outside(indices: torch.Tensor, rows: int, ignored: int | None) -> bool:
    wrong = (indices < 0) | (indices >= rows)
    return bool((wrong if ignored is None else wrong & (indices != ignored)).any())


def _rows_that_backwards_trust(call: Call) -> int | None:
    """How many rows there are for the indices of a backward whose kernels look at no index's value.

    Of an embedding's gradient the CPU's kernel leaves an index out of range out, and CUDA's writes
    there. Of the negative log-likelihood's the CPU's writes there.
    """
    rows = call.named.get("num_weights")
    if isinstance(rows, int):
        return rows
    input = call.named.get("self")
    if "total_weight" in call.named and isinstance(input, torch.Tensor) and input.dim():
        return input.shape[min(1, input.dim() - 1)]
    return None


def supports_layout(sample: Sample) -> bool:
    """Whether the native kernel reads the tensors of a sample by their strides.

    Kernels of internal ops may rely on callers that make tensors contiguous.
    """
    with torch.no_grad():
        try:
            as_laid_out = native(sample.call()).outputs
            plain = native(copied(sample.call(), contiguous=True)).outputs
        except Exception:  # it refuses the layout, or the memory is short
            return False
    pairs = [
        (one, other)
        for one, other in zip(as_laid_out, plain, strict=True)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    ]
    return all(torch.allclose(a, b, rtol=0.05, atol=0.05, equal_nan=True) for a, b in pairs)


def _is_size(position: Position) -> bool:
    return position.dim is not None or position.item is not None


def _is_number(position: Position) -> bool:
    return position.argument != EVERY_TENSOR and not position.argument.startswith("*")


def _on_meta(call: Call) -> Call:
    return Call(call.op, tuple(map(_meta, call.values)))


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return [_meta(each) for each in value] if isinstance(value, (list, tuple)) else value
