"""The interface of the two routers: what hits and `explain` use of either."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from opgraft.ops.schema import Call
from opgraft.registry import Chain

if TYPE_CHECKING:
    from opgraft.router.composite import CompositeAutogradKernel


class Router(ABC):
    """Our kernel at one op and dispatch key. It is removed only if the op is destroyed.

    Creating one installs it. Only `chain.active` changes what it routes to.
    """

    #: Whether the core wraps hits that run in Python as it wraps its own: shadow mode, autograd's
    #: bookkeeping for composite ops, the profiler's entry.
    is_compiled: ClassVar[bool]

    #: Whether the op is composite here. If so, calls that autograd differentiates never reach the
    #: router.
    is_composite: bool
    #: Whether the op had a kernel of its own at this key, not only one for all backends.
    has_own_kernel: bool
    #: The dispatch keys that are excluded while an impl runs.
    excluded: torch.DispatchKeySet
    #: Our kernel at the autograd key of a composite op, if it is in Python.
    composite_kernel: CompositeAutogradKernel | None = None

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._install()
        chain.is_routed = True

    @abstractmethod
    def _install(self) -> None:
        """Register at the dispatcher, and set the attributes above."""

    @abstractmethod
    def deregister(self) -> None:
        """Take it off the dispatcher, and what was registered with it. Idempotent."""

    @property
    @abstractmethod
    def is_outdated(self) -> bool:
        """Whether its op was destroyed since, as by a notebook's cell that runs a second time.

        Its overrides were registered for that op, whose kernels are its native ones.
        """

    @property
    @abstractmethod
    def native_origin(self) -> str:
        """Where the native kernel was registered; empty if there is none."""

    @abstractmethod
    def run_native(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        """Run what a call with these keys runs without opgraft."""
