"""CuteDSL: `register_op_override` with the DSL fixed, and functions that are compiled once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opgraft import dsl_utils
from opgraft.dsl import CUTEDSL
from opgraft.registry import Override

if TYPE_CHECKING:
    from opgraft.cache.cutedsl import Functions

__all__ = [
    "Functions",
    "deregister_op_overrides",
    "register_op_override",
    "runtime_available",
    "runtime_version",
]


def __getattr__(name: str) -> Any:
    # Registering overrides needs nothing of the cache of compiled functions; kernels do.
    if name == "Functions":
        from opgraft.cache.cutedsl import Functions

        return Functions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_op_override(
    lib_symbol: str, op_symbol: str, dispatch_key: str, *cond_and_impl: Any, **keywords: Any
) -> Override:
    """:func:`opgraft.register_op_override` for CuteDSL.

    Args:
        lib_symbol: the op's namespace, such as `"aten"`.
        op_symbol: the op's name, with the overload if it is not `default`.
        dispatch_key: the backend, such as `"CUDA"`.
        *cond_and_impl: `impl`, or `cond` and `impl` as `torch._native` has them; by keyword too.
        **keywords: everything else that :func:`opgraft.register_op_override` takes, and
            `allow_multiple_override`, which changes nothing: an op can have several overrides.

    Returns:
        The override. Where CuteDSL is not installed it is registered as unavailable and never runs.

    Raises:
        RegistrationError: as :func:`opgraft.register_op_override` does, whether or not CuteDSL is
            there.

    >>> def bmm(keyset, self, mat2):
    ...     return self @ mat2
    >>> register_op_override("aten", "bmm", "CUDA", bmm, name="doc").remove()
    """
    return dsl_utils.register(CUTEDSL, lib_symbol, op_symbol, dispatch_key, cond_and_impl, keywords)


def runtime_available() -> bool:
    """Whether CuteDSL is installed, found without importing it."""
    return CUTEDSL.available()


def runtime_version() -> str | None:
    """The installed version of CuteDSL; None where it is missing."""
    return CUTEDSL.version()


def deregister_op_overrides() -> None:
    """Remove every override that is registered for CuteDSL."""
    dsl_utils.deregister(CUTEDSL)
