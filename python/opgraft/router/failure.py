"""Failures of impls: fallback and quarantine."""

from __future__ import annotations

import logging
from collections.abc import Hashable

import torch

from opgraft.base import env, interrupts
from opgraft.errors import warn_caller
from opgraft.ops.schema import Call
from opgraft.registry import Override, registry
from opgraft.router import device

log = logging.getLogger(__name__)

#: Kinds of calls per override that can be quarantined. Past that the override is given up.
MAX_QUARANTINED = 128
#: An override is given up after so many kinds failed, if none ever worked. Then something that it
#: needs is missing (a host compiler, `Python.h`, shared memory), and each further attempt may
#: compile for seconds only to fail.
MAX_FAILED_AT_FIRST = 3

# Messages of the CUDA driver when the context is lost. Whatever runs next, native included, fails
# or works on memory that was overwritten.
_STICKY = (
    "illegal memory access",
    "illegal instruction",
    "illegal state",
    "misaligned address",
    "invalid address space",
    "invalid program counter",
    "device-side assert triggered",  # torch says of any error how to compile such assertions in
    "unspecified launch failure",
    "launch timed out",
    "hardware stack error",
    "hardware exception",
    "memory access fault",
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "contained error",
    "unknown error",
    "context is destroyed",
    "driver shutting down",
)
# CUDA's error codes for launches that were refused before anything ran: bad values, a configuration
# that this device lacks, no kernel image for it, a PTX compiler that is too old or missing, too
# many resources. After any other error with a code the context may be lost.
_REFUSED_LAUNCHES = frozenset({1, 9, 98, 200, 209, 218, 221, 222, 223, 300, 301, 302, 303, 701})


def may_fall_back(override: Override, error: Exception, call: Call, *, capturing: bool) -> bool:
    """Whether the native kernel can run instead of an impl that raised.

    It cannot when the author or `OPGRAFT_STRICT` asks for errors. Nor can it for a call that writes
    to its arguments, declared or not: the impl may have written some of them already. Nor when
    memory is short, because the caller must know. Nor when the device is lost. Nor while a CUDA
    graph is being captured: the impl's launches are in the graph already. Nor when a signal handler
    raised, such as a time limit: the impl has not failed, and the caller waits for that exception.
    """
    if override.state.raises_errors or override.on_error != "fallback" or env.strict():
        return False
    if call.writes or capturing or interrupts.is_interrupt(error):
        return False
    if device.is_out_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) in _REFUSED_LAUNCHES
    return not loses_device(str(error))


def loses_device(message: str) -> bool:
    """Whether an error's message says that the process cannot use the device any more.

    >>> loses_device("CUDA error: an illegal memory access was encountered")
    True
    >>> loses_device("CUDA error: out of memory. Compile with `TORCH_USE_CUDA_DSA` to enable "
    ...              "device-side assertions.")
    False
    """
    message = message.lower()
    return any(sign in message for sign in _STICKY)


def quarantine(override: Override, kind: Hashable, error: Exception) -> None:
    """Keep the override from calls of this kind, and say so once."""
    state = override.state
    if kind in state.quarantined or state.given_up is not None:
        return
    reason = f"{type(error).__name__}: {error}"
    count = state.quarantine(kind, reason)
    log.info("quarantined %r for %s", override.name, kind, exc_info=error)
    consequence = "for calls of this kind from now on"
    never_worked = state.never_worked
    is_hopeless = count >= MAX_QUARANTINED or (never_worked and count >= MAX_FAILED_AT_FIRST)
    # One with a derivative keeps its place in checkpoints, whose second forward may be to come.
    if is_hopeless and override.autograd is None:
        # Removed from its chain, so that no call spends time on it.
        registry.give_up(override, f"it failed for {count} kinds of calls, last with {reason}")
        consequence = f"for all calls from now on, as it failed for {count} kinds of them"
        consequence += " and never worked" if never_worked else ""
    warn_caller(
        f"override {override.name!r} of {override.op} at {override.dispatch_key} failed; the "
        f"native kernel runs instead, {consequence}. {reason}"
    )
