"""A Llama-style model with and without the packs' overrides; nothing in the model changes.

    python benchmarks/llama.py            # 1.2 B parameters: training, prefill and decode
    python benchmarks/llama.py --smoke    # tiny, without a GPU: does this script work?

nn.RMSNorm, F.scaled_dot_product_attention and nn.Linear in bfloat16, as a model's author writes
them. The model runs with the overrides and, inside `opgraft.disabled()`, without them, a step each
in turn; eager, and with its blocks under torch.compile. Tokens a second are medians, ratios medians
of the ratios to the native step of the same turn. Wall time, the host's work included.
"""

from __future__ import annotations

import argparse
import contextlib
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


def _seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def bench(shape: Shape, rounds: int, modes: Sequence[str]) -> list[dict[str, Any]]:
    """A record for every workload, mode and side."""
    opgraft_kernels.register()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Llama(shape)
    torch.set_default_dtype(torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e9:.2f} B parameters")
    sizes = {"training": (4, 4096), "prefill": (4, 8192), "decode": (16, 4096)}
    scopes = {
        "native": opgraft.disabled,
        "native again": opgraft.disabled,  # what two measurements of the same differ by
        "opgraft": contextlib.nullcontext,
    }
    records: list[dict[str, Any]] = []
    for mode in modes:
        if mode == "compiled":
            for block in model.blocks:
                block.compile()
        for workload in workloads(model, sizes, "cuda"):
            for scope in (opgraft.disabled, contextlib.nullcontext):
                with scope():
                    for _ in range(3):
                        workload.run()
            hits = _hits()
            seconds: dict[str, list[float]] = {side: [] for side in scopes}
            # A step of decoding is milliseconds of the host's time, which comes and goes.
            for n in range(rounds * (40 if workload.name == "decode" else 2)):
                # In turns: what comes second finds a warmer GPU.
                for i in range(len(scopes)):
                    side = list(scopes)[(n + i) % len(scopes)]
                    with scopes[side]():
                        seconds[side].append(_seconds(workload.run))
            taken = {name: n - hits.get(name, 0) for name, n in _hits().items()}
            found = [_record(mode, workload, side, seconds) for side in scopes]
            records += found
            print(
                f"{mode:8} {workload.name:8}"
                + "".join(
                    f" | {r['side']} {r['tokens_per_second']:9.0f} tokens/s, {r['ratio']:.3f}"
                    for r in found
                )
                + " | hits: "
                + (", ".join(f"{name} {n}" for name, n in taken.items() if n) or "none"),
                flush=True,
            )
    return records


def _record(
    mode: str, workload: Workload, side: str, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    """A side's speed, and its median ratio to native's in the same turn."""
    median = statistics.median(seconds[side])
    pairs = zip(seconds["native"], seconds[side], strict=True)
    return {
        "mode": mode,
        "workload": workload.name,
        "side": side,
        "tokens_per_second": workload.tokens / median,
        "milliseconds": median * 1e3,
        "ratio": statistics.median(native / own for native, own in pairs),
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
