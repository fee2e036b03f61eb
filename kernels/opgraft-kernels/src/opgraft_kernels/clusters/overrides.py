"""Registers what runs over clusters. Imports no DSL."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from opgraft import Override, cutedsl_utils

__all__ = ["OverClusters", "register"]


class OverClusters(NamedTuple):
    """One direction of a norm: its op in `aten`, and what takes which of the op's calls."""

    op: str
    impl: Callable[..., Any]
    condition: Any
    unplanned: Any = None  # which of them are worth a launch from Python; all of them by default
    compile: Any = "auto"


def register(norm: str, forward: OverClusters, backward: OverClusters) -> list[Override]:
    """Register both directions of a norm at CUDA, before its Triton kernels.

    Args:
        norm: the name of its folder.
        forward: what takes the forward op's calls.
        backward: what takes the backward op's.
    """
    return [
        cutedsl_utils.register_op_override(
            "aten",
            each.op,
            "CUDA",
            each.impl,
            cond=each.condition,
            name=f"opgraft_kernels.{norm}.{direction}_by_cluster",
            priority=1,
            launch_plan=True,
            unplanned=each.unplanned,
            compile=each.compile,
            samples=_samples(norm) if each is forward else None,
        )
        for direction, each in (("forward", forward), ("backward", backward))
    ]


def _samples(norm: str) -> Callable[[torch.device], Iterable[dict[str, Any]]]:
    def samples(device: torch.device) -> Iterable[dict[str, Any]]:
        from .samples import samples

        return samples(norm == "layer_norm", device)

    return samples
