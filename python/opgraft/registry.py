"""What is registered: overrides, their chains, and the rules that enable and disable them.

Concurrency: every change takes the registry's lock, computes the new chain and publishes it by one
attribute store of an immutable tuple (`Chain.active`). Routers read that attribute without a lock,
so a call sees the chain before or after a change, never in between; nothing here ever touches the
dispatcher.

No dataclasses here, nor in what else `import torch` imports to load packs: the methods of each are
compiled when it is imported. With named tuples that was half of the whole import.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from opgraft import _deferred, counter, env
from opgraft._lock import fork_safe_lock
from opgraft.errors import RegistrationError
from opgraft.schema import Call, Op
from opgraft.when import Condition, Failure

OnError = Literal["raise", "fallback"]
CompilePolicy = Literal["auto", "opaque", "inductor", "traceable"]


class Selector:
    """Which overrides a rule or a query speaks of: those that match every keyword that is given."""

    #: The keywords.
    KEYS = ("dsl", "op", "dispatch_key", "pack", "name")

    def __init__(
        self,
        *,
        dsl: str | None = None,
        op: str | None = None,
        dispatch_key: str | None = None,
        pack: str | None = None,
        name: str | None = None,
    ) -> None:
        self.dsl = dsl
        self.op = op
        self.dispatch_key = dispatch_key
        self.pack = pack
        self.name = name

    def matches(self, override: Override) -> bool:
        return all(getattr(override, key) == value for key, value in self.given().items())

    def covers(self, other: Selector) -> bool:
        """Whether everything that `other` matches is matched by this one too."""
        return self.given().items() <= other.given().items()

    def given(self) -> dict[str, str]:
        return {key: value for key, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in self.given().items())


class Rule:
    """An `enable` or `disable` with its selector; the last rule that matches an override wins."""

    def __init__(self, enables: bool, selector: Selector, origin: str = "") -> None:
        self.enables = enables
        self.selector = selector
        self.origin = origin

    def __str__(self) -> str:
        verb = "enable" if self.enables else "disable"
        return self.origin or f"opgraft.{verb}({self.selector})"


class Override:
    """An implementation for one op at one dispatch key, as `register_op_override` returns it."""

    def __init__(
        self,
        *,
        name: str,
        operator: Op,
        dispatch_key: str,
        impl: Callable[..., Any],
        cond: Condition | Callable[..., Any] | None = None,
        takes_keyset: bool = False,
        dsl: str | None = None,
        pack: str | None = None,
        priority: int = 0,
        on_error: OnError = "raise",
        compile: CompilePolicy | Condition = "auto",
        autograd: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
        launch_plan: bool = False,
        samples: Callable[..., Iterable[Any]] | None = None,
        unplanned: Condition | None = None,
        unavailable: str | None = None,
    ) -> None:
        self.name = name
        self.operator = operator
        self.dispatch_key = dispatch_key
        self.impl = impl
        #: What routers run: the impl, with whatever is put around it; None until one has asked.
        self.wrapped: Callable[..., Any] | None = None
        self.cond = cond
        self.takes_keyset = takes_keyset
        self.dsl = dsl
        self.pack = pack
        self.priority = priority
        self.on_error = on_error
        self.compile = compile
        self.autograd = autograd
        self.launch_plan = launch_plan
        #: Calls to verify it on, for a device: arguments as tuples, or as dicts by name.
        self.samples = samples
        #: Which of the calls that `cond` wants are worth `impl` in Python, where no launch plan
        #: replays them; None: all of them.
        self.unplanned = unplanned
        #: Its launch plans (`opgraft.plan.plans.Plans`): their keys, hits and bytes; None where it
        #: can have none.
        self.plans: Any = None
        #: Why it can never run here (its DSL is missing); None where it can.
        self.unavailable = unavailable
        self.removed = False
        #: Why it is kept from every call: it failed too often. None while it is not.
        self.given_up: str | None = None
        #: Signatures for which it failed and the native kernel runs instead, with the error.
        self.quarantined: dict[object, str] = {}
        #: How often each signature's outputs were compared with the native kernel's.
        self.checked: dict[object, int] = {}
        #: Where the results of those comparisons lay, weakly, by signature.
        self.results: dict[object, list[Any]] = {}
        #: Calls, in every detail, that ran outside a CUDA graph's capture: nothing is compiled for
        #: them.
        self.warm: dict[object, None] = {}
        self._sequence = 0
        self._hits = counter.new()
        self._misses = counter.new()
        self._fallbacks = counter.new()
        self._shadowed = counter.new()
        self._mismatches = counter.new()

    def __repr__(self) -> str:
        owner = f"pack {self.pack}" if self.pack else "user"
        label = f"{self.op} at {self.dispatch_key}, {self.dsl or 'no DSL'}, {owner}"
        return f"<Override {self.name!r} of {label}>"

    def __copy__(self) -> Override:
        return self

    def __deepcopy__(self, memo: object) -> Override:
        """Itself: what is registered is there once, also for the copy of a module that holds it."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Override], tuple[dict[str, str | None]]]:
        return _registered, (self.identity,)

    @property
    def op(self) -> str:
        """The op's name as torch prints it, such as `"aten::mul.Tensor"`."""
        return self.operator.name

    @property
    def identity(self) -> dict[str, str | None]:
        """What selectors compare."""
        return {key: getattr(self, key) for key in Selector.KEYS}

    @property
    def hits(self) -> int:
        """How often `impl` ran."""
        return self._hits.total()

    @property
    def misses(self) -> int:
        """How often the condition declined a call."""
        return self._misses.total()

    @property
    def fallbacks(self) -> int:
        """How many hits ended in the native kernel."""
        return self._fallbacks.total()

    @property
    def shadowed(self) -> int:
        """How many hits were compared with the native kernel, by `opgraft.shadow`."""
        return self._shadowed.total()

    @property
    def mismatches(self) -> int:
        """How many of those differed."""
        return self._mismatches.total()

    @property
    def enabled(self) -> bool:
        """Whether a call can reach it, as the rules of `enable` and `disable` stand."""
        return self.why_off() is None

    def why_off(self) -> str | None:
        """Why no call can reach it: removed, failed, disabled by which rule, ...; None if on."""
        if self.removed:
            return "removed"
        if self.unavailable is not None:
            return self.unavailable
        if env.installs_nothing():
            return "disabled by OPGRAFT_DISABLE=1"
        if self.given_up is not None:
            return f"given up: {self.given_up}"
        rule = registry.rule_for(self)
        return None if rule is None or rule.enables else f"disabled by {rule}"

    def remove(self) -> None:
        """Take it out of its chain; calls that are running it finish. Removing twice is fine."""
        registry.remove(self)

    @property
    def condition(self) -> Condition | Callable[..., Any] | None:
        """What calls are compared with: `cond`, and where there can be no plans `unplanned` too."""
        if self.plans is not None or self.unplanned is None:
            return self.cond
        if self.cond is None:
            return self.unplanned
        if isinstance(self.cond, Condition):
            return self.cond & self.unplanned
        cond, unplanned, op = self.cond, self.unplanned, self.operator

        def both(*args: Any, **kwargs: Any) -> bool:
            return unplanned.holds(op.bind(args, kwargs).named) and bool(cond(*args, **kwargs))

        return both

    def has_policy(self, policy: CompilePolicy) -> bool:
        """Whether this is its policy in compiled graphs, for every call."""
        return isinstance(self.compile, str) and self.compile == policy

    def wants(self, call: Call) -> bool:
        """Whether the condition holds for a call."""
        condition = self.condition
        if condition is None:
            return True
        if isinstance(condition, Condition):
            return condition.holds(call.named)
        return bool(condition(*call.args, **call.kwargs))

    def declines(self, call: Call) -> Failure | None:
        """The part of the condition that declines a call; None where it wants it."""
        condition = self.condition
        if isinstance(condition, Condition):
            return condition.failure(call.named)
        if self.wants(call):
            return None
        return Failure(f"cond {getattr(self.cond, '__qualname__', self.cond)!s}", "returned false")

    @property
    def _order(self) -> tuple[bool, int, str, int]:
        # The user's own before packs'; higher priority; packs by name; last registered first.
        return (self.pack is not None, -self.priority, self.pack or "", -self._sequence)


class Chain:
    """The overrides of one op at one dispatch key, in the order in which they are asked."""

    def __init__(self, op: Op, dispatch_key: str) -> None:
        self.op = op
        self.dispatch_key = dispatch_key
        self.members: tuple[Override, ...] = ()
        #: What the router reads: the members that are on. Immutable, replaced as a whole.
        self.active: tuple[Override, ...] = ()
        #: Told, under the registry's lock, when `active` was replaced.
        self.listener: Callable[[Chain], None] | None = None


class Registry:
    """All chains and rules of the process.

    Whoever looks at it, or changes it, finds the packs in it that `import torch` left for later.
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._chains: dict[tuple[str, str], Chain] = {}
        self._rules: tuple[Rule, ...] = tuple(
            Rule(False, Selector(**keywords), origin="OPGRAFT_DISABLE")
            for keywords in env.initially_disabled()
        )
        self._sequence = itertools.count()
        self._watchers: tuple[Callable[[Chain], None], ...] = ()
        self._had: set[tuple[str, str | None]] = set()

    def has_had(self, key: str) -> set[str | None]:
        """The names, DSLs, ... of everything that was ever registered."""
        return {value for each, value in self._had if each == key}

    def watch(self, watcher: Callable[[Chain], None]) -> None:
        """Call `watcher`, under the registry's lock, whenever a chain's overrides changed."""
        with self._lock:
            self._watchers = (*self._watchers, watcher)

    def add(self, override: Override, *, replace: bool) -> Chain:
        """Put an override into its chain.

        Args:
            override: what to add.
            replace: an override of the same owner (pack, or the user) with the same name goes.
                Otherwise the name is made unique in the chain.
        """
        _deferred.settle()
        with self._lock:
            chain = self.chain(override.operator, override.dispatch_key)
            namesakes = [o for o in chain.members if o.name == override.name]
            replaced = [o for o in namesakes if replace and o.pack == override.pack]
            if namesakes and not replace:
                override.name = _unused(override.name, {o.name for o in chain.members})
            for old in replaced:
                old.removed = True
            override._sequence = next(self._sequence)
            self._had.update(override.identity.items())
            kept = (o for o in chain.members if o not in replaced)
            self._publish(chain, (*kept, override))
            return chain

    def remove(self, override: Override) -> None:
        with self._lock:
            override.removed = True
            chain = self.chain(override.operator, override.dispatch_key)
            self._publish(chain, (o for o in chain.members if o is not override))

    def give_up(self, override: Override, reason: str) -> None:
        """Keep an override from every call, for good."""
        with self._lock:
            override.given_up = reason
            chain = self.chain(override.operator, override.dispatch_key)
            self._publish(chain, chain.members)

    def chain(self, op: Op, dispatch_key: str) -> Chain:
        """The chain of an op at a key, made on first use; there is one for ever."""
        _deferred.settle()
        with self._lock:
            key = (op.name, dispatch_key)
            if key not in self._chains:
                self._chains[key] = Chain(op, dispatch_key)
            return self._chains[key]

    def find(self, op: Op, dispatch_key: str) -> Chain | None:
        """The chain of an op at a key, if anybody asked for it before."""
        _deferred.settle()
        return self._chains.get((op.name, dispatch_key))

    def chains(self) -> Iterator[Chain]:
        _deferred.settle()
        with self._lock:
            chains = list(self._chains.values())
        return iter(chains)

    def overrides(self, selector: Selector) -> list[Override]:
        """What is registered and matches, chain by chain, each in the order of asking."""
        members = (override for chain in self.chains() for override in chain.members)
        return [override for override in members if selector.matches(override)]

    def add_rule(self, rule: Rule) -> None:
        """Append a rule; earlier ones that it fully overrides go, so toggling never piles up."""
        _deferred.settle()
        with self._lock:
            kept = (r for r in self._rules if not rule.selector.covers(r.selector))
            self._rules = (*kept, rule)
            self.republish()

    def rule_for(self, override: Override) -> Rule | None:
        matching = (rule for rule in reversed(self._rules) if rule.selector.matches(override))
        return next(matching, None)

    def reset(self) -> None:
        """Remove every override and rule; routers stay installed, with nothing to route to."""
        _deferred.settle()
        with self._lock:
            for override in self.overrides(Selector()):
                self.remove(override)
            self._rules = ()

    def republish(self) -> None:
        """Tell every router of its chain again, for what else it depends on."""
        _deferred.settle()
        with self._lock:
            for chain in self._chains.values():
                self._publish(chain, chain.members)

    def _publish(self, chain: Chain, members: Iterable[Override]) -> None:
        chain.members = tuple(sorted(members, key=lambda override: override._order))
        chain.active = tuple(override for override in chain.members if override.enabled)
        if chain.listener is not None:
            chain.listener(chain)
        for watcher in self._watchers:
            watcher(chain)


def _registered(identity: dict[str, str | None]) -> Override:
    """The override that was pickled, in the process that unpickles it.

    Raises:
        RegistrationError: it is not registered there.
    """
    for override in registry.overrides(Selector(**identity)):
        if override.identity == identity:
            return override
    raise RegistrationError(
        f"override {identity['name']!r} for {identity['op']} at {identity['dispatch_key']} was "
        "pickled, and is not registered in this process: register it before unpickling"
    )


def _unused(name: str, taken: set[str]) -> str:
    candidates = (f"{name}#{number}" for number in itertools.count(2))
    return next(candidate for candidate in candidates if candidate not in taken)


def selector_from(keywords: Mapping[str, Any], *, normalise_op: Callable[[Any], str]) -> Selector:
    """A selector from a user's keywords; an op may be a name or an `OpOverload`.

    Raises:
        RegistrationError: a keyword is not a string where one is wanted.
    """
    given = {key: value for key, value in keywords.items() if value is not None}
    if "op" in given:
        given["op"] = normalise_op(given["op"])
    for key, value in given.items():
        if not isinstance(value, str):
            raise RegistrationError(f"{key}={value!r}: select overrides by a string")
    return Selector(**given)


#: The process's registry.
registry = Registry()
