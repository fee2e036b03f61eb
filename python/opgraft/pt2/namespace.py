"""`torch.ops.opgraft`: its ops are defined when they are first looked up by name.

Code from a compiler's cache looks them up, and so does an exported program that is being loaded.
Their process may have defined none of them.
"""

from __future__ import annotations

from torch import ops
from torch._ops import OpOverloadPacket, _OpNamespace

from opgraft.pt2 import NAMESPACE


def define_on_lookup() -> None:
    """Let `torch.ops.opgraft.NAME` define what it names."""
    setattr(ops, NAMESPACE, _Namespace(NAMESPACE))


class _Namespace(_OpNamespace):
    # torch derives the names of ops from this module name, and pickles ops by name.
    __module__ = _OpNamespace.__module__

    def __getattr__(self, name: str) -> OpOverloadPacket:
        if "__" not in name.strip("_"):
            return super().__getattr__(name)
        from opgraft.pt2 import opaque

        opaque.define_by_name(name)
        # There is one packet for each name, and defining an op may have made it.
        return self.__dict__.get(name) or super().__getattr__(name)
