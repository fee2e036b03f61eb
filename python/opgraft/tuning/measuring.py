"""Measures calls: natively, by an override from Python, and by the override's launch plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from opgraft.base.rounds import median_and_interval
from opgraft.crossover import rule
from opgraft.crossover.tables import Cell
from opgraft.ops.schema import Call
from opgraft.ready.readiness import when_not_ready
from opgraft.registry import Override, Selector, registry
from opgraft.router import threads
from opgraft.tuning import stand_ins
from opgraft.tuning.timing import Turns, Way

#: Rounds of a cell: so many at the least, and until the answer is clear, or so many at the most.
MIN_ROUNDS, MAX_ROUNDS = 5, 25
#: The calls of a turn touch so many bytes together, if that takes no more than so many calls: more
#: than a device's cache holds, which a model's next call does not find full of its arguments.
_COLD_BYTES, _MOST_CALLS = 2**27, 16
#: After so many calls of a kind its launch plan is replayed.
_UNTIL_PLANNED = 4
#: From so many times as fast or as slow on, beside what the control says, two rounds are clear.
_FAR = 2.0
#: Before `MIN_ROUNDS`, how far from the border all rounds have to be, beside what the control says.
_FEW, _FEW_MARGIN = 3, 0.12
#: Where a launch plan is what decides, the way from Python is measured so often, by short bursts:
#: it runs the same kernels, and its time on the host is far from native's or does not matter.
_PYTHON_ROUNDS, _PYTHON_CALLS = 3, 16
#: What stands in for an override measures so many kinds of calls at the most, and another one does
#: the next: each records two launch plans or more of a kind, and recordings are limited.
_KINDS_OF_A_TWIN = 100
#: The gain from which on an override is taken.
_BORDER = 1 + rule.MARGIN
#: By how much native's time may differ from native's, where a cell is near the border.
_CONTROL = 0.025


class Skip(Exception):
    """Calls that cannot be measured, with the reason."""


class _Twins:
    """What is measured in place of overrides: the same without their crossovers.

    Args:
        override: what is measured.
        behind: the overrides behind it in the chain, which get its calls without it.

    Attributes:
        own: the override's own, `"python"`, and `"plan"` if it has launch plans.
        others: of those behind it.
    """

    own: Mapping[str, Override]
    others: Mapping[str, Override]
    _scopes: ExitStack

    def __init__(self, override: Override, behind: Sequence[Override]) -> None:
        self._override = override
        self._behind = behind
        self._kinds = 0
        self._register()

    def _register(self) -> None:
        ways = ["python", "plan"] if self._override.launch_plan else ["python"]
        with ExitStack() as scopes:  # where one cannot be registered, none is left
            enter = scopes.enter_context
            self.own = {way: enter(_twin(self._override, way)) for way in ways}
            # By their places: an override may have any name, that of a way of this one's, too.
            self.others = {
                f"behind {number}": enter(_twin(each, _best_way(each)))
                for number, each in enumerate(self._behind, 1)
            }
            self._scopes = scopes.pop_all()

    def begin_kind(self) -> None:
        """Get ready for calls of another kind."""
        self._kinds += 1
        if self._kinds > _KINDS_OF_A_TWIN:
            self.remove()
            self._register()
            self._kinds = 1

    def remove(self) -> None:
        self._scopes.close()


@contextmanager
def measuring(override: Override, device: torch.device) -> Iterator[Measuring]:
    """A scope in which calls of an override's op can be measured.

    Args:
        override: whatever its condition and tables say of their speed.
        device: where the calls' tensors are.
    """
    behind = [
        each
        for each in registry.overrides(_same_op(override))
        if each.order > override.order and each.why_off() is None and each.derivative is None
    ]
    with when_not_ready("wait"):  # native's time would count as theirs
        twins = _Twins(override, behind)
        try:
            yield Measuring(override, behind, twins, device)
        finally:
            twins.remove()


def _same_op(override: Override) -> Selector:
    return Selector(op=override.op, dispatch_key=override.dispatch_key)


def _best_way(override: Override) -> str:
    return "plan" if override.launch_plan else "python"


@contextmanager
def _twin(override: Override, way: str, **declared: Any) -> Iterator[Override]:
    twin = stand_ins.register(
        override,
        override.impl,
        f"tuned, {way}",
        cond=override.cond,
        unconditional_override=override.cond is None,
        dsl=override.dsl,
        launch_plan=override.launch_plan and way != "python",
        on_error="raise",
        **declared,
    )
    # What native returns is not of interest, and where native is slow it would take the time.
    twin.state.is_unchecked = True
    try:
        yield twin
    finally:
        twin.remove()


class Measuring:
    """What :func:`measuring` yields."""

    def __init__(
        self,
        override: Override,
        behind: Sequence[Override],
        twins: _Twins,
        device: torch.device,
    ) -> None:
        self._override = override
        self._behind = tuple(behind)
        self._twins = twins
        self._device = device

    def taking(self, call: Call) -> list[Override]:
        """The overrides that are measured and right for a call."""
        return [each for each in (self._override, *self._behind) if each.cond_holds(call)]

    def cell(self, calls: Sequence[Call]) -> Cell:
        """Measure calls of one kind.

        Args:
            calls: as `cold_calls` makes them.

        Raises:
            Skip: the override does not run.
        """
        turns, without, way = self.turns(calls)
        native, native_host = turns.median(without)
        device, _ = turns.median(way)
        plan_host = turns.median("plan")[1] if way == "plan" else None
        return Cell(native, device, native_host, plan_host, turns.median("python")[1], None, None)

    def turns(self, calls: Sequence[Call]) -> tuple[Turns, str, str]:
        """Measure calls of one kind, a turn of each way in each round.

        Returns:
            The turns, "native" and "native again" among them; the name of the way that answers
            without the override, native or an override behind it; and that of the override's own.

        Raises:
            Skip: the override does not run.
        """
        self._twins.begin_kind()
        functions = [partial(call.op.overload, *call.args, **call.kwargs) for call in calls]
        ways = {
            name: Way(_natively, functions, warm_ups)
            for name, warm_ups in {"native": 1, "native again": 0}.items()
        }
        twins = {**self._twins.own, **self._twins.others}
        ways |= {
            name: Way(partial(_alone, twin), functions, _UNTIL_PLANNED)
            for name, twin in twins.items()
        }
        best = _best_way(self._override)
        if best == "plan":
            ways["python"] = ways["python"]._replace(
                warm_ups=1, rounds=_PYTHON_ROUNDS, most_calls=_PYTHON_CALLS
            )
        hits = {name: twin.hits for name, twin in twins.items()}
        turns = Turns(ways, self._device)
        declining = {name for name, twin in twins.items() if twin.hits == hits[name]}
        if found := sorted(declining & self._twins.own.keys()):
            raise Skip(f"the override does not run ({', '.join(found)})")
        for name in declining:
            turns.drop(name)
        others = [name for name in self._twins.others if name not in declining]
        while True:
            turns.round()
            without = min(["native", *others], key=lambda name: max(turns.median(name)))
            if turns.rounds == MAX_ROUNDS or _is_clear(turns, without, best):
                return turns, without, best

    def graph(self, calls: Sequence[Call]) -> tuple[float, float]:
        """Measure calls in compiled graphs, beside an addition to the first tensor of numbers.

        What Inductor's own code takes depends on what it fuses with, so an op alone says little.

        Args:
            calls: as `cold_calls` makes them.

        Returns:
            Microseconds of a call on the device: of Inductor's code, and of a graph with the
            opaque op.

        Raises:
            Skip: no argument is such a tensor, or the graph does not call the override.
        """
        if _first_tensor(calls[0]) is None:
            raise Skip("no argument is a floating-point tensor, to add something to in a graph")
        # The first in the chain: the compiler asks it what becomes of a call, whatever scope the
        # compilation is in.
        with _twin(self._override, "graph", priority=stand_ins.FIRST) as twin:
            ways = {
                policy: Way(partial(_in_graphs, twin, policy), _compiled(calls), _UNTIL_PLANNED)
                for policy in ("inductor", "opaque")
            }
            turns = Turns(ways, self._device)
            if not twin.hits:
                raise Skip("the compiled graph does not call the override")
            for _ in range(MAX_ROUNDS):
                turns.round()
                ratios = turns.ratios_on_device("inductor", "opaque")
                if turns.rounds >= MIN_ROUNDS and _is_decided(ratios):
                    break
        return turns.median("inductor")[0], turns.median("opaque")[0]


def _first_tensor(call: Call) -> int | None:
    """The position of the first floating-point tensor among a call's arguments."""
    for position, value in enumerate(call.args):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return position
    return None


def _compiled(calls: Sequence[Call]) -> list[Callable[[], object]]:
    """The calls compiled with Inductor, which happens when the first one is made."""
    position, overload = _first_tensor(calls[0]), calls[0].op.overload
    assert position is not None
    # Graphs of other calls are compiled of the same code, of which Dynamo keeps a few alone.
    torch._dynamo.reset()

    def beside_an_addition(
        other: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        added = args[position] + other
        return overload(*args[:position], added, *args[position + 1 :], **kwargs)

    # A backend of its own keeps what it compiles apart from other functions of the same code.
    from torch._inductor.compile_fx import compile_fx

    compiled = torch.compile(
        beside_an_addition, backend=partial(compile_fx), fullgraph=True, dynamic=False
    )
    return [
        partial(compiled, torch.ones_like(call.args[position]), call.args, dict(call.kwargs))
        for call in calls
    ]


def cold_calls(make: Callable[[], Call]) -> list[Call]:
    """Calls with enough arguments that a device's cache does not hold those of all."""
    calls: list[Call] = []
    taken = 0
    while len(calls) < _MOST_CALLS and (not calls or taken < _COLD_BYTES):
        calls.append(make())
        taken += sum(tensor.nbytes for tensor in calls[-1].tensors())
    return calls


def _is_clear(turns: Turns, without: str, way: str) -> bool:
    """Whether more rounds would not change the decision, and native is as fast as native."""
    ratios = turns.gains(without, way)
    control = turns.ratios("native", "native again")
    # Who is interrupted in two rounds may seem far slower. Then so does native beside native.
    apart = max(max(each, 1 / each) for each in control)
    if len(ratios) >= 2 and (min(ratios) > _FAR * apart or max(ratios) < 1 / (_FAR * apart)):
        return True
    if _FEW <= len(ratios) < MIN_ROUNDS:
        apart += _FEW_MARGIN
        return min(ratios) > _BORDER * apart or max(ratios) < _BORDER / apart
    if len(ratios) < MIN_ROUNDS:
        return False
    of_control, _, _ = median_and_interval(control)
    return abs(of_control - 1) < _CONTROL and _is_decided(ratios)


def _is_decided(ratios: Sequence[float]) -> bool:
    _, low, high = median_and_interval(ratios)
    return high < _BORDER or low > _BORDER


@contextmanager
def _natively() -> Iterator[None]:
    with torch.no_grad(), threads.scope(threads.EVERYTHING):
        yield


@contextmanager
def _alone(twin: Override) -> Iterator[None]:
    """Only the twin of its op's overrides. Scopes for those of other ops would slow its calls."""
    with ExitStack() as scopes:
        scopes.enter_context(torch.no_grad())
        for each in registry.overrides(_same_op(twin)):
            if each is not twin:
                scopes.enter_context(threads.scope(Selector(**each.identity)))
        yield


@contextmanager
def _in_graphs(twin: Override, policy: str) -> Iterator[None]:
    """Compilations leave the twin's calls to Inductor, or make them opaque."""
    before = twin.declaration
    twin.declaration = before.replaced(compile=policy)
    try:
        with _alone(twin):
            yield
    finally:
        twin.declaration = before
