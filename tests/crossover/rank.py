"""Ranks that compare their tables with each other's.

`python -m tests.crossover.rank FOLDER WORLD [GROUP] [FAILS]`.

Each rank has its tables in a folder of its number, and writes there what it says. GROUP has the
ranks that compare theirs, as "1,2"; on the ranks in FAILS it cannot be told what the device is.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from opgraft import OpgraftError, tuning
from opgraft.crossover import models
from tests import forked_ranks
from tests.crossover.test_routing import register


def compare(folder: Path, rank: int, world: int, members: str, failing: str) -> None:
    os.environ["OPGRAFT_TABLES"] = str(folder / str(rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        timeout=timedelta(minutes=1),  # for ranks whose others have failed
        rank=rank,
        world_size=world,
    )
    register()
    group = dist.new_group([int(each) for each in members.split(",")]) if members else None
    if str(rank) in failing.split(","):
        models.of_dispatch_key = fail
    try:
        tuning.require_same(group)
        said = "the same"
    except OpgraftError as error:
        said = str(error)
    (folder / str(rank) / "said").write_text(said)
    dist.barrier()
    dist.destroy_process_group()


def fail(dispatch_key: str) -> NoReturn:
    raise RuntimeError("no driver")


def main(folder: Path, world: int, members: str = "", failing: str = "") -> int:
    """What the ranks' largest exit status is."""
    return forked_ranks.run(lambda rank: compare(folder, rank, world, members, failing), world)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
