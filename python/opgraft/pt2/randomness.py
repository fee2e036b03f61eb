"""Keeps the compiler from merging two calls of a random opaque op into one.

Most of PT2 uses the tag `nondeterministic_seeded`, which an opaque op has from the op that it
stands for: dead-code elimination, constant folding, checkpointing that saves the generator's state,
the order of random calls. Some passes know random ops by name instead, from lists of `aten` ops.
They would take two equal calls of an opaque op for one value:

- common-subexpression elimination, AOTAutograd's (`torch._functorch.compile_utils`) and that of
  exported programs (`torch.fx.passes.dialect.common.cse_pass`);
- the partitioner (`torch._functorch.partitioners`): with a memory budget, the backward may
  recompute what the forward has computed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import _disable_current_modes

from opgraft.base import imports
from opgraft.ops.schema import Op

_ELIMINATIONS = (
    "torch._functorch.compile_utils",
    "torch.fx.passes.dialect.common.cse_pass",
)
_PARTITIONERS = "torch._functorch.partitioners"

#: Not random, but each call returns other memory.
_FRESH_MEMORY = frozenset({"aten::empty"})

#: Opaque ops whose equal calls are different values. It only grows, under the lock of
#: :mod:`opgraft.pt2.opaque`.
_never_merged: set[OpOverloadPacket] = set()
#: The compiler's own collections of random ops, from the modules that are loaded.
_random_op_lists: list[Any] = []
_attached = False


def forbid_merging(opaque: OpOverload, op: Op) -> None:
    """Tell the compiler not to merge equal calls of an opaque op, if they are different values."""
    packet = opaque._overloadpacket
    if packet in _never_merged or not (op.is_random or op.overload._schema.name in _FRESH_MEMORY):
        return
    _never_merged.add(packet)
    for each in _random_op_lists:
        _append(packet, each)
    _attach()


def obstacle(op: Op) -> str | None:
    """Why no graph may contain the opaque op of a random op; None where it may."""
    if op.is_random and _cse_merges_random_ops():
        return f"torch {torch.__version__} would merge two random calls of it into one"
    return None


@functools.cache
def _cse_merges_random_ops() -> bool:
    """Whether the compiler merges two calls of a random op although it was told not to.

    This is tried out, because torch does not document how it recognises random ops.
    """
    from torch._functorch.compile_utils import fx_graph_cse

    # Looking the op up defines it.
    draw = torch.ops.opgraft.aten__bernoulli.default
    with _disable_current_modes():
        graph = torch.fx.Graph()
        argument = graph.placeholder("argument")
        graph.output(tuple(graph.call_function(draw, (argument,)) for _ in range(2)))
        return len(fx_graph_cse(graph).find_nodes(op="call_function", target=draw)) < 2


def _attach() -> None:
    global _attached
    if _attached:
        return
    _attached = True
    for name in _ELIMINATIONS:
        imports.after(name, _extend_cse)
    imports.after(_PARTITIONERS, _extend_partitioner)


def _extend_cse(module: ModuleType) -> None:
    ops = getattr(module, "rand_ops", None)
    # A list or a set in torch 2.11 to 2.13. A version without it is tried out by :func:`obstacle`.
    if isinstance(ops, (list, set)):
        _random_op_lists.append(ops)
        for packet in _never_merged:
            _append(packet, ops)


def _append(packet: OpOverloadPacket, ops: Any) -> None:
    if packet in ops:
        return
    if isinstance(ops, list):
        ops.append(packet)
    else:
        ops.add(packet)


def _extend_partitioner(partitioners: ModuleType) -> None:
    """Keep the partitioner from recomputing random values that cannot be reproduced.

    Checkpointing recomputes them from the generator's saved state, which is right.
    """
    types: Any = getattr(partitioners, "OpTypes", None)
    is_random_op = getattr(types, "is_random", None)
    if is_random_op is not None:

        @functools.wraps(is_random_op)
        def is_random_op_or_ours(self: Any, node: torch.fx.Node) -> bool:
            return _is_never_merged(node) or bool(is_random_op(self, node))

        types.is_random = is_random_op_or_ours

    choose: Any = getattr(partitioners, "choose_saved_values_set", None)
    if choose is not None:
        # With a small memory budget the partitioner lifts its bans on recomputation.
        @functools.wraps(choose)
        def choose_and_save_random(joint_graph: torch.fx.Graph, *args: Any, **kwargs: Any) -> Any:
            chosen = choose(joint_graph, *args, **kwargs)
            return list(
                dict.fromkeys((*chosen, *_random_nodes_to_save(joint_graph, *args, **kwargs)))
            )

        partitioners.choose_saved_values_set = choose_and_save_random  # type: ignore[attr-defined]


def _random_nodes_to_save(
    joint_graph: torch.fx.Graph, node_info: Any, *_: Any, **__: Any
) -> Iterator[torch.fx.Node]:
    """The random nodes of the forward; those that the backward does not use are not saved."""
    from torch._functorch.partitioners import must_recompute

    for node in joint_graph.nodes:
        if _is_never_merged(node) and node_info.is_required_fw(node) and not must_recompute(node):
            outputs = [user for user in node.users if user.target is operator.getitem]
            yield from outputs or [node]


def _is_never_merged(node: torch.fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _never_merged
