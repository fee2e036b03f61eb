"""The rule by which an overridden op enters a compiled graph.

`torch.compile` makes a graph of ops functional before anything decomposes them, in
FunctionalTensorMode, below autograd. A rule for an op and that mode sees each call, of the backward
too, and says what stands in the graph for it: :func:`opgraft.pt2.graph.substitute`.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

import torch

from opgraft.ops.schema import Op

log = logging.getLogger("opgraft.pt2")

_lock = threading.Lock()
_ruled: set[Op] = set()
#: By namespace, kept for good: a rule goes with its library.
_libraries: dict[str, torch.library.Library] = {}


def install(op: Op) -> None:
    """Let compiled graphs see that an op is overridden. Idempotent, and costs microseconds."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    with _lock:
        if op in _ruled:
            return
        _ruled.add(op)
        namespace = op.name.split("::", 1)[0]
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        try:
            torch.library.register_torch_dispatch(
                op.name, FunctionalTensorMode, partial(_apply, op), lib=_libraries[namespace]
            )
        except RuntimeError as error:
            # Its library traces it in a way of its own (torch.library.triton_op).
            log.info("compiled graphs keep %s as its library has it: %s", op.name, error)


def _apply(op: Op, *call: Any) -> Any:
    from opgraft.pt2.graph import substitute  # and all that it takes, at the first compile

    return substitute(op, *call)
