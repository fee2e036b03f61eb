"""Shared by the benchmarks of tiles: a kernel's chosen tile against all other sensible ones.

Each kind of call has its tiles, which take turns with the chosen one, with native and with a copy.
Wrong results are left out, and said.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import _common
import torch
from _gpu import gpu_times, natively

import opgraft

Tensors: TypeAlias = Sequence[torch.Tensor]
Launch: TypeAlias = Callable[[], Any]

WORKERS = 15
#: A tile is better if it takes less than this share of the chosen one's time.
BETTER = 0.95


class Study(NamedTuple):
    """What is measured. Its functions are a script's own, which its workers import.

    Attributes:
        name: of the file of results.
        kinds: the kinds of calls, named tuples.
        tiles: of a kind, all that are sensible.
        tile_name: of a tile.
        inputs: a kind's tensors on a device; few elements if asked for. The last one is compared.
        launch: the kernel's launch with a tile; None: with the one that it chooses.
        native: what the last tensor should be.
        copy: moves as many bytes as the kernel has to.
        group: of a record, by which the summary parts kinds.
    """

    name: str
    kinds: Callable[[], Iterable[Any]]
    tiles: Callable[[Any], Iterable[Any]]
    tile_name: Callable[[Any], str]
    inputs: Callable[[Any, str, bool], Tensors]
    launch: Callable[[Any, Tensors, Any], Launch]
    native: Callable[[Any, Tensors], torch.Tensor]
    copy: Callable[[Any, Tensors], object]
    group: Callable[[Mapping[str, Any]], str]


def choosing(
    module: ModuleType, rule: str, tile: object
) -> contextlib.AbstractContextManager[object]:
    """A scope in which a module's function, its rule, chooses a tile; None: what it does choose."""
    if tile is None:
        return contextlib.nullcontext()
    return mock.patch.object(module, rule, lambda *_: tile)


def is_right(study: Study, kind: Any, tensors: Tensors, launch: Launch) -> bool:
    tensors[-1].zero_()
    launch()
    expected: Any = natively(lambda: study.native(kind, tensors))()
    return torch.allclose(tensors[-1].float(), expected.float(), rtol=0.02, atol=0.03)


def _compile(study: Study, kind: Any, some: Sequence[Any]) -> None:
    """In a worker: Triton's cache on disk has the kernels afterwards."""
    tensors = study.inputs(kind, "cuda", True)
    for tile in some:
        with contextlib.suppress(Exception):  # the measuring process meets it, too, and says it
            study.launch(kind, tensors, tile)()


def bench(study: Study, kind: Any, rounds: int) -> dict[str, Any]:
    """Microseconds by tile, the fastest first; of the chosen one, of native, and of a copy."""
    sets = [study.inputs(kind, "cuda", False) for _ in range(2)]
    contenders: dict[str, Sequence[Launch]] = {
        "native": [natively(lambda t=t: study.native(kind, t)) for t in sets],  # type: ignore[misc]
        "copy": [lambda t=t: study.copy(kind, t) for t in sets],  # type: ignore[misc]
    }
    wrong = []
    for tile in (None, *study.tiles(kind)):
        name = "chosen" if tile is None else study.tile_name(tile)
        try:
            launches = [study.launch(kind, tensors, tile) for tensors in sets]
            agrees = is_right(study, kind, sets[0], launches[0])
        except Exception as error:  # too many registers, say
            print(f"{kind}: without {name}: {str(error).splitlines()[0][:80]}", flush=True)
            continue
        if agrees:
            contenders[name] = launches
        else:
            wrong.append(name)
    times = {name: round(1e3 * each, 1) for name, each in gpu_times(contenders, rounds).items()}
    apart = {name: times.pop(name) for name in ("native", "copy", "chosen")}
    by_time = sorted(times.items(), key=lambda item: item[1])
    return {**kind._asdict(), **apart, "tiles": dict(by_time), "wrong": wrong}


def summary(study: Study, records: Sequence[Mapping[str, Any]]) -> str:
    """How the chosen tile does, by group.

    >>> from types import SimpleNamespace as Studied
    >>> study = Studied(group=lambda record: record["direction"])
    >>> record = {"direction": "forward", "copy": 8.0, "native": 30.0, "chosen": 10.0}
    >>> print(summary(study, [{**record, "tiles": {"one": 9.0, "other": 12.0}}]))
    forward: 1 kinds, 0.80 of a copy, 3.00 x native, 0.90 of it the fastest; better for 1
    """
    lines = []
    for group in sorted({study.group(record) for record in records}):
        some = [r for r in records if study.group(r) == group and r["tiles"]]
        least = [min(r["tiles"].values()) / r["chosen"] for r in some]
        lines.append(
            f"{group}: {len(some)} kinds, "
            f"{statistics.geometric_mean(r['copy'] / r['chosen'] for r in some):.2f} of a copy, "
            f"{statistics.geometric_mean(r['native'] / r['chosen'] for r in some):.2f} x native, "
            f"{statistics.geometric_mean(least):.2f} of it the fastest; "
            f"better for {sum(each < BETTER for each in least)}"
        )
    return "\n".join(lines)


def run(study: Study, mine: Sequence[Any], rounds: int, seconds: float) -> None:
    """Measure kinds until the time is up, and add them to the results."""
    end = time.monotonic() + seconds
    gpu = torch.cuda.get_device_name()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool:
        waiting: list[Future[None]] = []
        for kind in mine:
            all_tiles = [*study.tiles(kind)]
            some = (all_tiles[n::3] for n in range(3))
            waiting += [pool.submit(_compile, study, kind, each) for each in some if each]
        # All of them first: workers use the GPU, too.
        for future in waiting:
            if time.monotonic() > end:
                break
            future.result()
        pool.shutdown(cancel_futures=True)
    for number, kind in enumerate(mine):
        if time.monotonic() > end:
            print(f"left: {len(mine) - number} of {len(mine)}")
            break
        record = bench(study, kind, rounds)
        fastest = itertools.islice(record["tiles"].items(), 3)
        figures = {name: record[name] for name in ("copy", "native", "chosen")}
        print(*kind, figures, *fastest, *record["wrong"], flush=True)
        _common.add(study.name, gpu, [record], *kind._fields)
        torch.cuda.empty_cache()


def smoke(study: Study, kinds: Iterable[Any]) -> None:
    """Each kind under the interpreter with two tiles: whether the script works."""
    for kind in kinds:
        tensors = study.inputs(kind, "cpu", True)
        for tile in (None, *itertools.islice(study.tiles(kind), 2)):
            agrees = is_right(study, kind, tensors, study.launch(kind, tensors, tile))
            assert agrees, (kind, tile)
    print("kernels agree with native; nothing was measured")


def _part(text: str) -> tuple[int, int]:
    number, count = (int(each) for each in text.split("/"))
    if not 1 <= number <= count:
        raise ValueError
    return number, count


def main(study: Study, small: Iterable[Any], description: str | None) -> None:
    """A script's command line.

    Args:
        study: what it measures.
        small: kinds that take seconds under the interpreter.
        description: the script's docstring.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="run on the CPU, measure nothing")
    parser.add_argument("--summary", type=Path, metavar="RESULTS", help="measure nothing")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="of the kinds")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all of them")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.summary:
        print(summary(study, json.loads(options.summary.read_text())["records"]))
        return
    opgraft.disable()
    if options.smoke:
        smoke(study, small)
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke runs without one")
    number, count = options.part
    run(study, [*study.kinds()][number - 1 :: count], options.rounds, options.seconds)
