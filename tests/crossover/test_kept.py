"""Grids that a process keeps for those after it: the same decisions, from the same tables alone."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opgraft import when
from opgraft.crossover import kept, sources
from opgraft.crossover.decisions import Decisions
from opgraft.crossover.models import Model
from opgraft.when.grid import ExactAxis, Grid, SteppedAxis
from tests.crossover.tables import cell, crossover, entry, table, write

H200, H100 = Model("NVIDIA H200", (9, 0)), Model("NVIDIA H100 80GB HBM3", (9, 0))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "grids"


def write_table(folder: Path, *cells: dict[str, Any], model: Model = H200, **changes: Any) -> None:
    content = table({"fast": entry(*cells, **changes)}, model.name, capability=[9, 0])
    write(folder, content, model.name)
    sources.forget()


def decisions(folder: Path, **declared: Any) -> Decisions:
    """As another process has them."""
    sources.forget()
    return Decisions("fast", "user", crossover(tables=folder, **declared))


def same(one: Grid | None, other: Grid | None) -> bool:
    if one is None or other is None:
        return one is other
    axes = [[axis.compiled() for axis in each.axes] for each in (one, other)]
    return one.cells == other.cells and axes[0] == axes[1]


def is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, **declared: Any) -> bool:
    """Whether a process finds a grid, which is what it would make itself."""
    found = decisions(folder, **declared)
    with monkeypatch.context() as patch:
        patch.setattr(Decisions, "in_force", lambda self, model: None)
        grid = found.grid_on(H200)
    if grid is None:
        return False
    in_force = decisions(folder, **declared).in_force(H200)
    assert in_force is not None and same(grid, in_force.grid)
    return True


def test_another_process_finds_what_the_first_one_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path, cell(4), cell(64))
    assert not is_kept(tmp_path, monkeypatch)
    first = decisions(tmp_path).grid_on(H200)
    assert first is not None and any(first.cells)
    assert is_kept(tmp_path, monkeypatch)


def test_no_table_is_no_grid(tmp_path: Path, cache: Path) -> None:
    assert decisions(tmp_path).grid_on(H200) is None
    assert not cache.exists()


CHANGES: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "a cell": lambda shipped, user: write_table(shipped, cell(4), cell(32)) or {},
    "a table of the user's": lambda shipped, user: write_table(user, cell(8)) or {},
    "another device's table": lambda shipped, user: write_table(shipped, cell(8), model=H100) or {},
    "no table": lambda shipped, user: (shipped / "nvidia_h200.json").unlink() or {},
    "the version": lambda shipped, user: {"version": 2},
    "an open end": lambda shipped, user: {"open_ended": ["rows"]},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_grid_of_other_tables_or_declarations_is_not_taken(
    change: str, user_tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    write_table(shipped, cell(4), cell(64))
    decisions(shipped).grid_on(H200)
    declared = CHANGES[change](shipped, user_tables)
    assert not is_kept(shipped, monkeypatch, **declared)
    made = decisions(shipped, **declared).grid_on(H200)
    in_force = decisions(shipped, **declared).in_force(H200)
    assert same(made, in_force and in_force.grid)


def test_a_grid_is_not_kept_as_one_of_tables_that_were_written_after_it_read_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path, cell(4))
    found = decisions(tmp_path)
    assert found.digest  # of what a compilation is told: it reads the tables
    write_table(tmp_path, cell(4), cell(64))
    assert found.grid_on(H200) is not None
    assert not is_kept(tmp_path, monkeypatch)


def test_the_tables_are_those_of_where_a_process_was_when_it_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder leads elsewhere after a change of the working directory."""
    for name, rows in {"one": 4, "other": 64}.items():
        write_table(tmp_path / name / "tables", cell(rows))
    monkeypatch.chdir(tmp_path / "one")
    found = decisions(Path("tables"))
    assert found.digest
    monkeypatch.chdir(tmp_path / "other")
    assert found.grid_on(H200) is not None
    assert not is_kept(tmp_path / "other" / "tables", monkeypatch)


@pytest.mark.parametrize("code", ["_CODE", "_core"])
def test_a_grid_of_other_code_is_not_taken(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path, cell(4))
    decisions(tmp_path).grid_on(H200)
    another = "of another opgraft" if code == "_CODE" else lambda: ["another"]
    monkeypatch.setattr(kept, code, another)
    assert not is_kept(tmp_path, monkeypatch)


def test_a_grid_of_another_torch_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path, cell(4))
    decisions(tmp_path).grid_on(H200)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert not is_kept(tmp_path, monkeypatch)


def test_a_grid_with_a_dtype_that_there_is_not_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is refused then, as if no grid were kept."""
    write_table(tmp_path, cell(4, "float8_e5m2"))
    assert decisions(tmp_path).grid_on(H200) is not None
    monkeypatch.delattr(torch, "float8_e5m2")
    assert decisions(tmp_path).grid_on(H200) is None


def test_code_is_that_which_was_imported_and_not_what_an_upgrade_left_in_its_place(
    tmp_path: Path,
) -> None:
    """A process that began before an upgrade makes grids as the former version does."""
    program = """
import pathlib, shutil, sys
package = pathlib.Path(sys.argv[1])
from opgraft.crossover import kept
assert pathlib.Path(kept.__file__).is_relative_to(package)
before = kept._hash_of_code()
rule = package / "opgraft/crossover/rule.py"
rule.write_text(rule.read_text() + "# changed")
assert kept._hash_of_code() != before and kept._CODE == before
"""
    package = Path(kept.__file__).parents[1]
    shutil.copytree(package, tmp_path / "opgraft", ignore=shutil.ignore_patterns("*.so", "csrc"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OPGRAFT_PACKS": ""}
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, env=environment, check=True, cwd=tmp_path)


def test_where_the_code_cannot_be_read_each_process_makes_its_own(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_CODE", None)
    write_table(tmp_path, cell(4))
    assert decisions(tmp_path).grid_on(H200) is not None
    assert not cache.exists()


def test_what_has_the_same_part_of_a_table_has_a_grid_of_its_own(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have one name in tables, and would overwrite each other's."""
    write_table(tmp_path, cell(4))
    every: list[dict[str, Any]] = [
        {},
        {"measured_as": "fast"},
        {"measured_as": "fast", "rows": when.numel("self")},
        {"rows": when.numel("self")},  # of another op, by the same name
    ]
    for _ in range(2):
        for declared in every:
            decisions(tmp_path, **declared).grid_on(H200)
    assert len(list(cache.iterdir())) == len(every)
    for declared in every:
        assert is_kept(tmp_path, monkeypatch, **declared)


@pytest.mark.parametrize("axis", [ExactAxis([torch.float32, torch.bfloat16]), ExactAxis([0, 1])])
def test_any_grid_is_read_as_it_was_written(axis: ExactAxis, tmp_path: Path) -> None:
    rng = random.Random(0)
    for number in range(50):
        lowest, steps = 2 ** rng.randrange(20), rng.choice([1, 2, 4, 8])
        highest = lowest * 2 ** rng.randrange(8)
        stepped = SteppedAxis(steps, lowest, highest, open_ended=rng.random() < 0.5)
        axes = [axis, stepped]
        grid = Grid(axes, rng.randbytes(axis.count * stepped.count))
        place = kept.Kept(f"of {number}", "user", crossover(), H200, [[], []])
        place.save(grid)
        assert same(place.load(), grid)


def test_whatever_byte_is_damaged_the_grid_is_made_anew(tmp_path: Path, cache: Path) -> None:
    write_table(tmp_path, cell(4), cell(64))
    right = decisions(tmp_path).grid_on(H200)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    place = kept.Kept(
        *("fast", "user", crossover(tables=tmp_path), H200),
        sources.hashes(sources.folders("user", crossover(tables=tmp_path))),
    )
    assert same(place.load(), right)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert place.load() is None, at
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert same(decisions(tmp_path).grid_on(H200), right)


def test_what_others_could_have_written_is_not_taken(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path, cell(4))
    decisions(tmp_path).grid_on(H200)
    (path,) = cache.iterdir()
    path.chmod(0o622)
    assert not is_kept(tmp_path, monkeypatch)


def test_nothing_is_kept_where_no_process_would_take_it(tmp_path: Path, cache: Path) -> None:
    """Each one would write all of its grids again, in place of reading them."""
    write_table(tmp_path, cell(4))
    cache.parent.mkdir()
    cache.parent.chmod(0o770)
    for _ in range(2):
        assert decisions(tmp_path).grid_on(H200) is not None
    assert not any(cache.iterdir())
    cache.parent.chmod(0o700)
    assert decisions(tmp_path).grid_on(H200) is not None
    assert any(cache.iterdir())


def test_without_a_place_to_keep_it_a_grid_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "file"))
    write_table(tmp_path / "shipped", cell(4))
    for _ in range(2):
        assert decisions(tmp_path / "shipped").grid_on(H200) is not None


@pytest.mark.parametrize("what", ["another device's", "refused"])
def test_a_grid_of_tables_that_each_process_is_to_tell_of_is_not_kept(
    what: str, tmp_path: Path, cache: Path
) -> None:
    write_table(tmp_path, cell(4), model=H100)
    if what == "refused":
        write_table(tmp_path, cell(4), version="one")
    assert decisions(tmp_path).grid_on(H200) is not None
    assert not cache.exists()
