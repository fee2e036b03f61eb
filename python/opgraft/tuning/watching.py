"""Notes which calls a program makes of the ops whose overrides can be tuned."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from opgraft.registry import Override
from opgraft.tuning import stand_ins
from opgraft.when.nodes import Undefined


class Seen:
    """By override: the features of the calls that its condition takes, and how many there were."""

    def __init__(self) -> None:
        self._counts: dict[Override, Counter[tuple[Any, ...]]] = {}
        self._lock = threading.Lock()

    def add(self, override: Override, values: tuple[Any, ...]) -> None:
        with self._lock:
            self._counts.setdefault(override, Counter())[values] += 1

    def of(self, override: Override) -> list[tuple[Any, ...]]:
        """The features of the calls that an override's part of the tables decides, the most
        frequent first: of its own, and of those of overrides that are measured as it is."""
        counts = (each for other, each in self._counts.items() if _is_decided_by(other, override))
        return [values for values, _ in sum(counts, Counter()).most_common()]


def _is_decided_by(other: Override, override: Override) -> bool:
    """Whether the calls of one override are decided by another's part of the tables, or its own."""
    if other is override:
        return True
    assert other.crossover is not None and override.crossover is not None
    return (
        (other.pack, other.dispatch_key) == (override.pack, override.dispatch_key)
        and other.table_name == override.name != other.name
        and list(other.crossover.features) == list(override.crossover.features)
    )


@contextmanager
def watching(overrides: Sequence[Override]) -> Iterator[Seen]:
    """A scope in which the calls of all threads are noted.

    An override that declines every call is put before each of these: its condition notes the call.
    """
    seen = Seen()
    with ExitStack() as scopes:
        for override in overrides:
            watcher = stand_ins.register(
                override,
                _never,
                "watched",
                cond=_noting(override, seen),
                priority=stand_ins.FIRST,
                compile="opaque",
            )
            scopes.callback(watcher.remove)
        yield seen


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a watcher takes no call")


def _noting(override: Override, seen: Seen) -> Callable[..., bool]:
    def condition(*args: Any, **kwargs: Any) -> bool:
        assert override.crossover is not None
        call = override.operator.bind(args, kwargs)
        if override.cond_holds(call):
            features = override.crossover.features.values()
            values = tuple(each.evaluate(call.named) for each in features)
            # A size that is symbolic is no call's yet.
            if not any(isinstance(each, (Undefined, torch.SymInt)) for each in values):
                seen.add(override, values)
        return False

    return condition
