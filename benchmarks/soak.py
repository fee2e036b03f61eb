"""Trains while four threads switch overrides, and compares the loss and memory with a stock run.

    python benchmarks/soak.py              # 30,000 steps of each run, on the GPU if there is one
    python benchmarks/soak.py --steps 500  # shorter
    python benchmarks/soak.py --apart      # its runs at the same time, in processes of their own
    python benchmarks/soak.py --smoke      # 40 steps, nothing is saved: does this script work?

A small transformer learns from batches of random shapes, the same in every run:

    stock    no override is registered
    exact    overrides that compute native's bits: every step's loss must be stock's, to the bit
    kernels  overrides that round otherwise (on a GPU opgraft-kernels' in Triton, at every size;
             elsewhere plain torch): the mean loss of each hundred steps must stay by stock's

During the last two, threads disable and enable, register and remove, open scopes and call ops, and
shadow mode compares one hit in a hundred with native. Memory is looked at throughout: it must be
flat. The exit status is 1 where something is not as it must be.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import math
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same sums in each run

import _common
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import opgraft
from opgraft import when
from opgraft.ops.schema import resolve
from opgraft.registry import registry

HIDDEN, HEADS, CLASSES = 64, 4, 32
WINDOW = 100
#: How far the mean loss of a window may be from stock's where kernels round otherwise.
TOLERANCE = 0.02
SHADOW = 0.01
THREADS = 4
#: What a process may grow by once every shape has been seen: two bytes a step and the allocator's
#: noise; one leaked tensor a step would be a hundred times that.
HOST_SLACK, DEVICE_SLACK = 24 * 2**20, 2**20

# ---------------------------------------------------------------------------------- the model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.second = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.first(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
        x = x + (weights @ v).transpose(1, 2).reshape(batch, length, HIDDEN)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(CLASSES, HIDDEN)
        self.blocks = nn.Sequential(Block())
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(x))))


def batch(step: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and classes of a step: which class is largest in the mean over the sequence so far."""
    rng = random.Random(step)
    shape = (rng.randint(1, 8), rng.randint(1, 48), CLASSES)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(step))
    classes = (x.cumsum(1) + x).argmax(-1)
    return x.to(device), classes.to(device)


class Memory:
    """What a run holds, sampled at every hundredth of it."""

    def __init__(self, steps: int, device: str) -> None:
        self._every = max(10, steps // 100)
        self._cuda = device == "cuda"
        self.samples: list[dict[str, int]] = []

    def look(self, step: int) -> None:
        if step % self._every:
            return
        gc.collect()
        sample = {"step": step, "host": resident()}
        if self._cuda:
            torch.cuda.synchronize()
            sample["device"] = torch.cuda.memory_allocated()
            sample["device_reserved"] = torch.cuda.memory_reserved()
        self.samples.append(sample)

    def growth(self, what: str) -> int:
        """From the largest sample of the second quarter to the smallest of the last tenth."""
        values = [sample[what] for sample in self.samples]
        count = len(values)
        early, late = values[count // 4 : count // 2 + 1], values[-max(1, count // 10) :]
        return min(late) - max(early)


def resident() -> int:
    """This process's memory in bytes; 0 where /proc does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def train(steps: int, device: str, memory: Memory, seconds: float) -> list[float]:
    """Train a model from the same start on the same batches; returns the loss of each step.

    Stops after so many seconds, if that is before so many steps.
    """
    until = time.perf_counter() + seconds
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = torch.zeros(steps, device=device)  # no wait for the device in every step
    for step in range(steps):
        x, classes = batch(step, device)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x).flatten(0, 1), classes.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses[step] = loss.detach()
        memory.look(step)
        if time.perf_counter() > until:
            break
    return losses[: step + 1].tolist()


# ---------------------------------------------------------------------------------- overrides


def same_bits(device: str) -> list[opgraft.Override]:
    """Overrides of everything that the model calls, which compute what native does."""
    key = device.upper()
    ops = [
        *("_softmax", "_softmax_backward_data", "gelu", "gelu_backward", "native_layer_norm"),
        *("native_layer_norm_backward", "addmm", "mm", "bmm", "_log_softmax", "mul.Tensor"),
        *("sum.dim_IntList", "add.Tensor"),
    ]
    if device == "cuda":
        # On the CPU it is composed of others where it is differentiated.
        ops += ["_fused_rms_norm", "_fused_rms_norm_backward"]
    else:
        ops.append("add_.Tensor")  # the optimizer's, which on a GPU takes all tensors at once
    return [
        opgraft.register_op_override(
            *("aten", op, key, opgraft.native(f"aten::{op}")),
            # Of each kind: decided in Python, and in C++.
            cond=(lambda *args, **kwargs: True) if index % 5 == 4 else when.numel(first(op)) >= 0,
            name=f"exact {op}",
            dsl=("one", "two")[index % 2],
        )
        for index, op in enumerate(ops)
    ]


def first(op: str) -> str:
    """What the schema calls the op's first tensor."""
    arguments = resolve(f"aten::{op}").arguments
    return next(argument.name for argument in arguments if argument.is_tensor)


def _softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    weights = (self - self.amax(dim, keepdim=True)).exp()
    return weights.div_(weights.sum(dim, keepdim=True)).contiguous()


def _softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    product = grad * output
    return (product - output * product.sum(dim, keepdim=True)).to(dtype).contiguous()


def _gelu(self: Tensor, *, approximate: str) -> Tensor:
    return self * (0.5 + 0.5 * torch.erf(self * math.sqrt(0.5)))


def own_rounding(device: str) -> list[opgraft.Override]:
    """Overrides with results of their own."""
    key = device.upper()
    impls: dict[str, Callable[..., Tensor]] = {
        "_softmax": _softmax,
        "_softmax_backward_data": _softmax_backward,
        "gelu": _gelu,
    }
    registered = [
        opgraft.register_op_override(
            *("aten", op, key, impl), unconditional_override=True, name=f"own {op}", dsl="one"
        )
        for op, impl in impls.items()
    ]
    if device == "cpu":
        return registered
    from opgraft_kernels.norms import overrides as norms

    # As the pack registers them, but that every call is worth a launch from Python.
    for norm, direction in itertools.product((norms.RMS_NORM, norms.LAYER_NORM), norms.DIRECTIONS):
        op = norm.op(direction).name
        registered.append(
            opgraft.register_op_override(
                *("aten", op, key, norms.impl(norm, direction, "triton_kernels")),
                cond=norms.condition(norm, direction, key),
                launch_plan=True,
                unplanned=when.numel(first(op)) >= 0,  # also past so many recordings
                name=f"triton {op}",
                dsl="triton",
            )
        )
    return registered


class Toggling:
    """Threads that change what is on, until this is left."""

    def __init__(self, overrides: Sequence[opgraft.Override], device: str) -> None:
        self._overrides = overrides
        self._device = device
        self._stop = threading.Event()
        self.toggles = [0] * THREADS
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._work, args=(index,)) for index in range(THREADS)
        ]

    def __enter__(self) -> Toggling:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        opgraft.enable()

    def _work(self, index: int) -> None:
        rng = random.Random(index)
        actions: list[Callable[[random.Random], None]] = [
            self._disable, self._scope, self._register, self._calls,
        ]  # fmt: skip
        try:
            while not self._stop.wait(0.01):  # long enough for launch plans to be recorded between
                actions[index % len(actions)](rng)
                self.toggles[index] += 1
        except Exception as error:
            self.errors.append(repr(error))

    def _disable(self, rng: random.Random) -> None:
        chosen = rng.choice(self._overrides)
        selector = rng.choice(({"dsl": chosen.dsl}, {"op": chosen.op}, {"name": chosen.name}))
        opgraft.disable(**selector)
        opgraft.enable(**selector)

    def _scope(self, rng: random.Random) -> None:
        with opgraft.disabled(op=rng.choice(self._overrides).op):
            self._stop.wait(0.001)

    def _register(self, rng: random.Random) -> None:
        chosen = rng.choice(self._overrides)
        namespace, _, symbol = chosen.op.partition("::")
        opgraft.register_op_override(
            *(namespace, symbol, chosen.dispatch_key, chosen.impl),
            cond=lambda *args, **kwargs: False,
            name="passing",
            priority=rng.choice((-1, 1)),
        ).remove()

    def _calls(self, rng: random.Random) -> None:
        """Another thread's own calls, beside those of the training."""
        # Not from the process's generator: the model is drawn from that meanwhile.
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        shape = (rng.randint(1, 8), rng.randint(2, 64))
        x = torch.randn(shape, generator=generator).to(self._device)
        with torch.no_grad():
            total = torch.softmax(x, -1).sum().item()
        if abs(total - x.shape[0]) > 1e-3 * x.shape[0]:
            self.errors.append(f"a softmax of {x.shape[0]} rows sums up to {total}")


# ---------------------------------------------------------------------------------- runs

KINDS: dict[str, Callable[[str], list[opgraft.Override]]] = {
    "stock": lambda device: [],
    "exact": same_bits,
    "kernels": own_rounding,
}


@contextlib.contextmanager
def grafted(kind: str, device: str) -> Iterator[tuple[list[opgraft.Override], Toggling | None]]:
    overrides = KINDS[kind](device)
    try:
        if not overrides:
            yield overrides, None
            return
        # What rounds otherwise may be further off where a result cancels.
        tolerance = 1.0 if kind == "exact" else 10.0
        with (
            opgraft.shadow(rate=SHADOW, tolerance=tolerance),
            Toggling(overrides, device) as toggling,
        ):
            yield overrides, toggling
    finally:
        registry.reset()


def run(
    kind: str, steps: int, device: str, limit: float = math.inf
) -> tuple[dict[str, Any], list[float]]:
    """One run, and what is to be said of it."""
    memory = Memory(steps, device)
    start = time.perf_counter()
    with grafted(kind, device) as (overrides, toggling):
        losses = train(steps, device, memory, limit)
        seconds = time.perf_counter() - start
    record: dict[str, Any] = {
        "run": kind,
        "steps": len(losses),
        "seconds": round(seconds, 1),
        "steps_per_second": round(len(losses) / seconds, 1),
        "loss": [round(each, 6) for each in windows(losses)],
        "host_growth_bytes": memory.growth("host"),
        "memory": memory.samples,
    }
    if device == "cuda":
        record["device_growth_bytes"] = memory.growth("device")
    if toggling is not None:
        record["toggles"], record["thread_errors"] = sum(toggling.toggles), toggling.errors
        record["overrides"] = [
            {
                "name": override.name,
                "hits": override.hits,
                "misses": override.misses,
                "shadowed": override.shadowed,
                "mismatches": override.mismatches,
                "quarantined": len(override.state.quarantined),
            }
            for override in overrides
        ]
    return record, losses


def runs(
    kinds: Sequence[str], steps: int, device: str, limit: float, *, apart: bool
) -> Iterator[tuple[dict[str, Any], list[float]]]:
    """One run after another; `apart`: each in a process of its own, all at the same time."""
    if not apart:
        for kind in kinds:
            yield run(kind, steps, device, limit)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(kinds), context, initializer=prepare, initargs=(device,)) as pool:
        futures = [pool.submit(run, kind, steps, device, limit) for kind in kinds]
        for future in futures:
            yield future.result()


def prepare(device: str) -> None:
    """Make a process fit for a run."""
    faulthandler.enable()
    # Each op lets go of the GIL, and would wait 5 ms to have it back from each thread that toggles.
    sys.setswitchinterval(1e-4)
    if device == "cpu":
        torch.set_num_threads(1)  # the sums of several threads differ from run to run


def windows(losses: Sequence[float]) -> list[float]:
    """Mean losses."""
    parts = [losses[start : start + WINDOW] for start in range(0, len(losses), WINDOW)]
    return [sum(part) / len(part) for part in parts]


def problems(record: dict[str, Any], losses: list[float], stock: list[float]) -> list[str]:
    """What is not as it must be."""
    found = []
    if not all(map(math.isfinite, losses)):
        found.append("a loss is not finite")
    if record["host_growth_bytes"] > HOST_SLACK:
        found.append(f"the process grew by {record['host_growth_bytes']} bytes")
    if record.get("device_growth_bytes", 0) > DEVICE_SLACK:
        found.append(f"device memory grew by {record['device_growth_bytes']} bytes")
    if record["run"] == "stock":
        return found
    found += record["thread_errors"]
    idle = [each["name"] for each in record["overrides"] if not each["hits"]]
    if idle:
        found.append(f"never hit: {', '.join(idle)}")
    for each in record["overrides"]:
        if each["mismatches"] or each["quarantined"]:
            found.append(f"{each['name']}: {each['mismatches']} mismatches in shadow mode")
    count = min(len(losses), len(stock))
    losses, stock = losses[:count], stock[:count]
    differing = sum(one != other for one, other in zip(losses, stock, strict=True))
    record["losses_that_differ"] = differing
    pairs = zip(windows(losses), windows(stock), strict=True)
    record["largest_difference"] = max(abs(one - other) / other for one, other in pairs)
    if record["run"] == "exact" and differing:
        found.append(f"the losses of {differing} steps are not stock's")
    if record["largest_difference"] > TOLERANCE:
        found.append(f"a mean loss is {record['largest_difference']:.2%} off stock's")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=30_000, help="of each run")
    parser.add_argument("--runs", nargs="+", choices=["exact", "kernels"], help="beside stock")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=math.inf, help="at most, of each run")
    parser.add_argument("--apart", action="store_true", help="in processes, all at the same time")
    parser.add_argument("--smoke", action="store_true", help="40 steps, nothing is saved")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    steps = 40 if options.smoke else options.steps
    prepare(device)
    records, wrong, stock = [], 0, []
    kinds = ("stock", *(options.runs or ("exact", "kernels")))
    for record, losses in runs(kinds, steps, device, options.seconds, apart=options.apart):
        stock = stock or losses
        record["problems"] = problems(record, losses, stock)
        wrong += len(record["problems"])
        records.append(record)
        print(summary(record), flush=True)
    if not options.smoke:
        name = _common.cpu_name() if device == "cpu" else torch.cuda.get_device_name()
        print("written to", _common.save("soak", name, records))
    return 1 if wrong else 0


def summary(record: dict[str, Any]) -> str:
    text = (
        f"{record['run']:8} {record['steps']} steps at {record['steps_per_second']}/s, loss "
        f"{record['loss'][0]:.4f} to {record['loss'][-1]:.4f}, host "
        f"{record['host_growth_bytes'] / 2**20:+.1f} MiB"
    )
    if "device_growth_bytes" in record:
        text += f", device {record['device_growth_bytes'] / 2**20:+.1f} MiB"
    if "overrides" in record:
        sums = {
            what: sum(each[what] for each in record["overrides"])
            for what in ("hits", "shadowed", "mismatches")
        }
        text += f"; {record['toggles']} toggles, " + ", ".join(f"{n} {w}" for w, n in sums.items())
        text += f"; largest difference {record['largest_difference']:.2g}"
    return "\n".join([text, *(f"  PROBLEM: {each}" for each in record["problems"])])


if __name__ == "__main__":
    raise SystemExit(main())
