"""Overrides that stand in for others while `opgraft tune` watches or measures them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opgraft.registration import register_op_override
from opgraft.registry import Override

#: A priority that no other override has.
FIRST = 2**31 - 1


def register(override: Override, impl: Callable[..., Any], label: str, **declared: Any) -> Override:
    """Register an override of the same op and dispatch key. Whoever calls this removes it.

    Args:
        override: what it stands in for. Its owner is in the name, as overrides of two packs may
            have the same one.
        impl: as in `register_op_override`, like `declared`.
        label: what it is for.
        **declared: its condition and options.
    """
    return register_op_override(
        override.op.partition("::")[0],
        override.operator.registration_name,
        override.dispatch_key,
        impl,
        name=f"{override.name} of {override.pack or 'user'} ({label})",
        **declared,
    )
