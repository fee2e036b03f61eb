"""Measures what packs add to `import torch`: the time of its backend autoload, and its imports.

    python benchmarks/autoload.py           # about two minutes
    python benchmarks/autoload.py --smoke   # half a minute: does this script work?

Makes virtual environments with opgraft, opgraft-kernels and packs that `opgraft new` made,
installed as wheels, and starts processes in them that take turns. In each, at the place where
`import torch` calls `torch._import_device_backends()`, the function is called and timed. It looks
for entry points whether or not anything of opgraft is installed, so what opgraft adds is the
difference to an environment without it.

Packs that declare their ops are activated by the first call of one of these, which is measured too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _common
import _environment
from _environment import Environment

#: Milliseconds that the whole autoload may take, with opgraft, its pack and a scaffolded one.
GOAL = 15
HEAVY = ("triton", "cutlass", "torch._inductor", "torch._dynamo")
# The import of `torch._native` is what comes next in torch; where there is none, the end of
# `import torch` is the place.
PROGRAM = """
import json, sys, time

class AtTheEnd:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._native":
            measure()

def measure():
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
        import torch
        wall, cpu = time.perf_counter(), time.process_time()
        torch._import_device_backends()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        found.update(ms=wall * 1e3, cpu_ms=cpu * 1e3, modules=sorted(sys.modules))

found = {}
finder = AtTheEnd()
sys.meta_path.insert(0, finder)
import torch
measure()
if "opgraft" in sys.modules:  # what the first call of an op that waits does, apart from the call
    wall, cpu = time.perf_counter(), time.process_time()
    sys.modules["opgraft"].packs.activate()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    found["activation"] = dict(ms=wall * 1e3, cpu_ms=cpu * 1e3, modules=sorted(sys.modules))
print(json.dumps(found))
"""
# What a user may have set: what each process is started with, by what is said about it.
PACKS = "opgraft, opgraft-kernels, a scaffolded pack"
FIRST_CALL = "what the first call of one of their ops adds"
CASES: Mapping[str, Mapping[str, str]] = {
    PACKS: {},
    "the same, OPGRAFT_PACKS=none": {"OPGRAFT_PACKS": "none"},
    "the same, OPGRAFT_DISABLE=1": {"OPGRAFT_DISABLE": "1"},
}


def environments(folder: Path, distributions: int) -> dict[str, tuple[Environment, dict[str, str]]]:
    """The environments to measure, by name, each with its variables."""
    bare = _environment.make(folder / "bare")
    full = _environment.with_opgraft(folder / "full", _environment.wheels(folder / "built"))
    add_scaffold(full, folder)
    crowd = folder / "crowd"
    add_crowd(crowd, distributions)
    crowded = {"PYTHONPATH": str(crowd)}
    cases = {"without opgraft": (bare, {})}
    cases |= {name: (full, dict(variables)) for name, variables in CASES.items()}
    cases[f"without opgraft, {distributions} more distributions"] = (bare, crowded)
    cases[f"all packs, {distributions} more distributions"] = (full, crowded)
    return cases


def add_scaffold(environment: Environment, folder: Path) -> None:
    """Install a pack as `opgraft new` makes it."""
    made = environment.run("opgraft", "new", "fast-softmax", cwd=folder)
    if made.returncode:
        raise SystemExit(made.stderr)
    environment.install(_environment.wheel(folder / "fast-softmax", folder))


def add_crowd(place: Path, count: int) -> None:
    """Put metadata of so many distributions where packs are looked for."""
    for number in range(count):
        info = place / f"other_{number}-1.{number}.dist-info"
        info.mkdir(parents=True)
        text = (
            f"Metadata-Version: 2.1\nName: other-{number}\nVersion: 1.{number}\n\n"
            + "words\n" * 500
        )
        (info / "METADATA").write_text(text)
        if number % 4 == 0:
            (info / "entry_points.txt").write_text(
                f"[console_scripts]\nother{number} = other:main\n"
            )


def measure(environment: Environment, variables: Mapping[str, str]) -> dict[str, Any]:
    """One process."""
    done = environment.program(PROGRAM, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **variables)
    if done.returncode or done.stderr:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def records(
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[dict[str, Any]]:
    rows = []
    for name, runs in samples.items():
        heavy = sorted({module for run in runs for module in run["modules"]} & set(HEAVY))
        ours = [module for module in runs[0]["modules"] if module.startswith("opgraft")]
        rows.append(
            {
                "environment": name,
                "median_ms": round(statistics.median(run["ms"] for run in runs), 2),
                "min_ms": round(min(run["ms"] for run in runs), 2),
                "max_ms": round(max(run["ms"] for run in runs), 2),
                "median_cpu_ms": round(statistics.median(run["cpu_ms"] for run in runs), 2),
                "processes": len(runs),
                "modules_of_opgraft": len(ours),
                "imports_of_dsls": heavy,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one process each")
    parser.add_argument("--processes", type=int, default=11, help="of each environment")
    options = parser.parse_args()
    rounds = 1 if options.smoke else options.processes
    with tempfile.TemporaryDirectory() as place:
        cases = environments(Path(place), distributions=300)
        for (
            environment,
            variables,
        ) in cases.values():  # what the first one writes or reads from disk
            measure(environment, variables)
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, (environment, variables) in cases.items():
                samples[name].append(measure(environment, variables))
    samples[FIRST_CALL] = [run["activation"] for run in samples[PACKS]]
    rows = records(samples)
    columns = ("median_ms", "min_ms", "max_ms", "median_cpu_ms")
    heads = " ".join(f"{column:>13}" for column in columns)
    print(f"{'inside torch._import_device_backends()':46} {heads}")
    for row in rows:
        figures = " ".join(f"{row[column]:13.2f}" for column in columns)
        print(f"{row['environment']:46} {figures}  {' '.join(row['imports_of_dsls'])}")
    if not options.smoke:
        print(_common.save("autoload", _common.cpu_name(), rows))
    full = rows[1]
    if full["imports_of_dsls"]:
        raise SystemExit(f"imported: {', '.join(full['imports_of_dsls'])}")
    if full["median_ms"] > GOAL and not options.smoke:
        raise SystemExit(f"{full['median_ms']} ms, and the goal is {GOAL}")


if __name__ == "__main__":
    main()
