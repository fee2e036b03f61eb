"""What is registered: declarations, what became of each, their chains, the rules that switch them.

No dataclasses here, nor in what else `import torch` imports to load packs: the methods of each are
compiled when it is imported. With named tuples that was half of the whole import.
"""

from opgraft.registry.chains import Chain, Registry, registry
from opgraft.registry.declaration import CompilePolicy, Declaration, OnError, WhenNotReady
from opgraft.registry.override import Override
from opgraft.registry.rules import Rule, Selector, selector_from

__all__ = [
    "Chain",
    "CompilePolicy",
    "Declaration",
    "OnError",
    "Override",
    "Registry",
    "Rule",
    "Selector",
    "WhenNotReady",
    "registry",
    "selector_from",
]
