"""Whether the processes of a job decide alike: which tables are in force in each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from opgraft.errors import OpgraftError
from opgraft.registry import Selector, registry


class _InForce(NamedTuple):
    """What decides for one override on one model of device."""

    digest: str
    file: str


_NOTHING = _InForce("", "no table")


def _in_force() -> dict[str, _InForce]:
    """What is in force for each override with a crossover, on each model of device here."""
    found = {}
    for override in registry.overrides(Selector()):
        if override.decisions is None:
            continue
        for model, in_force in override.decisions.by_model(override.dispatch_key).items():
            owner = override.pack or "user"
            key = f"{override.name} ({owner}'s, {override.op} at {override.dispatch_key})"
            found[f"{key} on {model.name}"] = (
                _NOTHING
                if in_force is None
                else _InForce(
                    in_force.digest,
                    " and ".join(str(source.table.path) for source in in_force.sources),
                )
            )
    return found


def digest() -> str:
    """A hash of the tables that are in force on this process's devices; empty without any.

    Two processes with the same overrides and the same hash decide alike. It initialises CUDA where
    an override with a crossover is for it.

    >>> digest()
    ''
    """
    lines = [f"{key}: {each.digest}" for key, each in sorted(_in_force().items()) if each.digest]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""


def require_same(group: Any = None) -> None:
    """Raise where the ranks of a process group decide by different tables.

    Ranks that decide differently run different kernels for the same call: their steps take
    different times, and what must be bitwise equal on all of them is not. Every rank of the group
    must call it.

    Args:
        group: of `torch.distributed`; None: the default group.

    Raises:
        OpgraftError: the tables differ, on every rank, with the names of the files; those of a rank
            cannot be told, on every rank, with the reason; there is no process group; or this rank
            is not in it.

    >>> import os, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> require_same()
    >>> dist.destroy_process_group()
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise OpgraftError(
            "require_same compares the ranks of a process group, and there is none: call "
            "torch.distributed.init_process_group first"
        )
    if dist.get_rank(group) < 0:
        raise OpgraftError(
            f"rank {dist.get_rank()} is outside of the group that require_same was given: call it "
            "on the ranks of the group alone"
        )
    fault = None
    mine: dict[str, _InForce] = {}
    try:
        mine = _in_force()
    except Exception as error:  # the other ranks would wait for this one until they time out
        fault = error
    ranks = _gathered(mine, fault, group)
    faults = [f"rank {rank}: {said}" for rank, (_, said) in ranks.items() if said is not None]
    if faults:
        raise OpgraftError(
            f"the ranks' crossover tables cannot be compared: {'; '.join(faults)}"
        ) from fault
    differences = _differences({rank: tables for rank, (tables, _) in ranks.items()})
    if differences:
        raise OpgraftError(
            "the ranks decide by different crossover tables; give all of them the same files: "
            + "; ".join(differences)
        )


def _gathered(
    mine: Mapping[str, _InForce], fault: Exception | None, group: Any
) -> dict[int, tuple[Mapping[str, _InForce], str | None]]:
    """By rank of the job: what is in force there, or else why that cannot be told."""
    import torch.distributed as dist

    said = None if fault is None else f"{type(fault).__name__}: {fault}"
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, ({key: tuple(each) for key, each in mine.items()}, said), group)
    numbers = dist.get_process_group_ranks(group or dist.group.WORLD)
    return {
        number: ({key: _InForce(*each) for key, each in tables.items()}, said)
        for number, (tables, said) in zip(numbers, found, strict=True)
    }


def _differences(ranks: Mapping[int, Mapping[str, _InForce]]) -> list[str]:
    """What differs between ranks, by override and device: which ranks have which file."""
    differences = []
    for key in sorted(set().union(*ranks.values())):
        by_table: dict[_InForce, list[int]] = {}
        for number, rank in ranks.items():
            # The path may differ: the same file copied to each machine is the same table.
            each = rank.get(key, _NOTHING)
            same = next((other for other in by_table if other.digest == each.digest), each)
            by_table.setdefault(same, []).append(number)
        if len(by_table) > 1:
            said = (
                f"rank {', '.join(map(str, numbers))} {each.file}"
                for each, numbers in by_table.items()
            )
            differences.append(f"{key}: {', '.join(said)}")
    return differences
