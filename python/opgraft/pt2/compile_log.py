"""Logs what became of overridden ops in compiled graphs: in the log and in torch's own trace."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from opgraft.base import events
from opgraft.ops.schema import Call
from opgraft.registry import Override

if TYPE_CHECKING:
    from torch._guards import TracingContext

    from opgraft.pt2.policy import Action, Decision

log = logging.getLogger("opgraft.pt2")

# By graph. One graph traces an op several times, and often calls it the same way in many places.
_logged: WeakKeyDictionary[TracingContext, set[object]] = WeakKeyDictionary()


def _is_first_in_graph(fact: object) -> bool:
    """Whether a fact is new in the graph that is being traced."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()  # there may be none while a program is exported
    logged = _logged.setdefault(context, set()) if context is not None else set()
    if fact in logged:
        return False
    logged.add(fact)
    return True


def log_decision(call: Call, decision: Decision) -> None:
    """Log once for each graph what became of the calls of an op, and why."""
    from torch._guards import CompileContext

    from opgraft.pt2.policy import dispatch_key

    op, key = call.op, dispatch_key(call)
    if not _is_first_in_graph((op, key, decision)):
        return
    graph = CompileContext.current_compile_id()
    log.log(
        logging.DEBUG if decision.action == "left" else logging.INFO,
        "graph %s: %s at %s is %s: %s",
        graph,
        op.name,
        key,
        decision.action,
        decision.reason,
    )
    override = decision.override
    events.emit(
        f"opgraft_{op.name}",
        lambda: {
            "op": op.name,
            "dispatch_key": key,
            "action": decision.action,
            "override": override.name if override else None,
            "pack": override.pack if override else None,
            "reason": decision.reason,
        },
        of_compilation=True,
    )


def log_untraceable(override: Override, error: Exception, action: Action) -> None:
    """Log once for each graph that an impl could not be traced.

    Args:
        override: the override whose impl it is.
        error: what tracing it raised.
        action: what becomes of the call instead.
    """
    if _is_first_in_graph((override, str(error))):
        log.warning(
            "the impl of override %r of %s at %s cannot be traced, so the op is %s in this graph: "
            "%s: %s",
            override.name,
            override.op,
            override.dispatch_key,
            "left to the compiler" if action == "left" else action,
            type(error).__name__,
            error,
        )


_has_warned = False


def warn_of_stale_graphs(overrides: Sequence[Override]) -> None:
    """Warn that graphs which are compiled already do not contain the added overrides."""
    global _has_warned
    added = [override for override in overrides if not override.has_policy("inductor")]
    if not added or not _has_compiled():
        return
    log.log(
        logging.INFO if _has_warned else logging.WARNING,
        "%r was registered after torch.compile had compiled: existing graphs do not change; "
        "torch._dynamo.reset() makes them compile again",
        added[0],
    )
    _has_warned = True


def _has_compiled() -> bool:
    """Whether this process has compiled code that torch._dynamo.reset() would drop."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    codes = getattr(getattr(frames, "output_codes", None), "seen", ())
    return any(code() is not None for code in list(codes))
