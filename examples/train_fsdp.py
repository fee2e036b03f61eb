"""Trains a transformer by FSDP2 on several GPUs, with kernels that the model does not mention.

Each rank decides on each call by itself; docs/distributed.md says what that means. Without GPUs
ranks communicate over gloo, and Triton kernels run in its interpreter at the `CPU` key: the results
are right, but it is slow.

    torchrun --nproc-per-node 2 examples/train_fsdp.py --steps 10
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which the first hit does

import opgraft_kernels

ON_GPU = torch.cuda.is_available()
VOCABULARY = 256
WIDTH, HEADS, BLOCKS = (1024, 16, 8) if ON_GPU else (256, 4, 2)
BATCH, LENGTH = (8, 1024) if ON_GPU else (4, 32)


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sharded(device: torch.device) -> Model:
    """The model, each block of it sharded over the ranks."""
    torch.manual_seed(0)  # the same weights on all ranks, from which each keeps its shard
    model = Model().to(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if ON_GPU else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def batch(step: int, device: torch.device) -> torch.Tensor:
    """Text of one letter after the other, from another one on each rank and in each step."""
    start = torch.arange(BATCH) * 31 + step * 7 + dist.get_rank() * 13
    return ((start[:, None] + torch.arange(LENGTH + 1)) % VOCABULARY).to(device)


def train(model: Model, steps: int, device: torch.device) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        tokens = batch(step, device)
        logits = model(tokens[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    device = torch.device("cpu")
    if ON_GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    overrides = opgraft_kernels.register()
    losses = train(sharded(device), steps, device)
    hits = {override.name: override.hits for override in overrides if override.hits}
    said = ", ".join(f"{name} {count}" for name, count in hits.items()) or "none"
    # In one write: ranks share the terminal, and torchrun leaves their output unbuffered.
    line = f"rank {dist.get_rank()}: loss {losses[0]:.4f} -> {losses[-1]:.4f}; hits: {said}\n"
    print(line, end="", flush=True)
    dist.destroy_process_group()
    if not losses[-1] < losses[0]:
        raise SystemExit("train_fsdp: it did not learn")


if __name__ == "__main__":
    main()
