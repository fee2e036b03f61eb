"""Runs one override with all others disabled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opgraft.base import env
from opgraft.ops.schema import Call
from opgraft.registry import Override
from opgraft.registry.state import CHECKED_HITS
from opgraft.router import threads
from opgraft.router.call_keys import kind_of
from opgraft.verification.observation import Failed


@contextmanager
def only(override: Override) -> Iterator[None]:
    """A scope in which only this override is enabled, on this thread, and its errors are raised.

    Raises:
        Failed: another override has the same op, key, name and owner, so it cannot be disabled.
    """
    from opgraft.registry import Selector, registry

    others = [each for each in registry.overrides(Selector()) if each is not override]
    off = [Selector(**each.identity) for each in others]
    with (
        _scopes(off, override),
        raising_errors(override, True),
        _whatever_tables_say(override),
        _run_without_plans(override),
    ):
        yield


@contextmanager
def raising_errors(override: Override, raises: bool) -> Iterator[None]:
    """A scope in which errors of the impl are raised, or handled as `on_error` says."""
    before, override.state.raises_errors = override.state.raises_errors, raises
    try:
        yield
    finally:
        override.state.raises_errors = before


@contextmanager
def past_the_contract(override: Override, calls: Sequence[Call]) -> Iterator[None]:
    """A scope in which hits like these calls are not compared with native.

    On the first hits of a kind native runs too, and its error is the call's. The later hits are
    the impl's alone.
    """
    before = dict(override.state.checked)
    override.state.checked.update(dict.fromkeys(map(kind_of, calls), CHECKED_HITS))
    try:
        yield
    finally:
        override.state.checked.clear()
        override.state.checked.update(before)


@contextmanager
def only_on_this_thread(override: Override) -> Iterator[None]:
    """Like :func:`only`, for a thread that a check starts; errors are being raised already."""
    from opgraft.registry import Selector, registry

    others = [each for each in registry.overrides(Selector()) if each is not override]
    with _scopes([Selector(**each.identity) for each in others], override):
        yield


@contextmanager
def _run_without_plans(override: Override) -> Iterator[None]:
    """A scope in which calls without a launch plan run in Python, whatever `unplanned` says."""
    if override.plans is None:
        yield
        return
    readiness = override.plans.readiness
    before, readiness.runs_all = readiness.runs_all, True
    readiness.apply()
    try:
        yield
    finally:
        readiness.runs_all = before
        readiness.apply()


@contextmanager
def _whatever_tables_say(override: Override) -> Iterator[None]:
    """A scope in which it takes every call that `cond` takes, faster or not."""
    from opgraft.registry import registry

    if override.crossover is None:
        yield
        return
    override.state.ignores_tables = True
    registry.republish()
    try:
        yield
    finally:
        override.state.ignores_tables = False
        registry.republish()


@contextmanager
def _scopes(selectors: list[Any], override: Override) -> Iterator[None]:
    if not selectors:
        yield
        return
    first, *rest = selectors
    if first.matches(override):
        raise Failed(
            f"another override of {override.op} at {override.dispatch_key} is named "
            f"{override.name!r} too, so that this one cannot be run alone: rename one of them"
        )
    with threads.scope(first), _scopes(rest, override):
        yield


def is_interpreted(override: Override) -> bool:
    """Whether the override's kernels run in Triton's interpreter here."""
    return env.interprets_triton() and override.dsl == "triton"
