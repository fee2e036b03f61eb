"""Measures models by other authors with and without the packs' overrides; no model is changed.

    python benchmarks/models.py                     # every model, eager
    python benchmarks/models.py --modes compiled    # under torch.compile
    python benchmarks/models.py --only llama gat    # some of them; --again measures anew
    python benchmarks/models.py --table             # the results as docs/models.md has them
    python benchmarks/models.py --smoke             # tiny, without a GPU: does this script work?

It goes on where it stopped: each row is written when it is done, and a row that is there is not
measured again. Each model has processes of its own, forked from one that has imported the
libraries.

Eager: three sides take turns of one step in one process, on one model: with the overrides, inside
`opgraft.disabled()`, and inside it again, to see what two measurements of the same differ by. Under
`torch.compile` each side has a process of its own, as two sides of one process would share compiled
code: one with the overrides, two that never register any. They take turns of two steps, of which
the second counts: the first one after another process's takes longer. Rounds go on until the two
native medians differ by less than 1 %, or the time is up.

Wall time, the host's work included. A ratio is the median of the ratios to native's turn of the
same round, above one where the overrides are faster, with the interval that holds the true median
in 95 of 100 runs. The first step is that of a fresh process with empty caches of compiled kernels,
imports of the model's libraries not counted. Memory is the most that PyTorch allocates in a step.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

# Libraries ask torch for CUDA when they are imported, which uses CUDA unless torch is to ask NVML.
# Before torch is imported.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import _common
import _model_zoo
import torch

from opgraft.base.rounds import median_and_interval

RESULTS_NAME = "models"
SIDES = ("native", "opgraft", "native again")
#: What comes second finds a warmer GPU, and caches that are full of what came before.
ORDERS = list(itertools.permutations(SIDES))
#: Libraries of models, imported once for all processes. Not torch_geometric: the numba that it
#: imports uses CUDA, and a process that has used CUDA cannot be forked.
PRELOAD = ("transformers", "timm", "diffusers", "torch._dynamo")
#: How far apart two medians of native may be.
CONTROL = 0.01


class Plan(NamedTuple):
    """How long to measure.

    Attributes:
        device: "cuda" or "cpu".
        small: whether models are tiny.
        warm_up: steps of each side that are not counted; kernels are compiled and plans recorded.
        rounds: how many at least.
        seconds: after which no round begins.
    """

    device: str
    small: bool
    warm_up: int
    rounds: int
    seconds: float


# ------------------------------------------------------------------------------------ what is timed


def _synchronize(plan: Plan) -> None:
    if plan.device == "cuda":
        torch.cuda.synchronize()


def _seconds(step: _model_zoo.Step, plan: Plan) -> float:
    _synchronize(plan)
    start = time.perf_counter()
    step()
    _synchronize(plan)
    return time.perf_counter() - start


def _peak(step: _model_zoo.Step, plan: Plan) -> float:
    """Gigabytes that are allocated at the most during a step."""
    if plan.device == "cpu":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 1e9


def _register() -> None:
    import opgraft_kernels

    opgraft_kernels.register()


def _hits() -> dict[str, int]:
    import opgraft

    return {o.name.removeprefix("opgraft_kernels."): o.hits for o in opgraft.overrides()}


def _hits_a_step(step: _model_zoo.Step, plan: Plan) -> dict[str, int]:
    before = _hits()
    step()
    _synchronize(plan)
    return {name: n - before[name] for name, n in _hits().items() if n > before[name]}


def _take_turns(turns: Mapping[str, Callable[[], float]], plan: Plan) -> dict[str, list[float]]:
    """Seconds of each side's steps, by round, until the control holds or the time is up."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    end = time.perf_counter() + plan.seconds
    for n in itertools.count():
        enough = n >= plan.rounds and n % len(ORDERS) == 0
        if enough and (_control_holds(seconds) or time.perf_counter() > end):
            return seconds
        for side in ORDERS[n % len(ORDERS)]:
            seconds[side].append(turns[side]())
    raise AssertionError("unreachable")


def _control_holds(seconds: Mapping[str, Sequence[float]]) -> bool:
    """Whether two measurements of native agree, and each is known well enough to say so."""
    control = _ratio(seconds, "native again")
    ours = _ratio(seconds, "opgraft")
    width = max(control[2] - control[1], ours[2] - ours[1])
    return abs(control[0] - 1) < CONTROL and width < 2 * CONTROL


def _ratio(seconds: Mapping[str, Sequence[float]], side: str) -> tuple[float, float, float]:
    pairs = zip(seconds["native"], seconds[side], strict=True)
    return median_and_interval([native / own for native, own in pairs])


def _record(work_items: int, unit: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    def speed(side: str) -> float:
        return work_items / statistics.median(seconds[side])

    ratio, low, high = _ratio(seconds, "opgraft")
    return {
        "unit": unit,
        "native_per_second": speed("native"),
        "opgraft_per_second": speed("opgraft"),
        "native_milliseconds": 1e3 * statistics.median(seconds["native"]),
        "ratio": ratio,
        "ratio_from": low,
        "ratio_to": high,
        "control": _ratio(seconds, "native again")[0],
        "rounds": len(seconds["native"]),
    }


# -------------------------------------------------------------------------- what runs in a process


def _first_step(entry: _model_zoo.Entry, plan: Plan, packs: bool) -> float:
    """Seconds that a fresh process takes for its first step."""
    if packs:
        _register()
    torch.manual_seed(0)
    work = entry.make(plan.device, plan.small)
    return _seconds(work.step, plan)


def _eager(entry: _model_zoo.Entry, plan: Plan) -> dict[str, Any]:
    """A row: three sides in turn, in this process."""
    _register()
    import opgraft

    torch.manual_seed(0)
    work = entry.make(plan.device, plan.small)
    first = _seconds(work.step, plan)

    def side(name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if name == "opgraft" else opgraft.disabled()

    def turn(name: str) -> float:
        with side(name):
            return _seconds(work.step, plan)

    for _ in range(plan.warm_up):
        for name in ("opgraft", "native"):
            turn(name)
    memory = {}
    for name in ("opgraft", "native"):
        with side(name):
            memory[name] = _peak(work.step, plan)
    gc.collect()
    gc.freeze()  # a collection of all that was imported takes longer than a step
    seconds = _take_turns({name: lambda name=name: turn(name) for name in SIDES}, plan)  # type: ignore[misc]
    return {
        **_record(work.items, work.unit, seconds),
        "opgraft_gigabytes": memory["opgraft"],
        "native_gigabytes": memory["native"],
        "hits": _hits_a_step(work.step, plan),
        "opgraft_first_step_seconds": first,
    }


def _serve_compiled(entry: _model_zoo.Entry, plan: Plan, packs: bool, pipe: Connection) -> None:
    """One side under `torch.compile`: answers with the seconds of a step, until told to stop."""
    if packs:
        _register()
    torch.manual_seed(0)
    work = entry.make(plan.device, plan.small)
    for module in work.modules:
        module.compile(backend="inductor" if plan.device == "cuda" else "aot_eager")
    first = _seconds(work.step, plan)
    for _ in range(plan.warm_up):
        work.step()
    pipe.send({"first": first, "memory": _peak(work.step, plan), "work": (work.items, work.unit)})
    while pipe.recv() == "step":
        work.step()  # the first one after another process's
        pipe.send(_seconds(work.step, plan))
    pipe.send(_hits_a_step(work.step, plan) if packs else {})


# ------------------------------------------------------------------------------------- processes


def _run_apart(target: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own.

    Raises:
        RuntimeError: it raised there; the message is its traceback's last lines.
    """
    with _process(_send_result, target, *arguments) as pipe:
        return _received(pipe)


def _send_result(pipe: Connection, target: Callable[..., Any], *arguments: Any) -> None:
    pipe.send(target(*arguments))


@contextlib.contextmanager
def _process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A forked process whose function gets a pipe first, with empty caches of compiled kernels."""
    here, there = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as caches:

        def run() -> None:
            os.environ["TRITON_CACHE_DIR"] = f"{caches}/triton"
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/inductor"
            try:
                target(there, *arguments)
            except BaseException:
                there.send(RuntimeError(traceback.format_exc(limit=-3)))
                raise SystemExit(1) from None

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        there.close()  # so that the end of the process ends a read here
        try:
            yield here
        finally:
            here.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _received(pipe: Connection) -> Any:
    try:
        answer = pipe.recv()
    except EOFError:
        raise RuntimeError("the process ended without an answer") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def measure_eager(entry: _model_zoo.Entry, plan: Plan) -> dict[str, Any]:
    """A model's row, eager."""
    row = _run_apart(_eager, entry, plan)
    row["native_first_step_seconds"] = _run_apart(_first_step, entry, plan, False)
    return row


def measure_compiled(entry: _model_zoo.Entry, plan: Plan) -> dict[str, Any]:
    """A model's row under `torch.compile`."""

    def serve(pipe: Connection, packs: bool) -> None:
        _serve_compiled(entry, plan, packs, pipe)

    with contextlib.ExitStack() as stack:
        pipes = {side: stack.enter_context(_process(serve, side == "opgraft")) for side in SIDES}
        started = {side: _received(pipe) for side, pipe in pipes.items()}

        def turn(side: str) -> float:
            pipes[side].send("step")
            return float(_received(pipes[side]))

        seconds = _take_turns({side: lambda side=side: turn(side) for side in SIDES}, plan)  # type: ignore[misc]
        for pipe in pipes.values():
            pipe.send("stop")
        hits = _received(pipes["opgraft"])
    return {
        **_record(*started["native"]["work"], seconds),
        "hits": hits,
        **{f"{side}_gigabytes": started[side]["memory"] for side in ("opgraft", "native")},
        **{f"{side}_first_step_seconds": started[side]["first"] for side in ("opgraft", "native")},
    }


MEASURE = {"eager": measure_eager, "compiled": measure_compiled}


# ---------------------------------------------------------------------------------------- results


def _versions() -> dict[str, str]:
    found = {}
    for name in ("triton", "transformers", "diffusers", "timm", "torch_geometric", "flash-attn-4"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _print_row(row: Mapping[str, Any]) -> None:
    if "error" in row:
        reason = row["error"].splitlines()[-1]
        print(f"{row['mode']:8} {row['model']:28} failed: {reason}", flush=True)
        return
    print(
        "{mode:8} {model:28} {native_per_second:10.1f} -> {opgraft_per_second:10.1f} {unit}/s "
        "{ratio:.3f} ({ratio_from:.3f} to {ratio_to:.3f}; control {control:.3f}, {rounds} rounds), "
        "first step {opgraft_first_step_seconds:.1f} s against {native_first_step_seconds:.1f}, "
        "{opgraft_gigabytes:.1f} GB against {native_gigabytes:.1f}".format(**row)
    )
    print("         hits a step:", row["hits"] or "none", flush=True)


def bench(plan: Plan, modes: Sequence[str], only: Sequence[str], again: bool, device: str) -> None:
    """Measure what is not there yet, and write each row when it is done.

    Processes on several GPUs can measure at a time.
    """
    path = _common.path_of(RESULTS_NAME, device)
    rows = _common.load(path)
    for mode, entry in itertools.product(modes, _model_zoo.ZOO.values()):
        wanted = any(each in entry.name for each in only)
        if not wanted or (mode == "compiled" and not entry.compiles):
            continue
        of_it = [r for r in rows if (r["model"], r["mode"]) == (entry.name, mode)]
        if any("error" not in row for row in of_it) and not again:
            continue
        row: dict[str, Any] = {"model": entry.name, "mode": mode, "source": entry.source}
        row["changed"] = entry.changed
        try:
            row |= MEASURE[mode](entry, plan)
        except RuntimeError as error:
            row["error"] = str(error)
        _print_row(row)
        _common.add(RESULTS_NAME, device, [row], "model", "mode", versions=_versions())
    _print_means(_common.load(path))


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The geometric mean of the ratios of models in which nothing was changed, by mode."""
    measured = [row for row in rows if "error" not in row and not row.get("changed")]
    return {
        mode: statistics.geometric_mean(row["ratio"] for row in measured if row["mode"] == mode)
        for mode in MEASURE
        if any(row["mode"] == mode for row in measured)
    }


def _print_means(rows: Sequence[Mapping[str, Any]]) -> None:
    for mode, mean in _means(rows).items():
        print(f"{mode}: {mean:.3f} x native in the geometric mean")


def table(rows: Sequence[Mapping[str, Any]], mode: str) -> str:
    """A mode's rows as a Markdown table, the largest gain first.

    >>> row = {"model": "tiny", "mode": "eager", "unit": "images", "ratio": 1.25, "control": 1.0}
    >>> row |= {"ratio_from": 1.2, "ratio_to": 1.3, "native_per_second": 10.0}
    >>> row |= {"opgraft_per_second": 12.5, "hits": {"layer_norm.forward": 2}}
    >>> row |= {"native_first_step_seconds": 0.5, "opgraft_first_step_seconds": 4.0}
    >>> print(table([row], "eager").splitlines()[-1])
    | tiny | images | 10.0 | 12.5 | **1.250** (1.200 to 1.300) | 1.000 | 2 | 0.5 | 4.0 |
    """
    lines = [
        "| model | a second | native | opgraft | ratio | control | hits a step | first step, s: "
        "native | opgraft |",
        "|---|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    measured = [row for row in rows if row["mode"] == mode and "error" not in row]
    for row in sorted(measured, key=lambda row: -row["ratio"]):
        lines.append(
            "| {model} | {unit} | {native_per_second:,.1f} | {opgraft_per_second:,.1f} "
            "| **{ratio:.3f}** ({ratio_from:.3f} to {ratio_to:.3f}) | {control:.3f} | {calls} "
            "| {native_first_step_seconds:.1f} | {opgraft_first_step_seconds:.1f} |".format(
                **row, calls=sum(row["hits"].values())
            )
        )
    return "\n".join(lines)


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The eager rows' ratios and intervals as an SVG."""
    from matplotlib import pyplot as plt

    # Text as text, and the same picture as the same file.
    plt.rcParams.update({"svg.hashsalt": "opgraft", "svg.fonttype": "none"})
    measured = [row for row in rows if row["mode"] == "eager" and "error" not in row]
    measured.sort(key=lambda row: row["ratio"])
    ratios = [row["ratio"] for row in measured]
    spread = [
        [row["ratio"] - row["ratio_from"] for row in measured],
        [row["ratio_to"] - row["ratio"] for row in measured],
    ]
    figure, axes = plt.subplots(figsize=(7, 0.24 * len(measured) + 0.8), layout="constrained")
    names = [row["model"] for row in measured]
    axes.barh(names, [ratio - 1 for ratio in ratios], left=1, color="#4c78a8", height=0.6)
    axes.errorbar(ratios, names, xerr=spread, fmt="none", ecolor="#333333", linewidth=0.8)
    axes.axvline(1, color="#333333", linewidth=0.8)
    axes.set_xlabel("speed with the packs / native, eager, and its 95 % interval")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def print_tables(device: str) -> None:
    """The results as docs/models.md has them; and the plot beside them."""
    path = _common.path_of(RESULTS_NAME, device)
    rows = _common.load(path)
    if not rows:
        raise SystemExit(f"there are no results: {path} is missing")
    for mode, mean in _means(rows).items():
        print(f"{mode}: {mean:.3f} x native in the geometric mean\n\n{table(rows, mode)}\n")
    plot(rows, path.with_suffix(".svg"))


def _preload() -> None:
    """Import what models are made of, once, before processes are forked."""
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def smoke() -> None:
    """Two tiny models on the CPU, in both modes, with the overrides under Triton's interpreter."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _preload()
    plan = Plan("cpu", True, warm_up=1, rounds=1, seconds=0.0)
    for name in ("torch transformer encoder train", "dlrm train"):
        for mode, measure in MEASURE.items():
            row = {"model": name, "mode": mode, **measure(_model_zoo.ZOO[name], plan)}
            _print_row(row)
            # Compiled for the CPU without Inductor, both reach the router; the DLRM has no such op.
            assert bool(row["hits"]) == name.startswith("torch"), row
    print("overrides were hit; nothing was measured")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="run on the CPU, measure nothing")
    parser.add_argument("--modes", nargs="+", default=["eager"], choices=list(MEASURE))
    parser.add_argument("--only", nargs="+", default=[""], help="models whose name holds one")
    parser.add_argument("--again", action="store_true", help="measure anew what is there")
    parser.add_argument("--seconds", type=float, default=6.0, help="for the rounds of a model")
    parser.add_argument("--table", metavar="GPU", nargs="?", const="NVIDIA H200")
    parser.add_argument("--list", action="store_true", help="the models' names")
    options = parser.parse_args(arguments)
    if options.smoke:
        smoke()
        return
    if options.table:
        print_tables(options.table)
        return
    if options.list:
        print("\n".join(_model_zoo.ZOO))
        return
    _preload()
    # Asked in a process of its own: one that has used CUDA cannot be forked.
    device = _run_apart(_device_name)
    if device is None:
        parser.error("there is no CUDA device; --smoke runs without one")
    plan = Plan("cuda", False, warm_up=5, rounds=12, seconds=options.seconds)
    bench(plan, options.modes, options.only, options.again, device)


def _device_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    main(sys.argv[1:])
