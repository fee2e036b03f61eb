"""Chains and rules: which overrides may take a call, in which order, and which are off.

Concurrency: every change takes the registry's lock, computes the new chain, and publishes it by
    storing one immutable tuple in an attribute (`Chain.active`). Routers read that attribute
    without a lock, so a call sees the chain before or after a change, never in between. Nothing
    here touches the dispatcher.
"""

from __future__ import annotations

import copyreg
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from opgraft.base import env
from opgraft.base.locks import fork_safe_lock
from opgraft.core import deferred
from opgraft.errors import RegistrationError
from opgraft.ops.schema import Op, is_current
from opgraft.registry.override import Override
from opgraft.registry.rules import Rule, Selector

log = logging.getLogger(__name__)


class Chain:
    """The overrides of one op at one dispatch key, in the order in which they are tried."""

    def __init__(self, op: Op, dispatch_key: str) -> None:
        self.op = op
        self.dispatch_key = dispatch_key
        self.members: tuple[Override, ...] = ()
        #: Whether a router reads it.
        self.is_routed = False
        #: The enabled members, which the router reads. Immutable, and replaced as a whole.
        self.active: tuple[Override, ...] = ()
        #: Called, under the registry's lock, after `active` was replaced.
        self.listener: Callable[[Chain], None] | None = None


class Registry:
    """All chains and rules of the process.

    Every access first registers the packs that `import torch` deferred.
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._chains: dict[tuple[str, str], Chain] = {}
        self._rules: tuple[Rule, ...] = tuple(
            Rule(False, Selector(**keywords), origin="OPGRAFT_DISABLE")
            for keywords in env.initially_disabled()
        )
        self._sequence = itertools.count()
        self._listeners: tuple[Callable[[Chain], None], ...] = ()
        self._ever_registered: set[tuple[str, str | None]] = set()

    def ever_registered(self, key: str) -> set[str | None]:
        """The values of a selector's key (name, DSL, ...) in all overrides ever registered."""
        return {value for each, value in self._ever_registered if each == key}

    def add_listener(self, listener: Callable[[Chain], None]) -> None:
        """Call `listener`, under the registry's lock, whenever a chain's overrides changed."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    @contextmanager
    def unless_changing(self) -> Iterator[bool]:
        """A scope in which nobody else changes anything; False if somebody is, this thread too."""
        is_free = not self._is_held_here and self._lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._lock.release()

    @property
    def _is_held_here(self) -> bool:
        is_owned: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        return is_owned

    def add(self, override: Override) -> list[Override]:
        """Put an override into its chain.

        One that was given a name replaces the override of the same owner (pack, or the user) with
        that name. Any other replaces what earlier runs of the same code registered, and its name is
        made unique in the chain.

        Returns:
            The overrides that it replaces, which are removed.

        Raises:
            Exception: the router cannot run it. The chain is as it was before.
        """
        deferred.register_now()
        with self._lock:
            chain = self.chain(override.operator, override.dispatch_key)
            replaced = _replaced_by(override, chain.members)
            remaining = [o for o in chain.members if o not in replaced]
            if override.definition is not None:
                name = _unique_name(override.name, {o.name for o in remaining})
                override.declaration = override.declaration.replaced(name=name)
            override.state.sequence = next(self._sequence)
            self._change(chain, [*remaining, override])
            self._ever_registered.update(override.identity.items())
            return replaced

    def forget(self, chain: Chain) -> tuple[Override, ...]:
        """Remove a chain, because its op is gone, and its overrides.

        Returns:
            The overrides that were in it.
        """
        with self._lock:
            removed = chain.members
            self._change(chain, [])
            key = (chain.op.name, chain.dispatch_key)
            if self._chains.get(key) is chain:
                del self._chains[key]
            return removed

    def remove(self, override: Override) -> None:
        with self._lock:
            if override.state.removed:
                return  # perhaps together with its op: there may be another chain of that name
            chain = self.chain(override.operator, override.dispatch_key)
            self._change(chain, [o for o in chain.members if o is not override])

    def give_up(self, override: Override, reason: str) -> None:
        """Stop calling an override, for good."""
        with self._lock:
            override.state.given_up = reason
            chain = self.chain(override.operator, override.dispatch_key)
            self._publish(chain, chain.members)

    def chain(self, op: Op, dispatch_key: str) -> Chain:
        """The chain of an op at a key. It is created on first use, and removed with its op."""
        deferred.register_now()
        with self._lock:
            key = (op.name, dispatch_key)
            found = self._chains.get(key)
            # One that was made for a former op of that name has nothing.
            if found is None or (found.op is not op and not found.is_routed and is_current(op)):
                found = self._chains[key] = Chain(op, dispatch_key)
            return found

    def find(self, op: Op, dispatch_key: str) -> Chain | None:
        """The chain of an op at a key, if it exists."""
        deferred.register_now()
        return self._chains.get((op.name, dispatch_key))

    def chains(self) -> Iterator[Chain]:
        deferred.register_now()
        with self._lock:
            chains = list(self._chains.values())
        return iter(chains)

    def overrides(self, selector: Selector) -> list[Override]:
        """The overrides that match, chain by chain, each in its chain's order."""
        members = (override for chain in self.chains() for override in chain.members)
        return [override for override in members if selector.matches(override)]

    def add_rule(self, rule: Rule) -> None:
        """Append a rule, and drop earlier ones that it covers, so that toggling adds none."""
        deferred.register_now()
        with self._lock:
            remaining = (r for r in self._rules if not rule.selector.covers(r.selector))
            self._rules = (*remaining, rule)
            self.republish()

    def rule_for(self, override: Override) -> Rule | None:
        matching = (rule for rule in reversed(self._rules) if rule.selector.matches(override))
        return next(matching, None)

    def reset(self) -> None:
        """Remove every override and rule. Routers stay installed, with empty chains."""
        deferred.register_now()
        with self._lock:
            for chain in self.chains():
                if chain.members:
                    self._change(chain, [])
            self._rules = ()

    def publish(self, chain: Chain) -> None:
        """Publish a chain again, because something that its router depends on has changed."""
        with self._lock:
            self._publish(chain, chain.members)

    def republish(self) -> None:
        """Publish every chain again, because something else that routers depend on has changed.

        Raises:
            Exception: what the first chain raised that could not be published. The others were.
        """
        deferred.register_now()
        with self._lock:
            errors = [self._error_of_publishing(chain) for chain in self._chains.values()]
        for error in errors:
            if error is not None:
                raise error

    def _error_of_publishing(self, chain: Chain) -> Exception | None:
        try:
            self._publish(chain, chain.members)
        except Exception as error:
            log.debug("%s at %s is not published", chain.op.name, chain.dispatch_key, exc_info=True)
            return error
        return None

    def _change(self, chain: Chain, members: Collection[Override]) -> None:
        """Give a chain other members, or the former ones again if those cannot be published."""
        before = chain.members
        added, removed = set(members) - set(before), set(before) - set(members)
        try:
            _mark_removed(removed, True)
            self._publish(chain, members)
        except BaseException:
            _mark_removed(removed, False)
            _mark_removed(added, True)
            self._restore(chain, before)
            raise

    def _publish(self, chain: Chain, members: Iterable[Override]) -> None:
        chain.members = tuple(sorted(members, key=lambda override: override.order))
        chain.active = tuple(override for override in chain.members if override.enabled)
        for listener in self._listeners_of(chain):
            listener(chain)

    def _restore(self, chain: Chain, members: tuple[Override, ...]) -> None:
        """Publish a chain's former members: to each listener, whichever of them raises."""
        chain.members = members
        chain.active = tuple(override for override in members if override.enabled)
        for listener in self._listeners_of(chain):
            try:
                listener(chain)
            except Exception as error:  # the error that led here is the one to be raised
                where = f"{chain.op.name} at {chain.dispatch_key}"
                log.warning("the overrides of %s may not all be in use: %r", where, error)

    def _listeners_of(self, chain: Chain) -> list[Callable[[Chain], None]]:
        own = [] if chain.listener is None else [chain.listener]
        return [*own, *self._listeners]


def _mark_removed(overrides: Iterable[Override], is_removed: bool) -> None:
    for override in overrides:
        override.state.removed = is_removed


def _unpickled(identity: dict[str, str | None]) -> Override:
    """The override of this process for one that was pickled.

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


def _replaced_by(override: Override, members: Iterable[Override]) -> list[Override]:
    """The members of its chain that an override replaces when it is added."""
    of_owner = [o for o in members if o.pack == override.pack]
    definition = override.definition
    if definition is None:
        return [o for o in of_owner if o.name == override.name]
    before = [(o, o.definition) for o in of_owner if o.definition is not None]
    if repeated := [o for o, old in before if definition.repeats(old)]:
        return repeated
    # One for one: other cells may have registered the old function as well.
    redefined = [o for o, old in before if definition.redefines(old)]
    return sorted(redefined, key=lambda o: o.state.sequence)[:1]


def _unique_name(name: str, taken: set[str]) -> str:
    if name not in taken:
        return name
    candidates = (f"{name}#{number}" for number in itertools.count(2))
    return next(candidate for candidate in candidates if candidate not in taken)


#: The process's registry.
registry = Registry()

copyreg.pickle(Override, lambda override: (_unpickled, (override.identity,)))  # type: ignore[arg-type]
