"""What a condition can come to for symbolic sizes: always what it comes to for the real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from opgraft import when
from opgraft.when import symbolic
from opgraft.when.nodes import Undefined
from tests.test_when_properties import ANY, Arguments, Tree, build, calls, conditions, relaxed


def value(condition: Any, arguments: Arguments) -> bool | None:
    result = condition.evaluate(arguments)
    return None if isinstance(result, Undefined) else bool(result)


def known_at_run_time_only(tree: Tree) -> bool:
    return str(tree).find("'aligned'") >= 0 or str(tree).find("'requires_grad'") >= 0


def symbolised(arguments: Arguments) -> tuple[Arguments, ShapeEnv]:
    """The same arguments as fake tensors, every size above one a symbol."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)

    def fake(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return mode.from_tensor(value)
        return [fake(item) for item in value] if isinstance(value, list) else value

    return {name: fake(value) for name, value in arguments.items()}, env


@settings(relaxed, max_examples=150)
@given(conditions(ANY), calls())
def test_without_symbols_it_is_the_condition_s_value(tree: Tree, arguments: Arguments) -> None:
    condition = build(tree)
    outcomes = symbolic.outcomes(condition, arguments)
    if known_at_run_time_only(tree):
        assert value(condition, arguments) in outcomes
    else:
        assert outcomes == {value(condition, arguments)}


@settings(relaxed, max_examples=80)
@given(conditions(ANY), calls())
def test_with_symbols_it_holds_the_value_and_installs_no_guard(
    tree: Tree, arguments: Arguments
) -> None:
    condition = build(tree)
    faked, env = symbolised(arguments)
    guards = len(env.guards)
    assert value(condition, arguments) in symbolic.outcomes(condition, faked)
    assert len(env.guards) == guards


@settings(relaxed, max_examples=60)
@given(conditions(ANY), calls())
def test_guarded_it_is_the_value_for_the_hints(tree: Tree, arguments: Arguments) -> None:
    condition = build(tree)
    faked, _ = symbolised(arguments)
    outcomes = symbolic.guarded_outcomes(condition, faked)
    assert value(condition, arguments) in outcomes
    if not known_at_run_time_only(tree) and "'is_contiguous'" not in str(tree):
        assert len(outcomes) == 1


def matrix() -> tuple[torch.Tensor, ShapeEnv]:
    """A matrix of symbolic rows, and 8 columns."""
    env = ShapeEnv()
    dims = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=env)
    return mode.from_tensor(torch.ones(5, 8), symbolic_context=dims), env


@pytest.mark.parametrize(
    ("condition", "outcomes"),
    [
        (when.size("x", 0) >= 4, symbolic.ANY),
        (when.size("x", 0) >= 0, symbolic.HOLDS),
        (when.numel("x") % 8 == 0, symbolic.HOLDS),
        (when.numel("x") // when.size("x", 1) == when.size("x", 0), symbolic.HOLDS),
        (when.is_contiguous("x"), symbolic.HOLDS),
        ((when.size("x", 0) >= 4) & (when.size("x", 1) == 7), symbolic.FAILS),
        ((when.size("x", 0) >= 4) & (when.size("x", 2) == 7), {False, None}),
        ((when.size("x", 0) >= 4) | (when.size("x", 1) == 8), symbolic.HOLDS),
        (when.aligned("x", 16) & when.dtype("x", torch.float64), symbolic.FAILS),
        (when.size("x", 0) % when.value("n") == 0, symbolic.UNDEFINED),
        (when.size("x", 1) // (when.size("x", 0) - 4) == 1, symbolic.ANY),
    ],
)
def test_what_is_known_whatever_the_rows(condition: Any, outcomes: Any) -> None:
    x, env = matrix()
    assert symbolic.outcomes(condition, {"x": x, "n": 0}) == outcomes
    assert not env.guards


def test_the_part_that_never_holds_is_named() -> None:
    x, _ = matrix()
    condition = (when.size("x", 0) >= 4) & (when.ndim("x") == 2) & (when.size("x", 1) == 7)
    assert symbolic.first_failing_part(condition, {"x": x}) == "when.size('x', 1) == 7"
