"""Tables: what is read, and what is refused with a line that names the file and the reason."""

from __future__ import annotations

import itertools
import json
import math
import operator
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from opgraft import Crossover, when
from opgraft.core import loader
from opgraft.crossover import rule, tables
from opgraft.crossover.rule import GRAPH, PLAN, PYTHON
from opgraft.crossover.tables import BadTable, Entry, entry_of
from opgraft.when.grid import Axis, ExactAxis, Grid, SteppedAxis
from tests.crossover.tables import GRAPHS_ONLY, cell, crossover, entry, table
from tests.test_when_properties import relaxed

H200 = Path("tables/nvidia_h200.json")


def read(content: Any, declared: Crossover | None = None) -> Entry:
    """The entry of the override `fast` in a table of an H200."""
    if isinstance(content, dict):
        content = json.dumps(content)
    found = entry_of(tables.parse(H200, content), "fast", declared or crossover())
    assert found is not None
    return found


def h200(*cells: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return table({"fast": entry(*cells, **changes)}, "NVIDIA H200", capability=[9, 0])


def test_a_table_is_read() -> None:
    found = read(h200(cell(1024), cell(4096, "float16", override=20)))
    assert found.measured["date"] == "2026-11-24"
    assert {indices: each.override for indices, each in found.cells.items()} == {
        (0, 0): 5.0,
        (2, 1): 20.0,
    }


def test_an_override_without_an_entry_is_in_no_table() -> None:
    parsed = tables.parse(H200, json.dumps(h200(cell(1))))
    assert entry_of(parsed, "other", crossover()) is None


def without(found: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != key}


DAMAGED = {
    "text": ("rows = 1", "damaged"),
    "half of it": (json.dumps(h200(cell(1)))[:80], "damaged"),
    "depth": ("[" * 100_000, "damaged"),
    "a list": ("[]", "no table"),
    "no format": (json.dumps(without(h200(cell(1)), "format")), "no table"),
    "a name twice": ('{"format": 1, "format": 1}', "stands twice"),
    "not a number": (json.dumps(h200(cell(1), version=math.nan)), "NaN is no number"),
    "infinity": (json.dumps(h200(cell(1), version=math.inf)), "Infinity is no number"),
    "an earlier format": (h200(cell(1)) | {"format": 1}, "its format is 1"),
    "another device": (h200(cell(1)) | {"device": "NVIDIA A100"}, "another device.*NVIDIA A100"),
    "no device": (h200(cell(1)) | {"device": 5}, "device"),
    "capability": (h200(cell(1)) | {"capability": "9.0"}, "capability"),
    "overrides": (h200(cell(1)) | {"overrides": []}, "overrides"),
    "entry": (table({"fast": []}, "NVIDIA H200"), "no object"),
    "version": (h200(cell(1), version=2), "version 2 of the kernel, and this is 1"),
    "features": (h200(cell(1), features={"rows": {"steps": 1}}), "features"),
    "order": (h200(cell(1), features={"dtype": "exact", "rows": {"steps": 1}}), "features"),
    "steps": (h200(cell(1), features={"rows": {"steps": 3}, "dtype": "exact"}), "rows"),
    "measured": (h200(cell(1), measured={"date": 5}), "measured"),
    "complete": (h200(cell(1), complete=1), "complete"),
    "no cells": (h200(), "no cells"),
    "cells": (h200(cells={}), "cells"),
    "objects": (h200(cells=[cell(1)]), "no list of lines"),
    "columns": (h200(cell(1), columns="dtype rows"), "columns.* is not 'rows dtype : native_us"),
    "at": (h200(cell(1) | {"at": [1]}), "the cell .* has not what .*columns"),
    "a time too few": (h200(cells=["1 float32 : 1 1 1 1 1 1"]), "the cell .* has not what"),
    "no colon": (h200(cells=["1 float32 - 1 1 1 1 1 1 1"]), "the cell .* has not what"),
    "an empty line": (h200(cells=[""]), "the cell .* has not what"),
    "corner": (h200(cell(1000)), "1000 is not where a bucket begins"),
    "zero": (h200(cell(0)), "from 1 on"),
    "many bits": (h200(cell(2**63)), "is never"),
    "other digits": (h200(cells=["\u0661 float32 : 1 1 1 1 1 1 1"]), "is never"),
    "dtype": (h200(cell(1, "float33")), "'float33'"),
    "a function": (h200(cell(1, "load")), "'load'"),
    "a dtype as a number": (
        h200(
            cell(1) | {"at": ["float32", "float32"]}, features={"rows": "exact", "dtype": "exact"}
        ),
        "is never",
    ),
    "dtype number": (h200(cell(1) | {"at": [1, 6]}), "is never"),
    "twice": (h200(cell(1), cell(1)), "two cells are at one place"),
    "twice in other words": (
        h200(cells=["1 float32 : 1 1 1 1 1 1 1", "01 float32 : 1 1 1 1 1 1 1"]),
        "two cells are at one place",
    ),
    "negative": (h200(cell(1, override=-1)), "override_us is -1.0, which no time is"),
    "no time": (h200(cell(1, override=0)), "override_us is 0.0, which no time is"),
    "huge": (h200(cell(1, native=1e30)), "native_us is 1e[+]30, which no time is"),
    "NaN": (h200(cell(1, native=math.nan)), "native_us is nan, which no time is"),
    "endless": (h200(cell(1, native=math.inf)), "native_us is inf, which no time is"),
    "a word": (h200(cell(1, python_host="fast")), "python_host_us: .*'fast'"),
    "true": (h200(cell(1, native=True)), "native_us: .*'True'"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_what_is_wrong_is_told(what: str) -> None:
    content, expected = DAMAGED[what]
    with pytest.raises(BadTable, match=expected):
        read(content)


def test_a_grid_of_too_many_cells_is_refused() -> None:
    features = {"a": {"steps": 8}, "b": {"steps": 8}, "dtype": "exact"}
    ends = [cell(1) | {"at": [at, at, "float32"]} for at in (1, 2**62)]
    content = json.dumps(table({"fast": entry(*ends, features=features)}, "NVIDIA H200"))
    declared = {"a": when.numel("self"), "b": when.numel("self"), "dtype": when.dtype_of("self")}
    with pytest.raises(BadTable, match="span more than"):
        entry_of(tables.parse(H200, content), "fast", Crossover(**declared))


def test_a_feature_that_is_declared_exact_has_no_steps() -> None:
    parsed = tables.parse(H200, json.dumps(h200(cell(1))))
    with pytest.raises(BadTable, match="rows is declared exact"):
        entry_of(parsed, "fast", crossover(exact=["rows"]))


KEYS = st.sampled_from(["format", "device", "overrides", "fast", "cells", "at"])
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
)


@relaxed
@given(ANY_JSON)
def test_whatever_json_says_is_read_or_refused(content: Any) -> None:
    in_place = {"fast": content} if content is not None else {"fast": 1}  # null: it has no entry
    for found in (content, table(in_place, "NVIDIA H200"), h200(cells=[content])):
        with pytest.raises(BadTable):
            read(json.dumps(found))


# ------------------------------------------------------------------ the rule


@pytest.mark.parametrize(
    ("times", "plan", "python", "graph"),
    [
        ({}, True, True, False),
        ({"override": 9.6}, False, False, False),  # within the margin
        ({"override": 9.5}, True, True, False),
        ({"python_host": 40}, True, False, False),
        ({"plan_host": 11, "python_host": 40}, False, False, False),
        ({"plan_host": None}, True, True, False),  # by no plan: from Python
        ({"plan_host": None, "python_host": 40}, False, False, False),
        ({"native_host": 100, "python_host": 40}, True, True, False),
        ({"override": None}, False, False, False),
        ({"native": None}, False, False, False),
        ({"inductor": 10, "opaque": 5}, True, True, True),
        ({"inductor": 10, "opaque": 9.9}, True, True, False),
        ({"inductor": 10, "opaque": 5, "override": 20}, False, False, False),
    ],
)
def test_a_way_pays_where_the_longer_of_its_times_is_shorter_by_the_margin(
    times: dict[str, float], plan: bool, python: bool, graph: bool
) -> None:
    (found,) = read(h200(cell(1, **times))).cells.values()
    assert [rule.pays(found, column, 0.05) for column in (PLAN, PYTHON, GRAPH)] == [
        plan,
        python,
        graph,
    ]


MAYBE = st.none() | st.sampled_from([5.0, 9.0, 9.7, 10.0, 10.3, 11.0, 20.0])


@given(MAYBE, MAYBE, MAYBE, MAYBE, MAYBE, st.sampled_from([0.0, rule.MARGIN, 0.5]))
def test_a_way_pays_where_native_takes_longer_by_the_margin(
    native: float | None,
    override: float | None,
    native_host: float | None,
    plan_host: float | None,
    python_host: float | None,
    margin: float,
) -> None:
    found = tables.Cell(native, override, native_host, plan_host, python_host, None, None)
    for column in (PLAN, PYTHON):
        one, other = rule.times(found, column)
        host = plan_host if column == PLAN and plan_host else python_host
        if one is None or other is None or host is None:
            assert not rule.pays(found, column, margin)
        else:
            expected = one >= other * (1 + margin) and one >= host * max(
                1 + margin, 1 + rule.HOST_MARGIN
            )
            assert rule.pays(found, column, margin) == expected


def grid(
    *cells: dict[str, Any], steps: int = 1, margin: float = rule.MARGIN, **declared: Any
) -> Grid:
    features = {"rows": {"steps": steps}, "dtype": "exact"}
    found = read(h200(*cells, features=features), crossover(**declared))
    return rule.grid_of([(found, margin)])


def taken(found: Grid, rows: list[int], dtype: torch.dtype = torch.float32) -> list[bool]:
    return [found.takes([each, dtype], PLAN) for each in rows]


def test_a_cell_between_two_follows_them_where_they_agree() -> None:
    found = grid(cell(16), cell(64), cell(256, override=20), cell(1024, override=20), cell(4096))
    rows = [16, 32, 63, 64, 128, 256, 512, 1024, 2048, 4096]
    assert taken(found, rows) == [True] * 4 + [False] * 5 + [True]


def test_outside_of_what_was_measured_it_declines() -> None:
    found = grid(cell(16), cell(64))
    assert taken(found, [0, 15, 16, 127, 128]) == [False, False, True, True, False]
    assert taken(found, [16], torch.float16) == [False]


def test_an_open_ended_feature_goes_on_as_at_its_ends() -> None:
    cells = cell(16), cell(64, override=20), cell(32, "float16")
    found = grid(*cells, open_ended=["rows"])
    assert taken(found, [0, 1, 16, 32, 64, 2**62]) == [False, True, True, False, False, False]
    # Nothing is known of what lies between what was measured and an end.
    assert taken(found, [1, 16, 32, 64, 2**62], torch.float16) == [
        *(False, False, True),
        *(False, False),
    ]
    assert taken(found, [16], torch.float64) == [False]


@pytest.mark.parametrize("seed", range(40))
def test_the_core_fills_a_grid_as_python_does(seed: int) -> None:
    if loader.in_use() is None:
        pytest.skip("there is no compiled core")
    rng = random.Random(seed)
    counts = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    axes: list[Axis] = [
        ExactAxis(range(count)) if rng.random() < 0.3 else SteppedAxis(1, 1, 2 ** (count - 1))
        for count in counts
    ]
    cells = bytearray(
        rng.choice([0, 1, 3, 7]) if rng.random() < 0.3 else rule._UNDECIDED
        for _ in range(math.prod(counts))
    )
    in_python = cells.copy()
    rule._fill_here(in_python, axes, operator.and_)
    rule._fill(cells, axes, operator.and_)
    assert cells == in_python


@pytest.mark.parametrize(
    "counts",
    [
        *([0], [2], [1, 0], [0, 1], [1, 2]),
        [3, 0xAAAAAAAAAAAAAAAB],  # whose product is 1 in 64 bits
        [2**32, 2**32],
    ],
)
def test_the_core_refuses_counts_that_are_not_the_cells(counts: list[int]) -> None:
    core = loader.in_use()
    if core is None:
        pytest.skip("needs the compiled core")
    with pytest.raises(ValueError, match="cells"):
        core.fill_grid(b"\xff", [(count, True) for count in counts])


def layered(*layers: tuple[list[dict[str, Any]], float], **declared: Any) -> Grid:
    return rule.grid_of(
        [(read(h200(*cells), crossover(**declared)), margin) for cells, margin in layers]
    )


def test_a_table_for_a_few_calls_leaves_the_rest_to_the_next() -> None:
    of_a_script = [cell(64, override=20), cell(8, "float16")]
    shipped = [cell(16), cell(64), cell(256), cell(1024, override=20)]
    found = layered((of_a_script, rule.MARGIN), (shipped, rule.MARGIN))
    # It says that 64 rows are slower, so that 32 and 128 have neighbours that disagree.
    assert taken(found, [16, 32, 64, 128, 256, 512, 1024]) == [
        True,
        *[False] * 3,
        True,
        *[False] * 2,
    ]
    assert taken(found, [8], torch.float16) == [True]


def test_another_device_s_table_decides_where_this_one_s_cells_disagree() -> None:
    ours = [cell(16, override=20), cell(256), cell(1024)]
    others = [cell(32, override=20), cell(64), cell(4096, override=9.3)]
    found = layered((ours, rule.MARGIN), (others, rule.OTHER_DEVICE_MARGIN))
    rows = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    # 128 rows: the other device's lie between 64, which it takes, and 4096, which it does not.
    assert taken(found, rows) == [False, False, True, False, True, True, True, False, False]


def test_an_open_end_is_that_of_the_table_that_goes_further() -> None:
    few, more = [cell(64)], [cell(16), cell(1024, override=20)]
    alone = layered((few, rule.MARGIN), open_ended=["rows"])
    assert taken(alone, [1, 64, 2**20]) == [True, True, True]
    found = layered((few, rule.MARGIN), (more, rule.MARGIN), open_ended=["rows"])
    assert taken(found, [1, 64, 2**20]) == [True, True, False]


#: By rows, whether no way pays, a launch plan alone, or every way.
WAYS = st.dictionaries(st.integers(0, 8), st.sampled_from([0, 1, 3]), min_size=1)
MARGINS = st.sampled_from([rule.MARGIN, rule.OTHER_DEVICE_MARGIN])
TIMES: dict[int, dict[str, float]] = {0: {"override": 20}, 1: {"python_host": 20}, 3: {}}


def cells_by_ways(ways: dict[int, int], dtype: str = "float32") -> list[dict[str, Any]]:
    return [cell(2**at, dtype, **TIMES[each]) for at, each in ways.items()]


@relaxed
@given(WAYS, WAYS, WAYS, MARGINS, st.booleans())
def test_a_table_takes_nothing_from_what_another_one_decides_alone(
    first: dict[int, int], second: dict[int, int], other: dict[int, int], margin: float, ends: bool
) -> None:
    """Where one of them has nothing of a dtype."""
    declared = {"open_ended": ["rows"] if ends else []}
    both = [*cells_by_ways(first), *cells_by_ways(other, "float64")]
    behind = [*cells_by_ways(second, "float16"), *cells_by_ways(other, "float64")]
    alone = [layered((each, rule.MARGIN), **declared) for each in (both, behind)]
    found = layered((both, rule.MARGIN), (behind, margin), **declared)
    for column in (PLAN, PYTHON):
        for rows in [2**at for at in range(12)]:
            for dtype, expected in zip((torch.float32, torch.float16), alone, strict=True):
                values = [rows, dtype]
                assert found.takes(values, column) == expected.takes(values, column)


@relaxed
@given(WAYS, WAYS, MARGINS)
@example({0: 1, 4: 3}, {2: 0}, rule.OTHER_DEVICE_MARGIN)  # from Python it pays in one of them
def test_what_the_first_table_measured_is_decided_by_it(
    first: dict[int, int], second: dict[int, int], margin: float
) -> None:
    """Of another device's, so is what lies between two of its cells that agree."""
    found = layered((cells_by_ways(first), rule.MARGIN), (cells_by_ways(second), margin))
    for at, way in first.items():
        assert taken(found, [2**at]) == [bool(way & 1)]
    if margin != rule.MARGIN:
        for (low, one), (high, other) in itertools.pairwise(sorted(first.items())):
            if one & 1 == other & 1:
                between = [2**at for at in range(low, high)]
                assert taken(found, between) == [bool(one & 1)] * len(between)
    # Beyond its cells the second one decides.
    beyond = {at: way for at, way in second.items() if not min(first) <= at <= max(first)}
    for at, way in beyond.items():
        assert taken(found, [2**at]) == [bool(way & 1)]


def test_values_of_an_exact_feature_have_nothing_in_between() -> None:
    found = grid(cell(16), cell(64), cell(16, "float16"))
    assert taken(found, [16, 32, 64], torch.float16) == [True, False, False]


def test_steps_divide_octaves() -> None:
    found = grid(cell(16), cell(24, override=20), cell(32), steps=2)
    assert taken(found, [16, 23, 24, 31, 32, 47, 48]) == [
        *(True, True, False, False),
        *(True, True, False),
    ]


def test_a_larger_margin_takes_less() -> None:
    cells = cell(16, override=9.3), cell(64)
    assert taken(grid(*cells), [16, 64]) == [True, True]
    assert taken(grid(*cells, margin=rule.OTHER_DEVICE_MARGIN), [16, 64]) == [False, True]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({}, True),
        ({"inductor": 8.0}, False),
        ({"opaque": 8.0}, False),
        ({"inductor": 8.0, "opaque": 9.0}, False),
    ],
    ids=["not measured", "opaque failed", "inductor failed", "slower"],
)
def test_a_cell_without_times_of_graphs_follows_its_neighbours_there(
    times: dict[str, float], expected: bool
) -> None:
    opaque = {"inductor": 9.0, "opaque": 8.0}
    found = grid(cell(16, **opaque), cell(32, **times), cell(64, **opaque))
    assert [found.takes([rows, torch.float32], GRAPH) for rows in (16, 32, 64)] == [
        *(True, expected, True),
    ]


OPAQUE = {"inductor": 9.0, "opaque": 8.0}


@pytest.mark.parametrize("taken_by_neighbours", [True, False])
def test_a_cell_with_times_of_graphs_alone_follows_its_neighbours_as_to_calls(
    taken_by_neighbours: bool,
) -> None:
    neighbours = {"override": 5.0 if taken_by_neighbours else 20.0}
    found = grid(cell(16, **neighbours), cell(32, **GRAPHS_ONLY, **OPAQUE), cell(64, **neighbours))
    decided = [found.takes([32, torch.float32], column) for column in (PLAN, PYTHON, GRAPH)]
    assert decided == [taken_by_neighbours] * 3


def test_a_graph_is_opaque_only_where_calls_are_taken() -> None:
    slow = {"override": 20.0}
    found = grid(cell(16, **OPAQUE), cell(32, **slow), cell(64, **OPAQUE))
    assert [found.takes([rows, torch.float32], GRAPH) for rows in (16, 32, 64)] == [
        *(True, False, True),
    ]


CELLS = st.dictionaries(
    st.tuples(st.integers(0, 4), st.integers(0, 4)), st.booleans(), min_size=1, max_size=12
)


@relaxed
@given(CELLS)
def test_in_two_dimensions_a_filled_cell_has_a_taken_one_on_two_sides(
    measured: dict[tuple[int, int], bool],
) -> None:
    declared = Crossover(a=when.numel("self"), b=when.size("self", 0))
    cells = [
        cell(1, override=5 if takes else 20) | {"at": [2**a, 2**b]}
        for (a, b), takes in measured.items()
    ]
    features = {"a": {"steps": 1}, "b": {"steps": 1}}
    content = json.dumps(table({"fast": entry(*cells, features=features)}, "NVIDIA H200"))
    found = entry_of(tables.parse(H200, content), "fast", declared)
    assert found is not None
    filled = rule.grid_of([(found, rule.MARGIN)])
    # The same rule with the features in the other order.
    swapped = Crossover(b=when.size("self", 0), a=when.numel("self"))
    turned = [each | {"at": each["at"][::-1]} for each in cells]
    features = {"b": {"steps": 1}, "a": {"steps": 1}}
    content = json.dumps(table({"fast": entry(*turned, features=features)}, "NVIDIA H200"))
    other = entry_of(tables.parse(H200, content), "fast", swapped)
    assert other is not None
    refilled = rule.grid_of([(other, rule.MARGIN)])

    def takes(a: int, b: int) -> bool:
        return filled.takes([2**a, 2**b], PLAN)

    for a in range(5):
        for b in range(5):
            assert takes(a, b) == refilled.takes([2**b, 2**a], PLAN)
            if (a, b) in measured:
                assert takes(a, b) is measured[a, b]
            elif takes(a, b):
                along_a = any(takes(x, b) for x in range(a)) and any(
                    takes(x, b) for x in range(a + 1, 5)
                )
                along_b = any(takes(a, x) for x in range(b)) and any(
                    takes(a, x) for x in range(b + 1, 5)
                )
                assert along_a or along_b
