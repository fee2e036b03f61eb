"""The state of an override since it was registered: counts, failures, checks, plans."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from opgraft.core import counter

if TYPE_CHECKING:
    from torch.multiprocessing.reductions import StorageWeakRef

    from opgraft.plan.plans import Plans

#: Hits of each kind of call that are compared with native. Two, because a first run can differ from
#: later ones (autotuning, a cached buffer that is returned twice).
CHECKED_HITS = 2
#: Kinds of calls per override that are checked. Further kinds are not.
MAX_KINDS = 128
#: Exact keys per override of calls that ran outside a capture.
MAX_WARM = 4096
#: Calls per override that checkpointing may run again.
MAX_REPEATABLE = 4096

#: The memory of a result: its storage, and its range of bytes in it.
MemoryRange = tuple["StorageWeakRef", tuple[int, int]]


class OverrideState:
    """The changing state of an override. Every method may be called on any thread.

    There is no lock: dictionaries are changed by single operations, which the GIL makes atomic. Two
    threads may do the same work twice, which is never wrong.
    """

    def __init__(self) -> None:
        #: Counters. `hits`: the impl ran. `misses`: the condition declined. `fallbacks`: a hit
        #: ended in the native kernel. `shadowed`: `opgraft.shadow` compared a hit. `mismatches`: it
        #: differed.
        self.hits = counter.new()
        self.misses = counter.new()
        self.fallbacks = counter.new()
        self.shadowed = counter.new()
        self.mismatches = counter.new()
        #: Its launch plans; None if it can have none.
        self.plans: Plans | None = None
        #: The number of its registration in the process.
        self.sequence = 0
        self.removed = False
        #: Why no call runs it any more, after it failed too often; None if calls may.
        self.given_up: str | None = None
        #: Whether its impl's errors are raised despite `on_error`, so that `verify` sees them.
        self.raises_errors = False
        #: Whether it takes calls that its crossover's tables decline, so that `verify` runs them.
        self.ignores_tables = False
        #: Whether no hit is compared with native, so that `tune` measures the impl alone.
        self.is_unchecked = False
        #: Whether a result of an impl that autograd differentiates had a derivative. The core has
        #: its own.
        self.has_made_derivative = False
        #: What routers run: the impl and its wrapper, if any; None before the first run.
        self.impl: Any = None
        #: Kinds of calls for which it failed and the native kernel runs instead, with the error's
        #: text.
        self.quarantined: dict[Hashable, str] = {}
        #: How many hits of each kind were compared with native and passed.
        self.checked: dict[Hashable, int] = {}
        self._results: dict[Hashable, list[MemoryRange]] = {}
        self._ran: dict[Hashable, None] = {}
        self._repeatable: dict[Hashable, None] = {}
        #: Whether a warning said that a CUDA graph has the native kernel in its place.
        self.warned_of_capture = False

    # Failures.

    def quarantine(self, kind: Hashable, reason: str) -> int:
        """Quarantine it for a kind of call. Returns the number of quarantined kinds."""
        self.quarantined[kind] = reason
        return len(self.quarantined)

    @property
    def never_worked(self) -> bool:
        """Whether none of its hits has passed a check so far."""
        return not self.checked

    # Calls that checkpointing may run again.

    def note_repeatable(self, call: Hashable) -> None:
        """Note that its impl ran for a call, and hooks got what autograd saved of it."""
        _add(self._repeatable, call, MAX_REPEATABLE)

    def forget_repeatable(self, call: Hashable) -> None:
        """Note that its impl failed for such a call."""
        self._repeatable.pop(call, None)

    def is_repeatable(self, call: Hashable) -> bool:
        """Whether its impl ran for such a call, and has not failed for one since."""
        return call in self._repeatable

    # The contract's checks.

    def is_check_due(self, kind: Hashable) -> bool:
        """Whether a hit is one of the first of its kind."""
        done = self.checked.get(kind)
        if done is None:
            return len(self.checked) < MAX_KINDS
        return done < CHECKED_HITS

    def note_checked(self, kind: Hashable) -> None:
        """Note that a hit of this kind passed its check."""
        self.checked[kind] = self.checked.get(kind, 0) + 1

    def results_of(self, kind: Hashable) -> Sequence[MemoryRange]:
        """The memory of the results of the last hit of this kind that was checked."""
        return self._results.get(kind, ())

    def keep_results(self, kind: Hashable, ranges: list[MemoryRange]) -> None:
        """Remember the memory of results, weakly, until the next hit of this kind was checked.

        The memory itself is freed with the result. The weak reference keeps the storage's identity
        from being used again.
        """
        if self.checked.get(kind, 0) + 1 >= CHECKED_HITS:
            self._results.pop(kind, None)
        elif len(self._results) < MAX_KINDS:
            self._results[kind] = ranges

    # Captures of CUDA graphs, in which nothing can be compiled.

    def note_run(self, exact_call: Hashable) -> None:
        """Note that a call ran outside a capture, so that its kernels are compiled."""
        _add(self._ran, exact_call, MAX_WARM)

    def has_run(self, exact_call: Hashable) -> bool:
        """Whether a call with this exact key ran outside a capture."""
        return exact_call in self._ran


def _add(keys: dict[Hashable, None], key: Hashable, limit: int) -> None:
    """Add a key, and forget the oldest one past `limit`."""
    if key in keys:
        return
    if len(keys) >= limit:
        # `pop` has a default because another thread may evict it first.
        keys.pop(next(iter(keys), key), None)
    keys[key] = None
