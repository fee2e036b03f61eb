"""Chains and rules: who is asked for a call, in which order, and what is switched off.

Concurrency: every change takes the registry's lock, computes the new chain and publishes it by one
attribute store of an immutable tuple (`Chain.active`). Routers read that attribute without a lock,
so a call sees the chain before or after a change, never in between; nothing here ever touches the
dispatcher.
"""

from __future__ import annotations

import copyreg
import itertools
from collections.abc import Callable, Iterable, Iterator

from opgraft.base import env
from opgraft.base.locks import fork_safe_lock
from opgraft.core import places
from opgraft.errors import RegistrationError
from opgraft.ops.schema import Op
from opgraft.registry.override import Override
from opgraft.registry.rules import Rule, Selector


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
        places.settle()
        with self._lock:
            chain = self.chain(override.operator, override.dispatch_key)
            namesakes = [o for o in chain.members if o.name == override.name]
            replaced = [o for o in namesakes if replace and o.pack == override.pack]
            if namesakes and not replace:
                name = _unused(override.name, {o.name for o in chain.members})
                override.declaration = override.declaration.replaced(name=name)
            for old in replaced:
                old.state.removed = True
            override.state.sequence = next(self._sequence)
            self._had.update(override.identity.items())
            kept = (o for o in chain.members if o not in replaced)
            self._publish(chain, (*kept, override))
            return chain

    def remove(self, override: Override) -> None:
        with self._lock:
            override.state.removed = True
            chain = self.chain(override.operator, override.dispatch_key)
            self._publish(chain, (o for o in chain.members if o is not override))

    def give_up(self, override: Override, reason: str) -> None:
        """Keep an override from every call, for good."""
        with self._lock:
            override.state.given_up = reason
            chain = self.chain(override.operator, override.dispatch_key)
            self._publish(chain, chain.members)

    def chain(self, op: Op, dispatch_key: str) -> Chain:
        """The chain of an op at a key, made on first use; there is one for ever."""
        places.settle()
        with self._lock:
            key = (op.name, dispatch_key)
            if key not in self._chains:
                self._chains[key] = Chain(op, dispatch_key)
            return self._chains[key]

    def find(self, op: Op, dispatch_key: str) -> Chain | None:
        """The chain of an op at a key, if anybody asked for it before."""
        places.settle()
        return self._chains.get((op.name, dispatch_key))

    def chains(self) -> Iterator[Chain]:
        places.settle()
        with self._lock:
            chains = list(self._chains.values())
        return iter(chains)

    def overrides(self, selector: Selector) -> list[Override]:
        """What is registered and matches, chain by chain, each in the order of asking."""
        members = (override for chain in self.chains() for override in chain.members)
        return [override for override in members if selector.matches(override)]

    def add_rule(self, rule: Rule) -> None:
        """Append a rule; earlier ones that it fully overrides go, so toggling never piles up."""
        places.settle()
        with self._lock:
            kept = (r for r in self._rules if not rule.selector.covers(r.selector))
            self._rules = (*kept, rule)
            self.republish()

    def rule_for(self, override: Override) -> Rule | None:
        matching = (rule for rule in reversed(self._rules) if rule.selector.matches(override))
        return next(matching, None)

    def reset(self) -> None:
        """Remove every override and rule; routers stay installed, with nothing to route to."""
        places.settle()
        with self._lock:
            for override in self.overrides(Selector()):
                self.remove(override)
            self._rules = ()

    def republish(self) -> None:
        """Tell every router of its chain again, for what else it depends on."""
        places.settle()
        with self._lock:
            for chain in self._chains.values():
                self._publish(chain, chain.members)

    def _publish(self, chain: Chain, members: Iterable[Override]) -> None:
        chain.members = tuple(sorted(members, key=lambda override: override.order))
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


#: The process's registry.
registry = Registry()

copyreg.pickle(Override, lambda override: (_registered, (override.identity,)))  # type: ignore[arg-type]
