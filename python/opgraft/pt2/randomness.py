"""Two draws stay two draws: what the compiler has to know about an opaque op that is random.

Most of PT2 goes by the tag `nondeterministic_seeded`, which an opaque op has from the op that it
stands for: dead code, constant folding, checkpointing that saves the generator's state, the order
of draws. Some of it knows random ops by name instead, in lists of `aten`'s, and would take two
equal calls of one of ours for one value:

- common-subexpression elimination, AOTAutograd's (`torch._functorch.compile_utils`) and that of
  exported programs (`torch.fx.passes.dialect.common.cse_pass`);
- the partitioner (`torch._functorch.partitioners`), which may compute in the backward again what
  the forward has computed, if it was told to save memory.
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

#: Random, and torch's catalogue does not say so: they drop out between their layers.
_UNTAGGED = frozenset({"aten::quantized_lstm", "aten::quantized_gru"})
#: Of each the memory is another, though nothing is drawn.
_NEVER_THE_SAME = frozenset({"aten::empty"})

#: Opaque ops of which two equal calls are two values. Only ever added to, under the lock of who
#: defines them.
_unlike: set[OpOverloadPacket] = set()
#: The compiler's own collections of such ops, as far as they are loaded.
_lists: list[Any] = []
_attached = False


def is_random(op: Op) -> bool:
    """Whether an op draws random numbers.

    >>> from opgraft.ops.schema import resolve
    >>> is_random(resolve("aten::bernoulli")), is_random(resolve("aten::mul.Tensor"))
    (True, False)
    """
    return (
        op.is_random
        or any("Generator" in argument.kind for argument in op.arguments)
        or op.overload._schema.name in _UNTAGGED
    )


def declare(opaque: OpOverload, op: Op) -> None:
    """Tell the compiler that equal calls of an opaque op are not one value, where that is so."""
    packet = opaque._overloadpacket
    if packet in _unlike or not (is_random(op) or op.overload._schema.name in _NEVER_THE_SAME):
        return
    _unlike.add(packet)
    for each in _lists:
        _put(packet, each)
    _attach()


def obstacle(op: Op) -> str | None:
    """Why no graph must hold an op's opaque one, that is random; None where one may."""
    if is_random(op) and _draws_merge():
        return f"torch {torch.__version__} would take two draws of it for one"
    return None


@functools.cache
def _draws_merge() -> bool:
    """Whether the compiler takes two calls of an op for one that it was told are not.

    It is asked, as how it knows random ops is nowhere promised.
    """
    from torch._functorch.compile_utils import fx_graph_cse

    # Defined by being asked for, as by code from a compiler's cache.
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
        imports.after(name, _extend)
    imports.after(_PARTITIONERS, _extend_partitioner)


def _extend(module: ModuleType) -> None:
    ops = getattr(module, "rand_ops", None)
    # A list, or a set, in torch 2.11 to 2.13. A version without it is asked by :func:`obstacle`.
    if isinstance(ops, (list, set)):
        _lists.append(ops)
        for packet in _unlike:
            _put(packet, ops)


def _put(packet: OpOverloadPacket, ops: Any) -> None:
    if packet in ops:
        return
    if isinstance(ops, list):
        ops.append(packet)
    else:
        ops.add(packet)


def _extend_partitioner(partitioners: ModuleType) -> None:
    """Let the partitioner never compute a draw again that is not to be had again.

    What checkpointing computes again draws from the generator's saved state, and stays.
    """
    types: Any = getattr(partitioners, "OpTypes", None)
    is_random_op = getattr(types, "is_random", None)
    if is_random_op is not None:

        @functools.wraps(is_random_op)
        def is_random_op_or_ours(self: Any, node: torch.fx.Node) -> bool:
            return _is_unlike(node) or bool(is_random_op(self, node))

        types.is_random = is_random_op_or_ours

    choose: Any = getattr(partitioners, "choose_saved_values_set", None)
    if choose is not None:
        # Where memory is short it takes back what it banned before.
        @functools.wraps(choose)
        def choose_with_draws(joint_graph: torch.fx.Graph, *args: Any, **kwargs: Any) -> Any:
            chosen = choose(joint_graph, *args, **kwargs)
            return list(dict.fromkeys((*chosen, *_draws_to_save(joint_graph, *args, **kwargs))))

        partitioners.choose_saved_values_set = choose_with_draws  # type: ignore[attr-defined]


def _draws_to_save(
    joint_graph: torch.fx.Graph, node_info: Any, *_: Any, **__: Any
) -> Iterator[torch.fx.Node]:
    """What the forward draws; what of it the backward does not use is not saved."""
    from torch._functorch.partitioners import must_recompute

    for node in joint_graph.nodes:
        if _is_unlike(node) and node_info.is_required_fw(node) and not must_recompute(node):
            outputs = [user for user in node.users if user.target is operator.getitem]
            yield from outputs or [node]


def _is_unlike(node: torch.fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _unlike
