"""Calls at the CPU key, routed by tables that a test writes."""

from __future__ import annotations

import itertools
import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import packs, when
from opgraft.crossover import sources
from opgraft.crossover.decisions import Decisions
from opgraft.crossover.models import Model
from tests import python_router
from tests.crossover.tables import CPU, GRAPHS_ONLY, cell, crossover, entry, table, write

FASTER = dict[str, Any]()
SLOWER = {"override": 20.0}


def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return opgraft.native("aten::_softmax")(self, dim, half_to_float)


def register(pack: str | None = None, **keywords: Any) -> opgraft.Override:
    keywords = {"name": "fast", "crossover": crossover()} | keywords
    if keywords.get("cond") is None:
        keywords["unconditional_override"] = True
    args = ("aten", "_softmax", "CPU", impl)
    if pack is None:
        return opgraft.register_op_override(*args, **keywords)
    with packs.owning(pack):
        return opgraft.register_op_override(*args, **keywords)


def softmax(rows: int, dtype: torch.dtype = torch.float32) -> None:
    torch.softmax(torch.ones(rows, 4, dtype=dtype), 1)


def counts(override: opgraft.Override) -> tuple[int, int]:
    return override.hits, override.misses


@python_router.where_the_core_routes
def test_the_router_in_python_does_the_same() -> None:
    python_router.run_again(__file__, selected="not the_router_in_python")


def test_calls_are_taken_where_the_table_says_so(user_tables: Path) -> None:
    write(user_tables, table({"fast": entry(cell(4), cell(16), cell(64, **SLOWER))}))
    override = register()
    for rows in (4, 8, 31):
        softmax(rows)
    assert counts(override) == (3, 0)
    for rows in (3, 32, 64, 128):
        softmax(rows)
    softmax(4, torch.float64)
    assert counts(override) == (3, 5)


def test_booleans_and_exact_integers_are_features(user_tables: Path) -> None:
    features = {"dim": "exact", "half": "exact", "width": "exact"}
    cells = [cell(4) | {"at": [1, 0, 4]}, cell(4) | {"at": [-1, 0, 8]}]
    write(user_tables, table({"fast": entry(*cells, features=features)}))
    declared = opgraft.Crossover(
        dim=when.value("dim"),
        half=when.value("half_to_float"),
        width=when.size("self", -1),
        exact=["width"],
    )
    override = register(crossover=declared)
    for width, dim in ((4, 1), (8, -1), (4, -1), (8, 1), (5, 1)):
        torch.softmax(torch.ones(2, width), dim)
    assert counts(override) == (2, 3)


def test_the_condition_must_hold_as_well(user_tables: Path) -> None:
    write(user_tables, table({"fast": entry(cell(4), cell(64))}))
    override = register(cond=when.numel("self") // when.size("self", -1) >= 16)
    for rows in (4, 16, 128):
        softmax(rows)
    assert counts(override) == (1, 2)


def test_a_condition_in_python_must_hold_as_well(user_tables: Path) -> None:
    write(user_tables, table({"fast": entry(cell(4), cell(64))}))
    override = register(cond=lambda self, dim, half_to_float: self.shape[0] >= 16)
    for rows in (4, 16, 128):
        softmax(rows)
    assert counts(override) == (1, 2)


def test_without_a_table_it_declines_and_one_line_names_the_mend(
    caplog: pytest.LogCaptureFixture,
) -> None:
    override = register()
    with caplog.at_level(logging.WARNING, "opgraft"):
        softmax(4)
        softmax(8)
    assert counts(override) == (0, 2)
    (line,) = [record.message for record in caplog.records if "table" in record.message]
    assert CPU in line and "opgraft tune" in line


def test_explain_says_what_was_measured(user_tables: Path) -> None:
    path = write(user_tables, table({"fast": entry(cell(16384, override=43.1, native=39))}))
    register()
    text = str(opgraft.explain("aten::_softmax", torch.ones(16400, 4), 1, False))
    expected = (
        "declines: slower from Python here: 43.1 us against native's 39 (rows 2**14, float32; "
        f"{path.name}, measured 2026-11-24)"
    )
    assert expected in text


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([cell(4, override=9.9)], "not 3% faster from Python here: 9.9 us against native's 10"),
        (
            [cell(4, python_host=9.2)],
            "not 12% faster from Python here, as the host's times have to be: 9.2 us on the host "
            "against native's 10",
        ),
        (  # what the device takes is longer, and alone it would do
            [cell(4, override=9.3, python_host=9.2)],
            "not 12% faster from Python here, as the host's times have to be: 9.2 us on the host "
            "against native's 10",
        ),
        ([cell(4, override=9.9, python_host=9.8)], "not 3% faster from Python here: 9.9 us"),
        ([cell(4, python_host=None)], "not measured from Python here (rows 4"),
        ([cell(16)], "not measured here (rows 5, float32;"),
        ([cell(2), cell(8, **SLOWER)], "not measured here, and not faster in all measured cells"),
        ([cell(4, **GRAPHS_ONLY)], "not measured here, and not faster in all measured cells"),
    ],
)
def test_explain_says_why_a_table_declines(
    user_tables: Path, cells: list[dict[str, Any]], expected: str
) -> None:
    write(user_tables, table({"fast": entry(*cells)}))
    register()
    assert expected in str(opgraft.explain("aten::_softmax", torch.ones(5, 4), 1, False))


H200, H100 = Model("NVIDIA H200", (9, 0)), Model("NVIDIA H100 80GB HBM3", (9, 0))
#: What a comparison says.
SENTENCE = re.compile(
    r"(?:slower|not (?P<share>\d+)% faster)(?: from Python| in graphs)? here"
    r"(?:, as the host's times have to be)?: (?P<ours>[\d.]+) us(?: on the host)? "
    r"against native's (?P<native>[\d.]+)$"
)


@pytest.mark.parametrize("model", [H200, H100], ids=["its own table", "another device's"])
def test_what_is_told_of_a_declined_cell_is_so(model: Model, tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [2**octave for octave in range(60)]
    names = ("native", "override", "native_host", "plan_host", "python_host", "inductor", "opaque")
    # Around each border, of 3, 10 and 12 per cent.
    cells = [cell(each, **{name: round(rng.uniform(10, 12), 2) for name in names}) for each in rows]
    write(tmp_path, table({"fast": entry(*cells)}, H200.name, capability=[9, 0]), H200.name)
    in_force = Decisions("fast", "user", crossover(tables=tmp_path)).in_force(model)
    assert in_force is not None
    told = set()
    for number, column in itertools.product(rows, range(3)):
        values = (number, torch.float32)
        if in_force.grid.takes(values, column):
            continue
        part = in_force.failure(["rows", "dtype"], values, column).part
        found = SENTENCE.search(part)
        assert found, part
        border = 1 + int(found["share"]) / 100 if found["share"] else 1.0
        assert float(found["native"]) < float(found["ours"]) * border, part
        told.add(part[: found.end("share") if found["share"] else len("slower")])
    margin = in_force.source.margin
    assert {"slower", f"not {margin:.0%}"[:-1], "not 12"} <= told


def test_explain_says_that_there_is_no_table() -> None:
    register()
    text = str(opgraft.explain("aten::_softmax", torch.ones(5, 4), 1, False))
    assert f"declines: not measured here (no table for {CPU}; opgraft tune makes one)" in text


# ------------------------------------------------------------------ where tables come from


def test_the_user_s_table_comes_before_the_author_s(tmp_path: Path, user_tables: Path) -> None:
    declared = crossover(tables=tmp_path / "shipped")
    write(tmp_path / "shipped", table({"fast": entry(cell(4))}))
    override = register(crossover=declared)
    softmax(4)
    assert counts(override) == (1, 0)
    write(user_tables, table({"fast": entry(cell(4, **SLOWER))}))
    sources.forget()
    override = register(crossover=declared)
    softmax(4)
    assert counts(override) == (0, 1)


def test_a_table_without_the_override_leaves_it_to_the_next(
    tmp_path: Path, user_tables: Path
) -> None:
    write(user_tables, table({"other": entry(cell(4, **SLOWER))}))
    write(tmp_path / "shipped", table({"fast": entry(cell(4))}))
    override = register(crossover=crossover(tables=tmp_path / "shipped"))
    softmax(4)
    assert counts(override) == (1, 0)


def test_the_user_has_a_folder_for_each_pack(user_tables: Path) -> None:
    write(user_tables.parent / "norms", table({"fast": entry(cell(4))}))
    write(user_tables, table({"fast": entry(cell(4, **SLOWER))}))
    override = register(pack="norms")
    softmax(4)
    assert counts(override) == (1, 0)


REFUSED = {
    "damaged": "{",
    "another version": table({"fast": entry(cell(4))}, format=1),
    "another device": table({"fast": entry(cell(4))}, "NVIDIA H200"),
    "absurd": table({"fast": entry(cell(4, native=-1))}),
    "another kernel": table({"fast": entry(cell(4), version=2)}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_table_is_told_once_and_the_next_counts(
    tmp_path: Path, user_tables: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    path = write(user_tables, REFUSED[what])
    write(tmp_path / "shipped", table({"fast": entry(cell(4))}))
    override = register(crossover=crossover(tables=tmp_path / "shipped"))
    with caplog.at_level(logging.WARNING, "opgraft"):
        softmax(4)
        softmax(5)
    assert counts(override) == (2, 0)
    (line,) = [record.message for record in caplog.records if "table" in record.message]
    assert str(path) in line and "\n" not in line


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_what_others_may_write_is_refused(
    user_tables: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    path = write(user_tables, table({"fast": entry(cell(4))}))
    path.chmod(mode)
    override = register()
    with caplog.at_level(logging.WARNING, "opgraft"):
        softmax(4)
    assert counts(override) == (0, 1)
    assert any(f"others may write to {path}" in record.message for record in caplog.records)


def test_an_author_s_table_that_anybody_may_write_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "shipped", table({"fast": entry(cell(4))}))
    path.chmod(0o646)
    override = register(crossover=crossover(tables=tmp_path / "shipped"))
    softmax(4)
    assert counts(override) == (0, 1)


def test_tables_are_read_once(user_tables: Path) -> None:
    path = write(user_tables, table({"fast": entry(cell(4))}))
    override = register()
    softmax(4)
    path.unlink()
    softmax(4)
    softmax(5, torch.float32)
    assert counts(override) == (3, 0)


# ------------------------------------------------------------------ registration


@pytest.mark.parametrize(
    ("declare", "expected"),
    [
        (lambda: opgraft.Crossover(), "names no feature"),
        (lambda: opgraft.Crossover(rows=5), "a feature is a number"),
        (lambda: opgraft.Crossover(rows=when.ndim("self") > 1), "a feature is a number"),
        (lambda: opgraft.Crossover(dim=when.value("dim")), "must be about a tensor"),
        (lambda: crossover(exact=["heads"]), "the features are rows, dtype"),
        (lambda: crossover(open_ended=["heads"]), "the features are rows, dtype"),
        (lambda: crossover(open_ended="dtype"), "dtype is exact, and has no ends"),
        (lambda: crossover(open_ended="rows", exact="rows"), "rows is exact, and has no ends"),
        (lambda: crossover(version="1"), "give an integer"),
        (lambda: crossover(calls=[1]), "give a function"),
        (lambda: register(crossover="fast"), "give an opgraft.Crossover"),
        (lambda: register(crossover=crossover(rows=when.size("x", 0))), "no argument 'x'"),
        (
            lambda: register(crossover=crossover(rows=when.device_capability("self"))),
            "is a capability",
        ),
        (lambda: register(crossover=crossover(rows=when.numel("self") + 2**64)), "64 bits"),
    ],
)
def test_what_cannot_work_is_an_error(declare: Any, expected: str) -> None:
    with pytest.raises(opgraft.RegistrationError, match=expected):
        declare()


def test_a_crossover_cannot_be_changed() -> None:
    declared = crossover()
    with pytest.raises(AttributeError, match="make another one"):
        declared.version = 2


def test_verify_runs_calls_that_no_table_takes() -> None:
    override = register(
        samples=lambda device: [(torch.ones(4, 4, device=device), 1, False)], on_error="raise"
    )
    report = opgraft.verify(
        "aten::_softmax", dispatch_key="CPU", name="fast", checks=["hit"], opinfo=False
    )
    assert override.hits > 0, str(report)
    softmax(4)
    assert override.misses > 0


def log_softmax(**keywords: Any) -> opgraft.Override:
    """An override of another op than the measured one, whose part of the tables decides here."""
    native = opgraft.native("aten::_log_softmax")
    return opgraft.register_op_override(
        *("aten", "_log_softmax", "CPU", lambda self, dim, to_float: native(self, dim, to_float)),
        name="shared",
        unconditional_override=True,
        **{"crossover": crossover(measured_as="fast")} | keywords,
    )


def test_another_override_s_part_of_the_tables_decides(user_tables: Path) -> None:
    write(user_tables, table({"fast": entry(cell(4), cell(64, **SLOWER))}))
    measured, shared = register(), log_softmax()
    for rows in (4, 64):
        softmax(rows)
        torch.log_softmax(torch.ones(rows, 4), 1)
    assert counts(measured) == counts(shared) == (1, 1)


def test_another_override_s_part_of_the_tables_must_have_the_same_features(
    user_tables: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(user_tables, table({"fast": entry(cell(4))}))
    other = {"columns": when.size("self", -1), "dtype": when.dtype_of("self")}
    shared = log_softmax(crossover=opgraft.Crossover(measured_as="fast", **other))
    torch.log_softmax(torch.ones(4, 4), 1)
    assert counts(shared) == (0, 1)
    (message,) = {each.getMessage() for each in caplog.records if path.name in each.getMessage()}
    assert "columns" in message
