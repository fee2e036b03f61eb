"""Which of several tables counts on a model of device, and by which margin."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opgraft.crossover import rule, sources, tables
from opgraft.crossover.decisions import Decisions
from opgraft.crossover.declaration import Crossover
from opgraft.crossover.models import Model
from opgraft.crossover.rule import PLAN
from opgraft.crossover.sources import Found, Source
from opgraft.crossover.tables import BadTable
from tests.crossover.tables import cell, crossover, entry, line, table, write

H200, H100 = Model("NVIDIA H200", (9, 0)), Model("NVIDIA H100 80GB HBM3", (9, 0))
A100, B200, L40 = Model("NVIDIA A100", (8, 0)), Model("NVIDIA B200", (10, 0)), Model("L40", (8, 9))
GAUDI = Model("Gaudi")


def found_of(declared: Crossover) -> Found:
    """What all tables say of the override."""
    return sources.find("fast", declared, sources.folders("user", declared))


def chosen(
    user_tables: Path, tmp_path: Path, users: list[Model], authors: list[Model], model: Model
) -> Source | None:
    """What counts on a model, where these have tables."""
    for folder, measured in ((user_tables, users), (tmp_path / "shipped", authors)):
        for each in measured:
            capability = each.capability and list(each.capability)
            content = table({"fast": entry(cell(4))}, each.name, capability=capability)
            write(folder, content, each.name)
    found = found_of(crossover(tables=tmp_path / "shipped"))
    return next(iter(sources.choose(found, model, "user")), None)


@pytest.mark.parametrize(
    ("users", "authors", "owner", "measured_on", "margin"),
    [
        ([H200], [H200], "user", H200, rule.MARGIN),
        ([H100], [H200], "author", H200, rule.MARGIN),
        ([H100], [A100], "user", H100, rule.OTHER_DEVICE_MARGIN),
        ([A100], [H100], "author", H100, rule.OTHER_DEVICE_MARGIN),
        ([A100], [L40], "author", L40, rule.OTHER_ARCHITECTURE_MARGIN),
        ([GAUDI, L40], [B200], "user", L40, rule.OTHER_ARCHITECTURE_MARGIN),
    ],
)
def test_the_nearest_counts(
    user_tables: Path,
    tmp_path: Path,
    users: list[Model],
    authors: list[Model],
    owner: str,
    measured_on: Model,
    margin: float,
) -> None:
    source = chosen(user_tables, tmp_path, users, authors, H200)
    assert source is not None
    assert (source.owner, source.table.model, source.margin) == (owner, measured_on, margin)


def test_tables_behind_the_first_count_where_it_decides_nothing(
    user_tables: Path, tmp_path: Path
) -> None:
    chosen(user_tables, tmp_path, [H200, A100], [H200, H100, B200], H200)
    found = found_of(crossover(tables=tmp_path / "shipped"))
    kept = sources.choose(found, H200, "user")
    assert [(each.owner, each.table.model, each.margin) for each in kept] == [
        ("user", H200, rule.MARGIN),
        ("author", H200, rule.MARGIN),
        ("author", H100, rule.OTHER_DEVICE_MARGIN),
    ]


@pytest.mark.parametrize(
    ("says", "counting"),
    [
        ({"complete": True}, [H200]),
        ({"complete": False}, [H200, H100]),
        ({"complete": 1}, [H100]),
        ({"complete": True, "version": 2}, [H100]),
        ({"complete": True, "cells": ["damaged"]}, [H100]),
    ],
    ids=str,
)
def test_beside_a_complete_table_no_other_device_s_counts(
    user_tables: Path, tmp_path: Path, says: dict[str, Any], counting: list[Model]
) -> None:
    shipped = tmp_path / "shipped"
    for model, more in ((H200, says), (H100, {"complete": True})):
        content = table({"fast": entry(cell(4), **more)}, model.name, capability=[9, 0])
        write(shipped, content, model.name)
    declared = crossover(tables=shipped)
    in_force = Decisions("fast", "user", declared).in_force(H200)
    assert in_force is not None
    assert [source.table.model for source in in_force.sources] == counting
    chosen = sources.choose(found_of(declared), H200, "user")
    assert [source.table.model for source in chosen] == counting


def in_force_on_h200(shipped: Path, **declared: Any) -> list[tuple[str, Model]]:
    """Which tables count, as a call asks and as all tables are looked at."""
    crossed = crossover(tables=shipped, **declared)
    in_force = Decisions("fast", "user", crossed).in_force(H200)
    assert in_force is not None
    chosen = sources.choose(found_of(crossed), H200, "user")
    found, all_looked_at = (
        [(source.owner, source.table.model) for source in each]
        for each in (in_force.sources, chosen)
    )
    assert found == all_looked_at
    return found


def write_both(shipped: Path, h200: dict[str, Any], h100: dict[str, Any]) -> None:
    for model, part in ((H200, h200), (H100, h100)):
        write(shipped, table({"fast": part}, model.name, capability=[9, 0]), model.name)


def of_halves() -> dict[str, Any]:
    """A part with other buckets: two an octave."""
    return entry(cell(4), features={"rows": {"steps": 2}, "dtype": "exact"})


def test_a_complete_table_that_does_not_count_leaves_another_device_s_in_force(
    user_tables: Path, tmp_path: Path
) -> None:
    write(user_tables, table({"fast": of_halves()}, H200.name, capability=[9, 0]), H200.name)
    write_both(tmp_path, entry(cell(4), complete=True), of_halves())
    assert in_force_on_h200(tmp_path) == [("user", H200), ("author", H100)]


@pytest.mark.parametrize(
    ("says", "counting"),
    [
        ({"complete": True}, [H200, H100]),
        ({"complete": True, "complete_in_graphs": True}, [H200]),
        ({"complete_in_graphs": True}, [H200, H100]),
    ],
    ids=str,
)
def test_what_another_device_s_table_knows_of_graphs_counts_until_they_are_measured(
    user_tables: Path, tmp_path: Path, says: dict[str, bool], counting: list[Model]
) -> None:
    write_both(tmp_path, entry(cell(4), **says), entry(cell(4, inductor=9.0, opaque=5.0)))
    assert [model for _, model in in_force_on_h200(tmp_path)] == counting


@pytest.mark.parametrize(
    ("ranges", "is_complete"),
    [
        ({"rows": "1 64", "dtype": "float16 float32"}, True),
        ({"rows": "1 128", "dtype": "float32"}, True),
        ({"rows": "2 64", "dtype": "float32"}, False),
        ({"rows": "1 63", "dtype": "float32"}, False),
        ({"rows": "1 64", "dtype": "float16"}, False),
        ({"rows": "1 64"}, False),
        ({"rows": "1", "dtype": "float32"}, False),
        ({"rows": "1 x", "dtype": "float32"}, False),
        ({"rows": [1, 64], "dtype": "float32"}, False),
        ("1 64", False),
        (None, False),
    ],
    ids=str,
)
def test_a_table_is_complete_in_the_ranges_that_it_says(
    user_tables: Path, tmp_path: Path, ranges: object, is_complete: bool
) -> None:
    write_both(tmp_path, entry(cell(4), complete=True, ranges=ranges), entry(cell(4)))
    declared = {"rows": (1, 64), "dtype": (torch.float32,)}
    found = in_force_on_h200(tmp_path, ranges=declared)
    assert (len(found) == 1) == is_complete


def test_a_feature_that_was_exact_is_not_complete_between_its_values(
    user_tables: Path, tmp_path: Path
) -> None:
    exact = {"rows": "exact", "dtype": "exact"}
    ranges = {"rows": "1 64", "dtype": "float32"}
    part = entry(cell(1), cell(64), features=exact, complete=True, ranges=ranges)
    write_both(tmp_path, part, entry(cell(1), features=exact))
    declared = {"rows": (1, 64), "dtype": (torch.float32,)}
    assert len(in_force_on_h200(tmp_path, ranges=declared)) == 2
    assert len(in_force_on_h200(tmp_path, ranges=declared, exact=["rows"])) == 1


def test_a_table_with_other_buckets_than_the_first_does_not_count(
    user_tables: Path, tmp_path: Path
) -> None:
    write(user_tables, table({"fast": of_halves()}, H200.name, capability=[9, 0]), H200.name)
    chosen(user_tables, tmp_path, [], [H200], H200)
    found = found_of(crossover(tables=tmp_path / "shipped"))
    assert [each.owner for each in sources.choose(found, H200, "user")] == ["user"]


@pytest.mark.parametrize(
    ("measured", "model"), [([], H200), ([GAUDI], H200), ([H200], GAUDI), ([GAUDI], Model("Other"))]
)
def test_a_table_of_what_cannot_be_compared_does_not_count(
    user_tables: Path, tmp_path: Path, measured: list[Model], model: Model
) -> None:
    assert chosen(user_tables, tmp_path, measured, measured, model) is None


def test_another_device_s_table_is_told_in_one_line(
    user_tables: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "opgraft"):
        for _ in range(2):
            chosen(user_tables, tmp_path, [H100], [], H200)
    (line,) = [record.message for record in caplog.records]
    assert H100.name in line and H200.name in line and "opgraft tune" in line


def test_no_line_is_told_of_this_device_s_own(
    user_tables: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "opgraft"):
        chosen(user_tables, tmp_path, [H200], [], H200)
    assert not caplog.records


@pytest.mark.parametrize(("left_out", "lines"), [("fast", 0), (None, 1)])
def test_a_line_is_told_where_nobody_measured_this_device(
    user_tables: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, left_out: str, lines: int
) -> None:
    if left_out:
        content = table({"another": entry(cell(4))}, H200.name, capability=[9, 0])
        write(tmp_path / "shipped", content, H200.name)
    with caplog.at_level(logging.WARNING, "opgraft"):
        assert chosen(user_tables, tmp_path, [], [], H200) is None
    assert len(caplog.records) == lines


# ------------------------------------------------------------------ files that are none


def of_h200(**changes: Any) -> dict[str, Any]:
    return table({"fast": entry(cell(4))}, H200.name, capability=[9, 0]) | changes


def with_text(text: str | bytes) -> Callable[[Path], object]:
    content = text if isinstance(text, bytes) else text.encode()
    return lambda path: path.write_bytes(content)


def make_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def make_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 100 * 2**20)


def in_fast(key: str, text: str) -> Callable[[Path], object]:
    """A table whose override `fast` has, under a key, JSON that `json.dumps` would not make."""
    return with_text(
        json.dumps(of_h200(overrides={"fast": entry(cell(4)) | {key: "HERE"}})).replace(
            '"HERE"', text
        )
    )


DEEP, HUGE = "[" * 900 + "]" * 900, "9" * 5000
UNREADABLE: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": make_socket,
    "a link to nothing": lambda path: path.symlink_to("absent"),
    "a link to itself": lambda path: path.symlink_to(path),
    "100 MB": make_large,
    "empty": with_text(""),
    "no UTF-8": with_text(b'{"format": 1, "device": "\xff"}'),
    "UTF-16": with_text(json.dumps(of_h200()).encode("utf-16")),
    "a NUL": with_text(json.dumps(of_h200()) + "\0"),
    "deep": with_text("[" * 200_000),
    "deep in the table": with_text('{"format": ' + DEEP + "}"),
    "deep in the entry": in_fast("version", DEEP),
    "deep in a key that nobody reads": in_fast("more", "[" * 200_000 + "]" * 200_000),
    "deep in the cells": in_fast("cells", "[" + DEEP + "]"),
    "a huge format": with_text('{"format": ' + HUGE + "}"),
    "a huge version": in_fast("version", HUGE),
    "a huge at": in_fast("cells", json.dumps([line(cell(4) | {"at": [HUGE, "float32"]})])),
    "a huge cell": in_fast("cells", "[" + HUGE + "]"),
    "4000 digits": in_fast("cells", json.dumps([line(cell(4) | {"at": [HUGE[:4000], "half"]})])),
    "NaN": in_fast("cells", "[NaN]"),
    "an overflow": in_fast("cells", json.dumps([line(cell(4, native="1e999"))])),
    "a surrogate": in_fast("cells", json.dumps([line(cell(4, "HERE"))]).replace("HERE", "\\ud800")),
    "a key twice": in_fast("version", '1, "version": 1'),
    "a cell twice": in_fast("cells", json.dumps([line(cell(4)), line(cell(4))])),
    "a long format": with_text(json.dumps(of_h200(format="x" * 10**6))),
    "a format of lines": with_text(json.dumps(of_h200(format="\n\x1b[31mopgraft: all is well"))),
    "a device of lines": with_text(json.dumps(of_h200(device="NVIDIA\nH200"))),
    "a long device": with_text(json.dumps(of_h200(device=f"NVIDIA{' ' * 10**6}H200"))),
    "another device of lines": with_text(json.dumps(of_h200(device="A\n\x1b[31m100"))),
    "a date of lines": in_fast("measured", json.dumps({"date": "\n\x1b[31m2026"})),
    "a long date": in_fast("measured", json.dumps({"date": "2" * 10**6})),
    "a long dtype": in_fast("cells", json.dumps([line(cell(4, "x" * 10**6))])),
    "a dtype of lines": in_fast("cells", json.dumps([line(cell(4, "\u202e\x9b31m\u202e"))])),
    "a module as a dtype": in_fast("cells", json.dumps([line(cell(4, "_inductor"))])),
    "a long place": in_fast("cells", json.dumps([line(cell(4) | {"at": [4] * 10**5})])),
    "a long time": in_fast("cells", json.dumps([line(cell(4, native="1" * 10**6))])),
}


@pytest.mark.parametrize("whose", ["user", "author"])
@pytest.mark.parametrize("what", UNREADABLE)
def test_what_cannot_be_read_is_told_in_a_short_line_and_the_next_source_counts(
    what: str, whose: str, user_tables: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = tmp_path / "shipped"
    bad, good = (user_tables, shipped) if whose == "user" else (shipped, user_tables)
    write(good, of_h200(device=H100.name), H100.name)
    bad.mkdir(parents=True)
    UNREADABLE[what](bad / "nvidia_h200.json")
    with caplog.at_level(logging.WARNING, "opgraft"):
        found = found_of(crossover(tables=shipped))
    (line,) = [record.message for record in caplog.records]
    assert found.refused == (line,)
    assert line.startswith(f"the table {bad / 'nvidia_h200.json'} is not used: ")
    assert line.isprintable() and len(line) < len(str(bad)) + 800
    (source,) = sources.choose(found, H200, "user")
    assert source.table.model == H100


@pytest.mark.parametrize(
    "name",
    ["a\nb.json", "\x1b[31m.json", "\udcff.json", "x" * 250 + ".json"],
    ids=["lines", "colour", "no UTF-8", "long"],
)
def test_the_name_of_a_file_is_told_without_control_characters(
    name: str, user_tables: Path, tmp_path: Path
) -> None:
    user_tables.mkdir(parents=True)
    (user_tables / name).write_text("")
    (line,) = found_of(crossover()).refused
    assert line.isprintable() and ".json is not used: it is damaged" in line


@pytest.mark.parametrize(
    "folder", ["~no-such-user/tables", "/dev/null/tables", "/proc/1/fd/nothing"]
)
def test_a_folder_that_cannot_be_is_none(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPGRAFT_TABLES", folder)
    found = found_of(crossover(tables=folder))
    assert found.user == found.author == ()
    assert ["tables are not used" in line for line in found.refused] == [True, True] * (
        "~" in folder
    )


REPLACEMENTS = [
    b"",
    b"\0",
    b"\xff",
    b"\xc3",
    b'"',
    b"\\",
    b"{",
    b"]",
    b",",
    b":",
    b" ",
    b"-",
    b"e",
    b"0",
    b"9",
]
ROWS = (4, 64, 1024)


def test_a_damaged_byte_is_an_error_or_changes_one_cell(tmp_path: Path) -> None:
    """Whatever a byte becomes, nothing else is raised, and no other cell is decided otherwise."""
    path = tmp_path / "nvidia_h200.json"
    cells = [cell(4), cell(64), cell(1024, override=20.0)]
    content = json.dumps(of_h200(overrides={"fast": entry(*cells)})).encode()

    def taken(damaged: bytes) -> list[bool] | None:
        path.write_bytes(damaged)
        try:
            found = tables.entry_of(tables.read(path), "fast", crossover())
        except BadTable as error:
            assert str(error).isprintable() and len(str(error)) < 800
            return None
        if found is None:  # its name is damaged
            return None
        grid = rule.grid_of([(found, rule.MARGIN)])
        return [grid.takes([rows, torch.float32], PLAN) for rows in ROWS]

    expected = taken(content)
    assert expected == [True, True, False]
    read = 0
    for place, byte in enumerate(content):
        flipped = [bytes([byte ^ 1 << bit]) for bit in range(8)]
        for new in (*REPLACEMENTS, *flipped, bytes([byte, byte])):
            found = taken(content[:place] + new + content[place + 1 :])
            if found is not None:
                read += 1
                others = [a != b for a, b in zip(found, expected, strict=True)]
                assert sum(others) <= 1, (place, new)
    assert read > 100


@pytest.mark.parametrize("margin", ["MARGIN", "HOST_MARGIN"])
def test_digests_are_of_the_margins_too(
    margin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers' caches and other ranks compare them: another margin decides otherwise."""
    content = table({"fast": entry(cell(4))}, H200.name, capability=[9, 0])
    write(tmp_path, content, H200.name)

    def digests() -> tuple[str, str]:
        found = Decisions("fast", "user", crossover(tables=tmp_path))
        in_force = found.in_force(H200)
        assert in_force is not None
        return found.digest, in_force.digest

    before = digests()
    monkeypatch.setattr(rule, margin, 0.2)
    assert not {*before} & {*digests()}
