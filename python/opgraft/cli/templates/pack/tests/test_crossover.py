"""The tables decide: the pack as its users have it, with a table of the test's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft.crossover import models

import my_pack
from my_pack import overrides

#: What a table says of each cell; "-": it was not measured.
TIMES = (
    *("native_us", "override_us", "native_host_us", "plan_host_us", "python_host_us"),
    *("inductor_us", "opaque_us"),
)


@pytest.fixture
def pack_override() -> Iterator[opgraft.Override]:
    """The override as the pack registers it, with its crossover."""
    (override,) = my_pack.register()
    yield override
    override.remove()


@pytest.fixture
def tables(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table for this device, by which the kernel is faster from 64 rows on."""
    native_us = {32: 5, 64: 20, 128: 40}
    cells = [cell(rows, native_us=time, override_us=10) for rows, time in native_us.items()]
    columns = f"rows columns dtype : {' '.join(TIMES)}"
    features = {"rows": {"steps": 1}, "columns": {"steps": 1}, "dtype": "exact"}
    version = overrides.CROSSOVER.version
    entry = {"version": version, "features": features, "columns": columns, "cells": cells}
    model = models.of_device(torch.device(device))
    table = {
        "format": 2,
        "device": model.name,
        "capability": model.capability,
        "overrides": {"my_pack.softmax": entry},
    }
    # What is registered here is the user's, not the pack's. A table that others may write to would
    # be refused.
    folder = tmp_path / "user"
    folder.mkdir(mode=0o700)
    path = folder / models.file_name(model.name)
    path.write_text(json.dumps(table))
    path.chmod(0o600)
    monkeypatch.setenv("OPGRAFT_TABLES", str(tmp_path))


def cell(rows: int, **microseconds: float) -> str:
    times = {"native_host_us": 1, "python_host_us": 1, **microseconds}
    return f"{rows} 64 float32 : {' '.join(str(times.get(name, '-')) for name in TIMES)}"


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(("rows", "hits"), [(32, 0), (63, 0), (64, 1), (128, 1), (1024, 0)])
def test_a_table_decides(
    rows: int, hits: int, device: str, pack_override: opgraft.Override
) -> None:
    """Beyond the last row that was measured nothing says that the kernel is faster."""
    x = torch.randn(rows, 64, device=device)
    torch.testing.assert_close(torch.softmax(x, -1), torch.softmax(x.double(), -1).float())
    assert pack_override.hits == hits


def test_tune_measures_calls_that_the_kernel_takes(device: str, override: opgraft.Override) -> None:
    cell = {"rows": 2, "columns": 64, "dtype": torch.float32}
    for arguments in overrides.calls(torch.device(device), **cell):
        torch.ops.aten._softmax(*arguments)
    assert override.hits == 1


def test_verified_whatever_tables_say(pack_override: opgraft.Override) -> None:
    """`opgraft verify`, with a few of its samples."""
    report = opgraft.verify(name="my_pack.softmax", max_samples=20, opinfo=False)
    assert report.ok, report
