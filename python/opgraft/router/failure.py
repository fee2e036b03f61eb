"""What happens when an impl raises."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable

import torch

from opgraft import env
from opgraft.errors import OverrideWarning
from opgraft.registry import Override

log = logging.getLogger(__name__)

#: Signatures per override that can be quarantined; past that the override fails everywhere.
MAX_QUARANTINED = 128

# What the CUDA driver says when the context is lost: whatever runs next, native included, fails or,
# worse, works on memory that was overwritten.
_STICKY = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "hardware stack error",
    "invalid program counter",
    "uncorrectable ecc",
)
_OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


def may_fall_back(override: Override, error: Exception, *, capturing: bool) -> bool:
    """Whether the native kernel can run instead of an impl that raised.

    Not when the author or `OPGRAFT_STRICT` wants errors; not for an op that writes to its
    arguments, which may be half written; not when memory is short, because the caller must learn
    that; not when the device is lost; not while a CUDA graph is being captured, because the impl's
    launches are in the graph already.
    """
    if override.on_error != "fallback" or env.strict() or override.operator.mutates or capturing:
        return False
    if isinstance(error, (*_OUT_OF_MEMORY, torch.AcceleratorError)):
        return False
    message = str(error).lower()
    return "out of memory" not in message and not any(sign in message for sign in _STICKY)


def quarantine(override: Override, signature: Hashable, error: Exception) -> None:
    """Keep the override from calls of this signature, and say so once."""
    if signature in override.quarantined:
        return
    reason = f"{type(error).__name__}: {error}"
    if len(override.quarantined) < MAX_QUARANTINED:
        override.quarantined[signature] = reason
    log.info("quarantined %r for %s", override.name, signature, exc_info=error)
    warnings.warn(
        f"override {override.name!r} of {override.op} at {override.dispatch_key} failed; the "
        f"native kernel runs instead, for calls of this kind from now on. {reason}",
        OverrideWarning,
        stacklevel=3,
    )
