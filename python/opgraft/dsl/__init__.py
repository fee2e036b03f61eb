"""What a DSL is: whether it is there, in which version, found without importing it.

Importing a DSL costs between 0.2 s (Triton) and 3.6 s (CuteDSL with its libraries), so only the
first hit of an impl pays for it. Nothing here pins a version: a pin that a new release does not
meet silently turns every override off; packs state the range that they need themselves.
"""

from __future__ import annotations

import importlib.util
from functools import cache

from opgraft.base import distributions

__all__ = ["CUTEDSL", "KNOWN", "TRITON", "Dsl", "find"]


class Dsl:
    """A kernel language that is distributed as Python packages.

    Attributes:
        name: what `dsl=` and `OPGRAFT_DISABLE` say.
        modules: the top-level modules that must be importable, all of them.
        distributions: which may carry the version; the first that is installed does.
        to_launch: those of `modules` that launching what was compiled before needs.
        install: what to tell a user who lacks it.
    """

    def __init__(
        self,
        *,
        name: str,
        modules: tuple[str, ...],
        to_launch: tuple[str, ...],
        distributions: tuple[str, ...],
        install: str,
    ) -> None:
        self.name = name
        self.modules = modules
        self.to_launch = to_launch
        self.distributions = distributions
        self.install = install

    def missing(self) -> str | None:
        """Why it cannot be used here, with what to do about it; None where it can."""
        absent = [module for module in self.modules if not _is_importable(module)]
        if not absent:
            return None
        return f"{self.name} is missing (no module {', '.join(absent)}): {self.install}"

    def available(self) -> bool:
        return self.missing() is None

    def version(self) -> str | None:
        """The installed version; None where it is missing or was installed without metadata."""
        if not self.available():
            return None
        return next(filter(None, map(distributions.version, self.distributions)), None)


TRITON = Dsl(
    name="triton",
    modules=("triton",),
    to_launch=("triton",),
    distributions=("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu"),
    install="pip install 'opgraft[triton]'",
)
CUTEDSL = Dsl(
    name="cutedsl",
    # tvm-ffi launches what CuteDSL compiled: without it a launch costs 13 to 45 us instead of 6.
    modules=("cutlass", "tvm_ffi"),
    to_launch=("tvm_ffi",),
    distributions=("nvidia-cutlass-dsl",),
    install="pip install 'opgraft[cutedsl]'",
)

KNOWN = (TRITON, CUTEDSL)


def find(name: str) -> Dsl | None:
    """The DSL of that name; None for a label that opgraft knows nothing about.

    >>> find("triton").name
    'triton'
    """
    return next((dsl for dsl in KNOWN if dsl.name == name), None)


@cache
def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a half-installed package, or a module without a spec
        return False
