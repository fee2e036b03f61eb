"""Connects registered overrides with the compiler, whichever of the two comes first.

Nothing here imports Dynamo or Inductor: what concerns them runs once they are imported.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from opgraft.base import env, imports
from opgraft.ops.schema import Call
from opgraft.pt2 import decomposition, dispatch_rule
from opgraft.registry import Chain, Override, registry
from opgraft.router import derivative

_CACHES = "torch._inductor.codecache"
_DYNAMO = "torch._dynamo.convert_frame"
_PACKAGES = "torch._inductor.package"
_TRACER = "torch.fx.experimental.proxy_tensor"

# The overrides that were active in a chain when it last changed.
_last_active: dict[Chain, tuple[Override, ...]] = {}


def attach() -> None:
    """Let compiled graphs contain overrides from now on. Call it once."""
    if env.installs_nothing():
        return
    registry.add_listener(_on_chain_change)
    derivative.listener = _add_guard
    derivative.is_left_to_compiler = _is_left_to_compiler
    derivative.trace_differentiated = _trace_differentiated
    imports.after(_CACHES, _salt)
    imports.after(_PACKAGES, _define_registered)
    imports.after(_TRACER, decomposition.see_past_routers)


def _on_chain_change(chain: Chain) -> None:
    if chain.active:
        dispatch_rule.install(chain.op)
        if _PACKAGES in sys.modules:
            _define(chain)
    last_active = set(_last_active.get(chain, ()))  # a chain may have hundreds
    added = [override for override in chain.active if override not in last_active]
    _last_active[chain] = chain.active
    if added and _DYNAMO in sys.modules:
        from opgraft.pt2 import compile_log

        compile_log.warn_of_stale_graphs(added)


def _add_guard(chain: Chain) -> None:
    if _DYNAMO in sys.modules:
        from opgraft.pt2 import guards

        guards.guard_on(chain)


def _is_left_to_compiler(override: Override, call: Call) -> bool:
    """Whether a call is being traced into a graph in which the compiler has the override's op."""
    functional = torch._C._TorchDispatchModeKey.FUNCTIONAL  # type: ignore[attr-defined]
    if torch._C._get_dispatch_mode(functional) is None:
        return False
    from opgraft.pt2 import policy

    return policy.resolve(override, call)[0] == "inductor"


def _trace_differentiated(call: Call) -> Any:
    from opgraft.pt2 import graph

    return graph.trace_differentiated(call)


def _salt(codecache: ModuleType) -> None:
    from opgraft.pt2 import caches

    caches.salt(codecache)


def _define_registered(_: ModuleType) -> None:
    """Define the ops that an AOTInductor package may contain: it looks them up in C++ directly."""
    for chain in registry.chains():
        _define(chain)


def _define(chain: Chain) -> None:
    from opgraft.pt2 import opaque

    opaque.define(chain.op)
