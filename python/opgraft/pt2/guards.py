"""Guards on which overrides are on: compiled graphs that hold an own derivative are made for that.

A graph's backward is fixed when the graph is made: the override's formula, or the op's. So a graph
in which a call was asked whose derivative it gets is compiled again once an override of that op is
switched on or off, on this thread or for all, removed or replaced. Dynamo asks before each run, and
finds the graph of an earlier state again.
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

# Dynamo may forget a guard, with the trace of what it gave up, and is then given the same again.
_guards: WeakKeyDictionary[TracingContext, dict[Chain, Guard]] = WeakKeyDictionary()


def depend_on(chain: Chain) -> None:
    """Compile the graph that is being made again once other overrides of a chain are on."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:  # no Dynamo, and nobody who would ask a guard
        return
    made = _guards.setdefault(context, {})
    if chain not in made:
        made[chain] = _guard(chain)
    context.guards_context.dynamo_guards.add(made[chain])


def _guard(chain: Chain) -> Guard:
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard

    holds = _check(chain)

    def OPGRAFT_OVERRIDES(builder: Any, guard: Guard) -> None:
        add = builder.guard_manager.root.add_lambda_guard
        said = [f"opgraft: the overrides of {chain.op.name} that are on"]
        try:
            add(holds, said, None)
        except TypeError:  # torch 2.11 has no third argument
            add(holds, said)

    return Guard(GlobalStateSource(), OPGRAFT_OVERRIDES)


def _check(chain: Chain) -> Callable[[object], bool]:
    """Whether the overrides that are on are those that are on now."""
    # Weakly: an override that was removed goes, though a graph was made for it.
    expected = tuple(map(weakref.ref, _on(chain)))

    def holds(_: object) -> bool:
        on = _on(chain)
        return len(on) == len(expected) and all(
            override is reference() for override, reference in zip(on, expected, strict=True)
        )

    return holds


def _on(chain: Chain) -> tuple[Override, ...]:
    if not threads.scopes():
        return chain.active
    return tuple(override for override in chain.active if not threads.is_disabled_here(override))
