"""What a chain of overrides makes of a call: who takes it, and who counts a miss.

The core tests a call once for all overrides, and counts once for all. So each override must see
what it would see alone: its condition, as Python evaluates it, decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import opgraft
from opgraft import when
from opgraft.core import loader
from opgraft.registry import Chain, registry
from opgraft.router.compiled import CompiledRouter
from tests import ops
from tests.test_when_properties import relaxed

RELATIONS: dict[str, Callable[[Any, int], when.Condition]] = {
    "<": lambda number, constant: number < constant,
    "<=": lambda number, constant: number <= constant,
    "==": lambda number, constant: number == constant,
    "!=": lambda number, constant: number != constant,
    ">=": lambda number, constant: number >= constant,
    ">": lambda number, constant: number > constant,
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
CONSTANTS = (*range(-1, 9), 62, 63, 64, 2**31, 2**63 - 1, -(2**63))


@st.composite
def simple_conditions(draw: st.DrawFn, argument: str) -> when.Condition:
    """A part of a condition, of the kind that most conditions are made of."""
    kind = draw(st.sampled_from(["dtype", "contiguous", "ndim", "numel", "size", "stride"]))
    if kind == "dtype":
        return when.dtype(argument, *draw(st.sets(st.sampled_from(DTYPES), min_size=1)))
    if kind == "contiguous":
        return when.is_contiguous(argument)
    if kind in ("size", "stride"):
        dim = draw(st.sampled_from([-3, -2, -1, 0, 1, 2, 2**33]))
        number = getattr(when, kind)(argument, dim)
    else:
        number = getattr(when, kind)(argument)
    relation = RELATIONS[draw(st.sampled_from(sorted(RELATIONS)))]
    return relation(number, draw(st.sampled_from(CONSTANTS)))


@st.composite
def conditions(draw: st.DrawFn) -> when.Condition:
    """Of `add.Tensor`: mostly of one tensor, as in practice, but of either."""
    main = draw(st.sampled_from(["self", "other"]))
    arguments = st.sampled_from([main, main, main, "self", "other"])
    parts = draw(st.lists(arguments.flatmap(simple_conditions), min_size=1, max_size=4))
    if draw(st.booleans()):
        parts.append(when.value("alpha") == draw(st.sampled_from([1, 2])))
    return reduce(lambda left, right: left & right, parts)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    sizes = draw(st.lists(st.sampled_from([1, 4]), max_size=3))
    made = torch.ones(sizes, dtype=draw(st.sampled_from(DTYPES)))
    return made.mT if len(sizes) > 1 and draw(st.booleans()) else made


def _register(index: int, cond: when.Condition | None) -> opgraft.Override:
    def add(self: torch.Tensor, other: torch.Tensor, *, alpha: int = 1) -> torch.Tensor:
        return opgraft.native("aten::add.Tensor")(self, other, alpha=alpha)

    return opgraft.register_op_override(
        *("aten", "add.Tensor", "CPU", add),
        cond=cond,
        unconditional_override=cond is None,
        name=f"number {index}",
        priority=-index,
    )


@relaxed
@given(
    st.lists(conditions(), min_size=1, max_size=5),
    st.lists(st.tuples(tensors(), tensors(), st.sampled_from([1, 2])), min_size=1, max_size=6),
)
def test_each_override_of_a_chain_sees_what_it_would_see_alone(
    conds: list[when.Condition], calls: list[tuple[torch.Tensor, torch.Tensor, int]]
) -> None:
    overrides = [_register(index, cond) for index, cond in enumerate(conds)]
    expected = [[0, 0] for _ in overrides]
    for one, other, alpha in calls:
        torch.add(one, other, alpha=alpha)
        for cond, counts in zip(conds, expected, strict=True):
            holds = cond.holds({"self": one, "other": other, "alpha": alpha})
            counts[0 if holds else 1] += 1
            if holds:
                break
    assert [[each.hits, each.misses] for each in overrides] == expected, conds
    for override in overrides:
        override.remove()


WIDE = when.size("self", -1) == 1000


def test_misses_outlive_the_chain_that_counted_them() -> None:
    override = _register(0, WIDE)
    x = torch.ones(4)
    for more in range(1, 4):
        x + x
        other = _register(more, WIDE)
        x + x
        assert (override.misses, other.misses) == (2 * more, 1)
        other.remove()
        assert (override.misses, other.misses) == (2 * more, 1)


@pytest.mark.parametrize("cond", [WIDE, None], ids=["declines", "takes"])
def test_an_override_behind_counts_what_the_one_in_front_declined(
    cond: when.Condition | None,
) -> None:
    front, behind = _register(0, WIDE), _register(1, cond)
    torch.ones(4) + 1.0
    torch.ones(1000) + 1.0
    assert (front.hits, front.misses) == (1, 1)
    assert behind.hits + behind.misses == 1


def test_an_override_that_is_off_counts_nothing() -> None:
    off, on = _register(0, WIDE), _register(1, WIDE)
    with opgraft.disabled(name="number 0"):
        torch.ones(4) + 1.0
    opgraft.disable(name="number 1")
    torch.ones(4) + 1.0
    assert (off.misses, on.misses) == (1, 1)


def test_no_miss_is_lost_or_counted_twice_while_chains_are_replaced() -> None:
    override = _register(0, WIDE)
    x, calls, threads = torch.ones(4), 2000, 4
    seen: list[int] = []

    def call() -> None:
        for _ in range(calls):
            x + x

    running = [threading.Thread(target=call) for _ in range(threads)]
    for thread in running:
        thread.start()
    while any(thread.is_alive() for thread in running):
        _register(1, WIDE).remove()
        seen.append(override.misses)
    assert seen == sorted(seen)
    assert override.misses == calls * threads


def test_a_long_chain_compares_no_two_of_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registration that looks for each in a tuple makes the whole chain take cubic time."""
    compared: list[object] = []

    def is_equal(self: opgraft.Override, other: object) -> bool:
        compared.append(other)
        return self is other

    monkeypatch.setattr(opgraft.Override, "__eq__", is_equal)
    overrides = [_register(index, when.size("self", -1) == index) for index in range(20)]
    opgraft.disable(name="number 3")
    torch.ones(19) + 1.0
    assert [each.hits for each in overrides] == [0] * 19 + [1]
    for override in overrides:
        override.remove()
    assert not compared


class Refusing:
    """A listener that raises for the chains that hold an override, or only one."""

    def __init__(self) -> None:
        self.refused: str | None = None
        self.published: list[list[str]] = []

    def __call__(self, chain: Chain) -> None:
        names = [override.name for override in chain.members]
        if self.refused in names or (self.refused == "fewer" and len(names) == 1):
            raise RuntimeError("this chain cannot be published")
        self.published.append(names)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    refusing = Refusing()
    monkeypatch.setattr(registry, "_listeners", (*registry._listeners, refusing))
    return refusing


def hits_of(*overrides: opgraft.Override) -> list[int]:
    """How often each is hit by one call."""
    before = [override.hits for override in overrides]
    torch.ones(4) + 1.0
    return [override.hits - count for override, count in zip(overrides, before, strict=True)]


def test_an_override_that_a_listener_refuses_leaves_its_chain_as_it_was(
    listener: Refusing,
) -> None:
    old = _register(1, None)
    listener.refused = "number 0"
    with pytest.raises(RuntimeError, match="cannot be published"):
        _register(0, None)
    assert opgraft.overrides(op="aten::add.Tensor") == [old]
    assert hits_of(old) == [1]
    assert listener.published[-1] == ["number 1"]
    behind = _register(2, None)  # nothing of it is left in the way
    assert hits_of(old, behind) == [1, 0]


def test_an_override_that_would_be_replaced_by_a_refused_one_stays(listener: Refusing) -> None:
    old = _register(1, None)
    listener.refused = "number 1"
    with pytest.raises(RuntimeError, match="cannot be published"):
        _register(1, WIDE)
    listener.refused = None
    assert old.enabled
    assert opgraft.overrides(op="aten::add.Tensor") == [old]
    assert hits_of(old) == [1]


def test_an_override_that_cannot_be_removed_stays(listener: Refusing) -> None:
    first, second = _register(0, None), _register(1, None)
    listener.refused = "fewer"
    with pytest.raises(RuntimeError, match="cannot be published"):
        first.remove()
    assert first.enabled
    assert hits_of(first, second) == [1, 0]
    listener.refused = None
    first.remove()
    assert hits_of(first, second) == [0, 1]


@pytest.mark.skipif(loader.in_use() is None, reason="the router in Python compiles nothing")
def test_an_override_that_the_core_refuses_leaves_its_chain_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = _register(1, None)

    def refuse(*args: object) -> None:
        raise RuntimeError("the core cannot compile it")

    with monkeypatch.context() as patched:
        patched.setattr(CompiledRouter, "_compile", refuse)
        with pytest.raises(RuntimeError, match="cannot compile"):
            _register(0, None)
    assert opgraft.overrides(op="aten::add.Tensor") == [old]
    behind = _register(2, None)
    assert hits_of(old, behind) == [1, 0]


def test_a_rule_reaches_the_other_chains_where_one_cannot_be_published(
    listener: Refusing,
) -> None:
    _register(0, None)
    other = opgraft.register_op_override(
        "aten", "_softmax", "CPU", ops.softmax, unconditional_override=True, name="other"
    )
    listener.refused = "number 0"
    listener.published.clear()
    with pytest.raises(RuntimeError, match="cannot be published"):
        opgraft.disable(dispatch_key="CPU")
    torch.softmax(torch.ones(2, 3), -1)
    assert other.hits == 0
    assert ["other"] in listener.published
    listener.refused = None
