"""Small trainings over several processes, each of which says what it computed and who was hit.

    python -m tests.distributed.scenarios WORLD FOLDER [gloo|nccl]

runs every scenario of that many processes, of which each writes `FOLDER/RANK.json`. Each runs
twice, without overrides and with them. Over gloo tensors are on the CPU, over NCCL each rank has a
GPU.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import opgraft
from opgraft import when
from tests import forked_ranks, ops

WIDTH = 16
STEPS = 3
#: The override of the forward takes calls of as many rows: on a short batch a rank goes native.
FEWEST_ROWS = 8

Scenario = Callable[[str], list[float]]
SCENARIOS: dict[str, tuple[Scenario, tuple[int, ...]]] = {}
#: Those that run on GPUs as well.
ON_GPUS = (
    "ddp",
    "fsdp2",
    "fsdp2_with_checkpointing",
    "tensor_parallel_with_sequence_parallel_norms",
)


def scenario(*worlds: int) -> Callable[[Scenario], Scenario]:
    """Add a training that returns its losses; `worlds`: over how many processes it runs."""

    def add(run: Scenario) -> Scenario:
        SCENARIOS[run.__name__] = (run, worlds)
        return run

    return add


def where() -> torch.device:
    """The device of this process's tensors."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# ------------------------------------------------------------------------------------- overrides


def gelu_backward(
    grad_output: torch.Tensor, self: torch.Tensor, *, approximate: str
) -> torch.Tensor:
    cdf = 0.5 * (1 + torch.erf(self * 0.5**0.5))
    pdf = torch.exp(-0.5 * self.square()) * 0.3989422804014327
    return grad_output * (cdf + self * pdf)


@contextmanager
def overrides() -> Iterator[list[opgraft.Override]]:
    """A forward op and a backward op overridden, while this lasts."""
    rows = when.numel("input") // when.size("input", -1)
    key = where().type.upper()
    registered = [
        opgraft.register_op_override(
            "aten", "native_layer_norm", key, ops.layer_norm, cond=rows >= FEWEST_ROWS
        ),
        opgraft.register_op_override(
            "aten",
            "gelu_backward",
            key,
            gelu_backward,
            cond=when.value("approximate") == "none",
        ),
    ]
    try:
        yield registered
    finally:
        for override in registered:
            override.remove()


# ------------------------------------------------------------------------------------- trainings


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(where())


def batch(step: int, rows: int = 12) -> torch.Tensor:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, WIDTH, generator=generator).to(where())


def train(model: nn.Module, rows: int = 12) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step, rows)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@scenario(2, 4)
def ddp(folder: str) -> list[float]:
    return train(nn.parallel.DistributedDataParallel(network()))


@scenario(2)
def ddp_with_a_short_batch_on_one_rank(folder: str) -> list[float]:
    rows = FEWEST_ROWS - 3 if dist.get_rank() else 12
    return train(nn.parallel.DistributedDataParallel(network()), rows)


@scenario(2)
def ddp_compiled(folder: str) -> list[float]:
    torch._dynamo.reset()
    model = nn.parallel.DistributedDataParallel(network())
    return train(torch.compile(model, backend="aot_eager"))


def shard(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh(where().type, (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@scenario(2, 4)
def fsdp2(folder: str) -> list[float]:
    return train(shard(network()))


@scenario(2)
def fsdp2_with_checkpointing(folder: str) -> list[float]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = network()
    return train(shard(nn.Sequential(*(checkpoint_wrapper(block) for block in model))))


@scenario(2)
def tensor_parallel_with_sequence_parallel_norms(folder: str) -> list[float]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = dist.device_mesh.init_device_mesh(where().type, (dist.get_world_size(),))
    plan = {
        "norm": SequenceParallel(sequence_dim=1),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    whole = network()
    for block in whole:
        parallelize_module(block, mesh, plan)
    inputs = PrepareModuleInput(
        input_layouts=(Replicate(),),
        desired_input_layouts=(Shard(1),),
        use_local_output=False,
    )
    parallelize_module(whole, mesh, inputs)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)  # the same on every rank
        x = torch.randn(2, 2 * FEWEST_ROWS, WIDTH, generator=generator).to(where())
        optimizer.zero_grad()
        out = whole(x)
        loss = out.full_tensor().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@scenario(2)
def pipeline_stages(folder: str) -> list[float]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, world = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(network()[rank], rank, world, where())
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda out, _: out.square().mean())
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.05)
    found: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2 * FEWEST_ROWS, WIDTH, generator=generator).to(where())
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=losses)
        optimizer.step()
        found += [loss.item() for loss in losses]
    return found


# ------------------------------------------------------------------------------------------ main


def run(name: str, folder: str) -> dict[str, Any]:
    """What a scenario computes without overrides and with them, and who was hit."""
    torch.manual_seed(0)
    stock = SCENARIOS[name][0](folder)
    dist.barrier()
    with overrides() as registered:
        ours = SCENARIOS[name][0](folder)
        hits = {override.op: override.hits for override in registered}
        misses = {override.op: override.misses for override in registered}
    dist.barrier()
    return {"stock": stock, "ours": ours, "hits": hits, "misses": misses}


def run_all(rank: int, world: int, folder: str, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    found = {
        name: run(name, folder)
        for name, (_, worlds) in SCENARIOS.items()
        if world in worlds and (backend == "gloo" or name in ON_GPUS)
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(world: int, folder: str, backend: str = "gloo") -> int:
    """What the ranks' largest exit status is."""
    for module in ("fsdp", "tensor.parallel", "pipelining"):  # once, for all ranks
        import_module(f"torch.distributed.{module}")
    return forked_ranks.run(lambda rank: run_all(rank, world, folder, backend), world)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
