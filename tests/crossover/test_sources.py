"""Which of several tables counts on a model of device, and by which margin."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from opgraft.crossover import rule, sources
from opgraft.crossover.models import Model
from opgraft.crossover.sources import Source
from tests.crossover.tables import cell, crossover, entry, table, write

H200, H100 = Model("NVIDIA H200", (9, 0)), Model("NVIDIA H100 80GB HBM3", (9, 0))
A100, B200, L40 = Model("NVIDIA A100", (8, 0)), Model("NVIDIA B200", (10, 0)), Model("L40", (8, 9))
GAUDI = Model("Gaudi")


def chosen(
    user_tables: Path, tmp_path: Path, users: list[Model], authors: list[Model], model: Model
) -> Source | None:
    """What counts on a model, where these have tables."""
    for folder, measured in ((user_tables, users), (tmp_path / "shipped", authors)):
        for each in measured:
            capability = each.capability and list(each.capability)
            content = table({"fast": entry(cell(4))}, each.name, capability=capability)
            write(folder, content, each.name)
    found = sources.find("fast", "user", crossover(tables=tmp_path / "shipped"))
    return sources.choose(found, model, "user")


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
