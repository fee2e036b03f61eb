"""What `opgraft list` and `opgraft doctor` say of crossover tables."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

import opgraft
from opgraft import cli, tuning
from opgraft.cli import doctor
from opgraft.crossover import rule, sources, tables
from opgraft.crossover.decisions import InForce
from opgraft.crossover.models import Model
from opgraft.crossover.sources import Source
from tests.crossover.tables import CPU, cell, crossover, entry, table, write
from tests.crossover.test_routing import register


def measured(days: int = 0, **versions: str) -> dict[str, Any]:
    date = datetime.date.today() - datetime.timedelta(days)
    versions = {"torch": str(torch.__version__)} | versions
    return entry(cell(4), measured={"date": date.isoformat()} | versions)


def listed() -> dict[str, Any]:
    done = click.testing.CliRunner().invoke(cli.opgraft, ["list", "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def checks() -> list[tuple[str, str]]:
    return [(each.level, each.text) for each in doctor._tables()]


def test_list_says_which_table_is_in_force_and_how_old(user_tables: Path) -> None:
    path = write(user_tables, table({"fast": measured(days=3)}))
    register()
    found = listed()
    (row,) = found["overrides"][0]["tables"]
    assert (row["file"], row["owner"], row["days_old"]) == (str(path), "user", 3)
    assert (row["device"], row["of"]) == (CPU, "this device")
    assert found["tables"] == tuning.digest() != ""
    text = click.testing.CliRunner().invoke(cli.opgraft, ["list"]).output
    assert f"{path.name} (your own, 3 days old)" in " ".join(text.split())


def test_list_and_explain_name_a_table_behind_the_first(user_tables: Path, tmp_path: Path) -> None:
    own = write(user_tables, table({"fast": entry(cell(4))}))
    shipped = write(tmp_path / "shipped", table({"fast": entry(cell(64, override=20), cell(4096))}))
    register(crossover=crossover(tables=tmp_path / "shipped"))
    (row,) = listed()["overrides"][0]["tables"]
    assert (row["file"], row["behind"]) == (str(own), [str(shipped)])
    text = str(opgraft.explain("aten::_softmax", torch.ones(64, 4), 1, False))
    assert "slower from Python here: 20 us against native's 10 (rows 64" in text
    open_cell = str(opgraft.explain("aten::_softmax", torch.ones(512, 4), 1, False))
    assert f"{own.name}, measured 2026-11-24 and {shipped.name}" in open_cell


def why_declined(
    *layers: tuple[float, list[dict[str, Any]]], rows: int, **declared: Any
) -> tuple[str, str]:
    """What is told of a call from Python, by tables of devices A, B, ..., with their margins."""
    found = []
    for name, (margin, cells) in zip("ABC", layers, strict=False):
        read = tables.parse(
            Path(f"{name.lower()}.json"), json.dumps(table({"f": entry(*cells)}, name))
        )
        part = tables.entry_of(read, "f", crossover(**declared))
        assert part is not None
        found.append(Source(read, part, "author", margin, "this device"))
    in_force = InForce(Model("A"), tuple(found))
    values = rows, torch.float32
    assert not in_force.grid.takes(values, rule.PYTHON)
    told = in_force.failure(["rows", "dtype"], values, rule.PYTHON)
    return told.part, told.saw


def test_a_cell_that_pays_in_a_table_behind_is_not_why_a_call_is_declined() -> None:
    first = [cell(4, override=20), cell(64, override=20)]
    part, values = why_declined((0.05, first), (0.1, [cell(16)]), rows=16)
    assert part == "not measured here, and not faster in all measured cells around it"
    assert "a.json" in values and "b.json" not in values


def test_the_outermost_cell_says_why_a_call_beyond_an_open_end_is_declined() -> None:
    first, second = [cell(4, override=20)], [cell(64, "float16")]
    part, values = why_declined((0.05, first), (0.05, second), rows=64, open_ended=["rows"])
    assert part == "slower from Python here: 20 us against native's 10"
    assert values == "rows 64, float32; a.json, measured 2026-11-24"


def test_list_has_a_hash_of_what_is_in_force(user_tables: Path) -> None:
    write(user_tables, table({"fast": measured()}))
    register()
    first = tuning.digest()
    write(user_tables, table({"fast": entry(cell(8))}))
    assert tuning.digest() == first  # tables are read once
    sources.forget()
    register()
    assert tuning.digest() not in ("", first)


def test_an_override_without_a_crossover_has_no_table() -> None:
    register(crossover=None)
    found = listed()
    assert (found["overrides"][0]["tables"], found["tables"]) == ([], "")
    assert checks() == []


def test_doctor_says_which_table_is_in_force(user_tables: Path) -> None:
    path = write(user_tables, table({"fast": measured(days=400)}))
    register()
    assert checks() == [("ok", f"fast (aten::_softmax): {path.name} (your own, 400 days old)")]


def test_doctor_says_that_there_is_none() -> None:
    register()
    ((level, text),) = checks()
    assert level == "note"
    assert text == f"fast (aten::_softmax): none for {CPU}; they decline every call"


def test_doctor_names_what_was_refused(user_tables: Path) -> None:
    path = write(user_tables, "{")
    register()
    (level, text), _ = checks()
    assert level == "problem"
    assert str(path) in text and "damaged" in text


@pytest.mark.parametrize(
    ("versions", "dsl", "expected"),
    [
        ({"torch": "2.0.0"}, None, "torch 2.0.0 (here"),
        ({"triton": "1.0"}, "triton", "triton 1.0 (here"),
        ({"triton": "1.0"}, None, None),  # it is written in another DSL
    ],
)
def test_a_table_of_another_version_holds_and_doctor_says_so(
    user_tables: Path, versions: dict[str, str], dsl: str | None, expected: str | None
) -> None:
    write(user_tables, table({"fast": measured(**versions)}))
    override = register(dsl=dsl)
    torch.softmax(torch.ones(4, 4), 1)
    assert override.hits == 1
    notes = [text for level, text in checks() if level == "note"]
    assert len(notes) == (expected is not None)
    assert expected is None or expected in notes[0]


def test_a_table_of_another_version_of_the_kernel_does_not_hold(user_tables: Path) -> None:
    write(user_tables, table({"fast": measured()}))
    override = register(
        crossover=opgraft.Crossover(version=2, **register().crossover.features)  # type: ignore[union-attr]
    )
    torch.softmax(torch.ones(4, 4), 1)
    assert (override.hits, override.misses) == (0, 1)
