"""Which other kernels are registered at an op and dispatch key with a router, and in which order.

The dispatcher keeps every kernel that was registered at an op and key. The last one is on top, and
it runs. A kernel above our router decides whether calls reach the router at all. The kernel below
is the router's native kernel.
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
from opgraft.router.base import Router

#: The owner of FlashAttention-3 and -4, which torch registers on demand.
FLASH_ATTENTION = "torch.nn.attention.activate_flash_attention_impl"

# A kernel's owner by a part of its origin; the first part that matches counts.
_OWNERS = (
    ("torch/_native/", "torch._native"),
    ("nn/attention/_fa", FLASH_ATTENTION),
    ("/cudnn/torch/", "cudnn.torch"),  # of cudnn-frontend
    ("aten/src/ATen/", "PyTorch"),
    ("torch/_meta_registrations", "PyTorch"),
)


@dataclass(frozen=True)
class Kernel:
    """A kernel that is registered at an op and dispatch key."""

    #: Where it was registered, as torch prints it.
    origin: str

    @property
    def owner(self) -> str:
        """Who registered it: `"PyTorch"`, `"torch._native"`, ...; for a third party, the origin."""
        return next((owner for part, owner in _OWNERS if part in self.origin), self.origin)

    @property
    def is_pytorchs(self) -> bool:
        """Whether it is what stock PyTorch runs."""
        return self.owner == "PyTorch"

    def as_dict(self) -> dict[str, str]:
        return {"owner": self.owner, "origin": self.origin}

    def __str__(self) -> str:
        return self.origin if self.owner == self.origin else f"{self.owner} ({self.origin})"


@dataclass(frozen=True)
class Neighbours:
    """The kernels above and below the router of one op and dispatch key."""

    op: str
    dispatch_key: str
    #: Above the router, in the order of calling: calls reach the router only through them.
    above: tuple[Kernel, ...]
    #: Below the router, beginning with the one that it calls on a miss.
    below: tuple[Kernel, ...]
    #: The DSLs of `torch._native` overrides at this op and key, enabled or not.
    torch_native: tuple[str, ...] = ()
    #: The kernel that the router calls on a miss though it is registered no more; None if it calls
    #: one that is.
    kept: Kernel | None = None
    #: A kernel for all backends that was registered after the router, which goes on calling the one
    #: that it found; None if there is none.
    later: Kernel | None = None

    @property
    def is_alone(self) -> bool:
        """Whether all other kernels are PyTorch's own."""
        others = [*self.above, *self.below, *filter(None, (self.kept, self.later))]
        return all(kernel.is_pytorchs for kernel in others) and not self.torch_native

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
        return {
            "op": self.op,
            "dispatch_key": self.dispatch_key,
            "above": [kernel.as_dict() for kernel in self.above],
            "below": [kernel.as_dict() for kernel in self.below],
            "torch_native": list(self.torch_native),
            "kept": self.kept.as_dict() if self.kept else None,
            "later": self.later.as_dict() if self.later else None,
        }

    def notes(self) -> list[str]:
        """What a user should know of them; nothing where all other kernels are PyTorch's own."""
        notes = []
        if self.above:
            asks = "it is called first, and decides whether they are asked"
            if self.above[0].owner == FLASH_ATTENTION:  # what it does not support is an error
                asks = "it takes every call, and asks none of them"
            notes.append(
                "shadowed by a kernel that was registered on top of the overrides later, "
                f"{self.above[0]}: {asks}"
            )
        if self.kept:
            notes.append(
                f"the native kernel is still {self.kept}, which was registered before the "
                "overrides and is registered no more: they call the copy that they took of it"
            )
        elif self.below and not self.below[0].is_pytorchs:
            notes.append(f"the native kernel is {self.below[0]}, registered before the overrides")
        if self.later:
            notes.append(
                f"a kernel for all backends was registered after the overrides, {self.later}: they "
                "call the earlier one; register them after it, in a new process"
            )
        owners = {kernel.owner for kernel in (*self.above, *self.below)}
        if self.torch_native and "torch._native" not in owners:
            names = ", ".join(self.torch_native)
            notes.append(f"torch._native has overrides here too ({names}), which are switched off")
        return notes

    def __str__(self) -> str:
        below = [f"{self.kept}, deregistered"] if self.kept else map(str, self.below)
        chain = [*map(str, self.above), "opgraft", *below]
        return f"{self.op} at {self.dispatch_key}: {' -> '.join(chain)}"


def neighbours() -> list[Neighbours]:
    """The kernels above and below each installed router, in the order of installation.

    >>> neighbours() == [] or all(isinstance(each, Neighbours) for each in neighbours())
    True
    """
    return [of_chain(chain) for chain in registry.chains() if installed(chain) is not None]


def of_chain(chain: Chain) -> Neighbours:
    """The kernels above and below the installed router of one chain."""
    above: list[Kernel] = []
    below: list[Kernel] = []
    side = above
    for origin in _origins(chain.op, chain.dispatch_key):
        if dispatcher.is_ours(origin):
            side = below
        else:
            side.append(Kernel(origin))
    router = installed(chain)
    kept = _kept(chain, router, below)
    later = None
    if router is not None and not below and router.native_origin and kept is None:
        # There is no kernel at this key itself: it is one for all backends, or a composite one.
        below.append(Kernel(router.native_origin))
        later = _later(chain, router)
    return Neighbours(
        chain.op.name,
        chain.dispatch_key,
        tuple(above),
        tuple(below),
        _torch_native(chain.op, chain.dispatch_key),
        kept,
        later,
    )


def _later(chain: Chain, router: Router) -> Kernel | None:
    """The kernel for all backends, if it is another one than the router calls."""
    _, origin = dispatcher.capture_for_all_backends(chain.op)
    return Kernel(origin) if origin not in ("", router.native_origin) else None


def _kept(chain: Chain, router: Router | None, below: list[Kernel]) -> Kernel | None:
    """The router's native kernel if a third party had registered it, and has deregistered it."""
    if router is None or not router.is_compiled:  # in Python a router notices, and looks again
        return None
    native = Kernel(router.native_origin)
    if not native.origin or native.is_pytorchs or native in below:
        return None
    # A kernel for all backends is at another key.
    dump = torch._C._dispatch_dump(chain.op.name).splitlines()
    others = (line for line in dump if not line.startswith((f"{chain.dispatch_key}:", "debug:")))
    return None if any(native.origin in line for line in others) else native


def _origins(op: Op, dispatch_key: str) -> Iterator[str]:
    """Where each kernel at the key was registered, the one on top first."""
    line = re.compile(rf"^{re.escape(dispatch_key)}(?: \(inactive\))?: (.*?) :: ", re.MULTILINE)
    for match in line.finditer(torch._C._dispatch_dump(op.name)):
        yield match[1]


def _torch_native(op: Op, dispatch_key: str) -> tuple[str, ...]:
    # `import torch` imports it in versions that have it, such as 2.13; nothing else does.
    native = sys.modules.get("torch._native.registry")
    graphs: Any = getattr(native, "_graphs", {})
    namespace = op.name.partition("::")[0]
    name = op.registration_name.removesuffix(".default")
    nodes = list(graphs.get((namespace, name, dispatch_key), ()))
    if namespace == "aten":  # up to 2.13 there is no other, and the keys leave it out
        nodes += graphs.get((name, dispatch_key), ())
    return tuple(dict.fromkeys(str(getattr(node, "dsl_name", "?")) for node in nodes))
