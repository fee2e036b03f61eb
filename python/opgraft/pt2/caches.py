"""Salts the compiler's caches with what is registered.

Inductor's graph cache and AOTAutograd's cache keep compiled code on disk, for later processes and
for other machines. Their keys know nothing about overrides: code that was compiled with one would
be found by a process without it, and the other way round. So what is registered becomes part of
both keys: the names, order, policies and conditions of the overrides that are on, and the code of
their impls. Where nothing is on, the keys are those of a stock PyTorch.

What is traced into graphs counts with all that it can read, as that is at each compile. Where that
cannot be told, AOTAutograd's cache, which is asked before anything is traced, is done without;
Inductor's goes by the graph that was traced.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from opgraft.pt2 import exports, fingerprint
from opgraft.registry import Override, registry
from opgraft.router import threads
from opgraft.when import Condition

log = logging.getLogger(__name__)

#: What the details of a cached graph hold of us.
_ATTRIBUTE = "opgraft_registry"

_salted = False
#: With the policy that each was made for, which whoever tries policies assigns anew.
_fingerprints: WeakKeyDictionary[Override, tuple[object, str]] = WeakKeyDictionary()


def are_salted() -> bool:
    """Whether the keys of the caches, as far as they are loaded, hold what is registered."""
    return _salted


def salt(codecache: ModuleType) -> None:
    """Make what is registered part of the caches' keys.

    Args:
        codecache: `torch._inductor.codecache`, whose `FxGraphHashDetails` is what is hashed, for
            AOTAutograd's cache too. A configuration entry would do less: since torch 2.13 each
            thread has its own, and users replace entries.
    """
    global _salted
    details = getattr(codecache, "FxGraphHashDetails", None)
    if details is None:
        log.warning(
            "torch %s keeps its compiler caches in another way than opgraft knows: overrides stay "
            "out of compiled graphs",
            torch.__version__,
        )
        return
    initialise = details.__init__

    @functools.wraps(initialise)
    def initialise_and_salt(self: Any, *args: Any, **kwargs: Any) -> None:
        # AOTAutograd's are a subclass, and pass a bypass of this cache on as one of their own.
        if type(self) is not details and (strange := untold()) is not None:
            raise codecache.BypassFxGraphCache(
                f"what {strange!r} traces into graphs reads what opgraft cannot tell"
            )
        initialise(self, *args, **kwargs)
        state = registry_state()
        if state:
            setattr(self, _ATTRIBUTE, state)

    details.__init__ = initialise_and_salt
    _salted = True


def registry_state() -> str:
    """A hash of everything registered that a compiled graph can depend on; empty if nothing is."""
    overrides = [f"{_fingerprint(each)} {_traced_state(each)}" for each in _overrides()]
    if not overrides:
        return ""
    lines = [_version("opgraft"), *overrides, f"exports={exports.are_asked_for()}"]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def untold() -> Override | None:
    """An override of which a graph may hold what cannot be told apart; None if there is none."""
    return next((each for each in _overrides() if _traced_state(each) is None), None)


def _overrides() -> Iterator[Override]:
    for chain in sorted(registry.chains(), key=lambda chain: (chain.op.name, chain.dispatch_key)):
        yield from chain.active


def _traced_state(override: Override) -> str | None:
    """What a graph can hold of an override besides its name, as it is now; None: cannot be told."""
    traced: list[Any] = []
    if override.has_policy("traceable"):
        traced.append(override.impl)
    if override.autograd is not None:
        traced += override.autograd
    if callable(override.cond):  # asked while a graph is made
        traced.append(override.cond)
    if not traced:
        return ""
    found = fingerprint.reach(*traced)
    if found is not None and override.autograd is not None and threads.is_disabled_here(override):
        return f"{found} off"
    return found


def _fingerprint(override: Override) -> str:
    policy, found = _fingerprints.get(override, (None, ""))
    if policy is not override.compile:
        lines = list(_describe(override))
        found = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        _fingerprints[override] = override.compile, found
    return found


def _describe(override: Override) -> Iterator[str]:
    for name in ("op", "dispatch_key", "name", "dsl", "pack", "compile", "takes_keyset"):
        yield f"{name}={getattr(override, name)!r}"
    yield f"version={_version(override.pack) if override.pack else ''}"
    for part in (override.cond, override.impl, override.autograd):
        yield repr(part) if isinstance(part, Condition) else fingerprint.digest(part)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
