"""A rank that compares its tables with another's.

`python -m tests.crossover.rank RANK WORLD FILE [GROUP] [FAILS]`.

The environment says where its tables are. GROUP has the ranks that compare theirs, as "1,2"; on the
ranks in FAILS it cannot be told what the device is.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import torch.distributed as dist

from opgraft import OpgraftError, tuning
from opgraft.crossover import models
from tests.crossover.test_routing import register


def main(rank: int, world: int, file: str, members: str = "", failing: str = "") -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    register()
    group = dist.new_group([int(each) for each in members.split(",")]) if members else None
    if str(rank) in failing.split(","):
        models.of_dispatch_key = fail
    try:
        tuning.require_same(group)
        print("the same")
    except OpgraftError as error:
        print(error)
    dist.barrier()
    dist.destroy_process_group()


def fail(dispatch_key: str) -> NoReturn:
    raise RuntimeError("no driver")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
