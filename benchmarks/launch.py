"""Measures the host time of a call: native, of an override in Python, and of a launch plan.

    python benchmarks/launch.py              # with a CUDA device; about two minutes
    python benchmarks/launch.py --crossover  # from which size on which of them is faster
    python benchmarks/launch.py              # without one: the router's own part of it all
    python benchmarks/launch.py --smoke      # seconds, with or without: does this script work?

Host microseconds of a call, in bursts that do not wait for the device, at sizes at which the host
is the bottleneck. The contenders:

- `native`: stock PyTorch, in a process of its own.
- `library`: an override as `torch._native` makes one, a kernel in Python (`torch.library.Library`)
  that decides by a condition in Python and launches by Triton.
- `declined`, `python`, `plan`, `new key`: an override of opgraft that does not want the call; one
  without launch plans; one whose plan is replayed; one with launch plans that has stopped
  recording, and has none for this call.
- `allocates`: an override whose plan allocates the outputs and launches nothing: what a plan costs
  beyond it are its launches.
- `quack`, `flash-attn-4`: their own functions, called directly, where they are installed.

The impls are those of opgraft-kernels, under a condition of four parts; of an op that the pack has
no override of, native alone is measured. Each family of contenders has a process of its own, all
pinned to one core. A burst of a contender follows one of native's, milliseconds before, because
these machines are slower for seconds at a time. A number is the median over bursts, a ratio the
median of the ratios to native's burst; native's own shows the noise. "F" is called with tensors
that require no gradients, "F, grad mode" with such as do. "Beside Python": while another thread of
the process spins in Python.

At last a training step of a small model in the style of Llama (8 layers, hidden 1024, 128 tokens,
eager): with the packs as they are shipped, and in the same process with them switched off, because
two processes differ by more than a few norms can save. There the ratio is to the packs switched
off just before or after, and theirs to `native`, the other process's step.

Without a CUDA device nothing is launched: the impl makes LayerNorm's allocations and calls a small
C function for each, which leaves what the router, the key, the table and a replay take.

`--crossover` measures RMSNorm over sizes instead: a call in a loop of calls, whatever it waits for,
the host or the device; and the device's time alone, in a CUDA graph.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import multiprocessing
import os
import statistics
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import _common
import torch
import torch.nn.functional as F

EPS = 1e-6
CALLS, WARM_UP = 100, 20
TURNS = 40  # a round, of training steps with the packs and without
# A row of the table that holds the difference, not the call.
OVER_A_MISS = "C++, over a miss"
GPU = torch.cuda.is_available()
NORM_SIZES = [(64, 1024), (1, 4096), (512, 4096)] if GPU else [(4, 64)]
ATTENTION_SIZES = [(1, 8, 128, 64), (4, 16, 512, 64)] if GPU else [(1, 1, 16, 16)]
# What SDPA may come to.
SDPA_OPS = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
)
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)

Call = Callable[[], object]


class Case(NamedTuple):
    """An op on tensors: how Python calls it, and what C++ calls it with."""

    name: str
    size: tuple[int, ...]
    ops: tuple[str, ...]
    callers: dict[str, Call]
    cpp: tuple[str, list[torch.Tensor]]

    @property
    def label(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.size))}"


class Cell(NamedTuple):
    case: str
    caller: str


# ------------------------------------------------------------------------------------- the calls


def norm_cases(rows: int, hidden: int) -> Iterator[Case]:
    x, grad = (torch.randn(rows, hidden, device=DEVICE, dtype=DTYPE) for _ in range(2))
    weight, bias = (torch.randn(hidden, device=DEVICE, dtype=DTYPE) for _ in range(2))
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    shape = [hidden]
    aten = torch.ops.aten
    if GPU:  # composite on the CPU: its backward is none of its own
        _, rstd = aten._fused_rms_norm(x, shape, weight, EPS)
        out = F.rms_norm(leaves[0], shape, leaves[1], EPS)
        yield Case(
            "rms_norm",
            (rows, hidden),
            ("_fused_rms_norm",),
            {
                "F": lambda: F.rms_norm(x, shape, weight, EPS),
                "F, grad mode": lambda: F.rms_norm(leaves[0], shape, leaves[1], EPS),
            },
            ("rms_norm", [x, weight]),
        )
        yield Case(
            "rms_norm backward",
            (rows, hidden),
            ("_fused_rms_norm_backward",),
            {
                "op": lambda: aten._fused_rms_norm_backward(
                    grad, x, shape, rstd, weight, [True, True]
                ),
                "autograd": lambda: torch.autograd.grad(out, leaves[:2], grad, retain_graph=True),
            },
            ("rms_norm_backward", [grad, x, rstd, weight]),
        )
    _, mean, layer_rstd = aten.native_layer_norm(x, shape, weight, bias, EPS)
    layer_out = F.layer_norm(leaves[0], shape, leaves[1], leaves[2], EPS)
    yield Case(
        "layer_norm",
        (rows, hidden),
        ("native_layer_norm",),
        {
            "F": lambda: F.layer_norm(x, shape, weight, bias, EPS),
            "F, grad mode": lambda: F.layer_norm(leaves[0], shape, leaves[1], leaves[2], EPS),
        },
        ("layer_norm", [x, weight, bias]),
    )
    yield Case(
        "layer_norm backward",
        (rows, hidden),
        ("native_layer_norm_backward",),
        {
            "op": lambda: aten.native_layer_norm_backward(
                grad, x, shape, mean, layer_rstd, weight, bias, [True, True, True]
            ),
            "autograd": lambda: torch.autograd.grad(layer_out, leaves, grad, retain_graph=True),
        },
        ("layer_norm_backward", [grad, x, mean, layer_rstd, weight, bias]),
    )


def attention_cases(size: tuple[int, ...]) -> Iterator[Case]:
    q, k, v = (torch.randn(size, device=DEVICE, dtype=DTYPE) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves)
    grad = torch.randn_like(out)
    yield Case(
        "sdpa",
        size,
        SDPA_OPS,
        {
            "F": lambda: F.scaled_dot_product_attention(q, k, v),
            "F, grad mode": lambda: F.scaled_dot_product_attention(*leaves),
            "autograd": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
        },
        ("sdpa", [q, k, v]),
    )


def make_cases() -> list[Case]:
    torch.manual_seed(0)
    norms = (case for size in NORM_SIZES for case in norm_cases(*size))
    attention = (case for size in ATTENTION_SIZES for case in attention_cases(size))
    return [*norms, *attention]


# ----------------------------------------------------------------------------------- contenders


class Contender:
    """What a process measures: stock PyTorch, unless a subclass says otherwise."""

    states: tuple[str, ...] = ("native",)

    def install(self) -> None:
        """Put it in."""

    def select(self, state: str) -> None:
        """Go over to one of the states."""

    def callers(self, case: Case, state: str) -> dict[str, Call]:
        """What is measured of a case, by caller; the one in C++ is added. Nothing: leave it out."""
        return case.callers

    def problem(self, case: Case, state: str) -> str:
        """After a case was warmed up: how its calls go another way than they are meant to."""
        return ""


def pack_impls() -> dict[str, Any]:
    """The impls of opgraft-kernels by op, nothing registered; a stand-in without a GPU."""
    import opgraft
    import opgraft_kernels

    if not GPU:
        return {"native_layer_norm": plain_layer_norm}
    opgraft_kernels.register()
    impls: dict[str, Any] = {}
    for override in opgraft.overrides():
        if "cluster" not in override.name:  # for long rows alone
            impls.setdefault(override.op.removeprefix("aten::"), override.impl)
        override.remove()
    return impls


def plain_layer_norm(
    input: torch.Tensor, normalized_shape: Any, weight: Any, bias: Any, eps: float
) -> tuple[torch.Tensor, ...]:
    """LayerNorm's allocations, each filled by a launch of the C function that tests launch."""
    from tests import probes

    statistics = [*input.shape[:-1], 1]
    outputs = torch.empty_like(input), input.new_empty(statistics), input.new_empty(statistics)
    for output in outputs:
        probes.scale(input.flatten()[: output.numel()], output, 2.0)
    return outputs


class Library(Contender):
    states = ("library",)

    def install(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        self._impls = pack_impls()
        for op, impl in self._impls.items():
            self._put(op, impl)

    def _put(self, op: str, impl: Any) -> None:
        kernel = torch.library.get_kernel(f"aten::{op}", DEVICE.upper())

        def wants(first: torch.Tensor, *_: Any, **__: Any) -> bool:
            return (
                first.dtype == DTYPE
                and first.ndim >= 2
                and first.numel() > 0
                and first.size(-1) <= 2**20
            )

        def route(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            if wants(*args, **kwargs):
                return impl(*args, **kwargs)
            return kernel.call_boxed(keyset, *args, **kwargs)

        self._library.impl(op, route, DEVICE.upper(), with_keyset=True, allow_override=True)

    def callers(self, case: Case, state: str) -> dict[str, Call]:
        return case.callers if self._impls.keys() & case.ops else {}


class Opgraft(Contender):
    states = ("declined", "python", "plan", "new key", "allocates")

    def install(self) -> None:
        import opgraft
        from opgraft import when
        from opgraft.ops.schema import resolve
        from opgraft.plan import trial

        self._opgraft = opgraft
        self._agree = trial.outputs_agree
        self._impls = pack_impls()
        self._overrides: dict[tuple[str, str], Any] = {}
        for op, impl in self._impls.items():
            first = resolve(f"aten::{op}").arguments[0].name
            wanted = (
                when.dtype(first, DTYPE)
                & (when.ndim(first) >= 2)
                & (when.numel(first) > 0)
                & (when.size(first, -1) <= 2**20)
            )
            declined = wanted & (when.ndim(first) == 99)
            for state in self.states:
                self._overrides[op, state] = opgraft.register_op_override(
                    *("aten", op, DEVICE.upper()),
                    self._allocating(op) if state == "allocates" else impl,
                    cond=declined if state == "declined" else wanted,
                    launch_plan=state in ("plan", "new key", "allocates"),
                    name=state,
                )
        opgraft.disable()

    def _allocating(self, op: str) -> Any:
        """An impl that returns outputs as native's, uninitialised."""
        native = self._opgraft.native(f"aten::{op}")
        known: dict[Any, list[Any]] = {}

        def impl(*args: Any, **kwargs: Any) -> Any:
            # What an output is like depends on the other arguments, too: whether there is one.
            others = [str(value) for value in args if not isinstance(value, torch.Tensor)]
            shape = (*args[0].shape, *others)
            if shape not in known:
                known[shape] = list(native(*args, **kwargs))
            return tuple(
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=DEVICE)
                if isinstance(each, torch.Tensor)
                else each
                for each in known[shape]
            )

        return impl

    def select(self, state: str) -> None:
        from opgraft.plan import trial

        # Nothing is written to what it returns, so a replay cannot return the same.
        trial.outputs_agree = self._agree if state != "allocates" else lambda one, other: True
        self._opgraft.disable()
        self._opgraft.enable(name=state)
        if state == "new key":
            for op in self._impls:
                table = self._overrides[op, state].plans.table
                while not table.stopped:
                    table.count_recording()

    def callers(self, case: Case, state: str) -> dict[str, Call]:
        return case.callers if self._impls.keys() & case.ops else {}

    def problem(self, case: Case, state: str) -> str:
        overrides = [each for (_, of), each in self._overrides.items() if of == state]

        def totals() -> tuple[int, int]:
            plans = [override.plans for override in overrides if override.plans is not None]
            return sum(override.hits for override in overrides), sum(p.hits for p in plans)

        before = totals()
        for call in case.callers.values():
            call()
        hits, replays = (after - b for after, b in zip(totals(), before, strict=True))
        expected = 0 if state in ("declined", "new key") else len(case.callers)
        expected_replays = 0 if state == "python" else expected
        went = hits >= expected and (expected > 0 or hits == 0) and replays >= expected_replays
        if went:
            return ""
        of_case = [override.plans for override in overrides if override.op[6:] in case.ops]
        refusals = [plans.refusals for plans in of_case if plans is not None]
        return f"{hits} hits, {replays} replays, {of_case}, {refusals}"


class Peers(Contender):
    """Other projects' functions, called directly: no dispatcher, no autograd."""

    states = ("peer",)

    def install(self) -> None:
        self._modules: dict[str, Any] = {}
        for name in ("quack.rmsnorm", "flash_attn.cute.interface"):
            try:
                self._modules[name] = importlib.import_module(name)
            except ImportError as error:
                print(f"without {name}: {error}", flush=True)

    def callers(self, case: Case, state: str) -> dict[str, Call]:
        tensors = case.cpp[1]
        quack = self._modules.get("quack.rmsnorm")
        flash = self._modules.get("flash_attn.cute.interface")
        if case.name == "rms_norm" and quack is not None:
            x, weight = tensors
            return {"F": lambda: quack.rmsnorm_fwd(x, weight, eps=EPS, store_rstd=True)}
        if case.name == "rms_norm backward" and quack is not None:
            grad, x, rstd, weight = tensors
            rows = rstd.view(-1)
            return {"op": lambda: quack.rmsnorm_bwd(x, weight, grad, rows)}
        if case.name == "sdpa" and flash is not None:
            q, k, v = (t.transpose(1, 2) for t in tensors)
            return {"F": lambda: flash.flash_attn_func(q, k, v)}
        return {}


CONTENDERS: dict[str, type[Contender]] = {
    "native": Contender,
    "library": Library,
    "opgraft": Opgraft,
    "peers": Peers,
}


# ---------------------------------------------------------------------------------------- a model


class Block(torch.nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        options = {"device": DEVICE, "dtype": DTYPE}
        self.heads = heads
        self.norms = torch.nn.ModuleList(
            torch.nn.RMSNorm(hidden, eps=EPS, **options) for _ in range(2)
        )
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False, **options)
        self.out = torch.nn.Linear(hidden, hidden, bias=False, **options)
        self.up = torch.nn.Linear(hidden, 2 * 11 * hidden // 4, bias=False, **options)
        self.down = torch.nn.Linear(11 * hidden // 4, hidden, bias=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Training:
    """A training step of a small model in the style of Llama, bound by the host."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers, hidden, heads, tokens, vocabulary = (
            (8, 1024, 16, 128, 4096) if GPU else (1, 32, 2, 8, 64)
        )
        options = {"device": DEVICE, "dtype": DTYPE}
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(vocabulary, hidden, **options),
            *(Block(hidden, heads) for _ in range(layers)),
            torch.nn.RMSNorm(hidden, eps=EPS, **options),
            torch.nn.Linear(hidden, vocabulary, bias=False, **options),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(vocabulary, (1, tokens + 1), device=DEVICE)

    def step(self) -> None:
        logits = self.model(self.tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


# ------------------------------------------------------------------------- a contender's process


def build_callers() -> str:
    """Compile the callers in C++; the module's path. A later run finds it compiled."""
    from torch.utils.cpp_extension import load

    source = Path(__file__).with_name("_launch_callers.cpp")
    module = load("opgraft_launch_callers", [str(source)], extra_cflags=["-O2"])
    return str(module.__file__)


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def device_time(call: Call, calls: int = 20) -> float:
    """Microseconds of a call on the device alone, by replays of a graph of calls."""
    for _ in range(6):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


@contextmanager
def spinning_python() -> Iterator[None]:
    """While this lasts, another thread wants the GIL."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Worker:
    """Answers the parent's requests in a process that belongs to one family of contenders."""

    def __init__(self, name: str, callers: str, calls: int, core: int) -> None:
        spec = importlib.util.spec_from_file_location("opgraft_launch_callers", callers)
        assert spec is not None and spec.loader is not None
        self._cpp = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._cpp)
        self.cases = {case.label: case for case in make_cases()}
        self.contender = CONTENDERS[name]()
        self._training: Training | None = None
        self._calls = calls
        if not GPU:
            torch.set_num_threads(1)
        if GPU:  # autograd's threads exist by now, and stay where they want
            os.sched_setaffinity(0, {core})

    def install(self) -> None:
        self.contender.install()

    def select(self, state: str) -> list[Cell]:
        """Go over to a state and warm it up; what there is to measure."""
        self.state = state
        self.contender.select(state)
        cells = []
        for case in self.cases.values():
            callers = self.contender.callers(case, state)
            try:
                problem = self._warm_up(case, state, callers)
            except Exception as error:
                problem = repr(error)
            if problem:
                print(f"left out: {case.label}, {state}: {problem}", flush=True)
                continue
            if callers and not isinstance(self.contender, Peers):
                cells.append(Cell(case.label, "C++"))
            cells += [Cell(case.label, caller) for caller in callers]
        synchronize()
        return cells

    def _warm_up(self, case: Case, state: str, callers: dict[str, Call]) -> str:
        for call in callers.values():
            for _ in range(6):
                call()
        if not callers or isinstance(self.contender, Peers):
            return ""
        for _ in range(6):
            self._cpp.burst(*case.cpp, 1)
        return self.contender.problem(case, state)

    def time(self, cell: Cell) -> float:
        """Host microseconds of a call."""
        case = self.cases[cell.case]
        # Another process had the core: this one's memory has to come back into the caches.
        if cell.caller == "C++":
            self._cpp.burst(*case.cpp, WARM_UP)
            synchronize()
            return float(self._cpp.burst(*case.cpp, self._calls))
        call = self.contender.callers(case, self.state)[cell.caller]
        for _ in range(WARM_UP):
            call()
        synchronize()
        repeats = itertools.repeat(None, self._calls)
        start = time.perf_counter()
        for _ in repeats:
            call()
        return (time.perf_counter() - start) * 1e6 / self._calls

    def time_beside_python(self, case: str) -> float:
        """Host microseconds of a call from C++ while another thread spins in Python."""
        synchronize()
        with spinning_python():
            return float(self._cpp.burst(*self.cases[case].cpp, self._calls))

    def over_a_miss(self, case: str) -> float:
        """Host microseconds that a call of a new kind takes more than a declined one, from C++.

        In turn, burst by burst: states that are measured seconds apart differ by as much.
        """
        call = self.cases[case].cpp
        added = []
        for _ in range(10):
            times = []
            for state in ("declined", "new key"):
                self.contender.select(state)
                self._cpp.burst(*call, 3)
                synchronize()
                times.append(float(self._cpp.burst(*call, self._calls)))
            added.append(times[1] - times[0])
        return statistics.median(added)

    def sweep(self, backward: bool, rows: int, hidden: int) -> tuple[float, float]:
        """Microseconds of a call of RMSNorm in a loop of calls, and of the device's time alone."""
        forward, backward_ = itertools.islice(norm_cases(rows, hidden), 2)
        case = backward_ if backward else forward
        for _ in range(6):
            self._cpp.burst(*case.cpp, 1)
        call = case.callers["op" if backward else "F"]
        times = []
        for _ in range(5):
            synchronize()
            start = time.perf_counter()
            self._cpp.burst(*case.cpp, self._calls)
            synchronize()
            times.append((time.perf_counter() - start) * 1e6 / self._calls)
        return statistics.median(times), device_time(call)

    def use_packs(self) -> None:
        """From now on the packs as they are shipped.

        What was imported and measured before is nothing that a program with packs would have, and
        is kept from Python's garbage collector, which would look through it.
        """
        import opgraft
        import opgraft_kernels

        for override in opgraft.overrides():
            override.remove()
        opgraft.enable()
        opgraft_kernels.register()
        self.freeze()

    def freeze(self) -> None:
        gc.collect()
        gc.freeze()

    def train_in_turn(self, steps: int, first: bool) -> tuple[float, float]:
        """As `train`, with the packs, and without, right after one another; `first`: with them."""
        import opgraft

        times = {}
        for on in (first, not first):
            with contextlib.nullcontext() if on else opgraft.disabled():
                times[on] = self.train(steps)
        return times[True], times[False]

    def train(self, steps: int) -> float:
        """Milliseconds of a step, the device's work included."""
        if self._training is None:
            self._training = Training()
            for _ in range(6):
                self._training.step()
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self._training.step()
        synchronize()
        return (time.perf_counter() - start) * 1e3 / steps

    def plans(self) -> list[str]:
        """What the overrides' plans are, for people."""
        import opgraft

        return [f"{o.name}: {o.hits} hits; {o.plans}" for o in opgraft.overrides()]


def serve(connection: Connection, *arguments: Any) -> None:
    warnings.simplefilter("ignore")  # torch's, about kernels that replace others: they are meant to
    try:
        worker = Worker(*arguments)
    except Exception as error:
        connection.send(error)
        raise
    connection.send(None)
    while (request := connection.recv()) is not None:
        method, *rest = request
        try:
            connection.send(getattr(worker, method)(*rest))
        except Exception as error:
            connection.send(error)


def last_core() -> int:
    """For all processes: one works at a time, and the system does more on one core than another."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


class Process:
    """A family's process, seen from the parent."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def wait(self) -> Any:
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, *request: Any) -> Any:
        self._connection.send(request)
        return self.wait()

    def end(self) -> None:
        self._connection.send(None)
        self._process.join()


# ----------------------------------------------------------------------------------- measuring


class Measured:
    """Samples by contender and what was measured, each with what it is compared to."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, Cell], list[tuple[float, float | None]]] = defaultdict(list)

    def add(self, contender: str, cell: Cell, sample: float, base: float | None = None) -> None:
        """`base`: what the sample is compared to; none where it is a difference itself."""
        self.samples[contender, cell].append((sample, base))

    def times(self, contender: str, cell: Cell) -> list[float]:
        return [sample for sample, _ in self.samples.get((contender, cell), [])]

    def ratio(self, contender: str, cell: Cell) -> float | None:
        """The median of the samples' ratios to what they are compared to."""
        samples = self.samples.get((contender, cell), [])
        ratios = [one / base for one, base in samples if base is not None]
        return statistics.median(ratios) if ratios else None

    def contenders(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.samples))

    def cells(self) -> list[Cell]:
        return list(dict.fromkeys(cell for _, cell in self.samples))


def measure(rounds: int, calls: int, steps: int) -> tuple[Measured, list[str]]:
    """All contenders in turn, round by round; and what the packs' plans were at the end."""
    callers = build_callers()
    core = last_core()
    processes = {name: Process(name, callers, calls, core) for name in CONTENDERS}
    measured = Measured()
    beside = [f"{case} {'x'.join(map(str, NORM_SIZES[0]))}" for case in ("rms_norm", "layer_norm")]
    for process in processes.values():
        process.wait()
    for process in processes.values():
        process.ask("install")
    native, grafted = processes["native"], processes["opgraft"]
    native.ask("select", "native")
    for _ in range(rounds):
        for name, process in processes.items():
            for state in CONTENDERS[name].states:
                cells = process.ask("select", state)
                pairs = 3 if state in ("native", "plan") else 1  # of which the goals are
                for cell, _ in itertools.product(cells, range(pairs)):
                    base = native.ask("time", cell)
                    measured.add(state, cell, process.ask("time", cell), base)
                if state == "new key":
                    for case in dict.fromkeys(cell.case for cell in cells):
                        sample = process.ask("over_a_miss", case)
                        measured.add(state, Cell(case, OVER_A_MISS), sample)
                for case in beside:
                    if name != "peers" and Cell(case, "C++") in cells:
                        base = native.ask("time_beside_python", case)
                        sample = process.ask("time_beside_python", case)
                        measured.add(state, Cell(case, "C++, beside Python"), sample, base)
    grafted.ask("use_packs")
    native.ask("freeze")
    cell = Cell("training step", "Python")
    for _ in range(rounds if steps else 0):
        stock = native.ask("train", steps) * 1e3
        measured.add("native", cell, stock, stock)
        for turn in range(TURNS):
            on, off = (each * 1e3 for each in grafted.ask("train_in_turn", steps, turn % 2 == 0))
            measured.add("packs off", cell, off, stock)
            measured.add("packs", cell, on, off)
    plans = grafted.ask("plans") if steps else []
    for process in processes.values():
        process.end()
    return measured, plans


def crossover(calls: int) -> list[dict[str, Any]]:
    """Native, a plan and the impl in Python over sizes of RMSNorm."""
    callers = build_callers()
    core = last_core()
    processes = {name: Process(name, callers, calls, core) for name in ("native", "opgraft")}
    for process in processes.values():
        process.wait()
        process.ask("install")
    contenders = {"native": ("native", "native"), "plan": ("opgraft", "plan")}
    contenders["python"] = ("opgraft", "python")
    sizes = [
        (backward, 2**log2 // hidden, hidden)
        for backward in (False, True)
        for hidden in (128, 1024, 4096, 16384, 65536)
        for log2 in range(12, 27, 2)
        if 2**log2 >= hidden
    ]
    found: dict[tuple[bool, int, int], dict[str, Any]] = {}
    for name, (process, state) in contenders.items():
        processes[process].ask("select", state)
        for size in sizes:
            end_to_end, device = processes[process].ask("sweep", *size)
            backward, rows, hidden = size
            record = found.setdefault(
                size,
                {
                    "direction": "backward" if backward else "forward",
                    "rows": rows,
                    "hidden": hidden,
                },
            )
            record[f"{name}_us"] = {"end_to_end": round(end_to_end, 2), "device": round(device, 2)}
    for process in processes.values():
        process.end()
    for record in found.values():
        print(
            f"{record['direction']:8} {record['rows']:8} x {record['hidden']:6} | us, device us"
            + "".join(
                f" | {name} {record[f'{name}_us']['end_to_end']:8.2f}"
                f" {record[f'{name}_us']['device']:8.2f}"
                for name in contenders
            )
        )
    return list(found.values())


# -------------------------------------------------------------------------------------- results


def table(measured: Measured) -> str:
    """Microseconds a call, and behind them the ratio to native."""
    names = measured.contenders()
    lines = [f"{'host us a call (over native)':44}" + "".join(f"{name:>15}" for name in names)]
    for cell in measured.cells():
        line = f"{cell.case + ', ' + cell.caller:44}"
        for name in names:
            times, ratio = measured.times(name, cell), measured.ratio(name, cell)
            text = f"{statistics.median(times):.2f}" if times else ""
            text += f" ({ratio:.2f})" if ratio is not None else ""
            line += f"{text:>15}"
        lines.append(line)
    return "\n".join(lines)


class Row(NamedTuple):
    """A goal of the project's, and whether it is reached."""

    what: str
    goal: str
    measured: str
    met: bool


def goals(measured: Measured) -> list[Row]:
    rows = []
    for cell in measured.cells():
        ratio = measured.ratio("plan", cell)
        # By autograd the engine's own 30 us are in both, as "allocates" shows.
        other = "beside" in cell.caller or cell.caller == "autograd"
        if ratio is None or other or not cell.case.startswith("rms_norm"):
            continue
        rows.append(
            Row(f"plan, {cell.case}, {cell.caller}", "<= 0.85", f"{ratio:.3f}", ratio <= 0.85)
        )
    sdpa = measured.ratio("plan", Cell("sdpa 1x8x128x64", "F"))
    if sdpa is not None:
        rows.append(Row("plan, sdpa 1x8x128x64, F", "<= 1", f"{sdpa:.3f}", sdpa <= 1))
    over = [cell for cell in measured.cells() if cell.caller == OVER_A_MISS]
    added = [statistics.median(measured.times("new key", cell)) for cell in over]
    if added:
        worst = max(added)
        rows.append(Row("new key over a miss, C++: us", "<= 0.8", f"{worst:.3f}", worst <= 0.8))
    training = measured.ratio("packs", Cell("training step", "Python"))
    if training is not None:
        rows.append(Row("training step with the packs", "< 1", f"{training:.3f}", training < 1))
    return rows


def records(measured: Measured) -> list[dict[str, Any]]:
    found = []
    for name, cell in measured.samples:
        samples = measured.times(name, cell)
        quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
        ratio = measured.ratio(name, cell)
        found.append(
            {
                "contender": name,
                **cell._asdict(),
                "us": round(statistics.median(samples), 3),
                "quartiles": [round(each, 3) for each in (quartiles[0], quartiles[2])],
                "ratio": None if ratio is None else round(ratio, 4),
            }
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="one short round, nothing is saved")
    parser.add_argument("--crossover", action="store_true", help="over sizes of RMSNorm")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args(arguments)
    if not GPU and options.crossover:
        raise SystemExit("--crossover needs a CUDA device")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # a kernel that replaces one is meant to
    if options.crossover:
        path = _common.save(
            "launch_crossover",
            torch.cuda.get_device_name(),
            crossover(CALLS),
            versions={"triton": importlib.metadata.version("triton")},
        )
        print("written to", path)
        return
    # Without a GPU a burst need not fit into a queue, and no pack runs in the training step.
    rounds, calls, steps = options.rounds, CALLS if GPU else 20 * CALLS, 3 if GPU else 0
    if options.smoke:
        rounds, calls, steps = 1, 3, 1
    measured, plans = measure(rounds, calls, steps)
    print(table(measured))
    print(*plans, sep="\n")
    rows = goals(measured)
    for row in rows:
        print(f"{row.what:44}{row.goal:>9}  {row.measured:>8}  {'met' if row.met else 'NOT MET'}")
    if not options.smoke:
        path = _common.save(
            "launch",
            torch.cuda.get_device_name() if GPU else _common.cpu_name(),
            records(measured),
            versions={"triton": importlib.metadata.version("triton")},
            goals=[row._asdict() for row in rows],
            plans=plans,
        )
        print("written to", path)


if __name__ == "__main__":
    main()
