"""Packs: distributions that bring overrides, found by entry point.

A pack declares an entry point in the group `opgraft.packs`. Its value is a function without
parameters that registers overrides through the public API. These overrides belong to the pack: they
come after the user's own, and fall back to the native kernel when they fail.

`import torch` activates every installed pack (:mod:`opgraft.autoload`), or those that
`OPGRAFT_PACKS` names. Packs may declare the ops that they override in their metadata, in the groups
`opgraft.ops.KEY`. Where all packs do, `import torch` does not activate them: the first call of such
an op does (:mod:`opgraft.packs.waiting`).
"""

from opgraft.packs.discovery import GROUP, Pack, installed
from opgraft.packs.loading import (
    Owner,
    Status,
    activate,
    activate_or_defer,
    load,
    misdeclared,
    owner,
    owning,
    statuses,
    unregistered,
)

__all__ = [
    "GROUP",
    "Owner",
    "Pack",
    "Status",
    "activate",
    "activate_or_defer",
    "installed",
    "load",
    "misdeclared",
    "owner",
    "owning",
    "statuses",
    "unregistered",
]
