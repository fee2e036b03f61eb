"""RMSNorm: the override against native, and against quack and Liger where they are installed.

    python benchmarks/rms_norm.py              # bandwidth at the sizes of language models
    python benchmarks/rms_norm.py --crossover  # from which size the override pays, host included
    python benchmarks/rms_norm.py --smoke      # tiny, without a GPU: does this script work?

Bandwidth counts what an RMSNorm has to move: 2 * rows * hidden elements forward (x and y), 3 * rows
* hidden backward (x, the gradients of y and of x); weights, rstd and partial sums are not counted.
Its share is of a device-to-device copy of as many bytes, measured in the same run.

Times are medians over rounds in which every contestant takes its turn. Inputs rotate among several
sets, together larger than any L2. The GPU is kept busy while a turn's calls are issued, so that
bandwidth is the kernels' own, whatever they cost on the host.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _common
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import opgraft
import opgraft_kernels
from opgraft_kernels.rms_norm import overrides as rms_norm_overrides

SIZES = [(32768, 1024), (32768, 4096), (16384, 8192), (8192, 16384), (4096, 32768), (1024, 131072)]
EPS = 1e-6
INPUT_SETS = 3
FORWARD, BACKWARD = "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"

Call = Callable[[], object]


class Inputs(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    grad_out: torch.Tensor
    rstd: torch.Tensor


def make_inputs(rows: int, hidden: int, dtype: torch.dtype, device: str) -> Inputs:
    x = torch.randn(rows, hidden, dtype=dtype, device=device)
    weight = torch.randn(hidden, dtype=dtype, device=device)
    _, rstd = opgraft.native(FORWARD)(x, [hidden], weight, EPS)
    return Inputs(x, weight, torch.randn_like(x), rstd)


# ---------------------------------------------------------------------------------- contestants


def _hidden(inputs: Inputs) -> list[int]:
    return [inputs.x.shape[-1]]


def native_forward(i: Inputs) -> object:
    return opgraft.native(FORWARD)(i.x, _hidden(i), i.weight, EPS)


def native_backward(i: Inputs) -> object:
    return opgraft.native(BACKWARD)(i.grad_out, i.x, _hidden(i), i.rstd, i.weight, [True, True])


def opgraft_forward(i: Inputs) -> object:
    return torch.ops.aten._fused_rms_norm(i.x, _hidden(i), i.weight, EPS)


def opgraft_backward(i: Inputs) -> object:
    return torch.ops.aten._fused_rms_norm_backward(
        i.grad_out, i.x, _hidden(i), i.rstd, i.weight, [True, True]
    )


def impl_forward(i: Inputs) -> object:
    return rms_norm_overrides._forward(i.x, _hidden(i), i.weight, EPS)


def impl_backward(i: Inputs) -> object:
    return rms_norm_overrides._backward(i.grad_out, i.x, _hidden(i), i.rstd, i.weight, [True, True])


def _quack() -> tuple[Callable[[Inputs], object], Callable[[Inputs], object]]:
    module = importlib.import_module("quack.rmsnorm")

    def forward(i: Inputs) -> object:
        return module.rmsnorm_fwd(i.x, i.weight, eps=EPS, store_rstd=True)

    def backward(i: Inputs) -> object:
        return module.rmsnorm_bwd(i.x, i.weight, i.grad_out, i.rstd.view(-1))

    return forward, backward


def _liger() -> tuple[Callable[[Inputs], object], Callable[[Inputs], object]]:
    module = importlib.import_module("liger_kernel.ops.rms_norm")

    def forward(i: Inputs) -> Any:
        return module.rms_norm_forward(i.x, i.weight, EPS, 0.0, "llama", None)

    settings: dict[int, tuple[Any, ...]] = {}

    def backward(i: Inputs) -> object:
        hidden = i.x.shape[-1]
        if hidden not in settings:
            settings[hidden] = forward(i)[3:]
        block, warps, mode = settings[hidden]
        rstd = i.rstd.view(-1)
        return module.rms_norm_backward(
            i.grad_out, i.x, i.weight, rstd, 0.0, mode, block, warps, False, None
        )

    return forward, backward


def contestants() -> dict[str, tuple[Callable[[Inputs], object], Callable[[Inputs], object]]]:
    """Forward and backward by name: native, the override, and the peers that can be imported."""
    found: dict[str, tuple[Callable[[Inputs], object], Callable[[Inputs], object]]] = {
        "native": (native_forward, native_backward),
        "opgraft": (opgraft_forward, opgraft_backward),
    }
    for name, load in (("quack", _quack), ("liger", _liger)):
        try:
            found[name] = load()
        except ImportError as error:
            print(f"without {name}: {error}", file=sys.stderr)
    return found


# ----------------------------------------------------------------------------------- measuring


def gpu_times(contenders: dict[str, Sequence[Call]], rounds: int) -> dict[str, float]:
    """Median milliseconds a call, the GPU's time alone."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for calls in contenders.values():
        for call in calls:
            call()
    for _ in range(rounds):
        for name, calls in contenders.items():
            times[name].append(_turn(calls))
    return {name: statistics.median(values) for name, values in times.items()}


def _turn(calls: Sequence[Call]) -> float:
    cycles = 4_000_000
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        start.record()
        for call in calls:
            call()
        end.record()
        late = start.query()  # the GPU had to wait for the host
        torch.cuda.synchronize()
        if not late:
            return start.elapsed_time(end) / len(calls)
        cycles *= 2


def end_to_end_time(call: Call, rounds: int, calls: int = 50) -> float:
    """Median milliseconds a call in a loop of calls, whatever it waits for: the host or the GPU."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / calls)
    return statistics.median(times)


def _copies(elements: int, dtype: torch.dtype) -> list[Call]:
    """Copies that read and write `elements` elements together."""
    tensors = [
        [torch.randn(elements // 2, device="cuda").to(dtype) for _ in range(2)]
        for _ in range(INPUT_SETS)
    ]
    return [lambda pair=pair: pair[0].copy_(pair[1]) for pair in tensors]  # type: ignore[misc]


def _hits() -> dict[str, int]:
    return {override.op: override.hits for override in opgraft.overrides()}


def bandwidth(sizes: Sequence[tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
    """A record for every size, direction and contestant."""
    opgraft_kernels.register()
    records: list[dict[str, Any]] = []
    for rows, hidden in sizes:
        first = len(records)
        inputs = [make_inputs(rows, hidden, torch.bfloat16, "cuda") for _ in range(INPUT_SETS)]
        for direction, op, passes in (("forward", FORWARD, 2), ("backward", BACKWARD, 3)):
            elements = passes * rows * hidden
            contenders: dict[str, Sequence[Call]] = {"copy": _copies(elements, torch.bfloat16)}
            for name, functions in contestants().items():
                function = functions[direction == "backward"]
                calls = [lambda i=i, f=function: f(i) for i in inputs]  # type: ignore[misc]
                if _runs(name, calls[0]):
                    contenders[name] = calls
            before = _hits()[op]
            times = gpu_times(contenders, rounds)
            hits = _hits()[op] - before
            assert hits >= (rounds + 1) * INPUT_SETS, f"{op} {rows}x{hidden}: {hits} hits"
            for name, milliseconds in times.items():
                records.append(
                    {
                        "direction": direction,
                        "rows": rows,
                        "hidden": hidden,
                        "name": name,
                        "microseconds": milliseconds * 1e3,
                        "gbps": elements * 2 / milliseconds / 1e6,
                        "share": times["copy"] / milliseconds,
                    }
                )
        print(_table(records[first:]), flush=True)
        torch.cuda.empty_cache()
    return records


def _runs(name: str, call: Call) -> bool:
    """Whether a peer supports the size."""
    if name in ("native", "opgraft"):
        return True
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"without {name}: {type(error).__name__} {str(error)[:80]}", file=sys.stderr)
        return False
    return True


def _table(records: Sequence[dict[str, Any]]) -> str:
    lines: dict[tuple[str, int, int], str] = {}
    for record in records:
        key = record["direction"], record["rows"], record["hidden"]
        lines.setdefault(key, f"{record['direction']:8} {record['rows']:6} x {record['hidden']:6}")
        lines[key] += f" | {record['name']} {record['gbps']:5.0f} {record['share']:.3f}"
    return "\n".join(lines.values())


class Timing(NamedTuple):
    """Microseconds a call: of the GPU's time, and end to end in a loop of calls."""

    gpu: float
    end_to_end: float


def _time(call: Call, rounds: int) -> Timing:
    gpu = gpu_times({"": [call] * 4}, rounds)[""]
    return Timing(gpu * 1e3, end_to_end_time(call, rounds) * 1e3)


def crossover(rounds: int) -> list[dict[str, Any]]:
    """Native and override, whatever the conditions say, at sizes around the crossover.

    Native has its turn before anything is registered, so that it pays for no router; `impl` is the
    override's implementation called directly.
    """
    cases = [
        (hidden, log2, direction)
        for hidden in (128, 1024, 4096, 16384, 65536, 131072)
        for log2 in range(18, 28)
        for direction in ("forward", "backward")
        if 2**log2 >= hidden
    ]

    def measure(
        forward: Callable[[Inputs], object], backward: Callable[[Inputs], object]
    ) -> list[Timing]:
        timings = []
        for hidden, log2, direction in cases:
            i = make_inputs(2**log2 // hidden, hidden, torch.bfloat16, "cuda")
            function = forward if direction == "forward" else backward
            timings.append(_time(lambda i=i, f=function: f(i), rounds))  # type: ignore[misc]
        return timings

    native = measure(opgraft_forward, opgraft_backward)
    direct = measure(impl_forward, impl_backward)
    for op, impl in (
        ("_fused_rms_norm", rms_norm_overrides._forward),
        ("_fused_rms_norm_backward", rms_norm_overrides._backward),
    ):
        opgraft.triton_utils.register_op_override(
            "aten", op, "CUDA", impl, cond=opgraft.when.numel("input") > 0, name="crossover"
        )
    routed = measure(opgraft_forward, opgraft_backward)
    assert all(hits > len(cases) for hits in _hits().values())
    records: list[dict[str, Any]] = []
    timings = zip(native, direct, routed, strict=True)
    for (hidden, log2, direction), timing in zip(cases, timings, strict=True):
        by_name = dict(zip(("native", "impl", "opgraft"), timing, strict=True))
        records.append(
            {
                "direction": direction,
                "hidden": hidden,
                "log2_elements": log2,
                **{f"{name}_us": each._asdict() for name, each in by_name.items()},
            }
        )
        print(
            f"{direction:8} {2**log2 // hidden:8} x {hidden:6} (2**{log2}) | GPU, end to end us"
            + "".join(f" | {n} {t.gpu:6.1f} {t.end_to_end:6.1f}" for n, t in by_name.items())
        )
    return records


# ------------------------------------------------------------------------------------- results


def save(name: str, records: list[dict[str, Any]]) -> Path:
    """Write the records with what they were measured on; the path of the JSON file."""
    import triton

    versions = {"triton": triton.__version__}
    return _common.save(name, torch.cuda.get_device_name(), records, versions=versions)


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Bandwidth over hidden size, a panel a direction; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        for name in dict.fromkeys(record["name"] for record in records):
            points = [
                (record["hidden"], record["gbps"])
                for record in records
                if (record["direction"], record["name"]) == (direction, name)
            ]
            style = "k--" if name == "copy" else "o-"
            axis.plot(*zip(*points, strict=True), style, label=name)
        axis.set(title=f"RMSNorm {direction}, bfloat16", xlabel="hidden", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("GB/s")
    axes[1].legend()
    figure.savefig(path, dpi=150)


def smoke() -> None:
    """The forward at the CPU key under the interpreter: whether the script works."""
    overrides = rms_norm_overrides.register("CPU")
    for rows, hidden in ((64, 32), (128, 48)):
        i = make_inputs(rows, hidden, torch.float32, "cpu")
        ours, native = opgraft_forward(i), native_forward(i)
        torch.testing.assert_close(ours, native)
    assert overrides[0].hits == 2
    print("the override was hit and agrees with native; nothing was measured")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="run on the CPU, measure nothing")
    parser.add_argument("--crossover", action="store_true", help="measure sizes around it")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args(arguments)
    if options.smoke:
        smoke()
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke runs without one")
    elif options.crossover:
        print("written to", save("rms_norm_crossover", crossover(min(options.rounds, 7))))
    else:
        records = bandwidth(SIZES, options.rounds)
        path = save("rms_norm", records)
        plot(records, path.with_suffix(".png"))
        print("written to", path)


if __name__ == "__main__":
    main()
