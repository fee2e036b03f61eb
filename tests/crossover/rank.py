"""A rank that compares its tables with another's: `python -m tests.crossover.rank RANK WORLD FILE`.

The environment says where its tables are.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from opgraft import OpgraftError, tuning
from tests.crossover.test_routing import register


def main(rank: int, world: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    register()
    try:
        tuning.require_same()
        print("the same")
    except OpgraftError as error:
        print(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
