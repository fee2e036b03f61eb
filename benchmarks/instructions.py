"""Counts the instructions that a router takes for a miss and for a hit, where a clock is too noisy.

    python benchmarks/instructions.py                       # this checkout
    python benchmarks/instructions.py --beside ../before    # and another one, whose core is built

Valgrind counts what runs inside `at::_ops::_softmax::call`: dispatch, the router and the kernel;
*from Python*, what runs inside the function behind `torch.softmax`, without grad mode. Each number
is the difference of two runs of one process each, one of them with more calls, per call: what only
first calls do cancels. The C library is left out, as what its allocator takes depends on what it
holds. *native* has no router. *miss* has one override, or eight, of four tests, which ask for other
sizes. Those of *each asked* ask for more and for less, so that no test that they have in common
turns the call away. *hit* has one, a Python function that returns a tensor which is there. It takes
about a minute for each pair of runs on two cores; valgrind must be installed.
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
from typing import NamedTuple

import _common

ROOT = Path(__file__).resolve().parents[1]
#: How many calls the two runs of a case make.
CALLS = (500, 2500)


class Case(NamedTuple):
    """Overrides, and a call of their op."""

    overrides: int
    #: Whether one of them takes the call.
    hits: bool = False
    #: Whether half of them ask for less than the call's size, and half for more.
    between: bool = False
    from_python: bool = False

    @property
    def counted(self) -> str:
        """The functions inside which instructions count."""
        return "*THPVariable_softmax*" if self.from_python else "at::_ops::_softmax::call*"


CASES: Mapping[str, Case] = {
    "native": Case(0),
    "miss, 1 override": Case(1),
    "miss, 8 overrides": Case(8),
    "miss, 8 overrides, each asked": Case(8, between=True),
    "hit": Case(1, hits=True),
    "native, from Python": Case(0, from_python=True),
    "miss, 1 override, from Python": Case(1, from_python=True),
    "miss, 8 overrides, from Python": Case(8, from_python=True),
}
_PROGRAM = """
import sys, torch, opgraft
from opgraft import when
calls, overrides = int(sys.argv[1]), int(sys.argv[2])
hits, between, from_python = (argument == "True" for argument in sys.argv[3:])
torch.set_num_threads(1)
x, there = torch.ones(4, 64), torch.ones(4, 64)
made = [
    opgraft.register_op_override(
        "aten", "_softmax", "CPU", lambda self, dim, half_to_float: there, name=f"{index}",
        cond=when.dtype("self", torch.float32, torch.float16) & (when.ndim("self") == 2)
        & when.is_contiguous("self") & (when.size("self", -1) == size),
    )
    for index in range(overrides)
    for size in [64 if hits else index if between and index % 2 else 1000 + index]
]
with torch.no_grad():
    for _ in range(calls):
        if len(made) and made[0].hits < 5:
            there = torch.ones(4, 64)  # a first hit must return a new tensor
        if from_python:
            torch.softmax(x, -1)
        else:
            torch._softmax(x, -1, False)
assert sum(each.hits for each in made) == (calls if hits else 0)
"""


def _instructions(tree: Path, case: str, calls: int) -> int:
    """The instructions of so many calls, with what first calls do."""
    overrides, *flags = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder, "counts")
        valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={counts}"]
        done = subprocess.run(
            [
                *(*valgrind, f"--toggle-collect={CASES[case].counted}"),
                *(sys.executable, "-c", _PROGRAM, str(calls), str(overrides), *map(str, flags)),
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
        if done.returncode:
            raise SystemExit(f"valgrind failed for {case!r} in {tree}:\n{done.stderr[-2000:]}")
        listed = subprocess.run(
            ["callgrind_annotate", "--threshold=100", str(counts)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    # 728,790 ( 3.41%)  malloc.c:_int_malloc [/usr/lib/x86_64-linux-gnu/libc.so.6]
    rows = re.findall(r"^ *([\d,]+) \([ .\d]+%\) .*?(?:\[(.*)\])?$", listed, re.MULTILINE)
    by_function = [
        int(count.replace(",", ""))
        for count, library in rows
        if library and not Path(library).name.startswith("libc.")
    ]
    if not by_function:
        raise SystemExit(f"valgrind counted nothing for {case!r} in {tree}:\n{listed[:2000]}")
    return sum(by_function)


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
        for case, (overrides, *flags) in CASES.items():
            arguments = ["6", str(overrides), *map(str, flags)]
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
            print(f"{case:30}", *(f"{name} {n:8.0f}" for name, n in row.items()), flush=True)
            records.append({"case": case, **row})
    print(_common.save("instructions", _common.cpu_name(), records))


if __name__ == "__main__":
    main()
