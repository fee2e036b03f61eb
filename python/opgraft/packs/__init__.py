"""Packs: distributions that bring overrides, found by entry point.

A pack declares an entry point in the group `opgraft.packs`; its value is a function that takes
nothing and registers through the public API. What it registers belongs to the pack: it comes after
the user's own overrides and falls back to the native kernel when it fails.

`import torch` activates every pack that is installed (:mod:`opgraft.autoload`); `OPGRAFT_PACKS`
says which. Where all of them say in their metadata which ops they override, in the groups
`opgraft.ops.KEY`, the first call of one of these does (:mod:`opgraft.packs.waiting`).
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
