"""Overrides written in Triton: `register_op_override` with the DSL fixed."""

from __future__ import annotations

from typing import Any

from opgraft import dsl_utils
from opgraft.base import env
from opgraft.base.traced import is_traced
from opgraft.dsl import TRITON
from opgraft.registry import Override

__all__ = [
    "deregister_op_overrides",
    "interpreted",
    "is_traced",
    "register_op_override",
    "runtime_available",
    "runtime_version",
]


def register_op_override(
    lib_symbol: str, op_symbol: str, dispatch_key: str, *cond_and_impl: Any, **keywords: Any
) -> Override:
    """:func:`opgraft.register_op_override` for Triton.

    Args:
        lib_symbol: the op's namespace, such as `"aten"`.
        op_symbol: the op's name, with the overload if it is not `default`.
        dispatch_key: the backend, such as `"CUDA"`.
        *cond_and_impl: `impl`, or `cond` and `impl` as `torch._native` has them; by keyword too.
        **keywords: everything else that :func:`opgraft.register_op_override` takes, and
            `allow_multiple_override`, which changes nothing: an op can have several overrides.

    Returns:
        The override. Where Triton is not installed it is registered as unavailable and never runs.

    Raises:
        RegistrationError: as :func:`opgraft.register_op_override` does, whether or not Triton is
            there.

    >>> def bmm(keyset, self, mat2):
    ...     return self @ mat2
    >>> register_op_override("aten", "bmm", "CUDA", bmm, name="doc").remove()
    """
    return dsl_utils.register(TRITON, lib_symbol, op_symbol, dispatch_key, cond_and_impl, keywords)


def runtime_available() -> bool:
    """Whether Triton is installed, found without importing it."""
    return TRITON.available()


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU: `TRITON_INTERPRET=1`.

    A pack then registers at the `CPU` key, to be tried out where there is no GPU. Asking Triton
    itself would import it.

    >>> isinstance(interpreted(), bool)
    True
    """
    return env.interprets_triton()


def runtime_version() -> str | None:
    """The installed version of Triton; None where it is missing."""
    return TRITON.version()


def deregister_op_overrides() -> None:
    """Remove every override that is registered for Triton."""
    dsl_utils.deregister(TRITON)
