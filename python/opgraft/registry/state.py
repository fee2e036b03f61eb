"""What became of an override since it was registered: counts, failures, checks, plans."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from opgraft.core import counter

if TYPE_CHECKING:
    from torch.multiprocessing.reductions import StorageWeakRef

    from opgraft.plan.plans import Plans

#: Hits of each signature that are compared with native. Two, because a first run can differ from
#: the next ones (autotuning, a cached buffer that is returned twice).
CHECKED_HITS = 2
#: Signatures per override that are checked; past that an op is called in too many ways to go on.
MAX_SIGNATURES = 128
#: Exact calls per override that are remembered as run outside a capture.
MAX_WARM = 4096

#: Memory that a result had: its storage, and the first and the last byte of it.
Place = tuple["StorageWeakRef", tuple[int, int]]


class OverrideState:
    """What becomes of one override. Every method may be called on any thread.

    Dictionaries are changed by single operations, which the GIL makes atomic, so there is no lock:
    two threads that do the same at once do it twice, which is once too often and never wrong.
    """

    def __init__(self) -> None:
        #: How often the impl ran; the condition declined; a hit ended in the native kernel; a hit
        #: was compared with native by `opgraft.shadow`; such a hit differed.
        self.hits = counter.new()
        self.misses = counter.new()
        self.fallbacks = counter.new()
        self.shadowed = counter.new()
        self.mismatches = counter.new()
        #: Its launch plans: their keys, hits and bytes; None where it can have none.
        self.plans: Plans | None = None
        #: Which registration it was, counted in the process.
        self.sequence = 0
        self.removed = False
        #: Why it is kept from every call: it failed too often. None while it is not.
        self.given_up: str | None = None
        #: Whether errors of its impl are raised whatever was declared, so that `verify` sees them.
        self.raises_errors = False
        #: What routers run: the impl, with whatever is put around it; None until one has asked.
        self.impl: Any = None
        #: Signatures for which it failed and the native kernel runs instead, with the error.
        self.quarantined: dict[Hashable, str] = {}
        #: How often the hits of each signature were compared with native's, and stood it.
        self.checked: dict[Hashable, int] = {}
        self._results: dict[Hashable, list[Place]] = {}
        self._ran: dict[Hashable, None] = {}

    # Failures.

    def quarantine(self, signature: Hashable, reason: str) -> int:
        """Keep it from calls of a signature; how many signatures that makes."""
        self.quarantined[signature] = reason
        return len(self.quarantined)

    @property
    def never_worked(self) -> bool:
        """Whether none of its hits stood a check so far."""
        return not self.checked

    # The contract's checks.

    def is_check_due(self, signature: Hashable) -> bool:
        """Whether a hit is one of the first of its signature."""
        done = self.checked.get(signature)
        if done is None:
            return len(self.checked) < MAX_SIGNATURES
        return done < CHECKED_HITS

    def note_checked(self, signature: Hashable) -> None:
        """A hit of this signature stood its check."""
        self.checked[signature] = self.checked.get(signature, 0) + 1

    def results_of(self, signature: Hashable) -> Sequence[Place]:
        """Where the results of the last hit that was checked lay."""
        return self._results.get(signature, ())

    def keep_results(self, signature: Hashable, places: list[Place]) -> None:
        """Remember where results lie, weakly, while another hit is to be compared with this one.

        The memory itself goes with the result; the name of its storage is not given to another one
        meanwhile.
        """
        if self.checked.get(signature, 0) + 1 >= CHECKED_HITS:
            self._results.pop(signature, None)
        elif len(self._results) < MAX_SIGNATURES:
            self._results[signature] = places

    # Captures of CUDA graphs, in which nothing can be compiled.

    def note_ran(self, exact_call: Hashable) -> None:
        """A call ran outside a capture, so that what it needs is compiled."""
        if exact_call in self._ran:
            return
        if len(self._ran) >= MAX_WARM:
            # Oldest first; `pop` with a default, because another thread may be evicting as well.
            self._ran.pop(next(iter(self._ran), exact_call), None)
        self._ran[exact_call] = None

    def has_run(self, exact_call: Hashable) -> bool:
        """Whether this very call, in every detail, ran outside a capture."""
        return exact_call in self._ran
