"""What the two routers have in common: what a hit and `explain` need to know of either."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from opgraft.ops.schema import Call
from opgraft.registry import Chain

if TYPE_CHECKING:
    from opgraft.router.composite import AutogradCompanion


class Router(ABC):
    """Our kernel at one op and dispatch key: installed once, there for good.

    Making one installs it. What it routes to changes by `chain.active` alone.
    """

    #: Whether the core does for a hit in Python what it does for its own: shadow mode, the
    #: bookkeeping of composites, the profiler's entry.
    is_compiled: ClassVar[bool]

    #: Whether the op is composed of others here; then what is differentiated never comes by.
    is_composite: bool
    #: Whether the op had a kernel of its own here, not only one for all backends.
    has_own_kernel: bool
    #: The dispatch keys that an impl's own calls do not pass.
    excluded: torch.DispatchKeySet
    #: What stands at the autograd key of a composite op, where it is in Python.
    companion: AutogradCompanion | None = None

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._install()

    @abstractmethod
    def _install(self) -> None:
        """Put it in at the dispatcher, and set what is declared above."""

    @property
    @abstractmethod
    def native_origin(self) -> str:
        """Where the native kernel was registered; empty where there is none."""

    @abstractmethod
    def run_native(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        """Run what a call with these keys runs without us."""
