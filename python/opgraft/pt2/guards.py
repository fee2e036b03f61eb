"""Guards on which overrides are enabled, for graphs that contain an override's own derivative.

A graph's backward is fixed when the graph is traced: the override's formula, or the op's. So such a
graph is compiled again once an override of that op is enabled or disabled (on this thread or for
all threads), removed or replaced. Dynamo checks the guard before each run. When an earlier state
comes back, Dynamo finds the graph of that state again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from opgraft.registry import Chain, Override
from opgraft.router import threads

if TYPE_CHECKING:
    from torch._guards import Guard, TracingContext

# Dynamo drops guards when it restarts a trace. It then gets the same guard object again.
_guards: WeakKeyDictionary[TracingContext, dict[Chain, Guard]] = WeakKeyDictionary()


def guard_on(chain: Chain) -> None:
    """Make the graph that is being traced recompile once other overrides of a chain are enabled."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:  # without Dynamo nothing checks guards
        return
    made = _guards.setdefault(context, {})
    if chain not in made:
        made[chain] = _guard(chain)
    context.guards_context.dynamo_guards.add(made[chain])


def _guard(chain: Chain) -> Guard:
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard

    is_valid = _check(chain)

    def OPGRAFT_OVERRIDES(builder: Any, guard: Guard) -> None:
        add = builder.guard_manager.root.add_lambda_guard
        description = [f"opgraft: the overrides of {chain.op.name} that are on"]
        try:
            add(is_valid, description, None)
        except TypeError:  # torch 2.11 has no third argument
            add(is_valid, description)

    return Guard(GlobalStateSource(), OPGRAFT_OVERRIDES)


def _check(chain: Chain) -> Callable[[object], bool]:
    """A check that the enabled overrides are still those that are enabled now."""
    # Weak references: a graph must not keep an override alive that was removed.
    expected = tuple(map(weakref.ref, _on(chain)))

    def is_valid(_: object) -> bool:
        on = _on(chain)
        return len(on) == len(expected) and all(
            override is reference() for override, reference in zip(on, expected, strict=True)
        )

    return is_valid


def _on(chain: Chain) -> tuple[Override, ...]:
    if not threads.scopes():
        return chain.active
    return tuple(override for override in chain.active if not threads.is_disabled_here(override))
