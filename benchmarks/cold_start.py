"""What the first calls of a process cost: native's, waiting for kernels, and while others compile.

    python benchmarks/cold_start.py           # a GPU: calls and a Llama's training, seven minutes
    python benchmarks/cold_start.py --smoke   # without a GPU: does this script work?

Each number is a fresh process's, with opgraft-kernels active but for native's. Processes take
turns. `cold` ones have an empty Triton cache; `warm` ones have what the cold one of their kind
left. A call is timed with its work on the GPU. `beyond native` sums what all calls took above those
of the native process: its first call of a kind, and the median of the later ones; `largest` is
the call that took most above it, but for the first of all; `stalls` are those that took 10 ms more.
`until first` is the time from before CUDA starts until the first call has ended.

`--what hits`: how long after its first call a kind of call first hits, in a process that goes on
calling, and when a worker had started and compiled its kernels.

`--what loads`: how long it takes to find a plan on disk and to load it with its kernels, in a
Llama's training with warm caches: `load`, with the waits for the interpreter, which the training
has meanwhile, and `thread`, what the loading thread itself takes. Nothing else is timed there: for
this the module that loads plans is imported before the program would.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _common
import torch

#: What each kind of process is started with.
KINDS: dict[str, dict[str, str]] = {
    "native": {"OPGRAFT_DISABLE": "1"},
    "wait": {"OPGRAFT_WHEN_NOT_READY": "wait"},
    "background": {"OPGRAFT_WHEN_NOT_READY": "native"},
}
PROGRAM = """
import json, os, sys, threading, time
begun = time.perf_counter()
import torch, torch.nn.functional as F
import opgraft
is_gpu, seconds = sys.argv[2] == "cuda", float(sys.argv[3])
DTYPE = torch.bfloat16 if is_gpu else torch.float32
found = {"calls": [], "import_ms": (time.perf_counter() - begun) * 1e3}

def time_loads():
    from opgraft.cache import plans
    find, load = plans.find, plans.load
    begun = {}
    def clocks():
        return time.perf_counter(), time.thread_time()
    def finding(*arguments):
        begun[threading.get_ident()] = clocks()
        return find(*arguments)
    def loading(*arguments):
        plan = load(*arguments)
        found["loads"].append(
            [(now - then) * 1e3 for now, then in zip(clocks(), begun[threading.get_ident()])]
        )
        return plan
    found["loads"] = []
    plans.find, plans.load = finding, loading

def timed(name, function):
    begun = time.perf_counter()
    result = function()
    if is_gpu:
        torch.cuda.synchronize()
    ended = time.perf_counter()
    found["calls"].append([name, (ended - begun) * 1e3])
    found.setdefault("until_first_ms", (ended - started) * 1e3)
    return result

def tensor(*size, grad=False):
    return torch.randn(size, device=sys.argv[2], dtype=DTYPE, requires_grad=grad)

def norm(rows, hidden):
    x, weight = tensor(rows, hidden, grad=True), tensor(hidden, grad=True)
    name = f"F.rms_norm {rows} x {hidden}"
    for _ in range(3):
        out = timed(name, lambda: F.rms_norm(x, [hidden], weight, 1e-6))
        timed(name + " backward", lambda: out.backward(torch.ones_like(out)))

def attention(dim):
    q, k, v = (tensor(1, 8, 4096 if is_gpu else 16, dim, grad=True) for _ in range(3))
    name = f"SDPA, heads of {dim}"
    for _ in range(3):
        out = timed(name, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        timed(name + " backward", lambda: out.backward(torch.ones_like(out)))

def calls():
    norm(*((16384, 4096) if is_gpu else (16, 64)))
    norm(64, 1024)
    attention(128)
    attention(64)

def train():
    sys.path.insert(0, sys.argv[1])
    import llama  # which keeps packs out, as every benchmark does that loads what it measures
    os.environ.pop("OPGRAFT_PACKS")
    shape = llama.Shape() if is_gpu else llama.Shape(1, 64, 2, 1, 64, 100)
    with torch.device(sys.argv[2]):
        model = llama.Llama(shape).to(DTYPE)
    tokens = torch.randint(shape.vocabulary, (4, 2049) if is_gpu else (1, 17), device=sys.argv[2])
    def step():
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        model.zero_grad(set_to_none=True)
    begun = time.perf_counter()
    while True:
        timed("step", step)
        if "ready_ms" not in found and opgraft.wait_until_ready(0):
            found["ready_ms"] = (time.perf_counter() - begun) * 1e3
        if time.perf_counter() - begun > seconds and "ready_ms" in found:
            break

def is_compiled():
    plans = [each.plans for each in opgraft.overrides() if each.plans]
    states = [state.status for each in plans for state in each.readiness.states()]
    return bool(states) and not {"waiting", "compiling"} & {*states}

def until_hit(call):
    timed("first", call)
    begun = time.perf_counter()
    while not any(each.hits for each in opgraft.overrides()):
        if time.perf_counter() - begun > seconds:
            if is_gpu:
                sys.exit("it never hit")
            break  # nothing is overridden there
        time.sleep(0.001)
        timed("later", call)
        if "compiled_ms" not in found and is_compiled():
            found["compiled_ms"] = (time.perf_counter() - begun) * 1e3
    found["hit_ms"] = (time.perf_counter() - begun) * 1e3

def norm_until_hit():
    x, weight = (tensor(16384, 4096), tensor(4096)) if is_gpu else (tensor(64, 64), tensor(64))
    until_hit(lambda: F.rms_norm(x, weight.shape, weight, 1e-6))

def attention_until_hit():
    q, k, v = (tensor(1, 8, 4096 if is_gpu else 64, 128) for _ in range(3))
    until_hit(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))

if sys.argv[4] == "loads":
    time_loads()
started = time.perf_counter()
if is_gpu:
    torch.zeros(1, device="cuda")
begun = time.perf_counter()
{
    "calls": calls,
    "llama": train,
    "loads": train,
    "norm": norm_until_hit,
    "attention": attention_until_hit,
}[sys.argv[4]]()
found["script_ms"] = (time.perf_counter() - begun) * 1e3
found["hits"] = {o.name: o.hits for o in opgraft.overrides() if o.hits}
found["dsls"] = sorted({"triton", "cutlass", "flash_attn", "quack"} & set(sys.modules))
print(json.dumps(found))
"""


def measure(kind: str, what: str, device: str, seconds: float, cache: Path) -> dict[str, Any]:
    """One process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OPGRAFT_", "TRITON_"))}
    environment |= {"TRITON_CACHE_DIR": str(cache / "triton"), "OPGRAFT_CACHE": str(cache)}
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, here, device, str(seconds), what],
        env=environment | KINDS[kind],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def beyond(run: dict[str, Any], native: dict[str, Any]) -> list[tuple[int, str, float]]:
    """Milliseconds that each of a process's calls took above the native process's.

    Where it made more of a kind, each of these is compared with the native process's typical one.
    """
    natives: dict[str, list[float]] = {}
    for name, ms in native["calls"]:
        natives.setdefault(name, []).append(ms)
    more = []
    seen: dict[str, int] = {}
    for number, (name, ms) in enumerate(run["calls"]):
        index = seen.get(name, 0)
        seen[name] = index + 1
        steady = statistics.median(natives[name][1:] or natives[name])
        more.append((number, name, ms - (natives[name][0] if index == 0 else steady)))
    return more


def records(runs: dict[tuple[str, str, str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for (what, kind, cache), found in runs.items():
        natives = runs[what, "native", "cold"]
        each = [beyond(run, native) for run, native in zip(found, natives, strict=True)]
        sums = [sum(ms for _, _, ms in calls) for calls in each]
        largest = [max((ms for _, _, ms in calls[1:]), default=0.0) for calls in each]
        firsts = [run["calls"][0][1] for run in found]
        rows.append(
            {
                **{"what": what, "kind": kind, "cache": cache, "processes": len(found)},
                "script_ms": round(statistics.median(run["script_ms"] for run in found), 1),
                "first_ms": round(statistics.median(firsts), 1),
                "until_first_ms": round(statistics.median(r["until_first_ms"] for r in found), 1),
                "beyond_native_ms": round(statistics.median(sums), 1),
                "worst_beyond_ms": round(max(sums), 1),
                "largest_ms": round(statistics.median(largest), 1),
                "ready_ms": round(max(run.get("ready_ms", 0.0) for run in found), 1),
                **{"hits": found[-1]["hits"], "dsls": found[-1]["dsls"]},
                "stalls": [[n, name, round(ms, 1)] for n, name, ms in each[-1] if ms >= 10],
                "calls": [[name, round(ms, 2)] for name, ms in found[-1]["calls"][:40]],
            }
        )
    return rows


def first_hits(count: int, device: str, seconds: float) -> list[dict[str, Any]]:
    """A record for each kind of call, from processes with empty caches that take turns."""
    found: dict[str, list[dict[str, Any]]] = {"norm": [], "attention": []}
    for _ in range(count):
        for call, runs in found.items():
            with tempfile.TemporaryDirectory() as place:
                runs.append(measure("background", call, device, seconds, Path(place)))
    rows = []
    for call, runs in found.items():
        hit = [run["hit_ms"] for run in runs]
        after = [run["hit_ms"] - run.get("compiled_ms", run["hit_ms"]) for run in runs]
        row = {
            **{"call": call, "processes": count, "first_hit_ms": round(statistics.median(hit), 1)},
            "after_compiled_ms": round(statistics.median(after), 1),
            "longest_after_compiled_ms": round(max(after), 1),
        }
        print(row)
        rows.append(row)
    return rows


def plan_loads(count: int, device: str, seconds: float) -> list[dict[str, Any]]:
    """One record of all plans that processes with warm caches load."""
    loads: list[tuple[float, float]] = []
    for _ in range(count):
        with tempfile.TemporaryDirectory() as place:
            measure("background", "loads", device, seconds, Path(place))
            loads += measure("background", "loads", device, seconds, Path(place))["loads"]
    row: dict[str, Any] = {"what": "loads", "processes": count, "plans_loaded": len(loads)}
    # There are none without a GPU.
    for name, times in zip(("load", "thread"), zip(*loads, strict=True), strict=False):
        row[f"{name}_ms"] = round(statistics.median(times), 3)
        row[f"longest_{name}_ms"] = round(max(times), 3)
    print(row)
    return [row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one process each, tiny calls")
    parser.add_argument("--processes", type=int, default=3, help="of each kind")
    parser.add_argument("--seconds", type=float, default=15, help="of training, in each")
    parser.add_argument("--what", nargs="+", choices=("calls", "llama", "hits", "loads"))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    options.what = options.what or ["calls", "llama", "hits", "loads"]
    if not options.smoke and not torch.cuda.is_available():
        raise SystemExit("this measures a GPU's first calls: --smoke runs without one")
    device = "cpu" if options.smoke else "cuda"
    count, seconds = (1, 0.0) if options.smoke else (options.processes, options.seconds)
    if "hits" in options.what:
        hits = first_hits(count, device, 0.0 if options.smoke else 120.0)
        if not options.smoke:
            print(_common.save("first_hits", torch.cuda.get_device_name(), hits))
        options.what.remove("hits")
    if "loads" in options.what:
        loads = plan_loads(count, device, seconds)
        if not options.smoke:
            print(_common.save("plan_loads", torch.cuda.get_device_name(), loads))
        options.what.remove("loads")
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for _ in range(count):
        for what in options.what:
            for kind in ["native", *(each for each in options.kinds if each != "native")]:
                with tempfile.TemporaryDirectory() as place:
                    for cache in ("cold",) if options.smoke else ("cold", "warm"):
                        run = measure(kind, what, device, seconds, Path(place))
                        runs.setdefault((what, kind, cache), []).append(run)
    rows = records(runs)
    if not rows:
        return
    columns = ("script_ms", "first_ms", "beyond_native_ms", "largest_ms", "ready_ms")
    print(f"{'what':8} {'process':12} {'cache':6}" + "".join(f"{each:>18}" for each in columns))
    for row in rows:
        figures = "".join(f"{row[each]:18.1f}" for each in columns)
        print(f"{row['what']:8} {row['kind']:12} {row['cache']:6}{figures}")
    if not options.smoke:
        name = torch.cuda.get_device_name()
        print(_common.add("cold_start", name, rows, "what", "kind", "cache"))


if __name__ == "__main__":
    main()
