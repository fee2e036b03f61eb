"""The router in C++, and what of its work stays in Python because it is rare.

The core (csrc/router.h) decides and runs warm calls: conditions, the native kernel, impls. Python
does the first hits of each kind of call, which are compared with native, conditions that are Python
callables, and what happens after an impl raised. Each of these is the Python router's own code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from opgraft import _deferred, when
from opgraft._core import shut_down_at_exit
from opgraft.errors import ContractError
from opgraft.program import Node, compile_condition, pack_capability
from opgraft.registry import Chain, Override
from opgraft.router import contract, failure, observers, shadow
from opgraft.router.python import PythonRouter, why_not
from opgraft.router.signature import signature
from opgraft.schema import Call

_core: Any = None

# A condition that no call meets: any of nothing.
_NEVER: list[Node] = [("any", (0, 0, False), 0, 0.0, None, [], [])]


def use(core: Any) -> None:
    """Route with this core from now on."""
    global _core
    if _core is None:
        core.set_capability_lookup(_capability)
        shut_down_at_exit(core)
    _core = core


def _capability(index: int) -> int:
    if torch.version.hip or not torch.cuda.is_available():
        return -1
    return pack_capability(when.cuda_capability(index))


class CompiledNative:
    """The native kernel as the core captured it: by value, so that nobody can take it away."""

    def __init__(self, core_router: Any) -> None:
        self._router = core_router
        self.origin: str = core_router.native_origin

    def __call__(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        return self._router.call_native(keyset, call.values)


class CompiledRouter(PythonRouter):
    """Our kernel at one op and dispatch key, in C++."""

    def _install(self, chain: Chain) -> None:
        schema = chain.op.overload._schema
        place = _deferred.take(chain.op.name, chain.dispatch_key)
        self._kept_a_place = place is not None
        self._router = place or _core.Router(schema.name, schema.overload_name, chain.dispatch_key)
        self._router.set_hooks(
            takes=self._takes_values,
            first=self._first_hit,
            recover=self._recover,
            capturing=getattr(torch._C, "_cuda_isCurrentStreamCapturing", _never),
            error=ContractError,
            observe=self._observe,
        )
        self.native = CompiledNative(self._router)
        self.is_composite = self._router.is_composite
        self._excluded = self._router.excluded
        # The core excludes autocast only below a kernel of the op's own.
        self.has_own_kernel = self._excluded.has(torch._C.DispatchKey.AutocastCPU)
        self._recorded = _Recorded()
        # By override, while it is in the chain: the core's half keeps the Python half alive.
        self._halves: dict[Override, Any] = {}
        # And what stands in for it, published while shadow mode is on.
        self._shadowed: dict[Override, Any] = {}
        chain.listener = self.publish
        self.publish(chain)

    def publish(self, chain: Chain) -> None:
        """Route to what is active in the chain now."""
        for override in [o for o in self._halves if o not in chain.members]:
            del self._halves[override]
            _drop_plans(override)
        for override in chain.members:
            if override not in chain.active:
                _drop_plans(override)
        settings = shadow.current()
        self._shadowed = {}
        halves = [self._half(override) for override in chain.active]
        if settings is not None:
            halves = [self._shadow(override, settings.rate) for override in chain.active]
        if not halves and chain.members and observers.anywhere():
            # The core looks no further than an empty chain, and observers want to know of calls
            # that find every override switched off.
            halves = [_decliner()]
        if self._kept_a_place and (placeholder := _deferred.placeholder()) is not None:
            halves.insert(0, placeholder)  # calls wait until packs are registered as a whole
        self._router.publish(halves)

    def _half(self, override: Override) -> Any:
        if override not in self._halves:
            self._halves[override] = self._compile(override)
        return self._halves[override]

    def _compile(self, override: Override) -> Any:
        half = _core.Override(
            override.identity,
            override._hits,
            override._misses,
            override._fallbacks,
        )
        half.set_python_impl(
            self._router,
            override,
            self._impl(override),
            takes_keyset=override.takes_keyset,
            falls_back=override.on_error == "fallback",
            checked_hits=contract.CHECKED_HITS,
            who=contract.who(override),
        )
        if override.plans is not None:
            self._plan(override, half)
        nodes = None
        if isinstance(override.condition, when.Condition):
            nodes = compile_condition(override.condition, override.operator)
        if nodes is not None:
            half.set_condition(nodes)
        elif override.condition is not None:
            half.ask_python()
        if override.quarantined:  # by signatures that the core does not know
            half.ask_python()
        return half

    def _shadow(self, override: Override, rate: float) -> Any:
        self._shadowed[override] = self._half(override).shadowed(
            self._router,
            override,
            begin=self._begin_shadow_of,
            end=self._end_shadow_of,
            rate=rate,
        )
        return self._shadowed[override]

    def _plan(self, override: Override, half: Any) -> None:
        unplanned = None
        if override.unplanned is not None:
            unplanned = compile_condition(override.unplanned, override.operator)
        half.set_plans(
            self._router,
            override,
            override.plans.table,
            self._record_hit,
            unplanned=unplanned,
            takes_keyset=override.takes_keyset,
            writes=override.operator.writes,
        )

    # What the core asks.

    def _begin_shadow_of(self, override: Override, values: tuple[Any, ...]) -> shadow.Token | None:
        return shadow.begin(override, Call(self.chain.op, values))

    def _end_shadow_of(
        self, override: Override, keyset: torch.DispatchKeySet, token: shadow.Token, result: Any
    ) -> Any:
        try:
            return self._end_shadow(override, keyset, token, result)
        finally:
            self._mind_quarantine(override, token.call.values)

    def _begin_shadow(self, override: Override, call: Call) -> shadow.Token | None:
        return None  # the core does it, for first hits too

    def _takes_values(self, override: Override, values: tuple[Any, ...]) -> bool:
        return self._takes(override, Call(self.chain.op, values))

    def _why_not(self, override: Override, call: Call) -> Any:
        # The core remembers itself what has run, and looks at a capture when it runs the impl.
        return why_not(override, call, capturing=False)

    def _bookkeeping(self, call: Call) -> None:
        return None  # the core does it, for first hits too

    def _profiled(self, override: Override) -> AbstractContextManager[object]:
        return nullcontext()  # the core does it, for first hits too

    def _first_hit(
        self, override: Override, keyset: torch.DispatchKeySet, values: tuple[Any, ...]
    ) -> Any:
        try:
            return self._hit(override, keyset, Call(self.chain.op, values))
        finally:
            self._mind_quarantine(override, values)

    def _record_hit(
        self,
        override: Override,
        keyset: torch.DispatchKeySet,
        values: tuple[Any, ...],
        key: Any,
    ) -> Any:
        """A hit that is recorded, or that a plan of it is tried out for."""
        call = Call(self.chain.op, values)
        if override.plans.awaits_trial(key):
            return self._try_out(override, keyset, call, key)
        recording = override.plans.begin(self._router, call)
        outer, self._recorded.recording = self._recorded.recording, recording
        try:
            result = self._hit(override, keyset, call)
        finally:
            self._recorded.recording = outer
            self._mind_quarantine(override, values)
        override.plans.end(recording, key, result)
        return result

    def _try_out(
        self, override: Override, keyset: torch.DispatchKeySet, call: Call, key: Any
    ) -> Any:
        """A hit that is replayed for the first time if its plan stands the trial."""
        leading = (keyset,) if override.takes_keyset else ()

        def impl(other: Call) -> Any:
            return super(CompiledRouter, self)._invoke(override, leading, other)

        plan = override.plans.try_out(self._router, call, key, impl)
        if plan is None:
            return self._first_hit(override, keyset, call.values)
        result = self._router.replay(plan, call.values, poison=None)
        override._hits.add()
        return result

    def _invoke(self, override: Override, leading: tuple[Any, ...], call: Call) -> Any:
        recording = self._recorded.recording
        if recording is None or recording.call is not call:
            return super()._invoke(override, leading, call)
        with recording.watching():
            return super()._invoke(override, leading, call)

    def _is_check_due(self, override: Override, key: Hashable) -> bool:
        # What is recorded is replayed unchecked.
        return self._recorded.recording is not None or super()._is_check_due(override, key)

    def _recover(
        self,
        override: Override,
        keyset: torch.DispatchKeySet,
        values: tuple[Any, ...],
        error: Exception,
    ) -> Any:
        call = Call(self.chain.op, values)
        if not isinstance(error, Exception) or not failure.may_fall_back(
            override, error, call, capturing=False
        ):
            raise error
        try:
            raise error  # so that native's own error, if it raises as well, has this as its context
        except Exception:
            return self._fall_back(override, keyset, call, error)
        finally:
            self._mind_quarantine(override, values)

    def _observe(self, values: tuple[Any, ...], kept: bool) -> Callable[..., None] | None:
        end = observers.begin(self.chain, Call(self.chain.op, values), kept=kept)
        if end is None:
            return None

        def report(
            ran: tuple[str | None, str] | None, fell_back: bool, raised: bool, seconds: float
        ) -> None:
            members = self.chain.members if ran is not None else ()
            override = next((o for o in members if (o.pack, o.name) == ran), None)
            outcome = observers.Outcome(
                override, fell_back=fell_back, raised=raised, seconds=seconds
            )
            end(outcome)

        return report

    def _mind_quarantine(self, override: Override, values: tuple[Any, ...]) -> None:
        """Tell the core where a call of these values has put the override into quarantine."""
        half = self._halves.get(override)
        if half is None or not override.quarantined:
            return
        if signature(Call(self.chain.op, values)) not in override.quarantined:
            return
        if not half.quarantine(self._router, values):
            half.ask_python()
            if (shadowed := self._shadowed.get(override)) is not None:
                shadowed.ask_python()


def _decliner() -> Any:
    """An override that takes no call."""
    half = _core.Override({}, _core.Counter(), _core.Counter(), _core.Counter())
    half.set_condition(_NEVER)
    return half


class _Recorded(threading.local):
    """What this thread records."""

    recording: Any = None


def _drop_plans(override: Override) -> None:
    if override.plans is not None:
        override.plans.clear()


def _never() -> bool:
    return False
