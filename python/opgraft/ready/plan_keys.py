"""By what a launch plan is known that one process keeps for others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from opgraft.base import env
from opgraft.cache import origins, plans
from opgraft.ops.schema import Call
from opgraft.ready import request
from opgraft.registry import Override

if TYPE_CHECKING:
    from opgraft.core.interface import Core

#: Of a device's properties those that kernels, and what launches them, may depend on. GPUs of one
#: model differ in others, such as the memory that the driver leaves.
_PROPERTIES = (
    *("name", "major", "minor", "multi_processor_count", "warp_size", "L2_cache_size"),
    *("shared_memory_per_block", "shared_memory_per_block_optin"),
    *("shared_memory_per_multiprocessor", "regs_per_multiprocessor"),
    *("max_threads_per_multi_processor", "max_threads_per_block"),
)


def plan_key(
    core: Core, override: Override, call: Call, asked: request.Request
) -> plans.Key | None:
    """The key of a call's plan, as JSON has it; None where no plan of it may be kept.

    It holds all that a plan depends on, but for the sources: the override, the kind of call with
    the thread's state, the device, versions, and what of the environment DSLs read.

    Args:
        core: the core.
        override: whose impl is recorded.
        call: the call, on the thread that makes it.
        asked: what a worker is told of it.
    """
    if not (env.shares_plans() and override.launch_plan) or override.takes_keyset:
        return None
    if any(asked["needs"]) or _may_write_to_shared_memory(call):
        return None
    schema = call.op.overload._schema
    words = core.plan_key(call.values, schema.name, schema.overload_name, portable=True)
    if words is None:
        return None
    device = asked["device"]
    return {
        "format": plans.FORMAT,
        "override": override.identity,
        "impl": asked["impl"],
        "words": words.words,
        "device": None if device is None else _reduced(device),
        "versions": versions(),
        "environment": origins.environment("TRITON_", "CUTE_DSL_", "CUTLASS_"),
    }


def versions() -> dict[str, str]:
    """The versions on which a plan depends: torch's with what it was built for."""
    return origins.versions() | {"torch": torch.__version__}


def _may_write_to_shared_memory(call: Call) -> bool:
    """Whether the op writes, and arguments share memory.

    Who records gets tensors that share none: an impl that looks whether they do would do something
    else. For an op that only reads its arguments, either is right.
    """
    if not call.op.writes:
        return False
    storages = [tensor.untyped_storage()._cdata for tensor in call.tensors()]
    return len(set(storages)) < len(storages)


def _reduced(device: dict[str, Any]) -> dict[str, Any]:
    properties = device["properties"]
    found = {name: properties[name] for name in _PROPERTIES if name in properties}
    return {"type": device["type"], "properties": found}
