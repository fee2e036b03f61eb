"""Which ways of running a call a table allows: by a launch plan, from Python, in a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import when
from opgraft.core import loader
from opgraft.ops.schema import resolve
from opgraft.pt2 import caches, policy
from opgraft.when import symbolic
from tests.crossover.tables import cell, crossover, entry, table, write
from tests.plan.conftest import doubled

needs_plans = pytest.mark.skipif(
    loader.in_use() is None, reason="launch plans need the compiled core"
)
#: Faster by a plan, and slower from Python.
BY_PLAN = {"python_host": 40.0}


def register(**keywords: Any) -> opgraft.Override:
    keywords = {"name": "fast", "crossover": crossover(), "launch_plan": True} | keywords
    # What launches a C function needs the core.
    impl = doubled if loader.in_use() is not None else lambda self, *_: 2 * self
    args = ("aten", "_softmax", "CPU", impl)
    return opgraft.register_op_override(*args, unconditional_override=True, **keywords)


def softmax(rows: int, times: int) -> None:
    for _ in range(times):
        torch.softmax(torch.ones(rows, 4), 1)


@needs_plans
def test_a_call_that_pays_by_a_plan_alone_is_native_s_until_it_has_one(user_tables: Path) -> None:
    write(user_tables, table({"fast": entry(cell(4, **BY_PLAN))}))
    override = register()
    softmax(4, 8)
    assert override.plans is not None
    assert override.plans.hits > 0
    assert override.misses > 0  # before
    assert override.hits + override.misses == 8


@needs_plans
def test_explain_says_that_it_pays_by_a_plan_alone(user_tables: Path) -> None:
    path = write(user_tables, table({"fast": entry(cell(4, **BY_PLAN))}))
    register()
    expected = (
        "in Python until its launch plan is recorded, which is slower from Python here: 40 us "
        f"against native's 10 (rows 4, float32; {path.name}, measured 2026-11-24)"
    )
    assert expected in str(opgraft.explain("aten::_softmax", torch.ones(4, 4), 1, False))


@needs_plans
def test_a_call_that_pays_from_python_runs_before_it_has_a_plan(user_tables: Path) -> None:
    write(user_tables, table({"fast": entry(cell(4))}))
    override = register()
    softmax(4, 8)
    assert (override.hits, override.misses) == (8, 0)


@needs_plans
def test_a_call_that_pays_no_way_is_declined(user_tables: Path) -> None:
    write(user_tables, table({"fast": entry(cell(4, override=20))}))
    override = register()
    softmax(4, 8)
    assert (override.hits, override.misses) == (0, 8)


def test_without_plans_what_counts_is_python_s_time(
    user_tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPGRAFT_PLANS", "0")
    write(user_tables, table({"fast": entry(cell(4, **BY_PLAN), cell(8))}))
    override = register()
    softmax(4, 2)
    assert (override.hits, override.misses) == (0, 2)
    softmax(8, 2)
    assert (override.hits, override.misses) == (2, 2)


def test_an_author_s_unplanned_wins(user_tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(user_tables, table({"fast": entry(cell(4, **BY_PLAN))}))
    override = register(unplanned=when.size("self", 1) >= 1)
    softmax(4, 8)
    assert (override.hits, override.misses) == (8, 0)


# ------------------------------------------------------------------ graphs

GELU = resolve("aten::gelu")


def gelu(**keywords: Any) -> opgraft.Override:
    def impl(self: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        return opgraft.native("aten::gelu")(self, approximate=approximate)

    keywords = {"name": "fast", "crossover": crossover()} | keywords
    return opgraft.register_op_override(
        "aten", "gelu", "CPU", impl, unconditional_override=True, **keywords
    )


IN_GRAPHS = {"inductor": 10.0, "opaque": 5.0}


def run(rows: int, *, dynamic: bool = False) -> None:
    torch._dynamo.reset()
    function = torch.compile(torch.nn.functional.gelu, fullgraph=True, dynamic=dynamic)
    function(torch.ones(rows, 4))


@pytest.mark.parametrize(
    ("times", "keywords", "hits"),
    [
        (IN_GRAPHS, {}, 1),
        ({}, {}, 0),  # not measured in graphs
        ({"inductor": 10.0, "opaque": 9.9}, {}, 0),
        (IN_GRAPHS, {"compile": "inductor"}, 0),  # the author's word wins
        ({}, {"compile": "opaque"}, 1),
        (IN_GRAPHS | {"override": 20.0}, {"compile": "opaque"}, 0),
    ],
)
def test_in_a_graph_it_is_opaque_where_it_is_faster_than_inductor(
    user_tables: Path, times: dict[str, float], keywords: dict[str, Any], hits: int
) -> None:
    write(user_tables, table({"fast": entry(cell(4, **times))}))
    override = gelu(**keywords)
    run(4)
    assert override.hits == hits


def test_sizes_that_no_cell_decides_are_inductor_s(user_tables: Path) -> None:
    write(user_tables, table({"fast": entry(cell(4, **IN_GRAPHS), cell(16, **IN_GRAPHS))}))
    override = gelu()
    run(4, dynamic=True)
    assert override.hits == 0
    run(4)
    assert override.hits == 1


def test_the_reason_is_told(user_tables: Path) -> None:
    write(user_tables, table({"fast": entry(cell(4, **IN_GRAPHS))}))
    override = gelu()
    call = GELU.bind((torch.ones(4, 4),), {})
    assert policy.resolve(override, call)[1] == "its table says that it is faster than Inductor"
    assert symbolic.of_override(override, call) == symbolic.HOLDS


def test_what_salts_compiled_graphs_depends_on_the_tables(user_tables: Path) -> None:
    def state(*cells: dict[str, Any], **declared: Any) -> str:
        from opgraft.crossover import sources

        write(user_tables, table({"fast": entry(*cells)}))
        sources.forget()
        gelu(crossover=crossover(**declared))
        return caches.registry_state()

    first, other = state(cell(4)), state(cell(4, native=11))
    assert first != other
    assert state(cell(4)) == first
    assert state(cell(4), open_ended=["rows"]) != first
