"""What composite ops are made of stays the same with an override that takes no call, or is gone.

torch has decompositions in Python of some of them (`dropout`), which it takes for traces as long as
an op has no kernel at a backend: the router is one, and stays. Each way to make a graph, or to see
ops in eager, is gone before the first override is registered, while each op has one that takes no
call, and after they were removed. That takes a process in which nothing was registered: what is
gone before the first override is found once, and a process is forked from there for each router.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import opgraft
from opgraft import when
from opgraft.core import loader
from opgraft.ops.schema import resolve
from tests.garbage import collect_seldom
from tests.modes import RecordOps

torch.manual_seed(0)
_RNN, _LSTM = (kind(4, 4, batch_first=True) for kind in (nn.RNN, nn.LSTM))
_WEIGHT = torch.randn(4, 4)
_IMAGES = (2, 4, 4, 4)

#: By composite op: what calls it, and the shape of its input.
CALLS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "dropout": (lambda x: F.dropout(x, 0.5, True), (4, 4)),
    "linear": (lambda x: F.linear(x, _WEIGHT), (4, 4)),
    "matmul": (lambda x: torch.matmul(x, _WEIGHT), (3, 4, 4)),
    "reshape": (lambda x: x.t().reshape(-1), (4, 4)),
    # Inductor's decomposition of softmax calls it, too.
    "to.dtype": (lambda x: x.half().softmax(-1), (4, 4)),
    "chunk": (lambda x: x.chunk(2)[0], (4, 4)),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), (4, 4)),
    "rms_norm": (lambda x: F.rms_norm(x, (4,)), (4, 4)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), _IMAGES),
    "instance_norm": (lambda x: F.instance_norm(x), _IMAGES),
    "upsample_nearest2d.vec": (lambda x: F.interpolate(x, scale_factor=2.0), _IMAGES),
    "upsample_bilinear2d.vec": (
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        _IMAGES,
    ),
    "rnn_tanh.input": (lambda x: _RNN(x)[0], (2, 2, 4)),
    "lstm.input": (lambda x: _LSTM(x)[0], (2, 2, 4)),
    "scaled_dot_product_attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x),
        (2, 2, 4, 4),
    ),
}

Inputs = list[torch.Tensor]


def run(*inputs: torch.Tensor) -> torch.Tensor:
    """All of the calls in one, so that one graph has the pieces of all."""
    return sum(call(x).sum() for (call, _), x in zip(CALLS.values(), inputs, strict=True))


def in_eager(inputs: Inputs) -> list[str]:
    with RecordOps() as seen:
        result = run(*inputs)
        if result.requires_grad:
            torch.autograd.grad(result, inputs)
    return seen.ops


def _compiled(inputs: Inputs, decompositions: Any, *, dynamic: bool) -> list[str]:
    names: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=decompositions)
    result = torch.compile(run, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    if result.requires_grad:
        torch.autograd.grad(result, inputs)
    return names


def compiled(inputs: Inputs) -> list[str]:
    return _compiled(inputs, None, dynamic=False)


def compiled_as_inductor_does(inputs: Inputs) -> list[str]:
    return _compiled(inputs, select_decomp_table(), dynamic=True)


def exported(inputs: Inputs) -> list[str]:
    class Model(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return run(*inputs)

    program = torch.export.export(Model(), tuple(inputs)).run_decompositions({})
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


WAYS = (in_eager, compiled, compiled_as_inductor_does, exported)
BOTH = (True, False)


def pieces(of_training: tuple[bool, ...] = BOTH) -> dict[str, list[str]]:
    """What is seen on each way, in training and without gradients."""
    found = {}
    for way in WAYS:
        for trains in of_training:
            inputs = [
                torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)
                for _, shape in CALLS.values()
            ]
            with torch.set_grad_enabled(trains):
                found[f"{way.__name__}, {trains=}"] = way(
                    [x.requires_grad_(trains) for x in inputs]
                )
    return found


#: In which states of the overrides is looked, in training, without gradients or both.
States = dict[str, tuple[bool, ...]]
#: Graphs are made and ops are decomposed above both routers, and what is left of an override that
#: is gone is the same whatever runs next: every pair of a router, a state and a kind of run is
#: enough, but for overrides that are there while C++ routes.
STATES: dict[str, States] = {
    "": {"take no call": BOTH, "are removed": (True,)},
    "python": {"take no call": (True,), "are removed": (False,)},
}


def never(symbol: str, namespace: str = "aten") -> Any:
    """A condition that no call of an op meets, whatever its sizes."""
    arguments = resolve(f"{namespace}::{symbol}").arguments
    first = next(each for each in arguments if "Tensor" in each.kind)
    return (when.ndim(first.name) if first.is_tensor else when.length(first.name)) == 99


def differences(stock: dict[str, list[str]], states: States) -> Iterator[str]:
    """How what the ops are made of differs from before the first override was registered."""
    overrides = [
        opgraft.register_op_override(
            *("aten", symbol, "CPU", opgraft.native(f"aten::{symbol}")),
            cond=never(symbol),
            compile="opaque",
            name="never",
        )
        for symbol in CALLS
    ]
    for state, of_training in states.items():
        for way, now in pieces(of_training).items():
            differing = difflib.ndiff(stock[way], now)
            lines = [line for line in differing if line[0] in "+-"]
            if lines:
                yield f"{way}, the overrides {state}: {lines}"
        for override in overrides:
            override.remove()


def test_a_kernel_that_took_the_routers_place_is_not_decomposed() -> None:
    """Eager mode runs it, and a tracer below autograd keeps the op, as in stock PyTorch."""
    library = torch.library.Library("pieces", "FRAGMENT")
    library.define("late(Tensor x) -> Tensor")
    library.impl("late", lambda x: x.sin().cos(), "CompositeImplicitAutograd")
    opgraft.register_op_override(
        *("pieces", "late", "CPU", opgraft.native("pieces::late")), cond=never("late", "pieces")
    )
    late, x = torch.ops.pieces.late, torch.ones(2)

    def traced() -> list[str]:
        with torch.inference_mode():
            graph = make_fx(lambda x: late(x))(x).graph
        return [str(node.target) for node in graph.nodes if node.op == "call_function"]

    assert traced() == ["aten.sin.default", "aten.cos.default"]
    others = torch.library.Library("pieces", "FRAGMENT")
    others.impl("late", lambda x: x + 1, "CPU", allow_override=True)
    assert traced() == ["pieces.late.default"]


@pytest.mark.longest
@pytest.mark.timeout(900)  # it takes minutes where other tests run beside it
def test_pieces_stay_the_same() -> None:
    """Whichever router routes."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.pt2.test_composite_pieces"],
        # With threads of devices, autograd would not go on in a process that was forked.
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    routers = "C++" if loader.load() else "Python", "Python"
    assert done.stdout == "".join(f"{len(CALLS)} ops, routed in {router}\n" for router in routers)


def main() -> int:
    """Prints the differences under each router, in processes that have seen ops without it."""
    collect_seldom()
    torch.set_num_threads(1)  # a process that was forked has none of OpenMP's
    torch._dynamo.config.allow_rnn = True
    stock = pieces()
    assert all(stock.values())
    for router, states in STATES.items():
        child = os.fork()
        if child == 0:
            os.environ["OPGRAFT_ROUTER"] = router
            for difference in differences(stock, states):
                print(difference)
            print(f"{len(CALLS)} ops, routed in {'C++' if loader.in_use() else 'Python'}")
            return 0
        if status := os.waitpid(child, 0)[1]:
            return os.waitstatus_to_exitcode(status)
    return 0


if __name__ == "__main__":
    sys.exit(main())
