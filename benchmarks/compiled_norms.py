"""The norms in compiled graphs: Inductor's own code, fused with what is around, or the overrides.

    python benchmarks/compiled_norms.py            # ten minutes; needs a CUDA device
    python benchmarks/compiled_norms.py --smoke    # on the CPU: does this script work?

Where a norm should be opaque: `recorded_tables.py` puts it into the pack's tables. A norm alone,
and one behind a residual connection, whose addition Inductor fuses with the norm, as it does the
sum of two gradients in the backward: `y, h = norm(x + r), x + r`. Forward alone (in inference), and
forward with backward (in training), under `torch.compile` with static sizes:

- `inductor`: compiled while no override is on; Inductor generates code.
- `opaque`: the overrides with `compile="opaque"`: the graph calls them.
- `backward`, in training: those of the backward are opaque, the forward is Inductor's.

Microseconds of the GPU's time, and end to end in a loop of calls, whatever that waits for; medians
over rounds in which both take their turn.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import _common
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from _gpu import Call, end_to_end_time, gpu_times

import opgraft
import opgraft_kernels

NORMS = ("rms_norm", "layer_norm")
HIDDEN = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
LOG2_ELEMENTS = (15, 20, 22, 25, 27)
CONTENDERS = {"inference": ("inductor", "opaque"), "training": ("inductor", "opaque", "backward")}
INPUT_SETS = 3
EPS = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Inputs(NamedTuple):
    x: torch.Tensor
    residual: torch.Tensor
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]


def make_inputs(norm: str, rows: int, hidden: int) -> Inputs:
    draw = functools.partial(torch.randn, device=DEVICE, dtype=DTYPE)
    parameters = [draw(hidden) for _ in range(2 if norm == "layer_norm" else 1)]
    x, residual, *gradients = (draw(rows, hidden) for _ in range(4))
    return Inputs(
        x.requires_grad_(),
        residual.requires_grad_(),
        [each.requires_grad_() for each in parameters],
        gradients,
    )


def alone(norm: Callable[..., torch.Tensor], i: Inputs) -> tuple[torch.Tensor, ...]:
    return (norm(i.x, i.x.shape[-1:], *i.parameters, eps=EPS),)


def behind_a_residual(norm: Callable[..., torch.Tensor], i: Inputs) -> tuple[torch.Tensor, ...]:
    h = i.x + i.residual
    return norm(h, h.shape[-1:], *i.parameters, eps=EPS), h


PATTERNS = {"alone": alone, "behind a residual": behind_a_residual}


def train(compiled: Callable[..., Any], i: Inputs) -> object:
    outputs = compiled(i)
    leaves = [i.x, *([i.residual] if len(outputs) > 1 else []), *i.parameters]
    return torch.autograd.grad(outputs, leaves, i.gradients[: len(outputs)])


@torch.no_grad()
def infer(compiled: Callable[..., Any], i: Inputs) -> object:
    return compiled(i)


MODES = {"inference": infer, "training": train}


def contenders(
    norm: str,
    pattern: str,
    mode: str,
    inputs: Sequence[Inputs],
    overrides: Sequence[opgraft.Override],
) -> dict[str, tuple[Call, ...]]:
    """Calls of a pattern by contender, compiled."""
    from torch._inductor.compile_fx import compile_fx

    torch._dynamo.reset()
    found: dict[str, tuple[Call, ...]] = {}
    for name in CONTENDERS[mode]:
        _use(overrides, name)
        function = functools.partial(PATTERNS[pattern], getattr(F, norm))
        # A backend of its own keeps what it compiles apart from the others'.
        compiled = torch.compile(function, backend=functools.partial(compile_fx), dynamic=False)
        for _ in range(3):  # compiles, and records launch plans
            for each in inputs:
                MODES[mode](compiled, each)
        found[name] = tuple(functools.partial(MODES[mode], compiled, each) for each in inputs)
    return found


def _use(overrides: Sequence[opgraft.Override], contender: str) -> None:
    """Have what is compiled from now on be a contender."""
    opgraft.disable()
    if contender == "inductor":
        return
    for override in overrides:
        opgraft.enable(name=override.name)
        is_backward = override.op.endswith("_backward")
        policy = "opaque" if is_backward or contender == "opaque" else "inductor"
        override.declaration = override.declaration.replaced(compile=policy)


def bench(
    norm: str,
    rounds: int,
    hidden_sizes: Sequence[int],
    sizes: Sequence[int],
    patterns: Sequence[str] = tuple(PATTERNS),
) -> Iterator[list[dict[str, Any]]]:
    """Records of patterns, of every mode and size of a norm, for one width after the other."""
    overrides = [each for each in opgraft_kernels.register() if "norm" in each.name]
    for hidden in hidden_sizes:
        records = []
        for log2 in sizes:
            rows = max(1, 2**log2 // hidden)
            inputs = [make_inputs(norm, rows, hidden) for _ in range(INPUT_SETS)]
            for pattern, mode in itertools.product(patterns, MODES):
                calls = contenders(norm, pattern, mode, inputs, overrides)
                where = {"norm": norm, "pattern": pattern, "mode": mode}
                size = {"rows": rows, "hidden": hidden}
                records.append({**where, **size, **measure(calls, overrides, rounds)})
                check(records[-1])
                print(_line(records[-1]), flush=True)
        yield records


def measure(
    calls: dict[str, tuple[Call, ...]], overrides: Sequence[opgraft.Override], rounds: int
) -> dict[str, Any]:
    """Microseconds by contender, and how many overrides each hits in a call."""
    hits = {}
    for name, each in calls.items():
        before = sum(override.hits for override in overrides)
        each[0]()
        hits[name] = sum(override.hits for override in overrides) - before
    if DEVICE == "cpu":
        return {"hits": hits}
    gpu = gpu_times(calls, rounds)
    loops: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, each in calls.items():
            loops[name].append(end_to_end_time(each[0], 1))
    found: dict[str, Any] = {
        f"{name}_us": {
            "gpu": round(gpu[name] * 1e3, 2),
            "end_to_end": round(statistics.median(loops[name]) * 1e3, 2),
        }
        for name in calls
    }
    return {**found, "hits": hits}


def check(record: dict[str, Any]) -> None:
    """Whether each contender ran what it stands for."""
    expected = {"inductor": 0, "opaque": 1}
    if record["mode"] == "training":
        expected = {"inductor": 0, "opaque": 2, "backward": 1}
        if DEVICE == "cpu" and record["norm"] == "rms_norm":
            expected = dict.fromkeys(expected, 0)  # made of other ops there
    assert record["hits"] == expected, record


def _line(record: dict[str, Any]) -> str:
    times = [
        f" | {name} {record[f'{name}_us']['gpu']:7.1f} {record[f'{name}_us']['end_to_end']:7.1f}"
        for name in CONTENDERS[record["mode"]]
        if f"{name}_us" in record
    ]
    where = f"{record['norm']:10} {record['rows']:6} x {record['hidden']:5}"
    return (
        f"{where} {record['mode']:9} {record['pattern']:17}{''.join(times)}"
        f" | hits {', '.join(f'{name} {n}' for name, n in record['hits'].items())}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="run on the CPU, measure nothing")
    parser.add_argument("--norms", nargs="+", choices=NORMS, default=NORMS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    parser.add_argument("--log2", type=int, nargs="+", default=LOG2_ELEMENTS)
    options = parser.parse_args(arguments)
    if options.smoke:
        # A compilation takes seconds: each pattern is compiled for one of the norms.
        patterns = dict(zip(NORMS, PATTERNS, strict=True))
        for norm in options.norms:
            list(bench(norm, 1, (32,), (12,), [patterns[norm]]))
        return
    if DEVICE == "cpu":
        parser.error("there is no CUDA device; --smoke runs without one")
    device, versions = torch.cuda.get_device_name(), {"triton": metadata.version("triton")}
    for norm in options.norms:
        records = []
        for found in bench(norm, options.rounds, options.hidden, options.log2):
            records += found  # and what there is is written, as the rest takes minutes
            path = _common.save(f"compiled_{norm}", device, records, versions=versions)
        print("written to", path, flush=True)


if __name__ == "__main__":
    main()
