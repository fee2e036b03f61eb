"""Where overrides and the compiler meet: both are told when the other comes.

Nothing here imports Dynamo or Inductor: what has to do with them waits until they are imported.
"""

from __future__ import annotations

import sys
from types import ModuleType

from opgraft.base import env, imports
from opgraft.pt2 import rule
from opgraft.registry import Chain, Override, registry
from opgraft.router import derivative

_CACHES = "torch._inductor.codecache"
_FRAMES = "torch._dynamo.convert_frame"
_PACKAGES = "torch._inductor.package"

# What was on at a chain when it last changed.
_on: dict[Chain, tuple[Override, ...]] = {}


def attach() -> None:
    """Let compiled graphs hold overrides, from now on. Once."""
    if env.installs_nothing():
        return
    registry.add_listener(_follow)
    derivative.listener = _depend
    imports.after(_CACHES, _salt)
    imports.after(_PACKAGES, _define_registered)


def _follow(chain: Chain) -> None:
    if chain.active:
        rule.install(chain.op)
        if _PACKAGES in sys.modules:
            _define(chain)
    late = [override for override in chain.active if override not in _on.get(chain, ())]
    _on[chain] = chain.active
    if late and _FRAMES in sys.modules:
        from opgraft.pt2 import report

        report.remind_of_reset(late)


def _depend(chain: Chain) -> None:
    if _FRAMES in sys.modules:
        from opgraft.pt2 import guards

        guards.depend_on(chain)


def _salt(codecache: ModuleType) -> None:
    from opgraft.pt2 import caches

    caches.salt(codecache)


def _define_registered(_: ModuleType) -> None:
    """Define what an AOTInductor package may hold: it looks ops up in C++, and asks nobody."""
    for chain in registry.chains():
        _define(chain)


def _define(chain: Chain) -> None:
    from opgraft.pt2 import opaque

    opaque.define(chain.op)
