"""Tells what became of overridden ops in compiled graphs: in the log and in torch's own trace."""

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

    from opgraft.pt2.policy import Decision

log = logging.getLogger("opgraft.pt2")

# By graph: an op is traced several times for one graph, and is called in many places alike.
_told: WeakKeyDictionary[TracingContext, set[object]] = WeakKeyDictionary()


def _is_news(fact: object) -> bool:
    """Whether a fact is told for the first time in the graph that is being made."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()  # an exported program may have none
    told = _told.setdefault(context, set()) if context is not None else set()
    if fact in told:
        return False
    told.add(fact)
    return True


def tell(call: Call, decision: Decision) -> None:
    """Say once for each graph what became of calls of an op, and why."""
    from torch._guards import CompileContext

    from opgraft.pt2.policy import dispatch_key

    op, key = call.op, dispatch_key(call)
    if not _is_news((op, key, decision)):
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


def tell_untraceable(override: Override, error: Exception) -> None:
    """Say once for each graph that an impl could not be traced."""
    if _is_news((override, str(error))):
        log.warning(
            "the impl of override %r of %s at %s cannot be traced, so the op is opaque in this "
            "graph: %s: %s",
            override.name,
            override.op,
            override.dispatch_key,
            type(error).__name__,
            error,
        )


_reminded = False


def remind_of_reset(overrides: Sequence[Override]) -> None:
    """Say that overrides came too late for what is compiled already, where that is so."""
    global _reminded
    late = [override for override in overrides if not override.has_policy("inductor")]
    if not late or not _has_compiled():
        return
    log.log(
        logging.INFO if _reminded else logging.WARNING,
        "%r came after torch.compile had compiled: graphs that exist go on as they are; "
        "torch._dynamo.reset() has them compiled anew",
        late[0],
    )
    _reminded = True


def _has_compiled() -> bool:
    """Whether compiled code of this process is alive that torch._dynamo.reset() would drop."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    codes = getattr(getattr(frames, "output_codes", None), "seen", ())
    return any(code() is not None for code in list(codes))
