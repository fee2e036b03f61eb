"""The torch_dispatch rule by which an overridden op enters a compiled graph.

`torch.compile` functionalizes ops before anything decomposes them: in FunctionalTensorMode, below
autograd. A rule for an op and that mode sees each call, in the backward too. It decides what the
graph contains in its place: :func:`opgraft.pt2.graph.substitute`.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch
from torch._ops import OpOverload

from opgraft.ops.schema import Op, qualified_name, resolve

log = logging.getLogger("opgraft.pt2")

_lock = threading.Lock()
#: By name. An op that is defined anew keeps its rule.
_with_rule: set[str] = set()
#: By namespace. They are kept alive: torch drops a rule together with its library.
_libraries: dict[str, torch.library.Library] = {}


def install(op: Op) -> None:
    """Let compiled graphs see that an op is overridden. It is idempotent and costs microseconds."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    with _lock:
        if op.name in _with_rule:
            return
        _with_rule.add(op.name)
        namespace = op.name.split("::", 1)[0]
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        try:
            torch.library.register_torch_dispatch(
                op.name, FunctionalTensorMode, _apply, lib=_libraries[namespace]
            )
        except RuntimeError as error:
            # Its library has a rule of its own (torch.library.triton_op).
            log.info("compiled graphs keep the rule of %s's own library: %s", op.name, error)


def _apply(mode: Any, func: OpOverload, *call: Any) -> Any:
    from opgraft.pt2.graph import substitute  # imports much, so only at the first compile

    # torch may give the former overload of an op that was defined anew.
    return substitute(resolve(qualified_name(func)), mode, func, *call)
