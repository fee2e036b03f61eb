"""A Llama-style model with and without the packs' overrides; nothing in the model changes.

    python benchmarks/llama.py            # 1.1 B parameters: training, prefill and decode
    python benchmarks/llama.py --smoke    # tiny, without a GPU: does this script work?

nn.RMSNorm, F.scaled_dot_product_attention and nn.Linear in bfloat16, as a model's author writes
them. There are three of the model, with the same parameters: one runs with the overrides, two
inside `opgraft.disabled()`, to see what two measurements of the same differ by. They take turns;
eager, and with their blocks under torch.compile, the native ones' compiled while no override is on.
Tokens a second are medians, ratios medians of the ratios to the native turn of the same round, with
the interval that holds the true median in 95 of 100 runs. Wall time, the host's work included.
Memory is the most that PyTorch allocates in a step beyond what is there.

A turn of decoding is several steps, of which the median counts, without the first: decoding is the
host's work, which takes longer while its caches hold another model's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import _common
import torch
import torch.nn.functional as F
from torch import nn

from opgraft.base.rounds import median_and_interval

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import opgraft
import opgraft_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Shape(NamedTuple):
    """The model's sizes."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 16
    heads_k: int = 8
    inner: int = 8192
    vocabulary: int = 32000

    @property
    def dim(self) -> int:
        return self.hidden // self.heads


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al., "RoFormer", 2021), halves side by side."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Block(nn.Module):
    """Attention and SwiGLU, each after an RMSNorm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        width_k = shape.heads_k * shape.dim
        self.qkv = nn.Linear(shape.hidden, shape.hidden + 2 * width_k, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.inner_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.up = nn.Linear(shape.hidden, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Any = None
    ) -> torch.Tensor:
        batch, length, _ = x.shape
        shape = self.shape
        widths = (shape.hidden, shape.heads_k * shape.dim, shape.heads_k * shape.dim)
        parts = self.qkv(self.attention_norm(x)).split(widths, -1)
        q, k, v = (t.view(batch, length, -1, shape.dim).transpose(1, 2) for t in parts)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if cache is not None:
            keys, values = cache
            keys[:, :, -length:], values[:, :, -length:] = k, v
            k, v = keys, values
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=cache is None, enable_gqa=shape.heads != shape.heads_k
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.up(self.inner_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Token indices to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, start: int = 0, caches: Any = None) -> torch.Tensor:
        x = self.embed(tokens)
        half = self.shape.dim // 2
        rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        angles = torch.arange(start, start + tokens.shape[1], device=x.device)[:, None] * rates
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, None if caches is None else caches[i])
        return self.head(self.norm(x))


# ------------------------------------------------------------------------------------ workloads


class Load(NamedTuple):
    """A workload's batch and length; rounds, and steps in a side's turn of each.

    Of several steps the first is not counted.
    """

    batch: int
    length: int
    rounds: int
    steps: int = 1


class Workload(NamedTuple):
    """What is run, and how many tokens it is worth."""

    name: str
    run: Callable[[], object]
    tokens: int
    load: Load


def workloads(model: Llama, loads: dict[str, Load], device: str) -> list[Workload]:
    """Training, prefill and decode."""
    shape, dtype = model.shape, model.head.weight.dtype

    def random_tokens(batch: int, length: int) -> torch.Tensor:
        return torch.randint(shape.vocabulary, (batch, length), device=device)

    batch, length, *_ = loads["training"]
    tokens = random_tokens(batch, length)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    batch, length, *_ = loads["prefill"]
    prompt = random_tokens(batch, length)

    @torch.no_grad()
    def prefill() -> torch.Tensor:
        return model(prompt)

    batch, length, *_ = loads["decode"]
    token = random_tokens(batch, 1)
    cache_shape = (batch, shape.heads_k, length, shape.dim)
    caches = [
        tuple(torch.randn(cache_shape, dtype=dtype, device=device) for _ in range(2))
        for _ in range(shape.layers)
    ]

    @torch.no_grad()
    def decode() -> torch.Tensor:
        return model(token, length - 1, caches)

    runs = {"training": train, "prefill": prefill, "decode": decode}
    return [
        Workload(name, runs[name], load.batch * (1 if name == "decode" else load.length), load)
        for name, load in loads.items()
    ]


# ------------------------------------------------------------------------------------ measuring

SIDES = ("native", "opgraft", "native again")
# What comes second finds a warmer GPU, and the caches full of what came before.
ORDERS = list(itertools.permutations(SIDES))


class Setting(NamedTuple):
    """What is measured: the model, and the workloads by name."""

    shape: Shape
    loads: dict[str, Load]
    dtype: torch.dtype = torch.bfloat16


def full(rounds: int) -> Setting:
    return Setting(
        Shape(),
        {
            "training": Load(4, 4096, 2 * rounds),
            "prefill": Load(4, 8192, 2 * rounds),
            "decode": Load(16, 4096, 60 * rounds, steps=6),
        },
    )


def bench(setting: Setting, modes: Sequence[str]) -> list[dict[str, Any]]:
    """A record for every workload, mode and side."""
    opgraft_kernels.register()
    models = _models(setting)
    parameters = sum(p.numel() for p in models["native"].parameters())
    print(f"{parameters / 1e9:.2f} B parameters")
    works = {side: workloads(model, setting.loads, DEVICE) for side, model in models.items()}
    records: list[dict[str, Any]] = []
    for mode in modes:
        print(mode)
        if mode == "compiled":
            _compile(models, works)
        for each in zip(*works.values(), strict=True):
            found = _compare(dict(zip(works, each, strict=True)))
            records += [{"mode": mode, **record} for record in found]
    return records


def _models(setting: Setting) -> dict[str, Llama]:
    """A model for each side, with the same parameters."""
    torch.set_default_dtype(setting.dtype)
    models: dict[str, Llama] = {}
    for side in SIDES:
        with torch.device("meta" if models else DEVICE):
            models[side] = Llama(setting.shape)
    torch.set_default_dtype(torch.float32)
    first, *others = models.values()
    for other in others:
        other.load_state_dict(first.state_dict(keep_vars=True), assign=True)
    return models


def _compile(models: dict[str, Llama], works: dict[str, list[Workload]]) -> None:
    """Compile the blocks of all, the native ones' while no override is on."""
    # All graphs are of one function, which beyond the limit would run eager.
    torch._dynamo.config.recompile_limit = 2 * sum(map(len, works.values()))
    for side, model in models.items():
        backend = _backend()
        for block in model.blocks:
            block.compile(backend=backend, dynamic=False)
        opgraft.enable()
        if side != "opgraft":
            opgraft.disable()
        for workload in works[side]:
            workload.run()
    opgraft.enable()


def _backend() -> Callable[..., Any]:
    """One of its own, which keeps what it compiles apart from the other sides'."""
    if DEVICE == "cpu":
        from torch._dynamo.backends.debugging import aot_eager

        return functools.partial(aot_eager)
    from torch._inductor.compile_fx import compile_fx

    return functools.partial(compile_fx)


def _scope(side: str) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if side == "opgraft" else opgraft.disabled()


def _compare(works: dict[str, Workload]) -> list[dict[str, Any]]:
    """A record for each side of a workload; prints them."""
    memory = {side: _memory_of(workload, side) for side, workload in works.items()}
    before = _hits()
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    load = works["native"].load
    gc.collect()
    gc.freeze()  # a collection of all that was imported takes longer than a step
    for n in range(load.rounds):
        for side in ORDERS[n % len(ORDERS)]:
            with _scope(side):
                seconds[side].append(_seconds(works[side].run, load.steps))
    hits = {name: n - before.get(name, 0) for name, n in _hits().items()}
    records = [
        {**_record(works[side], side, seconds), "gigabytes": memory[side] / 1e9} for side in SIDES
    ]
    for record in records:
        ratio = "{ratio:.3f} ({ratio_from:.3f} to {ratio_to:.3f})".format(**record)
        speed = "{workload:8} {side:12} {tokens_per_second:9.0f} tokens/s".format(**record)
        print(f"{speed} {ratio} {record['gigabytes']:.2f} GB")
    print(
        "  hits:", ", ".join(f"{name} {n}" for name, n in hits.items() if n) or "none", flush=True
    )
    return records


def _memory_of(workload: Workload, side: str) -> int:
    """The bytes that a step allocates at the most beyond what is there, after some that compile."""
    with _scope(side):
        for _ in range(3):
            workload.run()
        if DEVICE == "cpu":
            return 0
        there = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        workload.run()
        return torch.cuda.max_memory_allocated() - there


def _seconds(run: Callable[[], object], steps: int) -> float:
    """The median of a turn's steps; of several, without the first."""
    times = []
    for _ in range(steps):
        _synchronize()
        start = time.perf_counter()
        run()
        _synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times)


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _record(workload: Workload, side: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """A side's speed, and its median ratio to native's in the same round."""
    median = statistics.median(seconds[side])
    pairs = zip(seconds["native"], seconds[side], strict=True)
    ratio, low, high = median_and_interval([native / own for native, own in pairs])
    return {
        "workload": workload.name,
        "side": side,
        "tokens_per_second": workload.tokens / median,
        "milliseconds": median * 1e3,
        "ratio": ratio,
        "ratio_from": low,
        "ratio_to": high,
    }


def _hits() -> dict[str, int]:
    return {o.name.removeprefix("opgraft_kernels."): o.hits for o in opgraft.overrides()}


def smoke() -> None:
    """Everything in small on the CPU, with the overrides under Triton's interpreter: whether the
    script works, and the overrides agree with native."""
    torch.manual_seed(0)
    loads = {
        "training": Load(2, 33, rounds=1),
        "prefill": Load(2, 40, rounds=1),
        "decode": Load(2, 8, rounds=1, steps=2),
    }
    setting = Setting(Shape(1, 32, 2, 2, 64, 50), loads, torch.float32)
    bench(setting, ["eager", "compiled"])
    hits = sum(_hits().values())
    model = Llama(setting.shape)
    for workload in workloads(model, loads, "cpu"):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        ours = workload.run()
        model.load_state_dict(state)
        with opgraft.disabled():
            torch.testing.assert_close(workload.run(), ours)
        model.load_state_dict(state)
    assert sum(_hits().values()) > hits
    print("overrides were hit and agree with native; nothing was measured")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="run on the CPU, measure nothing")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    options = parser.parse_args(arguments)
    if options.smoke:
        smoke()
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke runs without one")
    else:
        records = bench(full(options.rounds), options.modes)
        print("written to", _common.save("llama", torch.cuda.get_device_name(), records))


if __name__ == "__main__":
    main()
