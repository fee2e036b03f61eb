"""An override: its declaration, its state, and its condition for a call."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from opgraft.base import env
from opgraft.ops.schema import Call, Op
from opgraft.registry.declaration import (
    Autograd,
    CompilePolicy,
    Declaration,
    OnError,
    WhenNotReady,
)
from opgraft.registry.state import OverrideState
from opgraft.when import Condition, Failure

if TYPE_CHECKING:
    from opgraft.crossover import Crossover
    from opgraft.crossover.decisions import Decisions
    from opgraft.plan.plans import Plans
    from opgraft.registry.chains import Registry
    from opgraft.registry.definition import Definition


def _declared(field: str) -> Any:
    return property(attrgetter(f"declaration.{field}"), doc=f"`{field}`, as it was declared.")


class Override:
    """An implementation for one op at one dispatch key, as `register_op_override` returns it."""

    name: str = _declared("name")
    #: The op's name as torch prints it, such as `"aten::mul.Tensor"`.
    op: str = _declared("op")
    operator: Op = _declared("operator")
    dispatch_key: str = _declared("dispatch_key")
    impl: Callable[..., Any] = _declared("impl")
    cond: Condition | Callable[..., Any] | None = _declared("cond")
    takes_keyset: bool = _declared("takes_keyset")
    dsl: str | None = _declared("dsl")
    pack: str | None = _declared("pack")
    priority: int = _declared("priority")
    on_error: OnError = _declared("on_error")
    compile: CompilePolicy | Condition = _declared("compile")
    autograd: Autograd | None = _declared("autograd")
    launch_plan: bool = _declared("launch_plan")
    samples: Callable[..., Any] | None = _declared("samples")
    crossover: Crossover | None = _declared("crossover")
    when_not_ready: WhenNotReady = _declared("when_not_ready")
    unavailable: str | None = _declared("unavailable")
    #: What selectors compare.
    identity: dict[str, str | None] = _declared("identity")

    def __init__(
        self, declaration: Declaration, registry: Registry, definition: Definition | None = None
    ) -> None:
        self.declaration = declaration
        #: What registered it, if it was given no name.
        self.definition = definition
        self.state = OverrideState()
        self._registry = registry
        self._decisions: Decisions | None = None

    def __repr__(self) -> str:
        owner = f"pack {self.pack}" if self.pack else "user"
        label = f"{self.op} at {self.dispatch_key}, {self.dsl or 'no DSL'}, {owner}"
        return f"<Override {self.name!r} of {label}>"

    def __copy__(self) -> Override:
        return self

    def __deepcopy__(self, memo: object) -> Override:
        """Itself: an override exists once, even if a module that holds it is copied."""
        return self

    @property
    def hits(self) -> int:
        """How often `impl` ran."""
        return self.state.hits.total()

    @property
    def misses(self) -> int:
        """How often the condition declined a call."""
        return self.state.misses.total()

    @property
    def fallbacks(self) -> int:
        """How many hits ended in the native kernel."""
        return self.state.fallbacks.total()

    @property
    def shadowed(self) -> int:
        """How many hits were compared with the native kernel, by `opgraft.shadow`."""
        return self.state.shadowed.total()

    @property
    def mismatches(self) -> int:
        """How many of the compared hits differed from native."""
        return self.state.mismatches.total()

    @property
    def plans(self) -> Plans | None:
        """Its launch plans: their keys, hits and bytes; None if it can have none."""
        return self.state.plans

    @property
    def derivative(self) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        """`(setup_context, backward)` of a custom derivative; None if it has none."""
        return None if self.is_differentiated else self.autograd  # type: ignore[return-value]

    @property
    def is_differentiated(self) -> bool:
        """Whether autograd differentiates the ops that `impl` calls."""
        return self.autograd == "impl"

    @property
    def enabled(self) -> bool:
        """Whether calls can reach it under the present rules of `enable` and `disable`."""
        return self.why_off() is None

    def why_off(self) -> str | None:
        """Why no call can reach it (removed, failed, disabled, ...); None if calls can."""
        if self.state.removed:
            return "removed"
        if self.unavailable is not None:
            return self.unavailable
        if env.installs_nothing():
            return "disabled by OPGRAFT_DISABLE=1"
        if self.state.given_up is not None:
            return f"given up: {self.state.given_up}"
        rule = self._registry.rule_for(self)
        return None if rule is None or rule.enables else f"disabled by {rule}"

    def remove(self) -> None:
        """Remove it from its chain. Calls that are running it finish. Removing twice is fine."""
        self._registry.remove(self)

    @property
    def decisions(self) -> Decisions | None:
        """What crossover tables decide for it; None if it declares no crossover."""
        if self.crossover is None:
            return None
        # A name may be made unique when the override is put into its chain.
        if self._decisions is None or self._decisions.name != self.table_name:
            from opgraft.crossover.decisions import Decisions

            self._decisions = Decisions(self.table_name, self.pack or "user", self.crossover)
        return self._decisions

    @property
    def table_name(self) -> str:
        """Whose part of the tables decides: its own, or that of the override it is measured as."""
        shared = None if self.crossover is None else self.crossover.measured_as
        return shared or self.name

    @property
    def unplanned(self) -> Condition | None:
        """For which calls without a launch plan the impl is worth running in Python; None: all.

        What its author wrote comes before what its crossover's tables say.
        """
        declared = self.declaration.unplanned
        if declared is not None or self.decisions is None or not self.launch_plan:
            return declared
        return None if self.state.ignores_tables else self.decisions.from_python

    @property
    def eligible(self) -> Condition | Callable[..., Any] | None:
        """The condition for a call, however it will run: `cond`, and what its tables say."""
        if self.decisions is None or self.state.ignores_tables:
            return self.cond
        has_plans = self.plans is not None or self.declaration.unplanned is not None
        by_table = self.decisions.by_plan if has_plans else self.decisions.from_python
        return self._joined(self.cond, by_table)

    @property
    def condition(self) -> Condition | Callable[..., Any] | None:
        """The condition for a call: `eligible`, joined with `unplanned` if there can be no plans.

        Without plans, `eligible` has what the tables say of Python.
        """
        if self.plans is not None or self.declaration.unplanned is None:
            return self.eligible
        return self._joined(self.eligible, self.declaration.unplanned)

    def _joined(
        self, cond: Condition | Callable[..., Any] | None, other: Condition
    ) -> Condition | Callable[..., Any]:
        if cond is None:
            return other
        if isinstance(cond, Condition):
            return cond & other
        op = self.operator

        def both(*args: Any, **kwargs: Any) -> bool:
            return other.holds(op.bind(args, kwargs).named) and bool(cond(*args, **kwargs))

        return both

    def has_policy(self, policy: CompilePolicy) -> bool:
        """Whether its policy in compiled graphs is this one for every call."""
        return isinstance(self.compile, str) and self.compile == policy

    def condition_holds(self, call: Call) -> bool:
        """Whether the condition holds for a call."""
        return _holds(self.condition, call)

    def cond_holds(self, call: Call) -> bool:
        """Whether `cond` alone holds for a call, whatever its tables say."""
        return _holds(self.cond, call)

    def condition_failure(self, call: Call) -> Failure | None:
        """The part of the condition that fails for a call that the condition has declined.

        A condition in Python is not asked again.
        """
        condition = self.condition
        if isinstance(condition, Condition):
            return condition.failure(call.named)
        return Failure(f"cond {getattr(self.cond, '__qualname__', self.cond)!s}", "returned false")

    @property
    def order(self) -> tuple[bool, int, str, int]:
        """Its sort key in the chain. The lowest comes first.

        The user's overrides come before packs'; then higher priority; packs by name; the last
        registered first.
        """
        pack = self.pack or ""
        return (self.pack is not None, -self.priority, pack, -self.state.sequence)


def _holds(condition: Condition | Callable[..., Any] | None, call: Call) -> bool:
    if condition is None:
        return True
    if isinstance(condition, Condition):
        return condition.holds(call.named)
    return bool(condition(*call.args, **call.kwargs))
