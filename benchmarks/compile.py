"""Measures training steps under `torch.compile` with overrides, as a ratio to stock PyTorch.

    python benchmarks/compile.py            # minutes; on a GPU with the shipped kernels
    python benchmarks/compile.py --smoke    # does this script work? Its numbers mean nothing

The model is a small transformer: RMSNorm, attention, a gated MLP, a softmax. The cases:

- `stock`: PyTorch without opgraft, in a process of its own.
- `none`: opgraft is imported, no override is on.
- `missing, auto`: overrides of every op with code of its own, none wants a call; the policy is the
  default.
- `missing, opaque`: the same with `compile="opaque"`; sizes are static, so the graph shows that no
  call is wanted.
- `missing, opaque, asked`: the same, and only each call can tell (the condition is on an address).
  What is lost are Inductor's fusions.
- `mixed, auto`: attention is taken (its impl is the native kernel), the rest misses.
- `mixed, opaque`: on a GPU, RMSNorm is taken by the shipped Triton kernels, forward and backward;
  on a CPU, softmax is, by its own native kernel; the rest misses.

The two processes take turns, round by round; a time is the median over rounds, and a ratio the
median of the ratios to stock of the same round. Ratios are stock's time over the case's: above 1 is
faster than stock.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import _common
import torch
import torch.nn.functional as F
from torch import nn


class Size(NamedTuple):
    batch: int
    length: int
    width: int
    heads: int
    layers: int


SIZES = {"cpu": Size(4, 128, 256, 4, 2), "cuda": Size(8, 2048, 4096, 32, 2)}
SMOKE = Size(2, 16, 32, 2, 1)


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norms = nn.ParameterList([torch.ones(width), torch.ones(width)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = F.rms_norm(x, (width,), self.norms[0], 1e-6)
        qkv = self.qkv(normed).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        normed = F.rms_norm(x, (width,), self.norms[1], 1e-6)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(size) for _ in range(size.layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.layers(x), -1)


# ------------------------------------------------------------------ overrides

ATTENTION = {
    "cpu": ("_scaled_dot_product_flash_attention_for_cpu",),
    "cuda": (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    ),
}
#: What a condition asks: the first tensor of each op.
FIRST = {
    "_softmax": "self",
    "_softmax_backward_data": "grad_output",
    "mm": "self",
    "_fused_rms_norm": "input",
    "_fused_rms_norm_backward": "input",
}


def itself(op: str) -> Callable[..., Any]:
    """An impl that is the native kernel, which the op is inside an impl."""
    native: Callable[..., Any] = getattr(torch.ops.aten, op).default
    return native


def register(case: str, device: str) -> None:
    """Register a case's overrides, with the case for a label."""
    import opgraft
    from opgraft import when

    key = device.upper()
    policy: Any = "opaque" if "opaque" in case else "auto"

    def add(op: str, impl: Callable[..., Any], first: str, *, takes: bool) -> None:
        if takes:
            cond = when.numel(first) > 0
        elif "asked" in case:
            cond = ~when.aligned(first, 1)  # an address: false, and no compiler can know
        else:
            cond = when.numel(first) < 0
        opgraft.register_op_override(
            "aten", op, key, impl, cond=cond, dsl=case, name=f"{case}: {op}", compile=policy
        )

    attends = case == "mixed, auto"
    for op in ATTENTION[device]:
        add(op, itself(op), "query", takes=attends)
    kernels = _kernels(device) if case == "mixed, opaque" else {}
    for op, first in FIRST.items():
        add(op, kernels.get(op, itself(op)), first, takes=op in kernels)


def _kernels(device: str) -> dict[str, Callable[..., Any]]:
    if device == "cpu":
        return {"_softmax": itself("_softmax")}
    from opgraft_kernels.norms.triton_kernels import rms_norm_backward, rms_norm_forward

    return {"_fused_rms_norm": rms_norm_forward, "_fused_rms_norm_backward": rms_norm_backward}


CASES = (
    "none",
    "missing, auto",
    "missing, opaque",
    "missing, opaque, asked",
    "mixed, auto",
    "mixed, opaque",
)


# ------------------------------------------------------------------ processes


class Worker:
    """A process that compiles the model for each of its cases, and runs steps of them."""

    def __init__(self, cases: Sequence[str], device: str, size: Size) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, cases, device, size))
        self._process.start()
        self._ours.recv()  # compiled

    def milliseconds(self, case: str, steps: int) -> float:
        self._ours.send((case, steps))
        return float(self._ours.recv())

    def hits(self) -> dict[str, int]:
        self._ours.send(("hits", 0))
        found: dict[str, int] = self._ours.recv()
        return found

    def close(self) -> None:
        self._ours.send(None)
        self._process.join()


def serve(connection: Connection, cases: Sequence[str], device: str, size: Size) -> None:
    torch.set_num_threads(1)
    run = {case: make_step(case, device, size) for case in cases}
    connection.send("compiled")
    while (asked := connection.recv()) is not None:
        case, steps = asked
        if case == "hits":
            connection.send(count_hits())
            continue
        select(case)
        run[case]()
        wait(device)
        start = time.perf_counter()
        for _ in range(steps):
            run[case]()
        wait(device)
        connection.send((time.perf_counter() - start) / steps * 1e3)


def make_step(case: str, device: str, size: Size) -> Callable[[], None]:
    """A training step of the model, compiled with a case's overrides on and no others."""
    from torch._inductor.compile_fx import compile_fx

    if case not in ("stock", "none"):
        register(case, device)
    select(case)
    torch.manual_seed(0)
    model = Model(size).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    x = torch.randn(size.batch, size.length, size.width, device=device).to(
        model.layers[0].out.weight
    )
    x.requires_grad_()
    # A backend of its own keeps a case's compiled code apart from the others'.
    compiled = torch.compile(model, backend=functools.partial(compile_fx))
    target = torch.randn_like(x)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        (compiled(x) * target).sum().backward()

    for _ in range(3):
        step()
    return step


def select(case: str) -> None:
    if case == "stock":
        return
    import opgraft

    opgraft.disable()
    opgraft.enable(dsl=case)


def count_hits() -> dict[str, int]:
    import opgraft

    return {case: sum(o.hits for o in opgraft.overrides(dsl=case)) for case in CASES}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ------------------------------------------------------------------ measuring


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="one short round, nothing is saved")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=10, help="training steps a round and case")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = SMOKE if options.smoke else SIZES[device]
    rounds, steps = (1, 1) if options.smoke else (options.rounds, options.steps)
    stock, ours = Worker(["stock"], device, size), Worker(CASES, device, size)
    times: dict[str, list[float]] = {case: [] for case in ("stock", *CASES)}
    for _ in range(rounds):
        times["stock"].append(stock.milliseconds("stock", steps))
        for case in CASES:
            times[case].append(ours.milliseconds(case, steps))
    hits = ours.hits()
    stock.close()
    ours.close()
    records = [
        {
            "case": case,
            "milliseconds": round(statistics.median(measured), 3),
            "ratio": round(
                statistics.median(s / m for s, m in zip(times["stock"], measured, strict=True)), 3
            ),
            "hits": hits.get(case, 0),
        }
        for case, measured in times.items()
    ]
    print(f"{'case':24}{'ms a step':>11}{'stock / it':>12}{'hits':>8}")
    for record in records:
        print("{case:24}{milliseconds:11.3f}{ratio:12.3f}{hits:8}".format(**record))
    name = torch.cuda.get_device_name() if device == "cuda" else _common.cpu_name()
    if not options.smoke:
        print("written to", _common.save("compile", name, records, size=size._asdict()))


if __name__ == "__main__":
    main()
