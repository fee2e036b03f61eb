"""What `triton_utils` and `cutedsl_utils` share: registration for one DSL, in both forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opgraft.dsl import Dsl
from opgraft.errors import RegistrationError
from opgraft.registration import register_op_override
from opgraft.registry import Override, Selector, registry


def register(
    dsl: Dsl,
    lib_symbol: str,
    op_symbol: str,
    dispatch_key: str,
    positional: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Override:
    """Register for `dsl`, with `(impl)` or `(cond, impl)` after the dispatch key, or by keyword."""
    # torch._native has this parameter; here an op can always have several overrides.
    keywords.pop("allow_multiple_override", None)
    if "dsl" in keywords:
        raise RegistrationError(f"dsl= is fixed to {dsl.name!r} here: use opgraft's own function")
    names = ("impl",) if len(positional) == 1 and "impl" not in keywords else ("cond", "impl")
    if len(positional) > len(names):
        raise RegistrationError(
            "after (lib_symbol, op_symbol, dispatch_key) comes impl, or cond and impl, and the "
            f"rest by keyword; got {len(positional)} more positional arguments"
        )
    for name, value in zip(names, positional, strict=False):
        if name in keywords:
            raise RegistrationError(f"{name} is given twice, by position and by keyword")
        keywords[name] = value
    impl: Callable[..., Any] | None = keywords.pop("impl", None)
    if impl is None:
        raise RegistrationError(f"impl is missing for {lib_symbol}::{op_symbol}")
    return register_op_override(lib_symbol, op_symbol, dispatch_key, impl, dsl=dsl.name, **keywords)


def deregister(dsl: Dsl) -> None:
    """Remove every override of `dsl`."""
    for override in registry.overrides(Selector(dsl=dsl.name)):
        override.remove()
