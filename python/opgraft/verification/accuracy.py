"""Checks whether a result is as accurate as the native kernel's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from opgraft.router import threads
from opgraft.router.outputs import same_bits
from opgraft.verification.layouts import FINITE
from opgraft.verification.observation import (
    Failed,
    Observation,
    output_name,
    reference_at,
)
from opgraft.verification.reference import (
    Error,
    errors,
    narrowed,
    native_with_written,
    on_host,
    perturbed,
    reference,
    widened,
)
from opgraft.verification.scans import by_blocks, is_scan

#: How many sets of random values are tried when the error for the first is above the bound.
_REDRAWS = 12
#: Ops that return each index once.
_DISTINCT = frozenset({"aten::sort", "aten::topk"})
#: An output is a reduction if the arguments are this many times larger.
_TERMS = 16
#: With no more elements than this, native's largest error is small by chance.
_FEW = 16


def check_accuracy(
    seen: Observation, index: int, mine: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor
) -> None:
    """Raise :class:`Failed` if an output's error is too large, over several sets of values."""
    where = output_name(seen, index)
    if not (mine.is_floating_point() or mine.is_complex()):
        if not torch.equal(mine, expected) and not _chose_among_equals(seen, index, mine, expected):
            count = int((mine != expected).sum())
            raise Failed(f"{where} differs from native's in {count} of {mine.numel()} elements")
        return
    error, problem = errors(mine, expected, exact)
    if problem is not None:
        on_the_host = _errors_against_the_host(seen, index, mine)
        if on_the_host is None:
            raise Failed(f"{where} has {problem}")
        error = on_the_host
    if not error.within(seen.subject.k) and mine.dtype in (torch.float64, torch.complex128):
        error = replace(error, native=_in_float32(seen, index, exact))
    if not error.within(seen.subject.k):
        error = replace(error, noise=_blockwise_scan_error(seen, index, rng=1))
    if not error.within(seen.subject.k):
        noise = 0.0 if seen.is_special else _blockwise_scan_error(seen, index, rng=_REDRAWS)
        error = replace(_error_over_redraws(seen, index, error), noise=max(error.noise, noise))
    if not error.within(seen.subject.k):
        error = replace(error, noise=max(error.noise, _rounding_noise(seen, index, exact)))
    if not error.within(seen.subject.k):
        raise Failed(f"{where} has {error}; allowed are {seen.subject.k:g} times")
    seen.subject.worst_error = max(seen.subject.worst_error, error.mine / max(error.bound, 1e-300))


def _errors_against_the_host(seen: Observation, index: int, mine: torch.Tensor) -> Error | None:
    """The errors against native on the CPU, if the result has NaN and infinities where that has.

    A device's own kernels disagree on them: the variance of a row with an infinity is NaN by
    Welford's formula, which CUDA's norms use for some row lengths, and infinite by the plain one.
    """
    if mine.device.type == "cpu":
        return None
    with torch.no_grad():
        try:
            call = on_host(seen.sample.call())
            expected, exact = native_with_written(call).outputs[index], reference(call)
        except Exception:  # the op has no kernel there
            return None
    if not isinstance(expected, torch.Tensor) or expected.shape != mine.shape:
        return None
    found, problem = errors(mine.cpu(), expected, reference_at(exact.outputs, index, expected))
    return found if problem is None else None


def _in_float32(seen: Observation, index: int, exact: torch.Tensor) -> float:
    """An estimate of native's error in float64, where native itself is the reference: the error in
    float32, scaled by the two dtypes' units in the last place."""
    with torch.no_grad():
        try:
            call = narrowed(seen.sample.call())
            narrow = native_with_written(call).outputs[index]
            wide = native_with_written(widened(call, torch.float64)).outputs[index]
        except Exception:  # it takes float64 only
            return 0.0
    error, _ = errors(narrow, narrow, wide)
    scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return error.native * scale


def _blockwise_scan_error(seen: Observation, index: int, rng: int) -> float:
    """The largest error of a scan that is computed by blocks; zero for an op that is no scan."""
    if not is_scan(seen.subject.op) or index > 0:
        return 0.0
    largest = 0.0
    for draw in range(rng):
        each = seen if draw == 0 else Observation(seen.subject, seen.sample.with_new_values(draw))
        try:
            result, exact = by_blocks(each.sample.call()), each.reference.outputs[index]
        except Exception:  # no such call with other values, or no such arithmetic in that dtype
            continue
        largest = max(largest, _largest_difference(result, exact))
    return largest


def _largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    difference = (one.double() - other.double()).abs()
    finite = difference[difference.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _rounding_noise(seen: Observation, index: int, exact: torch.Tensor) -> float:
    """How much a sum changes when its arguments change in the last places of float32.

    For a few sums, native's own error says little: where terms cancel, it may be small by chance,
    and each kernel chooses the order of its additions. For an op that is no reduction this is zero:
    its many elements make native's largest error meaningful. It is not zero for few elements, nor
    for difficult values (all equal, far from zero), where native's error may be nothing or very
    large. (In a row of two elements, the gradient of a normalisation is nothing but rounding.)
    """
    terms = max((t.numel() for t in seen.sample.call().tensors()), default=0)
    is_chance = terms >= _TERMS * exact.numel() or exact.numel() <= _FEW
    if not is_chance and not _is_extreme(seen):
        return 0.0
    largest = 0.0
    for draw in range(_REDRAWS):
        with torch.no_grad():
            try:
                moved = reference(perturbed(seen.sample.call(), seen.subject.seed + draw))
            except Exception:
                return largest
        other = moved.outputs[index] if index < len(moved.outputs) else None
        if isinstance(other, torch.Tensor) and other.shape == exact.shape:
            largest = max(largest, _largest_difference(other, exact))
    return largest


def _error_over_redraws(seen: Observation, index: int, error: Error) -> Error:
    """:func:`error_over_redraws` for an output."""

    def outputs(draw: int) -> Sequence[Any]:
        again = Observation(seen.subject, seen.sample.with_new_values(draw))
        try:
            pair = (again.override_run.outputs[index], again.native.outputs[index])
            return (*pair, reference_at(again.reference.outputs, index, pair[1]))
        except Exception:  # no such call with other values
            return ()

    return error if seen.is_special else error_over_redraws(error, outputs)


def _is_extreme(seen: Observation) -> bool:
    return any(layout in FINITE for layout in seen.sample.layouts.values())


def _chose_among_equals(
    seen: Observation, index: int, mine: torch.Tensor, expected: torch.Tensor
) -> bool:
    """Whether indices differ from native's only where both point at equal values.

    If an op returns values with their indices, a kernel may choose any of several equal values,
    unless the op must be stable. An op that returns only indices (`argmax`) defines which.
    """
    named = seen.sample.call().named
    values, dim = named.get("self"), named.get("dim")
    # Indices come after the values, which may be integers as well.
    follows = index > 0 and isinstance(seen.native.outputs[0], torch.Tensor)
    if not follows or named.get("stable") or type(dim) is not int:
        return False
    if not isinstance(values, torch.Tensor) or mine.dtype != torch.int64:
        return False
    if mine.ndim == values.ndim - 1:
        mine, expected = mine.unsqueeze(dim), expected.unsqueeze(dim)
    if mine.ndim != values.ndim or mine.shape != expected.shape:
        return False
    size = values.shape[dim] if values.ndim else 1
    if mine.numel() and not 0 <= int(mine.min()) <= int(mine.max()) < size:
        return False
    with threads.scope(threads.EVERYTHING):
        if _base(seen) in _DISTINCT and _repeats(mine, dim):
            return False
        return same_bits(values.gather(dim, mine), values.gather(dim, expected))


def _base(seen: Observation) -> str:
    return seen.subject.op.overload._schema.name


def _repeats(indices: torch.Tensor, dim: int) -> bool:
    if indices.ndim == 0:
        return False
    return bool((indices.sort(dim).values.diff(dim=dim) == 0).any())


def error_over_redraws(error: Error, again: Callable[[int], Sequence[Any]]) -> Error:
    """The largest errors over more sets of random values: for one, native's may be small by chance.

    Args:
        error: the error for the first set.
        again: returns the override's result, native's and the reference for another set; empty if
            the call cannot have other values.
    """
    for draw in range(1, _REDRAWS):
        found = again(draw)
        if found and all(isinstance(each, torch.Tensor) for each in found):
            other, problem = errors(*found)
            # NaN is as bad for any values.
            error = error.joined(other if problem is None else replace(other, mine=math.inf))
    return error


def is_accurate_enough(error: Error, one: torch.Tensor, other: torch.Tensor, k: float) -> bool:
    """Whether a result of several ops is as accurate as native's: their errors may add up."""
    if error.within(2 * k):
        return True
    exact = one.dtype in (torch.float64, torch.complex128)  # native is the reference, its error 0
    return exact and torch.allclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)
