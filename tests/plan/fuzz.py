"""Random impls, called in random ways: with launch plans they give what they give without.

    python -m tests.plan.fuzz --programs 5000

A program is an impl made of random steps (views, allocations, launches, other ops, values read
back) and calls of it that a plan's key may or may not tell apart: other values, storages that are
shared in other ways, overlaps, offsets, autocast, grad mode. All calls are made once by an override
without plans and once by one with them.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

import opgraft
from opgraft.core import loader
from opgraft.ready.dry import default_dtype
from opgraft.registry import state
from opgraft.router import compiled, contract
from tests import probes

#: Calls in the order of which keys are seen, recorded, tried out and replayed.
CALLS = 18


class Step(NamedTuple):
    """Something that an impl does with tensors that it has."""

    kind: str
    a: int
    b: int
    number: float


class Way(NamedTuple):
    """How a call is made: what may be the same for two calls, and what a key may not know of."""

    layout: str
    offsets: tuple[int, ...]
    state: str
    number: float


class Program(NamedTuple):
    op: str
    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    ways: tuple[Way, ...]
    calls: tuple[tuple[int, int], ...]  # a way, and the seed of the values


# ------------------------------------------------------------------ steps

Pool = list[torch.Tensor]
StepFunction = Callable[[Pool, torch.Tensor, torch.Tensor, Step], Any]


def _row(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1)


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    if x.dtype != torch.float32 or not x.is_contiguous():
        x = x.float().contiguous()
    y = torch.empty(x.shape, dtype=torch.float32)
    probes.scale(x, y, factor)
    return y


def _by_address(x: torch.Tensor, factor: float) -> torch.Tensor:
    if x.dtype != torch.float32 or not x.is_contiguous():
        return x
    core = loader.in_use()
    assert core is not None
    y = torch.empty(x.shape, dtype=torch.float32)
    probes.launch(probes.load().scale_kernel, x.data_ptr(), y, x.numel(), factor)
    return y


def _equally_long(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = min(a.numel(), b.numel())
    return _row(a)[:size], _row(b)[:size]


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    left, right = _equally_long(a.float(), b.float())
    return left[:, None] @ right[None, :4]


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as other numbers: which dtype it had shows."""
    x = _row(x).contiguous()
    return x[: x.numel() // 2 * 2].view(torch.int16).float()


def _inside(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((max(1, x.shape[0] // 2),), (x.stride(0),)) if x.dim() else x


def _at_offset(x: torch.Tensor, offset: int) -> torch.Tensor:
    return x.as_strided((2,), (1,), offset) if x.untyped_storage().nbytes() >= 64 else x


def _changed(x: torch.Tensor, by: torch.Tensor, number: float) -> torch.Tensor:
    x = x.clone()
    left, right = _equally_long(x, by)
    left.add_(right.to(x.dtype)).mul_(number)
    return x


def _if(x: torch.Tensor, holds: bool) -> torch.Tensor:
    return _scaled(x, 2.0) if holds else _scaled(x, 3.0)


PLAIN: dict[str, StepFunction] = {
    "scale": lambda p, a, b, s: _scaled(a, s.number),
    "row": lambda p, a, b, s: _row(a),
    "narrow": lambda p, a, b, s: _row(a)[s.b % max(1, a.numel()) :],
    "half": lambda p, a, b, s: _row(a).chunk(2)[s.b % 2 if a.numel() > 1 else 0],
    "transpose": lambda p, a, b, s: a.t() if a.dim() == 2 else a,
    "expand": lambda p, a, b, s: _row(a)[None].expand(2, -1),
    "broadcast": lambda p, a, b, s: torch.broadcast_tensors(*_equally_long(a, b))[s.b % 2],
    "meshgrid": lambda p, a, b, s: torch.meshgrid(_row(a)[:4], _row(b)[:3], indexing="ij")[s.b % 2],
    "data": lambda p, a, b, s: a.data,
    "detach": lambda p, a, b, s: a.detach(),
    "inside": lambda p, a, b, s: _inside(a),
    "unbind": lambda p, a, b, s: a.unbind()[s.b % len(a)] if a.dim() and len(a) else a,
    "reinterpret": lambda p, a, b, s: _bits(a),
    "like": lambda p, a, b, s: _row(a)[:1].expand_as(_row(b)),
    "add": lambda p, a, b, s: torch.add(*_equally_long(a, b)),
    "times": lambda p, a, b, s: a * s.number,
    "clone": lambda p, a, b, s: a.clone(),
    "zeros": lambda p, a, b, s: torch.zeros(a.shape).add_(1.0),
    "ones": lambda p, a, b, s: torch.ones(3),
    "sum": lambda p, a, b, s: a.sum(-1) if a.dim() else a,
    "cat": lambda p, a, b, s: torch.cat([_row(a).float(), _row(b).float()]),
    "mm": lambda p, a, b, s: _mm(a, b),
    "change": lambda p, a, b, s: _changed(a, b, s.number),
    "double": lambda p, a, b, s: a.double(),
    "where": lambda p, a, b, s: torch.where(_row(a) > s.number, _row(a), 0.0),
}
#: What plans must not take as it is.
READS: dict[str, StepFunction] = {
    "item": lambda p, a, b, s: _scaled(b, _row(a)[0].item()),
    "number": lambda p, a, b, s: _scaled(b, float(a)) if a.dim() == 0 else a,
    "sign": lambda p, a, b, s: _if(b, float(a) > 0) if a.dim() == 0 else a,
    "tolist": lambda p, a, b, s: _scaled(b, float(_row(a)[:1].tolist()[0])),
    "numpy": lambda p, a, b, s: _scaled(b, float(_row(a.detach()).numpy()[0])),
    "bool": lambda p, a, b, s: _if(b, bool(_row(a)[0] > 0)),
    "split": lambda p, a, b, s: _row(b).tensor_split(_row(a)[:1].abs().long() % 3)[0],
    "address": lambda p, a, b, s: _by_address(a, s.number),
    "beyond": lambda p, a, b, s: _at_offset(a, s.b % 4),
}


def impl_of(program: Program) -> Callable[..., torch.Tensor]:
    """The impl, in Python."""
    steps = {**PLAIN, **READS}

    def body(tensors: Pool, shape: torch.Size, target: torch.Tensor | None) -> torch.Tensor:
        pool = list(tensors)
        for step in program.steps:
            a, b = pool[step.a % len(pool)], pool[step.b % len(pool)]
            pool.append(steps[step.kind](pool, a, b, step))
        result = torch.empty(shape, dtype=torch.float32)
        row = result.zero_().view(-1)
        for x in pool[-4:]:
            values = _row(x)[: row.numel()]
            row[: values.numel()].add_(values.float())
        if target is None:
            return result
        probes.scale(result, target, 1.0)
        if program.steps[0].number > 0:
            target.mul_(0.5)
        return target

    def mul(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return body([self, other], self.shape, None)

    def mul_out(self: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return body([self, other, out], self.shape, out)

    def mul_(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return body([self, other], self.shape, self)

    def addcmul(
        self: torch.Tensor, tensor1: torch.Tensor, tensor2: torch.Tensor, *, value: float
    ) -> torch.Tensor:
        return body([self, tensor1, tensor2], self.shape, None)

    def cat(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
        rows = sum(len(each) for each in tensors)
        return body(tensors, torch.Size((rows, *tensors[0].shape[1:])), None)

    return {
        "mul.Tensor": mul, "mul.out": mul_out, "mul_.Tensor": mul_, "addcmul": addcmul, "cat": cat
    }[program.op]  # fmt: skip


#: How many tensors an op gets; whether a number may be the second.
OPS = {"mul.Tensor": 2, "mul.out": 3, "mul_.Tensor": 2, "addcmul": 3, "cat": 3}
WITH_NUMBERS = ("mul.Tensor", "mul.out", "mul_.Tensor")


# ------------------------------------------------------------------ programs

LAYOUTS = ("apart", "apart", "shared", "shared", "one", "same", "number", "numpy")
STATES = (
    *("plain", "plain", "plain", "bfloat16", "float16", "no_grad", "inference", "float64"),
    "requires_grad",
)


def program_of(seed: int) -> Program:
    """A program by its number."""
    rng = random.Random(seed)
    op = rng.choice(list(OPS))
    kinds = list(PLAIN)
    if rng.random() < 0.5:
        kinds += 2 * list(READS)
    steps = tuple(
        Step(rng.choice(kinds), rng.randrange(8), rng.randrange(8), rng.choice((0.5, -2.0, 3.0)))
        for _ in range(rng.randint(1, 6))
    )
    ways = tuple(_way(rng, op) for _ in range(rng.randint(2, 3)))
    calls = [(rng.randrange(len(ways)), rng.randrange(10**6)) for _ in range(CALLS)]
    return Program(op, rng.choice(((8,), (4, 4), (2, 6), (12,))), steps, ways, tuple(calls))


def _way(rng: random.Random, op: str) -> Way:
    layout = rng.choice(LAYOUTS)
    if layout == "number" and op not in WITH_NUMBERS:
        layout = "shared"
    # In units of 16 bytes, so that keys do not differ by alignment alone; now and then they may.
    unit = 4 if rng.random() < 0.9 else 1
    offsets = tuple(rng.randrange(6) * unit for _ in range(OPS[op]))
    return Way(layout, offsets, rng.choice(STATES), rng.choice((2.0, 3.0, -1.0)))


def _arguments(program: Program, way: Way, seed: int) -> tuple[Pool, Pool]:
    """The tensors of a call, and the buffers that they are views of."""
    generator = torch.Generator().manual_seed(seed)
    size = 1
    for each in program.shape:
        size *= each

    def buffer() -> torch.Tensor:
        # No number of it may be 0 times another.
        return torch.rand(96, generator=generator).add_(0.25) * random.Random(seed).choice((1, -1))

    def view(base: torch.Tensor, offset: int) -> torch.Tensor:
        return base[offset : offset + size].view(program.shape)

    count = OPS[program.op]
    if way.layout == "shared":
        bases = [buffer()]
        tensors = [view(bases[0], offset) for offset in way.offsets]
    elif way.layout == "numpy":  # one memory, and storages of their own
        bases = [buffer()]
        whole = bases[0].numpy()
        tensors = [view(torch.from_numpy(whole), offset) for offset in way.offsets]
    elif way.layout == "one":
        bases = [buffer() for _ in range(count)]
        tensors = [view(base, way.offsets[0]) for base in bases]
        tensors[0] = view(bases[-1], way.offsets[-1])
    else:
        bases = [buffer() for _ in range(count)]
        tensors = [view(*each) for each in zip(bases, way.offsets, strict=True)]
    if way.layout == "same":
        tensors[1] = tensors[0]
    if way.layout == "number":
        tensors[1] = torch.tensor(way.number)
    if way.state == "requires_grad" and program.op not in ("mul.out", "mul_.Tensor"):
        tensors = [each.detach().requires_grad_() for each in tensors]
        if way.layout == "same":
            tensors[1] = tensors[0]
    return tensors, bases


def _state(name: str) -> contextlib.AbstractContextManager[Any]:
    if name in ("bfloat16", "float16"):
        return torch.autocast("cpu", dtype=getattr(torch, name))
    if name == "float64":
        return default_dtype(torch.float64)
    states: dict[str, Callable[[], Any]] = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }
    return states.get(name, contextlib.nullcontext)()


def _call(program: Program, tensors: Pool) -> torch.Tensor:
    aten = torch.ops.aten
    if program.op == "cat":
        return aten.cat.default(tensors, 0)
    if program.op == "mul.out":
        return aten.mul.out(tensors[0], tensors[1], out=tensors[2])
    name, _, overload = program.op.partition(".")
    return getattr(getattr(aten, name), overload or "default")(*tensors)


# ------------------------------------------------------------------ running them


class Run(NamedTuple):
    outcomes: list[Any]
    replays: int
    hits: int
    refusals: tuple[str, ...]


def _unchecked() -> Any:
    """Hits are not compared with native: most impls are not the ops that they stand in for."""
    return mock.patch.object(contract, "begin", lambda *_: None)


@contextlib.contextmanager
def _all_checked() -> Iterator[None]:
    """Every hit is compared with native, not only the first ones of each kind of call."""
    with (
        mock.patch.object(state, "CHECKED_HITS", 2**31),  # asked by Python
        mock.patch.object(compiled, "CHECKED_HITS", 2**31),  # told to the core
    ):
        yield


def keeps_the_contract(program: Program) -> bool:
    """Whether all calls of a program return, values aside, what native does.

    Then nothing changes where some are compared: with plans, more of them are.
    """
    with _all_checked():
        outcomes = execute(program, planned=False).outcomes
    return not any(isinstance(outcome, str) for outcome in outcomes)


def execute(program: Program, *, planned: bool) -> Run:
    """Every call's result and what it left in its arguments' memory; or its error."""
    override = opgraft.register_op_override(
        "aten",
        program.op,
        "CPU",
        impl_of(program),
        unconditional_override=True,
        launch_plan=planned,
        on_error="raise",
    )
    outcomes: list[Any] = []
    try:
        for way_index, seed in program.calls:
            way = program.ways[way_index]
            with opgraft.disabled():
                tensors, bases = _arguments(program, way, seed)
            try:
                with _state(way.state):
                    result = _call(program, tensors)
            except Exception as error:
                outcomes.append(type(error).__name__)
                continue
            same = [result is each for each in tensors]
            outcomes.append((result.detach().clone(), same, [base.clone() for base in bases]))
        if not planned:
            return Run(outcomes, 0, override.hits, ())
        refusals = tuple(override.plans.refusals.values())
        return Run(outcomes, override.plans.hits, override.hits, refusals)
    finally:
        override.remove()


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return bool(isinstance(one, str) and isinstance(other, str) and one == other)
    (a, same, bases), (b, same_too, bases_too) = one, other
    pairs = [(a, b), *zip(bases, bases_too, strict=True)]
    return same == same_too and all(
        x.dtype == y.dtype
        and x.stride() == y.stride()
        and torch.allclose(x, y, rtol=1e-5, atol=1e-5, equal_nan=True)
        for x, y in pairs
    )


class Verdict(NamedTuple):
    difference: str
    replays: int
    refusals: tuple[str, ...]
    checked: bool  # the contract check was on


def check(seed: int) -> Verdict:
    """How a program differs with plans from what it gives without; empty where it does not."""
    program = program_of(seed)
    keeps = keeps_the_contract(program)
    with contextlib.nullcontext() if keeps else _unchecked():
        expected, got = (execute(program, planned=planned) for planned in (False, True))
    difference = ""
    for index, (one, other) in enumerate(zip(expected.outcomes, got.outcomes, strict=True)):
        if not _agree(one, other):
            way, values = program.calls[index]
            difference = (
                f"seed {seed}: call {index}, {program.ways[way]}, values {values}: {program}"
            )
            break
    if not difference and expected.hits != got.hits:
        difference = f"seed {seed}: {got.hits} hits, {expected.hits} without plans: {program}"
    return Verdict(difference, got.replays, got.refusals, checked=keeps)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.plan.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, help="of the first program; random if not given")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    first = random.randrange(10**9) if options.seed is None else options.seed
    start = time.perf_counter()
    replayed = checked = differences = 0
    for seed in range(first, first + options.programs):
        verdict = check(seed)
        replayed += verdict.replays > 0
        checked += verdict.checked
        if verdict.difference:
            differences += 1
            print(verdict.difference, flush=True)
    seconds = time.perf_counter() - start
    print(
        f"{options.programs} programs from {first}, {replayed} with replays, "
        f"{checked} with the contract check, "
        f"{differences} differences, {seconds:.0f} s"
    )
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
