"""What is registered: declarations, their state, chains, and the rules that switch overrides.

There are no dataclasses here, nor in the other modules that `import torch` imports to load packs.
Python compiles their methods at import: with named tuples that took half of the whole import.
"""

from opgraft.registry.chains import Chain, Registry, registry
from opgraft.registry.declaration import (
    Autograd,
    CompilePolicy,
    Declaration,
    OnError,
    WhenNotReady,
)
from opgraft.registry.definition import Definition
from opgraft.registry.override import Override
from opgraft.registry.rules import Rule, Selector, selector_from

__all__ = [
    "Autograd",
    "Chain",
    "CompilePolicy",
    "Declaration",
    "Definition",
    "OnError",
    "Override",
    "Registry",
    "Rule",
    "Selector",
    "WhenNotReady",
    "registry",
    "selector_from",
]
