"""The router in C++, and what of its work stays in Python because it is rare.

The core (csrc/router.h) decides and runs warm calls: conditions, the native kernel, impls. It asks
Python for the first hits of each kind of call, which are compared with native, for hits that are
recorded, for conditions that are Python callables, and for what happens after an impl raised: the
methods from `_takes` on. Each of them does what the Python router does, by the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from opgraft import when
from opgraft.core import places
from opgraft.core.loader import shut_down_at_exit
from opgraft.errors import ContractError
from opgraft.ops.schema import Call
from opgraft.registry import Chain, Override
from opgraft.registry.state import CHECKED_HITS
from opgraft.router import composite, contract, failure, observers, shadow
from opgraft.router.base import Router
from opgraft.router.decision import takes
from opgraft.router.hit import fall_back, hit, impl_of, run_impl
from opgraft.router.signature import signature
from opgraft.when.compilation import Node, compile_condition, pack_capability
from opgraft.when.nodes import cuda_capability

if TYPE_CHECKING:
    from opgraft.core.interface import Core, PlanKey

_core: Core = None  # type: ignore[assignment]  # set by `use`, before any router is made

# A condition that no call meets: any of nothing.
_NEVER: list[Node] = [Node("any")]


def use(core: Core) -> None:
    """Route with this core from now on."""
    global _core
    if _core is None:
        core.set_capability_lookup(_capability)
        shut_down_at_exit(core)
    _core = core


def _capability(index: int) -> int:
    if torch.version.hip or not torch.cuda.is_available():
        return -1
    return pack_capability(cuda_capability(index))


class CompiledRouter(Router):
    """What torch's dispatcher calls is the core's router; this tells it what to route to."""

    is_compiled = True

    def _install(self) -> None:
        chain = self.chain
        schema = chain.op.overload._schema
        place = places.take(chain.op.name, chain.dispatch_key)
        self._kept_a_place = place is not None
        self._router = place or _core.Router(schema.name, schema.overload_name, chain.dispatch_key)
        self._router.set_hooks(
            takes=self._takes,
            first=self._first_hit,
            recover=self._recover,
            capturing=getattr(torch._C, "_cuda_isCurrentStreamCapturing", _never),
            error=ContractError,
            observe=self._observe,
            decompose=self._decompose_values,
        )
        self.is_composite = self._router.is_composite
        self.excluded = self._router.excluded
        # The core excludes autocast only below a kernel of the op's own.
        self.has_own_kernel = self.excluded.has(torch._C.DispatchKey.AutocastCPU)
        # By override, while it is in the chain. Each keeps the Python override alive.
        self._core_overrides: dict[Override, Any] = {}
        # And what stands in for it, published while shadow mode is on.
        self._shadowed: dict[Override, Any] = {}
        chain.listener = self.publish
        self.publish(chain)

    @property
    def native_origin(self) -> str:
        origin: str = self._router.native_origin
        return origin

    def run_native(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        return self._router.call_native(keyset, call.values)

    # What the core is told.

    def publish(self, chain: Chain) -> None:
        """Route to what is active in the chain now."""
        for override in [o for o in self._core_overrides if o not in chain.members]:
            del self._core_overrides[override]
            _drop_plans(override)
        for override in chain.members:
            if override not in chain.active:
                _drop_plans(override)
        self._shadowed = {}
        published = [self._core_override(override) for override in chain.active]
        if (settings := shadow.current()) is not None:
            published = [self._shadow(override, settings.rate) for override in chain.active]
        if not published and chain.members and observers.anywhere():
            # The core looks no further than an empty chain, and observers want to know of calls
            # that find every override switched off.
            published = [_decliner()]
        if self._kept_a_place and (placeholder := places.placeholder()) is not None:
            published.insert(0, placeholder)  # calls wait until packs are registered as a whole
        self._router.publish(published)

    def _core_override(self, override: Override) -> Any:
        if override not in self._core_overrides:
            self._core_overrides[override] = self._compile(override)
        return self._core_overrides[override]

    def _compile(self, override: Override) -> Any:
        state = override.state
        made = _core.Override(override.identity, state.hits, state.misses, state.fallbacks)
        made.set_python_impl(
            self._router,
            override,
            impl_of(override),
            takes_keyset=override.takes_keyset,
            falls_back=override.on_error == "fallback",
            checked_hits=CHECKED_HITS,
            who=contract.who(override),
        )
        if override.plans is not None:
            self._plan(override, made)
        nodes = None
        if isinstance(override.condition, when.Condition):
            nodes = compile_condition(override.condition, override.operator)
        if nodes is not None:
            made.set_condition(nodes)
        elif override.condition is not None:
            made.ask_python()
        if state.quarantined:  # by signatures that the core does not know
            made.ask_python()
        return made

    def _shadow(self, override: Override, rate: float) -> Any:
        self._shadowed[override] = self._core_override(override).shadowed(
            self._router,
            override,
            begin=self._begin_shadow,
            end=self._end_shadow,
            rate=rate,
        )
        return self._shadowed[override]

    def _plan(self, override: Override, made: Any) -> None:
        assert override.plans is not None
        unplanned = None
        if override.unplanned is not None:
            unplanned = compile_condition(override.unplanned, override.operator)
        made.set_plans(
            self._router,
            override,
            override.plans.table,
            self._record_hit,
            self._ask_for_kernels,
            unplanned=unplanned,
            takes_keyset=override.takes_keyset,
            writes=override.operator.writes,
        )

    def _tell_of_quarantine(self, override: Override, values: tuple[Any, ...]) -> None:
        """Tell the core where a call of these values has put the override into quarantine."""
        told = self._core_overrides.get(override)
        quarantined = override.state.quarantined
        if told is None or not quarantined:
            return
        if signature(Call(self.chain.op, values)) not in quarantined:
            return
        if not told.quarantine(self._router, values):
            told.ask_python()
            if (shadowed := self._shadowed.get(override)) is not None:
                shadowed.ask_python()

    # What the core asks.

    def _decompose_values(self, values: tuple[Any, ...]) -> Any:
        return composite.decompose(Call(self.chain.op, values))

    def _takes(self, override: Override, values: tuple[Any, ...]) -> bool:
        # The core remembers itself what has run, and looks at a capture when it runs the impl.
        return takes(override, Call(self.chain.op, values), capturing=False)

    def _first_hit(
        self, override: Override, keyset: torch.DispatchKeySet, values: tuple[Any, ...]
    ) -> Any:
        try:
            return hit(self, override, keyset, Call(self.chain.op, values))
        finally:
            self._tell_of_quarantine(override, values)

    def _record_hit(
        self,
        override: Override,
        keyset: torch.DispatchKeySet,
        values: tuple[Any, ...],
        key: PlanKey,
    ) -> Any:
        """A hit that is recorded, or that a plan of it is tried out for."""
        assert override.plans is not None
        call = Call(self.chain.op, values)
        if override.plans.awaits_trial(key):
            return self._try_out(override, keyset, call, key)
        recording = override.plans.begin(self._router, call)
        try:
            result = hit(self, override, keyset, call, recording)
        finally:
            self._tell_of_quarantine(override, values)
        override.plans.end(recording, key, result)
        return result

    def _ask_for_kernels(
        self,
        override: Override,
        keyset: torch.DispatchKeySet,
        values: tuple[Any, ...],
        key: PlanKey,
    ) -> bool:
        """Have the kernels of a call compiled; whether the call is to wait for them."""
        assert override.plans is not None
        return override.plans.ask_for_kernels(Call(self.chain.op, values), keyset, key)

    def _try_out(
        self, override: Override, keyset: torch.DispatchKeySet, call: Call, key: PlanKey
    ) -> Any:
        """A hit that is replayed for the first time if its plan stands the trial."""
        assert override.plans is not None

        def impl(other: Call) -> Any:
            return run_impl(self, override, keyset, other)

        plan = override.plans.try_out(self._router, call, key, impl)
        if plan is None:
            return self._first_hit(override, keyset, call.values)
        result = self._router.replay(plan, call.values, poison=None)
        override.state.hits.add()
        return result

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
            return fall_back(self, override, keyset, call, error)
        finally:
            self._tell_of_quarantine(override, values)

    def _begin_shadow(self, override: Override, values: tuple[Any, ...]) -> shadow.Token | None:
        return shadow.begin(override, Call(self.chain.op, values))

    def _end_shadow(
        self, override: Override, keyset: torch.DispatchKeySet, token: shadow.Token, result: Any
    ) -> Any:
        try:
            return shadow.end(override, token, result, lambda call: self.run_native(keyset, call))
        finally:
            self._tell_of_quarantine(override, token.call.values)

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


def _decliner() -> Any:
    """An override that takes no call."""
    made = _core.Override({}, _core.Counter(), _core.Counter(), _core.Counter())
    made.set_condition(_NEVER)
    return made


def _drop_plans(override: Override) -> None:
    if override.plans is not None:
        override.plans.clear()


def _never() -> bool:
    return False
