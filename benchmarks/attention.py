"""Attention through F.scaled_dot_product_attention: torch's own choice, each of torch's backends,
the overrides, and flash-attn-4's own functions where it is installed.

    python benchmarks/attention.py              # 16384 tokens, 512 to 16384 long
    python benchmarks/attention.py --cells      # the same, without the other backends
    python benchmarks/attention.py --dims       # the other head dimensions, and query groups
    python benchmarks/attention.py --everywhere # with masks, of other heads, in float32
    python benchmarks/attention.py --smoke      # tiny, without a GPU: does this script work?

TFLOP/s count the two matrix products of a forward, 4 * batch * heads * queries * keys * dim
operations, half of that where causal, and two and a half times as many for a backward.

Times are medians over rounds in which every contestant takes its turn. The GPU is kept busy while a
turn's calls are issued, so that they are the kernels' own, whatever they cost on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _common
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import _everywhere
from _gpu import Call, gpu_times

import opgraft
from opgraft_kernels.attention import overrides as attention_overrides

TOKENS = 16384
# Heads of queries, heads of keys, dimension.
HEADS = ((32, 32, 64), (16, 16, 128), (32, 8, 128))
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


class Case(NamedTuple):
    """One row of the table."""

    batch: int
    heads: int
    heads_k: int
    length: int
    dim: int
    dim_v: int
    causal: bool

    @property
    def operations(self) -> float:
        pairs = self.batch * self.heads * self.length**2 / (2 if self.causal else 1)
        return 2.0 * pairs * (self.dim + self.dim_v)

    def __str__(self) -> str:
        dim = f"{self.dim}" if self.dim == self.dim_v else f"{self.dim}/{self.dim_v}"
        heads = f"{self.heads}" if self.heads == self.heads_k else f"{self.heads}:{self.heads_k}"
        causal = "causal" if self.causal else "full"
        return f"d {dim:7} {causal:6} {self.batch:2} x {heads:5} x {self.length:5}"


def table() -> list[Case]:
    """The rows of the table."""
    return [
        Case(TOKENS // length, heads, heads_k, length, dim, dim, causal)
        for heads, heads_k, dim in HEADS
        for causal in (False, True)
        for length in LENGTHS
    ]


def other_dims() -> list[Case]:
    """Head dimensions and groups that the table does not have."""
    return [
        Case(TOKENS // length, heads, heads_k, length, dim, dim_v, causal)
        for heads, heads_k, dim, dim_v in (
            (21, 21, 96, 96),
            (16, 16, 192, 128),
            (8, 8, 256, 256),
            (32, 4, 128, 128),
            (32, 8, 64, 64),
        )
        for causal in (False, True)
        for length in (512, 2048, 8192)
    ]


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor


def make_inputs(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    """As a model has them: [batch, length, heads, dim] in memory, transposed."""

    def random(heads: int, dim: int) -> torch.Tensor:
        shape = (case.batch, case.length, heads, dim)
        return torch.randn(shape, dtype=dtype, device=device).transpose(1, 2)

    q = random(case.heads, case.dim).requires_grad_()
    k = random(case.heads_k, case.dim).requires_grad_()
    v = random(case.heads_k, case.dim_v).requires_grad_()
    return Inputs(q, k, v, random(case.heads, case.dim_v))


# ---------------------------------------------------------------------------------- contestants

Scope = Callable[[], contextlib.AbstractContextManager[object]]


@contextlib.contextmanager
def _native(*backends: SDPBackend) -> Iterator[None]:
    with opgraft.disabled(), sdpa_kernel(list(backends)) if backends else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _triton() -> Iterator[None]:
    """cuDNN's op goes to FlashAttention-4 alone, so this asks for the flash op."""
    with opgraft.disabled(dsl="cutedsl"), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield


SCOPES: dict[str, Scope] = {
    "default": _native,
    "default again": _native,  # the control
    "flash": lambda: _native(SDPBackend.FLASH_ATTENTION),
    "efficient": lambda: _native(SDPBackend.EFFICIENT_ATTENTION),
    "opgraft": contextlib.nullcontext,
    "opgraft, Triton": _triton,
}


class Contestant(NamedTuple):
    forward: Call
    backward: Call


def _through_sdpa(case: Case, inputs: Inputs, scope: Scope) -> Contestant:
    q, k, v, grad_out = inputs
    grouped = case.heads != case.heads_k

    def forward() -> torch.Tensor:
        with scope():
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=grouped
            )

    out = forward()

    def backward() -> object:
        with scope():
            return torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)

    return Contestant(forward, backward)


def _flash_attn_4(case: Case, inputs: Inputs) -> Contestant:
    module = importlib.import_module("flash_attn.cute.interface")
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in inputs[:3])
    grad_out = inputs.grad_out.transpose(1, 2)

    def forward() -> Any:
        result = module.flash_attn_func(q, k, v, causal=case.causal)
        return result[0] if isinstance(result, tuple) else result

    out = forward()
    return Contestant(
        forward, lambda: torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
    )


def contestants(case: Case, inputs: Inputs, names: Sequence[str]) -> dict[str, Contestant]:
    """By name; without those that cannot run this case."""
    found = {}
    for name in names:
        try:
            if name == "flash-attn-4":
                made = _flash_attn_4(case, inputs)
            else:
                made = _through_sdpa(case, inputs, SCOPES[name])
            for _ in range(_everywhere.CALLS_TO_A_PLAN):
                made.forward()
                made.backward()
            torch.cuda.synchronize()
        except (ImportError, RuntimeError) as error:
            print(f"without {name}: {type(error).__name__} {str(error)[:80]}", file=sys.stderr)
        else:
            found[name] = made
    return found


# ----------------------------------------------------------------------------------- measuring


def bench(cases: Sequence[Case], names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """A record for every case, direction and contestant."""
    attention_overrides.register("CUDA")
    _compile_ahead(cases)
    records: list[dict[str, Any]] = []
    for case in cases:
        first = len(records)
        inputs = make_inputs(case, torch.bfloat16, "cuda")
        found = contestants(case, inputs, names)
        for direction, factor in (("forward", 1.0), ("backward", 2.5)):
            calls = {name: [getattr(made, direction)] * 2 for name, made in found.items()}
            for name, milliseconds in gpu_times(calls, rounds).items():
                records.append(
                    {
                        "direction": direction,
                        **case._asdict(),
                        "name": name,
                        "microseconds": milliseconds * 1e3,
                        "tflops": factor * case.operations / milliseconds / 1e9,
                    }
                )
        _add_ratios(records[first:])
        print(_rows(case, records[first:]), flush=True)
        del inputs, found, calls
        torch.cuda.empty_cache()
    print(_summary(records))
    return records


def _compile_ahead(cases: Sequence[Case]) -> None:
    """Have workers compile what the cases need, several kernels at a time."""
    with opgraft.when_not_ready("native"):
        for case in cases:
            inputs = make_inputs(case, torch.bfloat16, "cuda")
            _through_sdpa(case, inputs, contextlib.nullcontext).backward()
        opgraft.wait_until_ready()


def _add_ratios(records: list[dict[str, Any]]) -> None:
    default = {r["direction"]: r["microseconds"] for r in records if r["name"] == "default"}
    for record in records:
        record["speedup"] = default[record["direction"]] / record["microseconds"]


def _rows(case: Case, records: Sequence[dict[str, Any]]) -> str:
    return "\n".join(
        f"{case} {direction:8}"
        + "".join(
            f" | {r['name']} {r['tflops']:.0f} ({r['speedup']:.2f})"
            for r in records
            if r["direction"] == direction
        )
        for direction in ("forward", "backward")
    )


def _summary(records: Sequence[dict[str, Any]]) -> str:
    lines = []
    for name in dict.fromkeys(r["name"] for r in records):
        speedups = [r["speedup"] for r in records if r["name"] == name]
        mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
        lines.append(
            f"{name}: {mean:.3f} x the default's speed in the geometric mean of {len(speedups)}, "
            f"{min(speedups):.2f} at the least, {max(speedups):.2f} at the most"
        )
    hits = ", ".join(f"{o.name.split('.', 2)[2]} {o.hits}" for o in opgraft.overrides() if o.hits)
    return "\n".join([*lines, f"hits: {hits}"])


# ------------------------------------------------------------------------------------- results


def save(name: str, records: list[dict[str, Any]]) -> Path:
    """Write the records with what they were measured on; the path of the JSON file."""
    from importlib import metadata

    versions = {}
    for package in ("triton", "flash-attn-4", "nvidia-cutlass-dsl"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    versions["cudnn"] = str(torch.backends.cudnn.version())
    return _common.save(name, torch.cuda.get_device_name(), records, versions=versions)


def _others(name: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the file has of rows that were not measured now."""
    now = {(each["who"], each["direction"]) for each in records}
    before = _common.load(_common.path_of(name, torch.cuda.get_device_name()))
    return [each for each in before if (each["who"], each["direction"]) not in now]


def _save_everywhere(records: list[dict[str, Any]]) -> Path:
    name = "attention_everywhere"
    return save(name, [*records, *_others(name, records)])


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """TFLOP/s over length, a panel a direction, heads and mask; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(*heads, causal) for heads in HEADS for causal in (False, True)]
    figure, axes = pyplot.subplots(2, 6, figsize=(24, 8), sharey="row", layout="constrained")
    for row, direction in enumerate(("forward", "backward")):
        for axis, panel in zip(axes[row], panels, strict=True):
            shown = [
                r
                for r in records
                if (r["heads"], r["heads_k"], r["dim"], r["causal"]) == panel
                and r["direction"] == direction
            ]
            for name in dict.fromkeys(r["name"] for r in shown):
                points = [(r["length"], r["tflops"]) for r in shown if r["name"] == name]
                if points and name != "default again":
                    style = "k--" if name == "default" else "o-"
                    axis.plot(*zip(*points, strict=True), style, label=name)
            heads, heads_k, dim, causal = panel
            mask = "causal" if causal else "full"
            title = f"{direction}, {heads}:{heads_k} heads of {dim}, {mask}"
            axis.set(title=title, xlabel="length")
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
        # Last: the panels of a row share it, and limits that are set stay.
        axes[row][0].set(ylabel="TFLOP/s", ylim=(0, None))
    axes[0][0].legend(loc="lower right")
    figure.savefig(path, dpi=130)


def smoke() -> None:
    """Forward and backward at the CPU key under the interpreter: whether the script works."""
    overrides = attention_overrides.register("CPU")
    for case in (Case(1, 2, 2, 40, 16, 16, False), Case(1, 2, 2, 40, 16, 16, True)):
        inputs = make_inputs(case, torch.float16, "cpu")
        ours = _through_sdpa(case, inputs, contextlib.nullcontext)
        native = _through_sdpa(case, inputs, _native)
        torch.testing.assert_close(ours.forward(), native.forward(), rtol=0.01, atol=0.01)
        torch.testing.assert_close(ours.backward(), native.backward(), rtol=0.01, atol=0.01)
    for mask in ("causal and padding", "bias"):
        row = _everywhere.Row("smoke", 2, 2, 40, 40, 24, mask, torch.float16)
        for call in _everywhere.calls(row, "cpu"):
            ours = call()
            with opgraft.disabled():
                torch.testing.assert_close(ours, call(), rtol=0.01, atol=0.01)
    assert all(override.hits >= 4 for override in overrides)
    print("the overrides were hit and agree with native; nothing was measured")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="run on the CPU, measure nothing")
    parser.add_argument("--cells", action="store_true", help="torch's choice and opgraft alone")
    parser.add_argument("--dims", action="store_true", help="other head dimensions, and groups")
    parser.add_argument("--everywhere", action="store_true", help="masks and other kinds of calls")
    parser.add_argument("--only", default="", help="everywhere: rows of these masks or dtypes")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args(arguments)
    names = [*SCOPES, "flash-attn-4"]
    if options.smoke:
        smoke()
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke runs without one")
    elif options.everywhere:
        records = _everywhere.measure(options.rounds, options.only)
        print("written to", _save_everywhere(records))
    elif options.dims:
        names = ["default", "opgraft", "flash-attn-4"]
        records = bench(other_dims(), names, options.rounds)
        print("written to", save("attention_dims", records))
    elif options.cells:
        records = bench(table(), ["default", "default again", "opgraft"], options.rounds)
        print("written to", save("attention_cells", records))
    else:
        records = bench(table(), names, options.rounds)
        path = save("attention", records)
        plot(records, path.with_suffix(".png"))
        print("written to", path)


if __name__ == "__main__":
    main()
