"""The router in C++, and the rare parts of its work that are in Python.

The core (csrc/router.h) evaluates conditions and runs impls and native kernels. It calls Python for
the first hits of each kind of call, which are compared with native; for hits that are recorded; for
conditions that are Python callables; and after an impl raised. The methods from `_takes` on are
those callbacks. They call the functions that the Python router calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from opgraft import when
from opgraft.core import deferred
from opgraft.core.loader import shut_down_at_exit
from opgraft.errors import ContractError
from opgraft.ops.schema import Call
from opgraft.registry import Chain, Override, registry
from opgraft.registry.state import CHECKED_HITS
from opgraft.router import (
    composite,
    contract,
    dispatcher,
    failure,
    observers,
    randomness,
    shadow,
)
from opgraft.router.base import Router
from opgraft.router.call_keys import kind_of
from opgraft.router.decision import keeps_place, takes, warn_captured
from opgraft.router.hit import fall_back, hit, impl_of, run_impl
from opgraft.router.torch_function import hidden
from opgraft.when.compilation import NEVER_HOLDS, compile_condition, pack_capability
from opgraft.when.nodes import cuda_capability

if TYPE_CHECKING:
    from opgraft.core.interface import Core, PlanKey

log = logging.getLogger(__name__)

_core: Core = None  # type: ignore[assignment]  # set by `use`, before any router exists


def use(core: Core, withdraw: Callable[[bool], None]) -> None:
    """Route with this core from now on.

    Args:
        core: the core.
        withdraw: removes outdated routers and their overrides. It is called by a call that meets
            such a router; and by the main thread at any place, with False: it waits for no lock.
    """
    global _core
    if _core is None:
        core.set_withdraw(withdraw)
        core.set_capability_lookup(_capability)
        shut_down_at_exit(core)
    _core = core


def _capability(index: int) -> int:
    if torch.version.hip or not torch.cuda.is_available():
        return -1
    return pack_capability(cuda_capability(index))


class CompiledRouter(Router):
    """Controls a router of the core, which is what torch's dispatcher calls."""

    is_compiled = True

    def _install(self) -> None:
        chain = self.chain
        schema = chain.op.overload._schema
        claimed = deferred.claim_router(chain.op.name, chain.dispatch_key)
        # Packs that wait for a call have ops that a program never calls, or later: nothing is
        # compiled for an op before its first call.
        if claimed is not None and claimed.is_outdated:
            claimed.deregister()
            claimed = None
        self._was_deferred = self._awaits_first_call = claimed is not None
        if self._awaits_first_call:
            deferred.add_preparation(self._prepare_first_call)
        self._placeholder = _core.Override.placeholder(self._on_placeholder_call)
        self._router = claimed or _core.Router(
            schema.name, schema.overload_name, chain.dispatch_key
        )
        self._router.set_hooks(
            takes=self._takes,
            first_hit=self._first_hit,
            recover=self._recover,
            is_capturing=getattr(torch._C, "_cuda_isCurrentStreamCapturing", _never_capturing),
            warn_captured=warn_captured,
            contract_error=ContractError,
            observe=self._observe,
            decompose=self._decompose_values,
        )
        self.is_composite = self._router.is_composite
        if composite.calls_other_ops(chain.op, chain.dispatch_key):
            self._router.let_autocast_through()
        self.excluded = self._router.excluded
        self.has_own_kernel = self._router.has_own_kernel
        # The core's object for each override in the chain. It keeps the Python override alive.
        self._core_overrides: dict[Override, Any] = {}
        # Those that take calls which their tables decline.
        self._ignoring: set[Override] = set()
        # Its replacement while shadow mode is on.
        self._shadowed: dict[Override, Any] = {}
        chain.listener = self.publish
        self.publish(chain)

    @property
    def handle(self) -> Any:
        """The core's router."""
        return self._router

    def deregister(self) -> None:
        self._router.deregister()

    @property
    def is_outdated(self) -> bool:
        outdated: bool = self._router.is_outdated
        return outdated

    @property
    def native_origin(self) -> str:
        origin: str = self._router.native_origin
        # One for all backends may have been registered since.
        return origin or dispatcher.capture_for_all_backends(self.chain.op)[1]

    def run_native(self, keyset: torch.DispatchKeySet, call: Call) -> Any:
        return self._router.call_native(keyset, call.values)

    # What Python tells the core.

    def publish(self, chain: Chain) -> None:
        """Route to the chain's active overrides."""
        # Sets, since a chain may have hundreds of members, each of which publishes it.
        members, active = set(chain.members), set(chain.active)
        for override in self._core_overrides.keys() - members:
            del self._core_overrides[override]
            _drop_plans(override)
        ignoring = {o for o in chain.members if o.state.ignores_tables}
        for override in ignoring ^ self._ignoring:
            self._core_overrides.pop(override, None)  # its condition is another one
        self._ignoring = ignoring
        for override in members - active:
            _drop_plans(override)
        self._shadowed = {}
        if self._awaits_first_call and (chain.active or deferred.placeholder() is not None):
            self._router.publish([self._placeholder])
            return
        published = [self._core_override(override) for override in chain.active]
        if (settings := shadow.current()) is not None:
            published = [self._shadow(override, settings.rate) for override in chain.active]
        if not published and chain.members and observers.any_thread():
            # For an empty chain the core calls no observer. Observers are told of calls that find
            # every override switched off, so such a chain gets an override that declines.
            published = [_declining_override()]
        if self._was_deferred and deferred.placeholder() is not None:
            published.insert(0, self._placeholder)  # calls wait until all packs are registered
        self._router.publish(published)

    def _core_override(self, override: Override) -> Any:
        if override not in self._core_overrides:
            self._core_overrides[override] = self._compile(override)
        return self._core_overrides[override]

    def _compile(self, override: Override) -> Any:
        state = override.state
        core_override = _core.Override(override.identity, state.hits, state.misses, state.fallbacks)
        core_override.set_python_impl(
            self._router,
            override,
            impl_of(override),
            takes_keyset=override.takes_keyset,
            falls_back=override.on_error == "fallback",
            checked_hits=CHECKED_HITS,
            display_name=contract.display_name(override),
        )
        core_override.is_differentiated = override.is_differentiated
        core_override.has_functions = override.derivative is not None
        if override.plans is not None:
            self._plan(override, core_override)
        nodes = None
        if isinstance(override.condition, when.Condition):
            nodes = compile_condition(override.condition, override.operator)
        if nodes is not None:
            core_override.set_condition(nodes)
        elif override.condition is not None:
            core_override.decide_in_python()
        if state.quarantined:  # the core does not know those kinds
            core_override.decide_in_python()
        return core_override

    def _shadow(self, override: Override, rate: float) -> Any:
        self._shadowed[override] = self._core_override(override).shadowed(
            self._router,
            override,
            begin=self._begin_shadow,
            end=self._end_shadow,
            rate=rate,
        )
        return self._shadowed[override]

    def _plan(self, override: Override, core_override: Any) -> None:
        assert override.plans is not None
        unplanned = None
        if override.unplanned is not None:
            unplanned = compile_condition(override.unplanned, override.operator)
        core_override.set_plans(
            self._router,
            override,
            override.plans.table,
            self._record_hit,
            self._ask_for_kernels,
            unplanned=unplanned,
            without_random_numbers=randomness.without_random_numbers(override.operator),
            takes_keyset=override.takes_keyset,
            writes=override.operator.writes,
        )

    def _tell_of_quarantine(self, override: Override, values: tuple[Any, ...]) -> None:
        """Tell the core if calls of this kind have put the override into quarantine."""
        core_override = self._core_overrides.get(override)
        quarantined = override.state.quarantined
        if core_override is None or not quarantined:
            return
        if kind_of(Call(self.chain.op, values)) not in quarantined:
            return
        if not core_override.quarantine(self._router, values):
            core_override.decide_in_python()
            if (shadowed := self._shadowed.get(override)) is not None:
                shadowed.decide_in_python()

    def _prepare_first_call(self) -> None:
        """Do what the op's first call would have to wait for."""
        if self._awaits_first_call:
            self._on_placeholder_call()
        for override in self.chain.active:
            if override.decisions is not None:
                override.decisions.prepare(self.chain.dispatch_key)

    # What the core calls.

    def _on_placeholder_call(self) -> bool:
        """A call reached the placeholder. Returns whether to route it again."""
        if not self._awaits_first_call:
            deferred.register_now()
            if deferred.placeholder() is not None:
                return False  # a pack is still being imported: what is in the chain may take it
        # No lock: if several threads come at once, each publishes the same, one after another.
        self._awaits_first_call = False
        try:
            registry.publish(self.chain)
        except Exception as error:  # it must not become the error of whoever made the call
            where = f"{self.chain.op.name} at {self.chain.dispatch_key}"
            log.warning("opgraft: no override of %s is used: %r", where, error)
            self._router.publish([])
        return True

    def _decompose_values(self, values: tuple[Any, ...]) -> Any:
        return composite.decompose(Call(self.chain.op, values))

    def _takes(self, override: Override, values: tuple[Any, ...]) -> bool | None:
        """Whether an override takes a call; None if native is to run it, and nobody is asked."""
        call = Call(self.chain.op, values)
        # The core itself remembers which calls have run, and checks for a capture when it runs the
        # impl.
        if takes(override, call, capturing=False):
            return True
        return None if keeps_place(override, call) else False

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
        """A hit that is recorded, or that is the trial of a recorded plan; or a call that is
        native's, with which a plan is compared that another process recorded."""
        with hidden(values):
            return self._record(override, keyset, Call(self.chain.op, values), key)

    def _record(
        self, override: Override, keyset: torch.DispatchKeySet, call: Call, key: PlanKey
    ) -> Any:
        assert override.plans is not None
        if override.plans.is_unproven(key):
            override.state.misses.add()
            return override.plans.prove(
                self._router, call, key, lambda each: self.run_native(keyset, each)
            )
        if override.plans.awaits_trial(key):
            return self._try_out(override, keyset, call, key)
        recording = override.plans.begin(self._router, call)
        try:
            result = hit(self, override, keyset, call, recording)
        finally:
            self._tell_of_quarantine(override, call.values)
        override.plans.end(recording, key, result)
        return result

    def _ask_for_kernels(
        self,
        override: Override,
        keyset: torch.DispatchKeySet,
        values: tuple[Any, ...],
        key: PlanKey,
    ) -> bool:
        """Have a call's kernels compiled. Returns whether the call is to wait for them."""
        assert override.plans is not None
        return override.plans.ask_for_kernels(Call(self.chain.op, values), keyset, key)

    def _try_out(
        self, override: Override, keyset: torch.DispatchKeySet, call: Call, key: PlanKey
    ) -> Any:
        """A hit that is replayed for the first time, if its plan passes the trial."""
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
            raise error  # if native raises too, its error has this one as context
        except Exception:
            return fall_back(self, override, keyset, call, error)
        finally:
            self._tell_of_quarantine(override, values)

    def _begin_shadow(
        self, override: Override, values: tuple[Any, ...]
    ) -> shadow.Comparison | None:
        with hidden(values):
            return shadow.begin(override, Call(self.chain.op, values))

    def _end_shadow(
        self,
        override: Override,
        keyset: torch.DispatchKeySet,
        comparison: shadow.Comparison,
        result: Any,
    ) -> Any:
        try:
            with hidden(comparison.call.values):
                return shadow.end(
                    override, comparison, result, lambda call: self.run_native(keyset, call)
                )
        finally:
            self._tell_of_quarantine(override, comparison.call.values)

    def _observe(
        self, values: tuple[Any, ...], keeps_derivative: bool
    ) -> Callable[..., None] | None:
        end = observers.begin(
            self.chain, Call(self.chain.op, values), keeps_derivative=keeps_derivative
        )
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


def _declining_override() -> Any:
    """An override that declines every call."""
    core_override = _core.Override({}, _core.Counter(), _core.Counter(), _core.Counter())
    core_override.set_condition(NEVER_HOLDS)
    return core_override


def _drop_plans(override: Override) -> None:
    if override.plans is not None:
        override.plans.clear()


def _never_capturing() -> bool:
    return False
