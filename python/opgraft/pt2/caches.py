"""Makes what is registered part of the keys of the compiler's caches.

Inductor's graph cache and AOTAutograd's cache keep compiled code on disk, for later processes and
for other machines. Their keys know nothing about overrides: a process without an override would
find code that was compiled with it, and the other way round. So both keys get what is registered:
the names, order, policies and conditions of the enabled overrides, and the code of their impls.
Where no override is enabled, the keys are those of stock PyTorch.

Code that is traced into graphs counts with everything that it can read, as it is at each compile.
Sometimes that cannot be determined. Then AOTAutograd's cache is bypassed, because its key is made
before anything is traced. Inductor's cache still works: its key holds the traced graph.
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

#: The attribute of `FxGraphHashDetails` that holds what is registered.
_DETAILS_ATTRIBUTE = "opgraft_registry"

_salted = False
#: With the policy that each was made for: benchmarks and tests assign other policies.
_fingerprints: WeakKeyDictionary[Override, tuple[object, str]] = WeakKeyDictionary()


def are_salted() -> bool:
    """Whether the keys of the caches hold what is registered, as far as the caches are loaded."""
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
            "opgraft does not know how torch %s keys its compiler caches: overrides stay out of "
            "compiled graphs",
            torch.__version__,
        )
        return
    initialise = details.__init__

    @functools.wraps(initialise)
    def initialise_and_salt(self: Any, *args: Any, **kwargs: Any) -> None:
        # AOTAutograd's details are a subclass. It takes a bypass of this cache for one of its own.
        if type(self) is not details and (unknown := override_with_unknown_state()) is not None:
            raise codecache.BypassFxGraphCache(
                f"opgraft cannot determine everything that {unknown!r} traces into graphs"
            )
        initialise(self, *args, **kwargs)
        state = registry_state()
        if state:
            setattr(self, _DETAILS_ATTRIBUTE, state)

    details.__init__ = initialise_and_salt
    _salted = True


def registry_state() -> str:
    """A hash of all registered state that a compiled graph can depend on; empty without any."""
    overrides = [f"{_fingerprint(each)} {_traced_state(each)}" for each in _overrides()]
    if not overrides:
        return ""
    lines = [_version("opgraft"), *overrides, f"exports={exports.in_scope()}"]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def override_with_unknown_state() -> Override | None:
    """An override whose traced code reads what cannot be hashed; None if there is none."""
    return next((each for each in _overrides() if _traced_state(each) is None), None)


def _overrides() -> Iterator[Override]:
    for chain in sorted(registry.chains(), key=lambda chain: (chain.op.name, chain.dispatch_key)):
        yield from chain.active


def _traced_state(override: Override) -> str | None:
    """A hash of an override's code that a graph can hold, as it is now; None: cannot be hashed."""
    traced: list[Any] = []
    if override.has_policy("traceable"):
        traced.append(override.impl)
    # A graph that leaves the op to the compiler leaves it its derivative.
    derivative = None if override.has_policy("inductor") else override.derivative
    if derivative is not None:
        traced += derivative
    if callable(override.cond):  # it is evaluated while a graph is traced
        traced.append(override.cond)
    if not traced:
        return ""
    digest = fingerprint.digest_reachable(*traced)
    if digest is not None and derivative is not None and threads.is_disabled_here(override):
        return f"{digest} off"
    return digest


def _fingerprint(override: Override) -> str:
    policy, digest = _fingerprints.get(override, (None, ""))
    if policy is not override.compile:
        lines = list(_describe(override))
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        _fingerprints[override] = override.compile, digest
    return digest


def _describe(override: Override) -> Iterator[str]:
    for name in ("op", "dispatch_key", "name", "dsl", "pack", "compile", "takes_keyset"):
        yield f"{name}={getattr(override, name)!r}"
    yield f"version={_version(override.pack) if override.pack else ''}"
    yield f"tables={override.decisions.digest if override.decisions else ''}"
    for part in (override.cond, override.impl, override.autograd):
        yield repr(part) if isinstance(part, Condition) else fingerprint.digest_code(part)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
