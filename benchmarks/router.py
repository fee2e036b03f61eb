"""Measures a router's cost on the CPU, for calls that miss and calls that hit.

    python benchmarks/router.py           # about two minutes on two cores
    python benchmarks/router.py --smoke   # seconds: does this script work? Its numbers mean nothing

The contenders, each with 1, 8 and 64 overrides of four conditions (one of two dtypes, rank,
contiguity, a size; the size decides):

- `native`: stock PyTorch.
- `library`: a kernel in Python that only falls through (`torch.library.Library`, `call_boxed`).
- `torch._native`: the registry inside PyTorch, driven by its own functions, conditions in Python;
  left out where PyTorch has none (2.11).
- `opgraft python`, `opgraft compiled`: this project's two routers.
- `constant`: a C++ kernel that returns a tensor which is there already. No hit can cost less, so
  what a hit costs beyond it and beyond the impl (a Python function that returns a tensor which is
  there already) is the router's own share.
- `over constant`: the compiled router with that kernel as the native one, so that what a miss adds
  is seen beside little else. All overrides want greater sizes, so one test turns the call away.
- `between`: the same, with overrides that want greater sizes and ones that want smaller ones, so
  each must be asked.

What a contender puts in at the dispatcher cannot be taken out again, so each has a process of its
own. The processes take turns, round by round; a number is the median over rounds, and what a
contender adds is the median of its difference to native of the same round. Each process also
measures native before it puts anything in, which tells how well processes compare. Times are the
calling thread's CPU time. Throughput is wall-clock time, the best round's: a neighbour on the
machine only takes away from it.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import os
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import _common
import torch

COUNTS = (1, 8, 64)
OPS = ("mul.Tensor", "_softmax", "bmm")
CALLERS = ("C++", "Python")
#: Of the tensors with which two threads are measured: as everywhere here, where half a microsecond
#: is all that native takes, and so that it takes some ten.
SIZES = ("small", "middling")


class Case(NamedTuple):
    """An op with its arguments, called from C++ and from Python, and what a hit returns."""

    x: torch.Tensor
    y: torch.Tensor
    from_python: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    constant: torch.Tensor
    native: torch.Tensor


def _case(x: torch.Tensor, from_python: Callable[..., torch.Tensor]) -> Case:
    y = torch.rand_like(x)
    native = from_python(x, y)
    return Case(x, y, from_python, torch.full_like(native, 42.0), native)


def make_cases() -> dict[str, Case]:
    return {
        "mul.Tensor": _case(torch.rand(4, 64), lambda x, y: x * y),
        "_softmax": _case(torch.rand(4, 64), lambda x, _: torch.softmax(x, -1)),
        "bmm": _case(torch.rand(2, 8, 8), torch.bmm),
    }


def middling(op: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (8, 48, 48) if op == "bmm" else (64, 1024)
    return torch.rand(shape), torch.rand(shape)


class Cell(NamedTuple):
    """What is measured: a caller's call of an op, in a state of the overrides."""

    op: str
    caller: str
    overrides: int  #: 0: none is in
    hit: bool


# ----------------------------------------------------------------------------------- contenders


def _sizes(
    cases: dict[str, Case], op: str, overrides: int, hit: bool, between: bool = False
) -> Iterable[tuple[int, int]]:
    """Rank and wanted size for each override; for a hit the one that is asked last wants it.

    `between`: half of them want less than the call's size.
    """
    shape = cases[op].x.shape
    for index in range(overrides):
        wanted = 1000 + index if not between or index % 2 else shape[-1] - 1 - index // 2
        yield len(shape), shape[-1] if hit and index == overrides - 1 else wanted


#: Changes which tensor an impl returns.
SetResult = Callable[[torch.Tensor], None]


def _impl(cases: dict[str, Case], op: str) -> tuple[Callable[..., torch.Tensor], SetResult]:
    """An impl that returns a tensor which is there already, and what changes which one."""
    result = cases[op].constant

    def softmax(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return result

    def binary(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return result

    def set_result(tensor: torch.Tensor) -> None:
        nonlocal result
        result = tensor

    return (softmax if op == "_softmax" else binary), set_result


class Contender:
    """What is put in at the dispatcher; nothing, unless a subclass says otherwise."""

    #: Numbers of overrides that it can be asked for.
    counts: tuple[int, ...] = (0,)

    def install(self, cases: dict[str, Case]) -> None:
        """Put it in."""

    def select(self, overrides: int, hit: bool) -> None:
        """Route to this many overrides; the last of them takes the call, or none."""

    def set_result(self, op: str, tensor: torch.Tensor) -> None:
        """Let the impls of an op return this tensor."""


class Native(Contender):
    """Stock PyTorch."""


class Constant(Contender):
    def install(self, cases: dict[str, Case]) -> None:
        _callers().install_constants(*(cases[op].constant for op in OPS))


class PythonLibrary(Contender):
    def install(self, cases: dict[str, Case]) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for op in OPS:
            self._fall_through(op)

    def _fall_through(self, op: str) -> None:
        kernel = torch.library.get_kernel(f"aten::{op}", "CPU")

        def fall_through(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            return kernel.call_boxed(keyset, *args, **kwargs)

        self._library.impl(op, fall_through, "CPU", with_keyset=True, allow_override=True)


class TorchNative(Contender):
    """`torch._native`'s registry: its router, its conditions as its own kernels write them."""

    counts = COUNTS

    def install(self, cases: dict[str, Case]) -> None:
        from torch._native import registry

        self._registry = registry
        self._nodes: dict[tuple[str, int, bool], list[Any]] = {}
        for op, overrides, hit in itertools.product(OPS, COUNTS, (False, True)):
            label = f"bench_{overrides}_{hit}"
            for rank, wanted in _sizes(cases, op, overrides, hit):
                registry.register_op_override(
                    label, "aten", op, "CPU", self._condition(rank, wanted), _impl(cases, op)[0]
                )
            graph = registry._graphs[op, "CPU"]
            self._nodes[op, overrides, hit] = [node for node in graph if node.dsl_name == label]

    def _condition(self, rank: int, wanted: int) -> Callable[..., bool]:
        dtypes = (torch.float32, torch.float16)

        def condition(self: torch.Tensor, *_: Any) -> bool:
            return (
                self.dtype in dtypes
                and self.ndim == rank
                and self.is_contiguous()
                and self.size(-1) == wanted
            )

        return condition

    def select(self, overrides: int, hit: bool) -> None:
        for op in OPS:
            nodes = self._nodes[op, overrides, hit]
            self._registry._register_overrides_from_graph(op, "CPU", nodes)


class Opgraft(Contender):
    counts: tuple[int, ...] = (0, *COUNTS)
    router = "compiled"
    between = False

    def install(self, cases: dict[str, Case]) -> None:
        if self.router == "python":
            os.environ["OPGRAFT_ROUTER"] = "python"
        import opgraft
        from opgraft import when
        from opgraft.core import loader

        if self.router == "compiled" and loader.in_use() is None:
            raise RuntimeError(f"there is no compiled router to measure: {loader.status()}")
        self._opgraft = opgraft
        dtypes = (torch.float32, torch.float16)
        self._setters: dict[str, list[SetResult]] = {op: [] for op in OPS}
        for op, overrides, hit in itertools.product(OPS, COUNTS, (False, True)):
            label = self._label(overrides, hit)
            for index, (rank, wanted) in enumerate(_sizes(cases, op, overrides, hit, self.between)):
                impl, set_result = _impl(cases, op)
                self._setters[op].append(set_result)
                opgraft.register_op_override(
                    *("aten", op, "CPU", impl),
                    cond=when.dtype("self", *dtypes)
                    & (when.ndim("self") == rank)
                    & when.is_contiguous("self")
                    & (when.size("self", -1) == wanted),
                    dsl=label,
                    name=f"{label}_{index}",
                    priority=-index,
                )

    def _label(self, overrides: int, hit: bool) -> str:
        return f"bench_{overrides}_{hit}"

    def select(self, overrides: int, hit: bool) -> None:
        self._opgraft.disable()
        if overrides:
            self._opgraft.enable(dsl=self._label(overrides, hit))

    def set_result(self, op: str, tensor: torch.Tensor) -> None:
        for set_result in self._setters[op]:
            set_result(tensor)


class OpgraftPython(Opgraft):
    counts = COUNTS
    router = "python"


class OverConstant(Opgraft):
    counts = (1, 8)

    def install(self, cases: dict[str, Case]) -> None:
        Constant().install(cases)
        super().install(cases)


class Between(OverConstant):
    counts = (8,)
    between = True


CONTENDERS: dict[str, type[Contender]] = {
    "native": Native,
    "constant": Constant,
    "library": PythonLibrary,
    "torch._native": TorchNative,
    "opgraft python": OpgraftPython,
    "opgraft compiled": Opgraft,
    "over constant": OverConstant,
    "between": Between,
}
#: Contenders whose native kernel does nothing.
_WITHOUT_WORK = ("constant", "over constant", "between")
if importlib.util.find_spec("torch._native") is None:
    del CONTENDERS["torch._native"]


# ------------------------------------------------------------------------- a contender's process


def build_callers() -> str:
    """Compile the callers in C++; the module's path. A later run finds it compiled."""
    from torch.utils.cpp_extension import load

    source = Path(__file__).with_name("_callers.cpp")
    module = load(
        "opgraft_benchmark_callers",
        [str(source)],
        extra_cflags=["-O2"],
        extra_include_paths=[str(source.parent)],
    )
    return str(module.__file__)


_callers_path = ""


def _callers() -> Any:
    spec = importlib.util.spec_from_file_location("opgraft_benchmark_callers", _callers_path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Worker:
    """Answers the parent's requests in a process that belongs to one contender."""

    def __init__(self, contender: str, milliseconds: float) -> None:
        torch.set_num_threads(1)
        self.cases = make_cases()
        self.contender = CONTENDERS[contender]()
        self._cpp = _callers()
        self._nanoseconds = milliseconds * 1e6
        self._calls: dict[Cell, int] = {}

    def install(self) -> None:
        self.contender.install(self.cases)

    def select(self, overrides: int, hit: bool) -> None:
        self.contender.select(overrides, hit)
        returns_constant = hit or isinstance(self.contender, (Constant, OverConstant))
        for op, case in self.cases.items():
            # Past what is only done on the first hits, for which a result must be a new tensor.
            for result in (case.constant.clone(), case.constant.clone(), case.constant):
                self.contender.set_result(op, result)
                out = case.from_python(case.x, case.y)
            wanted = case.constant if returns_constant else case.native
            assert torch.equal(out, wanted), f"{op} went another way than was asked for"

    def time(self, cell: Cell) -> float:
        """Nanoseconds of CPU time a call."""
        if cell not in self._calls:
            estimate = min(self._time(cell, 5) for _ in range(3))
            self._calls[cell] = max(5, int(self._nanoseconds / estimate))
        return self._time(cell, self._calls[cell])

    def _time(self, cell: Cell, calls: int) -> float:
        case = self.cases[cell.op]
        if cell.caller == "C++":
            nanoseconds: float = self._cpp.cpu_ns_per_call(cell.op, case.x, case.y, calls)
            return nanoseconds
        return _python_time(case.from_python, (case.x, case.y), calls)

    def impl_time(self, op: str) -> float:
        """Nanoseconds of the trivial impl alone, called from Python."""
        case = self.cases[op]
        args = (case.x, -1, False) if op == "_softmax" else (case.x, case.y)
        return _python_time(_impl(self.cases, op)[0], args, 20_000)

    def throughput(self, op: str, size: str, threads: int, seconds: float) -> float:
        case = self.cases[op]
        tensors = (case.x, case.y) if size == "small" else middling(op)
        xs, ys = ([t.clone() for _ in range(threads)] for t in tensors)
        rate: float = self._cpp.calls_per_second(op, xs, ys, seconds)
        return rate


def _python_time(function: Callable[..., object], args: tuple[Any, ...], calls: int) -> float:
    repeats = itertools.repeat(None, calls)
    start = time.thread_time_ns()
    for _ in repeats:
        function(*args)
    return (time.thread_time_ns() - start) / calls


def serve(connection: Connection, contender: str, callers: str, milliseconds: float) -> None:
    global _callers_path
    _callers_path = callers
    warnings.simplefilter("ignore")  # torch's, about kernels that replace others: they are meant to
    worker = Worker(contender, milliseconds)
    while (request := connection.recv()) is not None:
        method, *arguments = request
        try:
            connection.send(getattr(worker, method)(*arguments))
        except Exception as error:
            connection.send(error)


class Process:
    """A contender's process, seen from the parent."""

    def __init__(self, contender: str, callers: str, milliseconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, contender, callers, milliseconds), daemon=True
        )
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        self._connection.send((method, *arguments))
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self._connection.send(None)
        self._process.join()


# ----------------------------------------------------------------------------------- measuring


class Measured:
    """The samples of a run, and what follows from them."""

    def __init__(self) -> None:
        #: By contender and cell, a sample for each round.
        self.times: dict[tuple[str, Cell], list[float]] = defaultdict(list)
        #: Native in the contender's own process, before anything was put in.
        self.own_native: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        #: By contender, op, size and number of threads.
        self.rates: dict[tuple[str, str, str, int], list[float]] = defaultdict(list)
        self.impl: dict[str, list[float]] = defaultdict(list)

    def nanoseconds(self, contender: str, cell: Cell) -> float:
        return statistics.median(self.times[contender, cell])

    def native(self, op: str, caller: str) -> float:
        return self.nanoseconds("native", Cell(op, caller, 0, False))

    def _with_native(self, contender: str, cell: Cell) -> Iterable[tuple[float, float]]:
        native = self.times["native", Cell(cell.op, cell.caller, 0, False)]
        return zip(self.times[contender, cell], native, strict=True)

    def added(self, contender: str, cell: Cell) -> float:
        """Nanoseconds that a call costs more than native."""
        return statistics.median(
            mine - native for mine, native in self._with_native(contender, cell)
        )

    def over_constant(self, contender: str, cell: Cell) -> float:
        """Nanoseconds that a call costs more than one that does nothing."""
        constant = self.times["constant", Cell(cell.op, cell.caller, 0, False)]
        pairs = zip(self.times[contender, cell], constant, strict=True)
        return statistics.median(mine - theirs for mine, theirs in pairs)

    def ratio(self, contender: str, cell: Cell) -> float:
        return statistics.median(
            mine / native for mine, native in self._with_native(contender, cell)
        )

    def share(self, contender: str, op: str, overrides: int = 1) -> float:
        """Nanoseconds of a hit that are the router's own, from C++."""
        hit = self.nanoseconds(contender, Cell(op, "C++", overrides, True))
        least = self.nanoseconds("constant", Cell(op, "C++", 0, False))
        return hit - least - statistics.median(self.impl[op])

    def throughput(self, contender: str, op: str, size: str = "small") -> float:
        """Of two threads, as a share of native's."""
        return max(self.rates[contender, op, size, 2]) / max(self.rates["native", op, size, 2])

    def scaling(self, contender: str, op: str, size: str = "small") -> float:
        """What a second thread brings, as a share of what it brings native."""

        def gain(name: str) -> float:
            return max(self.rates[name, op, size, 2]) / max(self.rates[name, op, size, 1])

        return gain(contender) / gain("native")


def measure(rounds: int, generations: int, milliseconds: float, callers: str) -> Measured:
    """Run all contenders in turn; new processes for each generation, since no two are the same."""
    measured = Measured()
    for generation in range(generations):
        processes = {name: Process(name, callers, milliseconds) for name in CONTENDERS}
        try:
            for name, process in processes.items():
                for _ in range(3):
                    for op, caller in itertools.product(OPS, CALLERS):
                        sample = process.ask("time", Cell(op, caller, -1, False))
                        measured.own_native[name, op, caller].append(sample)
                process.ask("install")
            for round in range(rounds):
                _round(processes, measured, seconds=max(0.03, milliseconds / 100))
                print(f"round {generation * rounds + round + 1}", end="\r", flush=True)
        finally:
            for process in processes.values():
                process.end()
    return measured


def _round(processes: dict[str, Process], measured: Measured, seconds: float) -> None:
    for name, process in processes.items():
        for overrides in CONTENDERS[name].counts:
            for hit in (False, True) if overrides else (False,):
                process.ask("select", overrides, hit)
                for op, caller in itertools.product(OPS, CALLERS):
                    cell = Cell(op, caller, overrides, hit)
                    measured.times[name, cell].append(process.ask("time", cell))
        if name == "constant":
            for op in OPS:
                measured.impl[op].append(process.ask("impl_time", op))
    # One after another and close together, because this is wall-clock time.
    for op, size, threads in itertools.product(OPS, SIZES, (1, 2)):
        for name, process in processes.items():
            if name in _WITHOUT_WORK:
                continue
            if name != "native" and name != "library":
                process.ask("select", 1, False)
            measured.rates[name, op, size, threads].append(
                process.ask("throughput", op, size, threads, seconds)
            )


# -------------------------------------------------------------------------------------- results


def table(measured: Measured) -> str:
    """Nanoseconds a call by contender and state; behind them what it adds to native."""
    columns = list(itertools.product(OPS, CALLERS))
    lines = [
        f"{'ns per call (added to native)':34}"
        + "".join(f"{op.split('.')[0] + ', ' + caller:>19}" for op, caller in columns)
    ]
    states = {(name, cell.overrides, cell.hit): None for name, cell in measured.times}
    for name, overrides, hit in states:
        state = f"{'hit' if hit else 'miss'} x{overrides}" if overrides else ""
        line = f"{name + ' ' + state:34}"
        for op, caller in columns:
            cell = Cell(op, caller, overrides, hit)
            added = measured.added(name, cell)
            line += f"{measured.nanoseconds(name, cell):10.0f} ({added:+6.0f})"
        lines.append(line)
    lines.append("")
    lines.append(f"{'native, in the process of':34}")
    for name in CONTENDERS:
        natives = [
            statistics.median(measured.own_native[name, op, caller]) for op, caller in columns
        ]
        lines.append(f"  {name:32}" + "".join(f"{each:10.0f}{'':9}" for each in natives))
    lines.append("")
    lines.append(f"{'router share of a hit, ns':34}" + "".join(f"{op:>19}" for op in OPS))
    for name in CONTENDERS:
        if name in ("native", "library", *_WITHOUT_WORK):
            continue
        shares = "".join(f"{measured.share(name, op):19.0f}" for op in OPS)
        lines.append(f"  {name:32}{shares}")
    lines.append("")
    title = "two threads, a miss: throughput as a share of native's (what a second thread brings)"
    lines.append(title)
    for size, name in itertools.product(SIZES, CONTENDERS):
        if name in _WITHOUT_WORK:
            continue
        pairs = [
            (measured.throughput(name, op, size), measured.scaling(name, op, size)) for op in OPS
        ]
        label = f"{name}, {size}"
        lines.append(f"  {label:32}" + "".join(f"{t:11.2f} ({s:.2f})" for t, s in pairs))
    return "\n".join(lines)


class Row(NamedTuple):
    """A goal of the project's, and whether it is reached; the worst op counts."""

    what: str
    goal: str
    measured: str
    met: bool


def rows(measured: Measured) -> list[Row]:
    ours, theirs = "opgraft compiled", "torch._native"

    def miss(op: str, overrides: int, caller: str = "C++") -> Cell:
        return Cell(op, caller, overrides, False)

    def listed(values: dict[str, float], form: str) -> str:
        return ", ".join(f"{op.split('.')[0]} {value:{form}}" for op, value in values.items())

    def over_constant(contender: str, overrides: int) -> dict[str, float]:
        return {op: measured.over_constant(contender, miss(op, overrides)) for op in OPS}

    one, eight = over_constant("over constant", 1), over_constant("over constant", 8)
    asked = over_constant("between", 8)
    added = {op: measured.added(ours, miss(op, 1)) for op in OPS}
    python = {n: measured.ratio(ours, miss("_softmax", n, "Python")) for n in (1, 8)}
    share = {op: measured.share(ours, op) for op in OPS}
    scaling = {op: measured.scaling(ours, op) for op in OPS}
    throughput = {op: measured.throughput(ours, op, "middling") for op in OPS}

    def over_theirs(values: dict[str, float], base: dict[str, float], most: float) -> list[Row]:
        parts = {op: values[op] / base[op] for op in OPS}
        found = listed(parts, ".3f")
        return [
            Row(f"the same over {theirs}'s", f"<= {most:.2f}", found, max(parts.values()) <= most)
        ]

    part, half = [], []
    if theirs in CONTENDERS:
        part = over_theirs(added, {op: measured.added(theirs, miss(op, 1)) for op in OPS}, 0.04)
        half = over_theirs(share, {op: measured.share(theirs, op) for op in OPS}, 0.5)
    return [
        Row("miss, C++, 1 override: ns", "<= +20", listed(one, "+.0f"), max(one.values()) <= 20),
        *part,
        Row("miss, C++, 8 at once: ns", "<= +50", listed(eight, "+.0f"), max(eight.values()) <= 50),
        Row(
            "miss, C++, each of 8 asked: ns",
            "<= +100",
            listed(asked, "+.0f"),
            max(asked.values()) <= 100,
        ),
        Row("miss, torch.softmax from Python", "<= 1.02", f"{python[1]:.3f}", python[1] <= 1.02),
        Row("the same, 8 overrides", "<= 1.06", f"{python[8]:.3f}", python[8] <= 1.06),
        Row("hit, router's share: ns", "<= 500", listed(share, ".0f"), max(share.values()) <= 500),
        *half,
        Row(
            "what a second thread brings",
            ">= 0.95",
            listed(scaling, ".2f"),
            min(scaling.values()) >= 0.95,
        ),
        Row(
            "two threads over native's, middling",
            ">= 0.95",
            listed(throughput, ".2f"),
            min(throughput.values()) >= 0.95,
        ),
    ]


def print_rows(goals: Sequence[Row]) -> None:
    for row in goals:
        verdict = "met" if row.met else "NOT MET"
        print(f"{row.what:34}{row.goal:>9}  {row.measured:48} {verdict}")


def records(measured: Measured) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, cell in measured.times:
        found.append(
            {
                "contender": name,
                **cell._asdict(),
                "ns": round(measured.nanoseconds(name, cell), 1),
                "added_ns": round(measured.added(name, cell), 1),
                "ratio": round(measured.ratio(name, cell), 4),
            }
        )
    for (name, op, size, threads), rates in measured.rates.items():
        rate = round(max(rates))
        found.append(
            {
                "contender": name,
                "op": op,
                "size": size,
                "threads": threads,
                "calls_per_second": rate,
            }
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="one short round, nothing is saved")
    parser.add_argument("--rounds", type=int, default=11, help="rounds a generation")
    parser.add_argument("--generations", type=int, default=3, help="sets of processes")
    parser.add_argument("--milliseconds", type=float, default=4, help="CPU time of a sample")
    options = parser.parse_args(arguments)
    # Before the processes import torch. It warns where a kernel replaces one, which is meant here.
    # And a thread of C++ that calls must not start threads of its own.
    os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    callers = build_callers()
    if options.smoke:
        options.rounds, options.generations, options.milliseconds = 1, 1, 0.2
    measured = measure(options.rounds, options.generations, options.milliseconds, callers)
    print(table(measured))
    print()
    goals = rows(measured)
    print_rows(goals)
    if not options.smoke:
        path = _common.save(
            "router", _common.cpu_name(), records(measured), goals=[row._asdict() for row in goals]
        )
        print("written to", path)


if __name__ == "__main__":
    main()
