"""Compiles one function in one process after the other, with one compiler cache on disk.

    python cache_steps.py FOLDER STEP ...

A step is a dict in JSON; see `main`. Each runs in a process that is forked before it knows anything
of opgraft, and prints one line of JSON: what the function returned, how often the override ran, and
what the caches did. What the compiler finds out of the machine alone, once for a process, is found
before: which instructions the processor has, and which version its C++ compiler is of.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx
import torch._inductor.lowering

torch.set_num_threads(1)


def softmax_times_two(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2, -1)


def run(step: dict[str, Any], folder: Path) -> dict[str, Any]:
    override = register(step, folder) if step.get("opgraft") else None
    compiled = torch.compile(softmax_times_two, fullgraph=True)
    result = compiled(torch.ones(4, 8))
    counters = torch._dynamo.utils.counters
    return {
        "first": round(float(result[0, 0]), 4),
        "hits": override.hits if override else 0,
        "aot": {name: n for name, n in counters["aot_autograd"].items() if "cache" in name},
        "fx": {name: n for name, n in counters["inductor"].items() if "fxgraph_cache" in name},
    }


def register(step: dict[str, Any], folder: Path) -> Any:
    """An override of softmax whose result tells it apart: all outputs are its `factor`."""
    package = folder / f"version{step.get('factor', 1)}"
    package.mkdir(exist_ok=True)
    (package / "grafted.py").write_text(
        "import torch\n"
        "def softmax(self, dim, half_to_float):\n"
        f"    return torch.full_like(self, {step.get('factor', 1)})\n"
    )
    sys.path.insert(0, str(package))
    import opgraft

    if os.environ.get("OPGRAFT_DISABLE"):
        # As a pack would.
        assert not opgraft.overrides()
    from grafted import softmax  # type: ignore[import-not-found]

    override = opgraft.register_op_override(
        "aten",
        "_softmax",
        "CPU",
        softmax,
        name="grafted",
        cond=opgraft.when.size("self", -1) >= step.get("least", 1),
        compile=step.get("compile", "opaque"),
    )
    # What the contract check would refuse: the values alone differ, and it looks at none.
    if step.get("disable"):
        opgraft.disable(name="grafted")
    if step.get("remove"):
        override.remove()
    return override


def warm_up() -> None:
    """Import what the compiler imports when it first compiles, and leave nothing in its caches."""
    without = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    with (
        torch._inductor.config.patch(without),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        torch.compile(lambda x: x + 1, fullgraph=True)(torch.ones(4, 8))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def main(folder: Path, steps: list[str]) -> None:
    warm_up()
    for text in steps:
        step = json.loads(text)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.environ.update(step.get("environment", {}))
            try:
                print(json.dumps(run(step, folder)), flush=True)
            except BaseException as error:
                print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
