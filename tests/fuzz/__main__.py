"""`python -m tests.fuzz --programs 10000`: the command line."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CHUNK = 1000
#: Of programs of a chunk which stock PyTorch itself does not outlive.
MAX_DEATHS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, help="of the first program; random if not given")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--without", type=int, action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        from tests.fuzz import campaign

        try:
            result = campaign.run(options.seed, options.programs, options.device, options.without)
        except campaign.StockDied as died:
            print(died, file=sys.stderr)
            print(json.dumps({"died": died.seed}), flush=True)
            os._exit(0)  # the device's memory cannot be given back any more
        print(json.dumps(result.as_dict()))
        return 0
    seed = random.randrange(10**9) if options.seed is None else options.seed
    print(f"seeds {seed} to {seed + options.programs - 1}", file=sys.stderr, flush=True)
    return _run(seed, options)


def _run(seed: int, options: argparse.Namespace) -> int:
    from tests.fuzz.campaign import Failure, Result

    start = time.perf_counter()
    total = Result()
    ends = seed + options.programs
    chunks = [(first, min(CHUNK, ends - first)) for first in range(seed, ends, CHUNK)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for (first, count), found in zip(
            chunks,
            pool.map(lambda chunk: _chunk(chunk[0], chunk[1], options.device), chunks),
            strict=True,
        ):
            if isinstance(found, str):
                total.failures.append(Failure(first, first, f"{count} programs", found, ""))
            else:
                total.add(found)
            done = f"{total.programs} programs, {len(total.failures)} differences"
            print(done, file=sys.stderr, flush=True)
    seconds = round(time.perf_counter() - start, 1)
    result = {"seed": seed, **total.as_dict(), "seconds": seconds}
    if options.save:
        print(_save(result, options.device), file=sys.stderr)
    print(json.dumps(result) if options.json else _summary(result))
    return 1 if total.failures else 0


def _chunk(
    seed: int, count: int, device: str, without: tuple[int, ...] = ()
) -> dict[str, Any] | str:
    """The result of some programs in a process of their own, which may crash."""
    command = [sys.executable, "-m", "tests.fuzz", "--here", "--device", device]
    command += ["--seed", str(seed), "--programs", str(count)]
    command += [f"--without={each}" for each in without]
    done = subprocess.run(
        command,
        # cuBLAS's own condition for results that do not differ from run to run.
        env=os.environ | {"OPGRAFT_PACKS": "none", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        stdout=subprocess.PIPE,
        stderr=None,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if "died" in result and len(without) < MAX_DEATHS:
            return _chunk(seed, count, device, (*without, result["died"]))
        if "died" in result:
            return f"stock PyTorch itself leaves the device unusable: seeds {without}"
        return result
    if done.returncode < 0:
        return f"the process died of {signal.Signals(-done.returncode).name}"
    return f"the process ended with {done.returncode}"


def _save(result: dict[str, Any], device: str) -> str:
    import torch

    from benchmarks import _common

    name = _common.cpu_name() if device == "cpu" else torch.cuda.get_device_name()
    failures = result.pop("failures")
    record = {**result, "differences": len(failures)}
    command = " ".join(["python -m tests.fuzz", *sys.argv[1:]])
    path = _common.save("fuzz", name, [record], command=command, failures=failures)
    result["failures"] = failures
    return str(path)


def _summary(result: dict[str, Any]) -> str:
    return (
        f"{result['programs']} programs from seed {result['seed']}, {result['steps']} steps: "
        f"{result['hits']} hits, {result['misses']} misses, {result['fallbacks']} fallbacks, "
        f"{result['errors']} errors that stock raises too; {len(result['failures'])} differences"
    )


if __name__ == "__main__":
    raise SystemExit(main())
