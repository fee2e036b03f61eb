"""Faults planted in overrides that are right but for them, and overrides that are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import opgraft

Impl = Callable[..., Any]
#: Makes an impl with a state of its own.
Maker = Callable[[], Impl]


@dataclass(frozen=True)
class Planted:
    """An override to verify.

    Attributes:
        name: what is wrong with it, in words.
        op: what it overrides, at CPU.
        check: the check that catches it; None for what is right, or no worse than rounding.
        make: makes the impl.
        cond: of the override; None: it takes every call.
    """

    name: str
    op: str
    check: str | None
    make: Maker
    cond: Any = None

    @contextmanager
    def op_defined(self) -> Iterator[None]:
        """While this lasts, the op is there that no library but this one has."""
        if self.op.startswith("aten::"):
            yield
            return
        namespace, _, symbol = self.op.partition("::")
        library = torch.library.Library(namespace, "DEF")
        library.define(f"{symbol}(Tensor self) -> Tensor")
        library.impl(symbol, torch.neg, "CPU")
        try:
            yield
        finally:
            library._destroy()

    def register(self) -> opgraft.Override:
        namespace, _, symbol = self.op.partition("::")
        return opgraft.register_op_override(
            namespace,
            symbol,
            "CPU",
            self.make(),
            cond=self.cond,
            unconditional_override=self.cond is None,
            name=self.name,
        )


FAULTS: list[Planted] = []
RIGHT: list[Planted] = []


def fault(op: str, check: str | None, *, cond: Any = None) -> Callable[[Maker], Maker]:
    """Plant a fault: the maker's name says what it is, `check` what catches it."""

    def plant(make: Maker) -> Maker:
        FAULTS.append(Planted(_words(make), op, check, make, cond))
        return make

    return plant


def right(op: str, *, cond: Any = None) -> Callable[[Maker], Maker]:
    """An override that has to pass."""

    def keep(make: Maker) -> Maker:
        RIGHT.append(Planted(_words(make), op, None, make, cond))
        return make

    return keep


def _words(make: Maker) -> str:
    return make.__name__.replace("_", " ")
