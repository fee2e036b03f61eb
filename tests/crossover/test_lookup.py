"""A lookup in a grid: C++, Python and symbolic outcomes agree with a dictionary of cells."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opgraft import when
from opgraft.core import loader
from opgraft.ops.schema import resolve
from opgraft.when import nodes, symbolic
from opgraft.when.compilation import compile_condition
from opgraft.when.grid import STEPS, Axis, ExactAxis, Grid, SteppedAxis
from opgraft.when.nodes import ExpressionError, Failure, Lookup, Undefined
from tests.test_symbolic import symbolised
from tests.test_when_properties import Arguments, relaxed, tensors

OP = resolve("aten::_fused_rms_norm")
COLUMNS = 3


class Tables(NamedTuple):
    """A grid for the CPU and none for other devices."""

    the_grid: Grid | None

    def grid(self, device: torch.device) -> Grid | None:
        return self.the_grid if device.type == "cpu" else None

    def failure(self, device: torch.device, values: tuple[Any, ...], column: int) -> Failure:
        return Failure("slower here", f"{values} on {device}")


#: Features that can be undefined, huge, zero, negative, no integer; with the kind of their axis.
FEATURES: dict[str, tuple[when.Number, str]] = {
    "rows": (when.numel("input") // when.size("input", -1), "steps"),
    "hidden": (when.size("input", -1), "steps"),
    "numel": (when.numel("input"), "steps"),
    "of_two": (when.numel("weight") // when.size("input", 0), "steps"),
    "huge": (when.numel("input") * 2**58, "steps"),
    "less": (when.ndim("input") - 2, "exact"),
    "weight": (when.size("weight", 0), "steps"),
    "dtype": (when.dtype_of("input"), "exact"),
    "itemsize": (when.itemsize("input"), "exact"),
    "eps": (when.value("eps"), "exact"),
    "normalized": (when.length("normalized_shape"), "exact"),
    "of_item": (when.item("normalized_shape", 0), "exact"),
    "stride": (when.stride("input", -1), "exact"),
    "other_ndim": (when.ndim("weight"), "exact"),
    "other_dtype": (when.dtype_of("weight"), "exact"),
    "other_itemsize": (when.itemsize("weight"), "exact"),
    "other_numel": (when.numel("weight"), "steps"),
    # Those in which the core knows a constant.
    "misaligned": ((when.size("input", -1) % 4 + 3) // 4, "exact"),
    "rest": ((when.numel("input") - 3) % 5, "exact"),
    "less_than_zero": ((when.ndim("input") - 3) // 2, "exact"),
    "modulo": ((when.ndim("input") - 3) % 2, "exact"),
    "left": (1 // (when.size("weight", -1) - 1), "exact"),
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.int32, torch.bool]


@st.composite
def axes(draw: st.DrawFn, kind: str, name: str) -> Axis:
    if name.endswith("dtype"):
        return ExactAxis(draw(st.lists(st.sampled_from(DTYPES), min_size=1, unique=True)))
    if kind == "exact":
        return ExactAxis(draw(st.lists(st.integers(-1, 3), min_size=1, max_size=4, unique=True)))
    numbers = st.one_of(st.integers(1, 70), st.integers(2**58, 2**63 - 1))
    lowest, highest = sorted((draw(numbers), draw(numbers)))
    if highest > 70 and lowest <= 70:  # few octaves, so that there are few cells
        lowest = highest
    steps, open_ended = draw(st.sampled_from(STEPS)), draw(st.booleans())
    return SteppedAxis(steps, lowest, highest, open_ended=open_ended)


@st.composite
def lookups(draw: st.DrawFn) -> Lookup:
    names = draw(st.lists(st.sampled_from(list(FEATURES)), min_size=1, max_size=3, unique=True))
    if not any(any(nodes.tensors_of(FEATURES[name][0])) for name in names):
        names.append("rows")
    made = [draw(axes(FEATURES[name][1], name)) for name in names]
    count = 1
    for axis in made:
        count *= axis.count
    one = draw(st.binary(min_size=1, max_size=8).map(lambda cells: bytes(c & 7 for c in cells)))
    grid = Grid(made, (one * count)[:count])
    tables = Tables(draw(st.sampled_from([grid, grid, grid, None])))
    features = {name: FEATURES[name][0] for name in names}
    return Lookup(features, draw(st.integers(0, COLUMNS - 1)), "plan", tables)


def calls() -> st.SearchStrategy[Arguments]:
    return st.fixed_dictionaries(
        {
            "input": tensors(),
            "normalized_shape": st.lists(st.integers(0, 8), max_size=3),
            "weight": tensors() | st.none(),
            "eps": st.sampled_from([1e-5, 1.0, 2.0]) | st.none(),
        }
    )


def plain(lookup: Lookup, arguments: Arguments) -> bool | None:
    """The decision by a dictionary of all cells, and a search for each bucket."""
    values = [feature.evaluate(arguments) for feature in lookup.features.values()]
    if any(isinstance(value, Undefined) for value in values):
        return None
    grid = lookup.tables.grid(arguments["input"].device)
    if grid is None:
        return False
    every = itertools.product(*(range(axis.count) for axis in grid.axes))
    cells = dict(zip(every, grid.cells, strict=True))
    indices = tuple(map(plain_bucket, grid.axes, values))
    return bool(cells.get(indices, 0) >> lookup.column & 1)


def plain_bucket(axis: Axis, value: Any) -> int | None:
    if isinstance(value, float):
        return None
    if isinstance(axis, ExactAxis):
        return axis.values.index(value) if value in axis.values else None
    ends = [axis.lower(index) for index in range(axis.count + 1)]
    if axis.open_ended and value >= 1:
        value = min(max(value, ends[0]), ends[-1] - 1)
    held = [i for i, (a, b) in enumerate(itertools.pairwise(ends)) if a <= value < b]
    return held[0] if held else None


@settings(relaxed, max_examples=400)
@given(lookups(), st.lists(calls(), min_size=1, max_size=4))
def test_core_python_and_a_dictionary_agree(lookup: Lookup, some_calls: list[Arguments]) -> None:
    core, schema = loader.load(), OP.overload._schema
    for arguments in some_calls:
        expected = plain(lookup, arguments)
        for condition, holds in ((lookup, expected is True), (~lookup, expected is False)):
            assert condition.holds(arguments) is holds
            compiled = compile_condition(condition, OP)
            assert compiled is not None
            if core is None:
                continue
            values = tuple(arguments[name] for name in OP.kinds)
            assert core.holds(compiled, values, schema.name, schema.overload_name) is holds


@st.composite
def comparisons(draw: st.DrawFn) -> when.Condition:
    """Of what may be undefined, huge, zero, negative, no integer."""
    named = {name: number for name, (number, _) in FEATURES.items() if "dtype" not in name}
    compare = draw(st.sampled_from([operator.lt, operator.ge, operator.eq, operator.ne]))
    made: when.Condition = compare(named[draw(st.sampled_from(list(named)))], draw(CONSTANTS))
    return made


CONSTANTS = st.sampled_from([0, 1, 2, 8, 2**58, -1])


@settings(relaxed, max_examples=400)
@given(
    st.lists(comparisons(), max_size=3),
    st.lists(lookups(), max_size=2),
    st.lists(calls(), min_size=1, max_size=4),
)
def test_the_core_and_python_agree_on_lookups_and_comparisons_of_common_numbers(
    compared: list[when.Condition], looked_up: list[Lookup], some_calls: list[Arguments]
) -> None:
    core, schema = loader.load(), OP.overload._schema
    if core is None:
        pytest.skip("there is no core")
    whole = functools.reduce(operator.and_, [*compared, *looked_up, when.ndim("input") >= 0])
    compiled = compile_condition(whole, OP)
    assert compiled is not None
    for arguments in some_calls:
        values = tuple(arguments[name] for name in OP.kinds)
        found = core.holds(compiled, values, schema.name, schema.overload_name)
        assert found is whole.holds(arguments)


SOFTMAX = resolve("aten::_softmax")


def core_takes(lookup: Lookup, tensor: torch.Tensor, dim: int) -> bool:
    """What the core decides for a softmax."""
    core, schema = loader.load(), SOFTMAX.overload._schema
    if core is None:
        pytest.skip("there is no core")
    compiled = compile_condition(lookup, SOFTMAX)
    assert compiled is not None
    holds: bool = core.holds(compiled, (tensor, dim, False), schema.name, schema.overload_name)
    return holds


def by_dim(axis: Axis, cells: bytes) -> Lookup:
    """Of a softmax, by its dimension, which may be any integer here."""
    grid = Grid((axis, ExactAxis([1])), cells)
    features = {"dim": when.value("dim"), "ndim": when.ndim("self")}
    return Lookup(features, 0, "plan", Tables(grid))


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("lowest", "highest"), [(1, 2**63 - 1), (24, 2**20), (2**52, 2**55), (2**62, 2**62)]
)
@pytest.mark.parametrize("steps", STEPS)
def test_the_core_finds_the_bucket_at_each_end_of_one(
    steps: int, lowest: int, highest: int, is_open: bool
) -> None:
    axis = SteppedAxis(steps, lowest, highest, open_ended=is_open)
    ends = [axis.lower(index) for index in range(axis.count + 1)]
    values = {end + more for end in ends for more in (-1, 0, 1) if end + more < 2**63}
    values |= {-(2**63), -(2**53), -1, 0, 1, 2**53 - 1, 2**53, 2**53 + 1, 2**54 - 1, 2**63 - 1}
    x = torch.ones(1)
    for odd in (0, 1):
        lookup = by_dim(axis, bytes(index % 2 == odd for index in range(axis.count)))
        for value in values:
            index = axis.index_of(value)
            expected = index is not None and index % 2 == odd
            assert core_takes(lookup, x, value) is expected, value


def test_the_core_finds_exact_numbers_however_far_apart() -> None:
    numbers = [2**40, -(2**63), 7, 0, 1023, 1024, 5000, 2**63 - 1]
    for one in numbers:
        lookup = by_dim(ExactAxis(numbers), bytes(number == one for number in numbers))
        for value in (each + more for each in numbers for more in (-1, 0, 1)):
            if -(2**63) <= value < 2**63:
                assert core_takes(lookup, torch.ones(1), value) is (value == one), value


@pytest.mark.parametrize("shape", [(), (0,), (3,), (3, 2), (2, 1, 3)])
def test_the_core_finds_sizes_of_a_dimension_that_an_argument_names(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    features = {
        "size": when.size("self", when.value("dim")),
        "stride": when.stride("self", when.value("dim")),
    }
    axes = [ExactAxis(range(4)), ExactAxis(range(7))]
    for dim in range(-4, 5):
        for size, stride in itertools.product(range(4), range(7)):
            cells = [at == (size, stride) for at in itertools.product(range(4), range(7))]
            lookup = Lookup(features, 0, "plan", Tables(Grid(axes, bytes(cells))))
            exists = -len(shape) <= dim < len(shape)
            expected = exists and (x.size(dim), x.stride(dim)) == (size, stride)
            assert core_takes(lookup, x, dim) is expected


@pytest.mark.parametrize("count", [1, 26, 27, 28, 29, 40])
def test_the_core_computes_however_many_features(count: int) -> None:
    features = {f"f{each}": when.size("self", 0) + each for each in range(count)}
    for wanted, expected in ((5, True), (6, False)):
        axes = [ExactAxis([wanted + each]) for each in range(count)]
        lookup = Lookup(features, 0, "plan", Tables(Grid(axes, bytes([1]))))
        assert core_takes(lookup, torch.ones(5), 0) is expected


@settings(relaxed, max_examples=60)
@given(lookups(), calls())
def test_symbolic_outcomes_hold_the_decision_and_install_no_guard(
    lookup: Lookup, arguments: Arguments
) -> None:
    expected = plain(lookup, arguments)
    assert symbolic.outcomes(lookup, arguments) == {expected}
    faked, env = symbolised(arguments)
    guards = len(env.guards)
    assert expected in symbolic.outcomes(lookup, faked)
    assert len(env.guards) == guards


@settings(relaxed, max_examples=40)
@given(lookups(), calls())
def test_guarded_it_is_the_decision_for_the_hints(lookup: Lookup, arguments: Arguments) -> None:
    faked, _ = symbolised(arguments)
    found = symbolic.guarded_outcomes(lookup, faked)
    expected = plain(lookup, arguments)
    assert expected in found
    # Outside, a product of sizes may have left 64 bits.
    assert found == {expected} or found == {False, None}


@settings(relaxed, max_examples=200)
@given(st.sampled_from(STEPS), st.integers(1, 2**63 - 1), st.integers(1, 2**63 - 1))
def test_a_bucket_is_from_its_lower_end_to_the_next_one(steps: int, one: int, other: int) -> None:
    lowest, highest = sorted((one, other))
    axis = SteppedAxis(steps, lowest, highest)
    for value in (lowest, highest):
        index = axis.index_of(value)
        assert index is not None
        assert axis.lower(index) <= value < axis.lower(index + 1)
    assert axis.index_of(lowest) == 0
    assert axis.index_of(highest) == axis.count - 1


ROWS = when.size("x", 0)


def by_rows(
    cells: list[bool],
    *,
    dynamic: bool,
    axis: Axis | None = None,
    feature: when.Number = ROWS,
) -> tuple[symbolic.Outcomes, int]:
    """The outcomes for a matrix of 2 to 15 rows, in a grid from 2 to 8 rows, and the guards."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    env = ShapeEnv()
    rows = DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC
    dims = StatelessSymbolicContext([rows, DimDynamic.STATIC])
    matrix = FakeTensorMode(shape_env=env).from_tensor(torch.ones(5, 8), symbolic_context=dims)
    torch._check(matrix.shape[0] >= 2)
    torch._check(matrix.shape[0] < 16)
    grid = Grid([axis or SteppedAxis(1, 2, 8)], bytes(cells))
    lookup = Lookup({"rows": feature}, 0, "plan", Tables(grid))
    guards = len(env.guards)
    found = symbolic.outcomes(lookup, {"x": matrix})
    return found, len(env.guards) - guards


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([True, True, True], symbolic.HOLDS),
        ([False, False, False], symbolic.FAILS),
        ([True, False, True], symbolic.EITHER),
    ],
)
def test_symbolic_sizes_are_decided_where_every_cell_of_their_range_agrees(
    cells: list[bool], expected: symbolic.Outcomes
) -> None:
    assert by_rows(cells, dynamic=True) == (expected, 0)


@pytest.mark.parametrize(
    ("lowest", "highest"), [(4, 4), (16, 64), (1, 1), (2, 3)], ids=["around", "below", "above", ""]
)
def test_symbolic_sizes_beyond_an_open_end_are_decided_by_it(lowest: int, highest: int) -> None:
    axis = SteppedAxis(1, lowest, highest, open_ended=True)
    for cell, expected in ((True, symbolic.HOLDS), (False, symbolic.FAILS)):
        assert by_rows([cell] * axis.count, dynamic=True, axis=axis) == (expected, 0)
    closed = SteppedAxis(1, lowest, highest)
    assert by_rows([True] * closed.count, dynamic=True, axis=closed)[0] != symbolic.HOLDS


@pytest.mark.parametrize(
    ("values", "taken", "expected"),
    [
        ([0, 1], [True, True], symbolic.HOLDS),
        ([1, 0], [False, False], symbolic.FAILS),
        ([1, 0], [True, False], symbolic.EITHER),
        ([0], [True], symbolic.ANY),  # it may be another one, of which nothing is known
        ([1, 3], [True, True], symbolic.ANY),
    ],
)
def test_symbolic_sizes_are_decided_where_every_exact_number_that_they_can_give_agrees(
    values: list[int], taken: list[bool], expected: symbolic.Outcomes
) -> None:
    feature = 1 // (ROWS % 4 + 1)  # 1 of a multiple of 4, else 0
    axis = ExactAxis(values)
    assert by_rows(taken, dynamic=True, axis=axis, feature=feature) == (expected, 0)


def test_a_static_size_is_decided_by_its_cell() -> None:
    assert by_rows([False, True, False], dynamic=False) == (symbolic.HOLDS, 0)


def test_the_failure_is_what_the_tables_say() -> None:
    lookup = Lookup({"rows": when.size("x", 0)}, 0, "plan", Tables(None))
    assert str(lookup.failure({"x": torch.ones(3)})) == "slower here ((3,) on cpu)"


def test_the_failure_of_an_undefined_feature_is_its_reason() -> None:
    lookup = Lookup({"rows": when.size("x", 1)}, 0, "plan", Tables(None))
    expected = "crossover(rows=when.size('x', 1)).plan (x has 1 dimensions)"
    assert str(lookup.failure({"x": torch.ones(3)})) == expected


def test_a_feature_is_an_integer_a_boolean_or_a_dtype() -> None:
    features = {"rows": when.size("input", 0), "capability": when.device_capability("input")}
    with pytest.raises(ExpressionError, match=r"feature capability=.* is a capability"):
        Lookup(features, 0, "plan", Tables(None)).check(OP.kinds)


def test_dtypes_are_compared_by_the_conditions_for_it() -> None:
    with pytest.raises(TypeError, match=r"ask when\.dtype"):
        when.dtype_of("x") == torch.float32  # noqa: B015


def test_the_grid_is_asked_for_once_per_device() -> None:
    asked: list[torch.device] = []
    grid = Grid([ExactAxis([torch.float32, torch.float16])], bytes([1, 0]))

    class Counting:
        def grid(self, device: torch.device) -> Grid | None:
            asked.append(device)
            return grid

        failure = Tables.failure

    lookup: Any = Lookup({"dtype": when.dtype_of("self")}, 0, "plan", Counting())  # type: ignore[arg-type]
    import opgraft

    override = opgraft.register_op_override(
        "aten", "_softmax", "CPU", lambda self, *_: torch.zeros_like(self), cond=lookup
    )
    for dtype in (torch.float32, torch.float16, torch.float32):
        torch.softmax(torch.ones(2, 2, dtype=dtype), 1)
    assert (override.hits, override.misses) == (2, 1)
    if loader.in_use() is not None:
        assert len(set(asked)) == len(asked) == 1
