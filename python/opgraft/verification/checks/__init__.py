"""The checks of a verification: what an override must do on a sample, and what its op must survive.

A module here registers its checks when it is imported, in the order in which they run.
"""

from __future__ import annotations

from opgraft.verification.checks import (  # isort: skip
    results as results,
    repeated as repeated,
    variants as variants,
    derivatives as derivatives,
    public_function as public_function,
    fake_autocast_compile as fake_autocast_compile,
    distribution as distribution,
    circumstances as circumstances,
    indices as indices,
    threads as threads,
    cuda as cuda,
)
from opgraft.verification.checks.registry import CHECKS, Check

__all__ = ["CHECKS", "Check"]
