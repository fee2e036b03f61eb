"""What the routers call themselves, to bind, check, compare and keep books, reaches no override.

The ops that are called on the way are not listed here: a profiler sees them. All of them are then
overridden by impls that call native, and each way is gone once more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import opgraft
from opgraft import when
from opgraft.ops.schema import resolve_all
from opgraft.registry.state import CHECKED_HITS
from tests import opinfo_calls
from tests.python_router import run_again, where_the_core_routes


def register(symbol: str, impl: Callable[..., Any] | None = None, **keywords: Any) -> Any:
    impl = impl or opgraft.native(f"aten::{symbol}")
    if "cond" not in keywords:
        keywords["unconditional_override"] = True
    return opgraft.register_op_override("aten", symbol, "CPU", impl, name="mine", **keywords)


# ------------------------------------------------------------------ the ways, by what is called
# Each takes a matrix of float64, which `mul` does not cast, and calls one op, whose native kernel
# calls none.


def hit(x: torch.Tensor) -> None:
    torch.exp(x)


def hit_with_a_number(x: torch.Tensor) -> None:
    x * 2.5


def hit_of_a_write(x: torch.Tensor) -> None:
    x.exp_()


def hit_with_a_list(x: torch.Tensor) -> None:
    torch.cat([x, x])


def hit_in_inference_mode(x: torch.Tensor) -> None:
    with torch.inference_mode():
        torch.exp(x)


def hit_in_training(x: torch.Tensor) -> None:
    torch.exp(x.requires_grad_())


def hit_of_a_view(x: torch.Tensor) -> None:
    x.view_as(x)


def shadowed(x: torch.Tensor) -> None:
    with opgraft.shadow(rate=1.0):
        torch.exp(x)


def shadowed_write(x: torch.Tensor) -> None:
    with opgraft.shadow(rate=1.0):
        x.exp_()


def shadowed_and_wrong(x: torch.Tensor) -> None:
    with tempfile.TemporaryDirectory() as folder, opgraft.shadow(rate=1.0, save=folder):
        torch.exp(x)


def explained(x: torch.Tensor) -> None:
    opgraft.explain("aten::mul.Tensor", x, 2.5)


def traced(x: torch.Tensor) -> None:
    with opgraft.trace():
        x * 2.5


def own_derivative(x: torch.Tensor) -> None:
    torch.exp(x.requires_grad_())


#: By way: the op that it calls, and how its override is registered.
WAYS: dict[Callable[[torch.Tensor], None], tuple[str, dict[str, Any]]] = {
    hit: ("exp", {}),
    hit_with_a_number: ("mul.Tensor", {}),
    hit_of_a_write: ("exp_", {}),
    hit_with_a_list: ("cat", {}),
    hit_in_inference_mode: ("exp", {}),
    hit_in_training: ("exp", {}),
    hit_of_a_view: ("view_as", {"impl": lambda self, other: self.data}),
    shadowed: ("exp", {}),
    shadowed_write: ("exp_", {}),
    shadowed_and_wrong: ("exp", {"impl": opgraft.native("aten::sinh")}),
    explained: ("mul.Tensor", {}),
    traced: ("mul.Tensor", {}),
    own_derivative: ("exp", {"autograd": (lambda ctx, i, o: None, lambda ctx, g: g)}),
}
#: Whether a call is taken: always; where a condition says so, in Python or as an expression; never.
CONDITIONS: dict[str, dict[str, Any]] = {
    "unconditional": {},
    "an expression": {"cond": lambda: when.dtype("self", torch.float64)},
    "a callable": {"cond": lambda: lambda *args, **kwargs: True},
    "a miss": {"cond": lambda: lambda *args, **kwargs: False},
}


def go(way: Callable[[torch.Tensor], None]) -> None:
    with opgraft.disabled():
        one = torch.arange(12, dtype=torch.float64).reshape(3, 4)
        matrices = [one.clone() for _ in range(CHECKED_HITS + 1)]
    for matrix in matrices:
        way(matrix)


def called_on(way: Callable[[torch.Tensor], None]) -> set[str]:
    """The names of the ops that are called on a way, overrides of it registered."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        go(way)
    names = {event.name.removeprefix("aten::") for event in profile.events() if "::" in event.name}
    return {name for name in names if hasattr(torch.ops.aten, name)}


def overrides_of(names: set[str], but: str) -> Iterator[opgraft.Override]:
    for op in (op for name in sorted(names) for op in resolve_all("aten", name)):
        if op.registration_name != but and opinfo_calls.may_be_overridden(op):
            yield register(op.registration_name)


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_none_of_them_reaches_an_override(way: Callable[..., None], condition: str) -> None:
    symbol, keywords = WAYS[way]
    is_miss = condition == "a miss"
    if is_miss and way is hit_of_a_view:
        pytest.skip("its native kernel calls another op")
    if condition == "an expression" and symbol == "cat":
        pytest.skip("it has no argument self")
    keywords = keywords | {name: make() for name, make in CONDITIONS[condition].items()}
    first = register(symbol, **keywords)
    names = called_on(way)
    first.remove()
    override = register(symbol, **keywords)
    others = list(overrides_of(names, symbol))
    go(way)
    assert {other.op for other in others if other.hits} == set()
    is_hit = way is not explained and not is_miss
    assert not is_hit or {"clone", "equal"} <= names  # what the contract check calls
    assert (override.hits > 0) == is_hit


@pytest.mark.parametrize(
    "op",
    [
        *("detach", "alias", "empty.memory_format", "lift_fresh", "empty_strided", "to.device"),
        *("set_.source_Storage", "set_.source_Storage_storage_offset"),
    ],
)
def test_what_makes_tensors_of_subclasses_cannot_be_overridden(op: str) -> None:
    with pytest.raises(opgraft.RegistrationError, match=f"aten::{op} makes the tensors"):
        register(op)
    torch.nn.Parameter(torch.ones(1))


class Subclass(torch.Tensor):
    """Its constructor makes the tensor first, by ops."""


#: By what a tensor of a subclass is made of.
CONSTRUCTED: dict[str, Callable[[], torch.Tensor]] = {
    "numbers": lambda: Subclass([1.0, 2.0]),
    "whole numbers": lambda: Subclass([1, 2]),
    "sizes": lambda: Subclass(2, 3),
    "nothing": lambda: Subclass(),
    "a storage": lambda: Subclass(torch.arange(4.0).untyped_storage()),
    "a tensor": lambda: Subclass(torch.arange(4.0)),
    "an array": lambda: Subclass(np.ones(3, dtype=np.float32)),
    "another type's tensor": lambda: torch.arange(4.0).as_subclass(Subclass).new([1, 2]),
    "a parameter": lambda: torch.nn.Parameter(torch.arange(4.0)),
    "a parameter of another dtype": lambda: torch.nn.Linear(2, 2).double().weight,
    "a parameter without memory": lambda: (
        torch.nn.Linear(2, 2, device="meta").to_empty(device="cpu").weight
    ),
}


@pytest.mark.parametrize("made_of", CONSTRUCTED)
def test_tensors_of_subclasses_are_made_under_overrides_of_all_that_is_called(made_of: str) -> None:
    make = CONSTRUCTED[made_of]
    expected = make()
    overridden = 0
    for name in called_on(lambda _: make()):
        for op in resolve_all("aten", name):
            if not opinfo_calls.may_be_overridden(op):
                continue
            override = register(op.registration_name)
            overridden += 1
            made = make()
            assert type(made) is type(expected) and made.shape == expected.shape, op.name
            override.remove()
    assert overridden > 0


@pytest.mark.parametrize("op", ["copy_", "_to_copy"])
def test_an_array_of_another_dtype_is_a_tensor_before_it_is_a_subclass(op: str) -> None:
    """As docs/routing.md says: the constructor's own conversion is what an impl has seen."""
    override = register(op)
    array = np.ones(3)
    with pytest.raises(RuntimeError, match="already associated to a python object"):
        Subclass(array)
    assert override.hits == 1
    assert torch.from_numpy(array).float().as_subclass(Subclass).tolist() == [1.0] * 3


@pytest.mark.parametrize("number", [True, -3, 2**63 - 1, 2**63, 2**64 - 1, 2.5, 1 + 2j])
def test_a_number_is_the_tensor_that_the_dispatcher_makes_of_it(number: complex) -> None:
    seen: list[torch.Tensor] = []
    native = opgraft.native("aten::mul.Tensor")

    def impl(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        seen.append(other)
        return native(self, other)

    x = torch.ones(2, dtype=torch.float32)
    expected = x * number
    override = register("mul.Tensor", impl)
    result = x * number
    assert override.hits == 1
    assert torch.equal(result, expected)
    assert seen[0].item() == number
    assert torch.result_type(x, seen[0]) == expected.dtype


def test_numbers_in_a_list_of_tensors_are_tensors() -> None:
    """A number that a backward has saved is a wrapped one, in a list as well."""
    saved = (torch.ones((), requires_grad=True) * 2.5).grad_fn._saved_other  # type: ignore[union-attr]
    expected = torch.stack([saved, saved])
    override = register("stack")
    assert torch.equal(torch.stack([saved, saved]), expected)
    assert override.hits == 1


@where_the_core_routes
def test_nor_with_the_python_router() -> None:
    run_again(__file__)
