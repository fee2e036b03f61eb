"""`torch.ops.opgraft`: ops that are defined when somebody asks for them by name.

Code from a compiler's cache asks, and an exported program that is being loaded, in processes that
have defined none of them.
"""

from __future__ import annotations

from torch import ops
from torch._ops import OpOverloadPacket, _OpNamespace

from opgraft.pt2 import NAMESPACE


def answer_by_name() -> None:
    """Let `torch.ops.opgraft.NAME` define what it names."""
    setattr(ops, NAMESPACE, _Namespace(NAMESPACE))


class _Namespace(_OpNamespace):
    # torch makes the names of its ops, under which they are pickled, of this.
    __module__ = _OpNamespace.__module__

    def __getattr__(self, name: str) -> OpOverloadPacket:
        if "__" not in name.strip("_"):
            return super().__getattr__(name)
        from opgraft.pt2 import opaque

        opaque.define_by_name(name)
        # There is one packet, and defining an op may have made it.
        return self.__dict__.get(name) or super().__getattr__(name)
