"""How the pack's ops are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from opgraft import Crossover, Override, cutedsl_utils, triton_utils

__all__ = ["register_op"]


def register_op(
    op: str,
    dispatch_key: str,
    impl: Callable[..., Any],
    *,
    name: str,
    cond: Any,
    crossover: Callable[[], Crossover | None] | None = None,
    by_table: bool = True,
    namespace: str = "aten",
    dsl: Literal["triton", "cutedsl"] = "triton",
    **options: Any,
) -> Override:
    """Register an override of an op of ATen, or of one that the pack defines.

    Args:
        op: the op's name.
        dispatch_key: ``"CUDA"``, or ``"CPU"`` (the interpreter).
        impl: the kernel behind it, which `opgraft.lazy` imports at the first call.
        name: the override's, in this package.
        cond: the calls that the impl is right for.
        crossover: returns on what it depends whether it is faster than native's. It is not called
            for the interpreter, which launches nothing that could be recorded or measured.
        by_table: whether measured tables say which calls are taken on CUDA; else all that the impl
            is right for, as a benchmark wants them.
        namespace: of the op.
        dsl: what the impl is written in.
        options: as `opgraft.register_op_override` has them.
    """
    if dispatch_key == "CUDA":
        measured = crossover() if crossover is not None and by_table else None
        options = {"launch_plan": True, "crossover": measured, **options}
    utils = triton_utils if dsl == "triton" else cutedsl_utils
    return utils.register_op_override(
        namespace,
        op,
        dispatch_key,
        impl,
        cond=cond,
        name=f"opgraft_kernels.{name}",
        **options,
    )
