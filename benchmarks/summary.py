"""Prints the README's figures and draws its plot, from the results of the other scripts.

    python benchmarks/summary.py           the lines, and benchmarks/results/summary_nvidia_h200.svg
    python benchmarks/summary.py --smoke   the lines alone

Nothing is measured here. The figures are geometric means: what attention and RMSNorm gain over what
torch runs, how near RMSNorm comes to a copy of as many bytes, and what whole models gain.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
DEVICE = "nvidia_h200"
DIRECTIONS = ("forward", "backward")

Record = Mapping[str, Any]


def records(name: str) -> list[dict[str, Any]]:
    """What a script has written for the device."""
    found: list[dict[str, Any]] = json.loads(
        (RESULTS / f"{name}_{DEVICE}.json").read_text(encoding="utf-8")
    )["records"]
    return found


def of(all_records: Iterable[Record], name: str, direction: str) -> list[Record]:
    """The records of a contender in a direction, in the order in which they were written."""
    return [r for r in all_records if (r["name"], r["direction"]) == (name, direction)]


def speedups(norm: Sequence[Record], direction: str) -> list[float]:
    """How many times faster than native RMSNorm is, a size each."""
    pairs = zip(of(norm, "native", direction), of(norm, "opgraft", direction), strict=True)
    return [native["microseconds"] / mine["microseconds"] for native, mine in pairs]


def mean_of(all_records: Sequence[Record], figure: str) -> dict[str, float]:
    """The geometric mean of a figure of ours, by direction."""
    return {
        each: geometric_mean(record[figure] for record in of(all_records, "opgraft", each))
        for each in DIRECTIONS
    }


def lines() -> list[str]:
    """The figures as the README has them."""
    attention, norm = records("attention_cells"), records("rms_norm")
    models = [r for r in records("models") if "error" not in r and not r.get("changed")]
    gains = {
        mode: [r["ratio"] for r in models if r["mode"] == mode] for mode in ("eager", "compiled")
    }
    sdpa = {
        d: geometric_mean(r["speedup"] for r in of(attention, "opgraft", d)) for d in DIRECTIONS
    }
    norms = {d: geometric_mean(speedups(norm, d)) for d in DIRECTIONS}
    shares = {d: geometric_mean(r["share"] for r in of(norm, "opgraft", d)) for d in DIRECTIONS}
    return [
        f"- `F.scaled_dot_product_attention`: {sdpa['forward']:.2f} x torch's own choice forward, "
        f"{sdpa['backward']:.2f} x backward;",
        f"- `F.rms_norm`: {norms['forward']:.2f} x forward, {norms['backward']:.2f} x backward, at "
        f"{shares['forward']:.2f} and {shares['backward']:.2f} of the speed of a copy;",
        f"- {len(gains['eager'])} whole models, nothing changed in them: "
        f"{geometric_mean(gains['eager']):.3f} x; {len(gains['compiled'])} of them under "
        f"`torch.compile`: {geometric_mean(gains['compiled']):.3f} x.",
    ]


def plot(path: Path) -> None:
    """RMSNorm's share of a copy and attention's gain, as a small SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text as text, and the same picture as the same file.
    pyplot.rcParams.update({"svg.hashsalt": "opgraft", "svg.fonttype": "none", "font.size": 8})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7, 2.4), layout="constrained")
    _plot_norm(left)
    _plot_attention(right)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _plot_norm(axis: Any) -> None:
    norm = records("rms_norm")
    for name, color in (("opgraft", "#4c78a8"), ("native", "#aaaaaa")):
        for direction, style in zip(DIRECTIONS, ("o-", "o--"), strict=True):
            points = [(r["hidden"], r["share"]) for r in of(norm, name, direction)]
            label = f"{name}, {direction}"
            axis.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=3)
    axis.set(title="RMSNorm, share of a copy's speed", xlabel="hidden", ylim=(0, 1.05))
    axis.legend(frameon=False, ncols=2, loc="lower center", fontsize=7)


def _plot_attention(axis: Any) -> None:
    attention = records("attention_cells")
    for direction, style in zip(DIRECTIONS, ("o-", "o--"), strict=True):
        by_length: dict[int, list[float]] = {}
        for record in of(attention, "opgraft", direction):
            by_length.setdefault(record["length"], []).append(record["speedup"])
        points = [(length, geometric_mean(found)) for length, found in sorted(by_length.items())]
        axis.plot(*zip(*points, strict=True), style, color="#4c78a8", label=direction, markersize=3)
    axis.axhline(1, color="#aaaaaa", linewidth=0.8)
    axis.set(title="Attention, speed over torch's own choice", xlabel="length")
    axis.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="no plot")
    smoke = parser.parse_args().smoke
    print("\n".join(lines()))
    if not smoke:
        plot(RESULTS / f"summary_{DEVICE}.svg")


if __name__ == "__main__":
    main()
