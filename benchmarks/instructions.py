"""Counts the instructions that a router takes for a miss and for a hit, where a clock is too noisy.

    python benchmarks/instructions.py                       # this checkout
    python benchmarks/instructions.py --beside ../before    # and another one, whose core is built

Valgrind counts what runs inside `at::_ops::_softmax::call`: dispatch, the router and the kernel.
Each number is the difference of two runs of one process each, one of them with more calls, per
call: what only first calls do cancels. *native* has no router. *miss* has one override, or eight,
whose condition never holds. *hit* has one, a Python function that returns a tensor which is there.
It takes about a minute for each pair of runs on two cores; valgrind must be installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _common

ROOT = Path(__file__).resolve().parents[1]
#: How many calls the two runs of a case make.
CALLS = (500, 2500)
#: By case: how many overrides there are, and whether one of them takes the call.
CASES: Mapping[str, tuple[int, bool]] = {
    "native": (0, False),
    "miss, 1 override": (1, False),
    "miss, 8 overrides": (8, False),
    "hit": (1, True),
}
_PROGRAM = """
import sys, torch, opgraft
from opgraft import when
calls, overrides, hits = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
torch.set_num_threads(1)
x, there = torch.ones(4, 64), torch.ones(4, 64)
made = [
    opgraft.register_op_override(
        "aten", "_softmax", "CPU", lambda self, dim, half_to_float: there, name=f"{index}",
        cond=(when.ndim("self") == 2) & (when.dtype("self", torch.float32))
        & (when.size("self", 0) == 4) & (when.size("self", -1) == (64 if hits else 1000 + index)),
    )
    for index in range(overrides)
]
with torch.inference_mode():
    for _ in range(calls):
        if len(made) and made[0].hits < 5:
            there = torch.ones(4, 64)  # a first hit must return a new tensor
        torch._softmax(x, -1, False)
assert sum(each.hits for each in made) == (calls if hits else 0)
"""


def _instructions(tree: Path, case: str, calls: int) -> int:
    """The instructions of so many calls, with what first calls do."""
    overrides, hits = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        done = subprocess.run(
            [
                *(*valgrind, "--toggle-collect=at::_ops::_softmax::call*"),
                *(sys.executable, "-c", _PROGRAM, str(calls), str(overrides), str(hits)),
            ],
            env=os.environ
            | {
                "PYTHONPATH": str(tree / "python"),
                # The installed checkout's, which may be another one.
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            },
            capture_output=True,
            text=True,
            check=False,
        )
    counted = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or counted is None:
        raise SystemExit(f"valgrind failed for {case!r} in {tree}:\n{done.stderr[-2000:]}")
    return int(counted[1])


def _per_call(tree: Path, case: str, pool: ThreadPoolExecutor) -> float:
    few, many = pool.map(lambda calls: _instructions(tree, case, calls), CALLS)
    return (many - few) / (CALLS[1] - CALLS[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],  # type: ignore[union-attr]
    )
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT")
    parser.add_argument("--smoke", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if options.smoke:
        for case, (overrides, hits) in CASES.items():
            arguments = ["6", str(overrides), str(hits)]
            subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], check=True)
            print(f"{case}: works")
        return
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed: apt install valgrind")
    trees = {"this": ROOT}
    if options.beside is not None:
        trees["beside"] = options.beside.resolve()
    records = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for case in CASES:
            row = {name: _per_call(tree, case, pool) for name, tree in trees.items()}
            print(f"{case:18}", *(f"{name} {n:8.0f}" for name, n in row.items()), flush=True)
            records.append({"case": case, **row})
    print(_common.save("instructions", _common.cpu_name(), records))


if __name__ == "__main__":
    main()
