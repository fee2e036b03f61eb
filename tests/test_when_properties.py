"""Random conditions and random chains of overrides, against a plain evaluation written here.

An expression is generated as nested tuples; `build` makes the condition that opgraft evaluates,
`plain` evaluates the tuples by themselves, with None for "undefined" (Kleene's logic).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import opgraft
from opgraft import packs, when
from opgraft.registry import registry

Tree: TypeAlias = tuple[Any, ...]
Arguments: TypeAlias = dict[str, Any]

# The clean registry around each test is none of hypothesis's business: no example relies on it.
relaxed = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.int32, torch.bool]


# ------------------------------------------------------------------ expressions


@dataclass(frozen=True)
class Names:
    """The arguments that expressions are about, by what can be asked of them."""

    tensors: tuple[str, ...]
    integers: tuple[str, ...]
    floats: tuple[str, ...]
    integer_lists: tuple[str, ...]
    tensor_lists: tuple[str, ...]
    #: Lists of other numbers, and scalars of other kinds with the constants they compare with.
    float_lists: tuple[str, ...] = ()
    others: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def every(self) -> tuple[str, ...]:
        others = (*self.float_lists, *(name for name, _ in self.others))
        scalars = (*self.integers, *self.floats, *others)
        return (*self.tensors, *scalars, *self.integer_lists, *self.tensor_lists)


ANY = Names(("a", "b"), ("dim",), ("eps",), ("sizes",), ("tensors",))
LAYER_NORM = Names(("input", "weight", "bias"), (), ("eps",), ("normalized_shape",), ())


SMALL = st.integers(-3, 8)
FLOATS = st.sampled_from([0.0, 1e-5, 0.5, 1.0])


def tensor_names(names: Names) -> st.SearchStrategy[Any]:
    kinds: list[st.SearchStrategy[Any]] = []
    if names.tensors:
        kinds.append(st.sampled_from(names.tensors))
    if names.tensor_lists:
        lists = st.sampled_from(names.tensor_lists)
        kinds.append(st.tuples(st.just("item"), lists, st.integers(-3, 2)))
    return st.one_of(kinds)


def numbers(names: Names, integers: st.SearchStrategy[int] = SMALL) -> st.SearchStrategy[Tree]:
    dim = st.integers(-3, 2)
    leaves: list[st.SearchStrategy[Tree]] = []
    if names.tensors or names.tensor_lists:
        tensor = tensor_names(names)
        leaves.append(st.tuples(st.sampled_from(["size", "stride"]), tensor, dim))
        leaves.append(st.tuples(st.sampled_from(["ndim", "numel", "itemsize"]), tensor))
    lists = names.integer_lists + names.tensor_lists + names.float_lists
    if lists:
        leaves.append(st.tuples(st.just("length"), st.sampled_from(lists)))
    if names.integer_lists:
        leaves.append(st.tuples(st.just("item"), st.sampled_from(names.integer_lists), dim))
    if names.integers:
        leaves.append(st.tuples(st.just("value"), st.sampled_from(names.integers)))
    constants = st.tuples(st.just("constant"), integers)

    def deeper(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        symbol = st.sampled_from(list(ARITHMETIC))
        # Two constants would be computed by Python before `when` sees them.
        return st.tuples(symbol, inner, inner | constants) | st.tuples(symbol, constants, inner)

    return st.recursive(st.one_of(leaves), deeper, max_leaves=4)


def conditions(
    names: Names,
    integers: st.SearchStrategy[int] = SMALL,
    floats: st.SearchStrategy[Any] = FLOATS,
    formats: tuple[torch.memory_format, ...] = (),
) -> st.SearchStrategy[Tree]:
    """Conditions over the arguments.

    Args:
        names: the arguments.
        integers: constants that integers are combined and compared with.
        floats: constants that other numbers are compared with.
        formats: memory formats to ask for, beside the contiguous one.
    """
    tensor = tensor_names(names)
    number = numbers(names, integers)
    compare = st.sampled_from(list(COMPARISONS))
    constants = st.tuples(st.just("constant"), integers)
    dtypes = st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3).map(tuple)
    leaves: list[st.SearchStrategy[Tree]] = [
        st.tuples(st.just("dtype"), tensor, dtypes),
        st.tuples(st.sampled_from(["is_contiguous", "requires_grad"]), tensor),
        st.tuples(st.just("aligned"), tensor, st.sampled_from([1, 4, 8, 16])),
        st.tuples(st.sampled_from(["same_dtype", "same_device"]), tensor, tensor),
        st.tuples(st.just("is_none"), st.sampled_from(names.every())),
        st.tuples(compare, number, number | constants),
    ]
    if names.floats:
        value = st.tuples(st.just("value"), st.sampled_from(names.floats))
        leaves.append(st.tuples(compare, value, st.tuples(st.just("constant"), floats)))
        leaves.append(st.tuples(compare, value, number))
    if names.float_lists:
        item = st.tuples(st.just("item"), st.sampled_from(names.float_lists), st.integers(-3, 2))
        leaves.append(st.tuples(compare, item, st.tuples(st.just("constant"), floats)))
    for name, choices in names.others:
        constant = st.tuples(st.just("constant"), st.sampled_from(choices))
        equal = st.sampled_from(["==", "!="])
        leaves.append(st.tuples(equal, st.just(("value", name)), constant))
    if formats:
        leaves.append(st.tuples(st.just("is_contiguous"), tensor, st.sampled_from(formats)))

    def deeper(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        both = st.tuples(st.sampled_from(["&", "|"]), inner, inner)
        return both | st.tuples(st.just("~"), inner)

    return st.recursive(st.one_of(leaves), deeper, max_leaves=6)


def build(tree: Any) -> Any:
    """The expression that opgraft evaluates."""
    if isinstance(tree, str):
        return tree
    kind, *rest = tree
    if kind == "constant":
        return rest[0]
    if kind == "dtype":
        return when.dtype(build(rest[0]), *rest[1])
    if kind == "~":
        return ~build(rest[0])
    if kind in "&|":
        left, right = map(build, rest)
        return left & right if kind == "&" else left | right
    if kind in ARITHMETIC or kind in COMPARISONS:
        return (ARITHMETIC | COMPARISONS)[kind](build(rest[0]), build(rest[1]))
    return getattr(when, kind)(*(build(each) if isinstance(each, tuple) else each for each in rest))


def plain(tree: Any, arguments: Arguments) -> Any:
    """The value of an expression, None where it has none."""
    kind, *rest = tree
    if kind == "constant":
        return rest[0]
    if kind == "is_none":
        return arguments[rest[0]] is None
    if kind == "~":
        inner = plain(rest[0], arguments)
        return None if inner is None else not inner
    if kind in "&|":
        return plain_junction(kind, plain(rest[0], arguments), plain(rest[1], arguments))
    if kind in ARITHMETIC or kind in COMPARISONS:
        left, right = plain(rest[0], arguments), plain(rest[1], arguments)
        if left is None or right is None or (kind in ("//", "%") and right == 0):
            return None
        if kind in COMPARISONS:
            ordered = kind in ("==", "!=") or not isinstance(left, complex)
            return COMPARISONS[kind](left, right) if ordered else None
        result = ARITHMETIC[kind](left, right)
        return result if -(2**63) <= result < 2**63 else None  # what leaves 64 bits has no value
    if kind == "value":
        return arguments[rest[0]]
    if kind == "length":
        return None if arguments[rest[0]] is None else len(arguments[rest[0]])
    if kind == "item":
        return plain_item(arguments[rest[0]], rest[1])
    return plain_tensor(kind, rest, arguments)


def plain_junction(kind: str, left: bool | None, right: bool | None) -> bool | None:
    decisive = kind == "|"
    if decisive in (left, right):
        return decisive
    return None if None in (left, right) else not decisive


def plain_item(items: list[Any] | None, index: int) -> Any:
    if items is None or not -len(items) <= index < len(items):
        return None
    return items[index]


def plain_tensor(kind: str, rest: list[Any], arguments: Arguments) -> Any:
    if kind.startswith("same_"):
        same = [plain_lookup(each, arguments) for each in rest]
        return (
            None if any(t is None for t in same) else len({getattr(t, kind[5:]) for t in same}) == 1
        )
    tensor = plain_lookup(rest[0], arguments)
    if tensor is None:
        return None
    if kind in ("size", "stride"):
        sizes = tensor.shape if kind == "size" else tensor.stride()
        return plain_item(list(sizes), rest[1])
    if kind == "aligned":
        return tensor.data_ptr() % rest[1] == 0
    if kind == "dtype":
        return tensor.dtype in rest[1]
    if kind == "requires_grad":
        return tensor.requires_grad
    if kind == "is_contiguous":
        return tensor.is_contiguous(memory_format=(*rest[1:], torch.contiguous_format)[0])
    if kind == "device_capability":
        return None  # of CPU tensors
    return {"numel": tensor.numel(), "itemsize": tensor.itemsize, "ndim": tensor.ndim}[kind]


def plain_lookup(tensor: Any, arguments: Arguments) -> torch.Tensor | None:
    return arguments[tensor] if isinstance(tensor, str) else plain(tensor, arguments)


# ------------------------------------------------------------------ arguments


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any rank up to 3, empty and one-element dimensions, any strides, any offset."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 3, 8]), max_size=3))
    offset = draw(st.sampled_from([0, 1, 4]))
    dtype = draw(st.sampled_from(DTYPES))
    if draw(st.booleans()):
        strides = [draw(st.sampled_from([0, 1, 2, 8])) for _ in sizes]
    else:
        strides = list(torch.empty(sizes, device="meta").stride())
    tensor = torch.zeros(1024, dtype=dtype).as_strided(sizes, strides, offset)
    return tensor.requires_grad_(dtype.is_floating_point and draw(st.booleans()))


def calls() -> st.SearchStrategy[Arguments]:
    maybe = tensors() | st.none()
    return st.fixed_dictionaries(
        {
            "a": maybe,
            "b": maybe,
            "dim": st.integers(-3, 3) | st.none(),
            "eps": st.sampled_from([0.0, 1e-5, 0.5, 1.0, float("nan")]) | st.none(),
            "sizes": st.lists(st.integers(0, 8), max_size=3) | st.none(),
            "tensors": st.lists(tensors(), max_size=3) | st.none(),
        }
    )


@settings(relaxed, max_examples=600)
@given(conditions(ANY), st.lists(calls(), min_size=1, max_size=4))
def test_a_condition_means_what_its_plain_evaluation_says(
    tree: Tree, some_calls: list[Arguments]
) -> None:
    cond = build(tree)
    for arguments in some_calls:
        expected = plain(tree, arguments)
        assert cond.holds(arguments) is (expected is True)
        assert (~cond).holds(arguments) is (expected is False)


@settings(relaxed, max_examples=300)
@given(conditions(ANY), calls())
def test_a_condition_that_is_printed_and_read_again_is_the_same(
    tree: Tree, arguments: Arguments
) -> None:
    cond = build(tree)
    again = eval(repr(cond), {"when": when, "torch": torch})
    assert repr(again) == repr(cond)
    assert again.holds(arguments) is cond.holds(arguments)


@settings(relaxed, max_examples=300)
@given(conditions(ANY), calls())
def test_what_is_named_as_failed_does_not_hold_and_is_named_if_and_only_if_declined(
    tree: Tree, arguments: Arguments
) -> None:
    cond = build(tree)
    failure = cond.failure(arguments)
    assert (failure is None) is cond.holds(arguments)
    if failure is not None:
        part = eval(failure.part, {"when": when, "torch": torch})
        assert not part.holds(arguments)
        assert failure.saw


@settings(relaxed, max_examples=100)
@given(conditions(ANY), calls())
def test_fake_arguments_decide_as_real_ones(tree: Tree, arguments: Arguments) -> None:
    mode = FakeTensorMode()

    def fake(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return mode.from_tensor(value)
        return [fake(item) for item in value] if isinstance(value, list) else value

    cond = build(tree)
    faked = {name: fake(value) for name, value in arguments.items()}
    assert cond.holds(faked) is cond.holds(arguments)


# ------------------------------------------------------------------ chains


@dataclass(frozen=True)
class Plan:
    """One registration: what it wants, where it comes in the chain."""

    tree: Tree | None  #: None: unconditional
    priority: int
    pack: str | None
    dsl: str
    removed: bool


PLANS = st.lists(
    st.builds(
        Plan,
        tree=st.none() | conditions(LAYER_NORM),
        priority=st.integers(-1, 1),
        pack=st.sampled_from([None, None, "alpha", "beta"]),
        dsl=st.sampled_from(["one", "two"]),
        removed=st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=6,
)


@st.composite
def layer_norms(draw: st.DrawFn) -> Arguments:
    """Arguments that native layer norm takes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    normalized = sizes[draw(st.integers(0, len(sizes) - 1)) :]
    input = torch.randn(sizes, dtype=dtype)
    if len(sizes) > 1 and draw(st.booleans()):
        input = torch.randn(sizes[::-1], dtype=dtype).permute(*range(len(sizes))[::-1])
    affine = st.none() | st.just(torch.ones(normalized, dtype=dtype))
    return {
        "input": input,
        "normalized_shape": normalized,
        "weight": draw(affine),
        "bias": draw(affine),
        "eps": draw(st.sampled_from([1e-5, 0.5, 1.0])),
    }


def register(plan: Plan, index: int, ran: list[int]) -> opgraft.Override:
    def impl(*args: Any) -> Any:
        ran.append(index)
        return opgraft.native("aten::native_layer_norm")(*args)

    keywords: dict[str, Any] = {"priority": plan.priority, "dsl": plan.dsl, "name": f"o{index}"}
    if plan.tree is None:
        keywords["unconditional_override"] = True
    else:
        keywords["cond"] = build(plan.tree)
    args = ("aten", "native_layer_norm", "CPU", impl)
    if plan.pack is None:
        return opgraft.register_op_override(*args, **keywords)
    with packs.owning(plan.pack):
        return opgraft.register_op_override(*args, **keywords)


def asked_in_order(plans: list[Plan], off: str | None) -> list[int]:
    """The user's own before packs'; priority; packs by name; else the last registered first."""
    there = [i for i, plan in enumerate(plans) if not plan.removed and plan.dsl != off]

    def rank(index: int) -> tuple[bool, int, str, int]:
        plan = plans[index]
        return (plan.pack is not None, -plan.priority, plan.pack or "", -index)

    return sorted(there, key=rank)


@settings(relaxed, max_examples=400)
@given(
    PLANS,
    st.lists(layer_norms(), min_size=1, max_size=4),
    st.sampled_from([None, None, "one", "two"]),
)
def test_the_override_that_runs_is_the_first_of_the_chain_that_wants_the_call(
    plans: list[Plan], some_calls: list[Arguments], off: str | None
) -> None:
    registry.reset()
    ran: list[int] = []
    overrides = [register(plan, index, ran) for index, plan in enumerate(plans)]
    for plan, override in zip(plans, overrides, strict=True):
        if plan.removed:
            override.remove()
    if off is not None:
        opgraft.disable(dsl=off)
    hits, misses = [0] * len(plans), [0] * len(plans)
    for arguments in some_calls:
        ran.clear()
        expected: list[int] = []
        for index in asked_in_order(plans, off):
            tree = plans[index].tree
            if tree is None or plain(tree, arguments) is True:
                expected = [index]
                hits[index] += 1
                break
            misses[index] += 1
        explained = opgraft.explain("aten::native_layer_norm", *arguments.values()).winner
        out = torch.native_layer_norm(*arguments.values())
        assert ran == expected
        assert explained is (overrides[expected[0]] if expected else None)
        with opgraft.disabled():
            for mine, stock in zip(out, torch.native_layer_norm(*arguments.values()), strict=True):
                assert torch.equal(mine, stock)
    assert [override.hits for override in overrides] == hits
    assert [override.misses for override in overrides] == misses
    assert [override.fallbacks for override in overrides] == hits  # every impl ended in native
