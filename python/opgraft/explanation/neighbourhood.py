"""Who else has a kernel at an op and dispatch key of ours, and in which order they are called.

The dispatcher keeps every kernel that was registered at an op and key, the last one on top; that
one runs. So a kernel above our router decides whether calls reach it at all, and one below is what
"native" means to it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opgraft.ops.schema import Op
from opgraft.registry import Chain, registry
from opgraft.router import dispatcher, installed

# What a kernel's origin tells of its owner; the first that is found in it.
_OWNERS = (
    ("torch/_native/", "torch._native"),
    ("nn/attention/_fa", "torch.nn.attention.activate_flash_attention_impl"),
    ("aten/src/ATen/", "PyTorch"),
    ("torch/_meta_registrations", "PyTorch"),
)


@dataclass(frozen=True)
class Kernel:
    """Somebody's kernel at an op and dispatch key."""

    #: Where it was registered, as torch says it.
    origin: str

    @property
    def owner(self) -> str:
        """Whose it is: `"PyTorch"`, `"torch._native"`, ...; a third party's is its origin."""
        return next((owner for part, owner in _OWNERS if part in self.origin), self.origin)

    @property
    def is_pytorchs(self) -> bool:
        """Whether it is what stock PyTorch runs."""
        return self.owner == "PyTorch"

    def __str__(self) -> str:
        return self.origin if self.owner == self.origin else f"{self.owner} ({self.origin})"


@dataclass(frozen=True)
class Neighbours:
    """Who stands above and below the router of one op and dispatch key."""

    op: str
    dispatch_key: str
    #: On top of the router, the first to be called first: calls reach us only through them.
    above: tuple[Kernel, ...]
    #: Under it, from the one that it calls on a miss downwards.
    below: tuple[Kernel, ...]
    #: The DSLs of `torch._native` overrides at this op and key, whether or not they are in.
    torch_native: tuple[str, ...] = ()

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody but PyTorch itself."""
        return not self.above and all(k.is_pytorchs for k in self.below) and not self.torch_native

    def as_dict(self) -> dict[str, Any]:
        """The same for machines: what `json` can write."""
        return {
            "op": self.op,
            "dispatch_key": self.dispatch_key,
            "above": [{"owner": k.owner, "origin": k.origin} for k in self.above],
            "below": [{"owner": k.owner, "origin": k.origin} for k in self.below],
            "torch_native": list(self.torch_native),
        }

    def notes(self) -> list[str]:
        """What a user should know of them; nothing where there is nobody but PyTorch."""
        notes = []
        if self.above:
            notes.append(
                "shadowed by a kernel that was put on top of the overrides later, "
                f"{self.above[0]}: it is called first, and decides whether they are asked"
            )
        if self.below and not self.below[0].is_pytorchs:
            notes.append(f"what runs as native is {self.below[0]}, registered before the overrides")
        owners = {kernel.owner for kernel in (*self.above, *self.below)}
        if self.torch_native and "torch._native" not in owners:
            names = ", ".join(self.torch_native)
            notes.append(f"torch._native has overrides here too ({names}), which are switched off")
        return notes

    def __str__(self) -> str:
        chain = [*map(str, self.above), "opgraft", *map(str, self.below)]
        return f"{self.op} at {self.dispatch_key}: {' -> '.join(chain)}"


def neighbours() -> list[Neighbours]:
    """Who stands above and below each router that is installed, in the order of installation.

    >>> neighbours() == [] or all(isinstance(each, Neighbours) for each in neighbours())
    True
    """
    return [of_chain(chain) for chain in registry.chains() if installed(chain) is not None]


def of_chain(chain: Chain) -> Neighbours:
    """Who stands above and below the router of one chain, which is installed."""
    above: list[Kernel] = []
    below: list[Kernel] = []
    side = above
    for origin in _origins(chain.op, chain.dispatch_key):
        if dispatcher.is_ours(origin):
            side = below
        else:
            side.append(Kernel(origin))
    router = installed(chain)
    if router is not None and not below and router.native_origin:
        # No kernel at this very key: one for all backends, or for composite ops.
        below.append(Kernel(router.native_origin))
    return Neighbours(
        chain.op.name,
        chain.dispatch_key,
        tuple(above),
        tuple(below),
        _torch_native(chain.op, chain.dispatch_key),
    )


def _origins(op: Op, dispatch_key: str) -> Iterator[str]:
    """Where each kernel at the key was registered, the one on top first."""
    line = re.compile(rf"^{re.escape(dispatch_key)}(?: \(inactive\))?: (.*?) :: ", re.MULTILINE)
    for match in line.finditer(torch._C._dispatch_dump(op.name)):
        yield match[1]


def _torch_native(op: Op, dispatch_key: str) -> tuple[str, ...]:
    # torch 2.13 has it; it is imported by `import torch` where it exists, and by nobody else.
    native = sys.modules.get("torch._native.registry")
    graphs = getattr(native, "_graphs", {})
    nodes = graphs.get((op.registration_name.removesuffix(".default"), dispatch_key), ())
    if not op.name.startswith("aten::"):
        return ()
    return tuple(dict.fromkeys(str(getattr(node, "dsl_name", "?")) for node in nodes))
