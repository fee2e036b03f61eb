"""Compares `opgraft profile` with PyTorch's profiler read by hand: each op's share of the time.

    python benchmarks/profile_shares.py            # Llama, ResNet-50, a graph network; on a GPU
    python benchmarks/profile_shares.py --smoke    # tiny, on the CPU: does this script work?

Each side is a process of its own, three steps of a training after three that do not count. By hand
means: `torch.profiler` around the steps, the sum of an op's own kernels, over the sum of all
kernels. The goal is that no op's shares differ by more than two points.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import _common
import _model_zoo
import torch

MODELS = ("llama-1.2b train", "resnet50 train", "gcn train")
WARM_UP, STEPS = 3, 3
#: Points between the two shares of an op, at the most.
GOAL = 2.0
#: Ops below this many percent on both sides are not listed.
_LEAST = 0.5


def work(name: str, smoke: bool, *, by_hand: bool) -> None:
    """Train; print the shares by PyTorch's profiler if `by_hand`."""
    torch.manual_seed(0)
    step = _model_zoo.ZOO[name].make("cpu" if smoke else "cuda", smoke).step
    for _ in range(WARM_UP):
        step()
    if not by_hand:  # `opgraft profile` counts the optimizer's steps
        for _ in range(STEPS + 1):
            step()
        return
    with torch.profiler.profile() as profiler:
        for _ in range(STEPS):
            step()
        if not smoke:
            torch.cuda.synchronize()
    averages = profiler.key_averages()
    own = {
        each.key: each.self_cpu_time_total if smoke else each.self_device_time_total
        for each in averages
        if each.key.startswith("aten::")
    }
    total = sum(
        each.self_cpu_time_total if smoke else each.self_device_time_total
        for each in averages
        if not each.is_user_annotation
        and each.device_type.name == ("CPU" if smoke else "CUDA")
        and (not smoke or each.key.startswith("aten::"))
    )
    print(json.dumps({op: 100 * time / total for op, time in own.items() if time}))


def by_hand(name: str, options: Sequence[str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--work", name, "--by-hand", *options],
        env=os.environ | {"OPGRAFT_DISABLE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def by_opgraft(name: str, options: Sequence[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.json")
        subprocess.run(
            [
                *(sys.executable, "-m", "opgraft", "profile", f"--warmup={WARM_UP}"),
                *(f"--steps={STEPS}", f"--json={path}", f"--output={folder}/profile.txt"),
                *(__file__, "--work", name, *options),
            ],
            check=True,
        )
        rows = json.loads(path.read_text())["ops"]
    shares: dict[str, float] = {}
    for row in rows:
        op = row["op"].split(".")[0]  # torch's profiler knows no overloads
        shares[op] = shares.get(op, 0.0) + 100 * row["share"]
    return shares


def compare(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[dict[str, object]]:
    """A row for each op of both sides, the largest share first.

    Ops that one side does not have are left out: a row of `opgraft profile` is the op that was
    called, the other's the one that launched the kernel.
    """
    return [
        {"op": op, "opgraft_percent": round(ours[op], 2), "by_hand_percent": round(share, 2)}
        for op, share in sorted(theirs.items(), key=lambda item: -item[1])
        if op in ours and max(share, ours[op]) >= _LEAST
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true", help="run on the CPU, measure nothing")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--by-hand", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.smoke, by_hand=arguments.by_hand)
        return
    options = ["--smoke"] if arguments.smoke else []
    records = []
    for name in ["torch transformer encoder train"] if arguments.smoke else MODELS:
        rows = compare(by_opgraft(name, options), by_hand(name, options))
        assert rows, f"the two sides have no op of {name} in common"
        print(name)
        for row in rows:
            print(f"  {row['opgraft_percent']:6} {row['by_hand_percent']:6}  {row['op']}")
        records += [{"model": name, **row} for row in rows]
    if not arguments.smoke:
        print(_common.save("profile_shares", torch.cuda.get_device_name(), records))
        apart = max(abs(r["opgraft_percent"] - r["by_hand_percent"]) for r in records)
        print(f"largest difference: {apart:.2f} points; goal {GOAL}")


if __name__ == "__main__":
    main()
