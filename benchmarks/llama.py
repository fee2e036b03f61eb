"""A Llama-style model with and without the packs' overrides; nothing in the model changes.

    python benchmarks/llama.py            # 1.2 B parameters: training, prefill and decode
    python benchmarks/llama.py --smoke    # tiny, without a GPU: does this script work?

nn.RMSNorm, F.scaled_dot_product_attention and nn.Linear in bfloat16, as a model's author writes
them. There are three of the model, with the same parameters: one runs with the overrides, two
inside `opgraft.disabled()`, to see what two measurements of the same differ by. They take turns;
eager, and with their blocks under torch.compile, the native ones' compiled while no override is on.
Tokens a second are medians, ratios medians of the ratios to the native turn of the same round, with
the interval that holds the true median in 95 of 100 runs. Wall time, the host's work included.
Memory is the most that PyTorch had allocated in a step.

A turn of decoding is several steps, and the first is not counted: it is the host's work, which
takes longer while its caches hold another model's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import _common
import torch
import torch.nn.functional as F
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported


import opgraft
import opgraft_kernels


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


class Workload(NamedTuple):
    """What is run, and how many tokens it is worth."""

    name: str
    run: Callable[[], object]
    tokens: int


def workloads(model: Llama, sizes: dict[str, tuple[int, int]], device: str) -> list[Workload]:
    """Training, prefill and decode; `sizes`: batch and length of each."""
    shape, dtype = model.shape, model.head.weight.dtype

    def random_tokens(batch: int, length: int) -> torch.Tensor:
        return torch.randint(shape.vocabulary, (batch, length), device=device)

    batch, length = sizes["training"]
    tokens = random_tokens(batch, length)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    batch, length = sizes["prefill"]
    prompt = random_tokens(batch, length)

    @torch.no_grad()
    def prefill() -> torch.Tensor:
        return model(prompt)

    batch, length = sizes["decode"]
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
        Workload(name, runs[name], n * (1 if name == "decode" else length))
        for name, (n, length) in sizes.items()
    ]


# ------------------------------------------------------------------------------------ measuring


def _seconds(run: Callable[[], object], steps: int) -> float:
    """The mean of a turn's steps; of several, without the first."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.mean(times[1:] or times)


def bench(shape: Shape, rounds: int, modes: Sequence[str]) -> list[dict[str, Any]]:
    """A record for every workload, mode and side."""
    opgraft_kernels.register()
    sizes = {"training": (4, 4096), "prefill": (4, 8192), "decode": (16, 4096)}
    models = _models(shape, ("native", "opgraft", "native again"))
    parameters = sum(p.numel() for p in models["native"].parameters())
    print(f"{parameters / 1e9:.2f} B parameters")
    works = {side: workloads(model, sizes, "cuda") for side, model in models.items()}
    scopes = {
        side: contextlib.nullcontext if side == "opgraft" else opgraft.disabled for side in works
    }
    records: list[dict[str, Any]] = []
    for mode in modes:
        if mode == "compiled":
            _compile(models, works)
        for each in zip(*works.values(), strict=True):
            workload = dict(zip(works, each, strict=True))
            memory = {side: _peak_memory(workload[side], scopes[side]) for side in works}
            hits = _hits()
            seconds: dict[str, list[float]] = {side: [] for side in works}
            is_decoding = each[0].name == "decode"
            for n in range(rounds * (10 if is_decoding else 2)):
                # In turns: what comes second finds a warmer GPU.
                for i in range(len(works)):
                    side = list(works)[(n + i) % len(works)]
                    with scopes[side]():
                        steps = 8 if is_decoding else 1
                        seconds[side].append(_seconds(workload[side].run, steps))
            taken = {name: n - hits.get(name, 0) for name, n in _hits().items()}
            found = [_record(mode, each[0], side, seconds, memory[side]) for side in works]
            records += found
            print(
                f"{mode:8} {each[0].name:8}"
                + "".join(
                    f" | {r['side']} {r['tokens_per_second']:9.0f} tokens/s, {r['ratio']:.3f}"
                    f" ({r['ratio_from']:.3f} to {r['ratio_to']:.3f}), {r['gigabytes']:.2f} GB"
                    for r in found
                )
                + " | hits: "
                + (", ".join(f"{name} {n}" for name, n in taken.items() if n) or "none"),
                flush=True,
            )
    return records


def _models(shape: Shape, sides: Sequence[str]) -> dict[str, Llama]:
    """A model for each side, with the same parameters."""
    torch.set_default_dtype(torch.bfloat16)
    models = {}
    for side in sides:
        with torch.device("meta" if models else "cuda"):
            models[side] = Llama(shape)
    torch.set_default_dtype(torch.float32)
    first, *others = models.values()
    for other in others:
        other.load_state_dict(first.state_dict(keep_vars=True), assign=True)
    return models


def _compile(models: dict[str, Llama], works: dict[str, list[Workload]]) -> None:
    """Compile the blocks of all, the native ones' while no override is on."""
    from torch._inductor.compile_fx import compile_fx

    # A graph a side and workload, which all are of one function.
    torch._dynamo.config.recompile_limit = 2 * len(models) * len(works)
    for side, model in models.items():
        # A backend of its own keeps what it compiles apart from the others'.
        backend = functools.partial(compile_fx)
        for block in model.blocks:
            block.compile(backend=backend, dynamic=False)
        opgraft.enable()
        if side != "opgraft":
            opgraft.disable()
        for workload in works[side]:
            workload.run()
    opgraft.enable()


def _peak_memory(workload: Workload, scope: Callable[[], Any]) -> int:
    """The bytes that a step needs at the most, after some that compile."""
    with scope():
        for _ in range(3):
            workload.run()
        torch.cuda.reset_peak_memory_stats()
        workload.run()
        return torch.cuda.max_memory_allocated()


def _record(
    mode: str, workload: Workload, side: str, seconds: dict[str, list[float]], memory: int
) -> dict[str, Any]:
    """A side's speed, and its median ratio to native's in the same turn."""
    median = statistics.median(seconds[side])
    pairs = zip(seconds["native"], seconds[side], strict=True)
    ratios = sorted(native / own for native, own in pairs)
    # The ranks between which a median lies, the turns being independent: those of a binomial
    # distribution, approximated by a normal one.
    half = round(0.98 * len(ratios) ** 0.5)
    middle = len(ratios) // 2
    return {
        "mode": mode,
        "workload": workload.name,
        "side": side,
        "tokens_per_second": workload.tokens / median,
        "milliseconds": median * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_from": ratios[max(middle - half, 0)],
        "ratio_to": ratios[min(middle + half, len(ratios) - 1)],
        "gigabytes": memory / 1e9,
    }


def _hits() -> dict[str, int]:
    return {o.name.removeprefix("opgraft_kernels."): o.hits for o in opgraft.overrides()}


def smoke() -> None:
    """A training step, a prefill and a decode on the CPU, with the overrides under Triton's
    interpreter and without: whether the script works."""
    torch.manual_seed(0)
    overrides = opgraft_kernels.register()
    model = Llama(Shape(1, 32, 2, 2, 64, 50))
    for workload in workloads(
        model, {"training": (2, 33), "prefill": (2, 40), "decode": (2, 8)}, "cpu"
    ):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        ours = workload.run()
        model.load_state_dict(state)
        with opgraft.disabled():
            torch.testing.assert_close(workload.run(), ours)
        model.load_state_dict(state)
    assert sum(override.hits for override in overrides) > 0
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
        records = bench(Shape(), options.rounds, options.modes)
        print("written to", _common.save("llama", torch.cuda.get_device_name(), records))


if __name__ == "__main__":
    main()
