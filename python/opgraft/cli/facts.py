"""Facts about this process and this machine that several commands print."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import torch

from opgraft import dsl as dsls
from opgraft import packs, when
from opgraft.base import distributions
from opgraft.control import overrides
from opgraft.core import loader
from opgraft.core.building import TorchBuild
from opgraft.ready import readiness
from opgraft.ready.readiness import State
from opgraft.registry import Override, WhenNotReady
from opgraft.when import nodes


def versions() -> dict[str, str | None]:
    """The versions of opgraft, torch and the DSLs (None: not installed)."""
    known = {"opgraft": distributions.version("opgraft"), "torch": str(torch.__version__)}
    return known | {dsl.name: dsl.version() for dsl in dsls.KNOWN}


def core() -> dict[str, Any]:
    """Whether there is a compiled core, which one, and if not, why."""
    status = loader.status()
    module = loader.load()
    return {
        "built": status.built,
        "file": getattr(module, "__file__", None),
        "torch": str(TorchBuild(*module.torch_build())) if module is not None else None,
        "reason": status.reason,
        "in_use": loader.in_use() is not None,
    }


def pack_rows() -> list[dict[str, Any]]:
    """Every installed pack, and what became of it."""
    return [
        {
            "name": status.pack.name,
            "distribution": status.pack.distribution,
            "version": status.pack.version,
            "state": status.state,
            "reason": status.reason,
            "overrides": len(overrides(pack=status.pack.name)),
        }
        for status in packs.statuses()
    ]


def override_rows() -> list[dict[str, Any]]:
    """Every registered override, chain by chain, in the order of asking."""
    return [
        {
            "op": override.op,
            "dispatch_key": override.dispatch_key,
            "name": override.name,
            "dsl": override.dsl,
            "pack": override.pack,
            "priority": override.priority,
            "enabled": override.enabled,
            "reason": override.why_off() or why_unreachable(override),
            "kernels": kernels(override),
            "when_not_ready": when_not_ready(override),
            "readiness": [state.as_dict() for state in readiness_states(override)],
            "tables": list(table_rows(override)),
        }
        for override in overrides()
    ]


def table_rows(override: Override) -> Iterator[dict[str, Any]]:
    """The crossover tables in force on each model of device here; none without a crossover."""
    if override.decisions is None:
        return
    for model, in_force in override.decisions.by_model(override.dispatch_key).items():
        if in_force is None:
            yield {"device": model.name, "file": None}
            continue
        table, entry = in_force.source.table, in_force.source.entry
        yield {
            "device": model.name,
            "file": str(table.path),
            "owner": in_force.source.owner,
            "of": in_force.source.of,
            "measured_on": table.model.name,
            "margin": in_force.source.margin,
            "measured": dict(entry.measured),
            "days_old": _days_since(entry.measured.get("date", "")),
            "digest": in_force.digest,
            # Which count where the first one decides nothing.
            "behind": [str(source.table.path) for source in in_force.sources[1:]],
        }


def _days_since(date: str) -> int | None:
    try:
        return (datetime.date.today() - datetime.date.fromisoformat(date)).days
    except ValueError:
        return None


def table_text(row: dict[str, Any]) -> str:
    """Which table is in force on a model of device, whose it is, and how old."""
    if row["file"] is None:
        return f"none for {row['device']}"
    owner = "your own" if row["owner"] == "user" else "its author's"
    days = "" if row["days_old"] is None else f", {row['days_old']} days old"
    other = "" if row["of"] == "this device" else f", of {row['measured_on']}"
    behind = "".join(f", then {path.rpartition('/')[2]}" for path in row["behind"])
    return f"{row['file'].rpartition('/')[2]} ({owner}{other}{days}){behind}"


def when_not_ready(override: Override) -> WhenNotReady:
    """What a call of an override does at present whose kernels are not compiled."""
    return "wait" if override.plans is None else override.plans.readiness.policy


def readiness_states(override: Override) -> list[State]:
    """What became of each kind of call whose kernels somebody asked for."""
    return [] if override.plans is None else override.plans.readiness.states()


def kernels(override: Override) -> str:
    """For how many kinds of calls the kernels are ready; empty where its calls simply wait."""
    found = readiness.summary(readiness_states(override))
    return found or ("not asked for" if when_not_ready(override) == "native" else "")


def capabilities() -> list[tuple[int, int]]:
    """The compute capability of every CUDA device, in the devices' order."""
    if torch.version.hip or not torch.cuda.is_available():
        return []
    return [nodes.cuda_capability(index) for index in range(torch.cuda.device_count())]


def why_unreachable(override: Override) -> str | None:
    """Why no call on this machine can reach an enabled override; None where one can."""
    key = override.dispatch_key
    if not has_device(key):
        return f"there is no {key} device here"
    if not isinstance(override.cond, when.Condition) or not capabilities() or key != "CUDA":
        return None
    parts = [nodes.part_against_capability(override.cond, each) for each in capabilities()]
    if any(part is None for part in parts):
        return None
    found = ", ".join(map(str, sorted(set(capabilities()))))
    return f"{parts[0]!r} cannot hold here: the GPUs are {found}"


def has_device(dispatch_key: str) -> bool:
    """Whether there is a device whose tensors dispatch to a key."""
    if dispatch_key == "CPU":
        return True
    if dispatch_key in ("CUDA", "HIP"):  # torch says cuda on ROCm, too
        return torch.cuda.is_available()
    backend = getattr(torch, dispatch_key.lower(), None)
    available = getattr(backend, "is_available", None)
    return bool(available()) if available is not None else True
