"""Shared by benchmarks/rms_norm.py and benchmarks/layer_norm.py.

The bandwidth is that of the elements that a norm has to move: 2 * rows * hidden forward (x and y),
3 * rows * hidden backward (x, the gradients of y and of x). Weights, statistics and partial sums do
not count. It is compared with a device-to-device copy of as many bytes in the same run.

Times are medians over rounds in which every contestant takes its turn. Inputs rotate among several
sets, which together are larger than any L2. The GPU is kept busy while a turn's calls are issued,
so the times are those of the kernels, without the host's.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import _common
import torch
from _gpu import Call, end_to_end_time, gpu_times

import opgraft
from opgraft import Override

SIZES = [
    *((32768, 1024), (32768, 4096), (16384, 8192), (8192, 16384)),
    *((4096, 32768), (2048, 65536), (1024, 131072)),
]
#: Hidden sizes that models have and that are no powers of two, and other multiples of 128.
WIDTHS = [
    *((4096, 3072), (8192, 5120), (16384, 2560), (32768, 1536)),
    *((8192, 6144), (8192, 7168), (4096, 12288)),
    *((32768, 1152), (16384, 2688), (8192, 4480), (4096, 11008), (4096, 13824)),
]
#: Rows as narrow as vision models' channels and attention's heads are.
NARROW = [(200704, 128), (1048576, 32), (524288, 64), (262144, 96), (131072, 256), (65536, 512)]
#: What takes rows that are no matrix's: peers read and write wrong memory, and end the process.
_OF_IMAGES = ("native", "opgraft", "triton")
#: The side of images whose channels are normalised where they lie, how many, and the channels.
IMAGES = [
    *((56, 64, 128), (56, 128, 64), (56, 64, 96), (28, 64, 256), (14, 256, 512), (14, 64, 768)),
    *((112, 64, 32), (112, 64, 16)),
]
EPS = 1e-6
INPUT_SETS = 3

Function: TypeAlias = Callable[[Any], object]
Both: TypeAlias = tuple[Function, Function]


class Norm(NamedTuple):
    """A norm to measure; functions take what `make_inputs` made, forward and backward."""

    name: str
    title: str
    ops: tuple[str, str]
    make_inputs: Callable[[int, int, torch.dtype, str], Any]  # rows, hidden, dtype, device
    native: Both
    through_op: Both
    impls: Both
    clusters: Callable[[], Both]  # the CuteDSL kernels, imported by the call
    register: Callable[[str], list[Override]]
    impl_functions: tuple[Callable[..., Any], Callable[..., Any]]
    peers: dict[str, Callable[[], Both]]


# ----------------------------------------------------------------------------------- bandwidth


def _contestants(norm: Norm) -> dict[str, Both]:
    """By name: native, what opgraft routes to, its kernels, and the peers that can be imported."""
    found = {"native": norm.native, "opgraft": norm.through_op, "triton": norm.impls}
    for name, load in {"cluster": norm.clusters, **norm.peers}.items():
        try:
            found[name] = load()
        except ImportError as error:
            print(f"without {name}: {error}", file=sys.stderr)
    return found


def _copies(elements: int, dtype: torch.dtype) -> list[Call]:
    """Copies that read and write `elements` elements together."""
    tensors = [
        [torch.randn(elements // 2, device="cuda").to(dtype) for _ in range(2)]
        for _ in range(INPUT_SETS)
    ]
    return [lambda pair=pair: pair[0].copy_(pair[1]) for pair in tensors]  # type: ignore[misc]


def _hits(op: str) -> int:
    return sum(override.hits for override in opgraft.overrides(op=op))


def _of_images(inputs: Any, side: int) -> Any:
    """The same inputs, of images whose channels are as far apart as a convolution leaves them."""
    pixels = side * side
    fields = inputs._asdict().items()
    matrices = {
        name: each.view(-1, pixels, each.shape[-1]) for name, each in fields if each.dim() == 2
    }
    matrices["x"] = matrices["x"].mT.contiguous().mT
    return inputs._replace(**matrices)


def narrow(norm: Norm, rounds: int) -> list[dict[str, Any]]:
    """`bandwidth` of narrow rows, and of images' channels."""
    norm.register("CUDA")
    records = bandwidth(norm, NARROW, rounds)
    for side, count, channels in IMAGES:
        found = bandwidth(norm, [(count * side * side, channels)], rounds, side)
        records += [{**each, "side": side} for each in found]
    return records


def bandwidth(
    norm: Norm, sizes: Sequence[tuple[int, int]], rounds: int, side: int = 0
) -> list[dict[str, Any]]:
    """A record for every size, direction and contestant, of what is registered."""
    records: list[dict[str, Any]] = []
    for rows, hidden in sizes:
        first = len(records)
        inputs = [norm.make_inputs(rows, hidden, torch.bfloat16, "cuda") for _ in range(INPUT_SETS)]
        if side:
            inputs = [_of_images(each, side) for each in inputs]
        for direction, (op, passes) in enumerate(zip(norm.ops, (2, 3), strict=True)):
            elements = passes * rows * hidden
            contenders: dict[str, Sequence[Call]] = {"copy": _copies(elements, torch.bfloat16)}
            for name, functions in _contestants(norm).items():
                if side and name not in _OF_IMAGES:
                    continue
                function = functions[direction]
                calls = [lambda i=i, f=function: f(i) for i in inputs]  # type: ignore[misc]
                if _runs(name, calls[0]):
                    contenders[name] = calls
            before = _hits(op)
            times = gpu_times(contenders, rounds)
            hits = _hits(op) - before
            # Those of the first turn, which is not timed, may be native's.
            assert hits >= rounds * INPUT_SETS, f"{op} {rows}x{hidden}: {hits} hits"
            for name, milliseconds in times.items():
                records.append(
                    {
                        "direction": ("forward", "backward")[direction],
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
    """Whether a peer, or the kernels over clusters, supports the size."""
    if name in ("native", "opgraft", "triton"):
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


# ----------------------------------------------------------------------------------- crossover


class Timing(NamedTuple):
    """Microseconds a call: of the GPU's time, and end to end in a loop of calls."""

    gpu: float
    end_to_end: float


def _time(call: Call, rounds: int) -> Timing:
    gpu = gpu_times({"": [call] * 4}, rounds)[""]
    return Timing(gpu * 1e3, end_to_end_time(call, rounds) * 1e3)


def crossover(norm: Norm, rounds: int) -> list[dict[str, Any]]:
    """Native and override, whatever the conditions say, at sizes around the crossover.

    Native has its turn before anything is registered, so that it pays for no router; `impl` is the
    override's implementation called directly.
    """
    cases = [
        (hidden, log2, direction)
        for hidden in (128, 1024, 4096, 16384, 65536, 131072)
        for log2 in range(18, 28)
        for direction in (0, 1)
        if 2**log2 >= hidden
    ]

    def measure(functions: Both) -> list[Timing]:
        timings = []
        for hidden, log2, direction in cases:
            i = norm.make_inputs(2**log2 // hidden, hidden, torch.bfloat16, "cuda")
            function = functions[direction]
            timings.append(_time(lambda i=i, f=function: f(i), rounds))  # type: ignore[misc]
        return timings

    native = measure(norm.through_op)
    direct = measure(norm.impls)
    for op, impl in zip(norm.ops, norm.impl_functions, strict=True):
        opgraft.triton_utils.register_op_override(
            *op.split("::"), "CUDA", impl, cond=opgraft.when.numel("input") > 0, name="crossover"
        )
    routed = measure(norm.through_op)
    assert all(_hits(op) > len(cases) for op in norm.ops)
    records: list[dict[str, Any]] = []
    timings = zip(native, direct, routed, strict=True)
    for (hidden, log2, direction), timing in zip(cases, timings, strict=True):
        by_name = dict(zip(("native", "impl", "opgraft"), timing, strict=True))
        name = ("forward", "backward")[direction]
        records.append(
            {
                "direction": name,
                "hidden": hidden,
                "log2_elements": log2,
                **{f"{who}_us": each._asdict() for who, each in by_name.items()},
            }
        )
        print(
            f"{name:8} {2**log2 // hidden:8} x {hidden:6} (2**{log2}) | GPU, end to end us"
            + "".join(f" | {n} {t.gpu:6.1f} {t.end_to_end:6.1f}" for n, t in by_name.items())
        )
    return records


# ------------------------------------------------------------------------------------ clusters


def clusters(norm: Norm, rounds: int) -> list[dict[str, Any]]:
    """Native, the Triton kernels and those over clusters, called directly, at the sizes that the
    latter's conditions choose from."""
    contenders = {"native": norm.native, "triton": norm.impls, "cluster": norm.clusters()}
    records: list[dict[str, Any]] = []
    for direction, name in enumerate(("forward", "backward")):
        for hidden in _tile_tables(norm)[direction]:
            for log2 in range(hidden.bit_length() - 1, 28):
                i = norm.make_inputs(2**log2 // hidden, hidden, torch.bfloat16, "cuda")
                timings = {
                    who: _time(lambda i=i, f=functions[direction]: f(i), rounds)  # type: ignore[misc]
                    for who, functions in contenders.items()
                }
                records.append(
                    {
                        "direction": name,
                        "hidden": hidden,
                        "log2_elements": log2,
                        **{f"{who}_us": each._asdict() for who, each in timings.items()},
                    }
                )
                print(
                    f"{name:8} {2**log2 // hidden:5} x {hidden:6} (2**{log2}) | GPU, end to end us"
                    + "".join(
                        f" | {who} {t.gpu:6.1f} {t.end_to_end:6.1f}" for who, t in timings.items()
                    ),
                    flush=True,
                )
    return records


# Threads, vectors a thread, blocks that a multiprocessor is to hold, and rows that a block of a
# backward holds, the one it works at included. The width of the rows gives the cluster.
_FORWARD_SHAPES = [
    *((1024, 2, 2), (1024, 4, 2), (512, 2, 4), (512, 4, 2), (512, 4, 3), (512, 4, 4), (512, 8, 2)),
    *((256, 2, 6), (256, 4, 4), (256, 4, 5), (256, 4, 6), (256, 4, 8), (256, 8, 3), (256, 8, 4)),
    *((256, 8, 5), (256, 16, 2), (256, 16, 3), (128, 4, 12), (128, 8, 5), (128, 8, 6), (128, 8, 8)),
    *((128, 16, 3), (128, 16, 4), (128, 16, 5), (128, 16, 6), (64, 16, 8), (64, 32, 5)),
]
_BACKWARD_SHAPES = [
    *((1024, 1, 1, 4), (1024, 1, 1, 6), (1024, 2, 1, 2), (1024, 2, 1, 3)),
    *((512, 1, 2, 4), (512, 1, 3, 3), (512, 2, 1, 2), (512, 2, 1, 3), (512, 2, 1, 4)),
    *((512, 2, 2, 2), (512, 2, 2, 3), (512, 4, 1, 2), (512, 4, 1, 3)),
    *((256, 2, 2, 3), (256, 2, 3, 2), (256, 2, 3, 3), (256, 2, 4, 2), (256, 4, 1, 3)),
    *((256, 4, 1, 4), (256, 4, 2, 2), (256, 4, 2, 3), (256, 4, 3, 2)),
    *((256, 8, 1, 2), (256, 8, 1, 3)),
    *((128, 4, 4, 2), (128, 4, 4, 3), (128, 8, 2, 2), (128, 8, 2, 3)),
]
_MAX_CLUSTER = 8  # more are not portable


def _tile_tables(norm: Norm) -> tuple[dict[int, Any], dict[int, Any]]:
    """The chosen tiles of both directions, by the width of the rows."""
    module = importlib.import_module("opgraft_kernels.norms.cutedsl_kernels")
    tables: tuple[dict[int, Any], dict[int, Any]] = module.TILES[norm.name]
    return tables


def _tiles(direction: int, hidden: int) -> list[Any]:
    from opgraft_kernels.norms.clusters.tile import VECTOR, Tile

    found = []
    for threads, vectors, *more in (_FORWARD_SHAPES, _BACKWARD_SHAPES)[direction]:
        cluster = hidden // (threads * vectors * VECTOR)
        if 2 <= cluster <= _MAX_CLUSTER:
            found.append(Tile(threads, vectors, cluster, *more))
    return found


def tiles(norm: Norm, rounds: int) -> list[dict[str, Any]]:
    """GB/s of the kernels over clusters by tile, the fastest first; wrong results are left out."""
    functions = norm.clusters()
    records: list[dict[str, Any]] = []
    for direction, tables in enumerate(_tile_tables(norm)):
        for hidden, chosen in list(tables.items()):
            rows = 2**27 // hidden
            inputs = [
                norm.make_inputs(rows, hidden, torch.bfloat16, "cuda") for _ in range(INPUT_SETS)
            ]
            expected = norm.native[direction](inputs[0])
            elements = (2 + direction) * rows * hidden
            contenders: dict[Any, Sequence[Call]] = {"copy": _copies(elements, torch.bfloat16)}
            for tile in dict.fromkeys([chosen, *_tiles(direction, hidden)]):

                def call(i: Any, tile: Any = tile, tables: Any = tables, d: int = direction) -> Any:
                    tables[tile.hidden] = tile
                    return functions[d](i)

                try:
                    torch.testing.assert_close(call(inputs[0]), expected, rtol=0.05, atol=0.5)
                except Exception as error:
                    print(f"without {tile}: {str(error).splitlines()[0]}", file=sys.stderr)
                    torch.cuda.synchronize()
                else:
                    contenders[tile] = [lambda i=i, c=call: c(i) for i in inputs]  # type: ignore[misc]
            times = gpu_times(contenders, rounds)
            tables[hidden] = chosen
            name = ("forward", "backward")[direction]
            for tile in sorted(times, key=lambda each: times[each]):
                gbps = elements * 2 / times[tile] / 1e6
                mark = " (chosen)" if tile == chosen else ""
                print(f"{name:8} {rows:5} x {hidden:6} {gbps:5.0f} GB/s {tile}{mark}", flush=True)
                entry = {"name": "copy"} if tile == "copy" else dict(tile._asdict())
                records.append(
                    {"direction": name, "rows": rows, "hidden": hidden, "gbps": gbps, **entry}
                )
            torch.cuda.empty_cache()
    return records


# ------------------------------------------------------------------------------------- results


def save(name: str, records: list[dict[str, Any]]) -> Path:
    """Write the records with what they were measured on; the path of the JSON file."""
    import triton

    versions = {"triton": triton.__version__}
    return _common.save(name, torch.cuda.get_device_name(), records, versions=versions)


def plot(norm: Norm, records: list[dict[str, Any]], path: Path) -> None:
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
            if points:
                style = "k--" if name == "copy" else "o-"
                axis.plot(*zip(*points, strict=True), style, label=name)
        axis.set(title=f"{norm.title} {direction}, bfloat16", xlabel="hidden", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("GB/s")
    axes[0].legend()
    figure.savefig(path, dpi=150)


def smoke(norm: Norm) -> None:
    """The forward at the CPU key under the interpreter: whether the script works."""
    overrides = norm.register("CPU")
    for rows, hidden in ((64, 32), (128, 48)):
        i = norm.make_inputs(rows, hidden, torch.float32, "cpu")
        for each in (i, _of_images(i, 4)):
            torch.testing.assert_close(norm.through_op[0](each), norm.native[0](each))
    assert sum(override.hits for override in overrides) == 4
    print("the override was hit and agrees with native; nothing was measured")


def main(norm: Norm, doc: str | None, arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--smoke", action="store_true", help="run on the CPU, measure nothing")
    parser.add_argument("--crossover", action="store_true", help="measure sizes around it")
    parser.add_argument("--clusters", action="store_true", help="Triton against CuteDSL")
    parser.add_argument("--tiles", action="store_true", help="CuteDSL by tile")
    parser.add_argument("--narrow", action="store_true", help="narrow rows, and images' channels")
    parser.add_argument("--widths", action="store_true", help="sizes that are no powers of two")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args(arguments)
    if options.smoke:
        smoke(norm)
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke runs without one")
    if options.crossover:
        records = crossover(norm, min(options.rounds, 7))
        print("written to", save(f"{norm.name}_crossover", records))
    elif options.clusters:
        records = clusters(norm, min(options.rounds, 7))
        print("written to", save(f"{norm.name}_clusters", records))
    elif options.tiles:
        records = tiles(norm, options.rounds)
        print("written to", save(f"{norm.name}_tiles", records))
    elif options.narrow:
        print("written to", save(f"{norm.name}_narrow", narrow(norm, options.rounds)))
    elif options.widths:
        norm.register("CUDA")
        print("written to", save(f"{norm.name}_widths", bandwidth(norm, WIDTHS, options.rounds)))
    else:
        norm.register("CUDA")
        records = bandwidth(norm, SIZES, options.rounds)
        path = save(norm.name, records)
        plot(norm, records, path.with_suffix(".png"))
        print("written to", path)
