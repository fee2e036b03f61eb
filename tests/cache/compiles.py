"""What stands in for CuteDSL: a module that reaches torch alone, as its sources are looked at."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Kind(NamedTuple):
    size: int
    dtype: torch.dtype = torch.float16
    scale: float | None = None


class Compiled:
    """As `cute.compile` returns it."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def __call__(self, called: list[str]) -> None:
        called.append("compiled")

    def export_to_c(self, path: str, *, function_name: str) -> None:
        raise NotImplementedError


compiled: list[Kind] = []


def compile_kind(kind: Kind) -> Any:
    compiled.append(kind)
    return Compiled(kind), [kind.size, 2 * kind.size]


def compile_kind_without_facts(kind: Kind) -> Any:
    return Compiled(kind)


def compile_anything(kind: Any) -> Any:
    compiled.append(kind)
    return Compiled(kind), repr(kind)


compiled_facts: list[Any] = []


def compile_with_facts(kind: Kind) -> Any:
    compiled.append(kind)
    return Compiled(kind), compiled_facts[0]
