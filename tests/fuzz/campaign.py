"""Many programs: stock first, before anything is registered, then with overrides, compared."""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import opgraft
from opgraft.registry import registry
from tests.fuzz import grafts, programs
from tests.fuzz.programs import Kind, Left, Outcome, Program

#: Programs that run with the same overrides.
GROUP = 40
#: Of five programs one is smooth.
SMOOTH = 5
THREADS = 3
#: An error may be so many times native's own, both against float64, ...
K = 8.0
#: ... or so many roundings of the program's largest value, where native's happens to be small.
ROUNDINGS = 256


class Stock(NamedTuple):
    """A program, and what stock PyTorch leaves of it."""

    program: Program
    outcome: Outcome
    reference: Outcome | None  # in float64, of a smooth program


@dataclass
class Failure:
    """A program that ended otherwise."""

    seed: int
    graft: int
    mode: str
    difference: str
    program: str


class StockDied(Exception):
    """A kernel of stock PyTorch's own failed an assertion on the device, which no process outlives.

    Seen on an H200 with torch 2.11, about once in a thousand programs.
    """

    def __init__(self, seed: int, error: Exception) -> None:
        super().__init__(f"seed {seed}: {error}")
        self.seed = seed


@dataclass
class Result:
    """What came of a campaign; results of several add up."""

    programs: int = 0
    steps: int = 0
    errors: int = 0  # that stock raises, too
    hits: int = 0
    misses: int = 0
    fallbacks: int = 0
    shadowed: int = 0
    modes: dict[str, int] = field(default_factory=dict)
    hit_ops: list[str] = field(default_factory=list)
    stock_died: list[int] = field(default_factory=list)  # seeds of programs left out
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: dict[str, Any]) -> None:
        for name in ("programs", "steps", "errors", "hits", "misses", "fallbacks", "shadowed"):
            setattr(self, name, getattr(self, name) + other[name])
        for mode, count in other["modes"].items():
            self.modes[mode] = self.modes.get(mode, 0) + count
        self.hit_ops = sorted({*self.hit_ops, *other["hit_ops"]})
        self.stock_died += other["stock_died"]
        self.failures += [Failure(**each) for each in other["failures"]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(seed: int, count: int, device: str = "cpu", without: Collection[int] = ()) -> Result:
    """Run programs `seed` to `seed + count - 1`, in a process in which nothing is registered yet.

    Args:
        seed: of the first program.
        count: how many.
        device: where they run.
        without: seeds to leave out.

    Raises:
        StockDied: one of them leaves a CUDA device unusable without any override.
    """
    if opgraft.overrides():
        raise RuntimeError("something is registered: this is no stock PyTorch")
    torch.set_num_threads(1)
    # Sums by atomics differ from run to run.
    torch.use_deterministic_algorithms(device != "cpu")
    warnings.simplefilter("ignore")
    seeds = [each for each in range(seed, seed + count) if each not in without]
    stock = [_stock(each, device) for each in seeds]
    result = Result(programs=len(seeds), stock_died=sorted(without))
    for kind in ("exact", "smooth"):
        of_kind = [each for each in stock if each.program.kind == kind]
        for start in range(0, len(of_kind), GROUP):
            _group(of_kind[start : start + GROUP], kind, device, result)
    registry.reset()
    return result


def _stock(seed: int, device: str) -> Stock:
    kind: Kind = "smooth" if seed % SMOOTH == SMOOTH - 1 else "exact"
    program = programs.make(seed, kind, grafts.OPS[kind], device)
    reference = programs.run(program, wide=True) if kind == "smooth" else None
    stock = Stock(program, programs.run(program), reference)
    if device != "cpu":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise StockDied(seed, error) from error
    return stock


def _group(group: Sequence[Stock], kind: Kind, device: str, result: Result) -> None:
    graft = group[0].program.seed
    rng = random.Random(graft)
    # Where a result cancels to nearly nothing, shadow mode takes rounding for a difference: not for
    # what rounds otherwise than native.
    mode = rng.choice(("plain", "plain", "shadow" if kind == "exact" else "plain", "threads"))
    registry.reset()
    overrides = grafts.register(graft, kind, "CPU" if device == "cpu" else "CUDA")
    with MODES[mode](rng):
        with ThreadPoolExecutor(THREADS if mode == "threads" else 1) as pool:
            together = [each for each in group if each.program.may_share_threads]
            found = dict(zip(map(id, together), pool.map(_difference, together), strict=True))
        alone = {id(each): _difference(each) for each in group if id(each) not in found}
        differences = [(found | alone)[id(each)] for each in group]
    result.modes[mode] = result.modes.get(mode, 0) + len(group)
    result.steps += sum(len(each.program.steps) for each in group)
    result.errors += sum(len(each.outcome.errors) for each in group)
    for override in overrides:
        result.hits += override.hits
        result.misses += override.misses
        result.fallbacks += override.fallbacks
        result.shadowed += override.shadowed
    taken = {override.op for override in overrides if override.hits}
    result.hit_ops = sorted({*result.hit_ops, *taken})
    for each, difference in zip(group, differences, strict=True):
        if difference is not None:
            shortest = shrunk(each.program)
            failure = Failure(each.program.seed, graft, mode, difference, str(shortest))
            result.failures.append(failure)
            print(f"seed {failure.seed}: {difference}\n{shortest}", file=sys.stderr)


# ------------------------------------------------------------------ how a group runs


@contextmanager
def _plain(rng: random.Random) -> Iterator[None]:
    yield


@contextmanager
def _shadowed(rng: random.Random) -> Iterator[None]:
    with opgraft.shadow(rate=0.3, on_mismatch="raise"):
        yield


@contextmanager
def _toggled(rng: random.Random) -> Iterator[None]:
    """While this lasts, another thread switches overrides on and off."""
    stop = threading.Event()
    keywords = [{"dsl": "one"}, {"dsl": "two"}, *({"op": op} for op in grafts.OPS["smooth"]), {}]

    def toggle() -> None:
        while not stop.wait(0.001):
            chosen: dict[str, Any] = rng.choice(keywords)
            opgraft.disable(**chosen)
            opgraft.enable(**chosen)

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


MODES: dict[str, Callable[[random.Random], Any]] = {
    "plain": _plain,
    "shadow": _shadowed,
    "threads": _toggled,
}

# ------------------------------------------------------------------ comparing


def _difference(stock: Stock) -> str | None:
    try:
        outcome = programs.run(stock.program, scopes=True)
    except BaseException as error:  # a stock program raises nothing that is not an outcome
        return f"it raised {error!r}"
    return compare(stock, outcome)


def compare(stock: Stock, outcome: Outcome) -> str | None:
    """How an outcome differs from stock's; None where it does not."""
    if outcome.errors != stock.outcome.errors:
        return f"errors {outcome.errors}, stock's are {stock.outcome.errors}"
    if outcome.aliases != stock.outcome.aliases:
        return f"storages shared {outcome.aliases}, stock's {stock.outcome.aliases}"
    references = stock.reference.registers if stock.reference else [None] * len(outcome.registers)
    scale = max((_largest(each) for each in references), default=0.0)
    rows = zip(outcome.registers, stock.outcome.registers, references, strict=True)
    for index, (mine, theirs, reference) in enumerate(rows):
        difference = _compare(mine, theirs, reference, scale)
        if difference is not None:
            return f"r{index}: {difference}"
    return None


def _compare(
    mine: Left | None, theirs: Left | None, reference: Left | None, scale: float
) -> str | None:
    if mine is None or theirs is None:
        return None if mine is theirs else f"{mine}, stock leaves {theirs}"
    if mine.facts != theirs.facts:
        return f"{mine.facts}, stock's are {theirs.facts}"
    wide = (None, None) if reference is None else (reference.value, reference.grad)
    pairs = ((mine.value, theirs.value, wide[0]), (mine.grad, theirs.grad, wide[1]))
    for what, (one, other, truth) in zip(("values", "grad"), pairs, strict=True):
        if one is None or other is None:
            if one is not other:
                return f"{what}: {one}, stock's are {other}"
        elif truth is None and not _same(one, other):
            return f"{what} {one}, stock's are {other}"
        elif truth is not None:
            error, allowed = _error(one, truth), _error(other, truth) * K
            allowed = max(allowed, ROUNDINGS * torch.finfo(one.dtype).eps * scale)
            if not error <= allowed:
                return f"{what} have error {error:.3g}; {allowed:.3g} is allowed"
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _error(value: Tensor, truth: Tensor) -> float:
    if not value.numel():
        return 0.0
    both_nan = value.isnan() & truth.isnan()
    return float(torch.where(both_nan, 0, (value.double() - truth.double()).abs()).max())


def _largest(left: Left | None) -> float:
    tensors = [] if left is None else [left.value, left.grad]
    found = [float(t.nan_to_num().abs().max()) for t in tensors if t is not None and t.numel()]
    return max(found, default=0.0)


def shrunk(program: Program) -> Program:
    """The program without the steps that its difference does not need."""
    for index in reversed(range(len(program.steps))):
        shorter = program.without(index)
        with opgraft.disabled():
            reference = programs.run(shorter, wide=True) if program.kind == "smooth" else None
            stock = Stock(shorter, programs.run(shorter), reference)
        if _difference(stock) is not None:
            program = shorter
    return program
