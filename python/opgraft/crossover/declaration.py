"""What an author declares of a crossover: what it depends on, and how to make samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from opgraft.errors import RegistrationError
from opgraft.when.nodes import Number, TensorNumber, tensors_of

__all__ = ["Crossover"]


class Crossover:
    """On what it depends whether an override is faster than native. Immutable.

    `cond=` says for which calls an override is right, `crossover=` for which it is faster. It names
    the few features of a call on which that depends. A table that was measured on this model of
    device decides by them: docs/tuning.md. No threshold is written in code.

    Args:
        calls: how to make samples, for `opgraft tune`: a function of a device and of the features
            by name, which yields the op's arguments, each time as a tuple, or as a dict by name.
            Integers in buckets are where the bucket begins. Of several calls the one that the
            override gains least by decides for the whole bucket: yield one from its middle and
            those that the kernel is worse at.
        version: of the kernel. Change it when the kernel becomes faster or slower: tables that
            were measured with another version do not hold any more.
        exact: the integer features whose every value is a bucket of its own, such as a number of
            heads. Dtypes and booleans are exact anyway; other integers fall into buckets between
            powers of two.
        ranges: what `opgraft tune` measures: by feature, the smallest and the largest number, from
            1 on, or the values of an exact one.
        open_ended: the features whose range goes on without a change at both ends: the smallest
            and the largest number that were measured also decide for what lies beyond them. For
            example, a kernel that is limited by memory at 2**27 elements is so for any more.
            Without it, what lies outside of the measured cells is declined.
        tables: the folder with the tables that the author ships; None: there are none.
        measured_as: the name of another override of this owner, whose part of the tables decides
            here, too: for ops that run the same kernel in place of the same native one. The
            features are its, by name and in order. Then this override is not measured, and gives
            no `calls` and no `ranges`.
        **features: each an integer, a boolean, or :func:`opgraft.when.dtype_of`, as an expression
            of :mod:`opgraft.when`.

    Raises:
        RegistrationError: there is no feature; one is no number; none is about a tensor, whose
            device could be looked up; `exact` or `open_ended` names another one; or a range is
            none: negative, zero, beyond 64 bits, of another type, or with a value twice;
            or `measured_as` is no name, or stands beside `calls` or `ranges`.

    >>> import opgraft
    >>> from opgraft import when
    >>> crossover = opgraft.Crossover(
    ...     rows=when.numel("input") // when.size("input", -1),
    ...     hidden=when.size("input", -1),
    ...     dtype=when.dtype_of("input"),
    ... )
    >>> list(crossover.features)
    ['rows', 'hidden', 'dtype']
    """

    calls: Callable[..., Iterable[Any]] | None
    version: int
    exact: frozenset[str]
    ranges: Mapping[str, Sequence[Any]]
    open_ended: frozenset[str]
    tables: Path | None
    measured_as: str | None
    features: Mapping[str, Number]

    def __init__(
        self,
        *,
        calls: Callable[..., Iterable[Any]] | None = None,
        version: int = 1,
        exact: Iterable[str] = (),
        ranges: Mapping[str, Sequence[Any]] | None = None,
        open_ended: Iterable[str] = (),
        tables: str | os.PathLike[str] | None = None,
        measured_as: str | None = None,
        **features: Number,
    ) -> None:
        exact = (exact,) if isinstance(exact, str) else tuple(exact)
        open_ended = (open_ended,) if isinstance(open_ended, str) else tuple(open_ended)
        _check(calls, version, exact, {} if ranges is None else ranges, open_ended, features)
        if measured_as is not None:
            _check_measured_as(measured_as, calls, ranges)
        vars(self).update(
            calls=calls,
            version=version,
            exact=frozenset(exact),
            ranges=MappingProxyType({key: tuple(each) for key, each in (ranges or {}).items()}),
            open_ended=frozenset(open_ended),
            tables=None if tables is None else Path(tables),
            measured_as=measured_as,
            features=MappingProxyType(dict(features)),
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a crossover cannot be changed: make another one")

    def __repr__(self) -> str:
        return f"Crossover({', '.join(f'{key}={each!r}' for key, each in self.features.items())})"


def is_dtype(feature: object) -> bool:
    """Whether a feature is the dtype of a tensor."""
    return isinstance(feature, TensorNumber) and feature.function == "dtype_of"


def _check(
    calls: object,
    version: object,
    exact: tuple[str, ...],
    ranges: Mapping[str, Sequence[Any]],
    open_ended: tuple[str, ...],
    features: Mapping[str, Number],
) -> None:
    if not features:
        raise RegistrationError("Crossover() names no feature: rows=when.size('input', 0), say")
    for name, feature in features.items():
        if not isinstance(feature, Number):
            raise RegistrationError(
                f"Crossover({name}={feature!r}): a feature is a number of opgraft.when, such as "
                "when.size('input', -1)"
            )
    if not any(tensor for feature in features.values() for tensor in tensors_of(feature)):
        raise RegistrationError(
            f"Crossover({', '.join(features)}): a feature must be about a tensor, for tables are "
            "by its device"
        )
    if unknown := [name for name in exact if name not in features]:
        raise RegistrationError(
            f"Crossover(exact={unknown}): the features are {', '.join(features)}"
        )
    if unknown := [name for name in open_ended if name not in features]:
        raise RegistrationError(
            f"Crossover(open_ended={unknown}): the features are {', '.join(features)}"
        )
    for name in open_ended:
        if name in exact or is_dtype(features[name]):
            raise RegistrationError(
                f"Crossover(open_ended=): {name} is exact, and has no ends: leave it out"
            )
    if not isinstance(ranges, Mapping):
        raise RegistrationError(
            f"Crossover(ranges={ranges!r}): give a dict, by feature: {', '.join(features)}"
        )
    if ranges and ranges.keys() != features.keys():
        raise RegistrationError(
            f"Crossover(ranges={dict(ranges)}): give one of each feature: {', '.join(features)}"
        )
    for name, values in ranges.items():
        if fault := _fault_of_range(values, features[name], is_exact=name in exact):
            raise RegistrationError(f"Crossover(ranges=): {name} is {values!r}: {fault}")
    if type(version) is not int:
        raise RegistrationError(f"Crossover(version={version!r}): give an integer")
    if calls is not None and not callable(calls):
        raise RegistrationError(
            f"Crossover(calls={calls!r}): give a function of a device and the features that "
            "yields the op's arguments"
        )


def _check_measured_as(name: object, calls: object, ranges: object) -> None:
    if not isinstance(name, str) or not name:
        raise RegistrationError(
            f"Crossover(measured_as={name!r}): give the name= of the override that is measured"
        )
    if calls is not None or ranges:
        raise RegistrationError(
            f"Crossover(measured_as={name!r}): it is measured as that override is: leave out "
            "calls= and ranges="
        )


def _fault_of_range(values: object, feature: Number, *, is_exact: bool) -> str:
    """What is wrong with a feature's range, and what to give instead; empty if nothing is."""
    if not isinstance(values, (tuple, list)) or not values:
        return (
            "give the smallest and the largest number, or the values of an exact feature, as a "
            "tuple"
        )
    types = {type(value) for value in values}
    if is_dtype(feature):
        if types != {torch.dtype}:
            return "give dtypes, such as (torch.float32,)"
    elif types not in ({int}, {bool}):
        return "give integers, or the booleans of a feature that is one, and no mixture"
    if is_exact or types != {int}:
        if twice := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
            return f"{twice[0]} stands twice: give each value once"
        if types == {int} and not -(2**63) <= min(values) <= max(values) < 2**63:
            return "give integers of 64 bits"
    elif len(values) != 2 or not 1 <= values[0] <= values[1] < 2**63:
        return (
            "give the smallest and the largest number, from 1 to 2**63 - 1; or name the feature "
            "in exact=, and give its values"
        )
    return ""
