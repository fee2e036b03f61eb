"""One of two processes that share a DTensor over gloo.

python two_processes.py RANK STORE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

from opgraft import when
from tests import ops
from tests.pt2 import models


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    override = models.override("_softmax", ops.softmax, when.size("self", 0) == 8)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(128, dtype=torch.float32).reshape(16, 8).sin()
    sharded = DTensor.from_local(whole.chunk(2)[rank], mesh, [Shard(0)])
    counts = []
    for function in (softmax, torch.compile(softmax, backend="aot_eager", fullgraph=True)):
        before = override.hits
        result: Any = function(sharded)
        torch.testing.assert_close(result.full_tensor(), (whole * 2).softmax(-1))
        counts.append(override.hits - before)
    dist.destroy_process_group()
    print(f"eager: {counts[0]} hit, compiled: {counts[1]} hit")


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2, -1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    # DTensor's caches keep the process group, whose threads so outlive its destruction. Where one
    # drops a tensor while Python ends, Python ends the thread, which in C++ aborts the process:
    # "terminate called without an active exception". Here Python does not end.
    sys.stdout.flush()
    os._exit(0)
